"""Ranks that ask for different things all learn what each of them asked for, and where; broken groups stay broken."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import RunRanks
from support.checks import assert_usable, error_of, here
from support.oracle import assert_same

import aiodist
from aiodist import CommunicationError, GroupClosedError, MismatchError

pytestmark = pytest.mark.timeout(60)


@dataclass(frozen=True)
class Disagreement:
    """What rank 1 asks for, what all others ask for, and what every rank's error must name."""

    odd: Callable[[aiodist.Group], Any]
    others: Callable[[aiodist.Group], Any]
    words: tuple[str, ...]


DISAGREEMENTS = {
    "collective": Disagreement(lambda g: g.all_gather(np.ones(6)), lambda g: g.all_reduce(np.ones(6)), ("all_gather", "all_reduce")),
    "barrier": Disagreement(lambda g: g.barrier(), lambda g: g.all_reduce(np.ones(6)), ("barrier", "all_reduce")),
    "broadcast": Disagreement(lambda g: g.broadcast(None), lambda g: g.all_reduce(np.ones(6)), ("broadcast", "all_reduce")),
    "op": Disagreement(lambda g: g.all_reduce(np.ones(6), op="max"), lambda g: g.all_reduce(np.ones(6)), ("max", "sum")),
    "scatter op": Disagreement(lambda g: g.reduce_scatter(np.ones(6), op="prod"), lambda g: g.reduce_scatter(np.ones(6)), ("prod", "sum")),
    "dtype": Disagreement(lambda g: g.all_reduce(np.ones(12, "f4")), lambda g: g.all_reduce(np.ones(6, "f8")), ("float32", "float64")),
    "dtype of equal size": Disagreement(
        lambda g: g.all_reduce(np.ones(6, "i8")), lambda g: g.all_reduce(np.ones(6, "u8")), ("int64", "uint64")
    ),
    "gathered dtype": Disagreement(
        lambda g: g.all_gather(np.ones(6, "i4")), lambda g: g.all_gather(np.ones(6, "f4")), ("int32", "float32")
    ),
    "raw dtypes": Disagreement(lambda g: g.all_gather(np.ones(6, "M8[s]")), lambda g: g.all_gather(np.ones(6, "M8[us]")), ("[s]", "[us]")),
    "shape": Disagreement(lambda g: g.all_reduce(np.ones((2, 3))), lambda g: g.all_reduce(np.ones((3, 2))), ("(2, 3)", "(3, 2)")),
    "empty shape": Disagreement(lambda g: g.all_reduce(np.ones((5, 0))), lambda g: g.all_reduce(np.ones((7, 0))), ("(5, 0)", "(7, 0)")),
    "dimensions": Disagreement(lambda g: g.all_gather(np.ones((6, 1))), lambda g: g.all_gather(np.ones(6)), ("(6, 1)", "(6,)")),
    "large shape": Disagreement(lambda g: g.all_reduce(np.ones(409_598)), lambda g: g.all_reduce(np.ones(409_600)), ("409598", "409600")),
    "small and large": Disagreement(lambda g: g.all_reduce(np.ones(4)), lambda g: g.all_reduce(np.ones(400_000)), ("4,", "400000")),
    "gathered shape": Disagreement(lambda g: g.all_gather(np.ones(5)), lambda g: g.all_gather(np.ones(6)), ("(5,)", "(6,)")),
    "root": Disagreement(lambda g: g.broadcast(np.ones(6), root=1), lambda g: g.broadcast(np.ones(6), root=0), ("root", "0", "1")),
    "receiver": Disagreement(
        lambda g: g.broadcast(np.zeros(14, "i8")), lambda g: g.broadcast(np.arange(6, dtype="f4")), ("int64", "float32", "(14,)", "(6,)")
    ),
    "axis": Disagreement(lambda g: g.all_gather(np.ones((6, 6)), axis=1), lambda g: g.all_gather(np.ones((6, 6))), ("axis",)),
    "scatter axis": Disagreement(
        lambda g: g.reduce_scatter(np.ones((6, 6)), axis=1), lambda g: g.reduce_scatter(np.ones((6, 6))), ("axis",)
    ),
}


async def _disagree(group: aiodist.Group, name: str) -> int | None:
    kind = DISAGREEMENTS[name]
    await assert_usable(group)
    error = await error_of(lambda: (kind.odd if group.rank == 1 else kind.others)(group))
    assert type(error) is MismatchError, repr(error)
    text = str(error).replace("_000", "000")
    missing = [word for word in kind.words if word not in text]
    assert not missing, f"{missing} are missing in: {error}"
    assert re.search(r"\b1\b", text), f"rank 1 is not named in: {error}"
    assert "test_mismatch.py:" in text
    later = await error_of(lambda: group.all_reduce(np.ones(6)))
    assert isinstance(later, CommunicationError), repr(later)
    return error.seq


