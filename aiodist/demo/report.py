"""What the demo prints: a live progress bar, and the result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

if TYPE_CHECKING:
    from aiodist.demo.training import Outcome, Progress

__all__ = ["progress_bar", "times"]


@contextmanager
def progress_bar(console: Console, title: str, steps: int) -> Iterator[Progress]:
    """Show a bar of `steps` steps; the function that is given moves it to a step and shows the loss of the newest epoch."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"), TimeElapsedColumn())
    with Bars(*columns, console=console) as bar:
        task = bar.add_task(title, total=steps, loss="")

        def show(step: int, loss: float | None) -> None:
            bar.update(task, completed=step, loss="" if loss is None else f"loss {loss:.4f}")

        yield show


def times(outcome: Outcome) -> Table:
    """Return the table of where each rank's time went."""
    table = Table(title="Where the time went, in seconds", title_justify="left")
    table.add_column("rank", justify="right")
    for heading in ("computing", "communicating", "waiting", "communication hidden"):
        table.add_column(heading, justify="right")
    for rank, (computing, communicating, waiting) in enumerate(outcome.seconds):
        hidden = max(0.0, 1 - waiting / communicating) if communicating > 0 else 1.0
        table.add_row(str(rank), f"{computing:.3f}", f"{communicating:.3f}", f"{waiting:.3f}", f"{hidden:.0%}")
    table.caption = "communicating: a bucket was under way; waiting: backward was over and buckets were not"
    table.caption_justify = "left"
    return table
