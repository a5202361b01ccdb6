"""The program of a rank of ``aiodist bench``: worlds one after the other, in each the calls of the plan, each result checked."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

import aiodist
from aiodist.bench.plan import Case, Found, Plan

__all__ = ["main"]

_Array = npt.NDArray[Any]
_LEAD_IN = 2
_MOST_CALLS = 2_000


class _Calls:
    """One case on one rank: its arrays, its call, and what must come out."""

    def __init__(self, group: aiodist.Group, case: Case) -> None:
        count = max(case.nbytes // 4, group.size) // group.size * group.size
        self._group, self._case = group, case
        self.x = self._array(count)
        gathers = case.collective == "all_gather"
        self.out = self._array(count * group.size if gathers else count // group.size if case.collective == "reduce_scatter" else count)
        self.x[:] = self._contribution(group.rank, count)
        self.start = self._start()

    def _array(self, count: int) -> _Array:
        return self._group.empty(count, np.float32) if self._case.shared else np.empty(count, np.float32)

    def _start(self) -> Callable[[], aiodist.TensorFuture[Any]]:
        group = self._group
        if self._case.collective == "broadcast":
            return partial(group.broadcast, self.x if group.rank == 0 else None, 0, out=self.out)
        return partial(getattr(group, self._case.collective), self.x, out=self.out)

    def wrong(self) -> int:
        """Return how many elements of the last result are wrong, and make them so for the next."""
        wrong = int(np.count_nonzero(self.out != self._expected()))
        self.out.fill(-1)
        return wrong

    def _contribution(self, rank: int, count: int) -> _Array:
        # Whole numbers below a prime: sums are exact, and its period divides no piece's size, so a piece in the wrong place shows.
        return (np.arange(count) * (2 * rank + 3) % 8191).astype(np.float32)

    def _expected(self) -> _Array:
        size, rank, count = self._group.size, self._group.rank, self.x.size
        share = slice(rank * count // size, (rank + 1) * count // size)
        given = [self._contribution(peer, count) for peer in range(size)]
        match self._case.collective:
            case "broadcast":
                return given[0]
            case "all_gather":
                return np.concatenate(given)
            case "all_to_all":
                return np.concatenate([one[share] for one in given])
        total: _Array = np.add.reduce(given, axis=0, dtype=np.float32)
        return total[share] if self._case.collective == "reduce_scatter" else total

    async def timed(self, calls: int) -> float:
        """Make calls one after the other and return the seconds of one."""
        start, clock = self.start, time.perf_counter
        began = clock()
        if self._case.way == "awaited":
            for _ in range(calls):
                await start()
        else:
            for _ in range(calls):
                start().result()
        return (clock() - began) / calls


async def _slowest(group: aiodist.Group, seconds: float) -> float:
    return float((await group.all_reduce(np.array([seconds]), op="max"))[0])


async def _measure(group: aiodist.Group, case: Case, batch_ms: float) -> tuple[float, int]:
    """Return the time of a call in µs, at the slowest rank, and how many elements were wrong."""
    calls = _Calls(group, case)
    await calls.timed(1)
    wrong = calls.wrong()
    once = await _slowest(group, await calls.timed(_LEAD_IN))
    number = max(2, min(_MOST_CALLS, int(batch_ms / 1e3 / max(once, 1e-7))))
    await calls.timed(_LEAD_IN)  # undoes the skew, and what sharing the time has put into the caches
    seconds = await _slowest(group, await calls.timed(number))
    return seconds * 1e6, wrong + calls.wrong()


async def _run(plan: Plan) -> list[Found]:
    """Measure everything; each profile of each round has a world of its own."""
    profiles = plan.profiles or [os.environ.get("AIODIST_TUNING", "")]
    found = [Found(case, profile, [], 0) for profile in range(len(profiles)) for case in plan.cases]
    for round_ in range(plan.rounds):
        for turn in range(len(profiles)):
            profile = (turn + round_) % len(profiles)
            os.environ["AIODIST_TUNING"] = profiles[profile]
            async with aiodist.init() as group:
                for at, case in enumerate(plan.cases, profile * len(plan.cases)):
                    time_us, wrong = await _measure(group, case, plan.batch_ms)
                    wrong = int((await group.all_reduce(np.array([wrong])))[0])
                    found[at] = msgspec.structs.replace(found[at], rounds_us=[*found[at].rounds_us, time_us], wrong=found[at].wrong + wrong)
    return found


def main() -> None:
    """Measure as the plan at the first argument says; rank 0 writes what was found to the second."""
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan)
    found = asyncio.run(_run(plan))
    if os.environ.get("AIODIST_RANK", "0") == "0":
        Path(sys.argv[2]).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
