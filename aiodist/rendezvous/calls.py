"""The calls of a formed world's members: keys, barriers and gathers, what waits, and what is kept to be told again. No I/O, no clock."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from aiodist.rendezvous.identity import AWAY
from aiodist.rendezvous.job import Limits, Member, Ticket, World
from aiodist.rendezvous.messages import (
    LIST_NAMES,
    Add,
    Answer,
    Barrier,
    Compare,
    Delete,
    Done,
    Gather,
    Get,
    Join,
    List,
    Names,
    Number,
    Refused,
    Request,
    Set,
    Value,
    Values,
)
from aiodist.rendezvous.records import Changes
from aiodist.rendezvous.told import Result, Told
from aiodist.rendezvous.waits import Kind, Wait, Waits

__all__ = ["Calls", "Delivery"]


class Delivery(NamedTuple):
    """A message for a connection."""

    conn: int
    message: Answer


class Calls:
    """What members of formed worlds ask for, over all jobs.

    Args:
        limits: What is held at most.
        changes: Takes what has to be written down.
    """

    def __init__(self, limits: Limits, changes: Changes) -> None:
        self.waits = Waits()
        self._limits = limits
        self._changes = changes
        self._out: list[Delivery] = []

    # -- what is to be sent ------------------------------------------------------------------------------------------------------

    def send(self, conn: int, *messages: Answer) -> None:
        """Deliver messages; a member that is away gets none."""
        self._out.extend(Delivery(conn, message) for message in messages if conn != AWAY)

    def refuse(self, conn: int, request_id: int, code: str, text: str, ranks: tuple[int, ...] = ()) -> None:
        """Deliver a refusal."""
        self.send(conn, Refused(request_id, code, text, list(ranks)))

    def flush(self) -> list[Delivery]:
        """Return what is to be delivered since the last time."""
        out, self._out = self._out, []
        return out

    # -- waiting -----------------------------------------------------------------------------------------------------------------

    def wait(self, member: Member, request: Join | Get | Barrier | Gather, kind: Kind, name: str, now: float) -> bool:
        """Let a request wait until its timeout, or refuse it by the limit."""
        if self.waits.count(member.conn) >= self._limits.waits:
            self.refuse(member.conn, request.id, "limit", f"a member may wait for {self._limits.waits} things at a time")
            return False
        deadline = now + max(0.0, request.timeout - request.spent)
        self.waits.add(Wait((member.conn, request.id), kind, name, request.timeout, deadline, member))
        return True

    def answer(self, answers: list[tuple[Ticket, Answer]]) -> None:
        """End waits by their answers."""
        result: Result | None = None
        for ticket, answer in answers:
            wait = self.waits.get(ticket)
            self.waits.end(ticket)
            if wait is not None and isinstance(answer, Done | Values):
                if isinstance(answer, Values) and result is None:
                    result = self._result(wait.member, answer)
                self._keep(wait.member, Told(answer, result))
            self.send(ticket[0], answer)

    def end_wait(self, wait: Wait, code: str, text: str, ranks: tuple[int, ...] = ()) -> None:
        """End a wait by a refusal."""
        self.waits.end(wait.ticket)
        if wait.member.world is not None:
            wait.member.world.withdraw(wait.ticket, wait.name)
        self.refuse(*wait.ticket, code, text, ranks)

    def late(self, wait: Wait, world: World) -> None:
        """End a wait whose time is over."""
        after = f"{wait.timeout:g} s"
        if wait.kind == "get":
            self.end_wait(wait, "timeout", f"key {wait.name!r} of job {world.job} was not set within {after}")
        elif wait.kind == "gather":
            unmet = world.gathers.late(wait.ticket, wait.timeout)
            self.end_wait(wait, unmet.code, unmet.text, unmet.ranks)
        else:
            self.end_wait(wait, "timeout", *world.late(wait.name, after))

    # -- what members ask for ----------------------------------------------------------------------------------------------------

    def serve(self, member: Member, world: World, request: Request, now: float) -> None:
        """Carry out a request, once: one that is sent again gets the same answer again."""
        match request:
            case Set() | Add() | Compare() | Delete() | Barrier() | Gather() if request.id in member.told:
                self.send(member.conn, member.told[request.id].answer)
            case Set() | Add() | Compare() | Delete() | Barrier() | Gather() if member.pieces >= self._limits.answers:
                self.refuse(member.conn, request.id, "limit", "too many answers wait for this member to say that it has seen them")
            case Barrier():
                self._barrier(member, world, request, now)
            case Gather():
                if self.wait(member, request, "gather", request.name, now):
                    self.answer(world.gather(request, member.rank, (member.conn, request.id)))
            case Get():
                self._get(member, world, request, now)
            case List():
                names = sorted(name for name in world.keys if name.startswith(request.prefix) and name > request.after)
                self.send(member.conn, Names(request.id, list(islice(names, LIST_NAMES))))
            case Set() | Add() | Compare() | Delete():
                self._change(member, world, request)
            case _:
                raise TypeError(f"{type(request).__name__} is nothing that a world serves")

    def seen(self, member: Member, ids: list[int]) -> None:
        """The member has these answers: nothing of them is kept."""
        for number in ids:
            told = member.told.pop(number, None)
            if told is None:
                continue
            member.pieces -= told.pieces
            self._changes.seen(member, number)
            if told.result is not None:
                told.result.holders -= 1
                if told.result.holders == 0:
                    self._changes.result_dropped(member, told.result)

    def _keep(self, member: Member, told: Told) -> None:
        answer = told.answer
        member.told[answer.id] = told
        member.pieces += told.pieces
        if told.result is not None:
            told.result.holders += 1
        self._changes.told(member, told)

    def _result(self, member: Member, answer: Values) -> Result:
        world = member.world
        assert world is not None  # it took part in a gather
        world.results += 1
        result = Result(world.results, answer.values)
        self._changes.result(member, result)
        return result

    def _get(self, member: Member, world: World, request: Get, now: float) -> None:
        if request.key in world.keys:
            self.send(member.conn, Value(request.id, world.keys[request.key]))
        elif self.wait(member, request, "get", request.key, now):
            world.key_waits.setdefault(request.key, []).append((member.conn, request.id))

    def _change(self, member: Member, world: World, request: Set | Add | Compare | Delete) -> None:
        answer: Done | Number | Value | Refused
        match request:
            case Set():
                answer = world.set(request.id, request.key, request.value)
            case Add():
                answer = world.add(request)
            case Compare():
                answer = world.compare(request)
            case Delete():
                answer = world.delete(request.id, request.key)
        if not isinstance(answer, Refused):
            self._changes.key(world, request.key)
            self._keep(member, Told(answer))
        self.send(member.conn, answer)
        for ticket in world.key_waits.pop(request.key, []) if request.key in world.keys else []:
            self.waits.end(ticket)
            self.send(ticket[0], Value(ticket[1], world.keys[request.key]))

    def _barrier(self, member: Member, world: World, request: Barrier, now: float) -> None:
        if not self.wait(member, request, "barrier", request.name, now):
            return
        outcome = world.enter(request, member.rank, (member.conn, request.id))
        if isinstance(outcome, Refused):
            self.answer([((member.conn, request.id), outcome)])
        elif outcome is not None:
            self.answer([(ticket, Done(ticket[1])) for ticket in outcome])
