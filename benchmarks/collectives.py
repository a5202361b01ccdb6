"""Times aiodist's collectives beside MPI's and gloo's, in one run, interleaved.

Every library's ranks are started once and sleep in the kernel while another is measured. In each round each line runs at each size:
one call checked against numpy, then batches timed as a whole, then single calls with a clock reading each, then the result of the
last call checked. The time column is the median over the batches of all rounds, a batch lasting as long as its slowest rank; p99 is
taken over single calls, each as long as at its slowest rank. The order of the lines turns by one every round.

Exit status: 0 if everything asked for ran and was right, 1 if a result was wrong, 2 if a library was not run.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from benchmarks.cases import COLLECTIVES, DTYPES, OPS, Case
from benchmarks.controller import Controller, Settings, progress
from benchmarks.launchers import MPIS, PEERS, plan_launch
from benchmarks.ranksets import Failure, RankSet
from benchmarks.report import format_idle, write_json
from benchmarks.results import VARIANTS, Results
from benchmarks.table import format_table
from benchmarks.targets import judge

__all__ = ["main"]

_SIZES = "8,1024,16384,65536,1048576,16777216,67108864"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark as the command line says."""
    args = _parse(arguments)
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    results = Results(asked=["aiodist", *args.peers], mpis=MPIS)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aiodist-bench-")))
        worlds = {peer: world for peer in results.asked if (world := _start(stack, peer, args, folder, results)) is not None}
        libraries = {peer: world.library for peer, world in worlds.items()}
        controller = Controller(worlds, args.variants, settings, results)
        for cases in _cases(args):
            controller.run(cases)
    print(format_table(results))
    for line in [*format_idle(controller.idle), "", *judge(results)]:
        print(line)
    if args.json:
        write_json(args.json, results, settings, libraries, controller.idle, mpi_threads=args.mpi_threads)
    if args.plot:
        from benchmarks.plot import draw

        draw(results, args.plot)
    return _status(results)


def _start(stack: contextlib.ExitStack, peer: str, args: argparse.Namespace, folder: Path, results: Results) -> RankSet | None:
    try:
        launch = plan_launch(peer, args.ranks, str(folder / f"{peer}.sock"), str(folder / f"{peer}.store"), args.envs, args.mpi_threads)
        world = stack.enter_context(RankSet(peer, args.ranks, launch, folder))
    except (Failure, OSError) as error:
        results.not_run[peer] = str(error)
        progress(f"{peer}: not run: {error}")
        return None
    progress(f"{peer}: {args.ranks} ranks of {world.library}")
    return world


def _cases(args: argparse.Namespace) -> list[list[Case]]:
    groups = []
    for collective in args.collectives:
        sizes = [0] if collective == "barrier" else args.sizes
        cases = [Case.sized(collective, size, dtype=args.dtype, op=args.op, ranks=args.ranks) for size in sizes]
        groups.append(list(dict.fromkeys(cases)))
    return groups


def _status(results: Results) -> int:
    if any(found.wrong for lines in results.measured.values() for found in lines.values()):
        return 1
    return 2 if results.not_run or results.failed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collectives", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Settings()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--collectives", type=_names(COLLECTIVES), default=["all_reduce"], help="of " + ",".join(COLLECTIVES))
    parser.add_argument("--sizes", type=_sizes, default=_sizes(_SIZES), help="bytes, separated by commas")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--op", choices=tuple(OPS), default="sum")
    parser.add_argument("--peers", type=_names(PEERS), default=list(PEERS), help="of " + ",".join(PEERS) + "; empty for none")
    parser.add_argument("--variants", type=_names(VARIANTS), default=list(VARIANTS), help="of " + ",".join(VARIANTS))
    parser.add_argument("--rounds", type=_positive, default=default.rounds)
    parser.add_argument("--batches", type=_positive, default=default.batches, help="batches a round")
    parser.add_argument("--max-calls", type=_positive, default=default.max_calls, help="most calls a batch")
    parser.add_argument("--batch-ms", type=float, default=default.batch_ms, help="about how long a batch may last")
    parser.add_argument("--timeout", type=float, default=default.timeout, help="seconds a library has for one round at one size")
    parser.add_argument(
        "--mpi-threads", choices=("single", "multiple"), default="single", help="thread level; mpi4py's own default is multiple"
    )
    parser.add_argument("--envs", type=Path, help="folder of the peers' environments")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--plot", type=Path, help="write a PNG of time and bandwidth against size")
    args = parser.parse_args(arguments)
    try:
        _cases(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a converter of "a,b" to a list that refuses names not known."""

    def convert(text: str) -> list[str]:
        names = list(dict.fromkeys(name for name in text.split(",") if name))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not of {', '.join(known)}")
        return names

    return convert


def _sizes(text: str) -> list[int]:
    sizes = [int(size) for size in text.split(",")]
    if any(size < 1 for size in sizes):
        raise ValueError("sizes are at least 1")
    return sizes


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError("must be at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
