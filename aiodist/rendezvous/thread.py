"""Daemon threads: the one whose event loop carries a process's rendezvous client, and those for a function that blocks."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar, TypeVarTuple, cast

__all__ = ["ControlThread", "on_a_thread"]

A = TypeVarTuple("A")
T = TypeVar("T")

_CANCEL_S: Final = 1.5
_CLOSE_S: Final = 2.0


class ControlThread:
    """A daemon thread with an event loop of its own, so that compute which holds the user's loop delays nothing here.

    It starts at once and ends by `close`, which the interpreter's exit calls too. Closing cancels what still runs; whoever wants a
    goodbye to reach the server submits it first and waits for it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name="aiodist-control", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the thread's loop; its future may be waited for in any thread, or wrapped for any loop.

        Raises:
            RuntimeError: the thread was closed, or this process is a fork of the one that made it.
        """
        with self._lock:
            if not self._closed and self._pid == os.getpid():
                return asyncio.run_coroutine_threadsafe(coro, self._loop)
        coro.close()
        raise RuntimeError(
            "the control thread is closed" if self._closed else "the control thread did not survive the fork of this process"
        )

    def close(self) -> None:
        """Cancel what runs on the loop and end the thread; takes 2 s at most, from any thread, any number of times.

        Called on the thread itself it starts the end without waiting for it. Futures that were not done become cancelled.
        """
        with self._lock:
            first = not self._closed
            self._closed = True
        if self._pid != os.getpid():
            return
        if first:
            atexit.unregister(self.close)
            self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(_wind_up())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


async def _wind_up() -> None:
    """Cancel every task of this loop and see it end, within a bound."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_report)
    deadline = loop.time() + _CANCEL_S
    await asyncio.sleep(0)  # What was submitted before the end becomes a task first.
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        left = deadline - loop.time()
        if left <= 0:
            break
        await asyncio.wait(tasks, timeout=left)
    for task in tasks:
        # It refused to be cancelled and ends with the loop; nobody can do anything about a text at its destruction.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    # A connection that was closed with something left to write lives on until its peer reads. asyncio has no public list of them.
    for transport in tuple(getattr(loop, "_transports", {}).values()):
        transport.abort()
    for _ in range(3):  # Closed transports and the futures of `submit` are told by callbacks of the next turns.
        await asyncio.sleep(0)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """In debug mode asyncio reports its own tasks that are cancelled while they accept a connection; here that is no fault."""
    if not isinstance(context.get("exception"), asyncio.CancelledError):
        loop.default_exception_handler(context)


async def on_a_thread(function: Callable[[*A], T], *arguments: *A) -> T:
    """Run a blocking function on a daemon thread: unlike an executor's, it keeps nobody from leaving when the wait for it is given up."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if outcome.cancelled():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(cast(T, result))

    def run() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="aiodist-blocking", daemon=True).start()
    return await outcome
