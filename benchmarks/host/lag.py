"""How late the event loop is while much is broadcast, against a control with as many busy threads."""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Awaitable
from typing import Any, Final

import numpy as np

import aiodist
from benchmarks.findings import Finding
from benchmarks.host.base import Row, check, percentile, run_on_ranks

__all__ = ["ROW", "rank"]

_TICK: Final = 0.001


async def _ticks(lags: list[float]) -> None:
    """Note, in ms, how much later than asked for each tick came."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(_TICK)
        lags.append((time.perf_counter() - began - _TICK) * 1e3)


async def _during(work: Awaitable[Any], lags: list[float]) -> None:
    ticker = asyncio.create_task(_ticks(lags))
    try:
        await work
    finally:
        ticker.cancel()


async def _rank(nbytes: int, rounds: int) -> dict[str, list[float]]:
    """In turns: the broadcast, in which a thread of each process copies, and one thread in each process that copies as much."""
    async with aiodist.init() as world:
        first, second = np.ones(nbytes // 8), np.ones(nbytes // 8)
        lags: dict[str, list[float]] = {"idle": [], "broadcast": [], "control": []}
        await _during(asyncio.sleep(0.5), lags["idle"])
        for number in range(rounds):
            first[:] = number if world.rank == 0 else -1
            await world.barrier()
            await _during(world.broadcast(first if world.rank == 0 else None, out=first), lags["broadcast"])
            check(bool((first == number).all()), f"round {number} of the broadcast")
            await world.barrier()
            # numpy lets go of the GIL while it copies
            await _during(asyncio.to_thread(np.copyto, second, first), lags["control"])
        return lags


def rank(options: dict[str, Any]) -> dict[str, list[float]]:
    """Return the lags in ms, by what went on."""
    return asyncio.run(_rank(options["nbytes"], options["rounds"]))


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gib", type=float, default=1.0, help="size of what is broadcast; each rank takes twice as much memory")
    parser.add_argument("--rounds", type=int, default=8)


def _measure(args: Namespace) -> list[Finding]:
    options = {"nbytes": int(args.gib * 2**30) // 8 * 8, "rounds": args.rounds}
    answers = run_on_ranks(__name__, args.ranks, options, timeout=600)
    lags = {name: [lag for answer in answers for lag in answer[name]] for name in answers[0]}
    findings = []
    for name, found in lags.items():
        findings += [Finding(f"{name}: p99", percentile(found, 99), "ms"), Finding(f"{name}: worst", max(found), "ms")]
    what = f"loop lag while {args.gib:g} GiB is broadcast over control"
    p99 = percentile(lags["broadcast"], 99) / percentile(lags["control"], 99)
    worst = max(lags["broadcast"]) / max(lags["control"])
    return [*findings, Finding(f"{what}, p99", p99, "", 1.5, 1.0), Finding(f"{what}, worst", worst, "", 3.0, 1.0)]


ROW = Row("loop lag while 1 GiB is broadcast, against a control with as many busy threads", _add_arguments, _measure)
