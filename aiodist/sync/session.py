"""The world of blocking code: opened and closed on a thread with a loop of its own, so that callers need none and may be in one."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import multiprocessing
import multiprocessing.util
import os
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiodist.config import Settings
from aiodist.group import Group
from aiodist.rendezvous.sockets import Address
from aiodist.rendezvous.thread import ControlThread
from aiodist.sync.devices import get_device_count_by_fork
from aiodist.world import init

if TYPE_CHECKING:  # loaded where this process serves
    from aiodist.rendezvous.server import RendezvousServer

__all__ = ["Session", "check_arguments", "check_device", "run"]

T = TypeVar("T")

_PROBE_SECONDS: Final = 1.0
# How long rank 0 keeps serving ranks that have not left, once it is done itself, and where an exception ended it.
_LINGER_SECONDS: Final = 10.0
_FAILED_LINGER_SECONDS: Final = 2.0


class _Portal:
    """The one thread that runs coroutines for the blocking callers of this process, made when it is needed, and what it serves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: ControlThread | None = None
        self._pid = 0
        self._servers: dict[tuple[str, int], RendezvousServer] = {}

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; an interrupt cancels it."""
        future = self._present().submit(coro)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def serve(self, host: str, port: int, token: str | None) -> RendezvousServer | None:
        """Return the server of this process there, a new one where nobody serves yet; None where another process does or will."""
        self._present()  # a forked child has no servers yet
        server = self._servers.get((host, port))
        if server is None and not _is_served(host, port):
            server = self.run(_serve(host, port, token))
            if server is not None:
                self._servers[host, port] = server
        return server

    def end(self) -> None:
        """Serve until the members have left, for a while; then end all."""
        thread, self._thread = self._thread, None
        if thread is not None and self._pid == os.getpid():
            with contextlib.suppress(Exception):  # the process ends, so nobody could be told
                linger = _LINGER_SECONDS if _fatal_error() is None else _FAILED_LINGER_SECONDS
                thread.submit(_desert(list(self._servers.values()), linger)).result()
            thread.close()

    def _present(self) -> ControlThread:
        with self._lock:
            if self._thread is None or self._pid != os.getpid():
                self._thread, self._pid, self._servers = ControlThread(), os.getpid(), {}
                _at_exit(self.end, 90)
            return self._thread


_portal = _Portal()
run = _portal.run


def _at_exit(function: Callable[[], None], priority: int) -> None:
    """Call a function at the end of this process: before those that were registered earlier, so with falling priority."""
    atexit.register(function)
    if multiprocessing.parent_process() is not None:  # in such a process nobody calls what atexit knows
        multiprocessing.util.Finalize(None, function, exitpriority=priority)


class Session:
    """A world that blocking code opened.

    It is closed by `close`, or when the process ends: then ranks that still wait are told of the error that ended the process. The
    rendezvous that rank 0 serves, where nobody else does, lasts until its process ends, since ranks may meet there for another world.

    Args:
        host: Name or address of the rendezvous.
        port: Its port.
        world_size: Number of ranks.
        rank: This rank.
        backend: As `aiodist.init` takes it.
    """

    def __init__(self, host: str, port: int, world_size: int, rank: int, backend: str) -> None:
        token = Settings.from_env().token
        address = str(Address("http", host, port))
        opening = init(rendezvous=address, rank=rank, world_size=world_size, device="cpu", backend=backend)
        self._pid = os.getpid()
        self.server = _portal.serve(host, port, token) if rank == 0 else None
        self.world: Group = run(_awaited(opening))
        _at_exit(self._close_at_exit, 100)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the world, at once with `error` as the reason or else after the calls in flight; doing it again does nothing."""
        atexit.unregister(self._close_at_exit)
        if not self.world.closed:
            run(self.world.__aexit__(None if error is None else type(error), error, None))

    def _close_at_exit(self) -> None:
        if self._pid == os.getpid():
            with contextlib.suppress(Exception):  # nobody is left who could be told
                self.close(_fatal_error())


def check_arguments(master_ip: Any, port: Any, world_size: Any, rank: Any, device: Any, backend: Any) -> None:
    """Refuse arguments of `init_process_group` that have the wrong type or are out of range, by TypeError and ValueError."""
    for name, value in (("master_ip", master_ip), ("backend", backend)):
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a string, not {type(value).__name__}")
    for name, value in (("port", port), ("world_size", world_size), ("rank", rank), ("device", device)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number, not {type(value).__name__}")
    if not master_ip:
        raise ValueError("master_ip is empty")
    if not 0 < port < 65536:
        raise ValueError(f"port must be from 1 to 65535, not {port}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to {world_size - 1}, not {rank}")
    if device < 0:
        raise ValueError(f"device must not be negative, not {device}")


def check_device(device_type: Any, backend: str) -> None:
    """Refuse what only GPUs can do, by a ValueError that says what works."""
    if device_type not in ("auto", "cpu", "gpu", "cuda"):
        raise ValueError(f"device_type must be 'auto', 'cpu' or 'gpu', not {device_type!r}")
    if backend == "ucx":
        raise ValueError("backend 'ucx' is not built yet: use 'auto' or 'shm'")
    if backend != "nccl" and device_type in ("auto", "cpu"):
        return
    wanted = f"backend {backend!r}" if backend == "nccl" else f"device_type {device_type!r}"
    lack = "" if get_device_count_by_fork("gpu") else ", and this machine has no GPU that works"
    raise ValueError(
        f"{wanted} needs CUDA, which is not built yet{lack}: for arrays on the CPU use backend='auto' or 'shm' (or 'ucx', once it is built)"
    )


async def _awaited(opening: Any) -> Group:
    world: Group = await opening
    return world


def _is_served(host: str, port: int) -> bool:
    """Tell whether somebody listens there: then this process must not, perhaps at another address of the same name."""
    try:
        socket.create_connection((host, port), _PROBE_SECONDS).close()
    except OSError:
        return False
    return True


async def _serve(host: str, port: int, token: str | None) -> RendezvousServer | None:
    """Serve the rendezvous of this job; None where the host is another one, whose server is not up yet."""
    from aiodist.rendezvous.server import RendezvousServer

    server = RendezvousServer(host, port, token=token)
    try:
        await server.start()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    except ValueError:
        raise ValueError(
            f"master_ip {host!r} lets other hosts in: set AIODIST_TOKEN to the same secret on all ranks, or use '127.0.0.1'"
        ) from None
    return server


def _fatal_error() -> BaseException | None:
    """Return the exception that ends this process, if one does; at an interactive prompt none did."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


async def _desert(servers: Sequence[RendezvousServer], seconds: float) -> None:
    """Close servers, once their members have left."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            for server in servers:
                await server.deserted()
    for server in servers:
        await server.aclose()
