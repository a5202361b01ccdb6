"""Processes that are killed, stopped, forked, late, or that end without a goodbye; and what is left afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.checks import assert_usable, error_of
from support.oracle import assert_same
from support.ranks import Outcome, Pools, RankPool, ServerThread, assert_clean, new_job
from support.worker import note

import aiodist
from aiodist import CollectiveTimeoutError, CommunicationError, PeerLostError, RendezvousError
from aiodist.rendezvous.client import RendezvousClient

pytestmark = pytest.mark.timeout(60)

PROMPTLY = 10.0
"""Seconds that survivors get on a busy machine; a hang lasts until the calls' timeout of 30."""


def _value(outcome: Outcome) -> Any:
    assert outcome.answer is not None, f"died with {outcome.status}"
    assert outcome.answer.error is None, outcome.answer.trace
    return outcome.answer.value


async def _traffic(group: aiodist.Group, kind: str) -> tuple[str, str, tuple[int, ...], str]:
    """Call until a peer is lost; tell what was raised, and what a later call raises."""
    calls: dict[str, Callable[[], Any]] = {
        "small": lambda: group.all_reduce(np.ones(2)),
        "large": lambda: group.all_reduce(np.ones(131_072)),
        "shared": lambda: group.all_reduce(shared),
        "gather": lambda: group.all_gather(np.ones(60_000)),
    }
    shared = group.empty((131_072,), "f8")
    shared[...] = 1
    await calls[kind]()
    note("started")
    while True:
        try:
            await calls[kind]()
        except CommunicationError as error:
            later = await error_of(lambda: group.barrier())
            await group.aclose()
            return type(error).__name__, str(error), error.ranks, type(later).__name__


@pytest.mark.parametrize("kind", ["small", "large", "shared", "gather"])
def test_a_killed_rank_is_named_by_every_survivor(kind: str, doomed: Callable[..., RankPool]) -> None:
    pool = doomed(4)
    pool.start(_traffic, kind)
    pool.wait_notes()
    time.sleep(0.1)
    pool.signal(1, signal.SIGKILL)
    outcomes = pool.finish(PROMPTLY)
    assert outcomes[1].status == -signal.SIGKILL
    for rank in (0, 2, 3):
        name, text, ranks, later = _value(outcomes[rank])
        assert name == later == PeerLostError.__name__, (name, later, text)
        assert ranks == (1,), text
        assert "rank 1" in text


async def _wait_in(group: aiodist.Group, kind: str) -> tuple[str, tuple[int, ...]]:
    """Wait asleep for rank 1, which does not come."""
    await group.barrier()
    note("waiting")
    if group.rank == 1:
        await asyncio.sleep(60)
    call = group.barrier() if kind == "barrier" else group.all_reduce(np.ones(200_000))
    try:
        if kind == "result":
            call.result()
        await call
    except CommunicationError as error:
        return type(error).__name__, error.ranks
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("kind", ["barrier", "all_reduce", "result"])
def test_a_death_wakes_those_who_sleep(kind: str, doomed: Callable[..., RankPool]) -> None:
    pool = doomed(3)
    pool.start(_wait_in, kind)
    pool.wait_notes()
    time.sleep(0.5)
    pool.signal(1, signal.SIGKILL)
    outcomes = pool.finish(PROMPTLY)
    for rank in (0, 2):
        assert _value(outcomes[rank]) == (PeerLostError.__name__, (1,))


def test_two_killed_ranks(doomed: Callable[..., RankPool]) -> None:
    pool = doomed(4)
    pool.start(_traffic, "large")
    pool.wait_notes()
    for rank in (0, 3):
        pool.signal(rank, signal.SIGKILL)
    outcomes = pool.finish(PROMPTLY)
    for rank in (1, 2):
        name, _, ranks, _ = _value(outcomes[rank])
        assert name == PeerLostError.__name__
        assert ranks and set(ranks) <= {0, 3}


async def _stop_two(group: aiodist.Group) -> tuple[str, tuple[int, ...], bool, str]:
    await group.barrier()
    note("ready")
    if group.rank >= 2:
        await asyncio.sleep(1.0)  # stopped meanwhile
        error = await error_of(lambda: group.barrier(timeout=20))
    else:
        await asyncio.sleep(0.5)
        error = await error_of(lambda: group.barrier(timeout=1.5))
        note("timed out")
    assert isinstance(error, CommunicationError), repr(error)
    return type(error).__name__, error.ranks, isinstance(error, TimeoutError), str(error)


