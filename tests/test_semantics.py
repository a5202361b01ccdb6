"""What a call means: axes, shapes, layouts, dtypes, and who owns the memory."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import RunRanks
from support import oracle
from support.checks import assert_usable, ramp
from support.oracle import assert_same
from support.ranks import run_local

import aiodist

pytestmark = pytest.mark.timeout(60)


async def _gather_along(group: aiodist.Group) -> None:
    parts = [ramp((2, 3, 4), rank) for rank in range(group.size)]
    for axis in (0, 1, 2, -1, -3):
        assert_same(await group.all_gather(parts[group.rank], axis=axis), np.concatenate(parts, axis=axis))
        assert_same(await group.all_gather(parts[group.rank], axis), np.concatenate(parts, axis=axis))


def test_all_gather_concatenates_along_the_axis(run_ranks: RunRanks) -> None:
    run_ranks(3, _gather_along)


async def _scatter_along(group: aiodist.Group) -> None:
    size = group.size
    for axis, shape in ((0, (2 * size, 3, 4)), (1, (3, size, 4)), (2, (2, 3, 3 * size)), (-1, (5, size)), (-2, (size, 5))):
        terms = [ramp(shape, rank, "f4") for rank in range(size)]
        due = np.split(oracle.all_reduced("sum", terms), size, axis=axis)[group.rank]
        assert_same(await group.reduce_scatter(terms[group.rank], axis=axis), due)
        assert_same(await group.reduce_scatter(terms[group.rank], "sum", axis), due)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_reduce_scatter_splits_along_the_axis(size: int, run_ranks: RunRanks) -> None:
    run_ranks(size, _scatter_along)


async def _zero_dimensions(group: aiodist.Group) -> None:
    size, rank = group.size, group.rank
    assert_same(await group.all_reduce(np.array(1)), np.array(size))
    assert_same(await group.all_reduce(np.array(rank + 1), op="max"), np.array(size))
    assert_same(await group.all_reduce(np.float64(1.5)), np.array(1.5 * size))
    assert_same(await group.all_reduce(1.5), np.array(1.5 * size))
    assert_same(await group.all_gather(np.array(rank, "i4")), np.arange(size, dtype="i4"))
    assert_same(await group.broadcast(np.array(7.5) if rank == 0 else None), np.array(7.5))
    x = np.array(1)
    assert await group.all_reduce(x, out=x) is x
    assert_same(x, np.array(size))


def test_arrays_of_no_dimension(run_ranks: RunRanks) -> None:
    run_ranks(4, _zero_dimensions)


async def _no_elements(group: aiodist.Group) -> None:
    size = group.size
    for shape in ((1, 0, 2), (0,), (0, 5)):
        x = np.ones(shape, "f4")
        for op in ("sum", "max", "min", "mean", "prod"):
            assert_same(await group.all_reduce(x, op=op), x)
        assert_same(await group.broadcast(x if group.rank == 1 else None, root=1), x)
        assert_same(await group.all_gather(x), np.ones((shape[0] * size, *shape[1:]), "f4"))
        assert_same(await group.all_gather(x, axis=-1), np.ones((*shape[:-1], shape[-1] * size), "f4"))
        wide = np.ones((shape[0] * size, *shape[1:]), "f4")
        assert_same(await group.reduce_scatter(wide, op="max"), x)
        assert await group.all_reduce(x, out=x) is x
        assert_same(await group.all_reduce(group.empty(shape, "f4")), x)
    assert_same(await group.all_reduce(np.ones(1)), np.array([float(size)]))


def test_arrays_of_no_elements(run_ranks: RunRanks) -> None:
    run_ranks(4, _no_elements)


async def _fortran(group: aiodist.Group) -> None:
    base = np.arange(6.0).reshape(2, 3)
    for turned in (0, 1):
        x = np.asfortranarray(base) if group.rank == turned else base.copy()
        receiver = np.zeros((2, 3), order="C" if group.rank == turned else "F")
        assert_same(await group.all_reduce(x), base * 2)
        assert_same(await group.broadcast(x if group.rank == turned else receiver, turned), base)
        assert_same(await group.broadcast(x if group.rank == turned else None, turned), base)
        assert_same(await group.all_gather(x), np.concatenate([base, base]))
        assert_same(await group.all_gather(x, axis=1), np.concatenate([base, base], axis=1))
        assert_same(await group.reduce_scatter(x), base[group.rank : group.rank + 1] * 2)
        assert await group.all_reduce(x, out=receiver) is receiver
        assert_same(receiver, base * 2)
        await group.all_reduce(x, out=x)
        assert_same(x, base * 2)


def test_fortran_order_is_never_transposed(run_ranks: RunRanks) -> None:
    run_ranks(2, _fortran)


async def _strided(group: aiodist.Group) -> None:
    rank = group.rank
    base = np.arange(6.0) + 10 * rank
    assert_same(await group.all_reduce(base[::2]), np.array([10.0, 14.0, 18.0]))
    assert_same(await group.all_reduce(base[::-1]), (2 * np.arange(6.0) + 10)[::-1])
    assert_same(await group.all_reduce(np.broadcast_to(rank + 1.0, (3,))), np.full(3, 3.0))
    await group.broadcast(base[::2], out=base[::2])
    assert_same(base, np.arange(6.0) if rank == 0 else np.array([0.0, 11.0, 2.0, 13.0, 4.0, 15.0]))


async def _strided_rows(group: aiodist.Group) -> None:
    big = np.arange(65, dtype="i4").reshape(13, 5)
    buffer = np.full((13, 5), -1, "i4")
    own = big[8:9] if group.rank == 1 else buffer[3:4]
    await group.broadcast(own, root=1, out=own)
    assert_same(big, np.arange(65, dtype="i4").reshape(13, 5))
    due = np.full((13, 5), -1, "i4")
    if group.rank == 0:
        due[3] = [40, 41, 42, 43, 44]
    assert_same(buffer, due)


async def _strided_large(group: aiodist.Group) -> None:
    """Views too large for a slot, into views: the gaps stay."""
    base = ramp((300, 400), group.rank, "f4")
    out = np.zeros((300, 400), "f4")
    await group.all_reduce(base[::2, ::-3], out=out[::2, ::-3])
    due = np.zeros((300, 400), "f4")
    due[::2, ::-3] = oracle.all_reduced("sum", [ramp((300, 400), rank, "f4") for rank in range(group.size)])[::2, ::-3]
    assert_same(out, due)
    assert_same(await group.all_gather(base.T), np.concatenate([ramp((300, 400), rank, "f4").T for rank in range(group.size)]))


@pytest.mark.parametrize("body", [_strided, _strided_rows, _strided_large])
def test_strided_views_go_by_their_logical_order(body: Any, run_ranks: RunRanks) -> None:
    run_ranks(2, body)


async def _read_only(group: aiodist.Group) -> None:
    for count in (4, 60_000):
        x = np.ones(count)
        x.flags.writeable = False
        results = [await group.all_reduce(x), await group.broadcast(x if group.rank == 0 else None), await group.all_gather(x)]
        for result in results:
            result += 1
        assert_same(results[0], np.full(count, 3.0))
        assert_same(x, np.ones(count))


def test_read_only_input_gives_writable_results(run_ranks: RunRanks) -> None:
    run_ranks(2, _read_only)


async def _byte_swapped(group: aiodist.Group) -> None:
    for name in (">f4", ">i8", ">c16", ">f2", ">u2"):
        for count in (5, 30_000):
            x = ramp((count,), 0, "f4").astype(name)
            assert np.array_equal(await group.all_reduce(x, op="sum"), (x.astype(x.dtype.newbyteorder("=")) * group.size))
            assert np.array_equal(await group.all_gather(x), np.concatenate([x] * group.size))
            assert np.array_equal(await group.broadcast(x if group.rank == 1 else None, root=1), x)


def test_byte_swapped_input_gives_right_values(run_ranks: RunRanks) -> None:
    run_ranks(2, _byte_swapped)


async def _small_integers(group: aiodist.Group) -> None:
    rank = group.rank
    assert_same(await group.all_reduce(np.array([[120], [100]][rank], "i1")), np.array([-36], "i1"))
    assert_same(await group.all_reduce(np.array([2**63, 2**63 - 1][rank : rank + 1], "u8")), np.array([2**64 - 1], "u8"))
    assert_same(await group.all_reduce(np.array([2**63, 1][rank : rank + 1], "u8"), op="max"), np.array([2**63], "u8"))
    flags = np.array([[True, False, True], [True, False, False]][rank])
    for op, due in (
        ("sum", [1, 0, 1]),
        ("max", [1, 0, 1]),
        ("bor", [1, 0, 1]),
        ("prod", [1, 0, 0]),
        ("min", [1, 0, 0]),
        ("bxor", [0, 0, 1]),
    ):
        assert_same(await group.all_reduce(flags, op=op), np.array(due, bool))
    z = np.array([[1 + 2j], [3 - 1j]][rank], "c8")
    assert_same(await group.all_reduce(z), np.array([4 + 1j], "c8"))
    assert_same(await group.all_reduce(z, op="prod"), np.array([5 + 5j], "c8"))
    assert_same(await group.all_reduce(z, op="mean"), np.array([2 + 0.5j], "c8"))


def test_sums_wrap_and_bool_stays_bool(run_ranks: RunRanks) -> None:
    run_ranks(2, _small_integers)


async def _odd_bools(group: aiodist.Group) -> None:
    """A bool array may hold other bytes than 0 and 1; no result may."""
    x = np.array([0, 1, 2, 128, 255], np.uint8).view(bool)
    for op in ("sum", "prod", "max", "min", "bor", "band"):
        result = await group.all_reduce(x, op=op)
        assert result.view(np.uint8).tolist() == [0, 1, 1, 1, 1], op
    assert (await group.all_reduce(x, op="bxor")).view(np.uint8).tolist() == [0, 0, 0, 0, 0]


def test_bool_results_hold_only_zeros_and_ones(run_ranks: RunRanks) -> None:
    run_ranks(2, _odd_bools)


async def _means(group: aiodist.Group) -> None:
    rows = [[1, -1, 0, 7, 8], [2, -2, 0, 8, 8]]
    assert_same(await group.all_reduce(np.array(rows[group.rank], "i4"), op="mean"), np.array([1.5, -1.5, 0.0, 7.5, 8.0]))
    assert_same(await group.all_reduce(np.array([2**62]), op="mean"), np.array([2.0**62]))
    assert_same(await group.all_reduce(np.array([2**64 - 1], "u8"), op="mean"), np.array([2.0**64]))
    out = np.zeros(1)
    assert await group.all_reduce(np.array([3 + group.rank], "i1"), op=aiodist.ReduceOp.MEAN, out=out) is out
    assert_same(out, np.array([3.5]))


def test_mean_of_integers_is_float64(run_ranks: RunRanks) -> None:
    run_ranks(2, _means)


async def _bfloat16(group: aiodist.Group) -> None:
    dtype = np.dtype(ml_dtypes.bfloat16)
    x = np.array([256 if group.rank == 0 else 1], dtype)
    assert_same(await group.all_reduce(x), np.array([260], dtype))
    assert_same(await group.all_reduce(x, op="max"), np.array([256], dtype))
    assert_same(await group.broadcast(x if group.rank == 0 else None), np.array([256], dtype))
    assert_same(await group.all_gather(x), np.array([256, 1, 1, 1], dtype))
    half = np.array([2048 if group.rank == 0 else 1], "f2")
    assert_same(await group.all_reduce(half), np.array([2052], "f2"))


def test_sixteen_bit_floats_round_once(run_ranks: RunRanks) -> None:
    run_ranks(4, _bfloat16)


async def _in_place(group: aiodist.Group) -> None:
    """One rank in place, the others not: no mismatch."""
    for count in (3, 80_000):
        x = ramp((count,), group.rank, "f4")
        out = x if group.rank == 1 else None
        result = await group.all_reduce(x, out=out)
        assert_same(result, oracle.all_reduced("sum", [ramp((count,), rank, "f4") for rank in range(group.size)]))
        assert (result is x) == (group.rank == 1)
        again = ramp((count,), group.rank, "f4")
        view = again[:]
        await group.all_reduce(again, out=view)
        assert_same(again, result)


def test_in_place_on_one_rank_is_no_mismatch(run_ranks: RunRanks) -> None:
    run_ranks(3, _in_place)


async def _own_slot(group: aiodist.Group) -> None:
    for shape in ((4,), (30_000,), (2, 3)):
        out = np.zeros((group.size, *shape), "i4")
        out[group.rank] = ramp(shape, group.rank, "i4")
        flat = out.reshape(-1, *shape[1:])
        assert await group.all_gather(out[group.rank], out=flat) is flat
        assert_same(out, np.stack([ramp(shape, rank, "i4") for rank in range(group.size)]))


def test_all_gather_from_its_own_place_in_out(run_ranks: RunRanks) -> None:
    run_ranks(3, _own_slot)


async def _identity(group: aiodist.Group) -> None:
    x = ramp((6,), 0)
    for future in (group.all_reduce(x), group.all_reduce(x, op="mean"), group.broadcast(x), group.all_gather(x), group.reduce_scatter(x)):
        result = await future
        assert_same(result, x)
        assert not np.shares_memory(result, x)
    assert await group.all_reduce(x, out=x) is x
    nothing: Any = group.barrier()
    assert await nothing is None


def test_a_group_of_one_rank_copies(run_ranks: RunRanks) -> None:
    run_ranks(1, _identity)


async def _made(group: aiodist.Group, count: int) -> tuple[Any, ...]:
    shared = group.empty((count,), "f4")
    shared[...] = ramp((count,), group.rank, "f4")
    plain = ramp((count,), group.rank, "f4")
    return (
        shared,
        await group.all_reduce(shared),
        await group.all_reduce(plain),
        await group.all_gather(shared, out=group.empty(2 * count, "f4")),
    )


@pytest.mark.parametrize("count", [5, 200_000])
async def test_results_and_shared_arrays_outlive_the_group(count: int) -> None:
    kept = await run_local(2, _made, count)
    gc.collect()
    await run_local(2, _made, count)  # memory that was wrongly given back would be used again here
    total = ramp((count,), 0, "f4") + ramp((count,), 1, "f4")
    for rank, (shared, from_shared, from_plain, gathered) in enumerate(kept):
        assert_same(shared, ramp((count,), rank, "f4"))
        assert_same(from_shared, total)
        assert_same(from_plain, total)
        assert_same(gathered, np.concatenate([ramp((count,), 0, "f4"), ramp((count,), 1, "f4")]))
        for array in (shared, from_shared, from_plain, gathered):
            assert array.flags.writeable
            array += 1


async def test_empty_gives_separate_writable_arrays() -> None:
    async with aiodist.local_world(2) as groups:
        shapes: list[Any] = [(3,), (3,), (2, 0), (), 4, (100, 100)]
        arrays = [groups[0].empty(shape, "f8") for shape in shapes]
        assert [array.shape for array in arrays] == [(3,), (3,), (2, 0), (), (4,), (100, 100)]
        for number, array in enumerate(arrays):
            assert array.flags.c_contiguous and array.flags.aligned and array.flags.writeable
            array[...] = number
        assert all((array == number).all() for number, array in enumerate(arrays))
        assert groups[0].empty(3, np.int16).dtype == np.int16


async def test_empty_refuses_what_can_not_be_shared() -> None:
    async with aiodist.local_world(1) as groups:
        with pytest.raises(TypeError):
            groups[0].empty((3,), np.dtype(object))
        with pytest.raises(ValueError):
            groups[0].empty((-1,), "f4")


@pytest.mark.parametrize("count", [10, 50_000, 400_000])
async def test_input_of_a_dropped_future_is_kept(count: int) -> None:
    async with aiodist.local_world(2) as groups:
        groups[0].all_reduce(ramp((count,), 0))
        gc.collect()
        junk = [np.full(count, -1.0) for _ in range(20)]
        await asyncio.sleep(0.01)
        assert_same(await groups[1].all_reduce(ramp((count,), 1)), ramp((count,), 0) + ramp((count,), 1))
        assert len(junk) == 20
        await asyncio.gather(*(assert_usable(group) for group in groups))


async def test_views_of_shared_arrays_keep_their_memory() -> None:
    async with aiodist.local_world(2) as groups:
        tails = []
        for group in groups:
            whole = group.empty((1000,), "f8")
            whole[...] = ramp((1000,), group.rank)
            tails.append(whole[990:])
            del whole
        gc.collect()
        results = await asyncio.gather(*(group.all_reduce(tail) for group, tail in zip(groups, tails, strict=True)))
        assert_same(results[0], (ramp((1000,), 0) + ramp((1000,), 1))[990:])


async def test_names_and_ranks() -> None:
    async with aiodist.local_world(3) as groups:
        assert [group.rank for group in groups] == [0, 1, 2]
        assert all(group.size == 3 and tuple(group.ranks) == (0, 1, 2) and group.name for group in groups)
