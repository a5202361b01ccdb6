"""Sizes past 2^31, in bytes and in elements. Takes gigabytes and minutes, so it runs only where AIODIST_BIG_MEMORY=1 allows it."""

from __future__ import annotations

import gc
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from support.oracle import Array
from support.ranks import run_local

import aiodist

COUNT: Final = 2**31 + 12_345_678
"""Elements of an array: of one byte each, so as many bytes; even, so that two ranks can share it."""
_PERIOD: Final = 15_485_863  # a prime: no offset that is lost, doubled or cut to 32 bits maps the pattern onto itself

pytestmark = [
    pytest.mark.big_memory,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(os.environ.get("AIODIST_BIG_MEMORY") != "1", reason="takes up to 20 GiB; AIODIST_BIG_MEMORY=1 allows it"),
]


def need(gib: float) -> None:
    """Skip unless that much memory is free."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 2**20
    if free < gib:
        pytest.skip(f"takes {gib} GiB of memory, {free:.1f} GiB are free")


def pattern(rank: int) -> Array:
    """Return the bytes that a rank's array repeats."""
    return np.random.default_rng(rank).integers(0, 256, _PERIOD, np.uint8)


def filled(rank: int, dtype: str = "u1", count: int = COUNT) -> Array:
    """Return the array of a rank."""
    x, repeated = np.empty(count, np.uint8), pattern(rank)
    for start in range(0, count, _PERIOD):
        x[start : start + _PERIOD] = repeated[: count - start]
    return x.view(dtype)


def pieces(start: int, count: int, *ranks: int) -> Iterator[tuple[slice, list[Array]]]:
    """Yield slices of a result that begins at `start` of the ranks' arrays, and what those arrays hold there."""
    repeated = [pattern(rank) for rank in ranks]
    at = 0
    while at < count:
        phase = (start + at) % _PERIOD
        length = min(_PERIOD - phase, count - at)
        yield slice(at, at + length), [array[phase : phase + length] for array in repeated]
        at += length


def check(result: Array, rank: int, start: int = 0) -> None:
    """Fail unless `result` is what the rank's array holds from `start` on."""
    data = result.view(np.uint8)
    for place, (due,) in pieces(start, data.size, rank):
        assert np.array_equal(data[place], due), f"wrong within {place}"


async def _all_reduce(group: aiodist.Group, in_place: bool) -> None:
    x = filled(group.rank, "i1" if in_place else "u1")
    result = await group.all_reduce(x, out=x if in_place else None)
    assert result.size == COUNT and (result is x) == in_place
    data = result.view(np.uint8)
    for place, (mine, theirs) in pieces(0, COUNT, 0, 1):
        assert np.array_equal(data[place], mine + theirs), f"wrong within {place}"


async def _broadcast(group: aiodist.Group) -> None:
    result = await group.broadcast(filled(1) if group.rank == 1 else None, root=1)
    assert result.size == COUNT
    check(result, 1)


async def _all_gather(group: aiodist.Group) -> None:
    """Each part begins or ends past 2^31."""
    result = await group.all_gather(filled(group.rank))
    assert result.size == 2 * COUNT
    check(result[:COUNT], 0)
    check(result[COUNT:], 1)


async def _uneven(group: aiodist.Group) -> None:
    count = 1001 if group.rank == 0 else COUNT
    result = await group.gather(filled(group.rank, count=count), uneven=True)
    if group.rank == 0:
        assert result.size == COUNT + 1001
        check(result[:1001], 0)
        check(result[1001:], 1)


async def _all_to_all(group: aiodist.Group) -> None:
    x, half = filled(group.rank), COUNT // 2
    assert await group.all_to_all(x, out=x) is x
    check(x[:half], 0, group.rank * half)
    check(x[half:], 1, group.rank * half)


async def _scatter(group: aiodist.Group) -> None:
    result = await group.scatter(filled(0) if group.rank == 0 else None)
    assert result.size == COUNT // 2
    check(result, 0, group.rank * (COUNT // 2))


async def _wide_elements(group: aiodist.Group) -> None:
    """More than 2^31 bytes in fewer elements, along an inner axis."""
    x = filled(group.rank, "c16", COUNT // 64 * 64).reshape(2, -1)
    result = await group.all_gather(x, axis=1)
    assert result.shape == (2, 2 * x.shape[1])
    for row in range(2):
        for rank in range(2):
            check(result[row, rank * x.shape[1] : (rank + 1) * x.shape[1]], rank, row * x.shape[1] * x.itemsize)


async def _send(group: aiodist.Group) -> None:
    if group.rank == 0:
        await group.send(filled(0), 1, timeout=600)
    else:
        result = await group.recv(0, timeout=600)
        assert result.size == COUNT
        check(result, 0)


async def _many(group: aiodist.Group) -> None:
    """The packed total is past 2^31, no single array is."""
    cut = COUNT // 3
    x = filled(group.rank)
    arrays = [x[:cut], x[cut : 2 * cut], x[2 * cut :]]
    result = await group.broadcast_many(arrays, out=arrays)
    assert [array.size for array in result] == [cut, cut, COUNT - 2 * cut]
    check(x, 0)


Body = Callable[..., Awaitable[Any]]
BODIES: list[tuple[Body, tuple[Any, ...], float]] = [
    (_all_reduce, (False,), 12),
    (_all_reduce, (True,), 8),
    (_broadcast, (), 8),
    (_all_gather, (), 18),
    (_uneven, (), 10),
    (_all_to_all, (), 12),
    (_scatter, (), 8),
    (_wide_elements, (), 18),
    (_send, (), 8),
    (_many, (), 12),
]


@pytest.mark.parametrize(("body", "arguments", "gib"), BODIES, ids=lambda value: getattr(value, "__name__", None))
async def test_sizes_past_32_bits(body: Body, arguments: tuple[Any, ...], gib: float) -> None:
    need(gib)
    await run_local(2, body, *arguments, deadline=1200)
    gc.collect()


def test_the_pattern_tells_places_apart() -> None:
    """A result shifted by 2^31 or 2^32 would be noticed."""
    period = pattern(0)
    for shift in (2**31, 2**32, COUNT, COUNT // 2):
        assert not np.array_equal(np.roll(period, -(shift % _PERIOD)), period)
