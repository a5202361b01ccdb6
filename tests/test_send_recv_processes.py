"""Messages between processes that end, leave or die; messages larger than the send buffer; messages within groups of some ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import RunRanks
from support.checks import assert_usable, error_of, ramp
from support.oracle import assert_same
from support.ranks import Outcome, Pools, RankPool, ServerThread, assert_clean, new_job
from support.worker import note

import aiodist
from aiodist import CollectiveTimeoutError, CommunicationError, PeerLostError

pytestmark = pytest.mark.timeout(90)

MIB = 2**20
PROMPTLY = 10.0
"""Seconds that survivors get on a busy machine; a hang lasts until the calls' timeout of 30."""
COUNTS = (0, 16, 3000, MIB)

kept: list[Any] = []
"""What programs leave behind unclosed, alive until the interpreter ends."""


def _value(outcome: Outcome) -> Any:
    assert outcome.answer is not None, f"died with {outcome.status}"
    assert outcome.answer.error is None, outcome.answer.trace
    return outcome.answer.value


async def _take_all(group: aiodist.Group) -> None:
    """Take what rank 0 sent before it left, then ask for more than it sent."""
    for tag, count in enumerate(COUNTS):
        assert_same(await group.recv(0, tag), ramp((count,), tag))
    error = await error_of(lambda: group.recv(0))
    assert isinstance(error, PeerLostError) and error.ranks == (0,), repr(error)
    assert "rank 0" in str(error)


async def _leave_after_sending(group: aiodist.Group) -> None:
    await group.barrier()
    if group.rank == 0:
        for tag, count in enumerate(COUNTS):
            await group.send(ramp((count,), tag), 1, tag)
        await group.aclose()
        return
    await asyncio.sleep(2)
    await _take_all(group)


def test_what_was_sent_before_leaving_arrives(run_ranks: RunRanks) -> None:
    run_ranks(2, _leave_after_sending)


async def _leave_while_one_waits(group: aiodist.Group) -> None:
    await group.barrier()
    if group.rank == 0:
        await asyncio.sleep(0.3)
        await group.aclose()
        return
    error = await error_of(lambda: group.recv(0))
    assert isinstance(error, PeerLostError) and error.ranks == (0,), repr(error)


def test_a_receive_from_a_rank_that_leaves_fails(run_ranks: RunRanks) -> None:
    run_ranks(2, _leave_while_one_waits)


async def _sender_or_receiver() -> None:
    world = await aiodist.init()
    kept.append(world)
    await world.barrier()
    if world.rank == 0:
        for tag, count in enumerate(COUNTS):
            await world.send(ramp((count,), tag), 1, tag)
    else:
        await asyncio.sleep(2)
        await _take_all(world)
        print("right")


def end_after_sending() -> None:
    """Rank 0 sends and ends with its world open; rank 1 asks two seconds later."""
    asyncio.run(_sender_or_receiver())


