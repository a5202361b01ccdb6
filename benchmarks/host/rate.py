"""Small calls per second with many outstanding."""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser, Namespace
from collections import deque
from statistics import median
from typing import Any

import numpy as np

import aiodist
from benchmarks.findings import Finding
from benchmarks.host.base import Row, check, run_on_ranks

__all__ = ["ROW", "rank"]


async def _rank(outstanding: int, calls: int, rounds: int) -> list[float]:
    """In each round the window fills, stays full, and empties; results are checked when the clock has stopped."""
    async with aiodist.init() as world:
        given = [np.full(1, float(world.rank + number)) for number in range(outstanding)]
        due = np.array([sum(peer + number % outstanding for peer in range(world.size)) for number in range(calls)], float)
        rates = []
        for _ in range(rounds):
            await world.barrier()
            results: list[Any] = []
            began = time.perf_counter()
            window = deque(world.all_reduce(x) for x in given)
            for number in range(outstanding, calls):
                results.append(await window.popleft())
                window.append(world.all_reduce(given[number % outstanding]))
            for future in window:
                results.append(await future)
            rates.append(calls / (time.perf_counter() - began))
            check(np.array_equal(np.concatenate(results), due), "a sum")
        return rates


def rank(options: dict[str, Any]) -> list[float]:
    """Return the calls a second of each round."""
    return asyncio.run(_rank(**{name: options[name] for name in ("outstanding", "calls", "rounds")}))


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--outstanding", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=20_000, help="calls a round, the filling and emptying of the window included")
    parser.add_argument("--rounds", type=int, default=15)


def _measure(args: Namespace) -> list[Finding]:
    options = {"outstanding": args.outstanding, "calls": args.calls, "rounds": args.rounds}
    answers = run_on_ranks(__name__, args.ranks, options, timeout=120)
    rates = [min(of_round) for of_round in zip(*answers, strict=True)]
    what = f"awaited all_reduce of 8 B, {args.outstanding} outstanding, {args.ranks} ranks"
    return [Finding(what, median(rates), "calls/s a rank", 300_000, 600_000, least=True)]


ROW = Row("small calls per second with 1,000 outstanding", _add_arguments, _measure)
