"""What is counted: rounds of calls in which every rank of a local world takes part, all from one thread and so always the same.

Run under callgrind this is the program whose instructions are counted. It marks the beginning of a stretch, and the end of the last, by a
call of getsid(), where callgrind is told to write down and reset its counts.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np

import aiodist

__all__ = ["WAITS", "Counted", "round_of"]

WAITS: Final = ("await", "result")
_WARM_UP: Final = 50


@dataclass(frozen=True, slots=True)
class Counted:
    """One kind of call.

    Attributes:
        collective: Name of the method; ``send_recv`` sends around a ring and receives.
        nbytes: Size of each rank's array, or of what the root or each rank divides.
        ranks: Size of the world.
        rounds: Rounds in the shorter of the two stretches.
        wait: How the calls are waited for: ``await`` or ``result``.
    """

    collective: str = "all_reduce"
    nbytes: int = 8
    ranks: int = 2
    rounds: int = 200
    wait: str = "await"

    def __str__(self) -> str:
        return f"{self.collective} {self.nbytes} B, {self.ranks} ranks, {self.wait}"


def round_of(groups: list[aiodist.Group], counted: Counted) -> Callable[[], list[Any]]:
    """Return what starts one call on every rank and gives their futures."""
    starts = [start for group in groups for start in _starts(group, counted)]
    return lambda: [start() for start in starts]


def _starts(group: aiodist.Group, counted: Counted) -> list[Callable[[], Any]]:
    name, size, rank = counted.collective, group.size, group.rank
    if name == "barrier":
        return [group.barrier]
    x = np.ones(max(counted.nbytes // 8, 1))
    if name == "send_recv":
        return [partial(group.send, x, (rank + 1) % size), partial(group.recv, (rank - 1) % size)]
    if name in ("reduce_scatter", "all_to_all", "scatter"):
        x = np.ones((size, max(counted.nbytes // 8 // size, 1)))
    if name in ("broadcast", "scatter"):
        return [partial(getattr(group, name), x if rank == 0 else None)]
    return [partial(getattr(group, name), x)]


async def _rounds(start: Callable[[], list[Awaitable[Any]]], rounds: int) -> None:
    for _ in range(rounds):
        for future in start():
            await future


async def _blocking_rounds(start: Callable[[], list[Any]], rounds: int) -> None:
    for _ in range(rounds):
        for future in start():
            future.result()


async def _count(cases: list[Counted]) -> None:
    for counted in cases:
        async with aiodist.local_world(counted.ranks) as groups:
            start = round_of(groups, counted)
            rounds = _rounds if counted.wait == "await" else _blocking_rounds
            await rounds(start, _WARM_UP)
            gc.collect()
            for number in (counted.rounds, 2 * counted.rounds):
                os.getsid(0)
                await rounds(start, number)
            os.getsid(0)


def to_json(cases: list[Counted]) -> str:
    """Return the cases as the program takes them."""
    return json.dumps([asdict(counted) for counted in cases])


if __name__ == "__main__":
    gc.disable()
    asyncio.run(_count([Counted(**fields) for fields in json.loads(sys.argv[1])]))
