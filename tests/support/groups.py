"""Small helpers of the tests about groups and channels."""

from __future__ import annotations

import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Final

import numpy as np

import aiodist
from support.oracle import assert_same

MIB: Final = 1 << 20
_kept: list[aiodist.Group] = []


async def made(pending: Awaitable[aiodist.Group | None]) -> aiodist.Group:
    """Await a group that this rank is a member of, and keep it until it is closed, at the latest with its world."""
    group = await pending
    assert group is not None, "the group was not made for this rank"
    _kept[:] = [*(one for one in _kept if not one.closed), group]
    return group


async def assert_works(group: aiodist.Group, count: int = 3) -> None:
    """Fail unless the members are who they should be, in their order: every element of every rank differs."""
    mine = np.arange(count, dtype=np.int64) + 1000 * group.ranks[group.rank]
    due = np.concatenate([np.arange(count, dtype=np.int64) + 1000 * rank for rank in group.ranks])
    assert_same(await group.all_gather(mine), due)


def held() -> tuple[int, int, list[str]]:
    """Count what this process holds: descriptors, threads, and the names in /dev/shm that are ours."""
    shm = sorted(name for name in os.listdir("/dev/shm") if "aiodist" in name)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), shm


def resident_kib() -> int:
    """Return the memory that this process has in use, shared memory included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS:")))
