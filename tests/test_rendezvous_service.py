"""The rendezvous server as others meet it: addresses, strangers on the port, the token, wrong messages, limits."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.rendezvous import TOKEN, Notices, client, info, raw, world

from aiodist.errors import RendezvousError
from aiodist.rendezvous import link
from aiodist.rendezvous.interfaces import is_loopback_address
from aiodist.rendezvous.job import Limits
from aiodist.rendezvous.messages import PROTOCOL_VERSION, Get, Hello, Join, Refused, Set, decode_answer, encode
from aiodist.rendezvous.server import RendezvousServer
from aiodist.rendezvous.sockets import parse_address

pytestmark = pytest.mark.timeout(60)

HAS_IPV6 = socket.has_ipv6 and Path("/proc/net/if_inet6").exists() and bool(Path("/proc/net/if_inet6").read_text())

# -- addresses -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("http://127.0.0.1:1234", "http://127.0.0.1:1234"),
        ("https://Some-Host.example:1/", "https://some-host.example:1"),
        ("node_1:29511", "http://node_1:29511"),
        ("tcp://[::1]:29511", "http://[::1]:29511"),
        ("[fe80::1%eth0]:5", "http://[fe80::1%eth0]:5"),
    ],
)
def test_addresses_that_are_understood(text: str, canonical: str) -> None:
    assert str(parse_address(text)) == canonical


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("fd00::1:29511", "http://[fd00::1]:29511"),
        ("https://fd00::1:29511", "https://[fd00::1]:29511"),
        ("::1", "http://[::1]:PORT"),
        ("1:2:3", "in brackets"),
        ("http://host", "no port"),
        ("http://host:0", "no port"),
        ("http://host:70000", "http://host:port"),
        ("ftp://host:1", "http or https"),
        ("http://host:1/path", "only a host and a port"),
        ("http://user:secret@host:1", "only a host and a port"),
        ("http://[nonsense]:1", "http"),
        ("http://ho st:1", "neither a host name"),
        ("", "only a host and a port"),
    ],
)
def test_addresses_that_are_not(text: str, shown: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_address(text)
    assert shown in str(caught.value)


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_ipv6_with_and_without_brackets(host: str) -> None:
    async with RendezvousServer(host, 0) as server:
        assert server.address.startswith("http://[::1]:")
        async with client(server, token=None) as me:
            assert (await me.join(world_size=1, rank=None, info=info())).rank == 0


@pytest.mark.parametrize("first", ["::1", "127.0.0.2"])
async def test_all_addresses_of_a_name_are_tried(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def two_addresses(host: str, port: int, *args: Any, **options: Any) -> list[Any]:
        if host != "two.example":
            return real(host, port, *args, **options)
        return [*real(first, port, type=socket.SOCK_STREAM), *real("127.0.0.1", port, type=socket.SOCK_STREAM)]

    async with RendezvousServer() as server:
        port = parse_address(server.address).port
        with socket.socket() as full, socket.socket() as waiting, socket.socket() as hopeless:
            # The first address refuses, or says nothing: its queue is full of connections that nobody accepts.
            full.bind(("127.0.0.2", port))
            full.listen(0)
            for sock in (waiting, hopeless):
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.2", port))
            monkeypatch.setattr(socket, "getaddrinfo", two_addresses)
            async with client(f"http://two.example:{port}", token=None, timeout=4.0) as me:  # A try that hangs takes 5 s.
                await me.join(world_size=1, rank=None, info=info())
                assert me.local_address == "127.0.0.1"


async def test_a_server_on_all_addresses_does_not_tell_a_name_that_means_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo
    meaning = {"debian.example": "127.0.1.1", "good.example": "203.0.113.7"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *args, **options: real(meaning.get(host, host), *args, **options))
    for name in meaning:
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        async with RendezvousServer("0.0.0.0", token=TOKEN) as server:
            told = parse_address(server.address).host
            assert (told == name) == (name == "good.example") and not is_loopback_address(told)


async def test_a_busy_port_is_an_error_that_names_it() -> None:
    async with RendezvousServer() as first:
        port = parse_address(first.address).port
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}: Address already in use") as caught:
            await RendezvousServer(port=port).start()
        assert caught.value.errno == errno.EADDRINUSE
    async with RendezvousServer(port=port) as again:  # It is free again at once.
        assert again.address == first.address


async def test_a_server_that_comes_up_late_is_waited_for() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port: int = reserved.getsockname()[1]
    me = client(f"http://127.0.0.1:{port}")
    connecting = asyncio.create_task(me.connect())
    await asyncio.sleep(0.3)
    async with RendezvousServer(port=port, token=TOKEN):
        await connecting
        await me.aclose()


async def test_a_server_that_never_comes_up_is_named_at_the_timeout() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # Bound, and never listening: nobody else gets the port.
        address = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(RendezvousError, match=f"no rendezvous answered at {address} within 0.3 s: Connection refused"):
            await client(address, timeout=0.3).connect()


# -- strangers -------------------------------------------------------------------------------------------------------------------

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def _hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    pass


async def _banner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-stranger\r\n")
    await reader.read()


async def _endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while True:
            writer.write(b"x" * 1000)
            await writer.drain()


async def _slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        for byte in b"HTTP/1.1 101 Switching Protocols\r\n" + b"x" * 10000:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)
            await writer.drain()


async def _web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError):  # the second time it is asked whether it speaks TLS
        await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
    await reader.read()


@pytest.mark.parametrize(
    ("talk", "found"),
    [
        (_silent, "it accepted the connection and gave no answer"),
        (_slow, "it accepted the connection and gave no answer"),
        (_hang_up, "it closes the connection without an answer"),
        (_banner, "it does not speak HTTP"),
        (_endless, "it does not speak HTTP"),
        (_web, "it answered like another HTTP server (status 404)"),
    ],
)
async def test_a_stranger_on_the_port_is_recognised_and_not_waited_on(talk: Talk, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(event := asyncio.Event())
        await talk(reader, writer)
        writer.transport.abort()
        event.set()

    for name, seconds in (("_ANSWER_S", 0.3), ("_CONNECT_S", 0.5), ("_LOOK_UP_S", 0.5)):
        monkeypatch.setattr(link, name, seconds)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as stranger:
        address = f"http://127.0.0.1:{stranger.sockets[0].getsockname()[1]}"
        with pytest.raises(RendezvousError, match=f"what listens at {address} is no aiodist rendezvous: {re.escape(found)}"):
            await asyncio.wait_for(client(address, timeout=300.0).connect(), 20)
        for event in ended:
            await event.wait()


async def test_a_name_server_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(link, "_look_up", lambda *arguments: answered.wait(30) and [])
    monkeypatch.setattr(link, "_LOOK_UP_S", 0.2)
    try:
        with pytest.raises(
            RendezvousError, match=r"no rendezvous answered at http://h\.example:1 within 1 s: looking 'h\.example' up took"
        ):
            await client("http://h.example:1", timeout=1.0).connect()
    finally:
        answered.set()


@pytest.mark.parametrize("greeting", ["text", "nothing"])
async def test_a_strange_websocket_server_is_recognised(greeting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(request: web.BaseRequest) -> web.StreamResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        if greeting == "text":
            await ws.send_str("hello")
        await ws.receive()
        await ws.receive()
        return ws

    monkeypatch.setattr(link, "_ANSWER_S", 0.3)
    runner = web.ServerRunner(web.Server(serve))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        with pytest.raises(RendezvousError, match="is no aiodist rendezvous: it did not return our hello"):
            await client(f"http://127.0.0.1:{runner.addresses[0][1]}", timeout=300.0).connect()
    finally:
        await runner.cleanup()


async def test_only_the_token_opens_anything_but_healthz() -> None:
    async with RendezvousServer(token=TOKEN) as server:
        for wrong in (None, "another", TOKEN + "x"):
            with pytest.raises(RendezvousError, match=f"{server.address} refused the connection: .*token"):
                await client(server, token=wrong).connect()
        async with world(server, 2), aiohttp.ClientSession() as session:
            for path, headers, status in (
                ("/healthz", {}, 200),
                ("/api/v1/jobs/X", {}, 401),
                ("/api/v1/jobs/X", {"Authorization": f"Basic {TOKEN}"}, 401),
                ("/api/v1/jobs/X", {"Authorization": "Bearer \xff"}, 401),
                ("/api/v1/members", {}, 401),
                ("/nothing", {}, 401),
                ("/api/v1/jobs/X", {"Authorization": f"Bearer {TOKEN}"}, 200),
                ("/api/v1/jobs/Y", {"Authorization": f"Bearer {TOKEN}"}, 404),
                ("/api/v1/members", {"Authorization": f"Bearer {TOKEN}"}, 426),
                ("/api/v1/members", {"Authorization": f"Bearer {TOKEN}", "Origin": "http://evil.example"}, 403),
            ):
                async with session.get(server.address + path, headers=headers) as response:
                    assert response.status == status, path
                    body = await response.json()
                    assert ("error" in body) == (status != 200)
                    if path.endswith("/X") and status == 200:
                        assert [member["pid"] for member in body["worlds"][0]["members"]] == [0, 1]


async def test_other_hosts_are_let_in_with_a_token_only() -> None:
    for host in ("0.0.0.0", "::") if HAS_IPV6 else ("0.0.0.0",):
        with pytest.raises(ValueError, match="token"):
            await RendezvousServer(host).start()
    async with RendezvousServer("0.0.0.0", token=TOKEN), RendezvousServer("0.0.0.0", insecure=True):
        pass
    with pytest.raises(ValueError, match="token"):
        RendezvousServer(token="")


@pytest.mark.parametrize(
    ("frame", "hello", "says"),
    [
        (b"garbage", True, "no message"),
        (b"", True, "no message"),
        (b"\x91" * 5000, True, "no message"),
        (b"\x81\xa4type\xa7unknown", True, "unknown"),
        ("text", True, "binary"),
        (encode(Hello(PROTOCOL_VERSION + 1)), False, f"protocol version {PROTOCOL_VERSION}, the client {PROTOCOL_VERSION + 1}"),
        (encode(Get(1, "k", 1.0)), False, "first message"),
    ],
)
async def test_a_wrong_message_is_refused_clearly_and_disturbs_nobody_else(frame: bytes | str, hello: bool, says: str) -> None:
    async with RendezvousServer(token=TOKEN) as server, world(server, 2) as (a, b):
        async with raw(server, hello=hello) as ws:
            await (ws.send_str(frame) if isinstance(frame, str) else ws.send_bytes(frame))
            answer = decode_answer((await ws.receive()).data)
            assert isinstance(answer, Refused) and says in answer.text
            assert (await ws.receive()).type is aiohttp.WSMsgType.CLOSE
        await asyncio.gather(a.barrier("b"), b.barrier("b"))


async def test_a_frame_past_the_limit_ends_its_connection_only() -> None:
    async with RendezvousServer(token=TOKEN) as server, world(server, 2) as (a, b):
        async with raw(server) as ws:
            with suppress(ConnectionError):  # The server may hang up before it has read it all.
                await ws.send_bytes(bytes(4 << 20))
            assert (await ws.receive()).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
        await asyncio.gather(a.barrier("b"), b.barrier("b"))


async def test_a_member_that_does_not_read_is_dropped() -> None:
    notices = Notices()
    async with RendezvousServer(token=TOKEN, limits=Limits(outgoing_nbytes=4 << 20)) as server, client(server, on_notice=notices) as me:
        join = asyncio.create_task(me.join(world_size=2, rank=0, info=info()))
        async with raw(server) as ws:
            await ws.send_bytes(encode(Join(1, "X", "the-deaf-one", 2, 1, info(), 10)))
            await join
            await ws.send_bytes(encode(Set(2, "k", bytes(1 << 20))))
            with suppress(ConnectionError):
                for number in range(3, 60):
                    await ws.send_bytes(encode(Get(number, "k", 10)))
            assert (await notices.next()).kind == "lost"


async def test_connections_are_limited() -> None:
    async with RendezvousServer(token=TOKEN, limits=Limits(connections=1)) as server, client(server):
        with pytest.raises(RendezvousError, match="as many connections as it may have"):
            await client(server).connect()
