"""Lists of arrays that move as one call: all_reduce_many and broadcast_many."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from conftest import RunRanks
from support import oracle
from support.cases import SIZES
from support.checks import assert_usable, error_of, ramp
from support.oracle import Array, DType, assert_same
from support.ranks import run_local

import aiodist
from aiodist import CommunicationError, MismatchError, PeerRefusedError

pytestmark = pytest.mark.timeout(60)

SHAPES: list[tuple[int, ...]] = [(3,), (), (2, 3), (0, 4), (1,), (5, 1, 3), (7001,)]


def mixed(dtypes: tuple[DType, ...], rank: int, count: int = 21) -> list[Array]:
    """Return `count` arrays of turning shapes and dtypes; odd sizes, so that what follows them does not lie on a boundary by itself."""
    arrays = []
    for index in range(count):
        shape, dtype = SHAPES[index % len(SHAPES)], dtypes[index % len(dtypes)]
        random = np.random.default_rng([rank, index])
        if dtype in oracle.FLOATS or dtype in oracle.COMPLEX:  # of many exponents, so that another order of additions gives other bits
            drawn = random.standard_normal(shape) * np.exp2(random.integers(-6, 7, shape))
            arrays.append(np.asarray(drawn * (1 - 2j) if dtype in oracle.COMPLEX else drawn).astype(dtype))
        elif dtype.names is not None:
            fields = np.zeros(shape, dtype)
            fields["id"], fields["weight"] = random.integers(0, 2**31, shape), random.standard_normal(shape)
            arrays.append(fields)
        elif dtype.kind == "V":
            arrays.append(np.frombuffer(random.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape).copy())
        else:
            padded = np.zeros(shape, dtype)  # the padding bytes of a longdouble move too, so they must be the same everywhere
            padded[...] = random.integers(0, 2 if dtype.kind == "b" else 120, shape)
            arrays.append(padded)
    return arrays


def reduced(op: str, lists: list[list[Array]]) -> list[Array]:
    """Return what all_reduce_many gives for the ranks' lists."""
    return [oracle.all_reduced(op, list(terms)) for terms in zip(*lists, strict=True)]


def reducible(op: str) -> tuple[DType, ...]:
    """Return the dtypes that `op` reduces into themselves."""
    return tuple(dtype for dtype in oracle.REDUCIBLE if oracle.is_defined(op, dtype) and oracle.result_dtype(op, dtype) == dtype)


async def _reduce_lists(group: aiodist.Group) -> None:
    for op in oracle.OPS:
        lists = [mixed(reducible(op), rank) for rank in range(group.size)]
        due = reduced(op, lists)
        x = mixed(reducible(op), group.rank)
        result = await group.all_reduce_many(x, op)
        assert_same(result, due)
        assert_same(x, lists[group.rank])
        for array in result:
            assert array.flags.writeable and not any(np.shares_memory(array, given) for given in x)
        outs = [np.empty_like(array) for array in due]
        filled = await group.all_reduce_many(x, op, out=outs)
        assert [id(array) for array in filled] == [id(array) for array in outs]
        assert_same(outs, due)
        await group.all_reduce_many(x, op, out=x)
        assert_same(x, due)


async def _broadcast_lists(group: aiodist.Group) -> None:
    dtypes = (*oracle.REDUCIBLE, *oracle.MOVABLE_ONLY)
    for root in range(group.size):
        due, at_root = mixed(dtypes, root, 44), group.rank == root
        result = await group.broadcast_many(due if at_root else None, root)
        assert_same(result, due)
        assert all(array.flags.writeable for array in result)
        expecting = mixed(dtypes, group.rank, 44)
        assert_same(await group.broadcast_many(expecting, root), due)
        assert_same(expecting, mixed(dtypes, group.rank, 44))
        outs = [np.empty_like(array) for array in due]
        filled = await group.broadcast_many(due if at_root else None, root, out=outs)
        assert [id(array) for array in filled] == [id(array) for array in outs]
        assert_same(outs, due)
        x = mixed(dtypes, group.rank, 44)
        await group.broadcast_many(x, root, out=x)
        assert_same(x, due)


@pytest.mark.parametrize("body", [_reduce_lists, _broadcast_lists])
@pytest.mark.parametrize("size", SIZES)
def test_lists_of_every_dtype_and_shape(size: int, body: Any, run_ranks: RunRanks) -> None:
    run_ranks(size, body)


