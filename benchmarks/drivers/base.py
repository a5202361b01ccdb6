"""What a driver offers, and the timed loop of a blocking call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import repeat
from time import perf_counter_ns
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from benchmarks.cases import Case

__all__ = ["Array", "Driver", "Loop", "SyncLoop", "in_turn"]

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


def in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Return a callable that makes each of these calls after the one before it; it costs one Python frame."""

    def run() -> None:
        for call in calls:
            call()

    return run


class Driver(ABC):
    """A rank of one library's world.

    Attributes:
        rank: this process's rank.
        size: number of ranks.
        library: name and version, as the library says it.
        in_place: collectives whose result lands in the input's buffer; their ``_many`` forms too.
        exchanges: whether the calls give results to check.
    """

    in_place: ClassVar[frozenset[str]] = frozenset({"broadcast"})
    exchanges: ClassVar[bool] = True
    rank: int
    size: int
    library: str

    def array(self, length: int, dtype: str, variant: str) -> Array:
        """Return memory for `length` elements of the kind that `variant` asks for."""
        return np.empty(length, dtype)

    @abstractmethod
    def loop(self, case: Case, variant: str, x: Array, out: Array) -> Loop:
        """Return the call of `case` on these buffers; `out` is `x` where the collective is in place.

        Raises:
            NotImplementedError: the library has no such call; the report says so.
        """

    @abstractmethod
    def sync(self) -> None:
        """Wait for every rank, by the library's own barrier."""

    @abstractmethod
    def close(self) -> None:
        """Leave the world."""
