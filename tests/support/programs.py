"""Whole programs that ranks run, for what a function inside a test's process can not show: how a process ends.

Each is a function of this module, run by ``python -m support.programs NAME`` with the variables of a rank set.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import multiprocessing
import os
import resource
import selectors
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

import aiodist

kept: list[Any] = []
"""What programs leave behind unclosed, alive until the interpreter ends."""


async def _one_call(close: bool = False) -> None:
    world = await aiodist.init()
    kept.append(world)
    total = await world.all_reduce(np.full(3, world.rank + 1.0))
    assert total.tolist() == [world.size * (world.size + 1) / 2] * 3
    if close:
        await world.aclose()


def end_of_script() -> None:
    """End with the world open."""
    asyncio.run(_one_call())


def exit_three() -> None:
    """Leave by ``sys.exit`` with the world open."""
    asyncio.run(_one_call())
    sys.exit(3)


def uncaught() -> None:
    """Leave by an exception with the world open."""
    asyncio.run(_one_call())
    raise ValueError("boom")


def pending_in_thread() -> None:
    """End while a call waits in the loop of a daemon thread."""

    async def wait_for_ever() -> None:
        world = await aiodist.init()
        kept.append(world)
        await world.all_reduce(np.ones(3))
        if world.rank == 0:
            started.set()
            await world.all_reduce(np.ones(100_000))
        started.set()
        await asyncio.sleep(3600)

    started = threading.Event()
    threading.Thread(target=lambda: asyncio.run(wait_for_ever()), daemon=True).start()
    assert started.wait(20)
    time.sleep(0.1)


async def _leave_pending() -> None:
    world = await aiodist.init(job=os.environ["AIODIST_JOB"] + "-first")
    kept.append(world)
    await world.all_reduce(np.ones(2))
    kept.append(asyncio.ensure_future(world.all_reduce(np.ones(5))) if world.rank == 0 else world.all_reduce(np.ones(5)))


async def _second_loop() -> None:
    await kept[0].aclose()
    await _one_call(close=True)


def _two_loops(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    run(_leave_pending())
    run(_second_loop())
    print("right")


def two_loops() -> None:
    """Close a loop with a call pending, then form a second world in a second loop."""
    _two_loops(asyncio.run)


def two_loops_uvloop() -> None:
    """The same under uvloop."""
    import uvloop

    _two_loops(uvloop.run)


def local_world_left_open() -> None:
    """Close a loop while one rank of a local world waits, then open a second world in a second loop."""

    async def leave() -> None:
        opened = aiodist.local_world(2)
        groups = await opened.__aenter__()
        kept.extend([opened, groups, asyncio.ensure_future(groups[0].all_reduce(np.ones(70_000)))])
        await asyncio.sleep(0)

    async def again() -> None:
        async with aiodist.local_world(2) as groups:
            results = await asyncio.gather(*(group.all_reduce(np.ones(2)) for group in groups))
            assert all(result.tolist() == [2.0, 2.0] for result in results)

    asyncio.run(leave())
    asyncio.run(again())
    print("right")


def leave_by_exception() -> None:
    """Rank 1 leaves its block by an exception; its peers print what they are told."""

    async def body() -> None:
        async with aiodist.init() as world:
            await world.barrier()
            if world.rank == 1:
                raise ValueError("the data file is empty")
            try:
                await world.all_reduce(np.ones(100_000))
            except aiodist.CommunicationError as error:
                print(json.dumps([type(error).__name__, str(error), list(getattr(error, "ranks", ()))]))

    asyncio.run(body())


def leave_early() -> None:
    """Rank 1 says goodbye; a call that needs it fails on the others."""

    async def body() -> None:
        async with aiodist.init() as world:
            await world.all_reduce(np.ones(3))
            if world.rank == 1:
                return
            try:
                await world.all_reduce(np.ones(3))
            except aiodist.PeerLostError as error:
                print(json.dumps([str(error), list(error.ranks)]))

    asyncio.run(body())


def fork_children() -> None:
    """Rank 0 forks children that end in several ways; the parents' calls go on."""

    async def body() -> None:
        async with aiodist.init() as world:
            await _rounds(world, 5)
            if world.rank == 0:
                for child in (_child_leaves, _child_calls, _child_makes_pool):
                    _fork(functools.partial(child, world))
                    await _rounds_of_one(world)
            else:
                for _ in range(3):
                    await _rounds_of_one(world)
            await _rounds(world, 100)
            if world.rank == 0:
                process = os.fork()
                if process == 0:
                    sys.exit(0)  # unwinds through the block and the loop, runs exit hooks
                _reap(process)
            await _rounds(world, 100)
        print("right")

    # The children share an epoll set with their parent; what they unregister would be gone for both.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.PollSelector())) as runner:
        runner.run(body())