async def _short_lists(group: aiodist.Group) -> None:
    rank, size = group.rank, group.size
    assert_same(await group.all_reduce_many([]), [])
    assert_same(await group.broadcast_many([] if rank == 0 else None), [])
    assert_same(await group.broadcast_many([], root=size - 1, out=[]), [])
    assert_same(await group.all_reduce_many([np.array(rank)]), [np.array(size * (size - 1) // 2)])
    assert_same(await group.all_reduce_many([np.ones((0, 3), "f2")], "max"), [np.ones((0, 3), "f2")])
    assert_same(await group.broadcast_many([np.array(7, "u1")] if rank == size - 1 else None, size - 1), [np.array(7, "u1")])
    assert_same(await group.all_reduce_many([np.ones(2, "i1"), np.ones(2)], "sum"), [np.full(2, size, "i1"), np.full(2, float(size))])
    await assert_usable(group)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_empty_and_short_lists(size: int, run_ranks: RunRanks) -> None:
    run_ranks(size, _short_lists)


async def _many(group: aiodist.Group, count: int) -> None:
    def given(rank: int) -> list[Array]:
        return [ramp((1 + index % 5, 1, index % 3, 2), rank + index, ("f4", "i2", "f8")[index % 3]) for index in range(count)]

    lists = [given(rank) for rank in range(group.size)]
    assert_same(await group.all_reduce_many(lists[group.rank]), reduced("sum", lists))
    assert_same(await group.broadcast_many(lists[1] if group.rank == 1 else None, 1), lists[1])
    outs = [np.empty_like(array) for array in lists[0]]
    await group.broadcast_many(lists[0] if group.rank == 0 else None, out=outs)
    assert_same(outs, lists[0])


@pytest.mark.parametrize(("size", "count"), [(2, 300), (3, 300), (8, 300), (3, 2000)])
def test_lists_of_many_arrays(size: int, count: int, run_ranks: RunRanks) -> None:
    run_ranks(size, _many, count)


async def _large(group: aiodist.Group) -> None:
    """Totals of many segments, with small arrays between large ones."""

    def given(rank: int) -> list[Array]:
        shapes: list[tuple[tuple[int, ...], str]] = [((3,), "u1"), ((1_000_003,), "f4"), ((), "f2"), ((300, 701), "i2"), ((99_999,), "f8")]
        return [np.asarray(ramp(shape, rank, dtype)) for shape, dtype in shapes]

    lists = [given(rank) for rank in range(group.size)]
    x = given(group.rank)
    futures = [group.all_reduce_many(lists[group.rank]), group.broadcast_many(lists[1] if group.rank == 1 else None, 1)]
    futures.append(group.all_reduce_many(x, "max", out=x))
    assert_same(await futures[0], reduced("sum", lists))
    assert_same(await futures[1], lists[1])
    assert_same(await futures[2], reduced("max", lists))
    assert_same(x, reduced("max", lists))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_lists_of_large_arrays(size: int, run_ranks: RunRanks) -> None:
    run_ranks(size, _large)


async def _layouts(group: aiodist.Group) -> None:
    def given(rank: int) -> list[Array]:
        base = ramp((6, 4), rank)
        frozen = ramp((5,), rank, "i4")
        frozen.flags.writeable = False
        swapped = ramp((3,), rank).astype(">f8")
        return [base[::2, ::-1], np.asfortranarray(base), base.T, np.broadcast_to(rank + 1.0, (3, 2)), frozen, swapped]

    x = given(group.rank)
    terms = [[array.astype(array.dtype.newbyteorder("=")) for array in given(rank)] for rank in range(group.size)]
    due = reduced("sum", terms)
    for got, expected in zip(await group.all_reduce_many(x), due, strict=True):
        assert np.array_equal(got, expected) and got.flags.writeable
    for got, expected in zip(await group.broadcast_many(x, 1), terms[1], strict=True):
        assert np.array_equal(got, expected) and got.flags.writeable
    whole = np.full((12, 8), -1.0)
    outs = [
        whole[::2, ::-2][:3],
        np.zeros((6, 4), order="F"),
        np.zeros((8, 6))[::2],
        np.zeros((3, 2)),
        np.zeros(5, "i4"),
        np.zeros(3, ">f8"),
    ]
    await group.all_reduce_many(x, out=outs)
    for got, expected in zip(outs, due, strict=True):
        assert np.array_equal(got, expected)
    assert (whole[1::2] == -1).all() and (whole[:, ::2] == -1).all() and (whole[6:] == -1).all()


def test_lists_of_arrays_in_any_layout(run_ranks: RunRanks) -> None:
    run_ranks(2, _layouts)


async def _partly_in_place(group: aiodist.Group) -> None:
    """One rank in place, another with some arrays in place: no mismatch."""
    lists = [mixed((np.dtype("f4"), np.dtype("i8")), rank) for rank in range(group.size)]
    x = mixed((np.dtype("f4"), np.dtype("i8")), group.rank)
    outs: list[list[Array] | None] = [None, x, [array if index % 2 else array.copy() for index, array in enumerate(x)]]
    assert_same(await group.all_reduce_many(x, out=outs[group.rank]), reduced("sum", lists))


def test_in_place_on_some_ranks_is_no_mismatch(run_ranks: RunRanks) -> None:
    run_ranks(3, _partly_in_place)


async def _shifted(group: aiodist.Group) -> str:
    """An array of out overlaps one of x in part: right through a copy, or refused."""
    memory = np.zeros(9)
    x, out = [ramp((2,), group.rank, "f4"), memory[:4]], [np.zeros(2, "f4"), memory[3:7]]
    memory[:4] = ramp((4,), group.rank)
    try:
        await group.all_reduce_many(x, out=out)
    except (ValueError, PeerRefusedError):
        outcome = "refused"
    else:
        terms = [ramp((4,), rank) for rank in range(group.size)]
        assert_same(out[1], oracle.all_reduced("sum", terms))
        assert_same(memory[:3], terms[group.rank][:3])
        outcome = "right"
    await assert_usable(group)
    return outcome


def test_overlap_is_right_or_refused_on_all_ranks(run_ranks: RunRanks) -> None:
    assert len(set(run_ranks(2, _shifted))) == 1


async def _kept(group: aiodist.Group) -> tuple[Any, Any]:
    x = [ramp((3,), group.rank), ramp((50_000,), group.rank, "f4")]
    return await group.all_reduce_many(x), await group.broadcast_many(x if group.rank == 1 else None, 1)


async def test_results_outlive_the_group() -> None:
    kept = await run_local(2, _kept)
    gc.collect()
    await run_local(2, _kept)  # memory that was wrongly given back would be used again here
    lists = [[ramp((3,), rank), ramp((50_000,), rank, "f4")] for rank in range(2)]
    for total, copy in kept:
        assert_same(total, reduced("sum", lists))
        assert_same(copy, lists[1])
        for array in (*total, *copy):
            array += 1


# --- Refused --------------------------------------------------------------------------------------------------------------------------


def _frozen() -> Array:
    array = np.ones(3)
    array.flags.writeable = False
    return array


def _pair() -> list[Array]:
    return [np.ones(3), np.ones(2, "f4")]


def _in_place(g: Any, x: list[Any], op: str = "sum") -> Any:
    return g.all_reduce_many(x, op, out=x)


@dataclass(frozen=True)
class Refusal:
    """A call that one rank gets wrong, what it raises, and words of the text; the peers make the right call of the same method."""

    wrong: Callable[[Any], Any]
    kinds: tuple[type[Exception], ...]
    words: tuple[str, ...] = ()


TYPE, VALUE, EITHER = (TypeError,), (ValueError,), (TypeError, ValueError)
REDUCE: dict[str, Refusal] = {
    "mean of integers": Refusal(lambda g: g.all_reduce_many([np.ones(3), np.ones(2, "i4")], "mean"), EITHER, ("mean",)),
    "mean of integers in place": Refusal(lambda g: _in_place(g, [np.ones(3), np.ones(2, "u1")], "mean"), EITHER, ("mean",)),
    "mean of bool": Refusal(lambda g: g.all_reduce_many([np.ones(3, bool)], "mean"), TYPE, ("mean", "bool")),
    "band of floats": Refusal(lambda g: g.all_reduce_many([np.ones(3, "i4"), np.ones(2)], "band"), TYPE, ("band", "float64")),
    "max of complex": Refusal(lambda g: g.all_reduce_many([np.ones(3), np.ones(2, "c8")], "max"), TYPE, ("max", "complex64")),
    "sum of times": Refusal(lambda g: g.all_reduce_many([np.zeros(3, "M8[s]")]), TYPE, ("sum",)),
    "unknown op": Refusal(lambda g: g.all_reduce_many(_pair(), "avg"), VALUE, ("avg",)),
    "objects": Refusal(lambda g: g.all_reduce_many([np.ones(3), np.array([None])]), TYPE, ("object",)),
    "no array": Refusal(lambda g: g.all_reduce_many([np.ones(3), None]), TYPE),
    "no list": Refusal(lambda g: g.all_reduce_many(7), TYPE),
    "none": Refusal(lambda g: g.all_reduce_many(None), TYPE),
    "read-only in place": Refusal(lambda g: _in_place(g, [np.ones(2, "f4"), _frozen()]), VALUE, ("out", "read-only")),
    "out read-only": Refusal(lambda g: g.all_reduce_many(_pair(), out=[_frozen(), np.ones(2, "f4")]), VALUE, ("out", "read-only")),
    "out of fewer": Refusal(lambda g: g.all_reduce_many(_pair(), out=[np.ones(3)]), VALUE, ("out", "1", "2")),
    "out of more": Refusal(lambda g: g.all_reduce_many(_pair(), out=[*_pair(), np.ones(1)]), VALUE, ("out", "3", "2")),
    "out of another shape": Refusal(lambda g: g.all_reduce_many(_pair(), out=[np.ones(4), np.ones(2, "f4")]), VALUE, ("out", "3", "4")),
    "out of another dtype": Refusal(lambda g: g.all_reduce_many(_pair(), out=[np.ones(3), np.ones(2)]), EITHER, ("out", "float32")),
    "out is an array": Refusal(lambda g: g.all_reduce_many([np.ones(3)], out=np.ones(3)), TYPE, ("out",)),
    "one array twice in out": Refusal(lambda g: g.all_reduce_many([np.ones(3), np.zeros(3)], out=[np.ones(3)] * 2), VALUE, ("out",)),
    "timeout": Refusal(lambda g: g.all_reduce_many(_pair(), timeout=-1), VALUE, ("timeout",)),
}
BROADCAST: dict[str, Refusal] = {
    "root without arrays": Refusal(lambda g: g.broadcast_many(None), TYPE),
    "root out of range": Refusal(lambda g: g.broadcast_many(_pair(), g.size), VALUE, ("root",)),
    "root of a wrong type": Refusal(lambda g: g.broadcast_many(_pair(), "0"), TYPE, ("root",)),
    "objects": Refusal(lambda g: g.broadcast_many([np.array([None])]), TYPE, ("object",)),
    "out of fewer": Refusal(lambda g: g.broadcast_many(_pair(), out=[np.ones(3)]), VALUE, ("out",)),
    "out read-only": Refusal(lambda g: g.broadcast_many(_pair(), out=[_frozen(), np.ones(2, "f4")]), VALUE, ("out",)),
    "receiver's out read-only": Refusal(lambda g: g.broadcast_many(None, 1, out=[_frozen(), np.ones(2, "f4")]), VALUE, ("out",)),
}


async def _refuse(group: aiodist.Group, method: str, name: str) -> None:
    refusal = (REDUCE if method == "all_reduce_many" else BROADCAST)[name]
    if group.rank == 0:
        with pytest.raises(refusal.kinds) as caught:
            refusal.wrong(group)
        missing = [word for word in refusal.words if word not in str(caught.value)]
        assert not missing, f"{missing} are missing in: {caught.value}"
    else:
        error = await error_of(lambda: getattr(group, method)(_pair()))
        assert type(error) is PeerRefusedError, repr(error)
        assert error.ranks == (0,)
    await assert_usable(group)


@pytest.mark.parametrize(
    ("method", "name"), [*(("all_reduce_many", name) for name in REDUCE), *(("broadcast_many", name) for name in BROADCAST)]
)
def test_wrong_lists_are_refused_and_the_group_goes_on(method: str, name: str, run_ranks: RunRanks) -> None:
    run_ranks(3, _refuse, method, name)


# --- Ranks that disagree --------------------------------------------------------------------------------------------------------------

Call = Callable[[Any], Any]
DISAGREEMENTS: dict[str, tuple[Call, Call, tuple[str, ...]]] = {
    "fewer": (lambda g: g.all_reduce_many([np.ones(3)]), lambda g: g.all_reduce_many([np.ones(3), np.ones(0)]), ()),
    "shape": (lambda g: g.all_reduce_many([np.ones((3, 2))]), lambda g: g.all_reduce_many([np.ones((2, 3))]), ()),
    "cut elsewhere": (lambda g: g.all_reduce_many([np.ones(3), np.ones(2)]), lambda g: g.all_reduce_many([np.ones(2), np.ones(3)]), ()),
    "dtype": (lambda g: g.all_reduce_many([np.ones(3, "i4")]), lambda g: g.all_reduce_many([np.ones(3, "u4")]), ()),
    "order": (
        lambda g: g.all_reduce_many([np.ones(2, "f4"), np.ones(2, "i4")]),
        lambda g: g.all_reduce_many([np.ones(2, "i4"), np.ones(2, "f4")]),
        (),
    ),
    "one of many": (
        lambda g: g.all_reduce_many([*[np.ones(2)] * 299, np.ones(3)]),
        lambda g: g.all_reduce_many([np.ones(2)] * 300),
        (),
    ),
    "large": (lambda g: g.all_reduce_many([np.ones(200_000)]), lambda g: g.all_reduce_many([np.ones(100_000)] * 2), ()),
    "empty": (lambda g: g.all_reduce_many([]), lambda g: g.all_reduce_many([np.ones(3)]), ()),
    "op": (lambda g: g.all_reduce_many([np.ones(3)], "max"), lambda g: g.all_reduce_many([np.ones(3)]), ("max", "sum")),
    "one array": (lambda g: g.all_reduce(np.ones(3)), lambda g: g.all_reduce_many([np.ones(3)]), ()),
    "one array of bytes": (lambda g: g.all_reduce(np.ones(24, "u1")), lambda g: g.all_reduce_many([np.ones(3)]), ()),
    "root": (lambda g: g.broadcast_many([np.ones(3)], 1), lambda g: g.broadcast_many([np.ones(3)], 0), ("broadcast", "root")),
    "receiver": (lambda g: g.broadcast_many([np.ones(3, "f4")]), lambda g: g.broadcast_many([np.ones(3)]), ("broadcast",)),
    "receiver of fewer": (lambda g: g.broadcast_many([np.ones(3)]), lambda g: g.broadcast_many([np.ones(3)] * 2), ("broadcast",)),
    "receiver's out": (lambda g: g.broadcast_many(None, out=[np.ones(4)]), lambda g: g.broadcast_many([np.ones(3)]), ("broadcast",)),
    "receiver of one array": (lambda g: g.broadcast(None), lambda g: g.broadcast_many([np.ones(3)]), ("broadcast",)),
    "collective": (lambda g: g.broadcast_many(None), lambda g: g.all_reduce_many([np.ones(3)]), ("broadcast", "all_reduce")),
}


async def _disagree(group: aiodist.Group, name: str) -> None:
    odd, others, words = DISAGREEMENTS[name]
    await assert_usable(group)
    error = await error_of(lambda: (odd if group.rank == 1 else others)(group))
    assert type(error) is MismatchError, repr(error)
    assert error.seq == 2
    assert all(word in str(error) for word in ("test_many.py:", *words)), f"{words} are missing in: {error}"
    assert isinstance(await error_of(lambda: group.all_reduce_many([np.ones(3)])), CommunicationError)


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_disagreement_is_told_to_all(name: str, run_ranks: RunRanks) -> None:
    run_ranks(3, _disagree, name)


async def _untouched(group: aiodist.Group) -> None:
    outs = [np.full(3, -1.0), np.full(50_000, -1.0)]
    x = [np.ones(3), np.ones(50_000 + (group.rank == 1))]
    if group.rank == 0:
        error = await error_of(lambda: group.all_reduce_many(x, out=outs))
        assert isinstance(error, MismatchError)
        assert_same(outs, [np.full(3, -1.0), np.full(50_000, -1.0)])
    else:
        assert isinstance(await error_of(lambda: group.all_reduce_many(x, out=x)), MismatchError)
        assert_same(x, [np.ones(3), np.ones(50_001)])


def test_a_mismatch_writes_nothing(run_ranks: RunRanks) -> None:
    run_ranks(2, _untouched)
