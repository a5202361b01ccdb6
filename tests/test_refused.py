"""Wrong arguments: the caller's own error at once, PeerRefusedError for its peers, and a group that goes on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from conftest import RunRanks
from support.checks import assert_usable, error_of
from support.oracle import assert_same

import aiodist
from aiodist import PeerRefusedError

pytestmark = pytest.mark.timeout(60)

Wrong = Callable[[Any], Any]


@dataclass(frozen=True)
class Refusal:
    """A call that one rank gets wrong.

    Attributes:
        wrong: The call of the rank that is refused; the group is typed Any because the types of the library forbid most of these.
        right: The calls that its peers make.
        kind: What the wrong call raises.
        words: What its text must hold.
    """

    wrong: Wrong
    right: Wrong
    kind: tuple[type[Exception], ...]
    words: tuple[str, ...] = ()


def _sum(g: Any) -> Any:
    return g.all_reduce(np.ones(6))


def _frozen() -> Any:
    array = np.ones(6)
    array.flags.writeable = False
    return array


def _overlapping(g: Any) -> Any:
    a = np.arange(9.0)
    return g.all_reduce(a[0:6], out=a[3:9])


def _shared_overlapping(g: Any) -> Any:
    a = g.empty(9, "f8")
    return g.all_reduce(a[0:6], out=a[3:9])


def _half_gather(g: Any) -> Any:
    a = np.zeros(6 * g.size)
    return g.all_gather(a[3:9], out=a)


def _in_place(g: Any, x: Any, **more: Any) -> Any:
    return g.all_reduce(x, out=x, **more)


def _exchange_in_place(g: Any, x: Any) -> Any:
    return g.all_to_all(x, out=x)


def _scatter(g: Any) -> Any:
    return g.reduce_scatter(np.ones(3 * g.size))


def _broadcast(g: Any) -> Any:
    return g.broadcast(np.ones(6) if g.rank == 0 else None)


def _gather(g: Any) -> Any:
    return g.all_gather(np.ones(6))


def _reduce(g: Any) -> Any:
    return g.reduce(np.ones(6))


def _to_root(g: Any) -> Any:
    return g.gather(np.ones(6))


def _from_root(g: Any) -> Any:
    return g.scatter(None)


def _from_next(g: Any) -> Any:
    return g.scatter(np.ones(6) if g.rank == 1 else None, root=1)


def _exchange(g: Any) -> Any:
    return g.all_to_all(np.ones(6))


def _half_exchange(g: Any) -> Any:
    a = np.zeros(9)
    return g.all_to_all(a[:6], out=a[3:])


def _half_reduce(g: Any) -> Any:
    a = np.zeros(9)
    return g.reduce(a[:6], out=a[3:])


TYPE, VALUE, EITHER = (TypeError,), (ValueError,), (TypeError, ValueError)
REFUSALS = {
    "object dtype": Refusal(lambda g: g.all_reduce(np.array([None, 1])), _sum, TYPE, ("object",)),
    "object broadcast": Refusal(lambda g: g.broadcast(np.array([None, 1])), _broadcast, TYPE, ("object",)),
    "structured object": Refusal(lambda g: g.all_gather(np.zeros(6, [("a", "O"), ("b", "i4")])), _gather, TYPE),
    "no array": Refusal(lambda g: g.all_reduce(object()), _sum, TYPE),
    "none": Refusal(lambda g: g.all_reduce(None), _sum, TYPE),
    "string": Refusal(lambda g: g.all_reduce("text"), _sum, TYPE),
    "unknown op": Refusal(lambda g: g.all_reduce(np.ones(6), op="avg"), _sum, VALUE, ("avg",)),
    "op of a wrong type": Refusal(lambda g: g.all_reduce(np.ones(6), op=3), _sum, TYPE, ("op",)),
    "complex max": Refusal(lambda g: g.all_reduce(np.ones(6, "c8"), op="max"), _sum, TYPE, ("max", "complex64")),
    "complex min scattered": Refusal(
        lambda g: g.reduce_scatter(np.ones(3 * g.size, "c16"), op="min"), _scatter, TYPE, ("min", "complex128")
    ),
    "float band": Refusal(lambda g: g.all_reduce(np.ones(6), op="band"), _sum, TYPE, ("band", "float64")),
    "bool mean": Refusal(lambda g: g.all_reduce(np.ones(6, bool), op="mean"), _sum, TYPE, ("mean", "bool")),
    "sum of text": Refusal(lambda g: g.all_reduce(np.array(["a"] * 6)), _sum, TYPE, ("sum",)),
    "sum of raw bytes": Refusal(lambda g: g.all_reduce(np.zeros(6, "V2")), _sum, TYPE, ("sum",)),
    "sum of times": Refusal(lambda g: g.all_reduce(np.zeros(6, "M8[s]")), _sum, TYPE, ("sum",)),
    "integer mean in place": Refusal(lambda g: _in_place(g, np.ones(6, "i4"), op="mean"), _sum, EITHER, ("out", "float64")),
    "integer mean into integers": Refusal(
        lambda g: g.all_reduce(np.ones(6, "i4"), op="mean", out=np.ones(6, "i4")), _sum, EITHER, ("float64",)
    ),
    "out of another shape": Refusal(lambda g: g.all_reduce(np.ones(6), out=np.ones(5)), _sum, VALUE, ("out", "6", "5")),
    "out of another dimension": Refusal(lambda g: g.all_reduce(np.ones(6), out=np.ones((2, 3))), _sum, VALUE, ("out",)),
    "out of another dtype": Refusal(lambda g: g.all_reduce(np.ones(6), out=np.ones(6, "f4")), _sum, EITHER, ("out", "float32", "float64")),
    "out too short": Refusal(lambda g: g.all_gather(np.ones(6), out=np.ones(5)), _gather, VALUE, ("out", "5")),
    "out read-only": Refusal(lambda g: g.all_reduce(np.ones(6), out=_frozen()), _sum, VALUE, ("out",)),
    "read-only in place": Refusal(lambda g: _in_place(g, _frozen()), _sum, VALUE, ("out",)),
    "read-only receiver": Refusal(
        lambda g: g.broadcast(None, root=1, out=_frozen()), lambda g: g.broadcast(np.ones(6), root=1), VALUE, ("out",)
    ),
    "out is a list": Refusal(lambda g: g.all_reduce(np.ones(6), out=[0.0] * 6), _sum, TYPE, ("out",)),
    "scalar in place": Refusal(lambda g: _in_place(g, np.float64(1.5)), lambda g: g.all_reduce(1.5), TYPE, ("out",)),
    "out without memory of its own": Refusal(lambda g: g.all_reduce(np.ones(6), out=np.broadcast_to(1.0, (6,))), _sum, VALUE, ("out",)),
    "out overlaps": Refusal(_overlapping, _sum, VALUE, ("overlap",)),
    "shared out overlaps": Refusal(_shared_overlapping, _sum, VALUE, ("overlap",)),
    "gather overlaps": Refusal(_half_gather, _gather, VALUE, ("overlap",)),
    "root out of range": Refusal(lambda g: g.broadcast(np.ones(6), root=g.size), _broadcast, VALUE, ("root",)),
    "negative root": Refusal(lambda g: g.broadcast(np.ones(6), root=-1), _broadcast, VALUE, ("root", "-1")),
    "root of a wrong type": Refusal(lambda g: g.broadcast(np.ones(6), root=0.5), _broadcast, TYPE, ("root",)),
    "root without array": Refusal(lambda g: g.broadcast(None, root=0), _broadcast, TYPE),
    "axis out of range": Refusal(lambda g: g.all_gather(np.ones(6), axis=1), _gather, VALUE, ("axis",)),
    "axis of a wrong type": Refusal(lambda g: g.all_gather(np.ones(6), axis="rows"), _gather, TYPE, ("axis",)),
    "scatter axis out of range": Refusal(lambda g: g.reduce_scatter(np.ones(3 * g.size), axis=-2), _scatter, VALUE, ("axis",)),
    "does not divide": Refusal(lambda g: g.reduce_scatter(np.ones(3 * g.size + 1)), _scatter, VALUE, ("10",)),
    "scatter of no dimension": Refusal(lambda g: g.reduce_scatter(np.array(1.0)), _scatter, VALUE),
    "timeout of zero": Refusal(lambda g: g.all_reduce(np.ones(6), timeout=0), _sum, VALUE, ("timeout",)),
    "negative timeout": Refusal(lambda g: g.barrier(timeout=-1), lambda g: g.barrier(), VALUE, ("timeout",)),
    "timeout without end": Refusal(lambda g: g.barrier(timeout=float("inf")), lambda g: g.barrier(), VALUE, ("timeout",)),
    "timeout of no number": Refusal(lambda g: g.barrier(timeout=float("nan")), lambda g: g.barrier(), VALUE, ("timeout",)),
    "timeout of a wrong type": Refusal(lambda g: g.all_reduce(np.ones(6), timeout="1 s"), _sum, TYPE, ("timeout",)),
    "reduced objects": Refusal(lambda g: g.reduce(np.array([None] * 6)), _reduce, TYPE, ("object",)),
    "reduced complex max": Refusal(lambda g: g.reduce(np.ones(6, "c8"), "max"), _reduce, TYPE, ("max", "complex64")),
    "reduced float bor": Refusal(lambda g: g.reduce(np.ones(6, "f2"), "bor"), _reduce, TYPE, ("bor", "float16")),
    "reduced text": Refusal(lambda g: g.reduce(np.array(["a"] * 6)), _reduce, TYPE, ("sum",)),
    "reduced by an unknown op": Refusal(lambda g: g.reduce(np.ones(6), "avg"), _reduce, VALUE, ("avg",)),
    "reduced mean into integers": Refusal(
        lambda g: g.reduce(np.ones(6, "i4"), "mean", out=np.ones(6, "i4")), _reduce, EITHER, ("out", "float64")
    ),
    "reduced into another shape": Refusal(lambda g: g.reduce(np.ones(6), out=np.ones(7)), _reduce, VALUE, ("out", "6", "7")),
    "reduced into another dtype": Refusal(lambda g: g.reduce(np.ones(6), out=np.ones(6, "f4")), _reduce, EITHER, ("out", "float32")),
    "reduced into a read-only array": Refusal(lambda g: g.reduce(np.ones(6), out=_frozen()), _reduce, VALUE, ("out",)),
    "reduced into repeated memory": Refusal(lambda g: g.reduce(np.ones(6), out=np.broadcast_to(1.0, (6,))), _reduce, VALUE, ("out",)),
    "reduced into a list": Refusal(lambda g: g.reduce(np.ones(6), out=[0.0] * 6), _reduce, TYPE, ("out",)),
    "reduced with overlap": Refusal(_half_reduce, _reduce, VALUE, ("overlap",)),
    "reduced to no rank": Refusal(lambda g: g.reduce(np.ones(6), root=g.size), _reduce, VALUE, ("root",)),
    "reduced to a negative rank": Refusal(lambda g: g.reduce(np.ones(6), root=-1), _reduce, VALUE, ("root", "-1")),
    "reduced to a float": Refusal(lambda g: g.reduce(np.ones(6), root=1.0), _reduce, TYPE, ("root",)),
    "reduced none": Refusal(lambda g: g.reduce(None), _reduce, TYPE),
    "reduced with no time": Refusal(lambda g: g.reduce(np.ones(6), timeout=0), _reduce, VALUE, ("timeout",)),
    "gathered objects": Refusal(lambda g: g.gather(np.array([None] * 6)), _to_root, TYPE, ("object",)),
    "gathered into another shape": Refusal(lambda g: g.gather(np.ones(6), out=np.ones(6)), _to_root, VALUE, ("out", "18", "6")),
    "gathered into another dtype": Refusal(lambda g: g.gather(np.ones(6), out=np.ones(18, "i8")), _to_root, EITHER, ("out", "int64")),
    "gathered into a read-only array": Refusal(
        lambda g: g.gather(np.ones(6), out=np.frombuffer(bytes(144))), _to_root, VALUE, ("out", "read-only")
    ),
    "gathered to no rank": Refusal(lambda g: g.gather(np.ones(6), 3), _to_root, VALUE, ("root",)),
    "gathered to a string": Refusal(lambda g: g.gather(np.ones(6), "0"), _to_root, TYPE, ("root",)),
    "gathered along no axis": Refusal(lambda g: g.gather(np.ones(6), axis=-2), _to_root, VALUE, ("axis",)),
    "gathered along a float": Refusal(lambda g: g.gather(np.ones(6), axis=0.0), _to_root, TYPE, ("axis",)),
    "uneven of a wrong axis": Refusal(
        lambda g: g.all_gather(np.ones(6), 1, True), lambda g: g.all_gather(np.ones(6), 0, True), VALUE, ("axis",)
    ),
    "scattered objects": Refusal(lambda g: g.scatter(np.array([None] * 6)), _from_root, TYPE, ("object",)),
    "scattered none": Refusal(lambda g: g.scatter(None), _from_root, TYPE),
    "scattered what does not divide": Refusal(lambda g: g.scatter(np.ones(7)), _from_root, VALUE, ("7", "3")),
    "scattered what does not divide inside": Refusal(lambda g: g.scatter(np.ones((6, 4)), axis=-1), _from_root, VALUE, ("4",)),
    "expecting what does not divide": Refusal(lambda g: g.scatter(np.ones(7), 1), _from_next, VALUE, ("7",)),
    "scattered without a dimension": Refusal(lambda g: g.scatter(np.array(1.0)), _from_root, VALUE),
    "scattered along no axis": Refusal(lambda g: g.scatter(np.ones(6), axis=1), _from_root, VALUE, ("axis",)),
    "scattered into another shape": Refusal(lambda g: g.scatter(np.ones(6), out=np.ones(6)), _from_root, VALUE, ("out", "2", "6")),
    "scattered into a read-only array": Refusal(lambda g: g.scatter(None, 1, out=np.frombuffer(bytes(16))), _from_next, VALUE, ("out",)),
    "scattered into a list": Refusal(lambda g: g.scatter(None, 1, out=[0.0, 0.0]), _from_next, TYPE, ("out",)),
    "scattered from no rank": Refusal(lambda g: g.scatter(np.ones(6), 3), _from_root, VALUE, ("root",)),
    "exchanged objects": Refusal(lambda g: g.all_to_all(np.array([None] * 6)), _exchange, TYPE, ("object",)),
    "exchanged none": Refusal(lambda g: g.all_to_all(None), _exchange, TYPE),
    "exchanged what does not divide": Refusal(lambda g: g.all_to_all(np.ones(7)), _exchange, VALUE, ("7", "3")),
    "exchanged without a dimension": Refusal(lambda g: g.all_to_all(np.array(1.0)), _exchange, VALUE),
    "exchanged along no axis": Refusal(lambda g: g.all_to_all(np.ones(6), axis=1), _exchange, VALUE, ("axis",)),
    "exchanged along a string": Refusal(lambda g: g.all_to_all(np.ones(6), axis="0"), _exchange, TYPE, ("axis",)),
    "exchanged into another shape": Refusal(lambda g: g.all_to_all(np.ones(6), out=np.ones((2, 3))), _exchange, VALUE, ("out",)),
    "exchanged into another dtype": Refusal(lambda g: g.all_to_all(np.ones(6), out=np.ones(6, "c8")), _exchange, EITHER, ("out",)),
    "exchanged in place in a read-only array": Refusal(lambda g: _exchange_in_place(g, _frozen()), _exchange, VALUE, ("out", "read-only")),
    "exchanged with overlap": Refusal(_half_exchange, _exchange, VALUE, ("overlap",)),
    "exchanged with no time": Refusal(lambda g: g.all_to_all(np.ones(6), timeout=float("nan")), _exchange, VALUE, ("timeout",)),
}


async def _refuse(group: aiodist.Group, name: str) -> None:
    refusal = REFUSALS[name]
    if group.rank == 0:
        with pytest.raises(refusal.kind) as caught:
            refusal.wrong(group)
        missing = [word for word in refusal.words if word not in str(caught.value)]
        assert not missing, f"{missing} are missing in: {caught.value}"
    else:
        error = await error_of(lambda: refusal.right(group))
        assert type(error) is PeerRefusedError, repr(error)
        assert error.ranks == (0,)
    await assert_usable(group)


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_argument_is_refused_and_the_group_goes_on(name: str, run_ranks: RunRanks) -> None:
    run_ranks(3, _refuse, name)


async def _refuse_when_waited_for(group: aiodist.Group, late: int) -> None:
    """The peers' call is there before the wrong one, or after it."""
    if group.rank == late:
        await asyncio.sleep(0.2)
    if group.rank == 0:
        with pytest.raises(TypeError, match="max"):
            group.all_reduce(np.ones(100_000, "c8"), op="max", timeout=20)
    else:
        error = await error_of(lambda: group.all_reduce(np.ones(100_000, "c8"), timeout=20))
        assert type(error) is PeerRefusedError
        assert "max" in str(error) and "0" in str(error) and isinstance(error.seq, int)
        assert error.collective == "all_reduce"
    await assert_usable(group)


