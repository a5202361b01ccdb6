"""Reduce, gather, scatter and all_to_all: what each rank ends with, for every root, axis, number of ranks and kind of array."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import RunRanks
from support import oracle
from support.cases import SIZES
from support.checks import assert_usable, ramp
from support.oracle import Array, assert_same
from support.ranks import run_local

import aiodist
from aiodist import PeerRefusedError

pytestmark = pytest.mark.timeout(60)

SHAPES: list[tuple[int, ...]] = [(5,), (2, 3), (2, 3, 4), (3, 0, 2), (0,), (30_011,)]


def shapes_and_axes() -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield shapes of one part with each of their axes, counted from the front and from the back."""
    for shape in SHAPES:
        for axis in range(-len(shape), len(shape)):
            yield shape, axis


def whole_shape(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    """Return the shape of `size` parts of `shape` joined along `axis`."""
    return tuple(extent * size if index == axis % len(shape) else extent for index, extent in enumerate(shape))


async def _reduce(group: aiodist.Group) -> None:
    for turn, shape in enumerate(((), *SHAPES)):
        terms = [np.asarray(ramp(shape, rank, "f4")) for rank in range(group.size)]
        dues = {op: oracle.all_reduced(op, terms) for op in ("sum", "max")}
        for root in range(group.size):
            op = "max" if (root + turn) % 2 else "sum"
            x = terms[group.rank].copy()
            result = await group.reduce(x, op, root)
            assert_same(result, dues[op] if group.rank == root else None)
            assert_same(x, terms[group.rank])


async def _gather(group: aiodist.Group) -> None:
    for turn, (shape, axis) in enumerate(shapes_and_axes()):
        terms = [ramp(shape, rank, "i4") for rank in range(group.size)]
        for root in range(group.size) if turn % 4 == 0 else [turn % group.size]:
            result = await group.gather(terms[group.rank], root=root, axis=axis)
            assert_same(result, np.concatenate(terms, axis=axis) if group.rank == root else None)
    assert_same(await group.gather(terms[group.rank], 0, -1), np.concatenate(terms, axis=-1) if group.rank == 0 else None)


async def _scatter(group: aiodist.Group) -> None:
    for turn, (shape, axis) in enumerate(shapes_and_axes()):
        for root in range(group.size) if turn % 4 == 0 else [turn % group.size]:
            whole = ramp(whole_shape(shape, axis, group.size), root)
            expecting = np.zeros_like(whole) if (turn + group.rank) % 2 else None
            result = await group.scatter(whole if group.rank == root else expecting, root=root, axis=axis)
            assert_same(result, np.split(whole, group.size, axis=axis)[group.rank])
            assert_same(whole, ramp(whole_shape(shape, axis, group.size), root))
            assert expecting is None or not expecting.any()
    assert_same(await group.scatter(whole if group.rank == 0 else None, 0, -1), np.split(whole, group.size, axis=-1)[group.rank])


async def _all_to_all(group: aiodist.Group) -> None:
    for shape, axis in shapes_and_axes():
        terms = [ramp(whole_shape(shape, axis, group.size), rank, "i8") for rank in range(group.size)]
        due = np.concatenate([np.split(term, group.size, axis=axis)[group.rank] for term in terms], axis=axis)
        x = terms[group.rank].copy()
        assert_same(await group.all_to_all(x, axis=axis), due)
        assert_same(await group.all_to_all(x, axis), due)
        assert_same(x, terms[group.rank])


@pytest.mark.parametrize("body", [_reduce, _gather, _scatter, _all_to_all])
@pytest.mark.parametrize("size", SIZES)
def test_roots_shapes_and_axes(size: int, body: Any, run_ranks: RunRanks) -> None:
    run_ranks(size, body)


async def _zero_dimensions(group: aiodist.Group) -> None:
    size, rank = group.size, group.rank
    for root in range(size):
        at_root = rank == root
        assert_same(await group.reduce(np.array(rank + 1), root=root), np.array(size * (size + 1) // 2) if at_root else None)
        assert_same(await group.reduce(1.5, root=root), np.array(1.5 * size) if at_root else None)
        assert_same(await group.gather(np.array(rank, "i4"), root=root), np.arange(size, dtype="i4") if at_root else None)
        assert_same(await group.gather(np.float64(rank), root, -1), np.arange(float(size)) if at_root else None)
    x = np.array(rank + 1)
    result = await group.reduce(x, op="sum", root=size - 1, out=x)
    assert result is (x if rank == size - 1 else None)
    assert_same(x, np.array(size * (size + 1) // 2 if rank == size - 1 else rank + 1))


def test_arrays_of_no_dimension(run_ranks: RunRanks) -> None:
    run_ranks(4, _zero_dimensions)


async def _no_elements(group: aiodist.Group) -> None:
    size, at_root = group.size, group.rank == 1
    for shape in ((1, 0, 2), (0,), (0, 5)):
        x = np.ones(shape, "f4")
        wide = np.ones((shape[0] * size, *shape[1:]), "f4")
        for op in ("sum", "max", "min", "mean", "prod"):
            assert_same(await group.reduce(x, op, 1), x if at_root else None)
        assert_same(await group.gather(x, 1), wide if at_root else None)
        assert_same(await group.scatter(wide if at_root else None, 1), x)
        assert_same(await group.all_to_all(wide), wide)
        assert await group.all_to_all(wide, out=wide) is wide
        assert_same(await group.reduce(group.empty(shape, "f4"), root=1), x if at_root else None)
    assert_same(await group.reduce(np.ones(1), root=1), np.array([float(size)]) if at_root else None)


def test_arrays_of_no_elements(run_ranks: RunRanks) -> None:
    run_ranks(4, _no_elements)


async def _outs(group: aiodist.Group, count: int) -> None:
    size, rank, root = group.size, group.rank, group.size - 1
    terms = [ramp((count,), other, "f4") for other in range(size)]
    wides = [ramp((size * count,), other, "f4") for other in range(size)]
    unread = np.full((2, 2), -1, "i2")  # of another shape and dtype: what does not count is not looked at
    total, joined, share, swapped = (np.full(extent, -1, "f4") for extent in (count, count * size, count, count * size))
    result = await group.reduce(terms[rank], root=root, out=total if rank == root else unread)
    assert result is (total if rank == root else None)
    result = await group.gather(terms[rank], root=root, out=joined if rank == root else unread)
    assert result is (joined if rank == root else None)
    assert await group.scatter(wides[root] if rank == root else None, root=root, out=share) is share
    assert await group.all_to_all(wides[rank], out=swapped) is swapped
    if rank == root:
        assert_same(total, oracle.all_reduced("sum", terms))
        assert_same(joined, np.concatenate(terms))
    assert_same(share, wides[root][rank * count : (rank + 1) * count])
    assert_same(swapped, np.concatenate([wide[rank * count : (rank + 1) * count] for wide in wides]))
    assert_same(unread, np.full((2, 2), -1, "i2"))


@pytest.mark.parametrize("count", [6, 70_000])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_results_go_where_out_says(size: int, count: int, run_ranks: RunRanks) -> None:
    run_ranks(size, _outs, count)


async def _in_place(group: aiodist.Group, count: int) -> None:
    size, rank = group.size, group.rank
    terms = [ramp((count,), other, "f4") for other in range(size)]
    for root in range(size):
        x = terms[rank].copy()
        result = await group.reduce(x, root=root, out=x)
        assert result is (x if rank == root else None)
        assert_same(x, oracle.all_reduced("sum", terms) if rank == root else terms[rank])
        whole = np.full(count * size, -1, "f4")
        own = whole[rank * count : (rank + 1) * count]
        own[...] = terms[rank]
        await group.gather(own, root=root, out=whole if rank == root else None)
        if rank == root:
            assert_same(whole, np.concatenate(terms))
        else:
            assert_same(own, terms[rank])
            assert (np.delete(whole, slice(rank * count, (rank + 1) * count)) == -1).all()
    wides = [ramp((size * count,), other, "i2") for other in range(size)]
    x = wides[rank].copy()
    assert await group.all_to_all(x, out=x) is x
    assert_same(x, np.concatenate([wide[rank * count : (rank + 1) * count] for wide in wides]))


@pytest.mark.parametrize("count", [4, 50_000])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_in_place(size: int, count: int, run_ranks: RunRanks) -> None:
    run_ranks(size, _in_place, count)


Aliased = Callable[[aiodist.Group], tuple[Any, Array | list[Array], Any]]


def _scatter_into_own_part(group: aiodist.Group) -> tuple[Any, Any, Any]:
    whole = ramp((9,), 0)
    own = whole[3 * group.rank : 3 * group.rank + 3] if group.rank == 0 else np.zeros(3)
    future = group.scatter(whole if group.rank == 0 else None, out=own)
    return future, own, ramp((9,), 0)[3 * group.rank : 3 * group.rank + 3]


def _gather_from_another_part(group: aiodist.Group) -> tuple[Any, Any, Any]:
    """The root's x lies where the next rank's goes."""
    whole = np.zeros(9)
    whole[3:6] = ramp((3,), group.rank)
    future = group.gather(whole[3:6], out=whole if group.rank == 0 else None)
    return future, whole, np.concatenate([ramp((3,), rank) for rank in range(3)]) if group.rank == 0 else None


def _all_gather_from_own_columns(group: aiodist.Group) -> tuple[Any, Any, Any]:
    whole = np.zeros((2, 6))
    own = whole[:, 2 * group.rank : 2 * group.rank + 2]
    own[...] = ramp((2, 2), group.rank)
    return group.all_gather(own, 1, out=whole), whole, np.concatenate([ramp((2, 2), rank) for rank in range(3)], axis=1)


def _uneven_from_own_part(group: aiodist.Group) -> tuple[Any, Any, Any]:
    terms = [ramp((rank + 1,), rank) for rank in range(3)]
    whole, start = np.zeros(6), [0, 1, 3][group.rank]
    own = whole[start : start + group.rank + 1]
    own[...] = terms[group.rank]
    return group.all_gather(own, uneven=True, out=whole), whole, np.concatenate(terms)


def _exchanged(group: aiodist.Group, order: list[int]) -> tuple[Any, Any, Any]:
    x = [ramp((2,), 10 * group.rank + receiver) for receiver in range(3)]
    outs = [x[index] for index in order]
    return group.all_to_all(x, out=outs), outs, [ramp((2,), 10 * sender + group.rank) for sender in range(3)]


async def _right_or_refused(group: aiodist.Group, start: Aliased) -> str:
    """Return how the call ended; what the refusal of one rank is to the others."""
    try:
        future, out, due = start(group)
        result = await future
    except ValueError as error:
        assert "overlap" in str(error), error
        return "refused"
    except PeerRefusedError:
        return "refused"
    assert_same(result, due)
    if due is not None:
        assert_same(out, due)
    return "right"


ALIASED: dict[str, Aliased] = {
    "scatter into the own part": _scatter_into_own_part,
    "gather from another part": _gather_from_another_part,
    "all_gather from the own columns": _all_gather_from_own_columns,
    "uneven all_gather from the own part": _uneven_from_own_part,
    "exchange in place": lambda group: _exchanged(group, [0, 1, 2]),
    "exchange in place in another order": lambda group: _exchanged(group, [1, 2, 0]),
}


async def _alias(group: aiodist.Group, name: str) -> str:
    outcome = await _right_or_refused(group, ALIASED[name])
    await assert_usable(group)
    return outcome


@pytest.mark.parametrize("name", ALIASED)
def test_overlap_is_right_or_refused_on_all_ranks(name: str, run_ranks: RunRanks) -> None:
    assert len(set(run_ranks(3, _alias, name))) == 1


async def _small_squares(group: aiodist.Group) -> None:
    """The reduced array appears on the root and nowhere else."""
    x = np.full((2, 2), group.rank + 1.0)
    result = await group.reduce(x, out=x if group.rank == 0 else None)
    assert_same(x, np.full((2, 2), 3.0 if group.rank == 0 else 2.0))
    assert_same(result, np.full((2, 2), 3.0) if group.rank == 0 else None)


def test_reduce_leaves_the_other_ranks_alone(run_ranks: RunRanks) -> None:
    run_ranks(2, _small_squares)


async def _means(group: aiodist.Group) -> None:
    rows = [[1, -1, 0, 7, 8], [2, -2, 0, 8, 8]]
    x = np.array(rows[group.rank], "i4")
    out = np.zeros(5)
    at_root = group.rank == 1
    assert_same(await group.reduce(x, "mean", 1, out=out), np.array([1.5, -1.5, 0.0, 7.5, 8.0]) if at_root else None)
    assert_same(out, np.array([1.5, -1.5, 0.0, 7.5, 8.0]) if at_root else np.zeros(5))
    assert_same(await group.reduce(x, aiodist.ReduceOp.MEAN, 1), out if at_root else None)


def test_reduced_mean_of_integers_is_float64(run_ranks: RunRanks) -> None:
    run_ranks(2, _means)


async def _owned(group: aiodist.Group, count: int) -> list[Any]:
    x = ramp((count * group.size,), group.rank)
    results = [await group.reduce(x), await group.gather(x), await group.scatter(x if group.rank == 0 else None), await group.all_to_all(x)]
    for result in results:
        if result is not None:
            result += 1
            assert not np.shares_memory(result, x)
    assert_same(x, ramp((count * group.size,), group.rank))
    return results


@pytest.mark.parametrize("count", [3, 60_000])
@pytest.mark.parametrize("size", [1, 2, 3])
async def test_results_are_their_owners_and_outlive_the_group(size: int, count: int) -> None:
    kept = await run_local(size, _owned, count)
    gc.collect()
    await run_local(size, _owned, count)  # memory that was wrongly given back would be used again here
    terms = [ramp((count * size,), rank) for rank in range(size)]
    for rank, (total, joined, share, swapped) in enumerate(kept):
        part = slice(rank * count, (rank + 1) * count)
        assert_same(total, oracle.all_reduced("sum", terms) + 1 if rank == 0 else None)
        assert_same(joined, np.concatenate(terms) + 1 if rank == 0 else None)
        assert_same(share, terms[0][part] + 1)
        assert_same(swapped, np.concatenate([term[part] for term in terms]) + 1)


async def _travelling(group: aiodist.Group) -> None:
    """Receivers of a scatter need not know what comes."""
    for root, dtype in enumerate([np.dtype("M8[us]"), np.dtype("U7"), np.dtype([("a", "i2"), ("b", "c8")]), np.dtype("?")]):
        whole = oracle.vector(np.dtype("i8"), 60, 0).astype("i2").astype("i8")
        values: Array = np.zeros((4, 15), dtype)
        if dtype.names is None:
            values[...] = whole.reshape(4, 15)
        else:
            values["a"], values["b"] = whole.reshape(4, 15), whole.reshape(4, 15) * 1j
        future = group.scatter(values if group.rank == root else None, root)
        assert_same(await future, values[group.rank : group.rank + 1])
        assert future.shape == (1, 15) and future.dtype == dtype


def test_shape_and_dtype_travel_with_a_scatter(run_ranks: RunRanks) -> None:
    run_ranks(4, _travelling)


async def _late(group: aiodist.Group, turns: int) -> None:
    """Small and large, un-awaited, of every kind, with ranks that come late by turns."""
    size, rank = group.size, group.rank
    futures: list[tuple[Any, Any]] = []
    for turn in range(turns):
        count, root = (2, 20_000, 1, 3000)[turn % 4], turn % size
        terms = [ramp((count * size,), other + turn, "i8") for other in range(size)]
        part = slice(rank * count, (rank + 1) * count)
        futures.append((group.scatter(terms[root] if rank == root else None, root), terms[root][part]))
        futures.append((group.reduce(terms[rank], "sum", root), oracle.all_reduced("sum", terms) if rank == root else None))
        futures.append((group.all_to_all(terms[rank]), np.concatenate([term[part] for term in terms])))
        futures.append((group.gather(terms[rank], root), np.concatenate(terms) if rank == root else None))
        futures.append((group.all_reduce(terms[rank], "max"), oracle.all_reduced("max", terms)))
        if turn % size == rank:
            await asyncio.sleep(0.005)
    for future, due in futures:
        assert_same(await future, due)
    await assert_usable(group)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_collectives_in_flight_together_keep_their_order(size: int, run_ranks: RunRanks) -> None:
    run_ranks(size, _late, 12)


async def _as_functions(group: aiodist.Group) -> None:
    """The functions of `aiodist.ops` do what the methods do."""
    x, at_root = ramp((group.size, 2), group.rank), group.rank == 1
    assert_same(await aiodist.ops.reduce(x, "max", 1, group=group), await group.reduce(x, "max", 1))
    assert_same(await aiodist.ops.gather(x, 1, 1, group=group), await group.gather(x, 1, 1))
    assert_same(await aiodist.ops.gather(x, 1, uneven=True, group=group), await group.gather(x, 1, uneven=True))
    assert_same(await aiodist.ops.all_gather(x, 1, True, group=group), await group.all_gather(x, 1, True))
    assert_same(await aiodist.ops.scatter(x if at_root else None, 1, group=group), await group.scatter(x if at_root else None, 1))
    assert_same(await aiodist.ops.all_to_all(x, group=group), await group.all_to_all(x))
    assert_same(await aiodist.ops.all_reduce_many([x, x[0]], group=group), await group.all_reduce_many([x, x[0]]))
    assert_same(await aiodist.ops.broadcast_many([x, x[0]], 1, group=group), await group.broadcast_many([x, x[0]], 1))
    assert await aiodist.ops.broadcast_object({"rank": group.rank}, 1, group=group) == {"rank": 1}
    assert await aiodist.ops.all_gather_object(group.rank, group=group) == [0, 1]
    assert await aiodist.ops.gather_object(group.rank, 1, group=group) == ([0, 1] if at_root else None)
    assert await aiodist.ops.scatter_object(["a", "b"] if at_root else None, 1, group=group) == "ab"[group.rank]


def test_functions_are_the_methods(run_ranks: RunRanks) -> None:
    run_ranks(2, _as_functions)


async def _copies(group: aiodist.Group) -> None:
    x = ramp((6,), 0)
    for result in (await group.reduce(x), await group.gather(x), await group.scatter(x), await group.all_to_all(x)):
        assert_same(result, x)
        assert not np.shares_memory(result, x)
    (listed,), scattered = await group.all_to_all([x]), await group.scatter([x])
    for result in (listed, scattered, await group.gather(x, uneven=True), await group.all_gather(x, uneven=True)):
        assert_same(result, x)
        assert not np.shares_memory(result, x)
    assert await group.reduce(x, out=x) is x
    assert_same(x, ramp((6,), 0))


def test_a_group_of_one_rank_copies(run_ranks: RunRanks) -> None:
    run_ranks(1, _copies)
