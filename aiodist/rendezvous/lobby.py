"""Open connections that are not in the middle of a request: anybody may have them, without a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from aiohttp import web

__all__ = ["HEAD_S", "Lobby"]

HEAD_S: Final = 15.0
"""Within so long a connection has sent the head of its first or next request, or is closed: aiohttp sees to that."""

_MOST: Final = 8192
_SWEEP: Final = 256


class Lobby:
    """Where connections wait for their requests, and for their answers to be read.

    When it is full, the one that has been there for longest is dropped: so a stranger who holds thousands of connections open keeps
    nobody out who asks for something at once.
    """

    def __init__(self) -> None:
        self._here: dict[web.RequestHandler, None] = {}
        self._sweep_at = _SWEEP
        self._connections: Callable[[], list[web.RequestHandler]] = list

    def factory(self, server: web.Server) -> Callable[[], web.RequestHandler]:
        """Return what makes the protocols of new connections of this server."""
        self._connections = lambda: server.connections

        def make() -> web.RequestHandler:
            protocol = server()
            self.enter(protocol)
            return protocol

        return make

    def enter(self, protocol: web.RequestHandler) -> None:
        """A connection is new, or its request was dealt with."""
        self._here[protocol] = None
        if len(self._here) >= self._sweep_at:  # those that have ended are still among them
            open_ = set(self._connections())
            self._here = {one: None for one in self._here if one in open_ or one is protocol}
            self._sweep_at = max(_SWEEP, 2 * len(self._here))
        while len(self._here) > _MOST:
            oldest = next(iter(self._here))
            del self._here[oldest]
            if oldest.transport is not None:
                oldest.transport.abort()

    def leave(self, protocol: web.RequestHandler) -> None:
        """A request has come."""
        self._here.pop(protocol, None)
