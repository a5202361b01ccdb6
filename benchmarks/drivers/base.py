"""What a driver offers, and the timed loop of a blocking call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import repeat
from time import perf_counter_ns
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from benchmarks.cases import Case

__all__ = ["Array", "Driver", "Loop", "SyncLoop"]

Array = npt.NDArray[Any]


class Loop(ABC):
    """One prepared call, repeated back to back. The loops add no Python frame to a call."""

    @abstractmethod
    def timed(self, calls: int) -> int:
        """Make `calls` calls and return the nanoseconds they took together; no clock is read in between."""

    @abstractmethod
    def stamped(self, calls: int) -> list[int]:
        """Make `calls` calls and return `calls` + 1 clock readings, one before each and one at the end."""


class SyncLoop(Loop):
    """Repeats a callable that returns when its collective is done."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def timed(self, calls: int) -> int:
        call = self._call
        start = perf_counter_ns()
        for _ in repeat(None, calls):
            call()
        return perf_counter_ns() - start

    def stamped(self, calls: int) -> list[int]:
        call, clock = self._call, perf_counter_ns
        stamps = [clock()]
        for _ in repeat(None, calls):
            call()
            stamps.append(clock())
        return stamps


class Driver(ABC):
    """A rank of one library's world.

    Attributes:
        rank: this process's rank.
        size: number of ranks.
        library: name and version, as the library says it.
        in_place: collectives whose result lands in the input's buffer.
    """

    in_place: ClassVar[frozenset[str]] = frozenset({"broadcast"})
    rank: int
    size: int
    library: str

    def array(self, length: int, dtype: str, variant: str) -> Array:
        """Return memory for `length` elements of the kind that `variant` asks for."""
        return np.empty(length, dtype)

    @abstractmethod
    def loop(self, case: Case, variant: str, x: Array, out: Array) -> Loop:
        """Return the call of `case` on these buffers; `out` is `x` where the collective is in place."""

    @abstractmethod
    def sync(self) -> None:
        """Wait for every rank, by the library's own barrier."""

    @abstractmethod
    def close(self) -> None:
        """Leave the world."""
