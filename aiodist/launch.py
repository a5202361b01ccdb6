"""Starting the ranks of a world on this host, and seeing them to their end.

`run_ranks` hosts the rendezvous in the calling process, starts one process per rank in a session of its own, prefixes what they print,
and returns when all of them and all of their children are gone:

- The first rank that fails decides the exit code. The others get `SETTLE_SECONDS` to report their own errors, then SIGTERM, and SIGKILL
  after a grace time.
- SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to every process of every rank, once: a second Ctrl-C does not interrupt the
  clean-up of the ranks. All is gone within 5 s. SIGUSR1 and SIGUSR2 are passed on to the ranks themselves, Ctrl-Z stops all of them.
- When the launching process is killed, a guard process ends the ranks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Final

from aiodist.launch_process import RankExit, RunResult, Share
from aiodist.launch_supervisor import HANDLED, STOPPING, Supervisor

__all__ = ["GRACE_SECONDS", "SETTLE_SECONDS", "RankExit", "RunResult", "Share", "run_ranks"]

SETTLE_SECONDS: Final = 2.0
"""Seconds the other ranks get after a failure, to notice it and print their own errors, before SIGTERM."""

GRACE_SECONDS: Final = 3.0
"""Seconds from the first signal to SIGKILL."""


def run_ranks(
    command: Sequence[str],
    world_size: int,
    *,
    env: Mapping[str, str] | None = None,
    job: str | None = None,
    port: int = 0,
    page: bool = False,
    settle: float = SETTLE_SECONDS,
    grace: float = GRACE_SECONDS,
    stdin: int | IO[Any] | None = subprocess.DEVNULL,
    stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None,
    share: Share | None = None,
    fds: Sequence[int] = (),
) -> RunResult:
    """Run `command` once per rank on this host and return when every process of it is gone.

    Blocks the calling thread, also where an event loop runs in it. Signals are handled when that is the main thread. The rendezvous
    listens on the loopback interface with a random token; ranks find it by the AIODIST_* variables. Python ranks run unbuffered.

    Args:
        command: Program and arguments, the same for all ranks.
        world_size: Number of ranks.
        env: Environment of the ranks, to which the AIODIST_* variables are added; None for this process's.
        job: Name of the job; None for a random one.
        port: Port on which the rendezvous listens; 0 for one that is free.
        page: Say the link to the page that shows the job live.
        settle: Seconds the other ranks get after a failure before SIGTERM.
        grace: Seconds from the first signal to SIGKILL.
        stdin: Standard input of rank 0 (None: this process's); the others read from /dev/null.
        stdout: Where the ranks' output goes; None for ``sys.stdout``.
        stderr: Where their errors and the launcher's own messages go; None for ``sys.stderr``.
        share: The ranks to start where that is not the whole world, and the rendezvous, which is not hosted here then.
        fds: Descriptors that the ranks inherit, under the same numbers.

    Returns:
        The exit code, the first failure and the end of each rank.

    Raises:
        ValueError: `world_size` is below 1, `command` is empty, or `port` is no port.
        OSError: the port is in use, and nothing was started; or the command could not be started, and the ranks that were have been
            ended.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    if not command:
        raise ValueError("command is empty")
    main_thread = threading.current_thread() is threading.main_thread()
    supervisor = Supervisor(
        command,
        world_size,
        env=os.environ if env is None else env,
        job=job or f"run-{secrets.token_hex(4)}",
        port=port,
        page=page,
        settle=settle,
        grace=grace,
        stdin=stdin,
        handle_signals=main_thread and not _has_loop(),
        share=share,
        fds=fds,
    )
    with _handlers_kept() if main_thread else contextlib.nullcontext():
        return _run(supervisor, main_thread, stdout or sys.stdout, stderr or sys.stderr)


def _run(supervisor: Supervisor, main_thread: bool, stdout: IO[Any], stderr: IO[Any]) -> RunResult:
    if not _has_loop():
        return asyncio.run(supervisor.run(stdout, stderr))
    # A thread runs one loop at a time, and this one's is held up until the ranks have ended.
    if main_thread:
        for signum in STOPPING:
            signal.signal(signum, lambda number, frame: supervisor.stop(number))
    with concurrent.futures.ThreadPoolExecutor(1, "aiodist-launch") as pool:
        return pool.submit(asyncio.run, supervisor.run(stdout, stderr)).result()


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restore this process's signal handlers, which the loop replaces by the defaults."""
    before = {signum: signal.getsignal(signum) for signum in HANDLED}
    try:
        yield
    finally:
        for signum, handler in before.items():
            if handler is not None:  # None: set by C code, which Python can not put back
                signal.signal(signum, handler)
