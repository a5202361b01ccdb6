"""Finding the tuning that suits a machine: one field after another, each candidate against the best so far, in turns."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

from aiodist.bench import measure
from aiodist.bench.plan import Case, Found, Plan
from aiodist.profile import Profile, Row, write_profile

__all__ = ["MARGIN", "Step", "choose", "steps", "tune"]

MARGIN: Final = 0.04
"""What a candidate must gain over what it would replace, as a part of the time: less is noise."""

_KIB, _MIB = 1 << 10, 1 << 20
_LARGE: Final = [
    Case("all_reduce", 64 * _KIB),
    Case("all_reduce", _MIB),
    Case("all_reduce", 16 * _MIB),
    Case("broadcast", _MIB),
    Case("all_gather", _MIB),
]
_SMALL: Final = [Case("all_reduce", nbytes) for nbytes in (8, 4 * _KIB, 12 * _KIB, 24 * _KIB, 48 * _KIB)]


@dataclass(frozen=True, slots=True)
class Step:
    """One field to choose.

    Attributes:
        field: Name of the field of `Row`.
        candidates: Gives the rows to compare with the best one so far.
        cases: What they are compared by.
    """

    field: str
    candidates: Callable[[Row], list[Row]]
    cases: list[Case]


def steps() -> list[Step]:
    """Return the steps in their order."""
    return [
        Step("segment_nbytes", _segments, _LARGE),
        Step("depth", _depths, _LARGE),
        Step("slot_nbytes", _slots, _SMALL),
    ]


def _segments(best: Row) -> list[Row]:
    """Other segments, as much staging."""
    staged = best.segment_nbytes * best.depth
    sizes = [best.segment_nbytes * times // 4 for times in (1, 2, 8, 16)]
    return _valid(best, [{"segment_nbytes": size, "depth": max(2, staged // size)} for size in sizes if size])


def _depths(best: Row) -> list[Row]:
    """Less and more staging, of the same segments."""
    return _valid(best, [{"depth": best.depth * times // 4} for times in (1, 2, 8)])


def _slots(best: Row) -> list[Row]:
    """Calls that become large ones earlier or later."""
    return _valid(best, [{"slot_nbytes": best.slot_nbytes * times // 4} for times in (1, 2, 8, 16)])


def _valid(best: Row, changes: list[dict[str, int]]) -> list[Row]:
    rows = []
    for change in changes:
        fields: dict[str, Any] = msgspec.structs.asdict(best) | change
        try:
            row = msgspec.convert(fields, Row)
        except msgspec.ValidationError:
            continue  # beyond what a profile may say
        if row != best and row not in rows:
            rows.append(row)
    return rows


def choose(rows: Sequence[Row], found: Sequence[Found]) -> tuple[Row, list[float]]:
    """Return the row to take, the first one unless another gains `MARGIN`, and how each one's times compare with the first's.

    A ratio is the geometric mean, over the cases, of the median ratio of times in one round: of what ran close together.

    Raises:
        ValueError: a result was wrong.
    """
    wrong = [one for one in found if one.wrong]
    if wrong:
        raise ValueError(f"{wrong[0].wrong} elements of {wrong[0].case.collective} were wrong with {rows[wrong[0].profile]}")
    times = {(one.profile, one.case): one.rounds_us for one in found}
    ratios = []
    for profile in range(len(rows)):
        logs = [
            math.log(median(own / first for own, first in zip(times[profile, case], times[0, case], strict=True)))
            for (at, case) in times
            if at == profile
        ]
        ratios.append(math.exp(sum(logs) / len(logs)))
    best = min(range(len(rows)), key=ratios.__getitem__)
    return rows[best] if ratios[best] <= 1 - MARGIN else rows[0], ratios


def tune(ranks: int, rounds: int, tell: Callable[[str], None]) -> Row:
    """Measure this machine and return the row for `ranks` ranks; the default one where nothing is clearly better.

    Args:
        ranks: Number of ranks.
        rounds: How often each candidate is measured in each step.
        tell: Called with a line of text for each candidate.

    Raises:
        aiodist.bench.Failed: a rank failed.
        ValueError: a result was wrong.
    """
    best = Row.default(ranks)
    for step in steps():
        rows = [best, *step.candidates(best)]
        with tempfile.TemporaryDirectory(prefix="aiodist-tune-") as folder:
            paths = [Path(folder, f"{number}.json") for number in range(len(rows))]
            for path, row in zip(paths, rows, strict=True):
                write_profile(path, Profile(1, [row]))
            found = measure(Plan(step.cases, [str(path) for path in paths], rounds), ranks)
        best, ratios = choose(rows, found)
        for row, ratio in zip(rows, ratios, strict=True):
            chosen = "  <- taken" if row == best else ""
            tell(f"{ranks} ranks, {step.field} {getattr(row, step.field)}: {ratio:.3f} of the time{chosen}")
    return best
