"""Channels: orders of their own between the members of a group, the same object whenever they are asked for, ending with the group."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import RunRanks
from support.checks import assert_usable, error_of
from support.groups import MIB, assert_works, made
from support.oracle import assert_same
from support.ranks import Pools, gather_ranks

import aiodist
from aiodist import CommunicationError, GroupClosedError

pytestmark = pytest.mark.timeout(60)


async def _same(world: aiodist.Group) -> None:
    group = await made(world.new_group([2, 0, 1]))
    pending = group.channel("eval")
    assert group.channel("eval") is pending
    channel = await pending
    assert await group.channel("eval") is channel
    assert (channel.ranks, channel.rank, channel.size) == (group.ranks, group.rank, group.size)
    assert await channel.channel("eval") is channel  # a channel's channels are its group's
    assert await world.channel("eval") is not channel
    await assert_works(channel)
    gc.collect()  # the group keeps its channels
    await assert_works(await group.channel("eval"))
    await channel.aclose()
    again = await group.channel("eval")
    assert again is not channel and not again.closed
    await assert_works(again)
    await assert_works(group)


def test_asking_again_gives_the_same_channel_until_it_is_closed(run_ranks: RunRanks) -> None:
    run_ranks(3, _same)


async def _made_in_any_order(world: aiodist.Group) -> None:
    names = [f"channel {number}" for number in range(6)]
    mine = random.Random(world.rank).sample(names, len(names))
    channels = {name: await pending for name, pending in [(name, world.channel(name)) for name in mine]}
    for turn in range(20):
        order = random.Random(100 * turn + world.rank).sample(names, len(names))
        results = await asyncio.gather(*(channels[name].all_reduce(np.array([names.index(name) + turn])) for name in order))
        for name, result in zip(order, results, strict=True):
            assert_same(result, np.array([3 * (names.index(name) + turn)]))


def test_channels_are_made_and_used_in_any_order(run_ranks: RunRanks) -> None:
    run_ranks(3, _made_in_any_order)


async def _tasks(world: aiodist.Group, count: int) -> None:
    """Tasks that share a group, each on a channel of its own, started in another order and slowed down at random on every rank."""

    async def work(number: int) -> None:
        channel = await world.channel(f"task {number}")
        draw = random.Random(1000 * number + world.rank)
        for turn in range(10):
            await asyncio.sleep(draw.random() * 0.003)
            x = np.full(count, world.rank + 10 * number + turn)
            assert_same(await channel.all_reduce(x), np.full(count, 2 * (10 * number + turn) + 1))

    numbers = list(range(5))
    await asyncio.gather(*(work(number) for number in (numbers if world.rank == 0 else reversed(numbers))))


@pytest.mark.parametrize("count", [1, MIB // 8], ids=["8 B", "1 MiB"])
def test_tasks_share_a_group_by_channels(count: int, run_ranks: RunRanks) -> None:
    run_ranks(2, _tasks, count)


async def _beside_a_late_call(world: aiodist.Group) -> None:
    """Making a channel and using it needs nothing of the group's own calls, which wait for a rank."""
    large = np.full(MIB // 8, 1.0 + world.rank)
    waiting = [world.all_reduce(large), world.barrier()] if world.rank == 0 else []
    channel = await world.channel("beside")
    for _ in range(5):
        await assert_works(channel, 10_000)
    assert not any(call.done() for call in waiting)
    await channel.barrier()
    waiting = waiting or [world.all_reduce(large), world.barrier()]
    assert_same(await waiting[0], np.full(MIB // 8, 3.0))
    await waiting[1]


def test_a_channel_is_made_beside_calls_that_wait(run_ranks: RunRanks) -> None:
    run_ranks(2, _beside_a_late_call)


async def _aborted(world: aiodist.Group) -> None:
    group, sibling = await made(world.new_group([1, 0])), await made(world.new_group([0, 1]))
    channel, other = await group.channel("x"), await world.channel("x")
    call = channel.barrier() if world.rank == 0 else None
    missing = group.channel(f"of rank {world.rank}")
    await world.barrier()
    group.abort(f"enough, says {world.rank}")
    for broken in (group, channel):
        error = await error_of(broken.barrier)
        assert isinstance(error, CommunicationError) and "enough" in str(error), repr(error)
    if call is not None:
        assert "enough" in str(await error_of(call))
    assert "enough" in str(await error_of(missing))
    for whole in (world, sibling, other):
        await assert_works(whole)


def test_abort_breaks_the_groups_channels_and_no_other_group(run_ranks: RunRanks) -> None:
    run_ranks(2, _aborted)


async def _aborted_before_it_is_got(world: aiodist.Group) -> None:
    """A rank that gives up its group while a channel is being made: whoever has the channel hears of it."""
    group = await made(world.new_group([1, 0]))
    if world.rank == 0:
        pending = group.channel("x", timeout=20)
        group.abort("enough")
        assert "enough" in str(await error_of(pending))
        await world.barrier()
        return
    try:
        channel = await group.channel("x", timeout=20)
        error = await error_of(channel.barrier(timeout=20))
    except CommunicationError as raised:
        error = raised
    assert not isinstance(error, TimeoutError), repr(error)
    await world.barrier()


def test_abort_reaches_a_channel_that_is_being_made(run_ranks: RunRanks) -> None:
    run_ranks(2, _aborted_before_it_is_got)


async def _closed(world: aiodist.Group) -> None:
    group = await made(world.new_group([1, 0]))
    channel = await group.channel("x")
    call = channel.all_reduce(np.full(50_000, world.rank))
    never = group.channel(f"of rank {world.rank}")
    await group.aclose()
    assert_same(await call, np.full(50_000, 1))
    assert channel.closed
    assert isinstance(await error_of(never), GroupClosedError)
    calls: list[Callable[[], Any]] = [lambda: group.channel("x"), lambda: channel.channel("y"), lambda: channel.new_group([0])]
    for ask in calls:
        with pytest.raises(GroupClosedError):
            ask()
    await assert_usable(world)


def test_closing_a_group_closes_its_channels(run_ranks: RunRanks) -> None:
    run_ranks(2, _closed)


async def test_a_group_dropped_with_its_channels_is_noticed_at_once() -> None:
    async with aiodist.local_world(2) as worlds:
        groups: list[Any] = await asyncio.gather(*(world.new_group([0, 1]) for world in worlds))
        for group in groups:
            group.channel("x")
        await asyncio.gather(*(group.channel("x") for group in groups))
        for _ in range(3):
            await asyncio.sleep(0)  # the loop lets go of what it gave
        gc.disable()
        try:
            with pytest.warns(ResourceWarning, match=r"'world\[0-1\]:x' was dropped"):
                with pytest.warns(ResourceWarning, match=r"'world\[0-1\]' was dropped"):
                    del group, groups
                await asyncio.sleep(0)  # the record of the warnings held the groups, and they their channels
        finally:
            gc.enable()


def test_ranks_in_threads_make_groups_without_a_loop() -> None:
    """Everything by `result()`, each rank in a thread of its own."""

    def work(world: aiodist.Group, problems: list[BaseException]) -> None:
        try:
            for turn in range(10):
                group = world.new_group([2, 0, 1]).result(20)
                part = world.split(world.rank % 2, -world.rank).result()
                channel = world.channel(f"turn {turn}").result()
                assert group is not None and part is not None
                for one in (channel, group, part):
                    total = one.all_reduce(np.array([world.rank, turn])).result()
                    assert_same(total, np.array([sum(one.ranks), turn * one.size]))
                loop = asyncio.new_event_loop()
                for one in (channel, group, part):
                    loop.run_until_complete(one.aclose())
                loop.close()
        except BaseException as error:
            problems.append(error)

    async def run() -> None:
        problems: list[BaseException] = []
        async with aiodist.local_world(3) as worlds:
            threads = [threading.Thread(target=work, args=(world, problems)) for world in worlds]
            for thread in threads:
                thread.start()
            await asyncio.gather(*(asyncio.to_thread(thread.join, 40) for thread in threads))
            assert not any(thread.is_alive() for thread in threads), "a rank hangs"
        if problems:
            raise problems[0]

    asyncio.run(run())


async def _blocking(world: aiodist.Group) -> None:
    group = world.new_group([1, 0]).result(20)
    part = world.split(0).result()
    assert group is not None and part is not None
    await assert_works(group)
    await assert_works(part)
    await assert_works(group.channel("x").result())
    if world.rank == 0:
        pending = world.new_group([0, 1], "later")
        with pytest.raises(TimeoutError, match="still being made"):
            pending.result(0.05)
        await world.barrier()
        later = pending.result(20)
    else:
        await world.barrier()
        later = world.new_group([0, 1], "later").result(20)
    assert later is not None
    await assert_works(later)
    for one in (group, part, later):
        await one.aclose()


def test_result_blocks_the_thread_of_a_running_loop(pools: Pools) -> None:
    pools.get(2).run(_blocking, fresh=True)


async def test_any_loop_may_wait_for_the_same_group() -> None:
    async with aiodist.local_world(2) as worlds:
        first = worlds[0].channel("x")
        got: list[Any] = []
        threads = [threading.Thread(target=lambda: got.append(asyncio.run(made(first)))) for _ in range(3)]
        for thread in threads:
            thread.start()
        await asyncio.sleep(0.05)
        assert not first.done()
        second = await worlds[1].channel("x")
        await gather_ranks(asyncio.to_thread(thread.join, 20) for thread in threads)
        channel = await first
        assert len(got) == 3 and all(one is channel for one in got)
        await gather_ranks([assert_works(channel), assert_works(second)])
