"""Receives and calls that are given up, by cancelling or by a timeout: nothing is swallowed, torn, or written too late."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from conftest import RunLoop, RunRanks
from support.checks import assert_usable, error_of, ramp
from support.oracle import assert_same
from support.ranks import gather_ranks

import aiodist
from aiodist import AiodistError, CollectiveTimeoutError

pytestmark = pytest.mark.timeout(90)

MIB = 2**20


async def _tell(group: aiodist.Group, peer: int) -> None:
    """Let a peer that is in `_hear` go on."""
    await group.send(np.ones(1), peer, 99)


async def _hear(group: aiodist.Group, peer: int) -> None:
    await group.recv(peer, 99, timeout=40)


async def _await(future: Awaitable[Any]) -> Any:
    return await future


GiveUp = Callable[[aiodist.Group, Any], Awaitable[Any]]


async def _by_cancel(group: aiodist.Group, out: Any) -> Any:
    future = group.recv(1, out=out)
    task = asyncio.ensure_future(_await(future))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return future


async def _by_wait_for(group: aiodist.Group, out: Any) -> Any:
    future = group.recv(1, out=out)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(future, 0.05)
    return future


async def _by_timeout(group: aiodist.Group, out: Any) -> Any:
    future = group.recv(1, out=out)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await future
    return future


async def _by_task_group(group: aiodist.Group, out: Any) -> Any:
    future = group.recv(1, out=out)

    async def fail() -> None:
        await asyncio.sleep(0.05)
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_await(future))
            tasks.create_task(fail())
    return future


async def _by_gather(group: aiodist.Group, out: Any) -> Any:
    future = group.recv(1, out=out)
    both = asyncio.gather(future, group.recv(1, 7))
    await asyncio.sleep(0.05)
    both.cancel()
    with pytest.raises(asyncio.CancelledError):
        await both
    return future


async def _by_dropping(group: aiodist.Group, out: Any) -> None:
    group.recv(1, out=out)
    gc.collect()


async def _by_result_in_a_thread(group: aiodist.Group, out: Any) -> Any:
    future = group.recv(1, out=out)
    with pytest.raises(TimeoutError) as caught:
        await asyncio.to_thread(future.result, 0.05)
    assert not isinstance(caught.value, CollectiveTimeoutError)
    return future


async def _by_its_timeout(group: aiodist.Group, out: Any) -> None:
    error = await error_of(lambda: group.recv(1, out=out, timeout=0.05))
    assert isinstance(error, CollectiveTimeoutError)


WAYS: dict[str, GiveUp] = {
    "cancel": _by_cancel,
    "wait_for": _by_wait_for,
    "timeout": _by_timeout,
    "task group": _by_task_group,
    "gather": _by_gather,
    "drop": _by_dropping,
    "result": _by_result_in_a_thread,
    "timeout=": _by_its_timeout,
}


async def _give_up(group: aiodist.Group, way: str) -> None:
    """Rank 0 gives up several receives; every message that rank 1 sends afterwards goes to a later one."""
    for count in (3, 50_000):
        if group.rank == 1:
            await _hear(group, 0)
            for value in (1, 2):
                await group.send(np.full(count, value), 0)
            await assert_usable(group)
            continue
        outs = [None, np.full(count, -1), np.full(count, -1)]
        for out in outs:
            future = await WAYS[way](group, out)
            if future is not None:
                for _ in range(2):
                    with pytest.raises(asyncio.CancelledError):
                        await future
                    assert future.done() and future.cancelled()
        await _tell(group, 1)
        b = np.zeros(count, int)
        assert await group.recv(1, out=b) is b
        assert_same(b, np.full(count, 1))
        assert_same(await group.recv(1), np.full(count, 2))
        await assert_usable(group)
        assert_same(outs[1], np.full(count, -1))
        assert_same(outs[2], np.full(count, -1))


@pytest.mark.parametrize("way", WAYS)
def test_a_receive_that_is_given_up_swallows_nothing(way: str, run_ranks: RunRanks) -> None:
    run_ranks(2, _give_up, way)


@pytest.mark.parametrize("way", ["cancel", "wait_for", "timeout", "task group", "gather"])
def test_giving_up_under_each_loop(way: str, run_loop: RunLoop) -> None:
    async def body() -> None:
        async with aiodist.local_world(2) as groups:
            await gather_ranks(_give_up(group, way) for group in groups)

    run_loop(body())


async def _kept(group: aiodist.Group, kind: str) -> None:
    """A receive that somebody still waits for is not withdrawn."""
    if group.rank == 1:
        await _hear(group, 0)
        for value in (1, 2):
            await group.send(np.full(3, value), 0)
        return
    future = group.recv(1)
    if kind == "two waiters":
        waiters = [asyncio.ensure_future(_await(future)) for _ in range(2)]
        await asyncio.sleep(0.05)
        waiters[0].cancel()
        kept: Awaitable[Any] = waiters[1]
    elif kind == "shield":
        kept = asyncio.ensure_future(_await(future))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(kept), 0.05)
    else:
        kept = future
        assert await asyncio.wait([kept], timeout=0.05) == (set(), {kept})  # type: ignore[type-var]
    await asyncio.sleep(0.05)
    assert not future.done() and not future.cancelled()
    await _tell(group, 1)
    assert_same(await kept, np.full(3, 1))
    assert_same(await future, np.full(3, 1))
    assert_same(await group.recv(1), np.full(3, 2))


@pytest.mark.parametrize("kind", ["two waiters", "shield", "wait"])
def test_a_receive_that_is_still_waited_for_is_kept(kind: str, run_ranks: RunRanks) -> None:
    run_ranks(2, _kept, kind)


async def _withdrawn(future: aiodist.TensorFuture[Any]) -> bool:
    """Tell whether a receive that was given up is withdrawn; one that had its message already completes."""
    try:
        await future
    except asyncio.CancelledError:
        assert future.cancelled()
        return True
    assert not future.cancelled()
    return False


async def _half_moved(group: aiodist.Group, count: int) -> None:
    """Whenever the wait ends, the message goes whole to the receive or whole to the next one, and the next message is intact."""
    for turn in range(8):
        messages = [ramp((size,), 3 * turn + number) for number, size in enumerate((count, 5, count))]
        if group.rank == 1:
            await group.barrier()
            await asyncio.gather(*(group.send(message, 0) for message in messages))
            await group.barrier()
            continue
        out = np.full(count, -1.0)
        future = group.recv(1, out=out)
        task = asyncio.ensure_future(_await(future))
        await group.barrier()
        await asyncio.sleep(0 if turn < 3 else turn * 0.002)
        task.cancel()
        await asyncio.wait([task])
        if await _withdrawn(future):
            assert_same(await group.recv(1), messages[0])
            assert_same(out, np.full(count, -1.0))
        else:
            assert await future is out
            assert_same(out, messages[0])
        assert_same(await group.recv(1), messages[1])
        assert_same(await group.recv(1), messages[2])
        await group.barrier()


@pytest.mark.parametrize("count", [400_000, 2 * MIB])
def test_a_receive_given_up_while_its_message_moves(count: int, run_ranks: RunRanks) -> None:
    run_ranks(2, _half_moved, count)


async def _race(group: aiodist.Group, turns: int) -> None:
    """Receives are cancelled just as messages come: all come once, in order, in those that were not withdrawn."""
    own = random.Random(group.rank)
    if group.rank == 1:
        for number in range(turns):
            await group.send(np.full(1 + 2000 * (number % 3), number), 0)
            await asyncio.sleep(own.random() * 0.004)
        return
    got = 0
    while got < turns:
        future = group.recv(1)
        try:
            await asyncio.wait_for(future, own.random() * 0.004)
        except TimeoutError:
            if await _withdrawn(future):
                continue
        assert_same(await future, np.full(1 + 2000 * (got % 3), got))
        got += 1


def test_receives_that_race_with_their_messages(run_ranks: RunRanks) -> None:
    run_ranks(2, _race, 300)


async def _timed_out(group: aiodist.Group, count: int) -> None:
    """A receive that reaches its timeout names whom it waited for and leaves the group usable."""
    if group.rank == 0:
        error = await error_of(lambda: group.recv(1, 6, timeout=1))
        assert isinstance(error, CollectiveTimeoutError) and isinstance(error, TimeoutError), repr(error)
        assert error.ranks == (1,) and error.collective == "recv"
        for word in ("recv", "rank 1", "tag 6"):
            assert word in str(error), f"{word} is missing in: {error}"
    await assert_usable(group)
    if group.rank == 1:
        await group.send(ramp((count,), 1), 0, 6)
        await group.send(ramp((count,), 2), 0, 6)
    else:
        assert_same(await group.recv(1, 6), ramp((count,), 1))
        assert_same(await group.recv(1, 6), ramp((count,), 2))
    await assert_usable(group)


@pytest.mark.parametrize("count", [3, 10_000, MIB])
def test_a_receive_that_times_out_leaves_the_group_usable(count: int, run_ranks: RunRanks) -> None:
    run_ranks(2, _timed_out, count)


async def _ticking(group: aiodist.Group, kind: str) -> None:
    """The loop goes on beside a call that waits for a peer who comes too late."""
    calls: dict[str, Callable[[], Any]] = {
        "small": lambda: group.all_reduce(np.ones(5), timeout=2),
        "large": lambda: group.all_reduce(np.ones(MIB), timeout=2),
        "recv": lambda: group.recv(1, timeout=2),
    }
    if group.rank == 1:
        await asyncio.sleep(4)
        return
    times = [time.monotonic()]

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.01)
            times.append(time.monotonic())

    ticker = asyncio.create_task(tick())
    error = await error_of(calls[kind])
    times.append(time.monotonic())
    ticker.cancel()
    assert isinstance(error, CollectiveTimeoutError) and error.ranks == (1,), repr(error)
    assert ("recv" if kind == "recv" else "all_reduce") in str(error)
    assert times[-1] - times[0] > 1.9, "it gave up too early"
    # Far more than a busy machine takes, far less than the two seconds that a loop which stands still would show.
    assert max(after - before for before, after in itertools.pairwise(times)) < 1


@pytest.mark.parametrize("kind", ["small", "large", "recv"])
def test_the_timeout_of_a_call_counts_and_the_loop_goes_on(kind: str, run_ranks: RunRanks) -> None:
    run_ranks(2, _ticking, kind)


async def _cancelled_sum(group: aiodist.Group) -> None:
    """Cancelling the wait for a large sum half way leaves both ranks in step."""
    for turn in range(5):
        x = np.full(MIB // 8, group.rank + 1.0)
        if group.rank == 0:
            task = asyncio.ensure_future(_await(group.all_reduce(x)))
            await asyncio.sleep(turn * 0.001)
            task.cancel()
            await asyncio.wait([task])
        else:
            assert_same(await group.all_reduce(x, timeout=30), np.full(MIB // 8, 3.0))
        assert_same(await group.all_reduce(np.array([1.0]), timeout=30), np.array([2.0]))


def test_a_cancelled_all_reduce_leaves_the_ranks_in_step(run_ranks: RunRanks) -> None:
    run_ranks(2, _cancelled_sum)


async def _left_pending(group: aiodist.Group) -> None:
    """Receives that nobody serves do not hold up the end of the group, and whoever waits for one is told."""
    kept = group.recv(1 - group.rank)
    group.recv(1 - group.rank, 1)
    task = asyncio.ensure_future(_await(group.recv(1 - group.rank, 2)))
    await group.barrier()
    async with asyncio.timeout(8):  # less than calls get to end
        await group.aclose()
    for waiting in (kept, task):
        try:
            value = await asyncio.wait_for(waiting, 20)
        except (AiodistError, asyncio.CancelledError):
            continue
        raise AssertionError(f"nothing was sent, but {value!r} came")


def test_receives_left_pending_do_not_hold_up_the_end(run_ranks: RunRanks) -> None:
    run_ranks(2, _left_pending)
