"""Running a function on several ranks, each a process of its own: the `launcher` decorator."""

from __future__ import annotations

import functools
import secrets
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final, NoReturn

from aiodist.config import Settings
from aiodist.errors import RankFailedError
from aiodist.launch import RunResult, Share, run_ranks
from aiodist.launch_process import signal_name
from aiodist.rendezvous.sockets import Address
from aiodist.sync.devices import get_device_count_by_fork
from aiodist.sync.launched import Place
from aiodist.sync.parcel import Call, Outcome, memory, put, take

__all__ = ["Launcher", "launcher"]

_LINGER_SECONDS: Final = 5.0  # for the goodbyes of ranks on other machines, which have all come to the last barrier
_DEVICE_TYPES: Final = ("auto", "cpu", "cuda", "gpu", "xpu")


def launcher(
    func: Callable[..., Any] | None = None,
    n_gpus: int | None = None,
    world_size: int | None = None,
    rank_start: int = 0,
    master_ip: str = "localhost",
    port: int = 0,
    device_type: str = "auto",
    backend: str = "auto",
) -> Callable[..., Any]:
    """Let a function run on ranks: ``@launcher``, ``@launcher(n_gpus=2)``, ``launcher(function, n_gpus=2)``.

    Calling the result starts `n_gpus` fresh Python processes, opens the world in each (`init_process_group`), calls the function there
    with the same arguments, and returns the list of what it returned, in the order of ranks. That blocks until all of them and all their
    children are gone. The function may be an ``async def``: each rank runs it by ``asyncio.run``.

    - The first rank that fails ends the rest: they get 2 s to report their own errors, then SIGTERM. Its exception is raised here, with its
      traceback as the cause. What the ranks print comes out here, each line with its rank before it.
    - Ctrl-C ends all ranks and raises KeyboardInterrupt, where the main thread launched them. When this process is killed, its ranks end.
    - The processes are no forks. A function of an imported module is imported there; one of the script itself or of a notebook, or one that
      was made inside another function, travels by value with the globals it uses. Arguments and results are pickled (by cloudpickle), in
      memory that no other process finds.
    - Several machines: call it on each with the same `world_size`, `master_ip` and `port`, and the `rank_start` of that machine. The one
      with rank 0 serves the rendezvous until the functions of all ranks have ended. Worlds do not span machines yet: until they do, these
      are several launchers on one machine.

    Args:
        func: The function.
        n_gpus: Ranks to start on this machine; None for one on each device of `device_type`.
        world_size: Ranks of the job; None for `n_gpus`.
        rank_start: The first rank of this machine.
        master_ip: Name or address of the machine of rank 0. For other machines AIODIST_TOKEN must be the same secret on all of them.
        port: Port of the rendezvous; 0 takes a free one, where all ranks are on this machine.
        device_type: As `init_process_group` takes it (``xpu`` is ``auto``). It is what `n_gpus` counts unless that is given: GPUs, or with
            ``cpu`` usable cores; with ``auto`` GPUs where there are any and else cores.
        backend: As `init_process_group` takes it.

    Returns:
        What to call, a `Launcher`; without `func` a decorator that makes one.

    Raises:
        TypeError, ValueError: an argument is wrong.
        RankFailedError: from the call, where a rank was killed, ended its process, or raised what can not be pickled; the text holds its
            traceback. Any other exception of a rank is raised as it is.
        RendezvousError, OSError: from the call, where the rendezvous can not be served or reached.
    """
    make = functools.partial(
        Launcher,
        n_gpus=n_gpus,
        world_size=world_size,
        rank_start=rank_start,
        master_ip=master_ip,
        port=port,
        device_type=device_type,
        backend=backend,
    )
    return make if func is None else make(func)