async def _rounds(world: aiodist.Group, turns: int) -> None:
    for turn in range(turns):
        count = 3 if turn % 2 else 50_000
        total = await world.all_reduce(np.full(count, world.rank + turn))
        assert (total == sum(rank + turn for rank in range(world.size))).all()


async def _rounds_of_one(world: aiodist.Group) -> None:
    await _rounds(world, 2)


def _fork(child: Callable[[], None]) -> None:
    process = os.fork()
    if process == 0:
        try:
            child()
        except BaseException as error:
            sys.stderr.write(f"child: {error!r}\n")
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    assert _reap(process) == 0, "a child failed"


def _reap(process: int) -> int:
    for _ in range(2000):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(process, 9)
    os.waitpid(process, 0)
    raise AssertionError("a child hung")


def _child_leaves(world: aiodist.Group) -> None:
    del world


def _child_calls(world: aiodist.Group) -> None:
    calls: list[Callable[[], Any]] = [lambda: world.all_reduce(np.ones(3)), world.barrier, lambda: world.all_gather(np.ones(70_000))]
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            assert str(os.getppid()) in str(error), f"process {os.getppid()} is not named in: {error}"
        else:
            raise AssertionError("a child may not use its parent's group")


def _child_makes_pool(world: aiodist.Group) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2, 3]) == [1, 2, 3]


def _memory() -> int:
    with open("/proc/self/statm", encoding="ascii") as status:
        return int(status.read().split()[1]) * resource.getpagesize()


def _shared_mappings() -> int:
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        return sum("/memfd:" in line or "/dev/shm/" in line for line in maps)


def _counts() -> dict[str, int]:
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": _shared_mappings(),
        "shm": sum("aiodist" in name for name in os.listdir("/dev/shm")),  # other programs of the machine come and go
    }


def _settled(due: dict[str, int]) -> dict[str, int]:
    """Return the counts, after some grace for what ends in the background."""
    for _ in range(100):
        if _counts() == due:
            break
        time.sleep(0.05)
    return _counts()


def _compare_rounds(one_round: Callable[[], None], rounds: int) -> None:
    for _ in range(10):
        one_round()
    time.sleep(0.5)
    before, memory = _counts(), _memory()
    for _ in range(rounds):
        one_round()
    after = _settled(before)
    print(json.dumps({"before": before, "after": after, "grown": _memory() - memory}))


async def _local_round(x: Any, turns: int = 1) -> None:
    for _ in range(turns):
        async with aiodist.local_world(2) as groups:
            totals = await asyncio.gather(*(group.all_reduce(x) for group in groups))
            assert totals[0][-1] == 2 * x[-1]


def worlds_in_a_loop() -> None:
    """200 × a local world of two ranks, an all_reduce, closed: in one loop, in loops of their own, small and large."""
    small, large = np.ones(10), np.ones(100_000)
    asyncio.run(_local_round(large, 3))
    _compare_rounds(lambda: asyncio.run(_local_round(small, 10)), 10)
    _compare_rounds(lambda: asyncio.run(_local_round(large)), 100)


def worlds_dropped() -> None:
    """Local worlds that are dropped unclosed give a ResourceWarning and stay bounded."""

    async def one_round() -> None:
        opened = aiodist.local_world(2)
        groups = await opened.__aenter__()
        await asyncio.gather(*(group.all_reduce(np.ones(10)) for group in groups))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _compare_rounds(lambda: asyncio.run(one_round()), 100)
    assert any(issubclass(warning.category, ResourceWarning) for warning in caught), "no ResourceWarning"


def formed_worlds_in_a_loop() -> None:
    """Worlds formed through the rendezvous, one after the other, in one process per rank."""
    numbers = iter(range(10_000))

    async def one_round() -> None:
        async with aiodist.init(job=f"{os.environ['AIODIST_JOB']}-{next(numbers)}") as world:
            total = await world.all_reduce(np.ones(50_000))
            assert total[0] == world.size

    _compare_rounds(lambda: asyncio.run(one_round()), 30)


def world_left_late() -> None:
    """The last world of a rank that leaves it a second before the others."""

    async def one_round(name: str, late: float) -> None:
        async with aiodist.init(job=f"{os.environ['AIODIST_JOB']}-{name}") as world:
            await world.all_reduce(np.ones(50_000))
            await asyncio.sleep(late if world.rank else 0)

    asyncio.run(one_round("together", 0))
    time.sleep(1)
    before, memory = _counts(), _memory()
    asyncio.run(one_round("apart", 1.0))
    after = _settled(before)
    print(json.dumps({"before": before, "after": after, "grown": _memory() - memory}))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
