"""The segment pipeline of large collectives: staging and result rings, several calls on the same rings.

Each rank has, in memory that the others read, three counters it alone writes (`staged`, `reduced`, `copied`), a staging ring
and a result ring of D segments each, and `abort_from`. A counter holds call * BASE + rounds done. A rank does one job at a
time (stage, reduce or copy out one round) and takes any that its gates allow. Writing a segment is two steps with TORN in
between; reading one is a step per peer. A segment holds the counter value it was written for, or SCRAP once the rings went
back to the pool after a failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

BASE = 16  # stands for 1 << 32
TORN, EMPTY, SCRAP = -1, -2, -3
START, STAGE, REDUCE, COPY, FINISH, FAIL, END = range(7)
IDLE = -1
STAGED, REDUCED, COPIED = range(3)


@dataclass(frozen=True)
class Rules:
    """The rules of the pipeline; False takes one out."""

    gate_staging: bool = True  # stage t waits until every peer's reduced > t - D
    gate_result: bool = True  # reduce t waits until every peer's copied > t - D
    gate_own_result: bool = True  # ... and my own, where I copy out of my own result ring too
    wait_staged: bool = True  # reduce t waits until every peer's staged > t
    wait_reduced: bool = True  # copy out t waits until every peer's reduced > t
    count_last: bool = True  # a counter is stored after the segment is whole
    finish_wait: bool = True  # a call ends only when every peer has reduced and copied all rounds
    finish_at_least: bool = True  # ... compared by >=: a peer may be in the next call already; False: by ==
    numbered: bool = True  # counters carry the call number; False: they go back to 0
    abort_check: bool = True  # every peer's abort_from is loaded before success


class Rank(NamedTuple):
    """One rank: what others read, then what only it knows."""

    counts: tuple[int, int, int]
    staging: tuple[int, ...]
    result: tuple[int, ...]
    abort_from: int
    call: int = 0
    job: int = START
    at: int = 0  # position within the job
    tainted: bool = False  # has read a reused segment in this call


class World(NamedTuple):
    ranks: tuple[Rank, ...]
    timeouts: int
    fault: str = ""


Move = tuple[str, World, bool]


@dataclass
class Large:
    """The model.

    Attributes:
        rounds: The number of rounds of each call, one after the other on the same rings.
        gathers: The calls that gather: a rank gives out its own segments and waits for nobody's (no staging).
        strict: The gates of a call's first D rounds wait for the peers to enter the call; else those rounds have no gate.
        own_result: A rank copies its own chunk out of its own result ring too.
        timeouts: How many times a rank may give up.
    """

    ranks: int = 2
    depth: int = 2
    rounds: tuple[int, ...] = (3, 3)
    gathers: tuple[int, ...] = ()
    strict: bool = False
    own_result: bool = False
    timeouts: int = 0
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        self.peers = [[(p + i) % self.ranks for i in range(1, self.ranks)] for p in range(self.ranks)]

    def first(self) -> World:
        ring = (EMPTY,) * self.depth
        return World((Rank((-1, -1, -1), ring, ring, len(self.rounds)),) * self.ranks, self.timeouts)

    def broken(self, world: World) -> str:
        return world.fault

    def ended(self, world: World) -> bool:
        return all(rank.job == END for rank in world.ranks)

    def steps(self, world: World) -> Iterator[Move]:
        for p in range(self.ranks):
            rank = world.ranks[p]
            if rank.job == IDLE:
                yield from self._idle(world, p)
            elif rank.job in (START, STAGE):
                yield self._start(world, p) if rank.job == START else self._stage(world, p)
            elif rank.job in (REDUCE, COPY):
                yield self._reduce(world, p) if rank.job == REDUCE else self._copy(world, p)
            elif rank.job != END:
                yield self._finish(world, p) if rank.job == FINISH else self._fail(world, p)
            yield from self._outside(world, p)

    def _put(self, world: World, p: int, rank: Rank, fault: str = "") -> World:
        return world._replace(ranks=(*world.ranks[:p], rank, *world.ranks[p + 1 :]), fault=fault)

    # -- gates ----------------------------------------------------------------------------------------------------------

    def _base(self, call: int) -> int:
        return call * BASE if self.rules.numbered else 0

    def _done(self, rank: Rank, which: int) -> int:
        """Rounds of its own call a rank has done."""
        return rank.counts[which] - self._base(rank.call)

    def _past(self, world: World, p: int, which: int, t: int, own: bool = False) -> bool:
        """Whether the peers' counter is past round t (below 0: a round of the call before)."""
        if t < 0 and not self.strict:
            return True
        value = self._base(world.ranks[p].call) + t
        return all(world.ranks[q].counts[which] > value for q in (*self.peers[p], *((p,) if own else ())))

    def _may(self, world: World, p: int, job: int) -> bool:
        rank, rules = world.ranks[p], self.rules
        t = self._done(rank, job - STAGE)
        if t >= self.rounds[rank.call]:
            return False
        if job == STAGE:
            return not rules.gate_staging or self._past(world, p, REDUCED, t - self.depth)
        if job == REDUCE:
            if self.own_result and rules.gate_own_result and self._done(rank, COPIED) <= t - self.depth:
                return False
            if rules.gate_result and not self._past(world, p, COPIED, t - self.depth):
                return False
            return not rules.wait_staged or rank.call in self.gathers or self._past(world, p, STAGED, t)
        return self._done(rank, REDUCED) > t and (not rules.wait_reduced or self._past(world, p, REDUCED, t))

    def _may_finish(self, world: World, p: int) -> bool:
        rank, total = world.ranks[p], self.rounds[world.ranks[p].call]
        if any(self._done(rank, which) != total for which in (STAGED, REDUCED, COPIED)):
            return False
        if not self.rules.finish_wait:
            return True
        goal = self._base(rank.call) + total
        seen = [world.ranks[q].counts[which] for q in self.peers[p] for which in (REDUCED, COPIED)]
        return all(count >= goal if self.rules.finish_at_least else count == goal for count in seen)

    # -- what a rank does -------------------------------------------------------------------------------------------------

    def _idle(self, world: World, p: int) -> Iterator[Move]:
        rank = world.ranks[p]
        jobs = [job for job in (STAGE, REDUCE, COPY) if self._may(world, p, job)]
        for job in jobs:
            what = f"{('stages', 'reduces', 'copies out')[job - STAGE]} round {self._done(rank, job - STAGE)} of call {rank.call}"
            at = self.ranks - 1 if job == REDUCE and rank.call in self.gathers else 0
            yield f"{p}: {what}", self._put(world, p, rank._replace(job=job, at=at)), True
        if self._may_finish(world, p):
            yield f"{p}: sees that all are done with call {rank.call}", self._put(world, p, rank._replace(job=FINISH, at=0)), True
        elif not jobs and any(world.ranks[q].abort_from <= rank.call for q in self.peers[p]):
            yield f"{p}: sees an abort", self._put(world, p, rank._replace(job=FAIL)), True

    def _count(self, rank: Rank, which: int, value: int) -> Rank:
        counts = list(rank.counts)
        counts[which] = value
        return rank._replace(counts=(counts[0], counts[1], counts[2]))

    def _start(self, world: World, p: int) -> Move:
        rank = world.ranks[p]
        done = self.rounds[rank.call] if rank.call in self.gathers and rank.at == STAGED else 0
        after = self._count(rank, rank.at, self._base(rank.call) + done)._replace(at=rank.at + 1)
        if after.at == 3:
            after = after._replace(job=IDLE, at=0)
        return f"{p}: {('staged', 'reduced', 'copied')[rank.at]} = start of call {rank.call}", self._put(world, p, after), True

    def _write(self, rank: Rank, which: int, second: bool) -> Rank:
        """One of the two steps of writing a segment; with the second (without `count_last`: the first) goes the counter."""
        counted = second and not self.rules.count_last
        t = self._done(rank, which) - counted
        ring = list(rank.staging if which == STAGED else rank.result)
        ring[t % self.depth] = rank.call * BASE + t if second else TORN
        rank = rank._replace(staging=tuple(ring)) if which == STAGED else rank._replace(result=tuple(ring))
        if second == self.rules.count_last:
            rank = self._count(rank, which, rank.counts[which] + 1)
        return rank._replace(job=IDLE, at=0) if second else rank._replace(at=rank.at + 1)

    def _stage(self, world: World, p: int) -> Move:
        rank = world.ranks[p]
        after = self._write(rank, STAGED, rank.at == 1)
        return f"{p}: {'ends' if rank.at else 'begins'} writing its staging slot", self._put(world, p, after), True

    def _see(self, rank: Rank, value: int, t: int) -> tuple[Rank, str]:
        if value == SCRAP:
            return rank._replace(tainted=True), ""
        meant = rank.call * BASE + t
        return rank, "" if value == meant else f"read segment {_name(value)} where {_name(meant)} was meant"

    def _reduce(self, world: World, p: int) -> Move:
        rank = world.ranks[p]
        if rank.at >= self.ranks - 1:
            second = rank.at == self.ranks
            after = self._write(rank, REDUCED, second)
            return f"{p}: {'ends' if second else 'begins'} writing its result slot", self._put(world, p, after), True
        q, t = self.peers[p][rank.at], self._done(rank, REDUCED)
        after, fault = self._see(rank, world.ranks[q].staging[t % self.depth], t)
        return f"{p}: reads rank {q}'s staging slot", self._put(world, p, after._replace(at=rank.at + 1), fault), True

    def _copy(self, world: World, p: int) -> Move:
        rank, t = world.ranks[p], self._done(world.ranks[p], COPIED)
        sources = [*self.peers[p], *((p,) if self.own_result else ())]
        if rank.at == len(sources):
            after = self._count(rank, COPIED, rank.counts[COPIED] + 1)._replace(job=IDLE, at=0)
            return f"{p}: counts round {t} as copied", self._put(world, p, after), True
        q = sources[rank.at]
        after, fault = self._see(rank, world.ranks[q].result[t % self.depth], t)
        return f"{p}: reads rank {q}'s result slot", self._put(world, p, after._replace(at=rank.at + 1), fault), True

    def _finish(self, world: World, p: int) -> Move:
        """Load every peer's abort_from, one a step, then succeed."""
        rank = world.ranks[p]
        if self.rules.abort_check and self.timeouts and rank.at < self.ranks - 1:
            q = self.peers[p][rank.at]
            aborted = world.ranks[q].abort_from <= rank.call
            after = rank._replace(job=FAIL) if aborted else rank._replace(at=rank.at + 1)
            return f"{p}: rank {q} has {'' if aborted else 'not '}aborted call {rank.call}", self._put(world, p, after), True
        fault = f"succeeds in call {rank.call} with reused memory" if rank.tainted else ""
        last = rank.call + 1 == len(self.rounds)
        after = rank._replace(call=rank.call + 1, job=END if last else START, at=0)
        return f"{p}: succeeds in call {rank.call}", self._put(world, p, after, fault), True

    def _fail(self, world: World, p: int) -> Move:
        rank = world.ranks[p]
        after = rank._replace(abort_from=rank.call, job=END, at=0, tainted=False)
        return f"{p}: abort_from = {rank.call}, fails", self._put(world, p, after), True

    def _outside(self, world: World, p: int) -> Iterator[Move]:
        rank = world.ranks[p]
        if world.timeouts and rank.job == IDLE:
            late = self._put(world, p, rank._replace(job=FAIL))
            yield f"{p}: times out in call {rank.call}", late._replace(timeouts=world.timeouts - 1), False
        if rank.abort_from < len(self.rounds) and rank.staging[0] != SCRAP:
            ring = (SCRAP,) * self.depth
            yield f"{p}: gives its rings back, they are reused", self._put(world, p, rank._replace(staging=ring, result=ring)), False


def _name(value: int) -> str:
    names = {TORN: "half-written", EMPTY: "never written"}
    return names.get(value, f"{value // BASE}:{value % BASE}")
