"""The contract between the operations and what moves their data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from aiodist._core import TensorFuture
from aiodist.types import ReduceOp

__all__ = ["COLLECTIVE_CODES", "Backend", "Call"]

# The numbers of csrc/types.hpp.
COLLECTIVE_CODES: dict[str, int] = {"barrier": 1, "all_reduce": 2, "reduce_scatter": 4, "broadcast": 5, "all_gather": 6}


@dataclass(slots=True)
class Call:
    """One collective, checked, with its arrays laid out: all a backend needs to know.

    Attributes:
        collective: Its name, a key of `COLLECTIVE_CODES`.
        input: What this rank contributes, C-contiguous and native; None where it contributes nothing.
        output: Where the result goes, likewise; None where only the headers tell its extent.
        dtype: Element type of the contribution.
        result: What the future resolves to (ignored where the extent is not known).
        finish: Called once with the result, under the GIL; what it returns is the future's value.
        op: The reduction, if it is one.
        root: Group rank of the root, −1 without one.
        axis: The axis that is cut or joined.
        rows: Product of the extents before `axis`.
        wildcard: This rank takes whatever shape and dtype come.
        timeout: Seconds from now; None is the group's.
    """

    collective: str
    input: np.ndarray | None = None
    output: np.ndarray | None = None
    dtype: np.dtype | None = None
    result: Any = None
    finish: Callable[[Any], Any] | None = None
    op: ReduceOp | None = None
    root: int = -1
    axis: int = 0
    rows: int = 1
    wildcard: bool = False
    timeout: float | None = None


class Backend(Protocol):
    """Moves the data of one group's calls."""

    def start(self, call: Call) -> TensorFuture[Any]:
        """Give the call its place in the group's order and begin; never blocks on a peer."""
        ...

    def refuse(self, collective: str, reason: str) -> None:
        """Let a call that was refused here take its place, so that its peers hear `reason`."""
        ...
