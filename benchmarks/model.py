"""What calls should cost at rank counts for which this machine has no cores: from counted instructions, counted flags and moved bytes.

A small call of P ranks takes α(P) = α(2) · I(P) / I(2) where each rank has a core: I is the core's counted instructions, and α(2) is
measured. It leaves out that a cache line read by more ranks takes longer to come. A large call of n bytes takes β(P) · n, where β is the
bytes that a rank reads and writes for each byte, times P ranks at once, over the rate at which all cores together copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["LARGE", "Traffic", "model_table"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a rank reads and writes for each byte of its array, of private arrays, by the number of ranks.

    Attributes:
        reads: Of all ranks together, over the number of ranks.
        writes: The same.
    """

    reads: Callable[[int], float]
    writes: Callable[[int], float]


# Staged, folded and copied: see the algorithms in docs/performance.md. n is the size as nccl-tests counts it.
LARGE: Final = {
    "all_reduce": Traffic(lambda p: (3 * p - 2) / p, lambda p: 2.0),
    "reduce_scatter": Traffic(lambda p: (2 * p - 1) / p, lambda p: 1.0),
    "all_gather": Traffic(lambda p: (p + 1) / p, lambda p: (p + 1) / p),
    "broadcast": Traffic(lambda p: 1.0, lambda p: 1.0),
    "all_to_all": Traffic(lambda p: (2 * p - 1) / p, lambda p: (2 * p - 1) / p),
}


def model_table(counts: list[dict[str, Any]], times: list[dict[str, Any]], ranks: tuple[int, ...]) -> list[list[str]]:
    """Return a row for each collective: α and β at each number of ranks; a dash where something was not measured.

    Args:
        counts: Rows of `benchmarks.counting.instructions`.
        times: Rows of `benchmarks.collectives` at 2 ranks, the copy limit among them.
        ranks: Numbers of ranks.
    """
    core = {
        (row["collective"], row["ranks"]): row["instructions"]["core"] for row in counts if row["bytes"] == 8 and row["wait"] == "await"
    }
    small = {row["collective"]: row["time_us"] for row in times if row["variant"] == "blocking-private" and row["bytes"] == 8}
    copies = [row["algbw_gb_s"] for row in times if row["peer"] == "copy" and row["collective"] == "all_reduce"]
    rate = copies[-1] * 2 if copies else None  # of both ranks; the largest size, which no cache holds
    rows = []
    for collective, traffic in LARGE.items():
        alphas = [_alpha(core, small, collective, size) for size in ranks]
        # A copied byte is one read and one written.
        betas = [None if rate is None else (traffic.reads(size) + traffic.writes(size)) / 2 * size / rate for size in ranks]
        rows.append([collective, *(_text(alpha, "µs") for alpha in alphas), *(_text(beta, "ms/MB", 1.0) for beta in betas)])
    return rows


def _alpha(core: dict[tuple[str, int], float], small: dict[str, float], collective: str, size: int) -> float | None:
    known = (collective, 2) in core and (collective, size) in core and collective in small
    return small[collective] * core[collective, size] / core[collective, 2] if known else None


def _text(value: float | None, unit: str, factor: float = 1.0) -> str:
    return "–" if value is None else f"{value * factor:.3g} {unit}"
