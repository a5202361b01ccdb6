"""The table of ``aiodist bench``."""

from __future__ import annotations

from statistics import median
from typing import Final

from rich.table import Table

from aiodist.bench.plan import COLLECTIVES, WAYS, Case, Found, Plan

__all__ = ["quick_plan", "table"]

_SIZES: Final = (8, 64 << 10, 1 << 20, 16 << 20)


def quick_plan(rounds: int) -> Plan:
    """Return what is measured where nothing is tuned: some sizes, both ways to wait, private and shared arrays."""
    cases = [Case(name, nbytes, way, shared) for name in COLLECTIVES for nbytes in _SIZES for shared in (False, True) for way in WAYS]
    return Plan(cases, rounds=rounds)


def table(found: list[Found], ranks: int) -> Table:
    """Return a row for each collective and size: times by way and array, and the rate of the fastest."""
    shown = Table(title=f"{ranks} ranks, float32, median time of a call in µs", box=None, pad_edge=False)
    for head in ("collective", "bytes", *(f"{way}\n{kind}" for kind in ("private", "shared") for way in WAYS), "best\nGB/s", "wrong"):
        shown.add_column(head, justify="left" if head == "collective" else "right")
    times = {one.case: median(one.rounds_us) for one in found}
    for name, nbytes in dict.fromkeys((case.collective, case.nbytes) for case in times):
        own = [times[Case(name, nbytes, way, shared)] for shared in (False, True) for way in WAYS]
        wrong = sum(one.wrong for one in found if (one.case.collective, one.case.nbytes) == (name, nbytes))
        shown.add_row(name, str(nbytes), *(f"{time:.1f}" for time in own), f"{nbytes / min(own) / 1e3:.2f}", str(wrong))
    return shown
