"""Finding the tuning that suits a machine: one field after another, each candidate against the best so far, in turns."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from aiodist.bench import measure
from aiodist.bench.plan import Case, Found, Plan
from aiodist.profile import FORMAT, Profile, Row, write_profile

__all__ = ["MARGIN", "MOST", "Step", "choose", "steps", "tune"]

MARGIN: Final = 0.04
"""What a candidate must gain over what it would replace, as a part of the time: less is noise."""

MOST: Final = 0.75
"""The part of the rounds in which it must be faster."""

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
    """Return the row to take, and for each one the part of the first one's time that it takes.

    A round compares what ran close together: the geometric mean over the cases of the ratios of times. The part is the median over the
    rounds. The first row is kept unless another gains `MARGIN`, and is faster in `MOST` of the rounds.

    Raises:
        ValueError: a result was wrong.
    """
    wrong = [one for one in found if one.wrong]
    if wrong:
        raise ValueError(f"{wrong[0].wrong} elements of {wrong[0].case.collective} were wrong with {rows[wrong[0].profile]}")
    logs = {(one.profile, one.case): np.log(one.rounds_us) for one in found}
    cases = dict.fromkeys(one.case for one in found)
    by_round = [np.mean([logs[profile, case] - logs[0, case] for case in cases], axis=0) for profile in range(len(rows))]
    parts = [float(np.exp(np.median(rounds))) for rounds in by_round]
    good = [at for at in range(1, len(rows)) if parts[at] <= 1 - MARGIN and np.mean(by_round[at] < 0) >= MOST]
    return rows[min(good, key=parts.__getitem__, default=0)], parts


def _compare(rows: Sequence[Row], cases: list[Case], rounds: int) -> tuple[Row, list[float]]:
    with tempfile.TemporaryDirectory(prefix="aiodist-tune-") as folder:
        paths = [Path(folder, f"{number}.json") for number in range(len(rows))]
        for path, row in zip(paths, rows, strict=True):
            write_profile(path, Profile(FORMAT, [row]))
        return choose(rows, measure(Plan(cases, [str(path) for path in paths], rounds), rows[0].ranks))


def tune(ranks: int, rounds: int, tell: Callable[[str], None]) -> Row:
    """Measure this machine and return the row for `ranks` ranks; the default one where nothing is clearly better.

    What the steps lead to is compared with the default once more, in twice as many rounds: of many candidates one may have been lucky.

    Args:
        ranks: Number of ranks.
        rounds: How often each candidate is measured in each step.
        tell: Called with a line of text for each candidate.

    Raises:
        aiodist.bench.Failed: a rank failed.
        ValueError: a result was wrong.
    """
    best = default = Row.default(ranks)
    for step in steps():
        rows = [best, *step.candidates(best)]
        best, parts = _compare(rows, step.cases, rounds)
        for row, part in zip(rows, parts, strict=True):
            tell(f"{ranks} ranks, {step.field} {getattr(row, step.field)}: {part:.3f} of the time{'  <- taken' if row == best else ''}")
    if best == default:
        return default
    cases = list(dict.fromkeys(case for step in steps() for case in step.cases))
    best, (_, part) = _compare([default, best], cases, 2 * rounds)
    end = "the default stays" if best == default else "it is taken"
    tell(f"{ranks} ranks, all of it once more: {part:.3f} of the default's time, {end}")
    return best
