"""The header ring: posting, reading, sleeping, aborting and dying, with every rule removable.

Each rank has, in memory that the others read: `posted` and `consumed` (counts of calls), K header slots of two halves that
are written and read one at a time, `abort_from` (the lowest call that fails) and `sleeping`. A doorbell keeps its ring until
it is drained. A rank works on two jobs, posting its next call and reading its oldest one, and may turn from one to the
other at any step. Under `tso` a store waits in the rank's own buffer, in order, and later loads may pass it; a seq_cst store
leaves only with the buffer empty.

A slot half holds the number of the call it was written for, or SCRAP once the memory of a failed call was reused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

EMPTY, SCRAP = -1, -2
POSTED, CONSUMED, ABORT, SLEEPING = -1, -2, -3, -4  # places a store goes to; >= 0 is a slot half
IDLE, RING, DOZE, CHECK, DRAIN, ASLEEP, WOKEN, STALE, FAIL_OWN, FAIL_SEEN, END, DEAD = range(12)
CLEAN, READ_SCRAP, READ_WARNED = range(3)


@dataclass(frozen=True)
class Rules:
    """The rules of the protocol; False takes one out (and `gate_by_posted=True` puts an older, weaker gate in)."""

    gate_peers: bool = True  # call s waits until every peer's consumed >= s + 1 - K
    gate_own: bool = True  # ... and my own
    gate_tight: bool = True  # False: >= s - K, one call too early
    gate_by_posted: bool = False  # the gate is only "every peer has posted s - 1"
    post_last: bool = True  # posted is stored after the whole slot
    flag_seq_cst: bool = True
    sleeper_seq_cst: bool = True
    check_again: bool = True  # re-check all flags between setting sleeping and sleeping
    drain_first: bool = True  # drain the doorbell before that re-check, not after it
    ring_on_consumed: bool = True
    ring_on_abort: bool = True
    abort_check: bool = True  # before success, load every peer's abort_from
    abort_check_last: bool = True  # ... after the last read of a peer's memory
    abort_before_reuse: bool = True  # abort_from is stored before the caller may reuse its memory
    publish_every_failure: bool = True  # a rank that fails because of others stores its own abort_from too
    look_again_at_death: bool = True  # flags are read once more after a death was seen


class Rank(NamedTuple):
    """One rank: what others read, then its doorbell and store buffer, then what only it knows."""

    posted: int
    consumed: int
    slots: tuple[int, ...]
    abort_from: int
    sleeping: int
    bell: int = 0
    buffer: tuple[tuple[int, int], ...] = ()
    state: int = IDLE
    at: int = 0  # position within the state
    head: int = 0  # calls completed
    next: int = 0  # calls posted
    writing: int = 0  # halves of the next call's slot written
    reading: int = 0  # position in the reading plan of the head
    limit: int = 0  # the lowest call that failed here
    seen: int = CLEAN  # the worst thing read for the head
    knows: bool = False  # has seen a death


class World(NamedTuple):
    ranks: tuple[Rank, ...]
    timeouts: int  # how many may still happen
    deaths: int
    whole: int = 0  # calls that every rank had posted when one died
    fault: str = ""


Move = tuple[str, World, bool]


@dataclass
class Ring:
    """The model. `window` is how many calls a rank may have in flight (default: all of them)."""

    ranks: int = 2
    slots: int = 1
    calls: int = 2
    window: int = 0
    tso: bool = False
    sleep: bool = False
    timeouts: int = 0
    deaths: int = 0
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        self.window = self.window or self.calls
        self.peers = [[(p + i) % self.ranks for i in range(1, self.ranks)] for p in range(self.ranks)]
        halves = [(q, half) for q in range(self.ranks) for half in (0, 1)]
        checks = [(i, ABORT) for i in range(self.ranks - 1)] if self.rules.abort_check and self.timeouts + self.deaths else []
        self.plan = halves + checks if self.rules.abort_check_last else checks + halves
        self.last_half = len(self.plan) - 1 - (len(checks) if self.rules.abort_check_last else 0)

    def first(self) -> World:
        never = self.calls
        rank = Rank(0, 0, (EMPTY,) * (2 * self.slots), never, 0, limit=never)
        return World((rank,) * self.ranks, self.timeouts, self.deaths)

    def broken(self, world: World) -> str:
        return world.fault

    def ended(self, world: World) -> bool:
        return all(rank.state in (END, DEAD) for rank in world.ranks)

    def steps(self, world: World) -> Iterator[Move]:
        for p in range(self.ranks):
            rank = world.ranks[p]
            if rank.buffer:
                yield f"{p}: its oldest store lands", self._put(world, p, self._land(rank, 1)), True
            if rank.state == IDLE:
                yield from self._idle(world, p)
            elif rank.state < END:
                yield from self._busy(world, p)
            yield from self._outside(world, p)

    # -- stores ---------------------------------------------------------------------------------------------------

    def _put(self, world: World, p: int, rank: Rank, fault: str = "") -> World:
        return world._replace(ranks=(*world.ranks[:p], rank, *world.ranks[p + 1 :]), fault=fault)

    def _store(self, rank: Rank, place: int, value: int, seq_cst: bool = False) -> Rank:
        if not self.tso:
            return self._apply(rank, place, value)
        rank = rank._replace(buffer=(*rank.buffer, (place, value)))
        return self._land(rank, len(rank.buffer)) if seq_cst else rank

    def _land(self, rank: Rank, count: int) -> Rank:
        for place, value in rank.buffer[:count]:
            rank = self._apply(rank, place, value)
        return rank._replace(buffer=rank.buffer[count:])

    def _apply(self, rank: Rank, place: int, value: int) -> Rank:
        if place >= 0:
            return rank._replace(slots=(*rank.slots[:place], value, *rank.slots[place + 1 :]))
        if place == POSTED:
            return rank._replace(posted=value)
        if place == CONSUMED:
            return rank._replace(consumed=value)
        if place == ABORT:
            return rank._replace(abort_from=value)
        return rank._replace(sleeping=value)

    def _after_flag(self, rank: Rank, ring: bool = True) -> Rank:
        """A flag was stored: go and look for sleepers, then on."""
        return rank._replace(state=RING, at=0) if self.sleep and ring else self._settle(rank)

    def _settle(self, rank: Rank) -> Rank:
        over = rank.head >= min(self.calls, rank.limit)
        return rank._replace(state=END if over else IDLE, at=0)

    # -- what a rank may do -----------------------------------------------------------------------------------------

    def _last(self, rank: Rank) -> int:
        return min(self.calls, rank.head + self.window, rank.limit)

    def _gate_own(self, rank: Rank) -> bool:
        return not self.rules.gate_own or rank.head >= rank.next - self.slots + self.rules.gate_tight

    def _gate_peer(self, rank: Rank, peer: Rank) -> bool:
        if self.rules.gate_by_posted:
            return rank.next < self.slots or peer.posted >= rank.next
        return not self.rules.gate_peers or peer.consumed >= rank.next - self.slots + self.rules.gate_tight

    def _may_post(self, world: World, p: int) -> bool:
        rank = world.ranks[p]
        if rank.writing:
            return True
        if rank.next >= self._last(rank) or rank.knows or not self._gate_own(rank):
            return False
        return all(self._gate_peer(rank, world.ranks[q]) for q in self.peers[p])

    def _may_read(self, world: World, p: int) -> bool:
        rank = world.ranks[p]
        if rank.reading:
            return True
        return rank.next > rank.head and all(world.ranks[q].posted > rank.head for q in self.peers[p])

    def _idle(self, world: World, p: int) -> Iterator[Move]:
        rank = world.ranks[p]
        post, read = self._may_post(world, p), self._may_read(world, p)
        if post:
            yield self._post(world, p)
        if read:
            yield self._read(world, p)
        if post or read:
            return
        if any(world.ranks[q].abort_from <= rank.head for q in self.peers[p]):
            yield self._turn(world, p, f"sees an abort from {rank.head} or lower", FAIL_SEEN, rank.head)
        elif rank.knows:
            yield self._turn(world, p, f"call {rank.head} lacks a header, a rank is dead", FAIL_SEEN, rank.head)
        else:
            if self.deaths:
                yield self._turn(world, p, "has looked at the flags: nothing to do", STALE)
            if self.sleep:
                yield self._turn(world, p, "finds nothing to do", DOZE)

    def _turn(self, world: World, p: int, label: str, state: int, at: int = 0) -> Move:
        return f"{p}: {label}", self._put(world, p, world.ranks[p]._replace(state=state, at=at)), True

    def _post(self, world: World, p: int) -> Move:
        rank = world.ranks[p]
        call = rank.next
        order = [0, 1, POSTED] if self.rules.post_last else [0, POSTED, 1]
        what = order[rank.writing]
        done = rank.writing == 2
        rank = rank._replace(writing=0 if done else rank.writing + 1, next=call + done)
        if what == POSTED:
            rank = self._after_flag(self._store(rank, POSTED, call + 1, self.rules.flag_seq_cst))
            return f"{p}: posted = {call + 1}", self._put(world, p, rank), True
        rank = self._store(rank, call % self.slots * 2 + what, call)
        return f"{p}: writes half {what} of call {call}", self._put(world, p, rank), True

    def _read(self, world: World, p: int) -> Move:
        rank = world.ranks[p]
        if rank.reading == len(self.plan):
            return self._complete(world, p)
        q, what = self.plan[rank.reading]
        onward = rank._replace(reading=rank.reading + 1)
        if what == ABORT:
            q = self.peers[p][q]
            if world.ranks[q].abort_from > rank.head:
                return f"{p}: rank {q} has not aborted call {rank.head}", self._put(world, p, onward), True
            failed = rank._replace(reading=0, seen=CLEAN, state=FAIL_SEEN, at=rank.head)
            return f"{p}: rank {q} has aborted call {rank.head}", self._put(world, p, failed), True
        value = self._load(world.ranks[q], rank.head % self.slots * 2 + what, own=p == q)
        label = f"{p}: reads half {what} of rank {q}'s slot for call {rank.head}"
        if value == SCRAP:
            onward = onward._replace(seen=READ_SCRAP)
        elif value != rank.head:
            return label, self._put(world, p, onward, f"rank {p} read call {value} where call {rank.head} was meant"), True
        if rank.reading == self.last_half and any(world.ranks[q].abort_from <= rank.head for q in self.peers[p]):
            onward = onward._replace(seen=onward.seen or READ_WARNED)
        return label, self._put(world, p, onward), True

    def _load(self, owner: Rank, place: int, own: bool) -> int:
        pending = [value for where, value in owner.buffer if where == place] if own else []
        return pending[-1] if pending else owner.slots[place]

    def _complete(self, world: World, p: int) -> Move:
        rank = world.ranks[p]
        what = {CLEAN: "", READ_SCRAP: "with reused memory", READ_WARNED: "though an abort was to be seen"}[rank.seen]
        fault = f"rank {p} succeeds in call {rank.head} {what}" if what else ""
        rank = rank._replace(head=rank.head + 1, reading=0)
        rank = self._after_flag(self._store(rank, CONSUMED, rank.head, self.rules.flag_seq_cst), self.rules.ring_on_consumed)
        return f"{p}: consumed = {rank.head}", self._put(world, p, rank, fault), True

    # -- states of one way out ------------------------------------------------------------------------------------------

    def _busy(self, world: World, p: int) -> Iterator[Move]:
        rank = world.ranks[p]
        if rank.state == RING:
            yield self._ring(world, p)
        elif rank.state == DOZE:
            to = CHECK if self.rules.check_again else ASLEEP
            rank = self._store(rank, SLEEPING, 1, self.rules.sleeper_seq_cst)._replace(state=to, at=0)
            yield f"{p}: sleeping = 1", self._put(world, p, rank), True
        elif rank.state == CHECK:
            yield self._check(world, p)
        elif rank.state == DRAIN:
            yield f"{p}: drains its bell", self._put(world, p, rank._replace(bell=0, state=ASLEEP)), True
        elif rank.state == ASLEEP:
            if rank.bell:
                bell = 0 if self.rules.drain_first else 1
                yield f"{p}: wakes by its bell", self._put(world, p, rank._replace(bell=bell, state=WOKEN)), True
            elif any(other.state == DEAD for other in world.ranks):
                yield self._turn(world, p, "wakes at the end of a sleep slice", WOKEN)
        elif rank.state == WOKEN:
            rank = self._store(rank, SLEEPING, 0)._replace(state=IDLE, at=0)
            yield f"{p}: sleeping = 0", self._put(world, p, rank), True
        elif rank.state == STALE:
            yield self._death(world, p)
        else:
            yield self._fail(world, p)

    def _ring(self, world: World, p: int) -> Move:
        rank = world.ranks[p]
        q = self.peers[p][rank.at // 2]
        peer = world.ranks[q]
        if rank.at % 2:
            world = self._put(world, q, peer._replace(bell=1))
        asleep = not rank.at % 2 and peer.sleeping
        label = f"{p}: {'rings' if rank.at % 2 else 'looks at sleeping of'} rank {q}"
        at = rank.at + (1 if asleep or rank.at % 2 else 2)
        rank = rank._replace(at=at) if at < 2 * (self.ranks - 1) else self._settle(rank)
        return label, self._put(world, p, rank), True

    def _check(self, world: World, p: int) -> Move:
        """One load of the re-check: all posted, then all consumed, then all abort_from; a job counts if all its loads say yes."""
        rank, width = world.ranks[p], self.ranks - 1
        job, i = divmod(rank.at, width)
        q = self.peers[p][i]
        peer = world.ranks[q]
        if job == 0:
            good, whole = rank.next > rank.head and peer.posted > rank.head, i == width - 1
        elif job == 1:
            good = rank.next < self._last(rank) and self._gate_own(rank) and self._gate_peer(rank, peer)
            whole = i == width - 1
        else:
            good, whole = peer.abort_from <= rank.head, True
        label = f"checks {('posted', 'consumed', 'abort_from')[job]} of rank {q}: {'yes' if good else 'no'}"
        if good and whole:
            return self._turn(world, p, label, WOKEN)
        at = rank.at + 1 if good or job == 2 else (job + 1) * width
        if at < 3 * width:
            return self._turn(world, p, label, CHECK, at)
        return self._turn(world, p, label, ASLEEP if self.rules.drain_first else DRAIN)

    def _death(self, world: World, p: int) -> Move:
        rank = world.ranks[p]
        if not any(other.state == DEAD for other in world.ranks):
            return self._turn(world, p, "looks again", IDLE)
        if not self.rules.look_again_at_death:
            return self._turn(world, p, "sees a death", FAIL_SEEN, rank.head)
        return f"{p}: sees a death", self._put(world, p, rank._replace(state=IDLE, knows=True)), True

    def _fail(self, world: World, p: int) -> Move:
        rank = world.ranks[p]
        fault = ""
        if rank.at < world.whole and not self.timeouts:
            fault = f"rank {p} fails call {rank.at}, whose headers were all posted before the death"
        limit = min(rank.limit, rank.at)
        writing = rank.writing if rank.next < limit else 0
        rank = rank._replace(limit=limit, writing=writing, reading=rank.reading if rank.head < limit else 0)
        if rank.state == FAIL_SEEN and not self.rules.publish_every_failure:
            return f"{p}: fails from call {limit}", self._put(world, p, self._settle(rank), fault), True
        rank = self._after_flag(self._store(rank, ABORT, limit, self.rules.flag_seq_cst), self.rules.ring_on_abort)
        return f"{p}: abort_from = {limit}, fails", self._put(world, p, rank, fault), True

    # -- the world outside ------------------------------------------------------------------------------------------------

    def _outside(self, world: World, p: int) -> Iterator[Move]:
        rank = world.ranks[p]
        if world.timeouts and rank.state in (IDLE, ASLEEP):
            for call in range(rank.head, min(self._last(rank), rank.limit)):
                late = self._put(world, p, rank._replace(state=FAIL_OWN, at=call))
                yield f"{p}: call {call} times out", late._replace(timeouts=world.timeouts - 1), False
        if world.deaths and rank.state < END:
            whole = min(other.posted for other in world.ranks)
            dead = self._land(rank, len(rank.buffer))._replace(state=DEAD, at=0)
            yield f"{p}: dies", self._put(world, p, dead)._replace(deaths=world.deaths - 1, whole=whole), False
        limit = rank.limit
        if not self.rules.abort_before_reuse and rank.state in (FAIL_OWN, FAIL_SEEN):
            limit = min(limit, rank.at)
        reusing = any(value == SCRAP for _, value in rank.buffer)
        if limit < self.calls and rank.state != DEAD and not reusing and any(half >= limit for half in rank.slots):
            for place, half in enumerate(rank.slots):
                rank = self._store(rank, place, SCRAP) if half >= limit else rank
            yield f"{p}: reuses the memory of its failed calls", self._put(world, p, rank), False