@pytest.mark.parametrize("late", [0, 1])
def test_peers_learn_why_whether_they_wait_or_come_later(late: int, run_ranks: RunRanks) -> None:
    run_ranks(3, _refuse_when_waited_for, late)


async def _refuse_between_others(group: aiodist.Group) -> None:
    x = np.full(70_000, group.rank + 1)
    before = group.all_reduce(x)
    refused: Any = None
    if group.rank == 1:
        with pytest.raises(ValueError, match="op"):
            group.all_reduce(x, op="median")
    else:
        refused = group.all_reduce(x)
    after = group.all_reduce(x, op="max")
    assert_same(await before, np.full(70_000, 6))
    assert_same(await after, np.full(70_000, 3))
    if refused is not None:
        assert isinstance(refused.exception(), PeerRefusedError)
        with pytest.raises(PeerRefusedError):
            await refused


def test_calls_in_flight_around_a_refused_one_are_right(run_ranks: RunRanks) -> None:
    run_ranks(3, _refuse_between_others)


async def _refuse_twice(group: aiodist.Group) -> None:
    for refusing in itertools.chain.from_iterable(itertools.combinations(range(group.size), count) for count in (2, 3)):
        if group.rank in refusing:
            with pytest.raises(ValueError, match="root"):
                group.broadcast(np.ones(3), root=77)
        else:
            error = await error_of(lambda: group.broadcast(np.ones(3)))
            assert isinstance(error, PeerRefusedError)
            assert error.ranks and set(error.ranks) <= set(refusing)
    await assert_usable(group)


