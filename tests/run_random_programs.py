"""The long run of the random programs, and the way to see one again.

    python tests/run_random_programs.py --seed 1000000 --count 10000
    python tests/run_random_programs.py --seed 1234 --count 1 --show

runs the programs of the seeds from --seed on, each on the ranks of this process and on real processes (--ranks chooses one of them). A
failure does not end the run: its text is printed, the programs of its batch are tried again, each in a world of its own, and at the end
all seeds that failed are named. The exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from collections.abc import Callable, Iterator

from support.random_programs import LARGEST, draw_program, size_of
from support.random_runs import run_in_processes, run_locally
from support.ranks import Pools, ServerThread

_BATCH = 20
_STUCK = 300


def main() -> int:
    """Run what the command line asks for and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="first seed")
    parser.add_argument("--count", type=int, default=10_000, help="how many programs")
    parser.add_argument("--ranks", choices=("local", "processes", "both"), default="both")
    parser.add_argument("--show", action="store_true", help="print the programs first")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    if arguments.show:
        for seed in seeds:
            print(f"program {seed}, {size_of(seed)} ranks\n{draw_program(seed)}")
    failed: set[int] = set()
    with ServerThread() as server:
        pools = Pools(server)
        if arguments.ranks != "processes":
            _run("local", seeds, run_locally, failed)
        if arguments.ranks != "local":
            _run("processes", seeds, lambda batch: run_in_processes(pools, batch), failed)
        pools.close()
    print(f"{len(seeds)} programs; failed: {sorted(failed) or 'none'}")
    return 1 if failed else 0


def _run(kind: str, seeds: range, run: Callable[[list[int]], None], failed: set[int]) -> None:
    began = time.monotonic()
    for batch in _batches(seeds):
        print(f"{time.monotonic() - began:6.0f} s, {kind}, {size_of(batch[0])} ranks: {batch[0]} to {batch[-1]}", flush=True)
        if not _passes(kind, batch, run):
            alone = [seed for seed in batch if not _passes(kind, [seed], run)] if len(batch) > 1 else batch
            failed.update(alone or batch)
            print(f"{kind}: of {batch}, alone fail: {alone or 'none'}", flush=True)


def _batches(seeds: range) -> Iterator[list[int]]:
    """Cut the seeds into batches of one size each, all of one size together."""
    for size in range(1, LARGEST + 1):
        own = [seed for seed in seeds if size_of(seed) == size]
        for start in range(0, len(own), _BATCH):
            yield own[start : start + _BATCH]


def _passes(kind: str, batch: list[int], run: Callable[[list[int]], None]) -> bool:
    faulthandler.dump_traceback_later(_STUCK, exit=True)  # where even the deadlines of a program do not come to pass
    try:
        run(batch)
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        print(f"--- {kind}, {batch}\n{type(error).__name__}: {error}\n{notes}", flush=True)
        return False
    finally:
        faulthandler.cancel_dump_traceback_later()
    return True


if __name__ == "__main__":
    sys.exit(main())