def _run_program(server: ServerThread, function: Callable[[], None], deadline: float = 40) -> list[tuple[int, str, str]]:
    """Run a function of this module as a program on two ranks; return the status, output and errors of each."""
    job = new_job()
    command = [sys.executable, "-P", "-X", "faulthandler", "-c", f"from {__name__} import {function.__name__} as run; run()"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [subprocess.Popen(command, env=server.environment(rank, 2, job), text=True, **pipes) for rank in range(2)]  # type: ignore[call-overload]
    end = time.monotonic() + deadline
    try:
        outputs = [process.communicate(timeout=max(0.1, end - time.monotonic())) for process in running]
        return [(process.returncode, *texts) for process, texts in zip(running, outputs, strict=True)]
    finally:
        for process in running:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("turn", range(3))
def test_what_was_sent_before_ending_arrives(turn: int, server: ServerThread) -> None:
    sender, receiver = _run_program(server, end_after_sending)
    assert (sender[0], receiver[0]) == (0, 0), (turn, sender, receiver)
    assert receiver[1] == "right\n"
    assert_clean(sender[2], receiver[2])


async def _wait_for_the_dead(group: aiodist.Group, posted: bool) -> None:
    """Rank 1 dies; the others learn it from a receive that waits for it, from one of another rank, and from later ones."""
    await group.barrier()
    receives = [group.recv(src, 3) for src in range(group.size) if src != group.rank] if posted else []
    note("ready")
    await asyncio.sleep(60 if group.rank == 1 else 1)
    calls: list[Any] = [*receives, lambda: group.recv(1), lambda: group.recv(2), lambda: group.send(np.ones(3), 1)]
    for call in calls:
        error = await error_of(call)
        assert isinstance(error, PeerLostError) and error.ranks == (1,), repr(error)
        assert "rank 1" in str(error)


@pytest.mark.parametrize("posted", [True, False], ids=["posted before", "posted after"])
def test_a_receive_from_a_killed_rank_fails_promptly(posted: bool, doomed: Callable[..., RankPool]) -> None:
    pool = doomed(3)
    pool.start(_wait_for_the_dead, posted)
    pool.wait_notes()
    time.sleep(0.3)
    pool.signal(1, signal.SIGKILL)
    outcomes = pool.finish(PROMPTLY)
    assert outcomes[1].status == -signal.SIGKILL
    for rank in (0, 2):
        _value(outcomes[rank])


async def _die_asleep(group: aiodist.Group) -> None:
    await group.barrier()
    note("ready")
    if group.rank == 1:
        await asyncio.sleep(60)
    error = await error_of(lambda: group.recv(1))
    assert isinstance(error, PeerLostError) and error.ranks == (1,), repr(error)


def test_a_death_wakes_a_receive_that_sleeps(doomed: Callable[..., RankPool]) -> None:
    pool = doomed(2)
    pool.start(_die_asleep)
    pool.wait_notes()
    time.sleep(1)
    pool.signal(1, signal.SIGKILL)
    _value(pool.finish(PROMPTLY)[0])


async def _die_before_first_use(group: aiodist.Group) -> None:
    pair: Any = await group.new_group([0, 1], name="a pair")
    await group.barrier()
    if group.rank == 0:
        os._exit(9)
    if group.rank == 1:
        for call in (lambda: pair.all_reduce(np.ones(3)), lambda: pair.recv(0)):
            error = await error_of(call)
            assert isinstance(error, PeerLostError) and error.ranks == (0,), repr(error)


def test_a_death_before_the_first_call_of_a_new_group(doomed: Callable[..., RankPool]) -> None:
    pool = doomed(3)
    pool.start(_die_before_first_use)
    outcomes = pool.finish(PROMPTLY)
    assert outcomes[0].status == 9
    for rank in (1, 2):
        _value(outcomes[rank])


async def _beyond_the_buffer(group: aiodist.Group) -> None:
    """A message larger than the send buffer waits for its receive; those behind it stay in order, those of other tags pass it."""
    for shared in (False, True):
        if group.rank == 1:
            x = group.empty((300 * MIB // 8,), "f8") if shared else np.empty(300 * MIB // 8)
            x[...] = 0
            x[::4096] = np.arange(x[::4096].size)
            send = group.send(x, 0)
            await asyncio.gather(group.send(np.ones(3), 0), group.send(np.zeros(3), 0, 1))
            task = asyncio.ensure_future(_await(send))
            assert await asyncio.wait([task], timeout=1) == (set(), {task})
            task.cancel()  # gives up the wait, not the message
            await asyncio.wait([task])
            await group.barrier()
            await send
            x[...] = -1
            await group.barrier()
        else:
            await group.barrier()
            assert_same(await group.recv(1, 1), np.zeros(3))
            received = await group.recv(1)
            await group.barrier()
            assert_same(await group.recv(1), np.ones(3))
            assert received.nbytes == 300 * MIB
            assert_same(received[::4096].copy(), np.arange(float(received[::4096].size)))
            assert np.count_nonzero(received) == received[::4096].size - 1
            del received
    await assert_usable(group)


async def _fill_the_buffer(group: aiodist.Group) -> None:
    """Many messages fill the send buffer; the rest waits until receives have made room."""
    window = np.arange(2.0**20)
    if group.rank == 1:
        sends = [group.send(window[start : start + MIB // 2], 0) for start in range(80)]  # 320 MiB
        await sends[50]
        await asyncio.sleep(0.5)
        assert not sends[79].done()
        await group.barrier()
        await asyncio.gather(*sends)
    else:
        await group.barrier()
        for start in range(80):
            assert np.array_equal(await group.recv(1), window[start : start + MIB // 2])
    await assert_usable(group)


async def _await(future: Any) -> Any:
    return await future


def test_what_exceeds_the_send_buffer_waits_for_its_receive(pools: Pools) -> None:
    pools.get(2).run(_beyond_the_buffer, fresh=True)


def test_messages_that_fill_the_send_buffer_wait_for_room(pools: Pools) -> None:
    pools.get(2).run(_fill_the_buffer, fresh=True)


async def _never_received(group: aiodist.Group) -> None:
    """Such a send is bounded by its timeout."""
    if group.rank == 1:
        error = await error_of(lambda: group.send(np.zeros(300 * MIB, np.uint8), 0, 5, timeout=1))
        assert isinstance(error, CollectiveTimeoutError) and isinstance(error, CommunicationError), repr(error)
        assert error.ranks == (0,) and error.collective == "send"
        for word in ("send", "rank 0", "tag 5"):
            assert word in str(error), f"{word} is missing in: {error}"
    else:
        await asyncio.sleep(3)


def test_a_send_that_nobody_receives_times_out(run_ranks: RunRanks) -> None:
    run_ranks(2, _never_received)


async def _in_a_pair(group: aiodist.Group) -> None:
    """Ranks are those of the group that is asked; messages of groups and channels over the same ranks do not mix."""
    pair: Any = await group.new_group([2, 0])
    channel = await group.channel("beside")
    for count in (3, 50_000):
        if group.rank == 2:
            assert pair.rank == 0
            for number, (via, dst) in enumerate([(group, 0), (pair, 1), (channel, 0)]):
                await via.send(ramp((count,), number), dst)
            assert_same(await pair.recv(1, 4), ramp((count,), 9))
        elif group.rank == 0:
            assert pair.rank == 1
            assert_same(await channel.recv(2), ramp((count,), 2))
            assert_same(await pair.recv(0), ramp((count,), 1))
            assert_same(await group.recv(2), ramp((count,), 0))
            await pair.send(ramp((count,), 9), 0, 4)
        else:
            assert pair is None
            with pytest.raises(ValueError, match="src"):
                group.recv(3)
    await assert_usable(group)
    if pair is not None:
        await pair.aclose()


def test_messages_of_different_groups_do_not_mix(run_ranks: RunRanks) -> None:
    run_ranks(3, _in_a_pair)


def test_alone_one_sends_to_oneself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AIODIST_")]:
        monkeypatch.delenv(name)

    async def body() -> None:
        async with aiodist.init() as world:
            early = world.recv(0, 1)
            for count in (0, 3, MIB):
                await world.send(ramp((count,), 2), 0)
                assert_same(await world.recv(0), ramp((count,), 2))
            await world.send(ramp((5,), 4), 0, 1)
            assert_same(await early, ramp((5,), 4))
            with pytest.raises(ValueError, match="dst"):
                world.send(np.ones(1), 1)
            assert isinstance(await error_of(lambda: world.recv(0, timeout=0.2)), CollectiveTimeoutError)
            await assert_usable(world)

    asyncio.run(body())
