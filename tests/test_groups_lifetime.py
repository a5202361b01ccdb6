"""How groups end, and what they leave: timeouts, failures, closing, dropping, and the rounds of a loop."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from conftest import RunRanks
from support.checks import assert_usable, error_of
from support.groups import assert_works, held, made, resident_kib
from support.oracle import assert_same
from support.ranks import Pools

import aiodist
from aiodist import CollectiveTimeoutError, GroupClosedError, RendezvousError

pytestmark = pytest.mark.timeout(60)


async def _timeouts(world: aiodist.Group) -> None:
    assert (await made(world.new_group([0, 1]))).timeout == world.timeout
    group = await made(world.new_group([1, 0], timeout=1.0))
    assert group.timeout == (await group.channel("x")).timeout == (await made(group.split(0))).timeout == 1.0
    assert (await made(world.split(0, timeout=2))).timeout == 2.0
    if world.rank == 0:
        error = await error_of(group.barrier)
        assert isinstance(error, CollectiveTimeoutError)
    await world.barrier()
    await assert_usable(world)


def test_the_timeout_given_is_the_new_groups_own(run_ranks: RunRanks) -> None:
    run_ranks(2, _timeouts)


async def _apart(world: aiodist.Group) -> None:
    """A group that breaks leaves its parent, its children and its siblings; a broken one may still have new groups."""
    parent = await made(world.new_group([0, 1]))
    child, sibling = await made(parent.new_group([1, 0])), await made(world.new_group([0, 1]))
    if world.rank == 0:
        parent.abort("enough")
    error = await error_of(parent.barrier)
    assert "enough" in str(error)
    for group in (world, child, sibling, await made(parent.new_group([1, 0]))):
        await assert_works(group)
    await parent.aclose()
    await assert_works(child)


def test_a_broken_group_leaves_the_others_alone(run_ranks: RunRanks) -> None:
    run_ranks(2, _apart)


async def _after_the_end(world: aiodist.Group) -> None:
    group = await made(world.new_group([0, 1]))
    await group.aclose()
    calls: list[Callable[[], Any]] = [lambda: group.new_group([0]), lambda: group.channel("x"), lambda: group.split(0)]
    for call in calls:
        with pytest.raises(GroupClosedError, match="closed"):
            call()
    await assert_usable(world)


def test_a_closed_group_makes_no_more(run_ranks: RunRanks) -> None:
    run_ranks(2, _after_the_end)


async def _close_the_world(world: aiodist.Group) -> None:
    groups = [await made(world.new_group([0, 1])), await made(world.split(0)), await world.channel("x")]
    groups.append(await made(groups[0].new_group([1, 0])))
    calls = [group.all_reduce(np.full(50_000, world.rank)) for group in groups]
    never = world.new_group([0, 1], f"rank {world.rank} alone")
    await world.aclose()
    for group, call in zip(groups, calls, strict=True):
        assert group.closed
        assert_same(await call, np.full(50_000, 1))  # it was in flight, and was awaited
        assert isinstance(await error_of(group.barrier), GroupClosedError)
    assert isinstance(await error_of(never), GroupClosedError | RendezvousError)  # the latter where the peer left first
    with pytest.raises(GroupClosedError):
        world.new_group([0, 1])


def test_closing_the_world_closes_its_groups(run_ranks: RunRanks) -> None:
    run_ranks(2, _close_the_world)


async def _leave_early(world: aiodist.Group) -> None:
    if world.rank == 2:
        await asyncio.sleep(0.2)
        await world.aclose()
        return
    error = await error_of(world.new_group([0, 1, 2], timeout=20))
    assert isinstance(error, RendezvousError) and error.ranks == (2,), repr(error)
    assert "rank 2" in str(error) and "left" in str(error)
    kib = resident_kib()
    for _ in range(150):
        assert isinstance(await error_of(world.channel("x", timeout=20)), RendezvousError)  # at once as well
    assert resident_kib() - kib < 5 * 1024  # what did not come about holds no memory
    group = await made(world.new_group([1, 0]))
    for turn in range(100):
        assert_same(await group.all_reduce(np.array([turn])), np.array([2 * turn]))


def test_a_rank_that_leaves_is_named_and_the_others_go_on(run_ranks: RunRanks) -> None:
    run_ranks(3, _leave_early)


async def _give_up(pending: Awaitable[Any]) -> None:
    """Begin to wait, and be cancelled."""

    async def wait() -> None:
        await pending

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


async def _drop(world: aiodist.Group) -> None:
    """What nobody gets is kept for whoever asks again, and ends with the world; what somebody got and dropped is noticed."""
    world.new_group([0, 1])
    pending = world.new_group([1, 0])
    await _give_up(pending)
    group = await pending
    assert group is not None
    assert await pending is group
    await assert_works(group)
    await world.barrier()
    gc.collect()
    with pytest.warns(ResourceWarning, match="dropped without aclose"):
        del group, pending
        gc.collect()
    await assert_usable(world)


def test_giving_up_the_wait_for_a_group_leaves_it(run_ranks: RunRanks) -> None:
    run_ranks(2, _drop)


async def _again_and_again(world: aiodist.Group) -> None:
    """Groups come and go: a list, a split and a channel each turn; what the process holds stays the same."""
    before, most = held(), 0
    for turn in range(200):
        groups = [await made(world.new_group([1, 0])), await made(world.split(0)), await world.channel("x")]
        for group in groups:
            assert_same(await group.all_reduce(np.full(3000, turn + world.rank)), np.full(3000, 2 * turn + 1))
        await asyncio.gather(*(group.aclose() for group in groups))
        if turn == 5:
            before = held()
        if turn < 30:  # blocks of groups that the peer has not closed yet come and go
            most = max(most, resident_kib())
    assert held() == before
    assert resident_kib() - most < 5 * 1024


def test_groups_made_in_a_loop_leave_nothing(run_ranks: RunRanks) -> None:
    run_ranks(2, _again_and_again)


async def _drop_again_and_again(world: aiodist.Group) -> None:
    """Groups that are dropped unclosed are noticed, and are no more of a burden than closed ones."""
    before, texts = held(), list[str]()
    with warnings.catch_warnings(record=True) as noticed:
        warnings.simplefilter("always", ResourceWarning)
        for turn in range(100):
            for pending in (world.new_group([1, 0]), world.split(0)):
                group = await pending
                assert group is not None
                assert_same(await group.all_reduce(np.full(3000, turn + world.rank)), np.full(3000, 2 * turn + 1))
                texts += [str(warning.message) for warning in noticed]
                noticed.clear()  # each record holds its group
            if turn == 5:
                before = held()
    assert held() == before
    assert len(texts) >= 198 and all("dropped without aclose" in text for text in texts), texts[:3]


def test_groups_dropped_in_a_loop_are_noticed_and_leave_nothing(pools: Pools) -> None:
    pools.get(2).run(_drop_again_and_again, fresh=True)
