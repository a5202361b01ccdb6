"""The processes of one launch: finding them, signalling them, and ending them when the launcher itself is killed.

Run as a script (by path, so that the package is not imported) this file is the *guard*: a small process that reads from the
launcher what belongs to the launch, and ends all of it when the pipe breaks because the launcher was killed.

A process belongs to a launch when it is in the session of one of its ranks, or carries the launch's id in its environment. The second
finds children that moved to a session of their own; an id lists the ids of the launches around it, so it works nested.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection
from typing import Final

__all__ = ["LAUNCH_ID", "dying_of_signal", "end_all", "members", "signal_all"]

LAUNCH_ID: Final = "AIODIST_LAUNCH_ID"
"""The variable that carries the id to every process of a launch."""

_PF_SIGNALED: Final = 0x400  # task flag of the kernel (include/linux/sched.h): killed by a signal
_GUARD_SECONDS: Final = 10.0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; the name before them may hold spaces and brackets."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _session(pid: int, launch_id: str, sessions: Collection[int]) -> int | None:
    """Return the session of `pid` when it is alive and of this launch, else None."""
    try:
        fields = _stat(pid)
        if fields[0] in "ZX":
            return None
        session = int(fields[3])
        if session in sessions:
            return session
        with open(f"/proc/{pid}/environ", "rb") as file:
            return session if launch_id.encode() in file.read() else None
    except OSError:  # gone, or another user's
        return None


def members(launch_id: str, sessions: Collection[int]) -> dict[int, int]:
    """Return the live processes of a launch, as pid to session; zombies do not count."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            session = _session(int(name), launch_id, sessions)
            if session is not None:
                found[int(name)] = session
    return found


def signal_all(signum: int, launch_id: str, sessions: Collection[int]) -> None:
    """Send `signum` to every process of a launch, stopped ones included."""
    for pid in members(launch_id, sessions):
        # The pid may have been taken over since; a pidfd names one process, so look again once it is held.
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            try:
                if _session(pid, launch_id, sessions) is not None:
                    signal.pidfd_send_signal(pidfd, signum)
                    if signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            finally:
                os.close(pidfd)


def end_all(launch_id: str, sessions: Collection[int], seconds: float) -> bool:
    """Kill every process of a launch until none is left; False when some still are after `seconds`."""
    deadline = time.monotonic() + seconds
    while members(launch_id, sessions):
        if time.monotonic() > deadline:
            return False
        signal_all(signal.SIGKILL, launch_id, sessions)
        time.sleep(0.01)
    return True


def dying_of_signal(pid: int) -> bool:
    """Whether the kernel is taking `pid` down after a fatal signal (which takes long for a process with much memory)."""
    try:
        return bool(int(_stat(pid)[6]) & _PF_SIGNALED)
    except (OSError, ValueError, IndexError):
        return False


def _guard() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(signum, signal.SIG_IGN)
    os.chdir("/")
    launch_id = sys.stdin.readline().strip()
    if not launch_id:  # an empty id would match every process
        return
    sessions: set[int] = set()
    for line in sys.stdin:
        if line.strip() == "done":
            return
        sessions.add(int(line))
    for pause in (0.0, 0.2):  # twice: a rank that was between fork and exec shows its id only now
        time.sleep(pause)
        end_all(launch_id, sessions, _GUARD_SECONDS)


if __name__ == "__main__":
    _guard()
