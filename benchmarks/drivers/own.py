"""aiodist, blocking and awaited, on private arrays and on arrays from `Group.empty`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import repeat
from time import perf_counter_ns
from typing import Any, Protocol

import aiodist
from benchmarks.cases import ROOT, Case
from benchmarks.drivers.base import Array, Driver, Loop

__all__ = ["AiodistDriver"]


class Waits(Protocol):
    """What both loops need of a call that was started; every TensorFuture has it."""

    def result(self) -> object: ...

    def __await__(self) -> Generator[Any, Any, Any]: ...


Start = Callable[[], Waits]


class InTurn:
    """Starts each call when the one before it is done."""

    def __init__(self, starts: Sequence[Start]) -> None:
        self._starts = starts

    def result(self) -> None:
        for start in self._starts:
            start().result()

    def __await__(self) -> Generator[Any, Any, None]:
        for start in self._starts:
            yield from start().__await__()


class AtOnce:
    """Starts all calls, then waits for them."""

    def __init__(self, starts: Sequence[Start]) -> None:
        self._starts = starts

    def result(self) -> None:
        for waits in [start() for start in self._starts]:
            waits.result()

    def __await__(self) -> Generator[Any, Any, None]:
        for waits in [start() for start in self._starts]:
            yield from waits.__await__()


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
        at_root = self.rank == ROOT
        match case.collective:
            case "all_reduce":
                return partial(group.all_reduce, x, case.op, out=out)
            case "reduce":
                return partial(group.reduce, x, case.op, ROOT, out=out if at_root else None)
            case "reduce_scatter":
                return partial(group.reduce_scatter, x, case.op, out=out)
            case "broadcast":  # in place at the root, so that every rank has a given buffer and none copies to itself
                return partial(group.broadcast, x if at_root else None, ROOT, out=x)
            case "all_gather":
                return partial(group.all_gather, x, out=out)
            case "gather":
                return partial(group.gather, x, ROOT, out=out if at_root else None)
            case "scatter":
                return partial(group.scatter, x if at_root else None, ROOT, out=out)
            case "all_to_all":
                return partial(group.all_to_all, x, out=out)
            case "all_reduce_many":
                return partial(group.all_reduce_many, case.arrays(x), case.op, out=case.arrays(out))
            case "broadcast_many":
                arrays = case.arrays(x)
                return partial(group.broadcast_many, arrays if at_root else None, ROOT, out=arrays)
            case "send_recv" | "exchange":
                return self._pair(case, x, out)
            case "barrier":
                return group.barrier
        raise NotImplementedError(f"no {case.collective} here")

    def _pair(self, case: Case, x: Array, out: Array) -> Start:
        peer = self.rank ^ 1
        calls: list[Start] = [partial(self._group.send, x, peer), partial(self._group.recv, peer, out=out)]
        if case.collective == "exchange":
            return repeat(AtOnce(calls)).__next__  # hands out the same object without a Python frame
        return repeat(InTurn(calls if self.rank == ROOT else calls[::-1])).__next__

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
