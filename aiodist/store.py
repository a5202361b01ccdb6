"""Where the members of a group to be meet: what that place offers, and the records behind it. Pure rules: no I/O, no clock.

The one thing it offers is a *gather*: every named member brings a value, and once all have, each gets the values of all. The rendezvous
service keeps these records for processes, `aiodist.local_store` for ranks that share a process.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

__all__ = ["Gathers", "Met", "Outcome", "Store", "Unmet"]

T = TypeVar("T", bound=Hashable)

_LISTED: Final = 16


@dataclass(frozen=True, slots=True)
class Met(Generic[T]):
    """All members have come: who waits for the values, and the values in the members' order."""

    tickets: tuple[T, ...]
    values: list[bytes]


@dataclass(frozen=True, slots=True)
class Unmet:
    """A gather that one member takes part in no more; its value reached nobody.

    Attributes:
        code: ``"timeout"``, ``"gone"`` where members can not come any more, or another word for logs.
        text: Why, beginning with the gather's name.
        ranks: The world ranks that the text is about (missing, lost).
    """

    code: str
    text: str
    ranks: tuple[int, ...] = ()


Outcome: TypeAlias = list[bytes] | Unmet
"""How a gather ended for one member: the values in the members' order, or why there are none."""


class Store(Protocol):
    """One rank's access to the place."""

    def gather(self, name: str, members: Sequence[int], value: bytes, timeout: float) -> Future[Outcome]:
        """Bring a value to the gather of that name between these world ranks.

        An exception in place of an outcome leaves open whether the others got the value. The future's callbacks may run in any thread.
        """

    def expire(self) -> None:
        """Look at the time: a gather whose timeout is over ends at the latest now. Called by those who wait, at that time."""


@dataclass(slots=True, eq=False)
class _Gather(Generic[T]):
    name: str
    members: tuple[int, ...]
    among: frozenset[int]
    values: dict[int, bytes] = field(default_factory=dict)
    tickets: dict[int, T] = field(default_factory=dict)
    hints: dict[int, str] = field(default_factory=dict)
    """What members that are missing here asked for elsewhere last, and waited for in vain."""

    @property
    def text(self) -> str:
        return f"{self.name!r} of ranks [{_listed([str(rank) for rank in self.members])}]"


class Gathers(Generic[T]):
    """The gathers of one world that wait for members. A ticket is what the caller knows a member's request by.

    Args:
        size: Number of ranks of the world.
        label: What texts call a rank.
    """

    def __init__(self, size: int, label: Callable[[int], str]) -> None:
        self.nbytes = 0
        """What the waiting values hold together."""
        self._size = size
        self._label = label
        self._pending: dict[tuple[str, tuple[int, ...]], _Gather[T]] = {}
        self._of: dict[T, tuple[_Gather[T], int]] = {}
        self._gone: dict[int, str] = {}

    def enter(self, name: str, members: Sequence[int], rank: int, value: bytes, ticket: T) -> Met[T] | Unmet | None:
        """Bring a member's value: everyone's when it was the last, `Unmet` if it is refused, None while it waits."""
        key = (name, tuple(members))
        among = frozenset(members)
        if rank not in among or len(among) < len(members) or not all(0 <= member < self._size for member in among):
            return Unmet("argument", f"{name!r}: its members must be different ranks of the world, rank {rank} one of them")
        gone = [member for member in key[1] if member in self._gone]
        if gone:
            return self._broken(name, gone)
        gather = self._pending.setdefault(key, _Gather(name, key[1], among))
        if rank in gather.tickets:
            return Unmet("argument", f"{name!r}: rank {rank} asked for it already", (rank,))
        gather.values[rank], gather.tickets[rank] = value, ticket
        self._of[ticket] = (gather, rank)
        self.nbytes += len(value)
        if len(gather.tickets) < len(members):
            return None
        for held in gather.tickets.values():
            del self._of[held]
        self._drop(gather)
        return Met(tuple(gather.tickets.values()), [gather.values[member] for member in gather.members])

    def withdraw(self, ticket: T) -> None:
        """A member's request waits no more; nothing happens if it does not wait."""
        gather, rank = self._of.pop(ticket, (None, -1))
        if gather is None:
            return
        del gather.tickets[rank]
        self.nbytes -= len(gather.values.pop(rank))
        if not gather.tickets:
            self._drop(gather)

    def late(self, ticket: T, seconds: float) -> Unmet:
        """Withdraw a request whose time is over, and say who is missing and what they asked for in its place."""
        gather, rank = self._of[ticket]
        missing = [member for member in gather.members if member not in gather.tickets]
        near = [other for other in self._pending.values() if other is not gather and _near(gather, other)]
        instead = [f"{self._label(member)} asked for {text}" for member, text in gather.hints.items() if member in missing]
        for other in near:
            instead += [f"{self._label(member)} asked for {other.text}" for member in missing if member in other.tickets]
            other.hints[rank] = f"{gather.text} and gave up after {seconds:g} s"
        self.withdraw(ticket)
        who = _listed([self._label(member) for member in missing])
        text = f"{gather.name!r} was not made within {seconds:g} s: waiting for {who}"
        return Unmet("timeout", _listed([text, *instead], "; "), tuple(missing))

    def leave(self, rank: int, fate: str) -> dict[T, Unmet]:
        """A rank is gone for good, `fate` says how: returns those whose gathers can not complete any more, withdrawn now."""
        self._gone[rank] = fate
        broken: dict[T, Unmet] = {}
        for gather in [gather for gather in self._pending.values() if rank in gather.among]:
            for member, ticket in list(gather.tickets.items()):
                own = Unmet("withdrawn", f"{gather.name!r}: the member left", (rank,))
                broken[ticket] = own if member == rank else self._broken(gather.name, [rank])
                self.withdraw(ticket)
        return broken

    def view(self) -> list[dict[str, Any]]:
        """What people may see of the gathers that wait: never a value."""
        return [
            {"name": one.name, "waiting": sorted(one.tickets), "missing": [rank for rank in one.members if rank not in one.tickets]}
            for one in self._pending.values()
        ]

    def _broken(self, name: str, gone: Sequence[int]) -> Unmet:
        fates = _listed([f"{self._label(rank)} {self._gone[rank]}" for rank in gone], "; ")
        return Unmet("gone", f"{name!r} can not be made: {fates}", tuple(gone))

    def _drop(self, gather: _Gather[T]) -> None:
        del self._pending[gather.name, gather.members]
        self.nbytes -= sum(len(value) for value in gather.values.values())


def _near(one: _Gather[Any], other: _Gather[Any]) -> bool:
    """Tell whether two gathers may well have been meant as the same."""
    return one.among == other.among or one.name == other.name


def _listed(items: Sequence[str], separator: str = ", ") -> str:
    rest = len(items) - _LISTED
    return separator.join(items[:_LISTED]) + (f"{separator}and {rest} more" if rest > 0 else "")
