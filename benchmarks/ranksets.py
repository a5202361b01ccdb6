"""A running world of one library, driven from the controller; its ranks sleep in a read between commands."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from benchmarks.launchers import Launch

__all__ = ["Failure", "RankSet"]

START_TIMEOUT = 60.0
"""Seconds within which all ranks must have said hello."""

STOP_TIMEOUT = 10.0
"""Seconds a world has to end by itself before it is killed."""


class Failure(Exception):
    """A library's world could not be started, or failed at a command.

    Attributes:
        usable: whether every rank answered, so that none hangs in a call and the world can be asked again.
    """

    def __init__(self, text: str, *, usable: bool = False) -> None:
        super().__init__(text)
        self.usable = usable


@dataclass(slots=True)
class _Link:
    """The connection to one rank."""

    sock: socket.socket
    pending: bytes = b""

    def send(self, message: dict[str, Any]) -> None:
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self.pending:
            self.sock.settimeout(max(0.001, deadline - time.monotonic()))
            data = self.sock.recv(1 << 16)
            if not data:
                raise ConnectionError("its connection closed")
            self.pending += data
        line, _, self.pending = self.pending.partition(b"\n")
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise ConnectionError("the rank's answer is no object")
        return answer


class RankSet:
    """The ranks of one library. Use as a context manager; leaving it ends every process that it started.

    Attributes:
        peer: the library's name here.
        library: name and version that the library reports.
        pids: process of each rank.
    """

    def __init__(self, peer: str, ranks: int, launch: Launch, folder: Path) -> None:
        self.peer = peer
        self.ranks = ranks
        self.launch = launch
        self.library = ""
        self.pids: list[int] = []
        self._log = folder / f"{peer}.log"
        self._path = folder / f"{peer}.sock"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: dict[int, _Link] = {}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            for link in self._links.values():
                link.send({"do": "stop"})
        self._kill(grace=STOP_TIMEOUT if error is None else 0.0)

    def request(self, command: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        """Send `command` to every rank and return their answers, by rank.

        Raises:
            Failure: a rank reported an error, ended, or did not answer within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        try:
            for link in self._links.values():
                link.send(command)
            answers = [self._links[rank].receive(deadline) for rank in range(self.ranks)]
        except TimeoutError:
            raise Failure(f"no answer within {timeout:g} s") from None
        except OSError as error:
            raise Failure(f"a rank's process ended ({error}){self._tail()}") from error
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise Failure(f"rank {rank}: {answer['error']}", usable=True)
        return answers

    def end(self) -> None:
        """End every process at once, without a goodbye."""
        self._kill()

    def _start(self) -> None:
        own = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(self._log.parent)}
        environment = os.environ | self.launch.settings | own
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, self._log.open("wb") as log:
            listener.bind(str(self._path))
            listener.listen(self.ranks)
            for command in self.launch.commands:
                self._processes.append(_spawn(command, environment, log))
            self._accept_all(listener)
        if sorted(self._links) != list(range(self.ranks)):
            raise Failure(f"its ranks call themselves {sorted(self._links)}")

    def _accept_all(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        listener.settimeout(0.2)
        hellos: dict[int, dict[str, Any]] = {}
        while len(hellos) < self.ranks:
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                self._check_starting(deadline, len(hellos))
                continue
            link = _Link(sock)
            hello = link.receive(deadline)
            if hello["size"] != self.ranks:
                sock.close()
                raise Failure(f"its world has {hello['size']} ranks, not {self.ranks}")
            hellos[hello["rank"]] = hello
            self._links[hello["rank"]] = link
        self.library = hellos[0]["library"]
        self.pids = [hellos[rank]["pid"] for rank in sorted(hellos)]

    def _check_starting(self, deadline: float, came: int) -> None:
        for process in self._processes:
            if process.poll() is not None:
                raise Failure(f"did not start: exit status {process.returncode}{self._tail()}")
        if time.monotonic() > deadline:
            raise Failure(f"{came} of {self.ranks} ranks came within {START_TIMEOUT:g} s{self._tail()}")

    def _tail(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f" ({' | '.join(lines[-3:])})" if lines else ""

    def _kill(self, grace: float = 0.0) -> None:
        deadline = time.monotonic() + grace
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for link in self._links.values():
            link.sock.close()  # a rank whose launcher is slow to act ends itself when this closes
        self._links.clear()
        for process in self._processes:
            _end_session(process)
        self._processes.clear()
        self._path.unlink(missing_ok=True)


def _spawn(command: tuple[str, ...], environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    folder = Path(log.name).parent  # not the working folder: a source tree there must not hide an installed package
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End the session that `process` leads: politely, so that a launcher can end its ranks, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3.0)
