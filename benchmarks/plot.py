"""Time and bandwidth against size, a line per library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.results import Results

__all__ = ["draw"]

# aiodist in blues and greens, solid when blocking and dashed when awaited; MPIs in warm colours; gloo grey.
_STYLES: dict[str, dict[str, Any]] = {
    "aiodist blocking-private": {"color": "#1f5fbf", "linestyle": "-", "marker": "o"},
    "aiodist awaited-private": {"color": "#1f5fbf", "linestyle": "--", "marker": "o", "markerfacecolor": "white"},
    "aiodist blocking-shared": {"color": "#0a8f6a", "linestyle": "-", "marker": "s"},
    "aiodist awaited-shared": {"color": "#0a8f6a", "linestyle": "--", "marker": "s", "markerfacecolor": "white"},
    "mpich": {"color": "#d1495b", "linestyle": "-", "marker": "^"},
    "openmpi": {"color": "#e08a1e", "linestyle": "-", "marker": "v"},
    "impi": {"color": "#8e4fa8", "linestyle": "-", "marker": "D"},
    "gloo": {"color": "#777777", "linestyle": "-", "marker": "x"},
    "copy": {"color": "#222222", "linestyle": (0, (4, 3)), "label": "copy limit: P concurrent copies"},
}


def draw(results: Results, path: Path) -> None:
    """Write a PNG: a row of two panels for each collective that has sizes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    collectives = [name for name in dict.fromkeys(case.collective for case in results.measured) if name != "barrier"]
    if not collectives:
        return
    figure, axes = pyplot.subplots(len(collectives), 2, figsize=(13, 5 * len(collectives)), squeeze=False, layout="constrained")
    for (times, rates), collective in zip(axes, collectives, strict=True):
        _panels(results, collective, times, rates)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _panels(results: Results, collective: str, times: Any, rates: Any) -> None:
    cases = sorted((case for case in results.measured if case.collective == collective), key=lambda case: case.nbytes)
    lines = dict.fromkeys(line for case in cases for line, _ in results.rows(case))
    for line in lines:
        points = [(case, results.time_us(case, line)) for case in cases]
        known = [(case, time) for case, time in points if time is not None]
        if not known:
            continue
        style = {"label": str(line), "markersize": 5, "linewidth": 1.6} | _STYLES.get(str(line), {})
        sizes = [case.nbytes for case, _ in known]
        times.plot(sizes, [time for _, time in known], **style)
        rates.plot(sizes, [case.algbw(time / 1e6) for case, time in known], **style)
    for axis, label in ((times, "time of a call (µs, median)"), (rates, "bandwidth, bytes over time (GB/s)")):
        _dress(axis, [case.nbytes for case in cases], label)
        axis.set_title(f"{collective}, {cases[0].ranks} ranks, {cases[0].dtype}", fontsize=11)
    if lines:
        rates.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _dress(axis: Any, sizes: list[int], label: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sizes, [_size(size) for size in sizes], rotation=30, fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel("message size")
    axis.set_ylabel(label)
    axis.grid(visible=True, color="#e3e3e3", linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} B"
