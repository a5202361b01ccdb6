"""The picture: the loss of each epoch, and the timeline of one step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from aiodist.demo.training import Outcome, Step

__all__ = ["draw"]

_COMPUTE = ("#1f5f99", "#3d87c4", "#73aeda", "#a9cfeb")
_COMMUNICATION = "#e07b39"
_OTHER = "#b9bec4"
_WAIT = "#c8372d"


def draw(path: Path, outcome: Outcome, alone: list[float], *, ranks: int) -> None:
    """Write the picture to `path` as PNG.

    Args:
        path: The file; it is replaced.
        outcome: What the data-parallel training gave.
        alone: Loss of each epoch of the training on one process.
        ranks: How many ranks trained.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    _losses(left, outcome.losses, alone, ranks)
    _timeline(right, outcome.step)
    figure.savefig(path, format="png", dpi=130)


def _losses(axes: Axes, parallel: list[float], alone: list[float], ranks: int) -> None:
    from matplotlib.ticker import MaxNLocator

    epochs = range(1, len(parallel) + 1)
    axes.plot(epochs, alone, color=_OTHER, linewidth=6, label="1 process")
    axes.plot(epochs, parallel, color=_COMPUTE[0], marker="o", markersize=4, label=f"{ranks} rank{'s' if ranks > 1 else ''}, data-parallel")
    axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.set_ylabel("mean cross-entropy (log scale)")
    axes.set_title("Training loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()


def _timeline(axes: Axes, step: Step) -> None:
    rows: list[str] = []

    def bar(row: str, begin: float, end: float, color: str) -> None:
        if row not in rows:
            rows.append(row)
        axes.barh(rows.index(row), (end - begin) * 1e3, left=begin * 1e3, color=color, height=0.7, edgecolor="white", linewidth=0.5)
        axes.text(end * 1e3, rows.index(row), f" {(end - begin) * 1e3:.2f} ms", va="center", ha="left", fontsize=8)

    bar("forward", *step.forward, _OTHER)
    for index, (name, span) in enumerate(step.layers.items()):
        bar(f"backward {name}", *span, _COMPUTE[min(index, len(_COMPUTE) - 1)])
    for name, span in step.buckets.items():
        bar(f"all_reduce {name}", *span, _COMMUNICATION)
    bar("left to wait for", *step.wait, _WAIT)
    bar("optimizer", *step.update, _OTHER)

    first, last = min(span[0] for span in step.layers.values()), max(span[1] for span in step.layers.values())
    axes.axvspan(first * 1e3, last * 1e3, color=_COMPUTE[3], alpha=0.25, zorder=0)
    axes.text((first + last) / 2 * 1e3, -0.62, "backward runs", ha="center", va="bottom", fontsize=9, color=_COMPUTE[0])
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -1.1)
    axes.set_xlim(0, step.update[1] * 1e3 * 1.08)
    axes.set_xlabel("milliseconds from the start of the step")
    axes.set_title("One step on rank 0: buckets are reduced while backward runs")
    axes.grid(axis="x", alpha=0.3)
