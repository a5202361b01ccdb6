"""From the SIGKILL of a rank to PeerLostError on every other one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Final

import numpy as np

import aiodist
from benchmarks.findings import Finding
from benchmarks.host.base import Row, check, percentile, run_on_ranks

__all__ = ["ROW", "rank"]

_BEFORE: Final = 0.3
"""Seconds that the others wait already when it happens: long enough for all of them to sleep."""


def _die(answer: Path) -> None:
    answer.write_text(json.dumps(time.monotonic_ns()))
    os.kill(os.getpid(), signal.SIGKILL)


async def _rank(resident: int, wait: str, folder: str) -> int:
    world = await aiodist.init()
    victim = world.size - 1
    held = np.ones(resident if world.rank == victim else 0, np.uint8)  # touches every page
    await world.barrier()
    if world.rank == victim:
        await asyncio.sleep(_BEFORE)
        _die(Path(folder, f"answer.{victim}"))
    check(held.size == 0, "the ranks")
    try:
        future = world.all_reduce(np.zeros(1))
        if wait == "await":
            await future
        else:
            future.result()
    except aiodist.PeerLostError as error:
        heard = time.monotonic_ns()
        check(tuple(error.ranks) == (victim,), f"the error names {error.ranks}")
        await world.aclose()
        return heard
    raise AssertionError("the call did not fail")


def rank(options: dict[str, Any]) -> int:
    """Return when, in ns of CLOCK_MONOTONIC, this rank heard of it; the victim writes when it happened."""
    return asyncio.run(_rank(options["resident"], options["wait"], options["folder"]))


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--resident-gib", type=float, default=0.0, help="memory of the rank that is killed")
    parser.add_argument("--repeats", type=int, default=5)


def _measure(args: Namespace) -> list[Finding]:
    findings = []
    for wait in ("await", "result"):
        taken: list[float] = []
        for _ in range(args.repeats):
            options = {"resident": int(args.resident_gib * 2**30), "wait": wait}
            *survivors, killed = run_on_ranks(__name__, args.ranks, options, timeout=120, dies=args.ranks - 1)
            taken.append(max(heard - killed for heard in survivors) / 1e6)
        what = f"SIGKILL of a rank with {args.resident_gib:g} GiB to PeerLostError on the last of the others, {args.ranks} ranks, {wait}"
        findings += [
            Finding(f"{what}, worst of {args.repeats}", max(taken), "ms", 1000, 50),
            Finding(f"{what}, p50", percentile(taken, 50), "ms"),
        ]
    return findings


ROW = Row("a process killed with SIGKILL: until every survivor raises PeerLostError", _add_arguments, _measure)
