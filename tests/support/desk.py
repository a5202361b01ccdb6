"""A rendezvous service without sockets, whose clock the test turns, and which may be made again of what it has written down."""

from __future__ import annotations

import sqlite3
from typing import Any

from aiodist.rendezvous.job import Limits
from aiodist.rendezvous.messages import (
    Answer,
    Done,
    Formed,
    Join,
    Notice,
    Notices,
    Number,
    Refused,
    Request,
    Seen,
    Value,
    Values,
    decode_answer,
    encode,
)
from aiodist.rendezvous.records import SCHEMA, revive
from aiodist.rendezvous.state import Service


class Desk:
    """A service with a clock that the test turns, and what each connection was sent since it was last looked at."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.service = Service(limits, journalled=True)
        self.now = 1000.0
        self._database = sqlite3.connect(":memory:")
        for statement in SCHEMA:
            self._database.execute(statement)
        self._inbox: dict[int, list[Answer | Notice]] = {}

    def send(self, conn: int, request: Request) -> None:
        self._sort(self.service.handle(conn, request, self.now))

    def hang_up(self, conn: int, *, may_return: bool = False) -> None:
        self._sort(self.service.disconnect(conn, "its connection ended", self.now, may_return=may_return))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._sort(self.service.expire(self.now))

    def read(self, conn: int) -> list[Answer | Notice]:
        answers = self._inbox.pop(conn, [])
        seen = [answer.id for answer in answers if isinstance(answer, Done | Number | Value | Values)]
        self.send(conn, Seen(seen))  # so that a number may be used again
        return answers

    def peek(self, conn: int) -> list[Any]:
        """Read without saying so to the service."""
        return self._inbox.pop(conn, [])

    def join(
        self, conn: int, rank: int | None = None, size: int = 2, *, job: str = "X", timeout: float = 5, after: int = 0, member: str = ""
    ) -> list[Answer | Notice]:
        info = {"host": "h", "pid": conn}
        self.send(conn, Join(1, job, member or f"member-{conn}", size, rank, info, timeout, after))
        return self.read(conn)

    def world(self, size: int = 2, *, job: str = "X", first: int = 0) -> None:
        """Form a world whose rank r is connection first + r."""
        answers = [self.join(first + rank, rank, size, job=job) for rank in range(size)]
        assert isinstance(answers[-1][-1], Formed)
        assert all(isinstance(self.read(first + rank)[-1], Formed) for rank in range(size - 1))

    def ask(self, conn: int, request: Request) -> Answer | Notice:
        self.send(conn, request)
        (answer,) = self.read(conn)
        return answer

    def restart(self) -> None:
        """Go on with another service that knows what this one has written down, and no connection."""
        limits = self.service.limits
        self.service = Service(limits, journalled=True)
        self.service.restore(revive(self._database.execute, limits), self.now)

    def rows(self) -> int:
        """How much is written down."""
        tables = ("members", "keys", "results", "answers", "ended")
        return sum(self._database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables)

    def close(self) -> None:
        self._database.close()

    def _sort(self, deliveries: list[Any]) -> None:
        for statement, values in self.service.changes.take():
            self._database.execute(statement, values)
        for conn, message in deliveries:
            answer = decode_answer(encode(message))
            self._inbox.setdefault(conn, []).extend(answer.notices if isinstance(answer, Notices) else [answer])


def refused(answers: list[Answer | Notice]) -> Refused:
    (answer,) = answers
    assert isinstance(answer, Refused)
    return answer
