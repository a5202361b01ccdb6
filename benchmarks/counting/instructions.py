"""Counts the machine instructions of a call, by valgrind's callgrind: the same number on every run, however busy the machine.

python -m benchmarks.counting.instructions --collectives all_reduce --sizes 8 --ranks 2,8,32,128

All ranks share a process and a thread, so a count is the work of the path and no waiting. It is the difference between a stretch of calls
and one twice as long, over the calls of all ranks in it. Processors' own counters would serve as well, but virtual machines hide them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.counting import calls
from benchmarks.counting.calls import WAITS, Counted, to_json

__all__ = ["Unavailable", "count", "main"]

_SHIM: Final = Path(__file__).with_name("unknown_calls.cpp")
# By a part of the file's name; the first that fits.
_PARTS: Final = (("/aiodist/_core", "core"), ("/numpy/", "numpy"), ("python3", "python"), ("libc.so", "libc"))
_NAME: Final = re.compile(r"c?ob=\((\d+)\)(?: (.*))?")


class Unavailable(Exception):
    """Instructions can not be counted here; the text says why."""


def count(cases: Sequence[Counted], timeout: float = 300.0) -> dict[Counted, dict[str, float]]:
    """Return the instructions of a call of one rank, for each case by part: ``core``, ``python``, ``numpy``, ``libc``, ``other``.

    Raises:
        Unavailable: valgrind or the compiler is missing.
        RuntimeError: the program failed.
    """
    missing = [name for name in ("valgrind", "g++") if shutil.which(name) is None]
    if missing:
        raise Unavailable(f"{' and '.join(missing)} can not be found")
    with tempfile.TemporaryDirectory(prefix="aiodist-count-") as folder:
        dumps = _run(cases, Path(folder), timeout)
        found = {}
        for number, counted in enumerate(cases):
            # Dumps count from 1. The first of a case's three is what came before it.
            shorter, longer = (_by_part(Path(f"{dumps}.{3 * number + at}")) for at in (2, 3))
            made = counted.rounds * counted.ranks
            found[counted] = {part: (longer[part] - shorter[part]) / made for part in sorted(longer)}
        return found


def _run(cases: Sequence[Counted], folder: Path, timeout: float) -> Path:
    shim, dumps = folder / "unknown_calls.so", folder / "callgrind.out"
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", shim, _SHIM], check=True, timeout=timeout)
    valgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={dumps}", "--dump-before=getsid"]
    command = [*valgrind, sys.executable, "-m", calls.__name__, to_json(list(cases))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AIODIST_")}
    environment |= {
        "LD_PRELOAD": str(shim),
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    if done.returncode != 0:
        raise RuntimeError(f"the program ended with {done.returncode} under valgrind: {done.stderr[-2000:]}")
    return dumps


def _by_part(dump: Path) -> Counter[str]:
    """Return the instructions of a dump that each part itself ran. See the callgrind format: costs follow the object that they are of."""
    costs: Counter[str] = Counter()
    names: dict[str, str] = {}
    part, inclusive = "other", False
    for line in dump.read_text(errors="replace").splitlines():
        if match := _NAME.match(line):
            if match[2] is not None:
                names[match[1]] = _part(match[2])
            if line.startswith("ob="):
                part = names[match[1]]
        elif line.startswith("calls="):
            inclusive = True  # the next line's cost is that of what was called
        elif line[:1] in "0123456789+-*" and line:
            if not inclusive:
                costs[part] += int(line.split()[1])
            inclusive = False
    return costs


def _part(path: str) -> str:
    return next((part for text, part in _PARTS if text in path), "other")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collectives", type=lambda text: text.split(","), default=["all_reduce"])
    parser.add_argument("--sizes", type=_numbers, default=[8], help="bytes")
    parser.add_argument("--ranks", type=_numbers, default=[2])
    parser.add_argument("--waits", type=lambda text: text.split(","), default=["await"], help="of " + ",".join(WAITS))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    cases = [
        Counted(collective, nbytes, ranks, args.rounds, wait)
        for collective in args.collectives
        for nbytes in args.sizes
        for ranks in args.ranks
        for wait in args.waits
    ]
    try:
        found = count(cases, timeout=3600.0)
    except Unavailable as error:
        print(f"not counted: {error}")
        return 2
    rows = [_row(counted, parts) for counted, parts in found.items()]
    for counted, parts in found.items():
        print(f"{counted!s:<44} {sum(parts.values()):>10,.0f} instructions: " + ", ".join(f"{part} {n:,.0f}" for part, n in parts.items()))
    if args.json:
        args.json.write_text(json.dumps({"format": 1, "rows": rows}, indent=1) + "\n")
    return 0


def _row(counted: Counted, parts: dict[str, float]) -> dict[str, object]:
    return {
        "collective": counted.collective,
        "bytes": counted.nbytes,
        "ranks": counted.ranks,
        "wait": counted.wait,
        "instructions": parts,
    }


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
