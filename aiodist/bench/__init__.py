"""What ``aiodist bench`` does: a quick look at this installation's speed, and the measuring of a machine's profile."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from aiodist.bench.plan import Found, Plan
from aiodist.launch import run_ranks

__all__ = ["Failed", "machine", "measure"]


class Failed(Exception):
    """The ranks of a measurement failed; the text says how."""


def measure(plan: Plan, ranks: int) -> list[Found]:
    """Start `ranks` ranks on this host, have them measure, and return what they found.

    Raises:
        Failed: a rank failed; what it printed has been passed on.
    """
    with tempfile.TemporaryDirectory(prefix="aiodist-bench-") as folder:
        given, results = Path(folder, "plan.json"), Path(folder, "results.json")
        given.write_bytes(msgspec.json.encode(plan))
        environment = {name: value for name, value in os.environ.items() if name != "AIODIST_TUNING" or not plan.profiles}
        command = [sys.executable, "-m", "aiodist.bench.ranks", str(given), str(results)]
        ended = run_ranks(command, ranks, env=environment, stdout=sys.stderr)
        if ended.exit_code != 0:
            raise Failed(f"the measurement failed: {ended.failure or f'ended by signal {ended.exit_code - 128}'}")
        return msgspec.json.decode(results.read_bytes(), type=list[Found])


def machine() -> dict[str, str | int]:
    """Say what is measured on, for people."""
    return {"processor": _processor(), "cores": len(os.sched_getaffinity(0)), "measured": time.strftime("%Y-%m-%d %H:%M %z")}


def _processor() -> str:
    try:
        lines: Sequence[str] = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
