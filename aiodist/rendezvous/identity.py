"""Which process a member is, and how it may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypedDict

from aiodist.rendezvous.logs import one_line

__all__ = ["AWAY", "Behind", "Identity", "State", "identity", "label"]

AWAY: Final = -1
"""The connection of a member that has none."""

State: TypeAlias = Literal["active", "away", "stalled", "stuck", "lost", "left", "failed"]


class Identity(TypedDict):
    """Which process a member is."""

    host: str | None
    pid: int | None


@dataclass(slots=True)
class Behind:
    """That other members of a group have made calls which a member has not.

    Attributes:
        calls: The numbers of its latest calls, by group.
        since: When it was first seen so, with those numbers.
        text: Where it is, and where the others are; empty until it counts as stuck.
    """

    calls: dict[str, int]
    since: float
    text: str = ""


def identity(info: dict[str, Any]) -> Identity:
    """What a member said of its place, where that is of the kind that is expected: the info is free to its sender."""
    host, pid = info.get("host"), info.get("pid")
    return {"host": one_line(host[:255]) if isinstance(host, str) else None, "pid": pid if type(pid) is int else None}


def label(info: dict[str, Any]) -> str:
    """``host:pid`` of a member, for people."""
    return one_line(f"{str(info.get('host', '?'))[:80]}:{str(info.get('pid', '?'))[:20]}")
