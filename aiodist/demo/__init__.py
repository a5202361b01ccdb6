"""``aiodist demo``: a network trained data-parallel on real data, and the proof that it is the same as training on one process."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console

    from aiodist.demo.training import Progress, Recipe

__all__ = ["ACCURACY", "TOLERANCE", "main"]

ACCURACY: Final = 0.95
"""What a whole training reaches on images that it never saw."""

TOLERANCE: Final = 1e-9
"""Far above the rounding of float64 sums taken in another order, far below what a wrong gradient would do."""

_NEEDED: Final = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "rich": "rich"}
_THREADS: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def main(*, ranks: int = 2, epochs: int = 12, plot: str = "aiodist-demo.png") -> int:
    """Train on `ranks` processes, compare with one process, print the result and draw the picture.

    Args:
        ranks: Processes to start; each trains on its share of every batch.
        epochs: Passes over the images.
        plot: Where the picture (PNG) goes.

    Returns:
        The exit code: 0 when the training equals that of one process and (for a whole training) the accuracy is reached, 1 when not,
        2 for wrong arguments or missing packages, 130 after Ctrl-C, else what the ranks ended with.
    """
    if trouble := _trouble(ranks, epochs, Path(plot)):
        print(f"aiodist demo: {trouble}", file=sys.stderr)
        return 2
    from rich.console import Console

    from aiodist.demo.training import Recipe

    with tempfile.TemporaryDirectory(prefix="aiodist-demo-") as name:
        try:
            code = _launch(Path(name), ranks, Recipe(epochs=epochs), console := Console())
            return code or _conclude(Path(name), ranks, Recipe(epochs=epochs), Path(plot), console)
        except KeyboardInterrupt:
            return 130


def _trouble(ranks: int, epochs: int, plot: Path) -> str | None:
    if missing := [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]:
        return f"needs {' and '.join(missing)}: pip install 'aiodist[demo]'"
    if ranks < 1 or epochs < 1:
        return f"ranks and epochs must be at least 1, not {ranks} and {epochs}"
    if not plot.absolute().parent.is_dir():
        return f"the folder of the picture {plot} does not exist"
    if plot.is_dir() or not os.access(plot if plot.exists() else plot.absolute().parent, os.W_OK):
        return f"the picture {plot} can not be written"
    return None


def _launch(folder: Path, ranks: int, recipe: Recipe, console: Console) -> int:
    """Start the ranks, show rank 0's progress meanwhile, return the exit code."""
    from aiodist.demo import data, report
    from aiodist.launch import run_ranks

    command = [sys.executable, "-m", "aiodist.demo.train", "--folder", str(folder), "--epochs", str(recipe.epochs)]
    # The ranks share this machine's cores: threads of the linear algebra would only get in each other's way.
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    environment = dict.fromkeys(_THREADS, threads) | dict(os.environ)
    steps = recipe.steps(len(data.load().train_images))
    over = threading.Event()
    with report.progress_bar(console, f"training on {ranks} rank{'s' if ranks > 1 else ''}", steps) as show:
        follower = threading.Thread(target=_follow, args=(folder, show, over), name="aiodist-demo-progress", daemon=True)
        follower.start()
        try:
            return run_ranks(command, ranks, env=environment).exit_code
        finally:
            over.set()
            follower.join()


def _follow(folder: Path, show: Progress, over: threading.Event) -> None:
    """Show the newest whole line of rank 0's progress until `over`, and once more after."""
    from aiodist.demo.train import PROGRESS

    path = folder / PROGRESS
    last = False
    while not last:
        last = over.wait(0.05)
        text = path.read_text() if path.exists() else ""
        if newest := text[: text.rfind("\n") + 1].splitlines()[-1:]:
            entry = json.loads(newest[0])
            show(entry["step"], entry["loss"])


def _conclude(folder: Path, ranks: int, recipe: Recipe, plot: Path, console: Console) -> int:
    """Train on this process alone, compare, print and draw."""
    import numpy as np

    from aiodist.demo import data, report, timeline, training
    from aiodist.demo.network import Network
    from aiodist.demo.train import load_outcome

    digits = data.load()
    # threadpoolctl comes with scikit-learn. Products as small as these gain nothing from more threads, and lose much on a busy machine.
    one_thread = importlib.import_module("threadpoolctl").threadpool_limits(1)
    steps = recipe.steps(len(digits.train_images))
    with one_thread, report.progress_bar(console, "training on this process alone, to compare", steps) as show:
        alone, losses = training.train_alone(recipe, digits, show)
    parameters, outcome = load_outcome(folder)
    trained = Network(recipe.widths)
    trained.parameters.update(parameters)
    accuracy = trained.accuracy(digits.test_images, digits.test_labels)
    difference = max(float(np.abs(parameters[name] - value).max()) for name, value in alone.parameters.items())
    console.print(report.times(outcome))
    console.print(f"test accuracy             {accuracy:.4f}  ({len(digits.test_labels)} images that were held out)")
    console.print(f"equal on all ranks        {'yes, bit for bit' if outcome.equal else 'NO'}")
    console.print(f"largest difference        {difference:.2e}  (of any parameter, from the training on one process;", soft_wrap=True)
    console.print("                          float64 sums taken in another order differ at about 1e-16)", highlight=False, soft_wrap=True)
    timeline.draw(plot, outcome, losses, ranks=ranks)
    console.print(f"picture                   {plot}", soft_wrap=True)
    reached = accuracy >= ACCURACY or recipe.epochs < training.EPOCHS
    return 0 if reached and outcome.equal and difference <= TOLERANCE else 1
