"""The JSON report: machine, settings, libraries, every row with its spread, and what was not run."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.cases import Case
from benchmarks.controller import Settings
from benchmarks.results import Line, Measurement, Results
from benchmarks.targets import judge

__all__ = ["IDLE_LIMIT", "format_idle", "machine", "write_json"]

IDLE_LIMIT = 0.02
"""Share of a core, per rank, above which ranks that should sleep are reported."""

Idle = dict[str, tuple[float, float]]


def format_idle(idle: Idle) -> list[str]:
    """Return a warning for each library whose ranks kept a core busy while others were measured."""
    return [
        f"warning: {peer}'s ranks used {used / had:.1%} of a core each while others were measured; the figures of others suffer"
        for peer, (used, had) in idle.items()
        if had > 0 and used / had > IDLE_LIMIT
    ]


def write_json(path: Path, results: Results, settings: Settings, libraries: dict[str, str], idle: Idle, *, mpi_threads: str) -> None:
    """Write the report to `path`."""
    report = {
        "format": 1,
        "machine": machine(),
        "settings": asdict(settings) | {"mpi_threads": mpi_threads},
        "libraries": libraries,
        "idle_core_share": {peer: used / had if had else 0.0 for peer, (used, had) in idle.items()},
        "not_run": results.not_run,
        "failed": [{"peer": peer, "collective": collective, "reason": why} for (peer, collective), why in results.failed.items()],
        "findings": [finding.to_json() for finding in judge(results)],
        "rows": [_row(results, case, line, found) for case in results.measured for line, found in results.rows(case)],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def _row(results: Results, case: Case, line: Line, found: Measurement) -> dict[str, Any]:
    seconds = found.time_us / 1e6
    fastest = results.fastest_mpi(case)
    return {
        "peer": line.peer,
        "variant": line.variant,
        "collective": case.collective,
        "bytes": case.nbytes,
        "count": case.count,
        "dtype": case.dtype,
        "op": case.op,
        "ranks": case.ranks,
        "time_us": found.time_us,
        "p99_us": found.p99_us,
        "algbw_gb_s": case.algbw(seconds),
        "busbw_gb_s": case.busbw(seconds),
        "wrong": found.wrong,
        "batches": sum(len(batches) for batches in found.rounds_us),
        "single_calls": len(found.calls_us),
        "round_medians_us": [median(batches) for batches in found.rounds_us],
        "fastest_mpi": fastest[0] if fastest else None,
        "time_over_mpi": results.ratio_to_mpi(case, line),
        "time_over_gloo": results.ratio_to(case, line, Line("gloo")),
    }


def machine() -> dict[str, Any]:
    """Say what was measured on, and when."""
    model = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load": os.getloadavg(),
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
