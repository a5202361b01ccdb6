"""send and recv: what arrives is what was sent, whatever it is, in order within a tag, and outside the order of collectives."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import RunLoop, RunRanks
from support import oracle
from support.checks import assert_usable, error_of, here, ramp
from support.oracle import Array, assert_same
from support.ranks import gather_ranks

import aiodist
from aiodist import CommunicationError, GroupClosedError, MismatchError

pytestmark = pytest.mark.timeout(90)

MIB = 2**20
NBYTES = (0, 1, 1024, 8160, 8192, 8224, 16_352, 16_384, 16_416, 65_536, 65_544, 2**19, 2**19 + 8, MIB + 1, 8 * MIB, 40 * MIB)
DTYPES = (*oracle.REDUCIBLE, *oracle.MOVABLE_ONLY)


def _bytes(count: int, salt: int) -> Array:
    """Return bytes that differ from those of another salt almost everywhere."""
    words = np.arange((count + 7) // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt)
    return words.view(np.uint8)[:count]


async def _exchange(group: aiodist.Group, x: Array, tag: int = 0, out: Array | None = None) -> Any:
    """Send to the other of two ranks, then receive from it."""
    peer = 1 - group.rank
    sending: Any = group.send(x, peer, tag, timeout=40)
    assert await sending is None
    return await group.recv(peer, tag, out=out, timeout=40)


async def _sizes(group: aiodist.Group) -> None:
    for nbytes in NBYTES:
        received = await _exchange(group, _bytes(nbytes, group.rank))
        assert_same(received, _bytes(nbytes, 1 - group.rank))
        assert received.flags.writeable


def test_every_size_crosses_another(run_ranks: RunRanks) -> None:
    run_ranks(2, _sizes)


async def _dtypes(group: aiodist.Group) -> None:
    peer = 1 - group.rank
    for count in (1, 37, 5001):
        receives = [group.recv(peer, tag) for tag in range(len(DTYPES))]
        sends = [group.send(oracle.vector(dtype, count, group.rank), peer, tag) for tag, dtype in enumerate(DTYPES)]
        for dtype, receive in zip(DTYPES, receives, strict=True):
            assert_same(await receive, oracle.vector(dtype, count, peer))
            assert receive.shape == (count,) and receive.dtype == dtype
        await asyncio.gather(*sends)


def test_every_dtype(run_ranks: RunRanks) -> None:
    run_ranks(2, _dtypes)


def _frozen(x: Array) -> Array:
    copy = x.copy()
    copy.flags.writeable = False
    return copy


def _spread(x: Array, step: int) -> Array:
    memory = np.zeros([extent * abs(step) for extent in x.shape], x.dtype)
    view: Array = memory[tuple(slice(None, None, step) for _ in x.shape)]
    view[...] = x
    return view


def _misaligned(x: Array) -> Array:
    view = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "F": lambda x: np.array(x, order="F"),
    "gaps": lambda x: _spread(x, 2),
    "reversed": lambda x: _spread(x, -1),
    "axes": lambda x: np.array(x.transpose(2, 0, 1), order="C").transpose(1, 2, 0),
    "misaligned": _misaligned,
    "read-only": _frozen,
}


async def _layouts(group: aiodist.Group, name: str) -> None:
    for shape in ((2, 3, 4), (40, 30, 50)):
        for dtype in ("f8", "i2", "c16"):
            mine, due = ramp(shape, group.rank, dtype), ramp(shape, 1 - group.rank, dtype)
            received = await _exchange(group, LAYOUTS[name](mine))
            assert_same(received, due)
            assert received.flags.writeable
            if name != "read-only":
                out = LAYOUTS[name](np.zeros_like(mine))
                assert await _exchange(group, mine, out=out) is out
                assert_same(out, due)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_on_both_sides(name: str, run_ranks: RunRanks) -> None:
    run_ranks(2, _layouts, name)


async def _swapped(group: aiodist.Group) -> None:
    received = await _exchange(group, ramp((3, 5), group.rank, ">i4"))
    assert_same(received.astype("i4"), ramp((3, 5), 1 - group.rank, "i4"))


def test_swapped_bytes_keep_their_values(run_ranks: RunRanks) -> None:
    run_ranks(2, _swapped)


SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (3, 0, 2), (1,), (1, 1, 1, 1, 1, 1), (7,), (2, 3, 5), (300, 41))


async def _shapes(group: aiodist.Group) -> None:
    """Shape and dtype travel: the receiver names neither."""
    peer = 1 - group.rank
    for dtype in ("f4", "i8"):
        for shape in SHAPES:
            assert_same(await _exchange(group, ramp(shape, group.rank, dtype)), ramp(shape, peer, dtype))
            out = np.full(shape, -1, dtype)
            assert await _exchange(group, ramp(shape, group.rank, dtype), out=out) is out
            assert_same(out, ramp(shape, peer, dtype))


def test_shapes_travel(run_ranks: RunRanks) -> None:
    run_ranks(2, _shapes)


async def _other_inputs(group: aiodist.Group) -> None:
    for count in (5, 70_000):
        mine, due = ramp((count,), group.rank), ramp((count,), 1 - group.rank)
        assert_same(await _exchange(group, mine.data), due)  # type: ignore[arg-type]
        shared, out = group.empty((count,), "f8"), group.empty((count,), "f8")
        shared[...] = mine
        assert await _exchange(group, shared, out=out) is out
        assert_same(out, due)


def test_memoryviews_and_shared_arrays(run_ranks: RunRanks) -> None:
    run_ranks(2, _other_inputs)


async def _tags(group: aiodist.Group, largest: int) -> None:
    """Values follow tags, not the order of the sends."""
    tags = (0, 1, 2, 77, largest)
    for count in (3, 60_000):
        if group.rank == 0:
            for tag in tags:
                await group.send(ramp((count,), tags.index(tag)), 1, tag)
        else:
            for tag in reversed(tags):
                assert_same(await group.recv(0, np.int64(tag)), ramp((count,), tags.index(tag)))  # type: ignore[arg-type]


def test_values_follow_tags(run_ranks: RunRanks) -> None:
    run_ranks(2, _tags, 2**63 - 1)


async def _ring(group: aiodist.Group) -> None:
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for count in (3, 50_000):
        for turn in range(3):
            receive = group.recv(left, turn)
            send = group.send(ramp((count,), group.rank + 50 * turn), right, turn)
            assert_same(await receive, ramp((count,), left + 50 * turn))
            await send
        for turn in range(3):  # the other way round: the send is awaited first
            await group.send(ramp((count,), group.rank + 50 * turn), right)
            assert_same(await group.recv(left), ramp((count,), left + 50 * turn))


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_ring(size: int, run_ranks: RunRanks) -> None:
    run_ranks(size, _ring)


async def _to_itself(group: aiodist.Group) -> None:
    for count in (0, 4, 3000, MIB):
        x = ramp((count,), group.rank)
        await group.send(x, group.rank, 3)  # before the receive
        receive = group.recv(group.rank, 4)  # and after it
        assert not receive.done()
        sent = x.copy()
        await group.send(sent, group.rank, 4)
        sent[...] = -1
        out = np.zeros(count)
        assert await group.recv(group.rank, 3, out=out) is out
        assert_same(out, x)
        assert_same(await receive, x)
        out[...] = -2
        assert_same(x, ramp((count,), group.rank))
    await assert_usable(group)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_to_oneself(size: int, run_ranks: RunRanks) -> None:
    run_ranks(size, _to_itself)


async def _changed_after(group: aiodist.Group, shared: bool) -> None:
    """The array of a finished send is the sender's again."""
    for tag, count in enumerate((2, 1000, 3000, 2**17, MIB)):
        if group.rank == 0:
            x = group.empty((count,), "f8") if shared else np.empty(count)
            x[...] = ramp((count,), tag)
            await group.send(x, 1, tag)
            x[...] = -1
    await group.barrier()
    if group.rank == 1:
        for tag, count in enumerate((2, 1000, 3000, 2**17, MIB)):
            assert_same(await group.recv(0, tag), ramp((count,), tag))


