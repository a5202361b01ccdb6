"""The rendezvous as a state machine over all jobs: no I/O and no clock.

Connections are numbers, time is passed in, and every call returns the messages to deliver. Whoever drives it calls `Service.expire`
at `Service.next_deadline`; so the server, a third party, judges who is late, and one event has one outcome for all members.

A job forms *worlds*, counted by generations. A process that was a member of generation g may join again with ``after=g`` and is then
a founder of the next generation; a fresh process is refused while a world exists, and for a while after it ended well.
Generations share nothing: a world's keys, barriers and gathers go with its last member.

A member of a formed world whose connection breaks is *away* for a while, in which it may take up its place over another connection;
then it is lost. After a restart all members are away. A member of a world that is not known is refused: it never forms another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from aiodist.rendezvous.behind import Stragglers
from aiodist.rendezvous.calls import Calls, Delivery
from aiodist.rendezvous.identity import AWAY, identity
from aiodist.rendezvous.job import Failure, Job, Limits, Member, World
from aiodist.rendezvous.logs import Event
from aiodist.rendezvous.messages import (
    OCCUPIED,
    Beat,
    Cancel,
    Done,
    Formed,
    Hello,
    Join,
    Leave,
    Notice,
    Notices,
    Refused,
    Request,
    Resume,
    Roster,
    Seen,
)
from aiodist.rendezvous.news import News
from aiodist.rendezvous.pulse import Pulses
from aiodist.rendezvous.records import Changes, Saved
from aiodist.rendezvous.refusals import late_join, why_unknown, wrong_join
from aiodist.rendezvous.waits import Absences, Wait

__all__ = ["Delivery", "Service"]


class Service:
    """All jobs of one server.

    Args:
        limits: What it holds at most.
        journalled: Whether somebody writes `changes` down.
    """

    def __init__(self, limits: Limits | None = None, *, journalled: bool = False) -> None:
        self.limits = limits or Limits()
        self.changes = Changes(kept=journalled)
        self._calls = Calls(self.limits, self.changes)
        self._waits = self._calls.waits
        self._jobs: dict[str, Job] = {}
        self._members: dict[int, Member] = {}
        self._by_id: dict[tuple[str, str], Member] = {}
        self._absences = Absences()
        self._news = News(self._calls.send)
        self._events: list[Event] = []
        self._pulses = Pulses()
        self._stragglers = Stragglers()

    # -- what the driver calls ---------------------------------------------------------------------------------------------------

    def handle(self, conn: int, request: Request, now: float) -> list[Delivery]:
        """Take one request of a connection."""
        member = self._members.get(conn)
        match request:
            case Hello():
                self._calls.refuse(conn, 0, "state", "the connection said hello already")
            case Beat():
                self._beat(member, request, now)
            case Cancel():
                self._cancel(conn, request.id, now)
            case Seen():
                if member is not None:
                    self._calls.seen(member, request.ids)
            case _ if self._waits.get((conn, request.id)) is not None:
                self._calls.refuse(conn, 0, "argument", f"request number {request.id} is in use")
            case Join():
                self._join(conn, request, now)
            case Resume():
                self._resume(conn, request)
            case Leave():
                self._leave(conn, request, now)
            case _ if member is None or member.world is None:
                self._calls.refuse(conn, request.id, "state", "this connection is not a member of a formed world: join first")
            case _:
                self._calls.serve(member, member.world, request, now)
        return self._calls.flush()

    def disconnect(self, conn: int, reason: str, now: float, *, may_return: bool = False) -> list[Delivery]:
        """Take the end of a connection; the members of its world are told, unless its member may return and does so in time."""
        member = self._members.get(conn)
        if member is not None and member.world is not None and may_return:
            self._go_away(member, reason, now + self.limits.absent_s)
        elif member is not None:
            self._part(member, "lost", reason, now)
        return self._calls.flush()

    def expire(self, now: float) -> list[Delivery]:
        """End the waits whose time is over, and give up the members that did not come back in time."""
        for member, reason in self._absences.due(now):
            self._part(member, "lost", reason, now)
        for wait in self._waits.due(now):
            if wait.member.world is None:
                self._late_join(wait, now)
            else:
                self._calls.late(wait, wait.member.world)
        for member in self._pulses.due(now):
            self._note("stalled", member, member.reason)
        for member in self._stragglers.due(now):
            self._note("stuck" if member.state == "stuck" else "resumed", member, member.reason)
        self._news.due(now)
        return self._calls.flush()

    def next_deadline(self) -> float | None:
        """When `expire` has something to do, unless something else happens first."""
        parts = (self._waits, self._absences, self._pulses, self._stragglers, self._news)
        return min((deadline for part in parts if (deadline := part.next_deadline()) is not None), default=None)

    def restore(self, saved: Saved, now: float) -> None:
        """Take over what an earlier server has written down; the members may return for a while."""
        for name, generation in saved.ended.items():
            self._jobs[name] = Job(name, generation, ended=(generation, now + self.limits.ended_s))
        away = f"it did not return within {self.limits.restart_s:g} s after the rendezvous was started again"
        for world in saved.worlds:
            job = self._jobs.setdefault(world.job, Job(world.job))
            job.generation = max(job.generation, world.generation)
            job.worlds[world.generation] = world
            members = world.active()
            for member in members:
                self._by_id[world.job, member.id] = member
                member.absence = "the rendezvous was started again"
                self._absences.add(member, now + self.limits.restart_s, away)
            self._events.append(Event("restored", job.name, world.generation, reason=f"{len(members)} of {world.size} ranks may return"))

    def board(self, name: str) -> World:
        """Return the world of a job that nobody is a member of: what the server itself holds, made when it is first used, not written down.

        Raises:
            ValueError: members use the job's name.
        """
        job = self._jobs.setdefault(name, Job(name, 1))
        if job.forming or any(world.size for world in job.worlds.values()):
            raise ValueError(f"a job is called {name}: that name is needed for the calls of aiodist.sync")
        return job.worlds.setdefault(1, World(name, 1, (), self.limits))

    def job(self, name: str, now: float) -> Job | None:
        """A job's records, or None where it is unknown."""
        job = self._jobs.get(name)
        return None if job is None or self._lapse(job, now) else job

    def jobs(self, now: float) -> Iterator[Job]:
        """All jobs' records."""
        return (job for job in self._jobs.values() if not self._lapse(job, now))

    def has_member(self, conn: int) -> bool:
        """Whether the connection is that of a member of a formed or forming world."""
        return conn in self._members

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
            self._calls.refuse(conn, request.id, "argument", problem)
        elif self._members.get(conn) not in (None, known):
            self._calls.refuse(conn, request.id, "state", "this connection has joined as another member already")
        elif known is not None:
            self._join_again(known, conn, request, now)
        else:
            self._join_new(conn, request, now)
        self._drop_if_empty(request.job, now)

    def _join_new(self, conn: int, request: Join, now: float) -> None:
        job = self._job(request.job, now)
        if job is None:
            self._calls.refuse(conn, request.id, "limit", f"the rendezvous holds {self.limits.jobs} jobs and takes no more")
            return
        closed = self._closed(job, request, now)
        if closed is not None:
            self._calls.send(conn, closed)
            if closed.code != OCCUPIED:
                self._events.append(Event("refused", job.name, job.generation, request.rank, **identity(request.info), reason=closed.text))
        else:
            self._admit(job, conn, request, now)

    def _job(self, name: str, now: float) -> Job | None:
        job = self._jobs.get(name)
        if job is not None:
            self._lapse(job, now)
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
                text = f"job {job.name} is already formed (world {world.size})"
                if all(
                    member.state == "away" for member in world.active()
                ):  # Killed all at once, or this server was started again a moment ago.
                    return Refused(request.id, OCCUPIED, f"{text}, though none of its members is connected now")
                return Refused(request.id, "formed", text)
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
        self._calls.wait(member, request, "join", job.name, now)
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
        self.changes.formed(world)
        roster = Roster([member.info for member in members])
        for member in members:
            self._greet(member, world, roster)

    def _greet(self, member: Member, world: World, roster: Roster) -> None:
        self._calls.send(member.conn, roster, Formed(member.request, member.rank, world.size, world.generation))

    def _join_again(self, member: Member, conn: int, request: Join, now: float) -> None:
        """The same join once more, because its first answer was lost; its connection may be a new one."""
        if (member.wanted, member.world_size) != (request.rank, request.world_size):
            self._calls.refuse(conn, request.id, "argument", "the join was sent again with another rank or world size")
            return
        self._take_up(member, conn)
        member.request = request.id
        if member.world is None:
            self._calls.wait(member, request, "join", member.job, now)
        else:
            self._calls.seen(member, list(member.told))  # another client's numbers have another meaning
            self.changes.member(member)
            self._greet(member, member.world, Roster([other.info for other in member.world.members]))

    def _resume(self, conn: int, request: Resume) -> None:
        """Give a member its place back, over this connection."""
        member = self._by_id.get((request.job, request.member))
        if member is None or member.world is None or member.world.generation != request.generation:
            self._calls.refuse(conn, request.id, "unknown", why_unknown(self._jobs.get(request.job), request))
        elif self._members.get(conn) not in (None, member):
            self._calls.refuse(conn, request.id, "state", "this connection has joined as another member already")
        else:
            self._take_up(member, conn)
            pending = set(request.pending)
            self._calls.seen(member, [number for number in member.told if number not in pending])
            fates = [other.fate for other in member.world.members if other.fate is not None]
            self._calls.send(conn, Done(request.id), *([Notices(fates)] if fates else []))

    def _take_up(self, member: Member, conn: int) -> None:
        """From now on a member speaks over this connection."""
        if member.world is not None and member.conn != conn:
            self._note("returned", member)
        self._hang_up(member, "the member joined again")
        self._absences.end(member)
        member.conn = conn
        self._members[conn] = member

    def _go_away(self, member: Member, reason: str, until: float) -> None:
        self._hang_up(member, "its connection ended")
        member.conn, member.absence = AWAY, reason
        self._pulses.pause(member)
        self._absences.add(member, until, reason)
        self._note("away", member, reason)

    def _hang_up(self, member: Member, why: str) -> None:
        """End what a member does over its connection."""
        for wait in self._waits.of(member.conn):
            self._calls.end_wait(wait, "withdrawn", why)
        self._members.pop(member.conn, None)

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
            self._calls.refuse(member.conn, member.request, "failed", text, ranks)

    # -- leaving -----------------------------------------------------------------------------------------------------------------

    def _leave(self, conn: int, request: Leave, now: float) -> None:
        member = self._members.get(conn)
        if member is not None:
            self._part(member, "left" if request.reason is None else "failed", request.reason or "no reason given", now)
        self._calls.send(conn, Done(request.id))

    def _part(self, member: Member, kind: Literal["lost", "left", "failed"], reason: str, now: float) -> None:
        """Take a member out, of a forming world silently, of a formed one with a notice to the others."""
        self._hang_up(member, "the member left")
        self._forget(member)
        job, world = self._jobs[member.job], member.world
        if world is None:
            job.withdraw(member)
            self._note("withdrew", member, reason)
        else:
            member.fate = Notice(kind, member.rank, "it said goodbye" if kind == "left" else reason, member.info)
            self._note(kind, member, member.fate.reason)
            self._calls.seen(member, list(member.told))
            self.changes.member(member)
            self._news.add(world, member.fate, now)
            self._calls.answer(world.part(member))
            if not world.active():
                self._news.drop(world)
                del job.worlds[world.generation]
                self.changes.over(world)
                ended_well = all(other.fate is not None and other.fate.kind == "left" for other in world.members)
                if ended_well and (job.ended is None or job.ended[0] < world.generation):
                    job.ended = (world.generation, now + self.limits.ended_s)
                    self.changes.ended(world)
        self._drop_if_empty(job.name, now)

    def _note(self, event: str, member: Member, reason: str | None = None) -> None:
        rank, generation = (member.wanted, 0) if member.world is None else (member.rank, member.world.generation)
        self._events.append(Event(event, member.job, generation, rank, **identity(member.info), reason=reason))

    def _beat(self, member: Member | None, request: Beat, now: float) -> None:
        if member is None:
            return
        if self._pulses.beat(member, request.progress, now):
            self._note("resumed", member)
        if member.world is not None and request.progress:
            self._stragglers.told(member.world, now)

    def _forget(self, member: Member) -> None:
        self._pulses.drop(member)
        self._members.pop(member.conn, None)
        self._absences.end(member)
        del self._by_id[member.job, member.id]

    def _drop_if_empty(self, name: str, now: float) -> None:
        job = self._jobs.get(name)
        if job is not None and self._lapse(job, now):
            del self._jobs[name]

    def _lapse(self, job: Job, now: float) -> bool:
        ended = job.ended
        nothing_left = job.lapse(now)
        if ended is not None and job.ended is None:
            self.changes.ended_long_ago(job)
        return nothing_left

    def _cancel(self, conn: int, request_id: int, now: float) -> None:
        member = self._members.get(conn)
        wait = self._waits.get((conn, request_id))
        if member is not None and member.request == request_id:
            # Also when the answer is already on its way: then the world has formed, and its other members must hear of it.
            self._part(member, "failed", "its join was cancelled", now)
        elif wait is not None:
            self._calls.end_wait(wait, "withdrawn", "the request was cancelled")
        elif member is not None:
            self._calls.seen(member, [request_id])

    def _late_join(self, wait: Wait, now: float) -> None:
        job = self._jobs[wait.member.job]
        text, missing = late_join(job, wait.member.world_size, wait.timeout)
        self._fail_forming(job, text, missing, now, remember=False)
        self._drop_if_empty(job.name, now)
