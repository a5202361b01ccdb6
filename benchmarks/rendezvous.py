"""Times the rendezvous with many members beside torch's TCPStore, in one run, by turns.

In each round each of the two gets a server of its own, and another process that holds all members: asyncio clients of aiodist, threads
of the TCPStore. They meet, set a key each and wait for their neighbour's, whose value is checked, and pass a barrier. The columns are
medians over the rounds, in seconds until the last member was through; total is that of the three. A server's memory is the most it ever
had resident, in the worst round; in brackets what came on top of what it had when it was ready.

The members' process needs a core, and so does the server. TCPStore members learn nothing of each other: aiodist's each get what
every other one told (host, pid, address), so that joining alone moves members x members records. The TCPStore looks the names of its
clients up: where the name server does not answer, that is most of its time in join, and says nothing of it.

Exit status: 0 if everything was right, 1 if a value was wrong, 2 if a side was not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import IO, Final

from benchmarks.members import PHASES
from benchmarks.ranksets import Failure

__all__ = ["main"]

DUE_S: Final = 5.0
DUE_MB: Final = 200.0
DUE_MEMBERS: Final = 1000
_START_S: Final = 60.0
_ROUND_S: Final = 300.0
_FDS_BESIDE: Final = 200
# The TCPStore looks the names of its clients up to log them: without the log, and not for long where the name server does not answer.
_SETTINGS: Final = {"TORCH_CPP_LOG_LEVEL": "ERROR", "RES_OPTIONS": "timeout:1 attempts:1"}


@dataclass
class Side:
    """What was measured of one service."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    peak_mb: float = 0.0
    grown_mb: float = 0.0
    wrong: int = 0
    not_run: str | None = None

    @property
    def total(self) -> float:
        """Seconds until all members were through the three phases."""
        return median(sum(one[phase] for phase in PHASES) for one in self.rounds)

    def phase(self, phase: str) -> float:
        """Seconds of one phase."""
        return median(one[phase] for one in self.rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rendezvous", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, default=DUE_MEMBERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args(arguments)
    if args.members < 1 or args.rounds < 1:
        parser.error("members and rounds are at least 1")
    _raise_limits(args.members)
    sides = {"aiodist": Side(), "tcpstore": Side()}
    if find_spec("torch") is None:
        sides["tcpstore"].not_run = "torch is not installed"
    for number in range(args.rounds):
        for name in sorted(sides, reverse=bool(number % 2)):
            _measure(name, sides[name], args.members)
    print("\n".join(format_report(sides, args.members)))
    if args.json:
        told = {name: vars(side) for name, side in sides.items()}
        report = {"members": args.members, "cores": len(os.sched_getaffinity(0)), "sides": told}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(side.wrong for side in sides.values()) else 2 if any(side.not_run for side in sides.values()) else 0


def _raise_limits(members: int) -> None:
    """Let this process's children have a socket for each member."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = members + _FDS_BESIDE
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise SystemExit(f"{members} members need {wanted} open files, the limit is {hard}: see ulimit -n")
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def _measure(name: str, side: Side, members: int) -> None:
    if side.not_run is not None:
        return
    try:
        with _server(name, members) as (server, address, env):
            ready_mb = _memory_mb(server, "VmRSS")
            command = [sys.executable, "-m", "benchmarks.members", name, "--members", str(members), "--address", address]
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, timeout=_ROUND_S, check=False)
            if done.returncode != 0:
                raise Failure(f"its members' process ended with {done.returncode}")
            told = json.loads(done.stdout)
            peak_mb = _memory_mb(server, "VmHWM")
    except (Failure, OSError, ValueError, subprocess.TimeoutExpired) as error:
        side.not_run = str(error)
        print(f"{name}: not run: {error}", file=sys.stderr)
        return
    side.rounds.append(told["seconds"])
    side.wrong += told["wrong"]
    side.peak_mb = max(side.peak_mb, peak_mb)
    side.grown_mb = max(side.grown_mb, peak_mb - ready_mb)


@contextlib.contextmanager
def _server(name: str, members: int) -> Iterator[tuple[subprocess.Popen[bytes], str, dict[str, str]]]:
    """Run a server; gives its process, its address, and its members' environment."""
    env = os.environ | _SETTINGS | {"AIODIST_TOKEN": secrets.token_hex(16)}
    command = ["aiodist", "rendezvous"] if name == "aiodist" else ["benchmarks.members", "tcpstore-server", "--members", str(members)]
    process = subprocess.Popen(
        [sys.executable, "-m", *command], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with process:
        try:
            assert process.stdout is not None
            yield process, _first_line(process.stdout), env
        finally:
            process.kill()


def _first_line(stream: IO[bytes]) -> str:
    line = stream.readline().decode().strip()
    if not line:
        raise Failure("its server did not start")
    return line


def _memory_mb(process: subprocess.Popen[bytes], which: str) -> float:
    """Return a figure of /proc/PID/status in MB: VmRSS, what is resident, or VmHWM, the most that ever was."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith(f"{which}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise Failure(f"the kernel does not tell {which}")


def format_report(sides: dict[str, Side], members: int) -> list[str]:
    """Return the table, the ratio where both sides ran and were right, and the verdict on the target."""
    lines = [
        f"# {members} members in one process, a server in another, {len(os.sched_getaffinity(0))} cores; seconds, medians over rounds",
        f"{'service':<10} {'join':>8} {'keys':>8} {'barrier':>8} {'total':>8} {'server MB':>16} {'#wrong':>7}",
    ]
    for name, side in sides.items():
        if side.rounds:
            times = " ".join(f"{side.phase(phase):>8.3f}" for phase in PHASES)
            lines.append(f"{name:<10} {times} {side.total:>8.3f} {side.peak_mb:>8.1f} (+{side.grown_mb:>5.1f}) {side.wrong:>7}")
    lines += [f"not run: {name}: {side.not_run}" for name, side in sides.items() if side.not_run is not None]
    own, peer = sides["aiodist"], sides["tcpstore"]
    if own.not_run is None and peer.not_run is None and not own.wrong and not peer.wrong:
        lines.append(f"aiodist takes {own.total / peer.total:.2f} x the time of the TCPStore")
    else:
        lines.append("No ratio: a side is missing or was wrong.")
    if members == DUE_MEMBERS and own.not_run is None and not own.wrong:
        met = own.total <= DUE_S and own.peak_mb <= DUE_MB
        lines.append(f"{'met' if met else 'NOT MET'}: {own.total:.2f} s, due <= {DUE_S:g}; {own.peak_mb:.0f} MB, due <= {DUE_MB:g}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
