"""The meeting place of ranks that share a process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from aiodist.store import Gathers, Met, Outcome

__all__ = ["LocalSeat", "LocalStore"]


class LocalStore:
    """What `aiodist.store.Store` says, for the ranks of one local world, from any threads.

    It has no timer: those who wait look at the time (see `expire`), and so does everyone who comes.

    Args:
        size: Number of ranks of the world.
    """

    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        self._gathers: Gathers[Future[Outcome]] = Gathers(size, lambda rank: f"rank {rank}")
        self._deadlines: dict[Future[Outcome], tuple[float, float]] = {}
        self._ended: deque[tuple[Future[Outcome], Outcome]] = deque()

    def gather(self, rank: int, name: str, members: Sequence[int], value: bytes, timeout: float) -> Future[Outcome]:
        """See `aiodist.store.Store.gather`."""
        future: Future[Outcome] = Future()
        now = time.monotonic()
        with self._lock:
            self._expire(now)
            outcome = self._gathers.enter(name, members, rank, value, future)
            if outcome is None:
                self._deadlines[future] = (now + timeout, timeout)
            elif isinstance(outcome, Met):
                self._end(dict.fromkeys(outcome.tickets, outcome.values))
            else:
                self._end({future: outcome})
        self._tell()
        return future

    def leave(self, rank: int, fate: str) -> None:
        """A rank is gone: what needs it fails, now and later."""
        with self._lock:
            self._end(self._gathers.leave(rank, fate))
        self._tell()

    def expire(self) -> None:
        """See `aiodist.store.Store.expire`."""
        with self._lock:
            self._expire(time.monotonic())
        self._tell()

    def _expire(self, now: float) -> None:
        late = [(future, timeout) for future, (deadline, timeout) in self._deadlines.items() if deadline <= now]
        self._end({future: self._gathers.late(future, timeout) for future, timeout in late})

    def _end(self, outcomes: Mapping[Future[Outcome], Outcome]) -> None:
        for future, outcome in outcomes.items():
            self._deadlines.pop(future, None)
            self._ended.append((future, outcome))

    def _tell(self) -> None:
        """Outside the lock: callbacks may come back here."""
        while self._ended:
            with contextlib.suppress(IndexError):  # another thread took the last one
                future, outcome = self._ended.popleft()
                future.set_result(outcome)


class LocalSeat:
    """One rank's access to a `LocalStore`."""

    def __init__(self, store: LocalStore, rank: int) -> None:
        self._store = store
        self._rank = rank

    def gather(self, name: str, members: Sequence[int], value: bytes, timeout: float) -> Future[Outcome]:
        """See `aiodist.store.Store.gather`."""
        return self._store.gather(self._rank, name, members, value, timeout)

    def expire(self) -> None:
        """See `aiodist.store.Store.expire`."""
        self._store.expire()

    def leave(self, fate: str) -> None:
        """This rank is gone; see `LocalStore.leave`."""
        self._store.leave(self._rank, fate)
