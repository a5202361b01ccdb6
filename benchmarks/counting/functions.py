"""Counts the functions that run per call: those of the library in Python and what they call, and all of them where a task is suspended."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import aiodist
from benchmarks.counting.calls import Counted, round_of

__all__ = ["count_alone", "count_suspended"]

_LIBRARY = str(Path(aiodist.__file__).parent)


async def count_alone(counted: Counted) -> dict[str, float]:
    """Return by name how often each Python function of the library, and each C function called by one, runs per awaited call of one rank.

    The peers have made their calls by then, so nothing waits.
    """
    async with aiodist.local_world(counted.ranks) as groups:
        start = round_of(groups, counted)
        for future in start() + start():
            await future
        seen: Counter[str] = Counter()
        sys.setprofile(_count(seen, _LIBRARY))
        try:
            for _ in range(counted.rounds):
                for future in start():
                    await future
        finally:
            sys.setprofile(None)
    return {name: times / (counted.rounds * counted.ranks) for name, times in seen.items()}


async def count_suspended(counted: Counted) -> float:
    """Return how many functions, asyncio's too, run per call of one rank, where each rank is a task that waits for the others' tasks."""
    async with aiodist.local_world(counted.ranks) as groups:
        seen: Counter[str] = Counter()

        async def rank(group: aiodist.Group, rounds: int) -> None:
            start = round_of([group], counted)
            for _ in range(rounds):
                for future in start():
                    await future

        async def functions(rounds: int) -> int:
            seen.clear()
            sys.setprofile(_count(seen, ""))
            try:
                await asyncio.gather(*(rank(group, rounds) for group in groups))
            finally:
                sys.setprofile(None)
            return seen.total()

        await functions(5)
        shorter = await functions(counted.rounds)
        return (await functions(2 * counted.rounds) - shorter) / (counted.rounds * counted.ranks)


def _count(seen: Counter[str], folder: str) -> Callable[[FrameType, str, object], None]:
    def note(frame: FrameType, event: str, called: object) -> None:
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(folder):
            seen[frame.f_code.co_name if event == "call" else getattr(called, "__name__", str(called))] += 1

    return note
