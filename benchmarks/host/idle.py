"""What ranks that wait for one another's call use of the cores, with more ranks than cores."""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser, Namespace
from typing import Any

import numpy as np

import aiodist
from benchmarks.findings import Finding
from benchmarks.host.base import Row, check, run_on_ranks

__all__ = ["ROW", "rank"]


async def _rank(seconds: float) -> dict[str, float]:
    """The last rank sleeps; what it uses itself is that of a process in which nothing waits."""
    shares = {}
    async with aiodist.init() as world:
        for wait in ("result", "await"):
            await world.barrier()
            used, began = time.process_time(), time.perf_counter()
            if world.rank == world.size - 1:
                await asyncio.sleep(seconds)
            future = world.all_reduce(np.ones(1))
            if wait == "await":
                total = await future
            else:
                total = future.result()
            shares[wait] = (time.process_time() - used) / (time.perf_counter() - began)
            check(int(total[0]) == world.size, "a sum")
    return shares


def rank(options: dict[str, Any]) -> dict[str, float]:
    """Return the part of a core that this process used, by how it waited."""
    return asyncio.run(_rank(options["seconds"]))


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--ranks", type=lambda text: [int(number) for number in text.split(",")], default=[4, 8], help="such as 4,8")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long they wait")


def _measure(args: Namespace) -> list[Finding]:
    findings = []
    for ranks in args.ranks:
        answers = run_on_ranks(__name__, ranks, {"seconds": args.seconds}, timeout=120 + 4 * args.seconds)
        for wait in ("result", "await"):
            most = max(answer[wait] for answer in answers[:-1])
            findings.append(Finding(f"busiest of {ranks - 1} idle waiters in {wait}", most * 100, "% of a core", 2.0))
    return findings


ROW = Row("4 and 8 ranks on 2 cores: idle waiters' use of the cores", _add_arguments, _measure)
