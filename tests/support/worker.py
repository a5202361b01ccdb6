"""The side of a rank's process: it opens the world it is told to, runs functions, and answers over its pipe.

Started by `support.ranks.RankPool` as ``python -c "from support.worker import main; main(FD)"``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import signal
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import aiodist

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Task:
    """One function to run.

    Attributes:
        job: Name of the world to run in; None runs without one. A world that is open under another name is closed first.
        function: A module-level ``async def``, called with the world's group and `args`.
        args: Further arguments.
    """

    job: str | None
    function: Callable[..., Awaitable[Any]]
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Answer:
    """What became of a `Task`: a value, or the text and type name of what was raised."""

    value: Any = None
    error: str | None = None
    trace: str = ""


@dataclass(frozen=True)
class Note:
    """A message that a function sends while it runs."""

    value: Any


@dataclass
class _State:
    connection: Connection[Any, Any] | None = None
    world: Any = None
    job: str | None = None
    loose: list[Any] = field(default_factory=list)


_state = _State()


def note(value: Any) -> None:
    """Tell the parent something in the middle of a task."""
    if _state.connection is None:
        raise RuntimeError("no parent to tell")
    _state.connection.send(Note(value))


def main(descriptor: int) -> None:
    """Serve tasks until the parent says so or goes away."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _state.connection = Connection(descriptor)
    with contextlib.suppress(EOFError):
        asyncio.run(_serve(_state.connection))


async def _serve(connection: Connection[Any, Any]) -> None:
    while (task := await _receive(connection)) is not None:
        connection.send(await _answer(task))
    await _close_world()


async def _receive(connection: Connection[Any, Any]) -> Task | None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        loop.remove_reader(connection.fileno())
        ready.set_result(None)

    loop.add_reader(connection.fileno(), wake)
    await ready
    task: Task | None = connection.recv()
    return task


async def _answer(task: Task) -> Answer:
    try:
        await _open_world(task.job)
        return Answer(value=await task.function(_state.world, *task.args))
    except Exception as error:
        if _state.world is not None:
            with contextlib.suppress(Exception):
                _state.world.abort("a test failed on another rank")  # so that they need not wait for their timeout
        return Answer(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())


async def _open_world(job: str | None) -> None:
    if job == _state.job:
        return
    await _close_world()
    if job is not None:
        _state.world = await aiodist.init(job=job)
        _state.job = job


async def _close_world() -> None:
    world, _state.world, _state.job = _state.world, None, None
    if world is not None:
        await world.aclose()