class Launcher:
    """A function that runs on ranks when it is called; see `launcher`."""

    def __init__(
        self,
        func: Callable[..., Any],
        *,
        n_gpus: int | None,
        world_size: int | None,
        rank_start: int,
        master_ip: str,
        port: int,
        device_type: str,
        backend: str,
    ) -> None:
        if not callable(func):
            raise TypeError(f"func must be a function, not {type(func).__name__}")
        for name, value in (("master_ip", master_ip), ("device_type", device_type), ("backend", backend)):
            if not isinstance(value, str):
                raise TypeError(f"{name} must be a str, not {type(value).__name__}")
        if device_type not in _DEVICE_TYPES:
            raise ValueError(f"device_type {device_type!r} is none of {', '.join(_DEVICE_TYPES)}")
        functools.update_wrapper(self, func)
        self.func = func
        self.n_gpus = _whole("n_gpus", _device_count(device_type) if n_gpus is None else n_gpus, 1)
        self.rank_start = _whole("rank_start", rank_start, 0)
        self.world_size = _whole("world_size", self.n_gpus if world_size is None else world_size, 1)
        self.master_ip = master_ip.strip("[]")
        self.port = _whole("port", port, 0)
        if self.port > 65535:
            raise ValueError(f"port must be at most 65535, not {port}")
        self.device_type = device_type
        self.backend = backend
        if self.rank_start + self.n_gpus > self.world_size:
            last = self.rank_start + self.n_gpus - 1
            raise ValueError(f"ranks {self.rank_start} to {last} are not in a world_size of {self.world_size}")
        if self.n_gpus < self.world_size and self.port == 0:
            raise ValueError("port must be given where ranks are on several machines: they can not know it otherwise")

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind to an object, as functions in a class do."""
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run the function on the ranks; see `launcher`."""
        ranks = range(self.rank_start, self.rank_start + self.n_gpus)
        with ExitStack() as stack:
            fds = [stack.enter_context(memory("call")), *(stack.enter_context(memory(f"rank {rank}")) for rank in ranks)]
            put(fds[0], Call.of(self.func, args, kwargs))
            port, token = self._meet(stack)
            kind = "auto" if self.device_type == "xpu" else self.device_type
            place = Place(self.master_ip, port, self.world_size, kind, self.backend, self.n_gpus < self.world_size)
            result = run_ranks(
                [sys.executable, "-c", _PROGRAM.format(path=sys.path, fds=fds, place=tuple(place))],
                self.world_size,
                job=f"launcher-{port}",
                share=Share(ranks, str(Address("http", self.master_ip, port)), token),
                fds=fds,
            )
            return _conclude(result, {rank: take(fd, Outcome) for rank, fd in zip(ranks, fds[1:], strict=True)})

    def _meet(self, stack: ExitStack) -> tuple[int, str | None]:
        """Serve the rendezvous, or wait for the one that another machine serves; returns its port and token."""
        # Not before it is needed: ``python -m aiodist.sync.server`` wants to find it unloaded.
        from aiodist.sync.server import Client, Server

        token = Settings.from_env().token
        if self.rank_start > 0:
            Client(self.master_ip, self.port)
            return self.port, token
        if self.n_gpus == self.world_size and token is None:
            token = secrets.token_hex(16)
        server = stack.enter_context(Server(self.port, host=self.master_ip, token=token))
        if self.n_gpus < self.world_size:
            stack.callback(server.linger, _LINGER_SECONDS)
        return server.py_server_port, token


# The path first: the package may have been found by a path that only this process knows.
_PROGRAM: Final = "import sys; sys.path[:] = {path!r}; from aiodist.sync.launched import main; main({fds!r}, {place!r})"


class _RankTraceback(Exception):
    """Shows, as the cause of an exception, where a rank raised it."""


def _conclude(result: RunResult, outcomes: dict[int, Outcome | None]) -> list[Any]:
    """Return the results of the ranks, or raise what ended them."""
    if result.failure is None:
        if result.exit_code:
            _interrupt(result.exit_code - 128)
        return [None if outcome is None else outcome.load() for outcome in outcomes.values()]
    failed = {rank: outcome for rank, outcome in outcomes.items() if outcome is not None and outcome.failed}
    if result.failure.rank not in failed:
        raise RankFailedError(f"{result.failure}, without an exception", ranks=(result.failure.rank,))
    # A peer that fails because of the first failure may be gone before it: what was raised first counts.
    rank = min(failed, key=lambda number: failed[number].time)
    text = f"rank {rank}:\n{failed[rank].text.rstrip()}"
    try:
        error = failed[rank].load()
    except Exception:  # making it again runs code of its class, which may fail in any way
        error = None
    if not isinstance(error, BaseException):
        raise RankFailedError(f"{text}\n(this exception could not be carried to the launcher)", ranks=(rank,))
    raise error from _RankTraceback(f"\n\n{text}")


def _interrupt(signum: int) -> NoReturn:
    """Do what the signal would have done to this process; it was held back while the ranks ended."""
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    signal.raise_signal(signum)
    raise RankFailedError(f"the ranks were ended by {signal_name(signum)}")


def _whole(name: str, value: int, lowest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {type(value).__name__}")
    if value < lowest:
        raise ValueError(f"{name} must be at least {lowest}, not {value}")
    return value


def _device_count(device_type: str) -> int:
    cores = get_device_count_by_fork("cpu")
    if device_type == "cpu":
        return cores
    gpus = get_device_count_by_fork("gpu")
    if gpus == 0 and device_type not in ("auto", "xpu"):
        raise ValueError(f"this machine has no device of type {device_type!r}: give n_gpus, or device_type='cpu'")
    return gpus or cores
