"""The speed that the project promises for single calls on one host, compared with what a run measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.cases import Case
from benchmarks.findings import Finding
from benchmarks.launchers import PEERS
from benchmarks.results import Line, Results

__all__ = ["TARGETS", "Target", "judge"]

_KIB, _MIB = 1 << 10, 1 << 20
_LARGE = (64 * _KIB, _MIB, 16 * _MIB, 64 * _MIB)


@dataclass(frozen=True, slots=True)
class Target:
    """A line's time must be at most `due` times that of what it is measured against.

    Attributes:
        collective: which call.
        sizes: bytes; none for every size.
        variant: how aiodist is called.
        against: ``MPI`` for the fastest one, ``gloo``, ``copy``, or a variant of aiodist.
        due: largest ratio of times that meets the target; None for an ambition only.
        stretch: largest ratio that meets the ambition beyond it.
        ranks: sizes of the world that it is about.
    """

    collective: str
    sizes: tuple[int, ...]
    variant: str
    against: str
    due: float | None
    stretch: float
    ranks: tuple[int, ...] = (2,)


def _all() -> Iterator[Target]:
    yield Target("all_reduce", (8,), "blocking-private", "MPI", 0.7, 0.5)
    yield Target("all_reduce", (8,), "awaited-private", "MPI", 1.0, 0.8)
    for kind, faster in (("private", ((2.0, 2.5), (1.5, 2.0), (2.3, 3.0))), ("shared", ((2.5, 2.5), (2.0, 2.0), (3.0, 3.0)))):
        for sizes, (due, stretch) in zip(((64 * _KIB,), (_MIB,), (16 * _MIB, 64 * _MIB)), faster, strict=True):
            yield Target("all_reduce", sizes, f"blocking-{kind}", "MPI", 1 / due, 1 / stretch)
        yield Target("all_reduce", _LARGE, f"blocking-{kind}", "gloo", 1 / 10, 1 / 10)
        yield Target("all_reduce", _LARGE, f"awaited-{kind}", f"blocking-{kind}", 1.1, 1.05)
    yield Target("all_reduce", (64 * _MIB,), "blocking-shared", "copy", None, 1 / 0.7)
    yield Target("all_reduce", (), "blocking-private", "MPI", 1 / 3, 1 / 5, ranks=(4, 8))
    for collective in ("broadcast", "all_gather", "reduce_scatter", "all_to_all", "send_recv"):
        yield Target(collective, _LARGE, "blocking-private", "MPI", 1 / 1.5, 1 / 2)


TARGETS = tuple(_all())
"""Every target on single calls: at two ranks, and at more ranks than cores."""


def judge(results: Results) -> list[Finding]:
    """Return how each target compares with each size that the run measured; without a value where it could not be."""
    return [
        _finding(results, target, case)
        for target in TARGETS
        for case in results.measured
        if case.collective == target.collective and case.nbytes in (target.sizes or (case.nbytes,)) and case.ranks in target.ranks
    ]


def _finding(results: Results, target: Target, case: Case) -> Finding:
    line = Line("aiodist", target.variant)
    if target.against == "MPI":
        ratio = results.ratio_to_mpi(case, line)
    else:
        other = Line(target.against) if target.against in PEERS else Line("aiodist", target.against)
        ratio = results.ratio_to(case, line, other)
    what = f"{case.collective} {case.nbytes} B, {case.ranks} ranks, {target.variant} / {target.against}"
    faster = "" if ratio is None else f"({1 / ratio:.2f}x faster)"
    return Finding(what, ratio, faster, target.due, target.stretch)
