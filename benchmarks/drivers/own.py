"""aiodist, blocking and awaited, on private arrays and on arrays from `Group.empty`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import repeat
from time import perf_counter_ns
from typing import Any

import aiodist
from benchmarks.cases import Case
from benchmarks.drivers.base import Array, Driver, Loop

__all__ = ["AiodistDriver"]

Start = Callable[[], aiodist.TensorFuture[Any]]


class BlockingLoop(Loop):
    """``group.call(…).result()``, with no event loop running in this thread."""

    def __init__(self, start: Start) -> None:
        self._start = start

    def timed(self, calls: int) -> int:
        call = self._start
        start = perf_counter_ns()
        for _ in repeat(None, calls):
            call().result()
        return perf_counter_ns() - start

    def stamped(self, calls: int) -> list[int]:
        call, clock = self._start, perf_counter_ns
        stamps = [clock()]
        for _ in repeat(None, calls):
            call().result()
            stamps.append(clock())
        return stamps


class AwaitedLoop(Loop):
    """``await group.call(…)`` in one task."""

    def __init__(self, start: Start, runner: asyncio.Runner) -> None:
        self._start = start
        self._runner = runner

    def timed(self, calls: int) -> int:
        return self._runner.run(self._timed(calls))

    def stamped(self, calls: int) -> list[int]:
        return self._runner.run(self._stamped(calls))

    async def _timed(self, calls: int) -> int:
        call = self._start
        start = perf_counter_ns()
        for _ in repeat(None, calls):
            await call()
        return perf_counter_ns() - start

    async def _stamped(self, calls: int) -> list[int]:
        call, clock = self._start, perf_counter_ns
        stamps = [clock()]
        for _ in repeat(None, calls):
            await call()
            stamps.append(clock())
        return stamps


class AiodistDriver(Driver):
    """A rank started by ``aiodist run``. Variants are ``blocking`` or ``awaited``, a dash, ``private`` or ``shared``."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._group = self._runner.run(_enter())
        self.rank, self.size = self._group.rank, self._group.size
        self.library = f"aiodist {_version()}"

    def array(self, length: int, dtype: str, variant: str) -> Array:
        if variant.endswith("shared"):
            return self._group.empty(length, dtype)
        return super().array(length, dtype, variant)

    def loop(self, case: Case, variant: str, x: Array, out: Array) -> Loop:
        start = self._start(case, x, out)
        return AwaitedLoop(start, self._runner) if variant.startswith("awaited") else BlockingLoop(start)

    def _start(self, case: Case, x: Array, out: Array) -> Start:
        group = self._group
        if case.collective == "barrier":
            return group.barrier
        if case.collective == "broadcast":  # in place at the root, so that every rank has a given buffer and none copies to itself
            return partial(group.broadcast, x if self.rank == 0 else None, 0, out=x)
        if case.collective == "all_gather":
            return partial(group.all_gather, x, out=out)
        if case.collective == "all_reduce":
            return partial(group.all_reduce, x, case.op, out=out)
        return partial(group.reduce_scatter, x, case.op, out=out)

    def sync(self) -> None:
        self._group.barrier().result()

    def close(self) -> None:
        with self._runner:
            self._runner.run(self._group.aclose())


def _version() -> str:
    try:
        return version("aiodist")
    except PackageNotFoundError:
        return "from the source tree"


async def _enter() -> aiodist.Group:
    return await aiodist.init()
