"""Heartbeats: members that say every second that they are alive and where they are, and who has not for too long.

A member that misses them is *stalled*: stopped, swapped out, or its interpreter is held. People are told; nothing else follows, because
it may go on any time. Only the end of its connection makes a member lost, if it does not return over another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from aiodist.rendezvous.job import Member
from aiodist.rendezvous.messages import BEAT_PROGRESS, Beat, Progress

__all__ = ["STALLED_S", "Heart", "Pulses"]

STALLED_S: Final = 5.0
"""Without a heartbeat for so long a member is stalled."""

_BEAT_S: Final = 1.0

_log = logging.getLogger("aiodist.rendezvous")


class Pulses:
    """The members that send heartbeats, the one whose last is oldest first."""

    def __init__(self) -> None:
        self._at: dict[Member, float] = {}

    def beat(self, member: Member, progress: list[Progress], now: float) -> bool:
        """Take a heartbeat; True if the member was stalled before."""
        self._at.pop(member, None)
        self._at[member] = now
        stalled, member.stalled, member.progress = member.stalled, False, progress
        return stalled

    def pause(self, member: Member) -> None:
        """The member has no connection: it can send nothing, until it is back and does."""
        self._at.pop(member, None)

    def drop(self, member: Member) -> None:
        """The member is gone."""
        self._at.pop(member, None)
        member.stalled = False
        member.behind = None

    def due(self, now: float) -> list[Member]:
        """Those who are stalled from now on."""
        stalled = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            member = next(iter(self._at))
            del self._at[member]
            member.stalled = True
            stalled.append(member)
        return stalled

    def next_deadline(self) -> float | None:
        """When the next member is stalled, unless it sends a heartbeat."""
        return next((at + STALLED_S for at in self._at.values()), None)


class Heart:
    """Where a member's heartbeats come from, over all its connections.

    Args:
        progress: Called for what a heartbeat tells; None: nothing.
    """

    def __init__(self, progress: Callable[[], Sequence[Progress]] | None) -> None:
        self._progress = progress

    def beat(self) -> Beat:
        """Make a heartbeat."""
        if self._progress is not None:
            try:
                return Beat(list(self._progress())[:BEAT_PROGRESS])
            except Exception:
                _log.exception("what tells this member's progress failed; it is not asked again")
                self._progress = None
        return Beat()

    async def run(self, send: Callable[[Beat], None]) -> NoReturn:
        """Send heartbeats until cancelled, the first at once."""
        while True:
            send(self.beat())
            await asyncio.sleep(_BEAT_S)
