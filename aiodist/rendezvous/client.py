"""A member's side of the rendezvous."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec

from aiodist.config import DEFAULT_TIMEOUT
from aiodist.errors import RendezvousError
from aiodist.rendezvous.link import Trust
from aiodist.rendezvous.messages import (
    JOB_NAME,
    LIST_NAMES,
    OCCUPIED,
    Add,
    Answer,
    Barrier,
    Compare,
    Delete,
    Done,
    Formed,
    Gather,
    Get,
    Join,
    Leave,
    List,
    Names,
    Notice,
    Notices,
    Number,
    Progress,
    Refused,
    Roster,
    Set,
    Value,
    Values,
)
from aiodist.rendezvous.sockets import check_token, parse_address
from aiodist.rendezvous.talk import Asked, Talk
from aiodist.rendezvous.tls import client_context
from aiodist.store import Outcome, Unmet

__all__ = ["Membership", "Notice", "RendezvousClient"]

A = TypeVar("A", Done, Formed, Names, Number, Value, Values)

_LEAVE_S: Final = 2.0
_AGAIN_S: Final = (0.05, 1.0)
_REASON_LENGTH: Final = 16384

_log = logging.getLogger("aiodist.rendezvous")


@dataclass(frozen=True, slots=True)
class Membership:
    """This process's place in a formed world.

    Attributes:
        rank: Its rank.
        world_size: How many ranks there are.
        generation: Which world of the job it is, from 1.
        members: What every rank told about itself, indexed by rank.
    """

    rank: int
    world_size: int
    generation: int
    members: tuple[dict[str, Any], ...]


class RendezvousClient:
    """One member's connection to a rendezvous server; to be used from one event loop.

    When the connection ends it is made again, until the client is closed, and calls that were not answered go on: each is carried out
    once. A call that gets no connection again within its timeout, or within 30 s (`join` excepted), raises `RendezvousError`. So do all
    calls once the server does not know this member any more, because it was started again without its state or waited for this member
    in vain; then the server has told the others that it is lost. Cancelling a call withdraws it on the server. A connected client holds
    one task of the running loop, which ends its connection cleanly when it is cancelled, as `asyncio.run` does with all tasks at its end.

    Args:
        address: ``http[s]://host:port``, IPv6 in brackets.
        job: Name of the job; jobs do not see each other.
        token: The server's bearer token, or None where it has none.
        tls_ca: PEM file of the CAs by which an ``https`` server's certificate is checked; None for the system's.
        timeout: Seconds that connecting, joining, waiting for a key or for a barrier may take unless the call says otherwise.
        on_notice: Called on the client's loop with what befalls other members; it must not block.
        progress: Called on the client's loop every second for what people are shown of this member; it must not block.
        member: A random id (8 to 64 characters) by which the server knows this member: a join that is sent again with the same id is
            the same join. Made up if None.

    Raises:
        ValueError: an argument is not of this form, or the file of CAs can not be used.
    """

    def __init__(
        self,
        address: str,
        *,
        job: str,
        token: str | None = None,
        tls_ca: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        on_notice: Callable[[Notice], None] | None = None,
        progress: Callable[[], Sequence[Progress]] | None = None,
        member: str | None = None,
    ) -> None:
        if not JOB_NAME.match(job):
            raise ValueError(f"job {job!r}: a name of 1 to 128 letters, digits and _.:@+- is expected")
        self._address = parse_address(address)
        self._job = job
        self._timeout = _seconds(timeout)
        self._on_notice = on_notice
        self._member = member or uuid.uuid4().hex
        self._roster: list[dict[str, Any]] = []
        self._told: set[int] = set()
        self._joined = False
        trust = Trust(client_context(tls_ca), tls_ca) if self._address.scheme == "https" else Trust()
        self._talk = Talk(self._address, job, self._member, check_token(token), trust, self._timeout, self._hear, progress)

    @property
    def address(self) -> str:
        """The server's address in its canonical spelling."""
        return str(self._address)

    @property
    def local_address(self) -> str:
        """The address of this host by which it reaches the server, as a number; empty before the first connection."""
        return self._talk.local_address

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave, with the exception as the reason if the block ended by one, and close."""
        try:
            if self._joined:
                with suppress(RendezvousError):
                    await self.leave(None if error is None else f"{type(error).__name__}: {error}")
        finally:
            await self.aclose()

    async def connect(self) -> None:
        """Connect to the server; a server that is not up yet is tried again until the timeout.

        Raises:
            RendezvousError: nobody answered in time, what answered is no rendezvous, or it refused us; the text names the address.
        """
        await self._talk.connect()

    async def aclose(self) -> None:
        """End the connection, within 2 s. Without `leave` before it, the other members are told that this one is lost."""
        await self._talk.aclose()

    async def join(self, *, world_size: int, rank: int | None, info: dict[str, Any], after: int = 0) -> Membership:
        """Join the job and wait until its world has formed, that is until ``world_size`` members have joined.

        Calling it again sends the same join again, which the server recognises.

        Args:
            world_size: Number of ranks; the same for all.
            rank: The wanted rank, or None for any that is free.
            info: What the others are told: ``pid``, ``host`` and ``address``, small and writable as JSON.
            after: The generation this process was last a member of under this job's name, 0 for none. Without it, a job that is
                formed or has ended well refuses the newcomer. While no member of a formed world has a connection, the newcomer waits:
                either they come back, or that world is over.

        Raises:
            ValueError: the rank is outside the world, or the info is too large.
            RendezvousError: the world did not form: a rank is missing at the timeout or taken by another process, members disagree
                on the world's size, the job is already formed or has ended. ``ranks`` holds the ranks it is about.
        """
        if world_size < 1:
            raise ValueError(f"world size {world_size} is not positive")
        if rank is not None and not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not between 0 and {world_size - 1}")
        try:
            msgspec.json.encode(info)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"the info can not be written as JSON: {error}") from None
        self._told.clear()
        formed = await self._join(world_size, rank, info, after)
        self._joined = True
        return Membership(formed.rank, formed.world_size, formed.generation, tuple(self._roster))

    async def _join(self, world_size: int, rank: int | None, info: dict[str, Any], after: int) -> Formed:
        loop = asyncio.get_running_loop()
        began, timeout, pause = loop.time(), self._timeout, _AGAIN_S[0]
        while True:
            spent = loop.time() - began
            request = Join(self._talk.number(), self._job, self._member, world_size, rank, info, timeout, after, spent)
            try:
                return await self._ask(request, Formed, timeout - spent, down=timeout - spent)
            except _OccupiedError as error:
                if loop.time() - began + pause >= timeout:
                    raise RendezvousError(str(error)) from None
            await asyncio.sleep(pause * (1 + random.random()) / 2)
            pause = min(2 * pause, _AGAIN_S[1])

    async def leave(self, reason: str | None = None) -> None:
        """Leave the world: a goodbye, or with a reason a failure; all other members are told.

        Raises:
            RendezvousError: the server did not answer; without a connection to it after 2 s.
        """
        self._joined = False
        await self._ask(Leave(self._talk.number(), reason if reason is None else reason[:_REASON_LENGTH]), Done, down=_LEAVE_S)

    async def set(self, key: str, value: bytes) -> None:
        """Store a value in the world's keys; whoever waits for the key gets it."""
        await self._ask(Set(self._talk.number(), self._key(key), self._value(key, value)), Done)

    async def get(self, key: str, *, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        """Wait until the key is set and return its value.

        Raises:
            RendezvousError: it was not set within the timeout (None: the client's; 0 looks once).
        """
        wait = self._wait(timeout)
        answer = await self._ask(Get(self._talk.number(), self._key(key), wait), Value, wait)
        return answer.value or b""

    async def add(self, key: str, amount: int = 1) -> int:
        """Add to the decimal number that the key holds (absent: 0) and return the sum."""
        if not -(2**63) <= amount < 2**63:
            raise ValueError(f"{amount} does not fit into 64 bits")
        return (await self._ask(Add(self._talk.number(), self._key(key), amount), Number)).number

    async def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> tuple[bool, bytes | None]:
        """Set the key if it holds what is expected (None: if it is absent).

        Returns:
            Whether it was set, and what the key holds now.
        """
        wanted = None if expected is None else self._value(key, expected)
        answer = await self._ask(Compare(self._talk.number(), self._key(key), wanted, self._value(key, value)), Value)
        return answer.swapped, answer.value

    async def delete(self, key: str) -> bool:
        """Forget a key; False if it was absent."""
        return (await self._ask(Delete(self._talk.number(), self._key(key)), Number)).number == 1

    async def keys(self, prefix: str = "") -> list[str]:
        """Return the names of the keys that begin so, in order."""
        names: list[str] = []
        while True:
            request = List(self._talk.number(), prefix, names[-1] if names else "")
            page = (await self._ask(request, Names)).names
            names += page
            if len(page) < LIST_NAMES:
                return names

    async def broadcast(self, name: str, value: bytes | None = None, *, root: int = 0, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        """Return the value that rank ``root`` gives in the broadcast of that name, once every rank of the world is in it.

        Raises:
            RendezvousError: members did not come within the timeout, or can not come any more; ``ranks`` holds them.
        """
        size = len(self._roster)
        if not 0 <= root < size:
            raise ValueError(f"rank {root} is not between 0 and {size - 1}")
        outcome = await self.gather(name, range(size), b"" if value is None else value, timeout=timeout)
        if isinstance(outcome, Unmet):
            raise RendezvousError(outcome.text, ranks=outcome.ranks)
        return outcome[root]

    async def barrier(self, name: str, *, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Wait until every rank of the world is in the barrier of that name; then the name may be used again.

        Raises:
            RendezvousError: members did not come within the timeout, or can not come because they left or were lost; ``ranks`` and
                the text name them.
        """
        wait = self._wait(timeout)
        await self._ask(Barrier(self._talk.number(), self._key(name), wait), Done, wait)

    async def gather(self, name: str, members: Sequence[int], value: bytes, *, timeout: float | None = None) -> Outcome:  # noqa: ASYNC109
        """Bring a value to the gather of that name between these ranks, this one among them.

        Returns:
            The values in the members' order once all have brought theirs; `Unmet` if the server refused, so that nobody got this value.

        Raises:
            RendezvousError: there was no answer; the others may have got the value all the same.
        """
        wait = self._wait(timeout)
        request = Gather(self._talk.number(), self._key(name), list(members), self._value(name, value), wait)
        answer = await self._talk.ask(request, wait)
        if isinstance(answer, Refused):
            return Unmet(answer.code, answer.text, tuple(answer.ranks))
        return _expect(answer, Values, request).values

    # -- requests and answers ----------------------------------------------------------------------------------------------------

    def _wait(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else 0.0 if timeout == 0 else _seconds(timeout)

    def _key(self, key: str) -> str:
        if not isinstance(key, str):
            raise TypeError(f"a key is a str, not {type(key).__name__}")
        limit = self._talk.welcome.max_key_nbytes if self._talk.welcome else 0
        if not key or (limit and len(key.encode()) > limit):
            raise ValueError(f"a key has 1 to {limit} bytes, this one has {len(key.encode())}")
        return key

    def _value(self, key: str, value: bytes) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise TypeError(f"the value of key {key!r} is bytes, not {type(value).__name__}")
        value = bytes(value)
        welcome = self._talk.welcome
        if welcome is not None and len(value) > welcome.max_value_nbytes:
            raise ValueError(f"the value of key {key!r} has {len(value)} bytes, the limit is {welcome.max_value_nbytes}")
        return value

    async def _ask(self, request: Asked, kind: type[A], wait: float = 0.0, *, down: float | None = None) -> A:
        answer = await self._talk.ask(request, wait, down=down)
        if isinstance(answer, Refused):
            raise _refusal(answer)
        return _expect(answer, kind, request)

    def _hear(self, message: Notices | Roster) -> None:
        if isinstance(message, Roster):
            self._roster = message.members
            return
        for notice in message.notices:
            if notice.rank not in self._told:  # After a break the server tells all of them again.
                self._told.add(notice.rank)
                self._tell(notice)

    def _tell(self, notice: Notice) -> None:
        if self._on_notice is None:
            return
        try:
            self._on_notice(notice)
        except Exception:
            _log.exception("on_notice of job %s failed", self._job)


class _OccupiedError(RendezvousError):
    """Raised when a world that may be over is in the way of the next one."""


def _refusal(answer: Refused) -> Exception:
    if answer.code == "argument":
        return ValueError(answer.text)
    return (_OccupiedError if answer.code == OCCUPIED else RendezvousError)(answer.text, ranks=answer.ranks)


def _expect(answer: Answer, kind: type[A], request: Asked) -> A:
    if not isinstance(answer, kind):
        raise RendezvousError(f"the rendezvous answered {type(request).__name__} by {type(answer).__name__}")
    return answer


def _seconds(timeout: float) -> float:
    if not (math.isfinite(timeout) and 0 < timeout < 1e9):
        raise ValueError(f"timeout {timeout!r} is no positive finite number of seconds")
    return float(timeout)
