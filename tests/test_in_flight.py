"""Many operations in flight at once, messages and collectives: each gets its own values, and none waits for what it need not."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import random
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest
from conftest import RunRanks
from support.checks import assert_usable, error_of, ramp
from support.oracle import Array, assert_same
from support.ranks import Pools, gather_ranks

import aiodist
from aiodist import CommunicationError, MismatchError, PeerRefusedError

pytestmark = pytest.mark.timeout(90)

MIB = 2**20


async def _await(future: Awaitable[Any]) -> Any:
    return await future


async def _tell(group: aiodist.Group, peer: int) -> None:
    """Let a peer that is in `_hear` go on."""
    await group.send(np.ones(1), peer, 99)


async def _tell_all(group: aiodist.Group) -> None:
    for peer in range(group.size):
        if peer != group.rank:
            await _tell(group, peer)


async def _hear(group: aiodist.Group, peer: int) -> None:
    await group.recv(peer, 99, timeout=40)


async def _twenty(group: aiodist.Group) -> None:
    size, rank = group.size, group.rank
    totals = await asyncio.gather(*(group.all_reduce(np.full(10 + number, number + 100 * rank)) for number in range(20)))
    for number, total in enumerate(totals):
        assert_same(total, np.full(10 + number, sum(number + 100 * r for r in range(size))))
    counts = [(1 + number) * (3000 if number % 3 else 1) for number in range(20)]
    gathers = [group.all_gather(ramp((count,), rank)) for count in counts]
    spreads = [group.broadcast(ramp((count,), rank), root=number % size) for number, count in enumerate(counts)]
    for number in reversed(range(20)):
        assert_same(await spreads[number], ramp((counts[number],), number % size))
        assert_same(await gathers[number], np.concatenate([ramp((counts[number],), r) for r in range(size)]))


@pytest.mark.parametrize("size", [2, 3])
def test_twenty_collectives_of_different_sizes(size: int, run_ranks: RunRanks) -> None:
    run_ranks(size, _twenty)


async def _temporaries(group: aiodist.Group, count: int) -> None:
    """Inputs that nobody else holds, on a rank that fills its memory anew before the others join."""
    total = sum(ramp((count,), rank) for rank in range(group.size))
    if group.rank == 0:
        calls = group.all_reduce(ramp((count,), 0)), group.all_gather(ramp((count,), 0)), group.broadcast(ramp((count,), 0))
        gc.collect()
        junk = [np.full(count, -1.0) for _ in range(20)]
        await _tell_all(group)
        del junk
    else:
        await _hear(group, 0)
        calls = group.all_reduce(ramp((count,), group.rank)), group.all_gather(ramp((count,), group.rank)), group.broadcast(None)
    summed, gathered, spread = await asyncio.gather(*calls)
    assert_same(summed, total)
    assert_same(gathered, np.concatenate([ramp((count,), rank) for rank in range(group.size)]))
    assert_same(spread, ramp((count,), 0))


@pytest.mark.parametrize("count", [16, 3000, MIB])
def test_collectives_hold_the_arrays_that_only_they_know(count: int, run_ranks: RunRanks) -> None:
    run_ranks(3, _temporaries, count)


async def _crossed(group: aiodist.Group, count: int) -> None:
    """Both send before either receives."""
    peer = 1 - group.rank
    await group.send(ramp((count,), group.rank), peer, timeout=40)
    assert_same(await group.recv(peer, timeout=40), ramp((count,), peer))


@pytest.mark.parametrize("count", [3, 10_000, MIB], ids=["small", "80 KB", "8 MiB"])
def test_crossed_sends_finish(count: int, run_ranks: RunRanks) -> None:
    run_ranks(2, _crossed, count)


async def _many_first(group: aiodist.Group) -> None:
    """All messages are sent, each send awaited, before the first receive."""
    if group.rank == 0:
        for number in range(2000):
            await group.send(np.full(number % 7, number), 1, number % 3)
        await group.send(np.ones(1), 1, 9)
    else:
        await group.recv(0, 9)
        for tag in (2, 0, 1):
            for number in range(tag, 2000, 3):
                assert_same(await group.recv(0, tag), np.full(number % 7, number))


def test_two_thousand_messages_before_the_first_receive(run_ranks: RunRanks) -> None:
    run_ranks(2, _many_first)


async def _posted_first(group: aiodist.Group) -> None:
    """Receives that were posted early get the messages in the order of the sends, whoever is awaited first."""
    counts = [(3, 40_000, 0, 9000)[number % 4] for number in range(60)]
    if group.rank == 1:
        receives = [group.recv(0, 5) for _ in counts]
        await group.barrier()
        for number in reversed(range(60)):
            assert_same(await receives[number], np.full(counts[number], number))
    else:
        await group.barrier()
        await asyncio.gather(*(group.send(np.full(count, number), 1, 5) for number, count in enumerate(counts)))


def test_receives_posted_early_are_served_in_order(run_ranks: RunRanks) -> None:
    run_ranks(2, _posted_first)


async def _stream(group: aiodist.Group, seed: int) -> None:
    """Messages of random sizes and tags between all ranks at once, taken in random turns."""
    plan = random.Random(seed)
    sizes = [0, 1, 50, 1020, 1024, 1030, 2040, 2048, 2060, 40_000]
    routes = [(src, dst, tag) for src in range(group.size) for dst in range(group.size) for tag in range(2)]
    counts = {route: [plan.choice(sizes) for _ in range(12)] for route in routes}
    own = random.Random(seed * 100 + group.rank)

    def due(route: tuple[int, int, int], number: int) -> Array:
        return ramp((counts[route][number],), routes.index(route) * 20 + number)

    async def feed() -> None:
        left = [(route, number) for route in routes if route[0] == group.rank for number in range(12)]
        own.shuffle(left)
        left.sort(key=lambda message: message[1] // 4)  # in order within a route, mixed between them
        done = dict.fromkeys(routes, 0)
        for route, _ in left:
            await group.send(due(route, done[route]), route[1], route[2])
            done[route] += 1

    async def take(route: tuple[int, int, int]) -> None:
        for number in range(12):
            if own.random() < 0.2:
                await asyncio.sleep(own.random() * 0.01)
            assert_same(await group.recv(route[0], route[2]), due(route, number))

    await asyncio.gather(feed(), *(take(route) for route in routes if route[1] == group.rank))


async def _ahead(group: aiodist.Group) -> None:
    """One rank is as far ahead as it gets: what it has brought stays until the others have read it."""
    rank, size = group.rank, group.size
    counts = [65_536, 3, 50_001, 8192, 65_000, 40_960, 1, 61_440, 20_000, 65_536, 30_000, 65_535, 65_536] * 2  # float64: up to 512 KiB
    for slow in range(size):
        if rank == slow:
            await _hear(group, (slow + 1) % size)
        sums = [group.all_reduce(ramp((count,), rank + number)) for number, count in enumerate(counts)]
        spreads = [group.broadcast(ramp((count,), rank + number), root=(slow + 1) % size) for number, count in enumerate(counts)]
        if rank == (slow + 1) % size:
            await _tell(group, slow)
        for number, count in enumerate(counts):
            assert_same(await sums[number], functools.reduce(np.add, [ramp((count,), r + number) for r in range(size)]))
            assert_same(await spreads[number], ramp((count,), (slow + 1) % size + number))


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_is_ahead_overwrites_nothing(size: int, run_ranks: RunRanks) -> None:
    run_ranks(size, _ahead)


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_between_all_pairs(seed: int, run_ranks: RunRanks) -> None:
    run_ranks(3, _stream, seed)


async def _beside_collectives(group: aiodist.Group) -> None:
    """Messages pass collectives that wait, and collectives pass receives that wait."""
    peer = 1 - group.rank
    for count in (3, 50_000):
        receive = group.recv(peer, 1)
        await assert_usable(group)
        assert not receive.done()
        await group.barrier()
        await group.send(ramp((count,), group.rank), peer, 1)
        assert_same(await receive, ramp((count,), peer))
        total = np.full(count, 3)
        if group.rank == 0:
            waiting = group.all_reduce(np.full(count, 1))
            await group.send(ramp((count,), 0), 1)
            assert_same(await group.recv(1), ramp((count,), 1))
            assert not waiting.done()
            await _tell(group, 1)
            assert_same(await waiting, total)
        else:
            assert_same(await group.recv(0), ramp((count,), 0))
            await group.send(ramp((count,), 1), 0)
            await _hear(group, 0)
            assert_same(await group.all_reduce(np.full(count, 2)), total)


def test_messages_and_collectives_do_not_wait_for_each_other(run_ranks: RunRanks) -> None:
    run_ranks(2, _beside_collectives)


async def _interleaved(group: aiodist.Group) -> None:
    """Each rank mixes the two in its own way; only the order of the collectives is common."""
    peer, turns = 1 - group.rank, 60
    own = random.Random(group.rank)
    sums: list[Any] = []
    sends: list[Any] = []
    receives: list[Any] = []
    plan = ["sum"] * turns + ["send"] * turns + ["recv"] * turns
    own.shuffle(plan)
    for step in plan:
        if step == "sum":
            sums.append(group.all_reduce(np.full(1 + 700 * (len(sums) % 5), len(sums) + group.rank)))
        elif step == "send":
            sends.append(group.send(ramp((1 + 900 * (len(sends) % 7),), group.rank + 2 * len(sends)), peer))
        else:
            receives.append(group.recv(peer))
        if own.random() < 0.2:
            await asyncio.sleep(0)
    for number in range(turns):
        assert_same(await sums[number], np.full(1 + 700 * (number % 5), 2 * number + 1))
        assert_same(await receives[number], ramp((1 + 900 * (number % 7),), peer + 2 * number))
        await sends[number]


def test_sends_interleaved_with_collectives(run_ranks: RunRanks) -> None:
    run_ranks(2, _interleaved)


async def _broken(group: aiodist.Group, trouble: str) -> None:
    """What breaks the group fails the receives and the sends that wait, and those made later."""
    peer = 1 - group.rank
    receives = [group.recv(peer, tag) for tag in range(2)]
    task = asyncio.ensure_future(_await(receives[1]))
    send = group.send(np.zeros(300 * MIB, np.uint8), peer, 50)
    await group.barrier()
    assert not send.done(), "it is larger than the send buffer"
    await group.barrier()
    if trouble == "mismatch":
        assert type(await error_of(lambda: group.all_reduce(np.ones(3 + group.rank)))) is MismatchError
    elif group.rank == 1:
        group.abort("enough of this")
    later: list[Any] = [lambda: group.recv(peer, 50), lambda: group.send(np.ones(1), peer)]
    for waiting in (receives[0], task, send, *later):
        error = await error_of(waiting)
        assert isinstance(error, CommunicationError) and not isinstance(error, TimeoutError), repr(error)
        assert trouble == "mismatch" or "enough of this" in str(error)


@pytest.mark.parametrize("trouble", ["abort", "mismatch"])
def test_a_broken_group_fails_messages_that_wait(trouble: str, run_ranks: RunRanks) -> None:
    run_ranks(2, _broken, trouble)


async def _beside_refusal(group: aiodist.Group) -> None:
    """A collective that one rank is refused leaves messages alone."""
    peer = 1 - group.rank
    receive = group.recv(peer)
    if group.rank == 0:
        with pytest.raises(ValueError, match="avg"):
            group.all_reduce(np.ones(3), op="avg")
    else:
        assert isinstance(await error_of(lambda: group.all_reduce(np.ones(3))), PeerRefusedError)
    await group.send(ramp((4,), group.rank), peer)
    assert_same(await receive, ramp((4,), peer))


def test_a_refused_collective_leaves_messages_alone(run_ranks: RunRanks) -> None:
    run_ranks(2, _beside_refusal)


def _blocking(group: aiodist.Group) -> None:
    peer = 1 - group.rank
    for count in (1, 70, 40_000, MIB):
        group.send(ramp((count,), group.rank), peer).result(timeout=20)
        assert_same(group.recv(peer).result(timeout=20), ramp((count,), peer))
        receive = group.recv(peer, 1)
        group.barrier().result(20)
        group.send(ramp((count,), group.rank), peer, 1).result()
        assert_same(receive.result(), ramp((count,), peer))


async def _blocking_rank(group: aiodist.Group) -> None:
    _blocking(group)


def test_blocking_for_messages(pools: Pools) -> None:
    pools.get(2).run(_blocking_rank)


async def test_blocking_for_messages_in_threads() -> None:
    async with aiodist.local_world(2) as groups:
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            loop = asyncio.get_running_loop()
            await gather_ranks(loop.run_in_executor(threads, _blocking, group) for group in groups)
