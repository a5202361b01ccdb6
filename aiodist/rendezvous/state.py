"""The rendezvous as a state machine over all jobs: no I/O and no clock.

Connections are numbers, time is passed in, and every call returns the messages to deliver. Whoever drives it calls `Service.expire`
at `Service.next_deadline`; so the server, a third party, judges who is late, and one event has one outcome for all members.

A job forms *worlds*, counted by generations. A process that was a member of generation g may join again with ``after=g`` and is then
a founder of the next generation; a fresh process is refused while a world exists, and for a while after it ended well.
Generations share nothing: a world's keys, barriers and gathers go with its last member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from aiodist.rendezvous.job import Failure, Job, Limits, Member, Ticket, World, identity, listed, name_ranks, wrong_join
from aiodist.rendezvous.logs import Event
from aiodist.rendezvous.messages import (
    Add,
    Answer,
    Barrier,
    Beat,
    Cancel,
    Compare,
    Delete,
    Done,
    Formed,
    Gather,
    Get,
    Hello,
    Join,
    Leave,
    Notice,
    Notices,
    Refused,
    Request,
    Roster,
    Set,
    Value,
)
from aiodist.rendezvous.pulse import Pulses
from aiodist.rendezvous.waits import Wait, Waits

__all__ = ["Delivery", "Service"]

_TOGETHER_S: Final = 0.05
"""A thousand members that leave one by one would otherwise cost half a million messages."""


class Delivery(NamedTuple):
    """A message for a connection."""

    conn: int
    message: Answer


class Service:
    """All jobs of one server."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._jobs: dict[str, Job] = {}
        self._members: dict[int, Member] = {}
        self._by_id: dict[tuple[str, str], Member] = {}
        self._waits = Waits()
        self._untold: dict[World, None] = {}
        self._out: list[Delivery] = []
        self._events: list[Event] = []
        self._pulses = Pulses()

    # -- what the driver calls ---------------------------------------------------------------------------------------------------

    def handle(self, conn: int, request: Request, now: float) -> list[Delivery]:
        """Take one request of a connection."""
        member = self._members.get(conn)
        match request:
            case Hello():
                self._refuse(conn, 0, "state", "the connection said hello already")
            case Beat():
                self._beat(member, request, now)
            case Cancel():
                self._cancel(conn, request.id, now)
            case _ if self._waits.get((conn, request.id)) is not None:
                self._refuse(conn, 0, "argument", f"request number {request.id} is in use")
            case Join():
                self._join(conn, request, now)
            case Leave():
                self._leave(conn, request, now)
            case _ if member is None or member.world is None:
                self._refuse(conn, request.id, "state", "this connection is not a member of a formed world: join first")
            case Barrier():
                self._barrier(member, member.world, request, now)
            case Gather():
                self._gather(member, member.world, request, now)
            case _:
                self._key(member, member.world, request, now)
        return self._flush()

    def disconnect(self, conn: int, reason: str, now: float) -> list[Delivery]:
        """Take the end of a connection; the members of its world are told."""
        member = self._members.get(conn)
        if member is not None:
            self._part(member, "lost", reason, now)
        return self._flush()

    def expire(self, now: float) -> list[Delivery]:
        """End the waits whose time is over."""
        for wait in self._waits.due(now):
            self._late(wait, now)
        for member in self._pulses.due(now):
            self._note("stalled", member, "its heartbeats are missing")
        for world in [world for world in self._untold if world.tell_at <= now]:
            self._tell(world, now)
        return self._flush()

    def next_deadline(self) -> float | None:
        """When `expire` has something to do, unless something else happens first."""
        deadlines = [world.tell_at for world in self._untold]
        others = (self._waits.next_deadline(), self._pulses.next_deadline())
        return min([*deadlines, *(deadline for deadline in others if deadline is not None)], default=None)

    def job(self, name: str, now: float) -> Job | None:
        """A job's records, or None where it is unknown."""
        job = self._jobs.get(name)
        return None if job is None or job.lapse(now) else job

    def jobs(self, now: float) -> Iterator[Job]:
        """All jobs' records."""
        return (job for job in self._jobs.values() if not job.lapse(now))

    def waits(self) -> Counter[str]:
        """How many requests wait, by kind."""
        return Counter(wait.kind for wait in self._waits)

    def take_events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    # -- joining -----------------------------------------------------------------------------------------------------------------

    def _join(self, conn: int, request: Join, now: float) -> None:
        problem = wrong_join(request, self.limits)
        known = self._by_id.get((request.job, request.member))
        if problem is not None:
            self._refuse(conn, request.id, "argument", problem)
        elif self._members.get(conn) not in (None, known):
            self._refuse(conn, request.id, "state", "this connection has joined as another member already")
        elif known is not None:
            self._join_again(known, conn, request, now)
        else:
            self._join_new(conn, request, now)
        self._drop_if_empty(request.job, now)

    def _join_new(self, conn: int, request: Join, now: float) -> None:
        job = self._job(request.job, now)
        if job is None:
            self._refuse(conn, request.id, "limit", f"the rendezvous holds {self.limits.jobs} jobs and takes no more")
            return
        closed = self._closed(job, request, now)
        if closed is not None:
            self._out.append(Delivery(conn, closed))
            self._events.append(Event("refused", job.name, job.generation, request.rank, **identity(request.info), reason=closed.text))
        else:
            self._admit(job, conn, request, now)

    def _job(self, name: str, now: float) -> Job | None:
        job = self._jobs.get(name)
        if job is not None:
            job.lapse(now)
            return job
        if len(self._jobs) >= self.limits.jobs:
            for other in list(self._jobs):
                self._drop_if_empty(other, now)
        if len(self._jobs) >= self.limits.jobs:
            return None
        return self._jobs.setdefault(name, Job(name))

    def _closed(self, job: Job, request: Join, now: float) -> Refused | None:
        """Why a newcomer can not take part in forming this job's next world."""
        for generation, world in job.worlds.items():
            if generation > request.after:
                return Refused(request.id, "formed", f"job {job.name} is already formed (world {world.size})")
        if job.ended is not None and job.ended[0] > request.after:
            wait = f"its name is free again in {job.ended[1] - now:.0f} s"
            return Refused(request.id, "ended", f"job {job.name} has ended ({wait})")
        if job.failure is not None and not job.forming:
            failure = job.failure
            owed = failure.owed - 1
            job.failure = Failure(failure.text, failure.ranks, owed, failure.until) if owed > 0 else None
            return Refused(request.id, "failed", failure.text, list(failure.ranks))
        return None

    def _admit(self, job: Job, conn: int, request: Join, now: float) -> None:
        member = Member(request.member, job.name, conn, request.id, request.rank, request.world_size, request.after, request.info)
        first = next(iter(job.forming.values()), member)
        job.enter(member)
        holder = member if member.wanted is None else job.claims[member.wanted]
        self._members[conn] = member
        self._by_id[job.name, member.id] = member
        self._note("joined", member)
        self._wait(member, request.id, "join", job.name, request.timeout, now)
        if first.world_size != member.world_size:
            sizes = f"world size {first.world_size} ({first.label}) and {member.world_size} ({member.label})"
            self._fail_forming(job, f"job {job.name}: members disagree on the world: {sizes}", (), now)
        elif holder is not member:
            text = f"job {job.name}: rank {holder.wanted} is taken by {holder.label}, so {member.label} can not have it"
            self._fail_forming(job, text, (request.rank or 0,), now)
        elif len(job.forming) == member.world_size:
            self._form(job)

    def _form(self, job: Job) -> None:
        members = job.place()
        job.generation = max(job.generation, *(member.after for member in members)) + 1
        world = World(job.name, job.generation, members, self.limits)
        job.worlds[job.generation] = world
        job.ended = job.failure = None
        for member in members:
            member.world = world
            self._waits.end((member.conn, member.request))
        self._events.append(Event("formed", job.name, job.generation, reason=f"{world.size} ranks"))
        roster = Roster([member.info for member in members])
        for member in members:
            self._greet(member, world, roster)

    def _greet(self, member: Member, world: World, roster: Roster) -> None:
        self._out.append(Delivery(member.conn, roster))
        self._out.append(Delivery(member.conn, Formed(member.request, member.rank, world.size, world.generation)))

    def _join_again(self, member: Member, conn: int, request: Join, now: float) -> None:
        """The same join once more, because its first answer was lost; its connection may be a new one."""
        if (member.wanted, member.world_size) != (request.rank, request.world_size):
            self._refuse(conn, request.id, "argument", "the join was sent again with another rank or world size")
            return
        for wait in self._waits.of(member.conn):
            self._end_wait(wait, "withdrawn", "the member joined again")
        del self._members[member.conn]
        member.conn, member.request = conn, request.id
        self._members[conn] = member
        if member.world is None:
            self._wait(member, request.id, "join", member.job, request.timeout, now)
        else:
            self._greet(member, member.world, Roster([other.info for other in member.world.members]))

    def _fail_forming(self, job: Job, text: str, ranks: tuple[int, ...], now: float, *, remember: bool = True) -> None:
        """Refuse everyone who takes part, and those who were still to come."""
        members = job.dissolve()
        owed = max(member.world_size for member in members) - len(members)
        if remember and owed > 0:
            job.failure = Failure(text, ranks, owed, now + self.limits.failed_s)
        self._events.append(Event("unformed", job.name, job.generation, reason=text))
        for member in members:
            self._forget(member)
            self._waits.end((member.conn, member.request))
            self._refuse(member.conn, member.request, "failed", text, ranks)

    # -- leaving -----------------------------------------------------------------------------------------------------------------

    def _leave(self, conn: int, request: Leave, now: float) -> None:
        member = self._members.get(conn)
        if member is not None:
            self._part(member, "left" if request.reason is None else "failed", request.reason or "no reason given", now)
        self._out.append(Delivery(conn, Done(request.id)))

    def _part(self, member: Member, kind: Literal["lost", "left", "failed"], reason: str, now: float) -> None:
        """Take a member out, of a forming world silently, of a formed one with a notice to the others."""
        for wait in self._waits.of(member.conn):
            self._end_wait(wait, "withdrawn", "the member left")
        self._forget(member)
        job, world = self._jobs[member.job], member.world
        if world is None:
            job.withdraw(member)
            self._note("withdrew", member, reason)
        else:
            member.fate = Notice(kind, member.rank, "it said goodbye" if kind == "left" else reason, member.info)
            self._note(kind, member, member.fate.reason)
            world.untold.append(member.fate)
            if now >= world.tell_at:
                self._tell(world, now)
            else:
                self._untold[world] = None
            self._answer(world.part(member))
            if not world.active():
                self._untold.pop(world, None)
                del job.worlds[world.generation]
                ended_well = all(other.fate is not None and other.fate.kind == "left" for other in world.members)
                if ended_well and (job.ended is None or job.ended[0] < world.generation):
                    job.ended = (world.generation, now + self.limits.ended_s)
        self._drop_if_empty(job.name, now)

    def _tell(self, world: World, now: float) -> None:
        """Tell the remaining members what befell others: a first one at once, those that follow closely together."""
        self._untold.pop(world, None)
        notices, world.untold, world.tell_at = Notices(world.untold), [], now + _TOGETHER_S
        self._out.extend(Delivery(member.conn, notices) for member in world.active())

    def _note(self, event: str, member: Member, reason: str | None = None) -> None:
        rank, generation = (member.wanted, 0) if member.world is None else (member.rank, member.world.generation)
        self._events.append(Event(event, member.job, generation, rank, **identity(member.info), reason=reason))

    def _beat(self, member: Member | None, request: Beat, now: float) -> None:
        if member is not None and self._pulses.beat(member, request.progress, now):
            self._note("resumed", member)

    def _forget(self, member: Member) -> None:
        self._pulses.drop(member)
        del self._members[member.conn]
        del self._by_id[member.job, member.id]

    def _drop_if_empty(self, name: str, now: float) -> None:
        job = self._jobs.get(name)
        if job is not None and job.lapse(now):
            del self._jobs[name]

    def _cancel(self, conn: int, request_id: int, now: float) -> None:
        member = self._members.get(conn)
        wait = self._waits.get((conn, request_id))
        if member is not None and member.request == request_id:
            # Also when the answer is already on its way: then the world has formed, and its other members must hear of it.
            self._part(member, "failed", "its join was cancelled", now)
        elif wait is not None:
            self._end_wait(wait, "withdrawn", "the request was cancelled")

    # -- keys, barriers, gathers -------------------------------------------------------------------------------------------------

    def _key(self, member: Member, world: World, request: Request, now: float) -> None:
        answer: Answer
        match request:
            case Get():
                if request.key not in world.keys:
                    if self._wait(member, request.id, "get", request.key, request.timeout, now):
                        world.key_waits.setdefault(request.key, []).append((member.conn, request.id))
                    return
                answer = Value(request.id, world.keys[request.key])
            case Set():
                answer = world.set(request.id, request.key, request.value)
            case Add():
                answer = world.add(request)
            case Compare():
                answer = world.compare(request)
            case Delete():
                answer = world.delete(request.id, request.key)
            case _:
                raise TypeError(f"{type(request).__name__} is not about a key")
        self._out.append(Delivery(member.conn, answer))
        for ticket in world.key_waits.pop(request.key, []) if request.key in world.keys else []:
            self._waits.end(ticket)
            self._out.append(Delivery(ticket[0], Value(ticket[1], world.keys[request.key])))

    def _barrier(self, member: Member, world: World, request: Barrier, now: float) -> None:
        if not self._wait(member, request.id, "barrier", request.name, request.timeout, now):
            return
        outcome = world.enter(request, member.rank, (member.conn, request.id))
        if isinstance(outcome, Refused):
            self._answer([((member.conn, request.id), outcome)])
        elif outcome is not None:
            self._answer([(ticket, Done(ticket[1])) for ticket in outcome])

    def _gather(self, member: Member, world: World, request: Gather, now: float) -> None:
        if self._wait(member, request.id, "gather", request.name, request.timeout, now):
            self._answer(world.gather(request, member.rank, (member.conn, request.id)))

    # -- waiting -----------------------------------------------------------------------------------------------------------------

    def _wait(
        self, member: Member, request_id: int, kind: Literal["join", "get", "barrier", "gather"], name: str, timeout: float, now: float
    ) -> bool:
        if self._waits.count(member.conn) >= self.limits.waits:
            self._refuse(member.conn, request_id, "limit", f"a member may wait for {self.limits.waits} things at a time")
            return False
        self._waits.add(Wait((member.conn, request_id), kind, name, timeout, now + timeout, member))
        return True

    def _answer(self, answers: list[tuple[Ticket, Answer]]) -> None:
        """End waits by their answers."""
        for ticket, answer in answers:
            self._waits.end(ticket)
            self._out.append(Delivery(ticket[0], answer))

    def _end_wait(self, wait: Wait, code: str, text: str, ranks: tuple[int, ...] = ()) -> None:
        self._waits.end(wait.ticket)
        if wait.member.world is not None:
            wait.member.world.withdraw(wait.ticket, wait.name)
        self._refuse(*wait.ticket, code, text, ranks)

    def _late(self, wait: Wait, now: float) -> None:
        job, world, after = self._jobs[wait.member.job], wait.member.world, f"{wait.timeout:g} s"
        if world is None:
            missing = job.missing()
            here = listed([f"rank {'?' if m.wanted is None else m.wanted} is {m.label}" for m in job.forming.values()])
            text = f"job {job.name}: {name_ranks(missing)} of {wait.member.world_size} did not join within {after} ({here})"
            self._fail_forming(job, text, tuple(missing), now, remember=False)
            self._drop_if_empty(job.name, now)
        elif wait.kind == "get":
            self._end_wait(wait, "timeout", f"key {wait.name!r} of job {job.name} was not set within {after}")
        elif wait.kind == "gather":
            unmet = world.gathers.late(wait.ticket, wait.timeout)
            self._end_wait(wait, unmet.code, unmet.text, unmet.ranks)
        else:
            self._end_wait(wait, "timeout", *world.late(wait.name, after))

    def _refuse(self, conn: int, request_id: int, code: str, text: str, ranks: tuple[int, ...] = ()) -> None:
        self._out.append(Delivery(conn, Refused(request_id, code, text, list(ranks))))

    def _flush(self) -> list[Delivery]:
        out, self._out = self._out, []
        return out
