"""One rank of the demo: ``aiodist run -n 2 -m aiodist.demo.train --folder DIR --epochs 12``."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import aiodist
from aiodist.demo import data
from aiodist.demo.training import EPOCHS, Outcome, Recipe, Step, train_parallel

__all__ = ["PROGRESS", "load_outcome", "main"]

PROGRESS: Final = "progress.jsonl"
_OUTCOME: Final = "outcome.json"
_PARAMETERS: Final = "parameters.npz"


async def _train(folder: Path, recipe: Recipe) -> None:
    async with aiodist.init() as world:
        with (folder / PROGRESS).open("a", buffering=1) as lines:

            def progress(step: int, loss: float | None) -> None:
                if world.rank == 0:
                    lines.write(json.dumps({"step": step, "loss": loss}) + "\n")

            network, outcome = await train_parallel(world, recipe, data.load(), progress)
        if world.rank == 0:
            np.savez(folder / _PARAMETERS, allow_pickle=False, **network.parameters)
            (folder / _OUTCOME).write_text(json.dumps(dataclasses.asdict(outcome)))


def load_outcome(folder: Path) -> tuple[dict[str, npt.NDArray[Any]], Outcome]:
    """Return the parameters and the outcome that rank 0 left in `folder`."""
    with np.load(folder / _PARAMETERS, allow_pickle=False) as archive:
        parameters = {name: archive[name] for name in archive.files}
    fields = json.loads((folder / _OUTCOME).read_text())
    return parameters, Outcome(**{**fields, "step": Step(**fields["step"])})


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="One rank of the aiodist demo.")
    parser.add_argument("--folder", type=Path, required=True, help="where rank 0 leaves its results")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    arguments = parser.parse_args()
    try:
        asyncio.run(_train(arguments.folder, Recipe(epochs=arguments.epochs)))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
