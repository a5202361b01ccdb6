"""Run the ranks of a group: in this process, or as processes that are kept for the next test."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Final

import aiodist
from aiodist.rendezvous.server import RendezvousServer
from support.worker import Answer, Note, Task

RankFunction = Callable[..., Awaitable[Any]]
DEADLINE: Final = 45.0
"""Seconds after which ranks that have not answered are taken as hung."""
FORBIDDEN_TEXTS: Final = ("Task was destroyed", "never retrieved", "never awaited", "leaked", "Event loop is closed", "Fatal Python error")
_MOST_PROCESSES: Final = 12
_numbers = itertools.count()


class RanksFailed(AssertionError):
    """Raised when ranks raised, died or hung; the text holds what each of them had to say."""


async def gather_ranks(bodies: Iterable[Awaitable[Any]], deadline: float = DEADLINE, grace: float = 2.0) -> list[Any]:
    """Await one body per rank and return their values; `grace` seconds after a failure the others are given up.

    Raises:
        RanksFailed: a rank hung.
        BaseException: what a rank raised, with a note that names the rank.
    """
    tasks = [asyncio.ensure_future(body) for body in bodies]
    try:
        await asyncio.wait(tasks, timeout=deadline, return_when=asyncio.FIRST_EXCEPTION)
        if any(task.done() and task.exception() for task in tasks):
            await asyncio.wait(tasks, timeout=grace)
        return _values(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _values(tasks: Sequence[asyncio.Future[Any]]) -> list[Any]:
    failures = {rank: error for rank, task in enumerate(tasks) if task.done() and (error := task.exception()) is not None}
    pending = [rank for rank, task in enumerate(tasks) if not task.done()]
    for rank, error in failures.items():
        rest = "".join(f"; rank {other}: {text!r}" for other, text in failures.items() if other != rank)
        error.add_note(f"raised on rank {rank} of {len(tasks)}; still waiting: {pending}{rest}")
        raise error
    if pending:
        raise RanksFailed(f"ranks {pending} of {len(tasks)} hung")
    return [task.result() for task in tasks]


async def run_local(size: int, function: RankFunction, *args: Any, deadline: float = DEADLINE) -> list[Any]:
    """Run ``function(group, *args)`` once per rank of a local world and return the values in rank order."""
    async with aiodist.local_world(size) as groups:
        return await gather_ranks((function(group, *args) for group in groups), deadline)


class ServerThread:
    """A rendezvous service on a thread of this process."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-rendezvous", daemon=True)
        self._server: RendezvousServer | None = None

    def __enter__(self) -> ServerThread:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(20)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._server is not None:
            asyncio.run_coroutine_threadsafe(self._server.aclose(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def _start(self) -> None:
        self._server = RendezvousServer(host="127.0.0.1", port=0, token=self.token)
        await self._server.start()
        self.address = self._server.address

    def environment(self, rank: int, size: int, job: str, **more: str) -> dict[str, str]:
        """Return the variables of one rank's process; it imports from where this process does."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("AIODIST_")}
        paths = [os.path.abspath(path) for path in sys.path]
        return clean | {
            "AIODIST_RENDEZVOUS": self.address,
            "AIODIST_RANK": str(rank),
            "AIODIST_WORLD_SIZE": str(size),
            "AIODIST_JOB": job,
            "AIODIST_TOKEN": self.token,
            "AIODIST_TIMEOUT": "30",
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
            **more,
        }


def new_job() -> str:
    """Return a name that no other job of this session has."""
    return f"test-{os.getpid()}-{next(_numbers)}"


@dataclass
class Outcome:
    """How a rank answered: an `Answer`, or None for one that died (then `status` is its exit status) or hung."""

    answer: Answer | None
    status: int | None
    notes: list[Any]

    @property
    def failed(self) -> bool:
        return self.answer is None or self.answer.error is not None


class RankPool:
    """`size` processes that form a world and run one function after another in it."""

    def __init__(self, server: ServerThread, size: int, **environment: str) -> None:
        self.size = size
        self.job: str | None = new_job()
        self.broken = False
        self._errors = [tempfile.TemporaryFile() for _ in range(size)]  # noqa: SIM115 - closed in close()
        self._connections: list[Connection[Any, Any]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(size):
            self._spawn(rank, server.environment(rank, size, str(self.job), **environment))
        self._outcomes = [Outcome(None, None, []) for _ in range(size)]

    def _spawn(self, rank: int, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        code = f"from support.worker import main; main({theirs.fileno()})"
        command = [sys.executable, "-P", "-X", "faulthandler", "-c", code]
        with theirs:
            process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stderr=self._errors[rank])
        self.processes.append(process)
        self._connections.append(Connection(ours.detach()))

    def run(self, function: RankFunction, *args: Any, fresh: bool = False, deadline: float = DEADLINE) -> list[Any]:
        """Run ``function(world, *args)`` on every rank and return the values in rank order.

        Args:
            function: A module-level ``async def``.
            args: Further arguments, the same for all ranks.
            fresh: Run in a new world of its own, because the function breaks it.
            deadline: Seconds after which a rank counts as hung.

        Raises:
            RanksFailed: a rank raised, died or hung; the pool is then of no further use.
        """
        outcomes = self.outcomes(function, *args, fresh=fresh, deadline=deadline)
        if any(outcome.failed for outcome in outcomes):
            self.broken = True
            raise RanksFailed(self._report(outcomes))
        return [outcome.answer.value for outcome in outcomes if outcome.answer is not None]

    def outcomes(self, function: RankFunction, *args: Any, fresh: bool = False, deadline: float = DEADLINE) -> list[Outcome]:
        """Run like `run` and return how each rank ended, whatever it was."""
        self.start(function, *args, fresh=fresh)
        return self.finish(deadline)

    def start(self, function: RankFunction, *args: Any, fresh: bool = False, world: bool = True) -> None:
        """Begin a function on every rank; `finish` must follow. Without `world` it is called with None for the group."""
        if fresh or (world and self.job is None):
            self.job = new_job()
        self._outcomes = [Outcome(None, None, []) for _ in range(self.size)]
        for connection in self._connections:
            connection.send(Task(self.job if world else None, function, args))
        if fresh or not world:
            self.job = None

    def finish(self, deadline: float = DEADLINE) -> list[Outcome]:
        """Wait until every rank has answered or died, or until the deadline."""
        self._collect(deadline, lambda outcome: outcome.answer is not None or outcome.status is not None)
        if any(outcome.answer is None for outcome in self._outcomes):
            self.broken = True
            self._dump_stacks()
        return self._outcomes

    def wait_notes(self, count: int = 1, deadline: float = DEADLINE) -> None:
        """Wait until every rank has sent `count` notes (or has ended)."""
        self._collect(deadline, lambda outcome: len(outcome.notes) >= count or outcome.answer is not None or outcome.status is not None)

    def _collect(self, deadline: float, enough: Callable[[Outcome], bool]) -> None:
        end = time.monotonic() + deadline
        while not all(enough(outcome) for outcome in self._outcomes):
            left = [rank for rank in range(self.size) if self._outcomes[rank].answer is None and self._outcomes[rank].status is None]
            ready = wait([self._connections[rank] for rank in left], max(0.0, end - time.monotonic()))
            if not ready:
                return
            for rank in left:
                if self._connections[rank] in ready:
                    self._read(rank)

    def _read(self, rank: int) -> None:
        try:
            message = self._connections[rank].recv()
        except (EOFError, ConnectionError):
            self._outcomes[rank].status = self.processes[rank].wait(10)
            return
        if isinstance(message, Note):
            self._outcomes[rank].notes.append(message.value)
        else:
            self._outcomes[rank].answer = message

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank's process."""
        self.processes[rank].send_signal(number)

    def notes(self, rank: int) -> list[Any]:
        """Return what a rank has noted since `start`."""
        return self._outcomes[rank].notes

    def errors(self, rank: int) -> str:
        """Return what a rank wrote to its standard error so far."""
        self._errors[rank].seek(0)
        return self._errors[rank].read().decode(errors="replace")

    def _dump_stacks(self) -> None:
        for process, outcome in zip(self.processes, self._outcomes, strict=True):
            if outcome.answer is None and process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)

    def _report(self, outcomes: list[Outcome]) -> str:
        lines = []
        for rank, outcome in enumerate(outcomes):
            if outcome.answer is not None and outcome.answer.error is None:
                lines.append(f"rank {rank}: fine")
            elif outcome.answer is not None:
                lines.append(f"rank {rank}: {outcome.answer.error}\n{outcome.answer.trace}")
            else:
                state = "hung" if outcome.status is None else f"ended with {outcome.status}"
                lines.append(f"rank {rank}: {state}\n{self.errors(rank)[-6000:]}")
        return "\n".join(lines)

    def close(self) -> None:
        """End the processes; those that do not end by themselves are killed.

        Raises:
            AssertionError: a rank that should have ended by itself did not, or wrote one of the texts that must never appear.
        """
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        stuck = [rank for rank in range(self.size) if not self._ended(rank)]
        for connection in self._connections:
            connection.close()
        texts = [self.errors(rank) for rank in range(self.size)]
        for stream in self._errors:
            stream.close()
        if not self.broken:
            assert not stuck, f"ranks {stuck} of {self.size} did not end"
            assert_clean(*texts)

    def _ended(self, rank: int) -> bool:
        process = self.processes[rank]
        try:
            process.wait(0.1 if self.broken else 10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
            return False
        return True


def assert_clean(*texts: str) -> None:
    """Fail if a standard error holds a text that only a fault of the library leaves there."""
    for text in texts:
        assert not any(fragment in text for fragment in FORBIDDEN_TEXTS), text


class Pools:
    """The pools of a test session, by size, kept until too many processes are alive."""

    def __init__(self, server: ServerThread) -> None:
        self.server = server
        self._pools: dict[int, RankPool] = {}

    def get(self, size: int) -> RankPool:
        """Return a pool of `size` ranks that no test has broken."""
        pool = self._pools.pop(size, None)
        if pool is not None and pool.broken:
            pool.close()
            pool = None
        while self._pools and size + sum(other.size for other in self._pools.values()) > _MOST_PROCESSES:
            self._pools.pop(next(iter(self._pools))).close()
        self._pools[size] = pool or RankPool(self.server, size)
        return self._pools[size]

    def close(self) -> None:
        """End all processes."""
        while self._pools:
            self._pools.popitem()[1].close()
