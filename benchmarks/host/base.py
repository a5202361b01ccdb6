"""What all rows share: their form, and running a function of a row's module on ranks of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.findings import Finding

__all__ = ["Failed", "Row", "check", "percentile", "run_on_ranks"]

_RANK_PROGRAM: Final = str(Path(__file__).with_name("rank.py"))


class Failed(Exception):
    """A row could not be measured, or a result was wrong; the text says how."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the targets.

    Attributes:
        text: What it is, in a line.
        add_arguments: Adds its options.
        measure: Measures it.
    """

    text: str
    add_arguments: Callable[[ArgumentParser], None]
    measure: Callable[[Namespace], list[Finding]]


def check(right: bool, what: str) -> None:
    """Fail the row where a result is wrong."""
    if not right:
        raise Failed(f"wrong result: {what}")


def percentile(values: list[float], q: float) -> float:
    """Return the value that at least `q` percent do not exceed; one that was measured."""
    return float(np.percentile(values, q, method="higher"))


def run_on_ranks(
    module: str, ranks: int, options: dict[str, Any], *, timeout: float, dies: int | None = None, settings: dict[str, str] | None = None
) -> list[Any]:
    """Start `ranks` ranks by ``aiodist run``, call ``rank(options)`` of `module` on each, and return the answers in rank order.

    Args:
        module: Name of the row's module.
        ranks: How many.
        options: Passed to each; with ``folder``, which is theirs, added.
        timeout: Seconds that all of it may take.
        dies: A rank that is to be killed, after it wrote its answer.
        settings: Further variables of the ranks.

    Raises:
        Failed: a rank failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="aiodist-host-") as folder:
        given = json.dumps(options | {"folder": folder})
        command = [sys.executable, "-m", "aiodist", "run", "-n", str(ranks), _RANK_PROGRAM, module, given]
        environment = os.environ | {"PYTHONSAFEPATH": "1"} | (settings or {})
        try:
            done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise Failed(f"not done within {timeout:g} s") from None
        files = [Path(folder, f"answer.{rank}") for rank in range(ranks)]
        if (done.returncode != 0 and dies is None) or not all(file.exists() for file in files):
            raise Failed(f"the ranks ended with {done.returncode}: {done.stderr[-3000:]}")
        return [json.loads(file.read_text()) for file in files]
