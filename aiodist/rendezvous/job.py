"""One job's records: its members, the keys, barriers and gathers of each world it formed. Pure data and rules: no I/O, no clock."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from aiodist.rendezvous.identity import AWAY, Behind, State, label
from aiodist.rendezvous.messages import (
    Add,
    Answer,
    Barrier,
    Compare,
    Done,
    Gather,
    Notice,
    Number,
    Progress,
    Refused,
    Value,
    Values,
)
from aiodist.rendezvous.told import Told
from aiodist.store import Gathers, Met, Unmet

__all__ = [
    "Failure",
    "Job",
    "Limits",
    "Member",
    "Ticket",
    "World",
    "listed",
    "name_ranks",
]

Ticket: TypeAlias = tuple[int, int]
"""A request that waits: (connection, request number)."""

_INT64: Final = range(-(2**63), 2**63)
_DECIMAL: Final = re.compile(rb"-?[0-9]{1,19}\Z")
_LISTED: Final = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """What one server holds at most, and how long it remembers.

    Attributes:
        jobs: Jobs at a time, those that are still remembered included.
        members: Members of one job.
        connections: Open member connections, over all jobs.
        keys: Keys of one world.
        key_nbytes: Length of a key or of a barrier's or gather's name, in UTF-8.
        value_nbytes: Length of a value.
        keys_nbytes: All keys and values of one world together; and as much for the values of its gathers that wait.
        info_nbytes: A member's info, as JSON.
        waits: Requests of one connection that wait at a time.
        answers: What is kept for one member of answers that it has not said it has seen, in pieces of up to 4 KiB.
        outgoing_nbytes: What may queue for a connection that does not read; past it the connection is dropped.
        ended_s: Seconds for which a job that ended well refuses fresh processes ("job X has ended"). After them, or at once after
            a job that ended by a failure, its name is free again.
        failed_s: Seconds for which the ranks that a failed formation still expected are told why it failed.
        unjoined_s: Seconds for which a connection may be a member's of no world that has formed or is forming.
        absent_s: Seconds in which a member whose connection broke may come back over another one before it is lost.
        restart_s: The same after the server was started again, for all members of the worlds it finds in its journal.
    """

    jobs: int = 1000
    members: int = 16384
    connections: int = 20000
    keys: int = 100_000
    key_nbytes: int = 1024
    value_nbytes: int = 1 << 20
    keys_nbytes: int = 256 << 20
    info_nbytes: int = 16384
    waits: int = 1024
    answers: int = 16384
    outgoing_nbytes: int = 64 << 20
    ended_s: float = 10.0
    failed_s: float = 5.0
    unjoined_s: float = 60.0
    absent_s: float = 0.5
    restart_s: float = 30.0


@dataclass(slots=True, eq=False)
class Member:
    """One process that joined.

    ``rank`` is -1 until the world has formed, ``conn`` is `AWAY` while it has none, ``fate`` is set when it goes.
    """

    id: str
    job: str
    conn: int
    request: int
    wanted: int | None
    world_size: int
    after: int
    info: dict[str, Any]
    rank: int = -1
    world: World | None = None
    fate: Notice | None = None
    absence: str = ""
    """Why it is away."""
    stalled: bool = False
    """Its heartbeats are missing."""
    behind: Behind | None = None
    progress: list[Progress] = field(default_factory=list)
    told: dict[int, Told] = field(default_factory=dict)
    """By request number: what it was told and has not seen, as far as is known."""
    pieces: int = 0

    @property
    def label(self) -> str:
        """What errors call this process."""
        return label(self.info)

    @property
    def state(self) -> State:
        """How it is, as far as can be seen from here."""
        if self.fate is not None:
            return self.fate.kind
        if self.conn == AWAY:
            return "away"
        return "stalled" if self.stalled else "stuck" if self.behind is not None and self.behind.text else "active"

    @property
    def reason(self) -> str | None:
        """Why it is in another state than active."""
        match self.state:
            case "active":
                return None
            case "away":
                return self.absence
            case "stalled":
                return "its heartbeats are missing"
            case "stuck":
                return self.behind.text if self.behind is not None else None
            case _:
                return self.fate.reason if self.fate is not None else None

    @property
    def title(self) -> str:
        """What texts call a rank that others wait for: ``rank 1 (host:pid, stalled)``."""
        state = self.state
        trouble = {"away": ", away", "stalled": ", stalled", "stuck": f", stuck: {self.reason}"}.get(state, "")
        return f"rank {self.rank} ({self.label}{trouble})"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a formation failed, kept for the ``owed`` ranks that had not joined yet."""

    text: str
    ranks: tuple[int, ...]
    owed: int
    until: float


