"""TensorFuture: everything that can wait for it, under asyncio and uvloop, from loops and from threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import Any

import numpy as np
import pytest
from conftest import RunLoop, RunRanks
from support.checks import assert_usable, error_of, ramp
from support.oracle import assert_same
from support.ranks import Pools, gather_ranks

import aiodist
from aiodist import CollectiveTimeoutError, CommunicationError, NotReadyError

pytestmark = pytest.mark.timeout(60)

COUNTS = pytest.mark.parametrize("count", [3, 100_000])


def _due(count: int, size: int = 2) -> Any:
    return sum(ramp((count,), rank) for rank in range(size))


@COUNTS
def test_await_any_number_of_times(count: int, run_loop: RunLoop) -> None:
    async def body() -> None:
        async with aiodist.local_world(2) as groups:
            future, other = (group.all_reduce(ramp((count,), group.rank)) for group in groups)
            result = await future
            assert_same(result, _due(count))
            assert await future is result
            assert future.result() is result and future.result(timeout=0) is result
            assert future.done() and not future.cancelled() and future.exception() is None
            assert_same(await other, result)

    run_loop(body())


@COUNTS
def test_await_from_several_tasks(count: int, run_loop: RunLoop) -> None:
    async def body() -> None:
        async with aiodist.local_world(2) as groups:
            future = groups[0].all_reduce(ramp((count,), 0))

            async def wait() -> Any:
                return await future

            waiters = [asyncio.create_task(wait()) for _ in range(10)]
            await asyncio.sleep(0)
            assert not future.done()
            await groups[1].all_reduce(ramp((count,), 1))
            results = await asyncio.gather(*waiters)
            assert all(result is results[0] for result in results)
            assert_same(results[0], _due(count))

    run_loop(body())


@COUNTS
def test_the_ways_of_asyncio_to_wait(count: int, run_loop: RunLoop) -> None:
    async def body() -> None:
        async with aiodist.local_world(2) as groups:

            def start() -> list[Any]:
                return [group.all_reduce(ramp((count,), group.rank)) for group in groups]

            first = await asyncio.gather(*start())
            futures: Any = start()
            done, pending = await asyncio.wait(futures)
            assert done == set(futures) and not pending
            third = [await future for future in asyncio.as_completed(start())]
            fourth = [await asyncio.wait_for(future, 20) for future in start()]
            async with asyncio.timeout(20):
                fifth = [await future for future in start()]
            sixth = [await asyncio.shield(future) for future in start()]
            for result in (*first, *(future.result() for future in done), *third, *fourth, *fifth, *sixth):
                assert_same(result, _due(count))

    run_loop(body())


def test_wait_for_the_first_of_two(run_loop: RunLoop) -> None:
    async def body() -> None:
        async with aiodist.local_world(2) as groups:
            early: Any = groups[0].all_reduce(ramp((5,), 0))
            late: Any = groups[0].all_reduce(ramp((6,), 0))
            await groups[1].all_reduce(ramp((5,), 1))
            done, pending = await asyncio.wait([early, late], timeout=20, return_when=asyncio.FIRST_COMPLETED)
            assert done == {early} and pending == {late}
            done, pending = await asyncio.wait([late], timeout=0.05)
            assert not done and pending == {late}
            await asyncio.gather(late, groups[1].all_reduce(ramp((6,), 1)))

    run_loop(body())


def test_inside_a_task_group(run_loop: RunLoop) -> None:
    async def body() -> None:
        async with aiodist.local_world(3) as groups:

            async def one(group: aiodist.Group) -> Any:
                return await group.all_reduce(ramp((50,), group.rank))

            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(one(group)) for group in groups]
            for task in running:
                assert_same(task.result(), _due(50, 3))

    run_loop(body())


@COUNTS
def test_cancelling_one_waiter_leaves_the_others(count: int, run_loop: RunLoop) -> None:
    async def body() -> None:
        async with aiodist.local_world(2) as groups:
            future = groups[0].all_reduce(ramp((count,), 0))
            waiters = [asyncio.ensure_future(future) for _ in range(3)]
            await asyncio.sleep(0.02)
            waiters[1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiters[1]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(future, 0.02)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await future
            assert not future.done() and not future.cancelled()
            await groups[1].all_reduce(ramp((count,), 1))
            for result in (await waiters[0], await waiters[2], await future):
                assert_same(result, _due(count))
            await asyncio.gather(*(assert_usable(group) for group in groups))

    run_loop(body())


async def _cancelled_half_way(group: aiodist.Group) -> None:
    """Giving up the wait on one rank harms neither that rank nor its peer."""
    x = ramp((2**20,), group.rank)
    if group.rank == 0:
        task = asyncio.ensure_future(group.all_reduce(x))
        await asyncio.sleep(0)
        task.cancel()
        given = (await asyncio.gather(task, return_exceptions=True))[0]
        assert isinstance(given, (asyncio.CancelledError, np.ndarray)), "an array if the peer was there already"
    else:
        assert_same(await group.all_reduce(x, timeout=20), _due(2**20))
    assert_same(await group.all_reduce(np.ones(1), timeout=20), np.full(1, 2.0))


def test_a_cancelled_await_is_not_a_cancelled_collective(run_ranks: RunRanks) -> None:
    run_ranks(2, _cancelled_half_way)


def test_done_callbacks(run_loop: RunLoop) -> None:
    async def body() -> None:
        async with aiodist.local_world(2) as groups:
            calls: list[tuple[str, Any, int]] = []

            def callback(name: str) -> Any:
                return lambda future: calls.append((name, future, threading.get_ident()))

            future = groups[0].all_reduce(ramp((9,), 0))
            removed = callback("removed")
            future.add_done_callback(callback("early"))
            future.add_done_callback(removed)
            assert future.remove_done_callback(removed) == 1
            assert future.remove_done_callback(removed) == 0
            assert not calls
            await groups[1].all_reduce(ramp((9,), 1))
            await future
            future.add_done_callback(callback("late"))
            last = asyncio.Event()
            future.add_done_callback(lambda _: last.set())
            await asyncio.wait_for(last.wait(), 20)
            await asyncio.sleep(0.01)
            assert sorted(name for name, _, _ in calls) == ["early", "late"]
            assert all(given is future and thread == threading.get_ident() for _, given, thread in calls)

    run_loop(body())


def test_done_callback_of_a_thread_without_a_loop(run_loop: RunLoop) -> None:
    async def body() -> None:
        async with aiodist.local_world(2) as groups:
            future = groups[0].all_reduce(ramp((9,), 0))
            called = threading.Event()
            await asyncio.to_thread(future.add_done_callback, lambda _: called.set())
            await asyncio.gather(future, groups[1].all_reduce(ramp((9,), 1)))
            assert await asyncio.to_thread(called.wait, 20)

    run_loop(body())


async def test_shape_and_dtype_are_told_when_known() -> None:
    async with aiodist.local_world(2) as groups:
        receiver = groups[1].broadcast(None)
        for name in ("shape", "dtype"):
            with pytest.raises(NotReadyError):
                getattr(receiver, name)
        with pytest.raises(NotReadyError):
            receiver.exception()
        assert not receiver.done()
        sender = groups[0].broadcast(np.ones((3, 2), "i2"))
        await asyncio.gather(sender, receiver)
        for future in (sender, receiver):
            assert future.shape == (3, 2) and future.dtype == np.int16
        reduced = [group.all_reduce(np.ones((4, 1), "i4"), op="mean") for group in groups]
        await asyncio.gather(*reduced)
        assert all(future.shape == (4, 1) and future.dtype == np.float64 for future in reduced)
        assert "cpu" in str(reduced[0].device).lower()


async def test_errors_come_by_every_way() -> None:
    async with aiodist.local_world(2) as groups:
        futures = [group.all_reduce(np.ones(group.rank + 1)) for group in groups]
        errors = [await error_of(future) for future in futures]
        for future, error in zip(futures, errors, strict=True):
            assert isinstance(error, CommunicationError)
            assert future.done() and not future.cancelled()
            assert isinstance(future.exception(), CommunicationError)
            with pytest.raises(CommunicationError):
                future.result()
            with pytest.raises(CommunicationError):
                await future


async def test_blocking_result_for_ranks_of_this_thread_is_refused() -> None:
    async with aiodist.local_world(2) as groups:
        first = groups[0].all_reduce(ramp((4,), 0))
        with pytest.raises(RuntimeError, match="await"):
            first.result()
        with pytest.raises(RuntimeError, match="await"):
            first.result(timeout=5)
        second = groups[1].all_reduce(ramp((4,), 1))
        assert_same(await first, _due(4))
        await second
        assert_same(second.result(), first.result())


def _blocking_rank(group: aiodist.Group, turns: int) -> list[Any]:
    results = []
    for turn in range(turns):
        count = (1, 70, 40_000)[turn % 3]
        results.append(group.all_reduce(ramp((count,), group.rank)).result(timeout=20))
        group.barrier().result(20)
    return results


@pytest.mark.parametrize("size", [2, 3])
async def test_blocking_result_in_threads(size: int) -> None:
    async with aiodist.local_world(size) as groups:
        with concurrent.futures.ThreadPoolExecutor(size) as threads:
            loop = asyncio.get_running_loop()
            results = await gather_ranks(loop.run_in_executor(threads, _blocking_rank, group, 60) for group in groups)
    for rank_results in results:
        for turn, result in enumerate(rank_results):
            assert_same(result, _due((1, 70, 40_000)[turn % 3], size))


async def _blocking_results(group: aiodist.Group) -> None:
    for count in (1, 40_000):
        assert_same(group.all_reduce(ramp((count,), group.rank)).result(), _due(count))
    if group.rank == 0:
        future = group.all_reduce(ramp((3,), 0))
        with pytest.raises(TimeoutError) as caught:
            future.result(timeout=0.1)
        assert not isinstance(caught.value, CollectiveTimeoutError), "result(timeout) gives up the wait, not the call"
        assert not future.done()
        await group.barrier()
    else:
        await asyncio.sleep(0.5)
        future = group.all_reduce(ramp((3,), 1))
        await group.barrier()
    assert_same(future.result(), _due(3))


def test_blocking_result_gives_up_only_the_wait(pools: Pools) -> None:
    pools.get(2).run(_blocking_results)


@COUNTS
async def test_await_from_the_loop_of_another_thread(count: int) -> None:
    async with aiodist.local_world(2) as groups:
        future = groups[0].all_reduce(ramp((count,), 0))

        async def wait() -> Any:
            return await future

        elsewhere = asyncio.to_thread(asyncio.run, wait())
        task = asyncio.ensure_future(elsewhere)
        await asyncio.sleep(0.05)
        await groups[1].all_reduce(ramp((count,), 1))
        assert_same(await task, _due(count))
        assert_same(await future, _due(count))


async def _many(group: aiodist.Group) -> None:
    futures = [group.all_reduce(np.full(10 + number, number)) for number in range(20)]
    for number, result in enumerate(await asyncio.gather(*futures)):
        assert_same(result, np.full(10 + number, number * group.size))
    futures = [group.all_reduce(np.full(3, number + group.rank)) for number in range(1000)]
    for number in (999, 0, 500, *range(1000)):
        assert_same(await futures[number], np.full(3, 2 * number + 1))
    futures = [group.all_reduce(np.full(20_000, number + group.rank, "i4")) for number in range(40)]
    for number, future in enumerate(futures):
        assert_same(await future, np.full(20_000, 2 * number + 1, "i4"))


def test_a_thousand_calls_in_flight(run_ranks: RunRanks) -> None:
    run_ranks(2, _many)


def test_in_flight_under_each_loop(run_loop: RunLoop) -> None:
    async def body() -> None:
        async with aiodist.local_world(2) as groups:
            await gather_ranks(_many(group) for group in groups)

    run_loop(body())


async def _never_awaited(group: aiodist.Group) -> None:
    """A window of calls whose futures are dropped at once, then one that is awaited."""
    for number in range(200):
        group.all_reduce(np.full(1000, number))
    assert_same(await group.all_reduce(np.ones(2)), np.full(2, float(group.size)))


def test_futures_may_be_dropped(run_ranks: RunRanks) -> None:
    run_ranks(3, _never_awaited)


async def _spin(group: aiodist.Group, count: int, calls: int) -> int:
    ticks = 0
    running = True

    async def tick() -> None:
        nonlocal ticks
        while running:
            ticks += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    for _ in range(calls):
        await group.all_reduce(np.full(count, 1.5))
    running = False
    await ticker
    return ticks


@pytest.mark.parametrize(("count", "calls"), [(1, 2500), (60_000, 400), (120_000, 200), (600_000, 40)])
def test_a_loop_of_awaits_starves_nobody(count: int, calls: int, run_ranks: RunRanks) -> None:
    ticks = run_ranks(2, _spin, count, calls)
    assert min(ticks) > 20, ticks


async def _wait(future: Any) -> Any:
    return await future


async def _side_by_side(group: aiodist.Group) -> None:
    """Calls that a loop moves itself, several at once; the wait for one of them is given up half-way."""
    for turns in range(4):
        counts = [100_000 + 1000 * number for number in range(5)]
        futures = [group.all_reduce(ramp((count,), group.rank + turns)) for count in counts]
        tasks = [asyncio.create_task(_wait(future)) for future in futures]
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.wait(tasks)
        for number, future in enumerate(futures):
            assert tasks[number].cancelled() <= (number == 0)
            assert_same(await future, sum(ramp((counts[number],), rank + turns) for rank in range(group.size)))


def test_calls_that_a_loop_moves_side_by_side(run_ranks: RunRanks) -> None:
    run_ranks(2, _side_by_side)


def test_a_done_future_is_awaited_from_a_loop_that_never_saw_it() -> None:
    async def start() -> list[Any]:
        async with aiodist.local_world(2) as groups:
            futures = [group.all_reduce(ramp((4,), group.rank)) for group in groups]
            await asyncio.gather(*futures)
            return futures

    async def again(futures: list[Any]) -> list[Any]:
        return [await future for future in futures]

    for result in asyncio.run(again(asyncio.run(start()))):
        assert_same(result, _due(4))