def test_stopped_ranks_are_all_named_by_the_timeout(doomed: Callable[..., RankPool]) -> None:
    pool = doomed(4)
    pool.start(_stop_two)
    pool.wait_notes()
    for rank in (2, 3):
        pool.signal(rank, signal.SIGSTOP)
    end = time.monotonic() + 20
    while time.monotonic() < end and not _told(pool, (0, 1)):
        pool.wait_notes(2, 0.2)
    for rank in (2, 3):
        pool.signal(rank, signal.SIGCONT)
    outcomes = pool.finish(PROMPTLY)
    for rank in (0, 1):
        name, ranks, is_timeout, text = _value(outcomes[rank])
        assert name == CollectiveTimeoutError.__name__ and is_timeout
        assert ranks == (2, 3), text
        assert "barrier" in text and "2" in text and "3" in text
    for rank in (2, 3):
        assert "Error" in _value(outcomes[rank])[0]


def _told(pool: RankPool, ranks: tuple[int, ...]) -> bool:
    return all("timed out" in pool.notes(rank) for rank in ranks)


async def _go_on(group: aiodist.Group, turns: int) -> None:
    note("ready")
    for turn in range(turns):
        assert_same(await group.all_reduce(np.full(4000, group.rank + turn)), np.full(4000, 3 * turn + 3))
        await asyncio.sleep(0.005)


def test_a_short_stop_harms_nothing(doomed: Callable[..., RankPool]) -> None:
    pool = doomed(3)
    pool.start(_go_on, 200)
    pool.wait_notes()
    time.sleep(0.1)
    pool.signal(2, signal.SIGSTOP)
    time.sleep(1.0)
    pool.signal(2, signal.SIGCONT)
    for outcome in pool.finish(30):
        _value(outcome)


async def test_late_joiners_are_refused_and_the_ranks_go_on(pools: Pools, server: ServerThread) -> None:
    pool = pools.get(3)
    pool.start(_go_on, 100)
    pool.wait_notes()
    assert pool.job is not None
    for rank in (1, None):
        async with RendezvousClient(server.address, job=pool.job, token=server.token, timeout=30.0) as late:
            with pytest.raises(RendezvousError, match=r"is already formed \(world 3\)"):
                await late.join(world_size=3, rank=rank, info={})
    for outcome in pool.finish(30):
        _value(outcome)


async def _late(group: aiodist.Group, seconds: float | None) -> tuple[Any, ...]:
    """Rank 1 comes too late for rank 0, beside whom a ticker runs."""
    await assert_usable(group)
    if group.rank == 1:
        await asyncio.sleep(5)
        error = await error_of(lambda: group.all_reduce(np.ones(5)))
        return type(error).__name__, isinstance(error, CommunicationError)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    ticker = asyncio.create_task(tick())
    error = await error_of(lambda: group.all_reduce(np.ones(5), timeout=seconds))
    ticker.cancel()
    later = await error_of(lambda: group.all_reduce(np.ones(5)))
    assert isinstance(error, CollectiveTimeoutError) and isinstance(error, TimeoutError), repr(error)
    assert isinstance(later, CommunicationError), repr(later)
    assert "all_reduce" in str(error) and error.collective == "all_reduce" and error.seq == 2
    return error.ranks, ticks


@pytest.mark.parametrize(("seconds", "environment"), [(1.0, {}), (None, {"AIODIST_TIMEOUT": "1"})], ids=["call", "group"])
def test_a_timeout_names_the_call_and_the_late_rank(
    seconds: float | None, environment: dict[str, str], doomed: Callable[..., RankPool]
) -> None:
    first, second = doomed(2, **environment).run(_late, seconds)
    ranks, ticks = first
    assert ranks == (1,)
    assert ticks > 10, "the loop stood still"
    assert second[1], second


@dataclass
class Ended:
    """How a program ended."""

    status: int
    output: str
    errors: str


