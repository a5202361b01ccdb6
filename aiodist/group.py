"""Groups: members in an order, and the collectives between them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Final

import numpy as np

from aiodist import _core
from aiodist._core import TensorFuture
from aiodist.collectives import Collectives
from aiodist.errors import CommunicationError, GroupClosedError
from aiodist.membership import Founder, Plan, give_up
from aiodist.naming import channel_name, check_name, check_ranks, check_split, group_name, ranks_name, split_name
from aiodist.ops.checks import check_timeout, plain_text, reason_of, refusing
from aiodist.pending import Making, PendingGroup, nothing

__all__ = ["DRAIN_SECONDS", "Group"]

# How long a closing group waits for its calls in flight: longer than any call that peers have joined takes to end.
DRAIN_SECONDS: Final = 10.0
# What is left at least for the second step of a split.
_LEAST_SECONDS: Final = 0.01


class Group(Collectives):
    """A rank's membership of a group: what `aiodist.init` and `aiodist.local_world` give.

    Calls are matched by the order in which each rank makes them, but for `send` and `recv`. What the members do together is in
    `Collectives`.

    Attributes:
        name: Name of the group.
        rank: This rank in the group.
        size: Number of members.
        ranks: The members' world ranks, in the group's order.
        timeout: Seconds that a call waits for its peers unless it says otherwise.
        closed: True once this member closed the group.
    """

    def __init__(
        self,
        name: str,
        id: int,
        rank: int,
        tuning: _core.Tuning,
        offset: int,
        members: list[tuple[_core.Process, int]],
        timeout: float,
        *,
        founder: Founder,
        ranks: Sequence[int] | None = None,
        channel_of: weakref.ref[Group] | None = None,
        on_close: Callable[[str | None], Awaitable[None]] | None = None,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        super().__init__(name, id, rank, tuning, offset, members, timeout)
        self._ranks = tuple(range(len(members))) if ranks is None else tuple(ranks)
        self._founder = founder
        self._is_world = ranks is None
        self._channel_of = channel_of  # weak: the group holds its channels, and a dropped group must be noticed at once
        self._channels: dict[str, Making[Group]] = {}
        self._channels_lock = threading.Lock()
        self._on_close = on_close
        self._drain_seconds = drain_seconds
        self._reason: str | None = None

    def __repr__(self) -> str:
        return f"<Group {self.name!r}: rank {self.rank} of {self.size}>"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' world ranks, in the group's order."""
        return self._ranks

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32) -> np.ndarray:
        """Return a new array in memory that the peers read in place, so that collectives on it are not staged.

        Local: no other rank need do the same. The content is arbitrary. The array is an ordinary one that outlives the group, but for one
        thing: a forked child shares its memory, where it would have its own copy of another.

        Args:
            shape: Its shape.
            dtype: Its element type.

        Raises:
            MemoryError: the machine or its cgroup has not that much memory left.
        """
        extents = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        element = np.dtype(dtype)
        if element.hasobject:
            raise TypeError(f"dtype {element} holds Python objects: no pointer may leave the process")
        if any(extent < 0 for extent in extents):
            raise ValueError(f"shape {extents} has a negative extent")
        nbytes = math.prod(extents) * element.itemsize
        array: np.ndarray = _core.shared_bytes(max(nbytes, 1))[:nbytes].view(element).reshape(extents)
        return array

    def new_group(self, ranks: Sequence[int], name: str | None = None, *, timeout: float | None = None) -> PendingGroup[Group | None]:
        """Make a group of some ranks of this one.

        Its members call this; the others may, and get None at once. It needs no order: members may ask for several groups in differing
        orders, and use groups in differing orders. Nothing happens to it when this group fails or is closed, unless this is the world.

        Args:
            ranks: Ranks of this group. The new group has them in this order: the first is its rank 0.
            name: What tells it from others, once at a time. Without it, that is the ranks in their order, and how often this rank has asked
                for them.
            timeout: Seconds from now until it must be made; then the new group's own timeout. None is this group's.

        Returns:
            A `PendingGroup`: awaiting it gives the group, or None to a rank that is no member. It raises `CollectiveTimeoutError`, which
            names those who did not ask and what they asked for in its place, or `RendezvousError` where one is gone; both hold world
            ranks.

        Raises:
            TypeError, ValueError: an argument is wrong, or a group of this name is open.
        """
        seconds = self._check_open("new_group", timeout)
        chosen = check_ranks(ranks, self.size)
        called = ranks_name(self.name, chosen) if name is None else group_name(self.name, check_name(name))
        if self.rank not in chosen:
            return nothing()
        members = tuple(self._ranks[rank] for rank in chosen)
        return self._found(Plan("new_group", called, members, numbered=name is None), seconds)

    def split(self, color: int | None, key: int = 0, *, timeout: float | None = None) -> PendingGroup[Group | None]:
        """Divide the group: ranks that give the same color form a new group.

        A call of all ranks, in the group's order (one `all_gather`). Otherwise like `new_group`.

        Args:
            color: Which new group to be in; None for none.
            key: The new group's ranks are ordered by (key, rank in this group).
            timeout: Seconds from now until it must be made; then the new group's own timeout. None is this group's.

        Returns:
            A `PendingGroup`: awaiting it gives the group, or None where color is None.

        Raises:
            TypeError, ValueError: an argument is wrong; the peers of the call get `PeerRefusedError`.
        """
        seconds = self._check_open("split", None)
        with refusing(self._backend, "all_gather"):
            pair = check_split(color, key)
            seconds = check_timeout(timeout) or seconds
        deadline = time.monotonic() + seconds
        given = self.all_gather(np.array([pair], np.int64), timeout=seconds)
        result: Making[Group | None] = Making(deadline, self._founder.expire)
        result.after(given, functools.partial(self._divide, given, pair[0], result, seconds, deadline))
        return result

    def channel(self, name: str, *, timeout: float | None = None) -> PendingGroup[Group]:
        """Give the group another order of calls: a channel has the same members and works as a group of its own.

        For tasks that share a group but not the order of their calls. All members ask for it, in any order; asking again gives the same
        channel until it is closed. It breaks and closes with the group. A channel of a channel is one of their group.

        Args:
            name: Identifies it within the group.
            timeout: Seconds from now until it must be made; then the channel's own timeout. None is this group's.

        Returns:
            A `PendingGroup`: awaiting it gives the channel. It raises `CollectiveTimeoutError`, which names those who did not ask, or
            `RendezvousError` where one is gone; both hold world ranks.

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        seconds = self._check_open("channel", timeout)
        owner = self._owner("channel")
        with owner._channels_lock:
            held = owner._channels.get(check_name(name))
            if held is not None and not held.failed and not (held.value is not None and held.value.closed):
                return held
            plan = Plan("channel", channel_name(owner.name, name), owner._ranks)
            made = owner._channels[name] = owner._found(plan, seconds, channel_of=weakref.ref(owner))
            return made

    def abort(self, reason: str) -> None:
        """Stop everything on the group and its channels, here and on the peers: calls in flight and later ones fail with `reason`.

        Args:
            reason: What the errors say.
        """
        if not isinstance(reason, str):
            raise TypeError(f"reason must be a string, not {type(reason).__name__}")
        self._abort(plain_text(reason))
        for pending in list(self._channels.values()):  # those that are open the core breaks
            if pending.value is None:
                give_up(pending, CommunicationError(f"group {self.name!r} was aborted: {reason}", group=self.name, rank=self.rank), reason)

    async def aclose(self) -> None:
        """Wait for the calls in flight, then leave the group and its channels; later calls end with `GroupClosedError`.

        Receives without a message are not waited for; they end so at once.

        Closing the world closes all groups made from it. Bounded: calls that peers do not join within ten seconds fail. Prompt on a broken
        group. Closing twice does nothing.
        """
        if self.closed:
            return
        if self._is_world:
            self._founder.close("the world was closed")
        for pending in list(self._channels.values()):
            give_up(pending, GroupClosedError(f"group {self.name!r} was closed", group=self.name, rank=self.rank))
        groups = [*self._dependants(), self]
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(self.timeout, self._drain_seconds)):
                    await asyncio.gather(*(group._drained() for group in groups), return_exceptions=True)
        finally:  # also where the waiting is cancelled: a group is never left half closed
            for group in groups:
                group._close()
                group._channels.clear()
            on_close, self._on_close = self._on_close, None
            if on_close is not None:
                await on_close(self._reason)

    async def __aenter__(self) -> Group:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None and not self.closed:
            self._reason = reason_of(error)
            for group in (self, *self._dependants()):
                group.abort(f"rank {self.rank} left with {self._reason}")
        await self.aclose()

    def _check_open(self, collective: str, timeout: float | None) -> float:
        """Return the timeout of a call that makes a group, if this one may make one."""
        if self._founder.pid != os.getpid():
            raise RuntimeError(
                f"this group belongs to process {self._founder.pid}; process {os.getpid()} was forked from it and can not use it"
            )
        if self.closed:
            raise GroupClosedError(f"{collective}: group {self.name!r} is closed", group=self.name, rank=self.rank, collective=collective)
        return check_timeout(timeout) or self.timeout

    def _owner(self, collective: str) -> Group:
        """Return the group that channels asked for here belong to."""
        if self._channel_of is None:
            return self
        owner = self._channel_of()
        if owner is None or owner.closed:
            raise GroupClosedError(f"{collective}: the group of channel {self.name!r} is closed", group=self.name, rank=self.rank)
        return owner

    def _dependants(self) -> list[Group]:
        """Return the open groups that end with this one: its channels, and all groups where it is the world."""
        if self._is_world:
            return self._founder.groups()
        return [pending.value for pending in self._channels.values() if pending.value is not None and not pending.value.closed]

    def _found(
        self, plan: Plan, timeout: float, within: float | None = None, channel_of: weakref.ref[Group] | None = None
    ) -> Making[Group]:
        founder, drain_seconds = self._founder, self._drain_seconds  # not this group: what is pending must not hold it

        def build(name: str, id: int, rank: int, tuning: _core.Tuning, members: list[tuple[_core.Process, int]]) -> Group:
            group = Group(
                name,
                id,
                rank,
                tuning,
                members[rank][1],
                members,
                timeout,
                founder=founder,
                ranks=plan.members,
                channel_of=channel_of,
                drain_seconds=drain_seconds,
            )
            owner = None if channel_of is None else channel_of()
            if owner is not None:
                owner._adopt(group)
            return group

        return founder.found(plan, build, timeout if within is None else within)

    def _divide(self, given: TensorFuture[Any], color: int, result: Making[Group | None], timeout: float, deadline: float) -> None:
        """Go on with a split whose all_gather has ended."""
        try:
            pairs = [(int(other), int(key)) for other, key in given.result()]
            if color < 0:
                result.resolve(lambda: None)
                return
            chosen = sorted((rank for rank in range(self.size) if pairs[rank][0] == color), key=lambda rank: (pairs[rank][1], rank))
            plan = Plan("split", split_name(self.name, color), tuple(self._ranks[rank] for rank in chosen), numbered=True)
            made = self._found(plan, timeout, max(deadline - time.monotonic(), _LEAST_SECONDS))
            made.settled(lambda: result.resolve(made.take))
        except Exception as error:
            result.fail(error)
