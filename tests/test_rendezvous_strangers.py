"""Connections that cost the rendezvous something and bring nothing: slow, half open, deaf, or many."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest
from support.rendezvous import TOKEN, client, info, raw, world

from aiodist.rendezvous import http, lobby
from aiodist.rendezvous import server as server_module
from aiodist.rendezvous.job import Limits
from aiodist.rendezvous.messages import Beat, Join, encode
from aiodist.rendezvous.server import RendezvousServer

pytestmark = pytest.mark.timeout(60)

ASK = f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()


@asynccontextmanager
async def connection(server: RendezvousServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.address.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()


async def metric(server: RendezvousServer, name: str) -> float:
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session,
        session.get(f"{server.address}/metrics") as answer,
    ):
        found = re.search(rf"^aiodist_rendezvous_{name} (\S+)$", await answer.text(), re.MULTILINE)
        assert found is not None
        return float(found[1])


async def ended(reader: asyncio.StreamReader) -> None:
    """Wait until the server has closed the connection."""
    with suppress(ConnectionResetError):
        async with asyncio.timeout(20):
            while await reader.read(1 << 20):
                pass


@pytest.mark.parametrize("kind", ["silent", "trickling", "idle after an answer"])
async def test_a_connection_without_a_request_is_closed_and_members_stay(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEAD_S", 0.3)
    async with RendezvousServer(token=TOKEN) as server, world(server, 2) as (a, b), connection(server) as (reader, writer):
        if kind == "idle after an answer":
            writer.write(ASK)
            assert b"200 OK" in await asyncio.wait_for(reader.readline(), 20)
        closed = asyncio.create_task(ended(reader))
        while not closed.done():
            if kind == "trickling":
                writer.write(b"G" if not writer.is_closing() else b"")
            await asyncio.wait((closed,), timeout=0.02)
        await closed
        await asyncio.gather(a.barrier("b"), b.barrier("b"))  # theirs are older than that, too


async def test_when_too_many_wait_with_nothing_to_ask_the_oldest_is_dropped_and_who_asks_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lobby, "_MOST", 3)
    async with RendezvousServer(token=TOKEN) as server, world(server, 2) as (a, b), connection(server) as (oldest, _):
        async with connection(server) as (second, writer), connection(server), connection(server):
            await ended(oldest)
            writer.write(ASK)
            assert b"200 OK" in await asyncio.wait_for(second.readline(), 20)
            async with world(server, 2, "Y") as others:
                await asyncio.gather(*(one.barrier("b") for one in others))
        await asyncio.gather(a.barrier("b"), b.barrier("b"))


async def test_connections_that_have_ended_take_no_room() -> None:
    async with RendezvousServer(token=TOKEN) as server, aiohttp.ClientSession() as session:
        for _ in range(600):
            async with session.get(f"{server.address}/healthz", headers={"Connection": "close"}) as answer:
                assert answer.status == 200
        held = server._http.lobby._here
        assert len(held) <= 300


@pytest.mark.parametrize("beating", [False, True])
async def test_a_member_that_never_joins_is_dropped_and_one_that_has_joined_and_is_silent_stays(beating: bool) -> None:
    async with RendezvousServer(token=TOKEN, limits=Limits(unjoined_s=0.4)) as server, raw(server) as joined, raw(server) as idle:
        await joined.send_bytes(encode(Join(1, "X", "the-silent-one", 1, 0, info(), 10)))
        reading = asyncio.create_task(idle.receive())
        while not reading.done():
            if beating:
                with suppress(ConnectionError):
                    await idle.send_bytes(encode(Beat()))
            await asyncio.wait((reading,), timeout=0.05)
        assert (await reading).type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.ERROR)
        assert await metric(server, 'refused_total{reason="unjoined"}') == 1
        assert await metric(server, "connections") == 1
        assert await metric(server, 'members{state="active"}') == 1


async def test_a_client_that_joins_late_is_not_hurt_by_that() -> None:
    async with RendezvousServer(token=TOKEN, limits=Limits(unjoined_s=0.1)) as server, client(server) as me:
        await asyncio.sleep(0.5)
        assert (await me.join(world_size=1, rank=0, info=info())).rank == 0
        await me.set("key", b"value")


async def test_a_viewer_that_does_not_read_is_dropped_and_holds_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = 0

    def draw(self: object, query: object, now: float) -> bytes:
        nonlocal drawn
        drawn += 1
        return b"%d" % drawn + bytes(1 << 20)

    monkeypatch.setattr(http.HttpApi, "_draw", draw)
    for name, value in (("_FRESH_S", 0.0), ("_PERIOD_S", 0.01), ("_SLOW_S", 0.3)):
        monkeypatch.setattr(http, name, value)
    async with RendezvousServer(token=TOKEN) as server, world(server, 2) as (a, b):
        with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))) as deaf:
            deaf.sendall(ASK.replace(b"/metrics", b"/api/v1/events"))
            async with asyncio.timeout(20):
                while not drawn or await metric(server, "watchers"):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert drawn < 20  # it was not written to without end
            deaf.settimeout(20)
            received = 0
            while piece := await asyncio.to_thread(deaf.recv, 1 << 20):
                received += len(piece)
            assert received < drawn << 20  # what waited for it was thrown away
        await asyncio.gather(a.barrier("b"), b.barrier("b"))


async def test_a_body_is_never_decompressed() -> None:
    """A few kilobytes could become gigabytes, without a token."""
    async with RendezvousServer(token=TOKEN) as server, connection(server) as (reader, writer):
        head = "GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\n"
        for _ in range(2):  # a server that looks at the body of the first hangs up
            writer.write(f"{head}bogus".encode())
            answer = await asyncio.wait_for(reader.readuntil(b"}"), 20)
            assert answer.startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    "head",
    [b"GET /" + b"a" * 40_000, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000, b"GET / HTTP/1.1\r\na: " + b"b" * 40_000],
    ids=["address", "headers", "header"],
)
async def test_a_head_past_the_limits_is_refused(head: bytes) -> None:
    async with RendezvousServer(token=TOKEN) as server, connection(server) as (reader, writer):
        writer.write(head)
        assert (await asyncio.wait_for(reader.readline(), 20)).split()[1] == b"400"
        await ended(reader)


async def test_what_members_say_forges_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiodist.rendezvous")
    evil = "h\n2026-01-01 CRITICAL all is lost\x1b[2J"
    async with RendezvousServer(token=TOKEN) as server, client(server) as me:
        await me.join(world_size=1, rank=0, info={"pid": 1, "host": evil})
        await me.leave(f"ValueError: {evil}")
    assert "h\\n2026-01-01 CRITICAL all is lost\\x1b[2J" in caplog.text
    assert not [record for record in caplog.records if not record.getMessage().isprintable()]


async def test_a_token_that_travels_in_the_clear_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async with RendezvousServer("0.0.0.0", token=TOKEN):
        assert "--tls-cert" in caplog.text
    caplog.clear()
    async with RendezvousServer(token=TOKEN):
        assert not caplog.records
