"""No library: every rank copies as many bytes as a call gives it, all at once. Nothing that must write its results can be faster for long.

It is glibc's memcpy, which `benchmarks.launchers` tells to store around the caches from 4 MiB on.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import numpy as np

from benchmarks.cases import Case
from benchmarks.drivers.base import Array, Loop, SyncLoop, in_turn
from benchmarks.drivers.own import AiodistDriver

__all__ = ["CopyingDriver"]


class CopyingDriver(AiodistDriver):
    """Ranks that only meet through aiodist."""

    exchanges: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.library = "memcpy, around the caches from 4 MiB on"

    def loop(self, case: Case, variant: str, x: Array, out: Array) -> Loop:
        target = np.ones(case.output_length(self.rank), case.dtype)
        copy = partial(np.copyto, target, np.ones_like(target))
        return SyncLoop(in_turn([copy] * case.trips) if case.trips > 1 else copy)
