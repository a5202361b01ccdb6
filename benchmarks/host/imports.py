"""How long ``import aiodist`` takes beyond ``import numpy``."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from statistics import median
from typing import Final

from benchmarks.findings import Finding
from benchmarks.host.base import Row, check

__all__ = ["ROW"]

_CODE: Final = """
import json, sys, time
began = time.perf_counter()
import numpy
then = time.perf_counter()
import aiodist
print(json.dumps([then - began, time.perf_counter() - then, [name for name in ("aiohttp", "rich", "click") if name in sys.modules]]))
"""


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=15)


def _measure(args: Namespace) -> list[Finding]:
    took = []
    for _ in range(args.repeats):
        done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=60, check=True)
        numpy, own, loaded = json.loads(done.stdout)
        check(not loaded, f"import aiodist loaded {loaded}")
        took.append((numpy, own))
    return [
        Finding("import numpy, p50", median(numpy for numpy, _ in took) * 1e3, "ms"),
        Finding("import aiodist after it, p50", median(own for _, own in took) * 1e3, "ms", 60),
    ]


ROW = Row("import aiodist, over import numpy", _add_arguments, _measure)
