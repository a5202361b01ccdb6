"""A process and its worlds: one that is not open yet, and several, one after another."""

from __future__ import annotations

import asyncio
import contextlib
import os

import numpy as np
import pytest
from support.oracle import assert_same
from support.ranks import Pools, RankPool, ServerThread, new_job

import aiodist
import aiodist.sync
from aiodist import NotInitializedError, TransportError, _core
from aiodist.backends import attach

pytestmark = pytest.mark.timeout(60)


async def test_a_world_that_forms_can_not_be_used(server: ServerThread) -> None:
    """Until all ranks have come; it keeps others from being opened, and is gone when nobody waits for it any more."""
    opening = aiodist.init(rendezvous=server.address, token=server.token, job=new_job(), rank=0, world_size=2)
    task = asyncio.ensure_future(opening.__aenter__())
    await asyncio.sleep(0)
    with pytest.raises(NotInitializedError, match="not done"):
        aiodist.ops.all_reduce(np.ones(1))
    with pytest.raises(NotInitializedError):
        aiodist.sync.functional.all_reduce_sum(np.ones(1))
    with pytest.raises(RuntimeError, match="open in this process"):
        aiodist.init()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(NotInitializedError, match=r"call aiodist\.init"):
        aiodist.ops.all_reduce(np.ones(1))
    async with aiodist.init() as world:
        assert_same(await aiodist.ops.all_reduce(np.ones(1)), np.ones(world.size))


async def _channel_ids(_: None, services: list[tuple[str, str]], job: str) -> list[tuple[int, int]]:
    """Open the first world of a job at one service after another; return by what the peers know its memory and that of a group in it."""
    reserve, ids = _core.reserve, []

    def spy(tuning: _core.Tuning, id: int, rank: int, size: int) -> int:
        ids.append(id)
        return reserve(tuning, id, rank, size)

    _core.reserve = spy
    try:
        for address, token in services:
            opening = aiodist.init(rendezvous=address, token=token, job=job, rank=int(os.environ["AIODIST_RANK"]), world_size=2)
            async with opening as world:
                group = await world.new_group([1, 0])
                assert group is not None
                assert_same(await group.all_reduce(np.ones(1)), np.full(1, 2.0))
    finally:
        _core.reserve = reserve
    return list(zip(ids[::2], ids[1::2], strict=True))


@pytest.mark.parametrize(("variable", "value"), [("AIODIST_DEVICE", "cuda:0"), ("AIODIST_BACKEND", "nccl")])
def test_a_device_or_backend_that_is_not_built_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    """Where a variable asks for it, too; an argument wins."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=rf"{value}.* {variable}\) is not built yet"):
        aiodist.init()
    aiodist.init(device="cpu", backend="shm")
    with pytest.raises(ValueError, match="'cuda:1'"):
        aiodist.init(device="cuda:1")


async def _give_up_late(_: None, address: str, token: str, job: str) -> list[int]:
    """Rank 1 fails once rank 0 knows where its memory is; return what each reserved for this world and the next."""
    rank, reserve, attach_to_hub, offsets = int(os.environ["AIODIST_RANK"]), _core.reserve, attach.attach_to_hub, []

    def spy(tuning: _core.Tuning, id: int, rank: int, size: int) -> int:
        offsets.append(reserve(tuning, id, rank, size))
        return offsets[-1]

    def fail(name: str, secret: attach.Secret, rank: int, size: int, offset: int, deadline: float) -> attach.Attachment:
        attach_to_hub(name, secret, rank, size, offset, deadline)
        raise TransportError("there are no descriptors left")

    _core.reserve, attach.attach_to_hub = spy, fail
    try:
        opening = aiodist.init(rendezvous=address, token=token, job=job, rank=rank, world_size=2)
        with pytest.raises(TransportError, match="no descriptors") if rank else contextlib.nullcontext():
            async with opening:
                pass
        async with aiodist.local_world(2):
            pass
    finally:
        _core.reserve, attach.attach_to_hub = reserve, attach_to_hub
    return offsets


def test_memory_that_peers_know_of_is_not_used_again(pools: Pools, server: ServerThread) -> None:
    """By a rank whose world has formed for the others but not for itself: they read there."""
    pool = pools.get(2)
    pool.start(_give_up_late, server.address, server.token, new_job(), world=False)
    offsets = [outcome.answer.value for outcome in pool.finish() if outcome.answer is not None][1]
    assert len(offsets) == len(set(offsets)) == 3


def test_worlds_of_one_name_are_told_apart(pools: Pools, server: ServerThread) -> None:
    """A service that was started again without its state counts from 1 again, as another service does."""
    with ServerThread() as other:
        pool: RankPool = pools.get(2)
        pool.start(_channel_ids, [(one.address, one.token) for one in (server, other)], new_job(), world=False)
        first, second = (outcome.answer.value for outcome in pool.finish() if outcome.answer is not None)
    assert first == second
    assert len({number for ids in first for number in ids}) == 4
