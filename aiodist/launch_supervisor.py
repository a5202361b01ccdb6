"""The supervisor behind `aiodist.launch.run_ranks`: one asyncio object that starts, watches and ends the ranks of a launch."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import secrets
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import IO, Any, Final

from aiodist import launch_guard
from aiodist.launch_guard import LAUNCH_ID
from aiodist.launch_output import Relay, Sink, destination
from aiodist.launch_process import Guard, Rank, RankExit, RunResult, Share, signal_name

__all__ = ["HANDLED", "STOPPING", "Supervisor"]

_LEFTOVER_SECONDS: Final = (0.5, 1.0)  # for children of ranks that are gone: to end by themselves, then on SIGTERM
_CLOSE_SECONDS: Final = 0.5  # for the server, and for output nobody reads, once a signal asked for the end
STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals that end a launch."""
_PASSED_ON: Final = (signal.SIGUSR1, signal.SIGUSR2)
HANDLED: Final = (*STOPPING, *_PASSED_ON, signal.SIGTSTP)
"""The signals whose handlers the supervisor replaces while it runs."""


def _ignored(signum: int, frame: object) -> None:
    """Stand in for the loop's handlers between the end of the ranks and the return: a late Ctrl-C changes nothing."""


class Supervisor:
    """Starts the ranks, watches them, ends them. One use; the arguments are those of `run_ranks`."""

    def __init__(
        self,
        command: Sequence[str],
        world_size: int,
        *,
        env: Mapping[str, str],
        job: str,
        port: int,
        page: bool,
        settle: float,
        grace: float,
        stdin: int | IO[Any] | None,
        handle_signals: bool,
        share: Share | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        self._command = list(command)
        self._world_size = world_size
        self._share = share
        self._numbers = range(world_size) if share is None else share.ranks
        self._fds = tuple(fds)
        self._job = job
        self._port = port
        self._page = page
        self._settle = settle
        self._grace = grace
        self._env = dict(env)
        self._stdin = stdin
        self._handle_signals = handle_signals
        self._token = secrets.token_hex(16) if share is None else share.token
        self._launch_id = f"L{secrets.token_hex(16)}"
        self._ranks: list[Rank] = []
        self._changed = asyncio.Event()
        self._sinks: list[Sink] = []
        self._sinks_open = 0
        self._failure: RankExit | None = None
        self._suspects: set[int] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signal: int | None = None
        self._interrupted = False  # by a signal that came before any failure
        self._ending = False

    async def run(self, stdout: IO[Any], stderr: IO[Any]) -> RunResult:
        """Run the ranks to their end, with their output going to `stdout` and `stderr`."""
        self._loop = asyncio.get_running_loop()
        installed = self._install_handlers()
        out, self._err = self._open_sinks(stdout, stderr)
        guard = Guard(self._launch_id)
        try:
            async with self._rendezvous() as address:
                await self._start_all(address, guard, out)
                await self._watch()
                await self._sweep()
                await self._finish_output()
        finally:
            launch_guard.end_all(self._launch_id, self._sessions(), 2.0)
            self._reap()
            await self._close_sinks()
            guard.close()
            for signum in installed:
                asyncio.get_running_loop().remove_signal_handler(signum)
                signal.signal(signum, _ignored)
        ends: list[RankExit | None] = [rank.exit for rank in self._ranks]
        ends += [None] * (len(self._numbers) - len(ends))
        return RunResult(self._exit_code(), self._failure, tuple(ends))

    def _exit_code(self) -> int:
        if self._interrupted:
            return 128 + (self._signal or 0)
        return self._failure.exit_code if self._failure else 0

    # Starting

    @contextlib.asynccontextmanager
    async def _rendezvous(self) -> AsyncIterator[str]:
        if self._share is not None:
            yield self._share.rendezvous
            return
        from aiodist.rendezvous.server import RendezvousServer

        server = RendezvousServer(host="127.0.0.1", port=self._port, token=self._token)
        await server.start()
        if self._page:
            self._say(f"watch the job at {server.page_link(self._job)}")
        try:
            yield server.address
        finally:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.aclose(), _CLOSE_SECONDS if self._signal else 2.0)

    async def _start_all(self, address: str, guard: Guard, out: Sink) -> None:
        for local_rank, rank in enumerate(self._numbers):
            if self._signal is not None or self._failure is not None:
                return
            started = self._start(rank, local_rank, address, out)
            guard.tell(str(started.process.pid))
            await asyncio.sleep(0)

    def _start(self, rank: int, local_rank: int, address: str, out: Sink) -> Rank:
        env = {name: value for name, value in self._env.items() if name != "AIODIST_TOKEN"} | {
            "AIODIST_RENDEZVOUS": address,
            "AIODIST_RANK": str(rank),
            "AIODIST_WORLD_SIZE": str(self._world_size),
            "AIODIST_LOCAL_RANK": str(local_rank),
            "AIODIST_JOB": self._job,
            **({"AIODIST_TOKEN": self._token} if self._token else {}),
            "PYTHONUNBUFFERED": "1",
            LAUNCH_ID: f"{self._env.get(LAUNCH_ID, '')}/{self._launch_id}",
        }
        process = subprocess.Popen(
            self._command,
            stdin=self._stdin if local_rank == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=env,
            start_new_session=True,
            pass_fds=self._fds,
        )
        started = Rank(rank, process)
        self._ranks.append(started)
        for pipe, sink in ((process.stdout, out), (process.stderr, self._err)):
            assert pipe is not None
            started.relays.append(Relay(pipe, f"[{rank}] ", sink, self._changed.set))
        asyncio.get_running_loop().add_reader(started.pidfd, self._on_exit, started)
        return started

    # Watching

    async def _until(self, done: Callable[[], object], seconds: float | None = None) -> bool:
        """Wait until `done` gives true; False when `seconds` passed first."""
        loop = asyncio.get_running_loop()
        deadline = None if seconds is None else loop.time() + seconds
        while not done():
            if deadline is not None and loop.time() >= deadline:
                return False
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if deadline is None else deadline - loop.time())
        return True

    def _alive(self) -> list[Rank]:
        return [rank for rank in self._ranks if rank.exit is None]

    def _sessions(self) -> set[int]:
        return {rank.process.pid for rank in self._ranks}

    def _say(self, text: str) -> None:
        self._err.lines(self, f"aiodist: {text}\n".encode())

    def _on_exit(self, rank: Rank) -> None:
        asyncio.get_running_loop().remove_reader(rank.pidfd)
        end = rank.collect()
        for relay in rank.relays:
            relay.drain()  # what it printed comes before what is said about it
        if rank.rank in self._suspects and end.signal is not None:
            self._failure, self._suspects = end, set()
            self._say(str(end))
        elif end.exit_code != 0 and not self._ending:
            self._say(str(end))
            if self._failure is None:
                self._failure = end
                # A killed process with much memory becomes waitable late: a peer that died of its loss may be seen first.
                self._suspects = {other.rank for other in self._alive() if launch_guard.dying_of_signal(other.process.pid)}
        self._changed.set()

    async def _watch(self) -> None:
        await self._until(lambda: not self._alive() or self._failure or self._signal)
        if self._signal is None:
            await self._until(lambda: not self._alive() or self._signal, self._settle)
        if self._alive():
            names = _listed(rank.rank for rank in self._alive())
            reason = signal_name(self._signal) if self._signal else f"rank {self._failure.rank} failed" if self._failure else ""
            self._say(f"{reason}: ending {names}")
            await self._end()

    async def _end(self) -> None:
        """Pass on the signal, or SIGTERM, to all processes; kill what is left after the grace time."""
        self._ending = True
        signum = signal.SIGTERM if self._signal in (None, signal.SIGPIPE) else self._signal
        plan = [(signum, self._grace)]
        if signum == signal.SIGINT:
            plan = [(signum, self._grace * 5 / 6), (signal.SIGTERM, self._grace / 6)]
        for number, seconds in plan:
            launch_guard.signal_all(number, self._launch_id, self._sessions())
            if await self._until(lambda: not self._alive(), seconds):
                return
        self._say(f"killing {_listed(rank.rank for rank in self._alive())}, still there after {self._grace:g} s")
        for _ in range(20):
            launch_guard.signal_all(signal.SIGKILL, self._launch_id, self._sessions())
            if await self._until(lambda: not self._alive(), 0.1):
                return

    async def _sweep(self) -> None:
        """End the children that ranks left behind."""
        for seconds, signum in zip(_LEFTOVER_SECONDS, (signal.SIGTERM, signal.SIGKILL), strict=True):
            if await self._all_gone(seconds):
                return
            if signum == signal.SIGTERM:
                self._say(f"ending {len(self._members())} process(es) that ranks left behind")
            launch_guard.signal_all(signum, self._launch_id, self._sessions())

    def _members(self) -> dict[int, int]:
        return launch_guard.members(self._launch_id, self._sessions())

    async def _all_gone(self, seconds: float) -> bool:
        deadline = asyncio.get_running_loop().time() + seconds
        while self._members():
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    def _reap(self) -> None:
        for rank in self._ranks:
            for relay in rank.relays:
                relay.close()
            if rank.exit is None:
                asyncio.get_running_loop().remove_reader(rank.pidfd)
                os.close(rank.pidfd)
            rank.process.poll()

    # Signals

    def _install_handlers(self) -> list[int]:
        if not self._handle_signals:
            return []
        loop = asyncio.get_running_loop()
        handlers: dict[int, Callable[[], None]] = {signum: functools.partial(self._on_signal, signum) for signum in STOPPING}
        handlers |= {signum: functools.partial(self._pass_on, signum) for signum in _PASSED_ON}
        handlers[signal.SIGTSTP] = self._pause
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
            del handlers[signal.SIGHUP]
        for signum, handler in handlers.items():
            loop.add_signal_handler(signum, handler)
        return list(handlers)

    def stop(self, signum: int) -> None:
        """End the ranks as by this signal; from any thread, while `run` runs in another."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: all is over
                self._loop.call_soon_threadsafe(self._on_signal, signum)

    def _on_signal(self, signum: int) -> None:
        if self._signal is None:
            self._signal = signum
            self._interrupted = self._failure is None
            self._changed.set()

    def _pass_on(self, signum: int) -> None:
        for rank in self._alive():
            signal.pidfd_send_signal(rank.pidfd, signum)

    def _pause(self) -> None:
        launch_guard.signal_all(signal.SIGSTOP, self._launch_id, self._sessions())
        os.kill(os.getpid(), signal.SIGSTOP)
        launch_guard.signal_all(signal.SIGCONT, self._launch_id, self._sessions())

    # Output

    def _open_sinks(self, stdout: IO[Any], stderr: IO[Any]) -> tuple[Sink, Sink]:
        """Return the sinks of stdout and stderr: one when both are the same file, so that lines do not mix."""
        loop = asyncio.get_running_loop()

        def ended() -> None:
            self._sinks_open -= 1
            self._changed.set()

        def failed(error: OSError) -> None:
            loop.call_soon_threadsafe(self._on_lost_output, error)

        def later() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(ended)

        by_file: dict[object, Sink] = {}
        pair = []
        for stream in (stdout, stderr):
            key, write, columns = destination(stream)
            if key not in by_file:
                by_file[key] = Sink(write, columns=columns, on_error=failed if stream is stdout else None, on_end=later)
            pair.append(by_file[key])
        self._sinks = list(by_file.values())
        self._sinks_open = len(self._sinks)
        return pair[0], pair[1]

    def _on_lost_output(self, error: OSError) -> None:
        if error.errno == errno.EPIPE:  # as `command | head` ends any other program
            self._on_signal(signal.SIGPIPE)
        else:
            self._say(f"can not write the ranks' output: {error}")

    async def _finish_output(self) -> None:
        """Wait for the end of the ranks' streams; a process that escaped may hold one open for ever."""
        relays = [relay for rank in self._ranks for relay in rank.relays]
        while not await self._until(lambda: all(relay.ended for relay in relays), 1.0):
            if not any(sink.full for sink in self._sinks):
                break
        for relay in relays:
            relay.drain()

    async def _close_sinks(self) -> None:
        for sink in self._sinks:
            sink.close()
        if not await self._until(lambda: self._sinks_open == 0 or self._signal):
            return
        await self._until(lambda: self._sinks_open == 0, _CLOSE_SECONDS)


def _listed(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    return f"rank {numbers[0]}" if len(numbers) == 1 else "ranks " + ", ".join(map(str, numbers))
