"""An await whose peer is late: from the peer's call to the task running again."""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser, Namespace
from typing import Any

import numpy as np

import aiodist
from benchmarks.findings import Finding
from benchmarks.host.base import Row, check, percentile, run_on_ranks

__all__ = ["ROW", "rank"]


async def _rank(calls: int, delay: float) -> list[float]:
    """The last rank comes late, and its contribution is when it came: CLOCK_MONOTONIC is the same clock in all processes."""
    async with aiodist.init() as world:
        taken = []
        late = world.rank == world.size - 1
        for number in range(calls):
            if late:
                await asyncio.sleep(delay)
                await world.all_reduce(np.array([time.monotonic_ns(), number]))
                continue
            came, said = await world.all_reduce(np.zeros(2, np.int64))
            taken.append((time.monotonic_ns() - int(came)) / 1e3)
            check(int(said) == number and 0 < taken[-1] < 1e9, f"call {number} gave {said}, {taken[-1]} µs after it was made")
        return taken


def rank(options: dict[str, Any]) -> list[float]:
    """Return, in µs, how long each wait went on once the last rank had come."""
    if options["uvloop"]:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_rank(options["calls"], options["delay"]))
    return asyncio.run(_rank(options["calls"], options["delay"]))


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--delay-ms", type=float, default=3.0, help="how late the last rank is")
    parser.add_argument("--uvloop", action="store_true", help="measure on uvloop, not on asyncio's own loop")


def _measure(args: Namespace) -> list[Finding]:
    options = {"calls": args.calls, "delay": args.delay_ms / 1e3, "uvloop": args.uvloop}
    answers = run_on_ranks(__name__, args.ranks, options, timeout=60 + args.calls * args.delay_ms / 100)
    taken = [time for answer in answers[:-1] for time in answer]
    what = f"await of a peer {args.delay_ms:g} ms late, {args.ranks} ranks, {'uvloop' if args.uvloop else 'asyncio'}"
    return [Finding(f"{what}, p50", percentile(taken, 50), "µs", 60, 40), Finding(f"{what}, p99", percentile(taken, 99), "µs")]


ROW = Row("an await whose peer is late: from its arrival to our task running", _add_arguments, _measure)
