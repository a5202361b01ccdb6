"""Whatever a WebSocket brings, the server refuses it or serves it, keeps nothing of it, and serves the others meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.rendezvous import TOKEN, Notices, client, info

from aiodist.rendezvous.client import RendezvousClient
from aiodist.rendezvous.job import Limits
from aiodist.rendezvous.messages import MEMBERS_PATH, PROTOCOL_VERSION, Hello, Join, Refused, Request, decode_answer, encode
from aiodist.rendezvous.server import RendezvousServer

pytestmark = pytest.mark.timeout(120)

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
UPGRADE: Final = (
    f"GET {MEMBERS_PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
).encode()
HELLO: Final = encode(Hello(PROTOCOL_VERSION))
JOIN: Final = encode(Join(9, "Y", "member-1", 1, 0, info(), 1.0))

# -- what is sent ------------------------------------------------------------------------------------------------------------------

numbers = st.sampled_from([-(2**63), -1, 0, 1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**64 - 1]) | st.floats()
odd = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
# Values that a field may well have: few, so that requests meet.
FIELDS: Final[dict[str, st.SearchStrategy[Any]]] = {
    "version": st.sampled_from([PROTOCOL_VERSION, PROTOCOL_VERSION + 1]),
    "id": st.integers(1, 3),
    "job": st.sampled_from(["X", "Y", "Z", "no such name"]),
    "member": st.sampled_from(["member-1", "member-2"]),
    "world_size": st.sampled_from([1, 1, 2, 0, 2**31]),
    "rank": st.none() | st.integers(-1, 2),
    "info": st.just({"pid": 1}) | st.dictionaries(st.text(max_size=5), odd, max_size=3),
    "timeout": st.sampled_from([0.0, 0.01, 1e9]),
    "after": st.integers(0, 2),
    "spent": st.just(0.0),
    "generation": st.integers(1, 2),
    "pending": st.lists(st.integers(1, 3), max_size=3),
    "ids": st.lists(st.integers(1, 3), max_size=3),
    "key": st.sampled_from(["a", "b", "x" * 4096]),
    "name": st.sampled_from(["a", "b"]),
    "value": st.binary(max_size=5),
    "amount": st.integers(-2, 2),
    "expected": st.none() | st.binary(max_size=2),
    "prefix": st.sampled_from(["", "a"]),
    "members": st.lists(st.integers(0, 2), max_size=3),
    "progress": st.just([{"group": "world", "seq": 1, "collective": "barrier", "site": "f:1"}]),
    "reason": st.none() | st.text(max_size=10),
}
KINDS: Final = {kind.__name__.lower(): kind.__struct_fields__ for kind in Request.__args__}
STRANGE: Final = {"unknown": ("id",), "welcome": ("version",), "": ()}


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """A request; once in a while it is of no known kind, or a field of it is odd or missing."""
    strange = draw(st.integers(0, 9))
    kinds = STRANGE if strange == 1 else KINDS
    kind = draw(st.sampled_from(sorted(kinds)))
    fields = {name: draw(FIELDS.get(name, odd)) for name in kinds[kind]}
    if fields and strange == 2:
        spoilt = draw(st.sampled_from(sorted(fields)))
        fields[spoilt] = draw(odd)
        if draw(st.booleans()):
            del fields[spoilt]
    return msgspec.msgpack.encode({"type": kind, **fields})


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A request some of whose bytes are others, more or fewer."""
    message = bytearray(draw(messages()))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(message)))
        message[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return bytes(message)


payloads = messages() | messages() | mutated() | st.binary(max_size=50) | st.sampled_from([b"", b"\x91" * 5000, bytes(200_000)])


def frame(opcode: int, payload: bytes, *, head: int = 0x80, masked: bool = True) -> bytes:
    """A WebSocket frame, with bits as they are given: the mask is of zeros."""
    mask = 0x80 if masked else 0
    size = len(payload)
    if size < 126:
        length = bytes([mask | size])
    else:
        length = bytes([mask | 126]) + size.to_bytes(2, "big") if size < 65536 else bytes([mask | 127]) + size.to_bytes(8, "big")
    return bytes([head | opcode]) + length + (bytes(4) if masked else b"") + payload


frames = st.one_of(
    st.builds(frame, st.just(BINARY), payloads),
    st.builds(frame, st.just(TEXT), payloads),
    st.builds(frame, st.sampled_from([PING, PONG]), st.binary(max_size=125)),
    st.builds(frame, st.just(CLOSE), st.binary(max_size=10)),
    st.builds(frame, st.integers(0, 15), payloads, head=st.sampled_from([0, 0x80, 0xC0, 0xF0]), masked=st.booleans()),
    st.just(b"\x82\xff" + b"\x7f" * 8),  # what follows has 2^63 bytes
    st.binary(max_size=10),
)


@st.composite
def talks(draw: st.DrawFn) -> bytes:
    """What one connection brings: mostly a member's talk, with something else behind it."""
    begin = draw(st.sampled_from([[HELLO, JOIN], [HELLO, JOIN], [HELLO], [encode(Hello(PROTOCOL_VERSION + 1))], []]))
    talk = [frame(BINARY, one) for one in [*begin, *draw(st.lists(messages(), max_size=6))]]
    return b"".join(talk + draw(st.lists(frames, max_size=3)))


# -- what comes back ---------------------------------------------------------------------------------------------------------------


def answers(data: bytes) -> Iterator[Any]:
    """The messages in the frames that the server sent."""
    while data:
        opcode, size, start = data[0] & 15, data[1], 2
        if size >= 126:
            start = 4 if size == 126 else 10
            size = int.from_bytes(data[2:start], "big")
        if opcode == BINARY:
            yield decode_answer(data[start : start + size])
        data = data[start + size :]


async def converse(port: int, sent: bytes) -> list[Any]:
    """Send this over a new connection and return the answers: until the server ends it, or waits for the rest of a frame."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        writer.write(UPGRADE)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).startswith(b"HTTP/1.1 101 ")
        writer.write(sent + frame(CLOSE, b""))
        with suppress(TimeoutError):
            while piece := await asyncio.wait_for(reader.read(1 << 20), 0.1):
                received += piece
    except ConnectionResetError:  # it hung up before it had read all
        pass
    finally:
        writer.transport.abort()
    return list(answers(received))


async def meet(a: RendezvousClient, b: RendezvousClient, done: asyncio.Event) -> int:
    """Two members that work on."""
    for number in itertools.count():
        await asyncio.gather(a.barrier(f"b{number % 3}", timeout=20.0), b.barrier(f"b{number % 3}", timeout=20.0))
        assert await a.add("count") == number + 1
        if done.is_set():
            return number
        await asyncio.sleep(0.005)
    raise AssertionError


async def settle(server: RendezvousServer, before: int) -> None:
    """Wait until nothing is left of strangers: no connection, member, wait, job or task."""
    service = server._service
    async with asyncio.timeout(30):
        while True:
            now = asyncio.get_running_loop().time()
            left = (len(server._connections), [job.name for job in service.jobs(now)], service.waits(), len(asyncio.all_tasks()) - before)
            if left == (2, ["X"], Counter(), 0):
                return
            await asyncio.sleep(0.05)


async def test_no_frames_make_the_server_fail_or_disturb_members(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    loop = asyncio.get_running_loop()
    failures: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    limits = Limits(ended_s=0.05, failed_s=0.05, absent_s=0.05)
    told, codes = Notices(), Counter[str]()
    async with RendezvousServer(token=TOKEN, limits=limits) as server, client(server, on_notice=told) as a, client(server) as b:
        await asyncio.gather(*(one.join(world_size=2, rank=rank, info=info(rank)) for rank, one in enumerate((a, b))))
        port = int(server.address.rpartition(":")[2])
        before = len(asyncio.all_tasks())
        done = asyncio.Event()
        meeting = asyncio.create_task(meet(a, b, done))

        @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
        @given(talks())
        def send(sent: bytes) -> None:
            for answer in asyncio.run_coroutine_threadsafe(converse(port, sent), loop).result(30):
                codes[answer.code if isinstance(answer, Refused) else type(answer).__name__] += 1
                assert not isinstance(answer, Refused) or answer.text

        await asyncio.to_thread(send)
        done.set()
        assert await meeting > 10
        assert {"malformed", "version", "state", "Welcome", "Formed"} <= codes.keys() and codes.keys() & {"Done", "Number", "Value"}, codes
        assert told._queue.empty()
        await settle(server, before)
    assert not failures and not [record for record in caplog.records if record.exc_info], (failures, caplog.text)
