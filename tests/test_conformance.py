"""Every collective, dtype, op, length, number of ranks, placement and kind of rank against numpy, bit for bit."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import numpy as np
import pytest
from conftest import RunRanks
from support import cases, oracle
from support.oracle import Array
from support.ranks import Pools, run_local

import aiodist

pytestmark = pytest.mark.timeout(60)

# The number of ranks turns slowest, so that a pool of processes is made once.
TABLES = [
    pytest.param(size, kind, collective, placement, id=f"{size}-{kind}-{collective}-{placement}")
    for size, kind, collective in itertools.product(cases.SIZES, ("local", "processes"), cases.TABLES)
    for placement in cases.placements(collective)
]


@pytest.mark.parametrize(("size", "kind", "collective", "placement"), TABLES)
def test_collective_equals_numpy(size: int, kind: str, collective: str, placement: str, pools: Pools) -> None:
    table = cases.table(collective, size, placement)
    expectations = [cases.expected(case, size) for case in table]
    if kind == "processes":
        problems = pools.get(size).run(cases.perform, table, expectations)
    else:
        problems = asyncio.run(run_local(size, cases.perform, table, expectations))
    found = [line for lines in problems for line in lines]
    assert not found, "\n".join([f"{len(found)} of {len(table) * size} results are wrong", *found[:20]])


def test_tables_cover_every_pair_with_every_length() -> None:
    met: dict[str, set[tuple[Any, ...]]] = {collective: set() for collective in cases.COLLECTIVES}
    for name, size in itertools.product(cases.TABLES, cases.SIZES):
        for placement in cases.placements(name):
            for case in cases.table(name, size, placement):
                length = cases.lengths(case.collective, case.dtype, size).index(case.count)
                met[case.collective].add((case.op, case.dtype, length))
    pairs = sum(oracle.is_defined(op, dtype) for op in oracle.OPS for dtype in oracle.REDUCIBLE)
    movers = len(oracle.REDUCIBLE) + len(oracle.MOVABLE_ONLY)
    for collective, combinations in met.items():
        assert len(combinations) == 6 * (pairs if collective in cases.REDUCTIONS else movers), collective


def test_tables_cover_every_placement_and_root() -> None:
    for name, size in itertools.product(cases.TABLES, cases.SIZES):
        met = {(case.collective, case.placement) for placement in cases.placements(name) for case in cases.table(name, size, placement)}
        assert met == {(collective, placement) for collective in cases.TABLES[name] for placement in cases.placements(collective)}
        roots = {(case.collective, case.root) for placement in cases.placements(name) for case in cases.table(name, size, placement)}
        assert roots >= {(collective, root) for collective in cases.TABLES[name] for root in range(size)}


async def _special_results(group: aiodist.Group, counts: list[int], one_nan: bool) -> dict[tuple[str, str, int], bytes]:
    results = {}
    table = [(dtype, op, count) for dtype in oracle.FLOATS for op in ("sum", "prod", "min", "max", "mean") for count in counts]
    for dtype, op, count in table:
        x = oracle.special_vector(dtype, count, group.rank, one_nan=one_nan)
        result = await group.all_reduce(x, op=op)
        if group.rank == 0:  # the others are compared with rank 0
            terms = [oracle.special_vector(dtype, count, rank, one_nan=one_nan) for rank in range(group.size)]
            oracle.assert_same(result, oracle.all_reduced(op, terms))
        results[str(dtype), op, count] = oracle.raw_bytes(result)
    return results


@pytest.mark.parametrize("one_nan", [True, False], ids=["one NaN", "many NaNs"])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_special_values_have_the_same_bits_on_all_ranks_sizes_and_worlds(size: int, one_nan: bool, pools: Pools) -> None:
    counts = [1, 7, 1000, 4096, 4097, 70_001]
    local = asyncio.run(run_local(size, _special_results, counts, one_nan))
    remote = pools.get(size).run(_special_results, counts, one_nan)
    for results in (*local, *remote):
        assert results == local[0]
    for (dtype, op, count), data in local[0].items():
        longest = local[0][dtype, op, 4096]
        assert data[: len(longest)] == longest[: len(data)], f"{op} of {count} × {dtype} has other bits than the longer vector"


async def _extrema_of_nan(group: aiodist.Group) -> None:
    for dtype in oracle.FLOATS:
        for holder in range(group.size):
            own = [1.0, np.nan, 3.0] if group.rank == holder else [1.0, 2.0, 3.0]
            for op in ("min", "max"):
                result = await group.all_reduce(np.array(own, dtype), op=op)
                oracle.assert_same(result, np.array([1.0, np.nan, 3.0], dtype))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_min_and_max_keep_nan_whoever_holds_it(size: int, run_ranks: RunRanks) -> None:
    run_ranks(size, _extrema_of_nan)


async def _nan_patterns(group: aiodist.Group) -> dict[str, set[bytes]]:
    patterns = {}
    for dtype in oracle.FLOATS:
        x = oracle.special_vector(dtype, 30_000, group.rank)
        results = [await group.all_reduce(x[:count], op=op) for op in ("min", "max") for count in (100, 30_000)]
        patterns[str(dtype)] = {oracle.raw_bytes(item) for result in results for item in result[np.isnan(result)][:2000]}
    return patterns


def test_min_and_max_give_one_canonical_nan(run_ranks: RunRanks) -> None:
    for patterns in run_ranks(3, _nan_patterns):
        assert all(len(found) == 1 for found in patterns.values()), patterns


async def _signed_zeros(group: aiodist.Group) -> None:
    for dtype in oracle.FLOATS:
        for holder in range(group.size):
            x = np.array([-0.0 if group.rank == holder else 0.0] * 3, dtype)
            assert np.signbit(await group.all_reduce(x, op="min")).all()
            assert not np.signbit(await group.all_reduce(x, op="max")).any()


def test_negative_zero_is_below_zero(run_ranks: RunRanks) -> None:
    run_ranks(3, _signed_zeros)


async def _infinities(group: aiodist.Group) -> None:
    for dtype in (*oracle.FLOATS, np.dtype("c8")):
        pair = np.array([[np.inf], [-np.inf]][group.rank % 2], dtype)
        assert np.isnan(await group.all_reduce(pair)).all()
        product = np.array([[0.0], [np.inf]][group.rank % 2], dtype)
        assert np.isnan(await group.all_reduce(product, op="prod")).all()
        if dtype in oracle.FLOATS:
            assert (await group.all_reduce(pair, op="min") == -np.inf).all()


def test_infinities_follow_arithmetic(run_ranks: RunRanks) -> None:
    run_ranks(2, _infinities)


def _normal(count: int, rank: int) -> Array:
    return np.random.default_rng(1000 + rank).standard_normal(count).astype("f4")


async def _repeats(group: aiodist.Group, counts: list[int], rounds: int) -> set[str]:
    delays = random.Random(group.rank)
    seen = set()
    for _ in range(rounds):
        if delays.random() < 1 / group.size:
            await asyncio.sleep(delays.random() * 0.004)
        results = [await group.all_reduce(_normal(count, group.rank)) for count in counts]
        seen.add("".join(oracle.digest(result) for result in results))
    return seen


@pytest.mark.parametrize("size", [3, 4, 5, 7, 8])
def test_repeats_with_a_late_rank_give_the_same_bits(size: int, run_ranks: RunRanks) -> None:
    counts = [1, 3, 1000]
    terms = [[_normal(count, rank) for rank in range(size)] for count in counts]
    due = "".join(oracle.digest(oracle.all_reduced("sum", arrays)) for arrays in terms)
    assert run_ranks(size, _repeats, counts, 20) == [{due}] * size


def test_repeats_of_a_large_vector_give_the_same_bits(run_ranks: RunRanks) -> None:
    due = oracle.digest(oracle.all_reduced("sum", [_normal(2**20 + 1, rank) for rank in range(3)]))
    assert run_ranks(3, _repeats, [2**20 + 1], 5) == [{due}] * 3


async def _cancelling(group: aiodist.Group) -> Any:
    return await group.all_reduce(np.full(1000, [1e8, 1.0, -1e8, 1.0][group.rank], "f4"))


def test_sum_is_a_left_fold_in_rank_order(run_ranks: RunRanks) -> None:
    for result in run_ranks(4, _cancelling):
        oracle.assert_same(result, np.ones(1000, "f4"))


async def _barriers(group: aiodist.Group, entered: list[int]) -> list[int]:
    met = []
    for turn in range(20):
        await asyncio.sleep(0.002 * ((turn + group.rank) % 3))
        entered[group.rank] = turn + 1
        nothing: Any = group.barrier()
        assert await nothing is None
        met.append(min(entered))
    return met


@pytest.mark.parametrize("size", cases.SIZES)
async def test_nobody_leaves_a_barrier_before_all_entered(size: int) -> None:
    entered = [0] * size
    for met in await run_local(size, _barriers, entered):
        assert all(least >= turn + 1 for turn, least in enumerate(met))


async def _mixed_traffic(group: aiodist.Group, turns: int) -> None:
    """All collectives one after the other, un-awaited, small and large in turn."""
    futures: list[tuple[Any, Array | None]] = []
    for turn in range(turns):
        count = (3, 60_000, 1, 5000)[turn % 4]
        x = oracle.vector(np.dtype("i8"), count, group.rank)
        terms = oracle.vectors(np.dtype("i8"), count, group.size)
        futures.append((group.all_reduce(x, op="max"), np.max(terms, axis=0)))
        futures.append((group.broadcast(x if turn % group.size == group.rank else None, root=turn % group.size), terms[turn % group.size]))
        futures.append((group.barrier(), None))
        futures.append((group.all_gather(x), np.concatenate(terms)))
    for future, due in futures:
        result = await future
        if due is None:
            assert result is None
        else:
            oracle.assert_same(result, due)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_collectives_in_flight_together_keep_their_order(size: int, run_ranks: RunRanks) -> None:
    run_ranks(size, _mixed_traffic, 12)
