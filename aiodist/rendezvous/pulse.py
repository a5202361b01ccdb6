"""Heartbeats: members that say every second that they are alive and where they are, and who has not for too long.

A member that misses them is *stalled*: stopped, swapped out, or its interpreter is held. People are told; nothing else follows, because
it may go on any time. Only the end of its connection makes a member lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from aiodist.rendezvous.job import Member
from aiodist.rendezvous.messages import BEAT_PROGRESS, Beat, Progress

__all__ = ["STALLED_S", "Pulses", "send_beats"]

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

    def drop(self, member: Member) -> None:
        """The member is gone."""
        self._at.pop(member, None)
        member.stalled = False

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


async def send_beats(send: Callable[[Beat], None], progress: Callable[[], Sequence[Progress]] | None) -> NoReturn:
    """Send a member's heartbeats until cancelled."""
    while True:
        try:
            send(Beat(list(progress())[:BEAT_PROGRESS] if progress is not None else []))
        except Exception:
            _log.exception("what tells this member's progress failed; it is not asked again")
            progress = None
        await asyncio.sleep(_BEAT_S)
