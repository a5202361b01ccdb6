"""How a rank makes groups with others: one exchange through the store of its world."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from aiodist import _core
from aiodist.errors import AiodistError, CollectiveTimeoutError, GroupClosedError, RendezvousError
from aiodist.pending import Making
from aiodist.store import Outcome, Store, Unmet
from aiodist.tuning import Tunings, tuning_for

__all__ = ["Build", "Formed", "Founder", "Members", "Plan", "give_up"]


class Formed(Protocol):
    """What a founder needs of the groups it made."""

    @property
    def name(self) -> str:
        """Name of the group."""

    @property
    def closed(self) -> bool:
        """Whether it was closed here."""

    def abort(self, reason: str) -> None:
        """Stop everything on it."""

    def _close(self) -> None: ...


G = TypeVar("G", bound=Formed)
Members: TypeAlias = tuple[int, ...]
Build: TypeAlias = "Callable[[str, int, int, _core.Tuning, list[tuple[_core.Process, int]]], G]"
"""Makes the group of (name, channel id, group rank, tuning, members as (process, offset of its block))."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A group to be made.

    Attributes:
        collective: Name of the call that asked for it.
        name: Its name, for all members the same.
        members: World ranks in the group's order.
        numbered: Whether it may be made several times at once, and then gets a number behind its name.
    """

    collective: str
    name: str
    members: Members
    numbered: bool = False


@dataclass(slots=True)
class _Numbers:
    """The numbers of equal plans: each takes the lowest that is free, and keeps it for ever once the members have met."""

    next: int = 1
    free: list[int] = field(default_factory=list)

    def take(self) -> int:
        if self.free:
            return heapq.heappop(self.free)
        self.next += 1
        return self.next - 1


@dataclass(slots=True)
class _Case(Generic[G]):
    """A plan under way."""

    plan: Plan
    name: str
    number: int
    id: int
    tuning: _core.Tuning
    processes: list[_core.Process]
    rank: int
    build: Build[G]
    pending: Making[G]
    offset: int | None = None
    trouble: Exception | None = None

    def value(self) -> bytes:
        """What this member brings to the exchange: where its block is, or why it has none."""
        told: dict[str, Any] = {"tuning": self.tuning, "number": self.number}
        told |= {"offset": self.offset} if self.trouble is None else {"trouble": f"{type(self.trouble).__name__}: {self.trouble}"}
        return json.dumps(told).encode()

    def offsets(self, values: list[bytes]) -> list[int]:
        """Read what all members brought. Raises `RendezvousError` where they can not form a group."""
        try:
            told = [json.loads(value) for value in values]
            for member, one in zip(self.plan.members, told, strict=True):
                if "trouble" in one:
                    raise self.error(RendezvousError, f"rank {member} has no place for it: {one['trouble']}", (member,))
                if (one["tuning"], one["number"]) != (told[0]["tuning"], self.number):
                    first = self.plan.members[0]
                    raise self.error(RendezvousError, f"rank {member} tells another form of it than rank {first}", (first, member))
            return [int(one["offset"]) for one in told]
        except (ValueError, KeyError, TypeError) as error:
            raise self.error(RendezvousError, f"what its members told each other makes no sense: {error!r}") from None

    def error(self, kind: type[AiodistError], text: str, ranks: Sequence[int] = ()) -> AiodistError:
        """Return an error that carries what is known of the plan."""
        about = text if text.startswith(repr(self.name)) else f"{self.name!r} was not made: {text}"
        call = self.plan.collective
        return kind(f"{call}: group {about}", group=self.name, rank=self.rank, collective=call, ranks=ranks)


class Founder:
    """Makes the groups of one rank of a world, and knows those that are open.

    Args:
        store: Where the ranks of the world meet.
        rank: This rank in the world.
        processes: The processes of all ranks of the world.
        world: What tells this world from all others that its processes may ever be in.
        tunings: How its groups cut their messages; the same on all ranks.
    """

    def __init__(self, store: Store, rank: int, processes: Sequence[_core.Process], world: str, tunings: Tunings) -> None:
        self.rank = rank
        self.pid = os.getpid()
        self._store = store
        self._processes = list(processes)
        self._world = world
        self._tunings = tunings
        self._lock = threading.Lock()
        self._groups: weakref.WeakSet[Any] = weakref.WeakSet()
        # Those that nobody has got yet, and so nobody can close.
        self._pending: dict[Making[Any], str] = {}
        self._numbers: dict[tuple[str, Members], _Numbers] = {}
        self._closed = False

    def groups(self) -> list[Any]:
        """Return the groups made here that are open."""
        with self._lock:
            return [group for group in self._groups if not group.closed]

    def expire(self) -> None:
        """See `aiodist.store.Store.expire`."""
        self._store.expire()

    def found(self, plan: Plan, build: Build[G], timeout: float) -> Making[G]:
        """Start to make a group that this rank is a member of.

        Raises:
            GroupClosedError: the world was closed.
            ValueError: a group of this name is open, or being made.
        """
        pending: Making[G] = Making(time.monotonic() + timeout, self._store.expire)
        case = self._begin(plan, build, pending)
        pending.on_fetch(partial(self._pending.pop, pending, None))
        try:
            case.offset = _core.reserve(case.tuning, case.id, case.rank, len(plan.members))
        except (MemoryError, OSError) as error:
            case.trouble = error  # the others are told by the exchange
        try:
            exchange = self._gather(case, timeout)
        except Exception as error:  # nobody was asked
            self._undo(case, case.error(RendezvousError, str(error)))
        else:
            exchange.add_done_callback(partial(self._finish, case))
        return pending

    def close(self, why: str) -> None:
        """Make no more groups, and give up those that nobody has got."""
        with self._lock:
            self._closed = True
            pending, self._pending = self._pending, {}
        for one, name in list(pending.items()):
            give_up(one, GroupClosedError(f"group {name!r} was not made: {why}", group=name))
        self._processes.clear()  # their memory and descriptors stay only as long as groups use them

    def _begin(self, plan: Plan, build: Build[G], pending: Making[G]) -> _Case[G]:
        size, rank = len(plan.members), plan.members.index(self.rank)
        with self._lock:
            if self._closed:
                raise GroupClosedError(f"{plan.collective}: the world was closed", collective=plan.collective)
            if not plan.numbered and (plan.name in self._pending.values() or self._is_open(plan.name)):
                raise ValueError(f"{plan.collective}: group {plan.name!r} is open, or being made: close it first")
            number = self._numbers.setdefault((plan.name, plan.members), _Numbers()).take()
            name = f"{plan.name}#{number}" if plan.numbered and number > 1 else plan.name
            self._pending[pending] = name
            processes = [self._processes[member] for member in plan.members]
        tuning = tuning_for(self._tunings, size)
        return _Case(plan, name, number, self._id(name, plan.members, number), tuning, processes, rank, build, pending)

    def _is_open(self, name: str) -> bool:
        return any(group.name == name and not group.closed for group in self._groups)

    def _id(self, name: str, members: Members, number: int) -> int:
        """Return the channel id: never the same again, since peers know by it whether a block still is what they read."""
        text = f"{self._world}\0{name}\0{members}\0{number}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def _gather(self, case: _Case[Any], timeout: float) -> Future[Outcome]:
        if len(case.plan.members) > 1:
            return self._store.gather(case.name, case.plan.members, case.value(), timeout)
        alone: Future[Outcome] = Future()
        alone.set_result([case.value()])
        return alone

    def _finish(self, case: _Case[Any], exchange: Future[Outcome]) -> None:
        """Take the end of the exchange; in any thread."""
        if exchange.cancelled() or exchange.exception() is not None:
            # Whether the others know of our block is open, so it stays: they must never find another group's calls there.
            why = "the world was closed" if exchange.cancelled() else str(exchange.exception())
            self._drop(case, case.error(RendezvousError, why))
            return
        outcome = exchange.result()
        if isinstance(outcome, Unmet):
            kind = CollectiveTimeoutError if outcome.code == "timeout" else RendezvousError
            self._undo(case, case.error(kind, outcome.text, outcome.ranks))
            return
        try:
            offsets = case.offsets(outcome)
        except AiodistError as error:  # the same for all members: nobody uses the blocks
            self._release(case)
            self._drop(case, case.trouble or error)
            return
        make = partial(self._make, case, list(zip(case.processes, offsets, strict=True)))
        if not case.pending.resolve(make):
            _discard(make, None)

    def _make(self, case: _Case[G], members: list[tuple[_core.Process, int]]) -> G:
        group = case.build(case.name, case.id, case.rank, case.tuning, members)
        with self._lock:
            self._groups.add(group)
            closed = self._closed
        if closed:
            group._close()
        return group

    def _undo(self, case: _Case[Any], error: Exception) -> None:
        """The members did not meet: all is as if this one had never asked."""
        self._release(case)
        with self._lock:
            heapq.heappush(self._numbers[case.plan.name, case.plan.members].free, case.number)
        self._drop(case, error)

    def _release(self, case: _Case[Any]) -> None:
        if case.offset is not None and self.pid == os.getpid():
            _core.release(case.offset)

    def _drop(self, case: _Case[Any], error: Exception) -> None:
        self._pending.pop(case.pending, None)
        case.pending.fail(error)


def give_up(pending: Making[Any], error: AiodistError, reason: str | None = None) -> None:
    """Let a group that nobody has got yet end by an error; the peers who have it hear `reason`, or that this member left."""
    make = pending.fail(error)
    if make is not None:
        _discard(make, reason)


def _discard(make: Callable[[], Any], reason: str | None) -> None:
    """The others count on this member: make the group, so that they hear that it is gone."""
    with contextlib.suppress(Exception):
        group = make()
        if reason is not None:
            group.abort(reason)
        group._close()
