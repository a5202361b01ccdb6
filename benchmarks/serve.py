"""A rank's side of a measurement: read one JSON command a line, run it, answer one JSON line."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.cases import GARBAGE, ROOT, Case
from benchmarks.drivers import Driver, load
from benchmarks.drivers.base import Array

__all__ = ["Plan", "serve"]

# Calls made before a batch's clock starts: they undo the skew that the barrier left and warm caches alike for every library.
_LEAD_IN = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to run of one case.

    Attributes:
        round: number of the round; it changes the data.
        calls: calls in one batch, and stamped calls.
        batches: batches timed as a whole.
    """

    round: int
    calls: int
    batches: int


class Bench:
    """Buffers of the cases seen so far, and the measurement itself."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._buffers: dict[tuple[Case, str], tuple[Array, Array]] = {}

    def forget(self) -> None:
        """Drop all buffers."""
        self._buffers.clear()

    def measure(self, case: Case, variant: str, plan: Plan) -> dict[str, Any]:
        """Check one call, time batches and single calls, check the last one's result."""
        rank = self._driver.rank
        if rank >= case.active:
            return {"wrong": 0, "batches_us": [0.0] * plan.batches, "calls_us": [0.0] * plan.calls}
        x, out = self._arrays(case, variant)
        loop = self._driver.loop(case, variant, x, out)
        self._fill(case, plan.round, x, out)
        self._sync(case)
        loop.timed(1)
        expected = case.expected(rank, plan.round) if self._driver.exchanges and case.output_length(rank) else None
        wrong = case.wrong(out, expected) if expected is not None else 0
        per_trip = 1e3 * case.trips
        batches = []
        for _ in range(plan.batches):
            self._sync(case)
            loop.timed(_LEAD_IN)
            batches.append(loop.timed(plan.calls) / plan.calls / per_trip)
        self._sync(case)
        loop.timed(_LEAD_IN)
        stamps = loop.stamped(plan.calls)
        if expected is not None and not (out is x and case.op):  # a reduction in place has eaten its own input by now
            wrong += case.wrong(out, expected)
        calls = [(after - before) / per_trip for before, after in pairwise(stamps)]
        return {"wrong": wrong, "batches_us": batches, "calls_us": calls}

    def _sync(self, case: Case) -> None:
        """Wait for every rank, unless some idle: those would spin in the barrier while the others are timed, so they sleep instead."""
        if case.active == self._driver.size:
            self._driver.sync()

    def _arrays(self, case: Case, variant: str) -> tuple[Array, Array]:
        kind = variant.rpartition("-")[2]
        key = (case, kind)
        if key not in self._buffers:
            dtype, rank = case.dtype or "uint8", self._driver.rank
            x = self._driver.array(case.input_length(rank), dtype, kind)
            out = x if case.single in self._driver.in_place else self._driver.array(case.output_length(rank), dtype, kind)
            self._buffers[key] = (x, out)
        return self._buffers[key]

    def _fill(self, case: Case, round_: int, x: Array, out: Array) -> None:
        if case.collective == "barrier":
            return
        out.fill(GARBAGE)
        if case.single != "broadcast" or self._driver.rank == ROOT:
            x[...] = case.contribution(self._driver.rank, round_)


def serve(peer: str, path: str, *, rank: int | None, ranks: int, store: str) -> int:
    """Form `peer`'s world, say hello, and run commands until "stop"; return the exit status.

    The answer to each command carries the processor time this process used since its last answer, before the command arrived: idle
    ranks must use none while others are measured.
    """
    driver = load(peer, rank=rank, ranks=ranks, store=store)
    bench = Bench(driver)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.connect(path)
        stream = link.makefile("rwb")
        _send(stream, {"rank": driver.rank, "size": driver.size, "library": driver.library, "pid": os.getpid()})
        rested, slept_at = time.process_time(), time.monotonic()
        while line := stream.readline():
            idle = {"idle_cpu_s": time.process_time() - rested, "idle_s": time.monotonic() - slept_at}
            command = json.loads(line)
            if command["do"] == "stop":
                driver.close()
                return 0
            _send(stream, _answer(bench, command) | idle)
            rested, slept_at = time.process_time(), time.monotonic()
    os._exit(1)  # the controller is gone: peers may be too, so no orderly goodbye that could wait for them


def _answer(bench: Bench, command: dict[str, Any]) -> dict[str, Any]:
    if command["do"] == "forget":
        bench.forget()
        return {}
    try:
        return bench.measure(Case.from_wire(command["case"]), command["variant"], Plan(**command["plan"]))
    except Exception as error:  # the controller must hear of whatever a library raises
        return {"error": f"{type(error).__name__}: {error}"}


def _send(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()