def run_program(server: ServerThread, name: str, size: int, *options: str, deadline: float = 50.0) -> list[Ended]:
    """Run a program of `support.programs` on `size` ranks and return how each ended; what hangs is killed."""
    job = new_job()
    command = [sys.executable, "-P", "-X", "faulthandler", *options, "-m", "support.programs", name]
    running = [
        subprocess.Popen(command, env=server.environment(rank, size, job), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    end = time.monotonic() + deadline
    ended = []
    try:
        for process in running:
            output, errors = process.communicate(timeout=max(0.1, end - time.monotonic()))
            ended.append(Ended(process.returncode, output, errors))
    finally:
        for process in running:
            process.kill()
            process.communicate()
    return ended


@pytest.mark.parametrize(("name", "status"), [("end_of_script", 0), ("exit_three", 3), ("uncaught", 1), ("pending_in_thread", 0)])
def test_ending_without_teardown(name: str, status: int, server: ServerThread) -> None:
    for ended in run_program(server, name, 2, deadline=30):
        assert ended.status == status, ended.errors
        assert_clean(ended.errors)


@pytest.mark.parametrize(("name", "size"), [("two_loops", 2), ("two_loops_uvloop", 2), ("local_world_left_open", 1)])
def test_a_loop_that_closes_with_work_pending(name: str, size: int, server: ServerThread) -> None:
    for ended in run_program(server, name, size, "-X", "dev", "-W", "error", deadline=30):
        assert ended.status == 0, ended.errors
        assert ended.output == "right\n"
        assert_clean(ended.errors)


def test_fork_after_init(server: ServerThread) -> None:
    for ended in run_program(server, "fork_children", 2):
        assert ended.status == 0, ended.errors
        assert ended.output.endswith("right\n")
        assert_clean(ended.errors)


def test_leaving_a_block_by_an_exception_tells_the_peers(server: ServerThread) -> None:
    ended = run_program(server, "leave_by_exception", 3, deadline=30)
    assert ended[1].status == 1 and "the data file is empty" in ended[1].errors
    for rank in (0, 2):
        assert ended[rank].status == 0, ended[rank].errors
        _, text, _ = json.loads(ended[rank].output)
        assert "the data file is empty" in text and "1" in text


def test_a_goodbye_ends_the_wait_of_the_others(server: ServerThread) -> None:
    ended = run_program(server, "leave_early", 3, deadline=30)
    assert [one.status for one in ended] == [0, 0, 0], ended
    for rank in (0, 2):
        text, ranks = json.loads(ended[rank].output)
        assert ranks == [1], text
        assert "rank 1" in text


@pytest.mark.parametrize(
    ("name", "size"), [("worlds_in_a_loop", 1), ("worlds_dropped", 1), ("formed_worlds_in_a_loop", 2), ("world_left_late", 2)]
)
def test_worlds_leave_nothing_behind(name: str, size: int, server: ServerThread) -> None:
    for ended in run_program(server, name, size):
        assert ended.status == 0, ended.errors
        for line in ended.output.splitlines():
            counts = json.loads(line)
            # Fewer is no leak: a peer that was slow to end may have been counted before.
            assert all(counts["after"][what] <= counts["before"][what] for what in counts["before"]), counts
            assert counts["grown"] < 5_000_000, counts
        assert_clean(ended.errors)


def test_processes_leave_no_shared_memory(server: ServerThread) -> None:
    pool = RankPool(server, 2)
    pool.run(_use_memory)
    pool.close()
    assert not [name for name in os.listdir("/dev/shm") if "aiodist" in name]


async def _use_memory(group: aiodist.Group) -> None:
    x = group.empty((100_000,), "f4")
    x[...] = 1
    await group.all_reduce(x)


def test_alone_it_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AIODIST_")]:
        monkeypatch.delenv(name)

    async def body() -> None:
        for _ in range(2):
            async with aiodist.init() as world:
                assert (world.rank, world.size) == (0, 1)
                assert_same(await world.all_reduce(np.arange(4), op="mean"), np.arange(4.0))
                with pytest.raises(RuntimeError):
                    await aiodist.init()
                await assert_usable(world)
        world = await aiodist.init()
        await world.barrier()
        await world.aclose()

    asyncio.run(body())
