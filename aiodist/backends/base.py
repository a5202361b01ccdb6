"""The contract between the operations and what moves their data."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from aiodist._core import TensorFuture
from aiodist.types import ReduceOp

__all__ = ["COLLECTIVE_CODES", "NO_AXIS", "Backend", "Call", "Form"]

# The numbers of csrc/types.hpp.
COLLECTIVE_CODES: Final[dict[str, int]] = {
    "barrier": 1,
    "all_reduce": 2,
    "reduce": 3,
    "reduce_scatter": 4,
    "broadcast": 5,
    "all_gather": 6,
    "gather": 7,
    "scatter": 8,
    "all_to_all": 9,
    "send": 10,
    "recv": 11,
}


NO_AXIS: Final = -128
"""The axis of a receiver that expects one array of a list."""


class Form(enum.IntFlag):
    """How a call differs from the plain form of its collective; the numbers of csrc/shm/layout.hpp."""

    PLAIN = 0
    WILDCARD = 1
    """This rank takes whatever shape and dtype come."""
    UNEVEN = 2
    """Extents along the axis may differ; `table` holds 1 + that of `output`, or nothing."""
    LIST = 4
    """`input` holds an array for each rank; `table` their shapes (see `listed`), then those of the outputs, if they are given."""
    SHARE = 8
    """`output` is a receiver's share of what the root scatters."""
    MANY = 16
    """`input` and `output` are lists of arrays that move as one; `table` tells one list from another."""
    OBJECT = 32
    """The bytes express an object."""
    PICKLED = 64
    """They do so by pickle."""


@dataclass(slots=True)
class Call:
    """One collective, checked, with its arrays laid out: all a backend needs to know.

    Attributes:
        collective: Its name, a key of `COLLECTIVE_CODES`.
        input: What this rank contributes, C-contiguous and native, or a list of such; None where it contributes nothing.
        output: Where the result goes, likewise; None where only the headers tell its extent, or there is none.
        dtype: Element type of the contribution.
        result: What the future resolves to; `...` where that is made of what the headers tell.
        finish: Called once with the result, under the GIL; what it returns is the future's value.
        op: The reduction, if it is one.
        root: Group rank of the root, or of the peer of a send or receive; −1 without one.
        axis: The axis that is cut or joined; a receiver that does not know the array's dimensions may count from the end.
        rows: Product of the extents before `axis`.
        form: See `Form`.
        tag: Of a send or receive.
        table: Numbers that travel with the call, see `Form`.
        sections: Of many arrays that are reduced: (the core's number of a dtype, how many arrays of it follow).
        timeout: Seconds from now; None is the group's.
    """

    collective: str
    input: np.ndarray | Sequence[np.ndarray] | None = None
    output: np.ndarray | Sequence[np.ndarray] | None = None
    dtype: np.dtype | None = None
    result: Any = None
    finish: Callable[[Any], Any] | None = None
    op: ReduceOp | None = None
    root: int = -1
    axis: int = 0
    rows: int = 1
    form: Form = Form.PLAIN
    tag: int = 0
    table: Sequence[int] | None = None
    sections: Sequence[tuple[int, int]] | None = None
    timeout: float | None = None


class Backend(Protocol):
    """Moves the data of one group's calls."""

    def start(self, call: Call) -> TensorFuture[Any]:
        """Give the call its place in the group's order and begin; never blocks on a peer."""
        ...

    def refuse(self, collective: str, reason: str) -> None:
        """Let a call that was refused here take its place, so that its peers hear `reason`."""
        ...
