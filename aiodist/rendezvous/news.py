"""Fates of members that the others of their worlds are yet to be told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from aiodist.rendezvous.job import World
from aiodist.rendezvous.messages import Notice, Notices

__all__ = ["News"]

_TOGETHER_S: Final = 0.05
"""A thousand members that leave one by one would otherwise cost half a million messages."""


class News:
    """Tells a first fate at once, and those that follow closely together.

    Args:
        send: Delivers a message to a connection.
    """

    def __init__(self, send: Callable[[int, Notices], None]) -> None:
        self._send = send
        self._untold: dict[World, None] = {}

    def add(self, world: World, fate: Notice, now: float) -> None:
        """Something befell a member."""
        world.untold.append(fate)
        if now >= world.tell_at:
            self._tell(world, now)
        else:
            self._untold[world] = None

    def due(self, now: float) -> None:
        """Tell what has waited for long enough."""
        for world in [world for world in self._untold if world.tell_at <= now]:
            self._tell(world, now)

    def drop(self, world: World) -> None:
        """Nobody is left to be told."""
        self._untold.pop(world, None)

    def next_deadline(self) -> float | None:
        """When something is to be told."""
        return min((world.tell_at for world in self._untold), default=None)

    def _tell(self, world: World, now: float) -> None:
        self._untold.pop(world, None)
        notices, world.untold, world.tell_at = Notices(world.untold), [], now + _TOGETHER_S
        for member in world.active():
            self._send(member.conn, notices)
