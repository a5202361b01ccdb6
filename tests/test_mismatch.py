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
from support.ranks import Pools, run_local

import aiodist
from aiodist import CollectiveTimeoutError, CommunicationError, GroupClosedError, MismatchError

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
    "reduce": Disagreement(lambda g: g.all_reduce(np.ones(6)), lambda g: g.reduce(np.ones(6)), ("all_reduce(", " reduce(")),
    "reduce op": Disagreement(lambda g: g.reduce(np.ones(6), "min"), lambda g: g.reduce(np.ones(6), "prod"), ("min", "prod")),
    "reduce root": Disagreement(lambda g: g.reduce(np.ones(6), root=1), lambda g: g.reduce(np.ones(6)), ("reduce", "root", "0", "1")),
    "reduce dtype": Disagreement(lambda g: g.reduce(np.ones(6, "f2")), lambda g: g.reduce(np.ones(6, "i2")), ("float16", "int16")),
    "reduce shape": Disagreement(lambda g: g.reduce(np.ones((2, 3))), lambda g: g.reduce(np.ones((3, 2))), ("(2, 3)", "(3, 2)")),
    "gather": Disagreement(lambda g: g.gather(np.ones(6)), lambda g: g.all_gather(np.ones(6)), ("all_gather(", " gather(")),
    "gather root": Disagreement(lambda g: g.gather(np.ones(6), 1), lambda g: g.gather(np.ones(6)), ("gather", "root")),
    "gather dtype": Disagreement(lambda g: g.gather(np.ones(6, "U3")), lambda g: g.gather(np.ones(6, "U4")), ("U3", "U4")),
    "gather shape": Disagreement(lambda g: g.gather(np.ones(5)), lambda g: g.gather(np.ones(6)), ("(5,)", "(6,)")),
    "gather large shape": Disagreement(lambda g: g.gather(np.ones(90_001)), lambda g: g.gather(np.ones(90_000)), ("90001", "90000")),
    "gather empty shape": Disagreement(lambda g: g.gather(np.ones((5, 0))), lambda g: g.gather(np.ones((7, 0))), ("(5, 0)", "(7, 0)")),
    "gather axis": Disagreement(lambda g: g.gather(np.ones((6, 6)), axis=1), lambda g: g.gather(np.ones((6, 6))), ("gather", "axis")),
    "scatter": Disagreement(lambda g: g.broadcast(None), lambda g: g.scatter(np.ones(6)), ("broadcast", "scatter")),
    "scatter root": Disagreement(lambda g: g.scatter(np.ones(6), 1), lambda g: g.scatter(np.ones(6), 0), ("scatter", "root")),
    "scatter root of None": Disagreement(
        lambda g: g.scatter(np.ones(6), 1), lambda g: g.scatter(np.ones(6) if g.rank == 0 else None), ("scatter", "root")
    ),
    "nobody's root": Disagreement(lambda g: g.scatter(None), lambda g: g.scatter(None, 1), ("scatter", "root")),
    "scatter receiver's shape": Disagreement(
        lambda g: g.scatter(np.ones((6, 2))), lambda g: g.scatter(np.ones((12, 1))), ("(6, 2)", "(12, 1)")
    ),
    "scatter receiver's dtype": Disagreement(lambda g: g.scatter(np.ones(6, "u8")), lambda g: g.scatter(np.ones(6)), ("uint64", "float64")),
    "scatter receiver's axis": Disagreement(lambda g: g.scatter(np.ones((6, 6)), axis=1), lambda g: g.scatter(np.ones((6, 6))), ("axis",)),
    "scatter receiver's axis of None": Disagreement(lambda g: g.scatter(None, axis=1), lambda g: g.scatter(np.ones((6, 6))), ("axis",)),
    "all_to_all": Disagreement(lambda g: g.all_gather(np.ones(6)), lambda g: g.all_to_all(np.ones(6)), ("all_gather", "all_to_all")),
    "all_to_all shape": Disagreement(
        lambda g: g.all_to_all(np.ones((6, 2))), lambda g: g.all_to_all(np.ones((6, 1))), ("(6, 2)", "(6, 1)")
    ),
    "all_to_all large shape": Disagreement(
        lambda g: g.all_to_all(np.ones(90_000)), lambda g: g.all_to_all(np.ones(90_006)), ("90000", "90006")
    ),
    "all_to_all dtype": Disagreement(
        lambda g: g.all_to_all(np.ones(6, "c8")), lambda g: g.all_to_all(np.ones(6, "i8")), ("complex64", "int64")
    ),
    "all_to_all axis": Disagreement(lambda g: g.all_to_all(np.ones((6, 6)), 1), lambda g: g.all_to_all(np.ones((6, 6))), ("axis",)),
    "barrier for a root": Disagreement(lambda g: g.barrier(), lambda g: g.reduce(np.ones(6)), ("barrier", "reduce")),
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