@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
def test_the_sender_may_change_its_array_once_the_send_is_done(shared: bool, run_ranks: RunRanks) -> None:
    run_ranks(2, _changed_after, shared)


async def _dropped(group: aiodist.Group, count: int) -> None:
    """Nothing of the sender holds the array or the future any more when the message is taken."""
    if group.rank == 0:
        group.send(np.arange(count), 1)
        gc.collect()
        junk = [np.full(count, number) for number in range(100 if count < MIB else 12)]
        await group.send(np.array(len(junk)), 1, 1)
        await group.recv(1)
        await assert_usable(group)
    else:
        await group.recv(0, 1)
        await asyncio.sleep(1)
        assert_same(await group.recv(0), np.arange(count))
        await group.send(np.ones(1), 0)
        await assert_usable(group)


@pytest.mark.parametrize("count", [16, 100_000, MIB])
def test_a_message_outlives_all_references_of_its_sender(count: int, run_ranks: RunRanks) -> None:
    run_ranks(2, _dropped, count)


MISFITS: dict[str, tuple[Callable[[], Array], tuple[str, ...]]] = {
    "shape": (lambda: np.zeros(5), ("(5,)", "(6,)")),
    "dimensions": (lambda: np.zeros((6, 1)), ("(6, 1)", "(6,)")),
    "dtype": (lambda: np.zeros(6, "i8"), ("int64", "float64")),
    "larger": (lambda: np.zeros(600_000), ("600000", "(6,)")),
}


