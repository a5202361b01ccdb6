"""Rendezvous servers that are killed and started again, and a road to them that breaks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Self

from aiodist.rendezvous.sockets import parse_address
from support.rendezvous import TOKEN


class Service:
    """``aiodist rendezvous`` as a process, always on the same port."""

    def __init__(self, state: str | None = None) -> None:
        self.state = state
        self.address = ""
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> Self:
        port = parse_address(self.address).port if self.address else 0
        options = ["--port", str(port), "--token", TOKEN, *(["--state", self.state] if self.state else [])]
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "aiodist", "rendezvous", *options, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
        )
        assert process.stdout is not None
        self.address = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()
        assert self.address.startswith("http://"), "the server did not start"
        return self

    async def kill(self) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.kill()


class Road:
    """Relays connections to a server until they are cut; what the server says may be swallowed, and the road may be closed."""

    def __init__(self, server: str) -> None:
        self.address = ""
        self.swallow = False
        self.closed = False
        self._to = parse_address(server)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        """Break every connection, without a word."""
        for writer in self._writers:
            writer.transport.abort()
        self.swallow = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.closed:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection(self._to.host, self._to.port)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, back}
        self._writers |= ends
        try:
            await asyncio.gather(self._relay(reader, back, answers=False), self._relay(there, writer, answers=True))
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(1 << 16):
                if not (answers and self.swallow):
                    writer.write(piece)
        writer.transport.abort()


@asynccontextmanager
async def road_to(server: str) -> AsyncIterator[Road]:
    road = Road(server)
    async with await asyncio.start_server(road.serve, "127.0.0.1", 0) as listener:
        road.address = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        try:
            yield road
        finally:
            road.cut()
            await asyncio.sleep(0.05)