async def _swapped_movers(group: aiodist.Group) -> None:
    x, joined, parts, lists = np.arange(90_000.0), np.full(270_000, -1.0), np.full(90_000, -1.0), [np.full(2, -1.0) for _ in range(3)]
    calls: list[Callable[[], Any]] = [
        lambda: group.gather(x, 1, out=joined),
        lambda: group.all_to_all(x, out=parts),
        lambda: group.all_to_all([x[:2]] * 3, out=lists),
    ]
    for call in reversed(calls) if group.rank == 1 else calls:
        assert isinstance(await error_of(call), CommunicationError)
    for untouched in (joined, parts, *lists):
        assert (untouched == -1).all()


@pytest.mark.parametrize("body", [_swapped, _swapped_movers])
def test_another_order_is_a_mismatch_and_no_data_is_swapped(body: Any, run_ranks: RunRanks) -> None:
    run_ranks(3, body)


async def _received(group: aiodist.Group) -> None:
    out = np.full(14, -1, "i8")
    call = group.broadcast(np.arange(6, dtype="f4")) if group.rank == 0 else group.broadcast(None, out=out)
    assert isinstance(await error_of(lambda: call), MismatchError)
    assert_same(out, np.full(14, -1, "i8"))


def test_receiver_of_another_size_is_left_alone(run_ranks: RunRanks) -> None:
    run_ranks(2, _received)


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda g: g.all_reduce(np.ones(6), timeout=1.0),
    "reduce": lambda g: g.reduce(np.ones(6), root=2, timeout=1.0),
    "reduce_scatter": lambda g: g.reduce_scatter(np.ones(6), timeout=1.0),
    "broadcast": lambda g: g.broadcast(np.ones(6) if g.rank == 0 else None, timeout=1.0),
    "large broadcast": lambda g: g.broadcast(np.ones(100_000) if g.rank == 0 else None, timeout=1.0),
    "all_gather": lambda g: g.all_gather(np.ones(6), timeout=1.0),
    "uneven all_gather": lambda g: g.all_gather(np.ones(g.rank), uneven=True, timeout=1.0),
    "gather": lambda g: g.gather(np.ones(6), 2, timeout=1.0),
    "uneven gather": lambda g: g.gather(np.ones(g.rank + 60_000), uneven=True, timeout=1.0),
    "scatter": lambda g: g.scatter(np.ones(6) if g.rank == 0 else None, timeout=1.0),
    "list scatter": lambda g: g.scatter([np.ones(1)] * 3 if g.rank == 2 else None, 2, timeout=1.0),
    "all_to_all": lambda g: g.all_to_all(np.ones(60_000), timeout=1.0),
    "list all_to_all": lambda g: g.all_to_all([np.ones(6)] * 3, timeout=1.0),
    "barrier": lambda g: g.barrier(timeout=1.0),
    "all_reduce_many": lambda g: g.all_reduce_many([np.ones(6), np.ones(3, "i4")], timeout=1.0),
    "broadcast_many": lambda g: g.broadcast_many([np.ones(6)] if g.rank == 0 else None, timeout=1.0),
    "broadcast_object": lambda g: g.broadcast_object("x", timeout=1.0),
    "all_gather_object": lambda g: g.all_gather_object("x", timeout=1.0),
    "gather_object": lambda g: g.gather_object("x", 2, timeout=1.0),
    "scatter_object": lambda g: g.scatter_object(["x", "y", "z"] if g.rank == 2 else None, 2, timeout=1.0),
}


