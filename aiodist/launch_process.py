"""One process of a launch: a rank, how it ended, and the guard that outlives a killed launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

from aiodist import launch_guard
from aiodist.launch_guard import LAUNCH_ID
from aiodist.launch_output import Relay

__all__ = ["Guard", "Rank", "RankExit", "RunResult", "Share", "signal_name"]


@dataclass(frozen=True, slots=True)
class Share:
    """The ranks that one launch starts of a world whose rendezvous it does not host.

    Attributes:
        ranks: Their numbers in the world; the first is local rank 0.
        rendezvous: Address of the service where the world meets.
        token: Its token, or None where it has none.
    """

    ranks: range
    rendezvous: str
    token: str | None


@dataclass(frozen=True, slots=True)
class RankExit:
    """How the process of a rank ended.

    Attributes:
        rank: The rank.
        code: Its exit code, or None when a signal ended it.
        signal: The number of that signal, or None.
    """

    rank: int
    code: int | None
    signal: int | None

    @property
    def exit_code(self) -> int:
        """The exit code as a shell gives it: the rank's own, or 128 + the signal."""
        return self.code if self.code is not None else 128 + (self.signal or 0)

    def __str__(self) -> str:
        if self.signal is None:
            return f"rank {self.rank}: exit code {self.code}"
        return f"rank {self.rank}: signal {self.signal} ({signal_name(self.signal)})"


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a launch ended.

    Attributes:
        exit_code: 0, the exit code of the first rank that failed, or 128 + the signal that ended the launch.
        failure: The first rank that failed, or None.
        ranks: How each rank ended, in order; None for one that was never started.
    """

    exit_code: int
    failure: RankExit | None
    ranks: tuple[RankExit | None, ...]


def signal_name(signum: int) -> str:
    """Return the name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return "real-time"


class Guard:
    """The process that ends the ranks when this one is killed.

    Args:
        launch_id: The id that all processes of the launch carry.
    """

    def __init__(self, launch_id: str) -> None:
        env = {name: value for name, value in os.environ.items() if name != LAUNCH_ID}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", launch_guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
        self.tell(launch_id)

    def tell(self, word: str) -> None:
        """Send one word: the pid of a new rank."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Dismiss the guard: all is gone."""
        self.tell("done")
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=5)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class Rank:
    """A started rank. Its process stays a zombie until the launch ends, so that its pid keeps naming its session."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        self.relays: list[Relay] = []
        self.exit: RankExit | None = None

    def collect(self) -> RankExit:
        """Return how the process ended, leaving it a zombie."""
        status = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert status is not None
        exited = status.si_code == os.CLD_EXITED
        self.exit = RankExit(self.rank, status.si_status if exited else None, None if exited else status.si_status)
        os.close(self.pidfd)
        return self.exit