class World:
    """One generation of a job: a formed set of ranks, with keys, barriers and gathers of its own."""

    def __init__(self, job: str, generation: int, members: Sequence[Member], limits: Limits) -> None:
        self.job = job
        self.generation = generation
        self.members = list(members)
        self.keys: dict[str, bytes] = {}
        self.key_waits: dict[str, list[Ticket]] = {}
        self.barriers: dict[str, dict[int, Ticket]] = {}
        self.gathers: Gathers[Ticket] = Gathers(len(members), lambda rank: members[rank].title)
        self.untold: list[Notice] = []
        """Fates that the remaining members have not been told yet."""
        self.tell_at = -math.inf
        """When the next of them may be told."""
        self.results = 0
        """The number of the last gather's result."""
        self.nbytes = 0
        """What the keys and their values hold together."""
        self._limits = limits

    @property
    def size(self) -> int:
        """Number of ranks, those that have gone included."""
        return len(self.members)

    def active(self) -> list[Member]:
        """Return the members that have not gone."""
        return [member for member in self.members if member.fate is None]

    def set(self, request_id: int, key: str, value: bytes) -> Done | Refused:
        """Store a value, or refuse it by a limit."""
        limits = self._limits
        if len(key.encode()) > limits.key_nbytes:
            return Refused(request_id, "argument", f"the key has more than {limits.key_nbytes} bytes")
        if len(value) > limits.value_nbytes:
            return Refused(request_id, "argument", f"the value of key {key!r} has {len(value)} bytes, the limit is {limits.value_nbytes}")
        grown = self.nbytes + len(value) - len(self.keys.get(key, b"")) + (0 if key in self.keys else len(key))
        if grown > limits.keys_nbytes:
            return Refused(request_id, "limit", f"the keys of job {self.job} may hold {limits.keys_nbytes} bytes in all")
        if key not in self.keys and len(self.keys) >= limits.keys:
            return Refused(request_id, "limit", f"job {self.job} may hold {limits.keys} keys")
        self.nbytes = grown
        self.keys[key] = value
        return Done(request_id)

    def load(self, key: str, value: bytes) -> None:
        """Store a value that was accepted before a restart."""
        self.keys[key] = value
        self.nbytes += len(key) + len(value)

    def add(self, request: Add) -> Number | Refused:
        """Add to a decimal number."""
        held = self.keys.get(request.key, b"0")
        total = int(held) + request.amount if _DECIMAL.match(held) else None
        if total is None:
            return Refused(request.id, "argument", f"key {request.key!r} does not hold a decimal number")
        if total not in _INT64:
            return Refused(request.id, "argument", f"key {request.key!r} would leave the range of 64 bits")
        done = self.set(request.id, request.key, b"%d" % total)
        return done if isinstance(done, Refused) else Number(request.id, total)

    def compare(self, request: Compare) -> Value | Refused:
        """Set the key if it holds what is expected."""
        held = self.keys.get(request.key)
        if held != request.expected:
            return Value(request.id, held)
        done = self.set(request.id, request.key, request.value)
        return done if isinstance(done, Refused) else Value(request.id, request.value, swapped=True)

    def delete(self, request_id: int, key: str) -> Number:
        """Forget a key."""
        value = self.keys.pop(key, None)
        if value is None:
            return Number(request_id, 0)
        self.nbytes -= len(key) + len(value)
        return Number(request_id, 1)

    def enter(self, request: Barrier, rank: int, ticket: Ticket) -> list[Ticket] | Refused | None:
        """Enter a barrier: everyone's tickets when it is complete, None while it waits."""
        if len(request.name.encode()) > self._limits.key_nbytes:
            return Refused(request.id, "argument", f"the barrier's name has more than {self._limits.key_nbytes} bytes")
        gone = [member for member in self.members if member.fate is not None]
        if gone:
            return self.broken(request.id, request.name, gone)
        waiting = self.barriers.setdefault(request.name, {})
        if rank in waiting:
            return Refused(request.id, "argument", f"rank {rank} is in barrier {request.name!r} already", [rank])
        waiting[rank] = ticket
        return list(self.barriers.pop(request.name).values()) if len(waiting) == self.size else None

    def gather(self, request: Gather, rank: int, ticket: Ticket) -> list[tuple[Ticket, Answer]]:
        """Take part in a gather: what is to be answered to whom, nothing while it waits."""
        limits = self._limits
        if len(request.name.encode()) > limits.key_nbytes:
            return [(ticket, Refused(request.id, "argument", f"the gather's name has more than {limits.key_nbytes} bytes"))]
        if len(request.value) > limits.value_nbytes:
            text = f"the value for gather {request.name!r} has {len(request.value)} bytes, the limit is {limits.value_nbytes}"
            return [(ticket, Refused(request.id, "argument", text))]
        if self.gathers.nbytes + len(request.value) > limits.keys_nbytes:
            text = f"the gathers of job {self.job} may hold {limits.keys_nbytes} bytes in all"
            return [(ticket, Refused(request.id, "limit", text))]
        outcome = self.gathers.enter(request.name, request.members, rank, request.value, ticket)
        if isinstance(outcome, Met):
            return [(held, Values(held[1], outcome.values)) for held in outcome.tickets]
        return [] if outcome is None else [(ticket, _refusal(ticket, outcome))]

    def part(self, member: Member) -> list[tuple[Ticket, Answer]]:
        """A member is gone: what is to be answered to whom because of it."""
        answers: list[tuple[Ticket, Answer]] = []
        for name, waiting in self.barriers.items():
            answers += [(ticket, self.broken(ticket[1], name, [member])) for ticket in waiting.values()]
        self.barriers.clear()
        fate = f"{member.fate.kind}: {member.fate.reason}" if member.fate is not None else "left"
        answers += [(ticket, _refusal(ticket, unmet)) for ticket, unmet in self.gathers.leave(member.rank, fate).items()]
        return answers

    def late(self, name: str, after: str) -> tuple[str, tuple[int, ...]]:
        """What those in a barrier are told at the timeout, and the ranks that are missing."""
        missing = self.missing(name)
        who = listed([member.title for member in missing])
        return f"barrier {name!r} of job {self.job} timed out after {after}: waiting for {who}", tuple(m.rank for m in missing)

    def withdraw(self, ticket: Ticket, name: str) -> None:
        """Take a waiting request out of a gather, a barrier or a key's queue."""
        self.gathers.withdraw(ticket)
        waiting = self.barriers.get(name, {})
        for rank in [rank for rank, held in waiting.items() if held == ticket]:
            del waiting[rank]
        if not waiting:
            self.barriers.pop(name, None)
        queue = self.key_waits.get(name, [])
        if ticket in queue:
            queue.remove(ticket)
        if not queue:
            self.key_waits.pop(name, None)

    def missing(self, name: str) -> list[Member]:
        """Who has not entered a barrier."""
        return [member for member in self.members if member.rank not in self.barriers.get(name, {})]

    def broken(self, request_id: int, name: str, gone: Sequence[Member]) -> Refused:
        """What those in a barrier are told when members can not come any more."""
        fates = [f"rank {m.rank} ({m.label}) {m.fate.kind}: {m.fate.reason}" for m in gone if m.fate is not None]
        text = f"barrier {name!r} of job {self.job} can not complete: {listed(fates, '; ')}"
        return Refused(request_id, "gone", text, [member.rank for member in gone])