async def _one_missing(group: aiodist.Group, name: str) -> None:
    """Rank 1 does not come: the others learn so, and it when it comes."""
    await group.barrier()
    if group.rank == 1:
        await asyncio.sleep(3.0)
        late = await error_of(lambda: COLLECTIVES[name](group))
        assert isinstance(late, CommunicationError), repr(late)
    else:
        error = await error_of(lambda: COLLECTIVES[name](group))
        assert type(error) is CollectiveTimeoutError, repr(error)
        assert error.ranks == (1,) and error.seq == 1
        assert name.split()[-1].removesuffix("_object").removesuffix("_many") in str(error), str(error)
    assert isinstance(await error_of(lambda: group.all_reduce(np.ones(6))), CommunicationError)


async def test_a_rank_that_does_not_come_is_named() -> None:
    await asyncio.gather(*(run_local(3, _one_missing, name) for name in COLLECTIVES))


@pytest.mark.parametrize("name", ["uneven gather", "list all_to_all", "all_reduce_many", "gather_object"])
def test_a_process_that_does_not_come_is_named(name: str, pools: Pools) -> None:
    pools.get(3).run(_one_missing, name, fresh=True)


async def _all_fail_at_once(group: aiodist.Group) -> None:
    """No call waits on a broken group, whichever it is, and none gives anything but the first reason."""
    assert isinstance(await error_of(lambda: group.all_to_all(np.ones(3 * (group.rank + 1)))), MismatchError)
    calls = [*COLLECTIVES.values(), lambda g: g.send(np.ones(3), (g.rank + 1) % 3), lambda g: g.recv((g.rank + 1) % 3)]
    for call in calls:
        later = await asyncio.wait_for(error_of(partial(call, group)), 20)
        assert isinstance(later, CommunicationError) and not isinstance(later, TimeoutError), repr(later)
        assert "all_to_all" in str(later), f"the first reason is missing in: {later}"


def test_every_call_on_a_broken_group_fails_at_once(run_ranks: RunRanks) -> None:
    run_ranks(3, _all_fail_at_once)


WRITERS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "reduce in place": lambda g, x, out, joined: g.reduce(x, out=x),
    "gather": lambda g, x, out, joined: g.gather(x, out=joined),
    "scatter": lambda g, x, out, joined: g.scatter(x, out=out[: x.size // 3]),
    "all_to_all in place": lambda g, x, out, joined: g.all_to_all(x, out=x),
    "uneven all_gather": lambda g, x, out, joined: g.all_gather(x.reshape(2, -1), uneven=True, out=joined.reshape(6, -1)),
}


async def _unwritten(group: aiodist.Group, name: str, count: int) -> None:
    size = count + group.rank * 6
    x, out, joined = np.full(size, 5.0), np.full(size, -1.0), np.full(3 * size, -1.0)
    assert isinstance(await error_of(lambda: WRITERS[name](group, x, out, joined)), MismatchError)
    assert (x == 5).all() and (out == -1).all() and (joined == -1).all()


@pytest.mark.parametrize("count", [6, 60_000])
@pytest.mark.parametrize("name", WRITERS)
def test_a_mismatch_writes_nothing(name: str, count: int, run_ranks: RunRanks) -> None:
    run_ranks(3, _unwritten, name, count)


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
