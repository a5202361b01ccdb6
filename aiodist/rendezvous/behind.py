"""Members that are alive and stuck: the others of a group wait for a call that they do not make."""

from __future__ import annotations

from typing import Final

from aiodist.rendezvous.identity import Behind
from aiodist.rendezvous.job import Member, World
from aiodist.rendezvous.messages import Progress

__all__ = ["STUCK_S", "Stragglers", "furthest"]

STUCK_S: Final = 10.0
"""A member whose heartbeats tell of no new call for so long, while others are ahead in one of its groups, is stuck."""

_LOOK_S: Final = 1.0


def furthest(world: World) -> dict[str, tuple[int, Progress]]:
    """The latest call of each group, and the rank that has made it, among those that have not gone."""
    found: dict[str, tuple[int, Progress]] = {}
    for member in world.members:
        for one in member.progress if member.fate is None else ():
            if one.group not in found or one.seq > found[one.group][1].seq:
                found[one.group] = (member.rank, one)
    return found


class Stragglers:
    """Looks once a second at the worlds whose members tell of their calls."""

    def __init__(self) -> None:
        self._worlds: dict[World, None] = {}
        self._look_at: float | None = None

    def told(self, world: World, now: float) -> None:
        """A member told of its calls."""
        self._worlds[world] = None
        if self._look_at is None:
            self._look_at = now + _LOOK_S

    def due(self, now: float) -> list[Member]:
        """Those who are stuck from now on, and those who are not any more."""
        if self._look_at is None or now < self._look_at:
            return []
        worlds, self._worlds, self._look_at = self._worlds, {}, None  # the next heartbeat asks for another look
        return [member for world in worlds for member in _look(world, now)]

    def next_deadline(self) -> float | None:
        """When to look."""
        return self._look_at


def _look(world: World, now: float) -> list[Member]:
    ahead = furthest(world)
    changed = []
    for member in world.active():
        before = member.state
        lags = {one.group: ahead[one.group][1].seq - one.seq for one in member.progress}
        calls = {one.group: one.seq for one in member.progress}
        if before in ("away", "stalled") or not any(lags.values()):
            member.behind = None
        elif member.behind is None or member.behind.calls != calls:
            member.behind = Behind(calls, now)
        elif now - member.behind.since >= STUCK_S:
            worst = max(member.progress, key=lambda one: lags[one.group])
            rank, call = ahead[worst.group]
            member.behind.text = f"in group {worst.group!r} {_where(worst)}, while rank {rank} is in {_where(call)}"
        if (before == "stuck") != (member.state == "stuck"):
            changed.append(member)
    return changed


def _where(one: Progress) -> str:
    if one.seq < 0:
        return "it has made no call yet"
    return f"call #{one.seq} ({one.collective}{f' at {one.site}' if one.site else ''})"
