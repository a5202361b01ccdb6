"""Requests that wait for something, with their deadlines."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from aiodist.rendezvous.job import Member, Ticket

__all__ = ["Absences", "Kind", "Wait", "Waits"]

Kind: TypeAlias = Literal["join", "get", "barrier", "gather"]


@dataclass(slots=True, eq=False)
class Wait:
    """One request that waits; ``name`` is the job's, the key's, the barrier's or the gather's."""

    ticket: Ticket
    kind: Kind
    name: str
    timeout: float
    deadline: float
    member: Member


class Waits:
    """All waiting requests, by connection and by deadline."""

    def __init__(self) -> None:
        self._by_conn: dict[int, dict[int, Wait]] = {}
        self._heap: list[tuple[float, Ticket]] = []
        self._count = 0

    def add(self, wait: Wait) -> None:
        """Begin to wait."""
        conn, request_id = wait.ticket
        self._by_conn.setdefault(conn, {})[request_id] = wait
        self._count += 1
        heapq.heappush(self._heap, (wait.deadline, wait.ticket))
        if len(self._heap) > 2 * self._count + 1024:  # Finished waits stay in the heap until their time; most finish long before it.
            self._heap = sorted((held.deadline, held.ticket) for held in self)

    def get(self, ticket: Ticket) -> Wait | None:
        """The wait of a request, if it waits."""
        return self._by_conn.get(ticket[0], {}).get(ticket[1])

    def of(self, conn: int) -> list[Wait]:
        """What a connection waits for."""
        return list(self._by_conn.get(conn, {}).values())

    def count(self, conn: int) -> int:
        """How many things a connection waits for."""
        return len(self._by_conn.get(conn, {}))

    def end(self, ticket: Ticket) -> None:
        """The request waits no more; nothing happens if it does not wait."""
        waits = self._by_conn.get(ticket[0], {})
        if waits.pop(ticket[1], None) is not None:
            self._count -= 1
        if not waits:
            self._by_conn.pop(ticket[0], None)

    def due(self, now: float) -> Iterator[Wait]:
        """The waits whose time is over, each once; the caller ends them."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            wait = self.get(heapq.heappop(self._heap)[1])
            if wait is not None:
                yield wait

    def next_deadline(self) -> float | None:
        """When the next wait is over."""
        while self._heap:
            deadline, ticket = self._heap[0]
            wait = self.get(ticket)
            if wait is not None and wait.deadline == deadline:
                return deadline
            heapq.heappop(self._heap)
        return None

    def __iter__(self) -> Iterator[Wait]:
        for waits in self._by_conn.values():
            yield from waits.values()


class Absences:
    """The members that are away and may come back, by the time until which they may."""

    def __init__(self) -> None:
        self._of: dict[Member, tuple[float, str]] = {}
        self._heap: list[tuple[float, int, Member]] = []
        self._numbers = itertools.count()

    def add(self, member: Member, until: float, reason: str) -> None:
        """A member is away, and lost for that reason if it is not back in time."""
        self._of[member] = (until, reason)
        heapq.heappush(self._heap, (until, next(self._numbers), member))

    def end(self, member: Member) -> None:
        """A member is back, or gone for good; nothing happens if it is not away."""
        self._of.pop(member, None)

    def due(self, now: float) -> Iterator[tuple[Member, str]]:
        """The members that are lost now, with the reason; they are away no more."""
        while (until := self.next_deadline()) is not None and until <= now:
            member = heapq.heappop(self._heap)[2]
            yield member, self._of.pop(member)[1]

    def next_deadline(self) -> float | None:
        """When the next of them is lost."""
        while self._heap:
            until, _, member = self._heap[0]
            if self._of.get(member, (None,))[0] == until:
                return until
            heapq.heappop(self._heap)
        return None
