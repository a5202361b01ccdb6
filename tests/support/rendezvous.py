"""Clients of a rendezvous server, and worlds of them in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from aiodist.rendezvous.client import Notice, RendezvousClient
from aiodist.rendezvous.messages import PROTOCOL_VERSION, Hello, Welcome, decode_answer, encode
from aiodist.rendezvous.server import RendezvousServer

TOKEN = "a-token"


def client(server: RendezvousServer | str, job: str = "X", **options: Any) -> RendezvousClient:
    address = server if isinstance(server, str) else server.address
    return RendezvousClient(address, **{"job": job, "token": TOKEN, "timeout": 10.0, **options})


def info(pid: int = 1) -> dict[str, Any]:
    return {"pid": pid, "host": "h", "address": "a"}


@asynccontextmanager
async def world(server: RendezvousServer, size: int, job: str = "X", **options: Any) -> AsyncIterator[list[RendezvousClient]]:
    """Members of a formed world, by rank."""
    members = [client(server, job, **options) for _ in range(size)]
    try:
        await asyncio.gather(*(member.connect() for member in members))
        await asyncio.gather(*(member.join(world_size=size, rank=rank, info=info(rank)) for rank, member in enumerate(members)))
        yield members
    finally:
        await asyncio.gather(*(member.aclose() for member in members))


class Notices:
    """Collects what a client is told."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Notice] = asyncio.Queue()

    def __call__(self, notice: Notice) -> None:
        self._queue.put_nowait(notice)

    async def next(self) -> Notice:
        return await asyncio.wait_for(self._queue.get(), 10)


async def until_forming(server: RendezvousServer, count: int, job: str = "X") -> None:
    """Wait until so many members wait for the job's world."""
    await _until(server, job, lambda shown: len(shown["forming"]["members"]) == count)


async def until_away(server: RendezvousServer, count: int, job: str = "X") -> None:
    """Wait until so many members of the job's first world are away."""
    await _until(server, job, lambda shown: [one["state"] for one in shown["worlds"][0]["members"]].count("away") == count)


async def _until(server: RendezvousServer, job: str, done: Callable[[Any], bool]) -> None:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        while True:
            async with session.get(f"{server.address}/api/v1/jobs/{job}") as response:
                if response.status == 200 and done(await response.json()):
                    return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def raw(server: RendezvousServer, *, hello: bool = True) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """A member's connection without the client."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.ws_connect(server.address + "/api/v1/members", timeout=aiohttp.ClientWSTimeout(ws_close=1.0)) as ws,
    ):
        if hello:
            await ws.send_bytes(encode(Hello(PROTOCOL_VERSION)))
            assert isinstance(decode_answer((await ws.receive()).data), Welcome)
        yield ws
