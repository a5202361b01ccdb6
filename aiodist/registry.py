"""The world that is open in this process, for the functions that take ``group=WORLD``."""

from __future__ import annotations

import os
from typing import Any, Final

from aiodist.errors import NotInitializedError

__all__ = ["FORMING", "WORLD", "World", "current_world", "is_taken", "resolve", "set_world"]


class World:
    """Stands for the group of all ranks, whichever world is open when it is used."""

    def __repr__(self) -> str:
        return "WORLD"


WORLD: Final = World()
FORMING: Final = object()
"""Stands for a world that is about to be open: nobody can use it yet, and no other one may be opened."""
_current: Any = None
_inherited: Any = None


def set_world(group: Any) -> None:
    """Make `group` (or FORMING, or None) the open world; called by world.py only."""
    global _current
    _current = group


def current_world() -> Any:
    """Return the open world's group, None where there is none yet or any more; a forked child has none."""
    return None if _current is FORMING else _current


def is_taken() -> bool:
    """Tell whether a world is open, or being opened."""
    return _current is not None


def resolve(group: Any) -> Any:
    """Return `group`, or the open world for `WORLD`.

    Raises:
        NotInitializedError: no world is open.
    """
    if group is not WORLD:
        return group
    world = current_world()
    if world is None:
        raise NotInitializedError(
            "no world is open yet: aiodist.init() is not done" if is_taken() else "no world is open: call aiodist.init() first"
        )
    return world


def _forget() -> None:
    global _current, _inherited
    _inherited, _current = _current, None  # kept: the child must not be the one that drops the parent's group


# Asking for the process id in every call would cost more than all else here.
os.register_at_fork(after_in_child=_forget)
