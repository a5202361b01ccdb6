"""What is written down of formed worlds, as rows of a database, and how worlds are made of them again. No I/O.

Written down is what members were promised: that a world has formed, and who is in it; its keys; and the answers they may not have got.
What merely waits is not: the members send it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from aiodist.rendezvous.identity import AWAY
from aiodist.rendezvous.job import Job, Limits, Member, World
from aiodist.rendezvous.messages import Done, Notice, Number, Value, Values, decode_answer, encode
from aiodist.rendezvous.told import Result, Told

__all__ = ["SCHEMA", "Change", "Changes", "Saved", "revive"]

Change: TypeAlias = tuple[str, tuple[Any, ...]]
"""A statement, and what it is about."""

SCHEMA: Final = (
    "CREATE TABLE members (job TEXT, generation INTEGER, rank INTEGER, body BLOB NOT NULL, PRIMARY KEY (job, generation, rank))"
    " WITHOUT ROWID",
    "CREATE TABLE keys (job TEXT, generation INTEGER, key TEXT, value BLOB NOT NULL, PRIMARY KEY (job, generation, key)) WITHOUT ROWID",
    "CREATE TABLE results (job TEXT, generation INTEGER, number INTEGER, body BLOB NOT NULL, PRIMARY KEY (job, generation, number))"
    " WITHOUT ROWID",
    "CREATE TABLE answers (job TEXT, generation INTEGER, rank INTEGER, request INTEGER, body BLOB NOT NULL, result INTEGER,"
    " PRIMARY KEY (job, generation, rank, request)) WITHOUT ROWID",
    "CREATE TABLE ended (job TEXT PRIMARY KEY, generation INTEGER NOT NULL) WITHOUT ROWID",
)


class _Row(msgspec.Struct, array_like=True):
    """A member of a formed world."""

    id: str
    request: int
    wanted: int | None
    world_size: int
    after: int
    info: dict[str, Any]
    fate: tuple[str, str] | None


class Changes:
    """Collects what has to be written down; nothing where nobody does.

    Args:
        kept: Whether there is a journal.
    """

    def __init__(self, *, kept: bool) -> None:
        self._kept = kept
        self._list: list[Change] = []

    def take(self) -> list[Change]:
        """Return the changes since the last time, in their order."""
        taken, self._list = self._list, []
        return taken

    def formed(self, world: World) -> None:
        """A world has formed."""
        self._add("DELETE FROM ended WHERE job = ?", world.job)
        for member in world.members:
            self.member(member)

    def member(self, member: Member) -> None:
        """A member of a formed world has changed."""
        if not self._kept:
            return
        fate = None if member.fate is None else (member.fate.kind, member.fate.reason)
        row = _Row(member.id, member.request, member.wanted, member.world_size, member.after, member.info, fate)
        self._add("INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?)", *_whose(member), msgspec.msgpack.encode(row))

    def key(self, world: World, key: str) -> None:
        """A key has changed, or is gone."""
        value = world.keys.get(key)
        if value is None:
            self._add("DELETE FROM keys WHERE job = ? AND generation = ? AND key = ?", world.job, world.generation, key)
        else:
            self._add("INSERT OR REPLACE INTO keys VALUES (?, ?, ?, ?)", world.job, world.generation, key, value)

    def result(self, member: Member, result: Result) -> None:
        """A gather of this member's world gave a result."""
        if self._kept:
            job, generation, _ = _whose(member)
            body = msgspec.msgpack.encode(result.values)
            self._add("INSERT INTO results VALUES (?, ?, ?, ?)", job, generation, result.number, body)

    def result_dropped(self, member: Member, result: Result) -> None:
        """Nobody needs the result any more."""
        job, generation, _ = _whose(member)
        self._add("DELETE FROM results WHERE job = ? AND generation = ? AND number = ?", job, generation, result.number)

    def told(self, member: Member, told: Told) -> None:
        """A member gets an answer that it may ask for again."""
        if self._kept:
            number = None if told.result is None else told.result.number
            body = b"" if number is not None else encode(told.answer)
            self._add("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?)", *_whose(member), told.answer.id, body, number)

    def seen(self, member: Member, number: int) -> None:
        """A member has its answer."""
        self._add("DELETE FROM answers WHERE job = ? AND generation = ? AND rank = ? AND request = ?", *_whose(member), number)

    def over(self, world: World) -> None:
        """A world's last member has gone."""
        for table in ("members", "keys", "results", "answers"):
            self._add(f"DELETE FROM {table} WHERE job = ? AND generation = ?", world.job, world.generation)

    def ended(self, world: World) -> None:
        """Its job has ended well by it."""
        self._add("INSERT OR REPLACE INTO ended VALUES (?, ?)", world.job, world.generation)

    def ended_long_ago(self, job: Job) -> None:
        """That the job has ended is not remembered any more."""
        self._add("DELETE FROM ended WHERE job = ?", job.name)

    def _add(self, statement: str, *values: Any) -> None:
        if self._kept:
            self._list.append((statement, values))