@pytest.mark.parametrize("name", DISAGREEMENTS)
@pytest.mark.parametrize("size", [2, 3])
def test_disagreement_is_told_to_all(size: int, name: str, run_ranks: RunRanks) -> None:
    numbers = run_ranks(size, _disagree, name)
    assert numbers == [2] * size, "the number of the call, after two that went well"


async def _sites(group: aiodist.Group) -> tuple[str, str]:
    x = np.ones(3)
    await group.barrier()
    if group.rank == 0:
        site = here(1)
        error = await error_of(lambda: group.all_reduce(x, op="min"))
    else:
        site = here(1)
        error = await error_of(lambda: group.all_reduce(x, op="max"))
    return site, str(error)


def test_both_call_sites_are_named(run_ranks: RunRanks) -> None:
    (mine, first), (theirs, second) = run_ranks(2, _sites)
    for text in (first, second):
        assert mine in text and theirs in text, text
        assert "min" in text and "max" in text, text


async def _swapped(group: aiodist.Group) -> None:
    """The same two calls, in another order on rank 1, all in flight at once."""
    x = np.arange(100.0)
    receiver = np.full(100, -1.0)
    calls: list[Callable[[], Any]] = [lambda: group.all_reduce(x), lambda: group.broadcast(x)]
    if group.rank == 1:
        calls = [lambda: group.broadcast(x, out=receiver), lambda: group.all_reduce(x)]
    for future in [call() for call in calls]:
        error = await error_of(future)
        assert isinstance(error, MismatchError), repr(error)
        assert "broadcast" in str(error) and "all_reduce" in str(error)
    assert_same(receiver, np.full(100, -1.0))


def test_another_order_is_a_mismatch_and_no_data_is_swapped(run_ranks: RunRanks) -> None:
    run_ranks(3, _swapped)


async def _received(group: aiodist.Group) -> None:
    out = np.full(14, -1, "i8")
    call = group.broadcast(np.arange(6, dtype="f4")) if group.rank == 0 else group.broadcast(None, out=out)
    assert isinstance(await error_of(lambda: call), MismatchError)
    assert_same(out, np.full(14, -1, "i8"))


def test_receiver_of_another_size_is_left_alone(run_ranks: RunRanks) -> None:
    run_ranks(2, _received)


async def _earlier_calls(group: aiodist.Group) -> None:
    """A call under way when the group breaks gives its result or the error, never anything else; one that is done keeps its result."""
    x = np.full(50_000, group.rank + 1.0)
    done = group.all_reduce(x, op="prod")
    await done
    before = group.all_reduce(x)
    wrong = group.all_reduce(x, op="max" if group.rank == 0 else "min")
    queued = [group.all_reduce(x) for _ in range(20)]
    given: Any = (await asyncio.gather(before, return_exceptions=True))[0]
    if not isinstance(given, MismatchError):
        assert_same(given, np.full(50_000, 6.0))
    assert_same(await done, np.full(50_000, 6.0))
    first = await error_of(lambda: wrong)
    assert isinstance(first, MismatchError)
    for future in queued:
        later = await error_of(future)
        assert isinstance(later, CommunicationError), repr(later)


def test_calls_around_a_mismatch(run_ranks: RunRanks) -> None:
    run_ranks(3, _earlier_calls)


async def _told_again(group: aiodist.Group) -> None:
    first = await error_of(lambda: group.all_reduce(np.ones(group.rank + 1)))
    assert isinstance(first, MismatchError)
    for call in (lambda: group.barrier(), lambda: group.all_gather(np.ones(3)), lambda: group.broadcast(None, root=1 - group.rank)):
        later = await error_of(call)
        assert isinstance(later, CommunicationError)
        assert "all_reduce" in str(later), f"the first reason is missing in: {later}"
    await group.aclose()
    await group.aclose()


def test_a_broken_group_gives_its_first_reason_and_closes(run_ranks: RunRanks) -> None:
    run_ranks(2, _told_again)


async def _aborted(group: aiodist.Group) -> str:
    x = np.ones(200_000)
    await group.all_reduce(x)
    if group.rank == 1:
        await asyncio.sleep(0.1)
        group.abort("operator pulled the plug")
    error = await error_of(lambda: group.all_reduce(x))
    assert isinstance(error, CommunicationError), repr(error)
    return str(error)


def test_abort_tells_all_why(run_ranks: RunRanks) -> None:
    for text in run_ranks(3, _aborted):
        assert "operator pulled the plug" in text


async def test_a_closed_group_refuses_calls() -> None:
    async with aiodist.local_world(2) as groups:
        await asyncio.gather(*(group.all_reduce(np.ones(3)) for group in groups))
    for group in groups:
        assert isinstance(await error_of(partial(group.all_reduce, np.ones(3))), GroupClosedError)
        await group.aclose()


async def test_worlds_break_apart_from_each_other() -> None:
    async with aiodist.local_world(2) as broken, aiodist.local_world(2) as sound:
        await asyncio.gather(*(error_of(group.all_reduce(np.ones(group.rank + 1))) for group in broken))
        await asyncio.gather(*(assert_usable(group) for group in sound))
