"""What was measured, and the comparisons that may be drawn from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.cases import Case

__all__ = ["VARIANTS", "Line", "Measurement", "Results", "pool_ranks"]

VARIANTS: Final = ("blocking-private", "awaited-private", "blocking-shared", "awaited-shared")
"""The ways in which aiodist is called: how the caller waits, and whose memory the arrays are in."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the plot: a library and, for aiodist, how it is called."""

    peer: str
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.peer} {self.variant}".strip()


@dataclass(slots=True)
class Measurement:
    """All rounds of one line at one case.

    Attributes:
        rounds_us: per round, the time of a call in each batch: the slowest rank's batch over its calls.
        calls_us: each stamped call, at its slowest rank.
        wrong: elements that differed from numpy's, over all ranks and rounds.
    """

    rounds_us: list[list[float]] = field(default_factory=list)
    calls_us: list[float] = field(default_factory=list)
    wrong: int = 0

    def add(self, answers: list[dict[str, Any]]) -> None:
        """Take in the answers of one round's ranks."""
        self.rounds_us.append(pool_ranks([answer["batches_us"] for answer in answers]))
        self.calls_us += pool_ranks([answer["calls_us"] for answer in answers])
        self.wrong += sum(answer["wrong"] for answer in answers)

    @property
    def time_us(self) -> float:
        """Median over the batches of all rounds."""
        return median(time for batches in self.rounds_us for time in batches)

    @property
    def p99_us(self) -> float:
        """99th percentile of single calls; the worst one where there are fewer than 100."""
        return float(np.percentile(self.calls_us, 99, method="higher"))


def pool_ranks(by_rank: list[list[float]]) -> list[float]:
    """Return, place by place, the largest of the ranks' times: a call is done when its last rank is."""
    return [max(times) for times in zip(*by_rank, strict=True)]


@dataclass(slots=True)
class Results:
    """Measurements by case and line, and what is missing.

    Attributes:
        asked: libraries that the run was asked for, aiodist among them.
        mpis: which libraries count as MPI.
        measured: what ran.
        not_run: per library that did not start, the reason.
        failed: per library and collective that started and failed, the reason.
    """

    asked: list[str]
    mpis: tuple[str, ...]
    measured: dict[Case, dict[Line, Measurement]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    failed: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, case: Case, line: Line, answers: list[dict[str, Any]]) -> None:
        """Take in one round."""
        self.measured.setdefault(case, {}).setdefault(line, Measurement()).add(answers)

    def time_us(self, case: Case, line: Line) -> float | None:
        """Return the median, or None where this line did not finish every round of the case's collective."""
        found = self.measured.get(case, {}).get(line)
        return None if found is None or self.missing(line.peer, case.collective) else found.time_us

    def missing(self, peer: str, collective: str) -> str | None:
        """Return why there is nothing to compare with `peer` for `collective`, or None."""
        return self.not_run.get(peer) or self.failed.get((peer, collective))

    def rows(self, case: Case) -> list[tuple[Line, Measurement]]:
        """Return the lines that finished the case, aiodist first, the others as asked for."""
        found = [(line, one) for line, one in self.measured.get(case, {}).items() if not self.missing(line.peer, case.collective)]
        return sorted(found, key=lambda row: (self.asked.index(row[0].peer), VARIANTS.index(row[0].variant) if row[0].variant else 0))

    def fastest_mpi(self, case: Case) -> tuple[str, float] | None:
        """Return the fastest MPI and its time; None unless every MPI that was asked for ran."""
        times = {peer: self.time_us(case, Line(peer)) for peer in self.asked if peer in self.mpis}
        known = {peer: time for peer, time in times.items() if time is not None}
        if not known or len(known) < len(times):
            return None
        best = min(known, key=lambda peer: known[peer])
        return best, known[best]

    def ratio_to_mpi(self, case: Case, line: Line) -> float | None:
        """Return this line's time over the fastest MPI's, or None where that may not be said."""
        best, own = self.fastest_mpi(case), self.time_us(case, line)
        return None if best is None or own is None else own / best[1]

    def ratio_to(self, case: Case, line: Line, other: Line) -> float | None:
        """Return this line's time over `other`'s, or None where one of them did not run."""
        own, base = self.time_us(case, line), self.time_us(case, other)
        return None if own is None or base is None else own / base
