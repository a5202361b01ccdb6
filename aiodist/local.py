"""Ranks that share a process: `local_world`, and the world of one."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Final

from aiodist import _core
from aiodist.config import DEFAULT_TIMEOUT, Settings
from aiodist.group import Group
from aiodist.local_store import LocalSeat, LocalStore
from aiodist.membership import Founder
from aiodist.ops.checks import check_timeout
from aiodist.tuning import Tunings, own_tunings, tuning_for

__all__ = ["LocalWorld", "local_world", "make_local"]

_DRAIN_SECONDS: Final = 1.0
_ids = itertools.count(1)


class LocalWorld:
    """A world of ranks in this process, to be entered; see `local_world`."""

    def __init__(self, size: int, timeout: float, tunings: Tunings) -> None:
        self._size = size
        self._timeout = timeout
        self._tunings = tunings
        self._groups: list[weakref.ref[Group]] = []

    async def __aenter__(self) -> list[Group]:
        groups = make_local(self._size, self._timeout, self._tunings, _DRAIN_SECONDS)
        # Weak: groups that are dropped unclosed are noticed, whoever still holds this object.
        self._groups = [weakref.ref(group) for group in groups]
        return groups

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        groups = [group for reference in self._groups if (group := reference()) is not None]
        await asyncio.gather(*(group.__aexit__(kind, error, traceback) for group in groups))
        _core.rest()


def local_world(size: int, *, timeout: float | None = None) -> LocalWorld:
    """Open `size` ranks in this process: ``async with aiodist.local_world(4) as groups``.

    Entering gives the ranks' `Group` objects, in rank order. They may be used from one loop (the ranks' coroutines side by side), or each
    from a thread of its own. Leaving closes them; by an exception it aborts them first, with that exception's text as the reason.

    Args:
        size: Number of ranks.
        timeout: Seconds that every call may take; 300 by default.

    Raises:
        TypeError, ValueError: an argument is wrong, or AIODIST_TUNING is.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"size must be a whole number, not {type(size).__name__}")
    if size < 1:
        raise ValueError(f"size must be at least 1, not {size}")
    return LocalWorld(size, check_timeout(timeout) or DEFAULT_TIMEOUT, own_tunings(Settings.from_env()))


def make_local(
    size: int, timeout: float, tunings: Tunings, drain_seconds: float, on_close: Callable[[], None] | None = None
) -> list[Group]:
    """Make the ranks of a world that have no other processes."""
    tuning = tuning_for(tunings, size)
    number = next(_ids)
    process = _core.this_process()
    offsets: list[int] = []
    try:
        offsets += (_core.reserve(tuning, number, rank, size) for rank in range(size))
    except BaseException:
        for offset in offsets:
            _core.release(offset)
        raise
    members = [(process, offset) for offset in offsets]
    store = LocalStore(size)

    def make(rank: int) -> Group:
        seat = LocalSeat(store, rank)

        async def leave(reason: str | None) -> None:
            seat.leave("left its world" if reason is None else f"failed: {reason}")
            if on_close is not None:
                on_close()

        founder = Founder(seat, rank, [process] * size, f"local {number}", tunings)
        return Group(
            "world", number, rank, tuning, offsets[rank], members, timeout, founder=founder, on_close=leave, drain_seconds=drain_seconds
        )

    return [make(rank) for rank in range(size)]