@dataclass(slots=True)
class Job:
    """All that is known of one job name; ``worlds`` holds the generations that still have members."""

    name: str
    generation: int = 0
    forming: dict[str, Member] = field(default_factory=dict)
    """Those who wait for the next world, by member id, in the order of joining."""
    claims: dict[int, Member] = field(default_factory=dict)
    """Those of them who want a certain rank."""
    worlds: dict[int, World] = field(default_factory=dict)
    failure: Failure | None = None
    ended: tuple[int, float] | None = None
    """The last generation that ended well, and until when it is remembered."""

    def lapse(self, now: float) -> bool:
        """Forget what is past its time; True when nothing is left of the job."""
        if self.failure is not None and now >= self.failure.until:
            self.failure = None
        if self.ended is not None and now >= self.ended[1]:
            self.ended = None
        return not (self.forming or self.worlds or self.failure or self.ended)

    def enter(self, member: Member) -> None:
        """Take part in forming the next world."""
        self.forming[member.id] = member
        if member.wanted is not None:
            self.claims.setdefault(member.wanted, member)

    def withdraw(self, member: Member) -> None:
        """Take part no more; the rank is free again."""
        del self.forming[member.id]
        if member.wanted is not None and self.claims.get(member.wanted) is member:
            del self.claims[member.wanted]

    def dissolve(self) -> list[Member]:
        """End the formation; gives back who took part."""
        members = list(self.forming.values())
        self.forming.clear()
        self.claims.clear()
        return members

    def missing(self) -> list[int]:
        """The ranks that the forming world still waits for, if those without a wish take the lowest free ones."""
        members = self.forming.values()
        world_size = max((member.world_size for member in members), default=0)
        free = [rank for rank in range(world_size) if rank not in self.claims]
        return free[sum(member.wanted is None for member in members) :]

    def place(self) -> list[Member]:
        """Give every member of a complete formation its rank: wishes first, then in the order of joining."""
        free = iter([rank for rank in range(len(self.forming)) if rank not in self.claims])
        members = self.dissolve()
        for member in members:
            member.rank = next(free) if member.wanted is None else member.wanted
        return sorted(members, key=lambda member: member.rank)


def listed(items: Sequence[str], separator: str = ", ") -> str:
    """The items as a text of bounded length."""
    rest = len(items) - _LISTED
    return separator.join(items[:_LISTED]) + (f"{separator}and {rest} more" if rest > 0 else "")


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 2`` or ``ranks 2, 3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed([str(rank) for rank in ranks])}"


def _refusal(ticket: Ticket, unmet: Unmet) -> Refused:
    return Refused(ticket[1], unmet.code, unmet.text, list(unmet.ranks))
