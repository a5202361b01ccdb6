"""Groups and processes: ranks that die while a group is made or before they use it, forks, and a rendezvous that is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.checks import assert_usable, error_of
from support.groups import assert_works, made
from support.oracle import assert_same
from support.ranks import RankPool, ServerThread
from support.worker import note

import aiodist
from aiodist import AiodistError, CommunicationError, PeerLostError, RendezvousError

pytestmark = pytest.mark.timeout(60)

PROMPTLY = 10.0
"""Seconds that survivors get on a busy machine; a hang lasts until the calls' timeout of 30."""


@pytest.fixture
def doomed(server: ServerThread) -> Iterator[Callable[..., RankPool]]:
    """Make pools whose ranks the test will harm."""
    pools: list[RankPool] = []

    def make(size: int, on: ServerThread = server) -> RankPool:
        pools.append(RankPool(on, size))
        return pools[-1]

    yield make
    for pool in pools:
        pool.broken = True
        pool.close()


def _values(pool: RankPool, ranks: tuple[int, ...]) -> list[Any]:
    outcomes = pool.finish(PROMPTLY)
    for rank in ranks:
        answer = outcomes[rank].answer
        assert answer is not None and answer.error is None, (rank, outcomes[rank].status, answer and answer.trace)
    return [answer.value for rank in ranks if (answer := outcomes[rank].answer) is not None]


async def _die_meanwhile(world: aiodist.Group, kind: str) -> tuple[str, tuple[int, ...], str]:
    if world.rank == 1:
        await asyncio.sleep(0.3)
        os._exit(9)
    pending: Any = world.channel("x") if kind == "channel" else world.new_group([2, 1, 0]) if kind == "new_group" else world.split(0)
    error = await error_of(pending)
    assert isinstance(error, AiodistError)
    rest = await made(world.new_group([0, 2]))
    for turn in range(50):
        assert_same(await rest.all_reduce(np.array([turn + world.rank])), np.array([2 * turn + 2]))
    await rest.aclose()
    return type(error).__name__, error.ranks, str(error)


@pytest.mark.parametrize(("kind", "due"), [("new_group", RendezvousError), ("channel", RendezvousError), ("split", PeerLostError)])
def test_a_rank_that_dies_while_a_group_is_made_is_named(kind: str, due: type[Exception], doomed: Callable[..., RankPool]) -> None:
    pool = doomed(3)
    pool.start(_die_meanwhile, kind)
    for name, ranks, text in _values(pool, (0, 2)):
        assert (name, ranks) == (due.__name__, (1,)), text
        assert "rank 1" in text
    assert pool.processes[1].wait(5) == 9


async def _die_before_the_first_call(world: aiodist.Group) -> tuple[float, tuple[int, ...]]:
    group = await made(world.new_group([0, 1], timeout=2))
    await world.barrier()
    if world.rank == 0:
        os._exit(9)
    began = time.monotonic()
    error = await error_of(lambda: group.all_reduce(np.array([1.0])))
    assert isinstance(error, CommunicationError), repr(error)
    await group.aclose()
    return time.monotonic() - began, error.ranks


def test_a_member_that_dies_before_its_first_call(doomed: Callable[..., RankPool]) -> None:
    pool = doomed(2)
    pool.start(_die_before_the_first_call)
    ((seconds, ranks),) = _values(pool, (1,))
    assert seconds < 4 and ranks == (0,)


async def _lose_one(world: aiodist.Group) -> list[str]:
    """A lost process breaks every group that holds it, with its channels, and no other."""
    with_it = await made(world.new_group([0, 1, 2]))
    channel = await with_it.channel("x")
    without = await made(world.new_group([2, 0])) if world.rank != 1 else None
    note("ready")
    if without is None:
        await asyncio.sleep(60)
    assert without is not None
    names = [type(await error_of(group.barrier)).__name__ for group in (with_it, channel, world)]
    await assert_works(without, 40_000)
    await assert_works(await without.channel("y"))
    for group in (without, with_it):
        await group.aclose()
    return names


def test_a_lost_process_breaks_every_group_that_holds_it(doomed: Callable[..., RankPool]) -> None:
    pool = doomed(3)
    pool.start(_lose_one)
    pool.wait_notes()
    pool.signal(1, signal.SIGKILL)
    for names in _values(pool, (0, 2)):
        assert names == ["PeerLostError"] * 3


async def _without_a_rendezvous(world: aiodist.Group) -> None:
    group = await made(world.new_group([1, 0]))
    note("ready")
    while world.rank >= 0:
        try:
            await made(world.new_group([0, 1], timeout=2))
        except RendezvousError as error:
            assert "rendezvous" in str(error), error
            break
    await assert_usable(world)
    await assert_usable(group)
    await assert_works(await made(world.new_group([world.rank])))  # needs nobody
    assert isinstance(await error_of(world.new_group([0, 1], name="x", timeout=0.5)), RendezvousError)


def test_without_the_rendezvous_no_group_is_made_and_the_others_go_on(doomed: Callable[..., RankPool]) -> None:
    with ServerThread() as own:
        pool = doomed(2, own)
        pool.start(_without_a_rendezvous)
        pool.wait_notes()
        time.sleep(0.2)
    _values(pool, (0, 1))


def _in_a_child(body: Callable[[], None]) -> int:
    """Run `body` in a forked child; 0 if it raised nothing."""
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def _fork(world: aiodist.Group) -> None:
    group = await made(world.new_group([1, 0]))
    pending = world.channel("later") if world.rank == 0 else None
    calls: list[Callable[[], Any]] = [
        lambda: group.new_group([0, 1]),
        lambda: group.channel("x"),
        lambda: world.split(0),
        lambda: pending.result(1) if pending is not None else world.channel("later"),
    ]

    def child() -> None:
        for call in calls:
            with pytest.raises(RuntimeError, match="process"):
                call()

    assert _in_a_child(child) == 0
    await world.barrier()
    channel = await (pending or world.channel("later"))
    for one in (group, channel, world):
        await assert_works(one)
    await group.aclose()


def test_a_forked_child_can_not_make_groups_and_harms_none(doomed: Callable[..., RankPool]) -> None:
    pool = doomed(2)
    pool.start(_fork)
    _values(pool, (0, 1))
