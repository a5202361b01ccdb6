"""A group that is being made: what `Group.new_group`, `split` and `channel` return."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import os
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Final, Generic, TypeVar

from aiodist._core import TensorFuture
from aiodist.errors import AiodistError

__all__ = ["Making", "PendingGroup", "nothing"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# How often those who wait look again once the time is over: a third party judges who is late, and its word may take a moment.
_LOOK_SECONDS: Final = 0.05


class PendingGroup(Awaitable[T_co], Generic[T_co]):
    """A group that is being made, or None where this rank is not to be a member.

    Awaiting it, any number of times and from any loop, gives the same `Group` or raises. Cancelling an await gives up the wait only: the
    other members count on this one.
    """

    def __init__(self, deadline: float, expire: Callable[[], None]) -> None:
        # `deadline` is of time.monotonic(); `expire` is called when it has passed.
        self._deadline = deadline
        self._expire = expire
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._settled: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._settled.set_running_or_notify_cancel()  # a waiter that is cancelled must not cancel it
        self._make: Callable[[], T_co] | None = None
        self._value: T_co | None = None
        self._error: BaseException | None = None
        self._first: tuple[TensorFuture[Any], Callable[[], None]] | None = None
        self._on_fetch: Callable[[], object] | None = None

    def __repr__(self) -> str:
        return f"<PendingGroup: {'done' if self.done() else 'waiting'}>"

    def done(self) -> bool:
        """Tell whether the group is made, or failed to be."""
        return self._settled.done()

    def __await__(self) -> Generator[Any, Any, T_co]:
        return self._wait().__await__()

    def result(self, timeout: float | None = None) -> T_co:
        """Block this thread until the group is made and return it.

        Args:
            timeout: Seconds to wait; None waits as long as making the group may take.

        Raises:
            TimeoutError: `timeout` is over; the group is still being made.
            AiodistError: the group could not be made.
        """
        self._check_process()
        until = None if timeout is None else time.monotonic() + timeout
        if (first := self._first) is not None:
            with contextlib.suppress(AiodistError, TimeoutError):  # what the call raises is told by `proceed`
                first[0].result(timeout)
            if first[0].done():
                first[1]()
        while not self._settled.done():
            now = time.monotonic()
            if until is not None and now >= until:
                raise TimeoutError(f"the group was not made within {timeout:g} s; it is still being made")
            if now >= self._deadline:
                self._expire()
            wait = max(self._deadline - now, _LOOK_SECONDS)
            concurrent.futures.wait((self._settled,), timeout=wait if until is None else min(wait, until - now))
        return self._take()

    async def _wait(self) -> T_co:
        self._check_process()
        if (first := self._first) is not None:
            with contextlib.suppress(Exception):  # what the call raises is told by `proceed`
                await first[0]
            first[1]()
        if not self._settled.done():
            loop = asyncio.get_running_loop()
            timer = loop.call_later(max(self._deadline - time.monotonic(), _LOOK_SECONDS), self._look, loop)
            try:
                await asyncio.wrap_future(self._settled)
            finally:
                timer.cancel()
        return self._take()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """The time is over; look again until somebody says so."""
        self._expire()
        if not self._settled.done():
            loop.call_later(_LOOK_SECONDS, self._look, loop)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(f"this group is being made by process {self._pid}; process {os.getpid()} was forked from it")

    def _take(self) -> T_co:
        # Here, not when the members have met: the group then belongs to the thread that uses it.
        with self._lock:
            if self._make is not None:
                try:
                    self._value = self._make()
                except Exception as error:
                    self._error = error.with_traceback(None)
                self._make = None
        on_fetch, self._on_fetch = self._on_fetch, None
        if on_fetch is not None:
            on_fetch()
        if self._error is not None:
            raise copy.copy(self._error)  # its own for each waiter: a traceback that all share would only grow
        return self._value  # type: ignore[return-value]  # None is a value of T_co where nothing is made


class Making(PendingGroup[T]):
    """The maker's side of a `PendingGroup`."""

    def take(self) -> T:
        """Return the group, made now if nobody has asked for it before, or raise what it failed by. It must be done."""
        return self._take()

    @property
    def value(self) -> T | None:
        """The group, once somebody has asked for it."""
        return self._value

    @property
    def failed(self) -> bool:
        """Whether it ended by an error."""
        return self._error is not None

    def after(self, first: TensorFuture[Any], proceed: Callable[[], None]) -> None:
        """Call `proceed` once, as soon as a call that comes before has ended."""
        once = threading.Lock()

        def proceed_once() -> None:
            if once.acquire(blocking=False):
                self._first = None
                proceed()

        self._first = (first, proceed_once)
        first.add_done_callback(lambda _: proceed_once())

    def resolve(self, make: Callable[[], T]) -> bool:
        """Have the group made by whoever asks for it first; False if this had failed already."""
        with self._lock:
            if self._error is not None:
                return False
            self._make = make
        self._settled.set_result(None)
        return True

    def fail(self, error: BaseException) -> Callable[[], T] | None:
        """End by an error, unless the group was asked for already. Returns what would have made it, where it is known."""
        with self._lock:
            if self._error is not None or (self._settled.done() and self._make is None):
                return None
            self._error = error.with_traceback(None)  # its frames would be a reference cycle
            make, self._make = self._make, None
            self._on_fetch = None
        if make is None:
            self._settled.set_result(None)
        return make

    def on_fetch(self, callback: Callable[[], object]) -> None:
        """Call back once, when somebody gets the group or hears that there is none."""
        self._on_fetch = callback

    def settled(self, callback: Callable[[], object]) -> None:
        """Call back once it is decided."""
        once = [callback]  # given away when called: the future keeps its callbacks, and what they refer to
        self._settled.add_done_callback(lambda _: once.pop()())


def nothing() -> PendingGroup[None]:
    """Return what a rank gets that is not to be a member."""
    pending: Making[None] = Making(0.0, lambda: None)
    pending.resolve(lambda: None)
    return pending
