"""How long it takes to form a world, and a group of all its ranks."""

from __future__ import annotations

import asyncio
import os
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

import aiodist
from benchmarks.findings import Finding
from benchmarks.host.base import Failed, Row, check, run_on_ranks

__all__ = ["ROW", "rank"]

_DEADLINE: Final = 300.0
# Ranks, then due and stretch in seconds for init, in ms for new_group.
_TARGETS: Final = {2: (0.3, 0.15, 20.0, 10.0), 8: (1.0, 0.5, 50.0, 25.0), 128: (15.0, 7.5, 500.0, 250.0)}

Span = tuple[int, int]


def _meet(folder: str, number: int, ranks: int) -> None:
    """Wait until every rank's process is here, without anything of the library."""
    Path(folder, f"here.{number}.{os.environ['AIODIST_RANK']}").touch()
    deadline = time.monotonic() + _DEADLINE
    while sum(1 for _ in Path(folder).glob(f"here.{number}.*")) < ranks:
        if time.monotonic() > deadline:
            raise Failed(f"not all ranks came within {_DEADLINE:g} s")
        time.sleep(0.02)


async def _groups(world: aiodist.Group, repeats: int) -> list[Span]:
    spans = []
    for _ in range(repeats):
        await world.barrier()
        began = time.monotonic_ns()
        group = await world.new_group(range(world.size))
        spans.append((began, time.monotonic_ns()))
        check(group is not None, "a member got no group")
        if group is not None:
            check(int((await group.all_reduce(np.ones(1)))[0]) == world.size, "a sum in the new group")
            await group.aclose()
    return spans


def rank(options: dict[str, Any]) -> dict[str, list[Span]]:
    """Return when each init and each new_group began and ended here. The first init also loads modules."""
    ranks = int(os.environ["AIODIST_WORLD_SIZE"])
    spans: dict[str, list[Span]] = {"init": [], "new_group": []}

    async def form() -> None:
        began = time.monotonic_ns()
        async with aiodist.init() as world:
            spans["init"].append((began, time.monotonic_ns()))
            spans["new_group"] += await _groups(world, options["groups"])

    for number in range(options["worlds"]):
        _meet(options["folder"], number, ranks)
        asyncio.run(form())
    return spans


def _last_to_last(answers: list[dict[str, list[Span]]], kind: str) -> list[float]:
    """Return, in seconds, the time from the last rank's call to the last rank's return."""
    of_each = zip(*(answer[kind] for answer in answers), strict=True)
    return [(max(ended for _, ended in spans) - max(began for began, _ in spans)) / 1e9 for spans in of_each]


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--ranks", type=lambda text: [int(number) for number in text.split(",")], default=[2, 8], help="such as 2,8,128")
    parser.add_argument("--worlds", type=int, default=5, help="worlds one after the other; the first one's ranks load modules too")
    parser.add_argument("--groups", type=int, default=5, help="groups in each world")


def _measure(args: Namespace) -> list[Finding]:
    findings = []
    for ranks in args.ranks:
        answers = run_on_ranks(__name__, ranks, {"worlds": args.worlds, "groups": args.groups}, timeout=_DEADLINE + 60)
        first, *others = _last_to_last(answers, "init")
        groups = _last_to_last(answers, "new_group")
        init_due, init_stretch, group_due, group_stretch = _TARGETS.get(ranks, (None, None, None, None))
        findings.append(Finding(f"init, {ranks} ranks, the first in its processes", first, "s", init_due, init_stretch))
        if others:
            findings.append(Finding(f"init, {ranks} ranks, later ones, p50", median(others), "s"))
        findings.append(Finding(f"new_group of {ranks} ranks, p50", median(groups) * 1e3, "ms", group_due, group_stretch))
    return findings


ROW = Row("init and new_group at 2, 8 and 128 ranks", _add_arguments, _measure)