async def _misfit(group: aiodist.Group, name: str) -> None:
    """An out that the message does not fit breaks the group, and stays as it was."""
    if group.rank == 0:
        site = here(1)
        await group.send(ramp((6,), 1), 1)
        await group.send(np.array(site.encode()), 1, 1)
        later = await error_of(lambda: group.recv(1, 8, timeout=30))
    else:
        theirs = (await group.recv(0, 1)).item().decode()
        out, (make, words) = MISFITS[name][0](), MISFITS[name]
        mine = here(1)
        error = await error_of(lambda: group.recv(0, out=out))
        assert type(error) is MismatchError, repr(error)
        for word in (*words, "recv", "send", theirs, mine):
            assert word in str(error).replace("_000", "000"), f"{word} is missing in: {error}"
        assert_same(out, make())
        later = await error_of(lambda: group.send(np.ones(1), 0))
    assert isinstance(later, CommunicationError) and not isinstance(later, TimeoutError), repr(later)
    assert isinstance(await error_of(lambda: group.all_reduce(np.ones(3))), CommunicationError)


@pytest.mark.parametrize("name", MISFITS)
def test_an_out_that_does_not_fit_is_a_mismatch(name: str, run_ranks: RunRanks) -> None:
    run_ranks(2, _misfit, name)


TYPE, VALUE = (TypeError,), (ValueError,)
WRONG: dict[str, tuple[Callable[[Any], Any], tuple[type[Exception], ...], str]] = {
    "src out of range": (lambda g: g.recv(g.size), VALUE, "src"),
    "negative src": (lambda g: g.recv(-1), VALUE, "src"),
    "src is a float": (lambda g: g.recv(1.0), TYPE, "src"),
    "src is a bool": (lambda g: g.recv(True), TYPE, "src"),
    "dst out of range": (lambda g: g.send(np.ones(3), g.size), VALUE, "dst"),
    "negative dst": (lambda g: g.send(np.ones(3), -2), VALUE, "dst"),
    "dst is a float": (lambda g: g.send(np.ones(3), 1.0), TYPE, "dst"),
    "dst is a bool": (lambda g: g.send(np.ones(3), True), TYPE, "dst"),
    "dst is None": (lambda g: g.send(np.ones(3), None), TYPE, "dst"),
    "negative tag": (lambda g: g.send(np.ones(3), 1, -1), VALUE, "tag"),
    "tag too large": (lambda g: g.send(np.ones(3), 1, 2**63), VALUE, "tag"),
    "tag is a string": (lambda g: g.send(np.ones(3), 1, "a"), TYPE, "tag"),
    "tag is a float": (lambda g: g.recv(1, 0.0), TYPE, "tag"),
    "negative tag received": (lambda g: g.recv(1, -1), VALUE, "tag"),
    "received tag too large": (lambda g: g.recv(1, 2**63), VALUE, "tag"),
    "object dtype": (lambda g: g.send(np.array([None, 1]), 1), TYPE, "object"),
    "no array": (lambda g: g.send(object(), 1), TYPE, ""),
    "none": (lambda g: g.send(None, 1), TYPE, ""),
    "read-only out": (lambda g: g.recv(1, out=_frozen(np.ones(3))), VALUE, "out"),
    "out is a list": (lambda g: g.recv(1, out=[0.0] * 3), TYPE, "out"),
    "out of objects": (lambda g: g.recv(1, out=np.array([None, 1])), (TypeError, ValueError), ""),
    "timeout of zero": (lambda g: g.recv(1, timeout=0), VALUE, "timeout"),
    "negative timeout": (lambda g: g.send(np.ones(3), 1, timeout=-1), VALUE, "timeout"),
    "timeout of a wrong type": (lambda g: g.recv(1, timeout="1 s"), TYPE, "timeout"),
}


async def _refused(group: aiodist.Group) -> None:
    """Rank 0 gets every call wrong, between and beside calls that are right; nobody else notices."""
    peer = 1 - group.rank
    for name, (call, kinds, word) in WRONG.items():
        early = group.recv(peer)
        if group.rank == 0:
            with pytest.raises(kinds) as caught:
                call(group)
            assert word in str(caught.value), f"{name}: {caught.value}"
        await group.send(ramp((4,), group.rank), peer)
        assert_same(await early, ramp((4,), peer))
    await assert_usable(group)
    await _tags(group, 2**63 - 1)


def test_wrong_arguments_are_refused_at_the_call_and_disturb_nobody(run_ranks: RunRanks) -> None:
    run_ranks(2, _refused)


def test_tags_and_order_under_each_loop(run_loop: RunLoop) -> None:
    async def body() -> None:
        async with aiodist.local_world(2) as groups:
            await gather_ranks(_ring(group) for group in groups)
            await gather_ranks(_tags(group, 9) for group in groups)

    run_loop(body())


async def _closed(group: aiodist.Group) -> None:
    await group.barrier()
    await group.aclose()
    for call in (lambda: group.send(np.ones(1), 0), lambda: group.recv(0)):
        assert isinstance(await error_of(call), GroupClosedError)


def test_a_closed_group_neither_sends_nor_receives(run_ranks: RunRanks) -> None:
    run_ranks(2, _closed)