def test_several_ranks_may_be_refused(run_ranks: RunRanks) -> None:
    run_ranks(3, _refuse_twice)


async def _refuse_many(group: aiodist.Group) -> None:
    """More refusals in a row than a header ring has slots, none awaited in between."""
    futures = []
    for turn in range(100):
        if turn % group.size == group.rank:
            with pytest.raises(TypeError):
                group.all_gather(np.array([None]))
        else:
            futures.append(group.all_gather(np.ones(2)))
    for future in futures:
        assert isinstance(await error_of(future), PeerRefusedError)
    await assert_usable(group)


def test_many_refusals_in_flight(run_ranks: RunRanks) -> None:
    run_ranks(4, _refuse_many)


async def _untouched(group: aiodist.Group) -> None:
    """Neither the refused call nor its peers write anything."""
    out = np.full(9, -1.0)
    if group.rank == 0:
        with pytest.raises(ValueError, match="overlap"):
            group.all_reduce(out[0:6], out=out[3:9])
    else:
        await error_of(lambda: group.all_reduce(np.ones(6), out=out[3:9]))
    assert_same(out, np.full(9, -1.0))
    await assert_usable(group)


def test_a_refused_call_writes_nothing(run_ranks: RunRanks) -> None:
    run_ranks(2, _untouched)