class Saved(NamedTuple):
    """What was written down: the worlds, and the last generation of each job that ended well."""

    worlds: list[World]
    ended: dict[str, int]


def revive(query: Callable[[str], Iterable[tuple[Any, ...]]], limits: Limits) -> Saved:
    """Make the worlds again whose rows are there; all members are away.

    Raises:
        ValueError: the rows make no sense.
    """
    found: dict[tuple[str, int], list[Member]] = {}
    for job, generation, rank, body in query("SELECT job, generation, rank, body FROM members ORDER BY job, generation, rank"):
        row = msgspec.msgpack.decode(body, type=_Row)
        member = Member(row.id, job, AWAY, row.request, row.wanted, row.world_size, row.after, row.info, rank)
        if row.fate is not None:
            kind, reason = row.fate
            member.fate = msgspec.convert({"type": "notice", "kind": kind, "rank": rank, "reason": reason, "info": row.info}, Notice)
        found.setdefault((job, generation), []).append(member)
    worlds = {key: _world(*key, members, limits) for key, members in found.items()}
    for job, generation, key, value in query("SELECT job, generation, key, value FROM keys"):
        worlds[job, generation].load(key, value)
    results: dict[tuple[str, int, int], Result] = {}
    for job, generation, number, body in query("SELECT job, generation, number, body FROM results"):
        worlds[job, generation].results = max(number, worlds[job, generation].results)
        results[job, generation, number] = Result(number, msgspec.msgpack.decode(body, type=list[bytes]))
    for job, generation, rank, request, body, number in query("SELECT job, generation, rank, request, body, result FROM answers"):
        result = None if number is None else results[job, generation, number]
        _remind(worlds[job, generation].members[rank], request, body, result)
    return Saved(list(worlds.values()), dict(query("SELECT job, generation FROM ended")))


def _world(job: str, generation: int, members: list[Member], limits: Limits) -> World:
    if [member.rank for member in members] != list(range(members[0].world_size)):
        raise ValueError(f"ranks of generation {generation} of job {job} are missing")
    world = World(job, generation, members, limits)
    for member in members:
        member.world = world
        if member.fate is not None:
            world.part(member)
    return world


def _remind(member: Member, request: int, body: bytes, result: Result | None) -> None:
    answer = decode_answer(body) if result is None else Values(request, result.values)
    if not isinstance(answer, Done | Number | Value | Values) or answer.id != request:
        raise ValueError(f"request {request} of rank {member.rank} has no proper answer")
    told = Told(answer, result)
    member.told[request] = told
    member.pieces += told.pieces
    if result is not None:
        result.holders += 1


def _whose(member: Member) -> tuple[str, int, int]:
    assert member.world is not None  # nothing is written down before
    return member.job, member.world.generation, member.rank
