"""Random programs on the ranks of this process and on real processes, against a numpy model; and that they would notice.

The variables AIODIST_PROGRAM_SEED and AIODIST_PROGRAM_COUNT choose other programs; ``python tests/run_random_programs.py`` is the long run.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import os
from typing import Any

import numpy as np
import pytest
from support import oracle, random_collectives, random_runs
from support.random_collectives import Operation
from support.random_exchange import Message, Recv, Send
from support.random_programs import LARGEST, WAYS, Issue, Making, Program, Wait, draw_program, draw_script, size_of
from support.ranks import Pools, RanksFailed, run_local

SEED = int(os.environ.get("AIODIST_PROGRAM_SEED", "1"))
COUNT = int(os.environ.get("AIODIST_PROGRAM_COUNT", "500"))
_BATCH = 28

pytestmark = pytest.mark.timeout(150)


def _batches() -> list[Any]:
    """Return batches of seeds of one size, the sizes turning slowest, so that a pool of processes is made once."""
    batches = []
    for size in range(1, LARGEST + 1):
        seeds = [seed for seed in range(SEED, SEED + COUNT) if size_of(seed) == size]
        for start, kind in itertools.product(range(0, len(seeds), _BATCH), ("local", "processes")):
            batches.append(pytest.param(kind, seeds[start : start + _BATCH], id=f"{size}-{kind}-{seeds[start]}"))
    return batches


@pytest.mark.parametrize(("kind", "seeds"), _batches())
def test_random_programs_give_what_the_model_gives(kind: str, seeds: list[int], pools: Pools) -> None:
    if kind == "local":
        random_runs.run_locally(seeds)
    else:
        random_runs.run_in_processes(pools, seeds)


@pytest.mark.parametrize("kind", ["local", "processes"])
def test_a_failure_names_seed_operation_and_rank(kind: str, pools: Pools) -> None:
    size, rank = 3, 1
    # One that stays in the world: what fails there ends the wait of all ranks at once.
    programs = (program for program in map(draw_program, itertools.count(size - 1, LARGEST)) if len(program.places) == 1)
    seed, number = next((one.seed, found.number) for one in programs if (found := _all_reduce(one, rank)) is not None)
    with pytest.raises((AssertionError, RanksFailed)) as caught:
        if kind == "local":
            asyncio.run(run_local(size, _run_misjudged, seed, rank))
        else:
            pools.get(size).run(_run_misjudged, seed, rank)
    text = str(caught.value)
    assert f"program {seed}, operation {number}, rank {rank} of {size}: 1 of " in text
    assert f"run_random_programs.py --seed {seed} --count 1" in text


def _all_reduce(program: Program, rank: int) -> Operation | None:
    """Return the first all_reduce of any elements that the rank waits for."""
    steps = itertools.chain.from_iterable(draw_script(program, rank))
    waited = (operation for step in steps if isinstance(step, Wait) for operation in step.operations)
    found = (one for one in waited if isinstance(one, random_collectives.Reduction) and one.name == "all_reduce" and one.due(rank).size)
    return next(found, None)


async def _run_misjudged(world: Any, seed: int, rank: int) -> None:
    """Run a program whose model is wrong in one bit of one result on one rank."""
    program = draw_program(seed)
    if world.rank == rank:
        operation = _all_reduce(program, rank)
        assert operation is not None
        wrong = np.array(operation.due(world.rank), order="C")
        wrong.reshape(-1).view(np.uint8)[0] ^= 1
        operation.due = lambda rank: wrong  # type: ignore[method-assign]
    await random_runs.run_program(world, program)


PROGRAMS = range(300)


def test_ranks_draw_the_same_program() -> None:
    for seed in (3, 4, 5):
        assert str(draw_program(seed)) == str(draw_program(seed))
    assert len({str(draw_program(seed)) for seed in PROGRAMS}) == len(PROGRAMS)


def test_scripts_keep_the_order_of_every_place_and_wait_only_for_what_can_end() -> None:
    moved = 0
    for program in map(draw_program, PROGRAMS):
        for rank in range(program.size):
            issued = []
            for lane in draw_script(program, rank):
                _check_lane(lane)
                issued += [step.operation for step in lane if isinstance(step, Issue)]
            moved += [one.number for one in issued] != sorted(one.number for one in issued)
            assert sorted(one.number for one in issued) == [one.number for one in program.operations if rank in one.members]
            numbers = collections.defaultdict(list)
            for operation in issued:
                numbers[operation.order].append(operation.number)
            assert all(of_one == sorted(of_one) for order, of_one in numbers.items() if order is not None)
    assert moved > len(PROGRAMS), "hardly a rank goes another way than the others"


def _check_lane(lane: list[Any]) -> None:
    """Fail unless each wait is for what was issued, and completes however far the others are."""
    for at, step in enumerate(lane):
        if isinstance(step, Wait):
            before = {one.operation for one in lane[:at] if isinstance(one, Issue)}
            after = [one.operation.number for one in lane[at:] if isinstance(one, Issue)]
            assert before.issuperset(step.operations)
            assert all(one.alone or one.settled < number for one in step.operations for number in after)
    issues = [step for step in lane if isinstance(step, Issue)]
    waited = [operation for step in lane if isinstance(step, Wait) for operation in step.operations]
    assert sorted(one.number for one in waited) == sorted(step.operation.number for step in issues if not step.dropped)
    for at, step in enumerate(issues):  # to use a place is to wait for what made it
        assert all(later.operation.number > step.operation.place.made for later in issues[at:])


def test_messages_of_a_route_are_sent_and_received_in_one_order() -> None:
    for program in map(draw_program, PROGRAMS):
        sends, receives = collections.defaultdict(list), collections.defaultdict(list)
        for operation in program.operations:
            if isinstance(operation, Send):
                sends[operation.route].append(operation)
            elif isinstance(operation, Recv):
                receives[operation.route].append(operation.send)
        assert sends == receives


def test_programs_meet_everything() -> None:
    programs = [draw_program(seed) for seed in PROGRAMS]
    operations = [operation for program in programs for operation in program.operations]
    met = {getattr(operation, "name", type(operation).__name__) for operation in operations}
    met |= {operation.way for operation in operations if isinstance(operation, Making)}
    names = "all_reduce reduce reduce_scatter Broadcast all_gather gather Scatter AllToAll all_reduce_many broadcast_many Barrier Send Recv"
    more = "broadcast_object all_gather_object gather_object scatter_object new_group split channel Withdrawal Wayward"
    assert met >= {*names.split(), *more.split()}
    assert {program.size for program in programs} == set(range(1, LARGEST + 1))
    assert min(len(program.operations) for program in programs) == 5 and max(len(program.operations) for program in programs) == 40
    reductions = {(one.op, one.dtype) for one in operations if isinstance(one, random_collectives.Reduction)}
    assert len(reductions) == sum(oracle.is_defined(op, dtype) for op in oracle.OPS for dtype in oracle.REDUCIBLE)
    assert any(isinstance(one, Message) and one.source == one.target for one in operations)
    parents = {one.place.number > 0 for one in operations if isinstance(one, Making)}
    assert parents == {True, False}
    ways = {step.way for program in programs for lane in draw_script(program, 0) for step in lane if isinstance(step, Wait)}
    assert ways == set(WAYS)