async def _ignored(group: aiodist.Group) -> None:
    """What counts on the root only is not checked elsewhere, so it refuses nothing there."""
    frozen, x = _frozen(), np.full(6, group.rank + 1.0)
    for out in (frozen, np.ones(5), np.ones(6, "i4"), np.broadcast_to(0.0, (6,))):
        elsewhere = out if group.rank else None
        assert_same(await group.reduce(x, out=elsewhere), np.full(6, 6.0) if group.rank == 0 else None)
        gathered = await group.gather(x, out=elsewhere)
        assert_same(gathered, np.repeat([1.0, 2.0, 3.0], 6) if group.rank == 0 else None)
    assert_same(frozen, np.ones(6))


def test_an_out_that_does_not_count_refuses_nothing(run_ranks: RunRanks) -> None:
    run_ranks(3, _ignored)


async def test_a_refused_call_alone() -> None:
    async with aiodist.local_world(1) as groups:
        with pytest.raises(ValueError, match="op"):
            groups[0].all_reduce(np.ones(3), op="nonsense")
        for divides in (groups[0].reduce_scatter, groups[0].scatter, groups[0].all_to_all):
            with pytest.raises(ValueError, match="0-dimensional"):
                divides(np.array(1.0))
        assert_same(await groups[0].all_reduce(np.ones(3)), np.ones(3))


class _Unreadable:
    """Fails with a text that is neither Unicode nor a C string."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise ValueError("a\0b\ud800")


async def _misspelled(group: aiodist.Group) -> None:
    loose: Any = group
    calls = (
        lambda: loose.all_gather(np.ones(2), axs=1),
        lambda: loose.broadcast(),
        lambda: loose.scatter(),
        lambda: loose.reduce(np.ones(2), "sum", 0, 1),
        lambda: loose.all_gather(_Unreadable()),
        lambda: loose.all_reduce(_Unreadable()),
    )
    for call in calls:
        error = await error_of(call if group.rank == 1 else lambda: group.all_gather(np.ones(2)))
        assert type(error) is (TypeError if group.rank == 1 else PeerRefusedError), repr(error)
    await assert_usable(group)


def test_calls_that_do_not_fit_the_signature_are_refused(run_ranks: RunRanks) -> None:
    run_ranks(3, _misspelled)
