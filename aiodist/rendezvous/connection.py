"""The server's end of a member's WebSocket."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Final

from aiohttp import WSMsgType, web

from aiodist.rendezvous.messages import PROTOCOL_VERSION, Hello, Refused
from aiodist.rendezvous.metrics import Open

__all__ = ["Connection", "check_hello", "why_ended"]

_FRAME_NBYTES: Final = 128
"""What a frame that queues costs besides its bytes."""
_log = logging.getLogger("aiodist.rendezvous")


class Connection:
    """One member's WebSocket, with the frames that queue for it."""

    def __init__(self, number: int, request: web.Request, ws: web.WebSocketResponse, max_nbytes: int) -> None:
        self.number = number
        self.ws = ws
        self.open: Open = {}
        self.idle_since = asyncio.get_running_loop().time()
        """Since when its connection belongs to no member, as far as was looked."""
        self._request = request
        self._max_nbytes = max_nbytes
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._nbytes = 0

    def post(self, frame: bytes) -> None:
        """Queue a frame; a peer that lets too much queue up is dropped."""
        self._nbytes += len(frame) + _FRAME_NBYTES
        if self._nbytes <= self._max_nbytes:
            self._queue.put_nowait(frame)
        elif self._request.transport is not None:
            _log.warning("a member does not read: its connection is dropped with %d bytes waiting", self._nbytes)
            self.abort()

    def abort(self) -> None:
        """End the connection at once."""
        if self._request.transport is not None:
            self._request.transport.abort()

    def finish(self) -> None:
        """Nothing comes after what is queued."""
        self._queue.put_nowait(None)

    async def write(self) -> None:
        """Send what is queued until `finish`."""
        with suppress(ConnectionError):
            while (frame := await self._queue.get()) is not None:
                await self.ws.send_bytes(frame)
                self._nbytes -= len(frame) + _FRAME_NBYTES


def check_hello(request: object) -> Refused | None:
    """Why a connection's first message is refused, None if it is not."""
    if not isinstance(request, Hello):
        return Refused(0, "state", "the first message must be a hello")
    if request.version != PROTOCOL_VERSION:
        return Refused(0, "version", f"this server speaks protocol version {PROTOCOL_VERSION}, the client {request.version}")
    return None


def why_ended(kind: WSMsgType, ws: web.WebSocketResponse) -> str:
    """How a connection ended, by its last frame."""
    if kind is WSMsgType.CLOSE:
        return "it closed its connection without a goodbye"
    error = ws.exception()
    if kind is WSMsgType.ERROR and error is not None:
        return f"its connection failed: {error}"
    return "its connection to the rendezvous ended"
