"""The world that is open in this process, for the functions that take ``group=WORLD``."""

from __future__ import annotations

import os
from typing import Any, Final

from aiodist.errors import NotInitializedError

__all__ = ["WORLD", "current_world", "resolve", "set_world"]


class _World:
    """Stands for the group of all ranks, whichever world is open when it is used."""

    def __repr__(self) -> str:
        return "WORLD"


WORLD: Final = _World()
_current: Any = None
_inherited: Any = None


def set_world(group: Any) -> None:
    """Make `group` (or None) the open world; called by world.py only."""
    global _current
    _current = group


def current_world() -> Any:
    """Return the open world's group, None where there is none; a forked child has none."""
    return _current


def resolve(group: Any) -> Any:
    """Return `group`, or the open world for `WORLD`.

    Raises:
        NotInitializedError: no world is open.
    """
    if group is not WORLD:
        return group
    world = current_world()
    if world is None:
        raise NotInitializedError("no world is open: call aiodist.init() first")
    return world


def _forget() -> None:
    global _current, _inherited
    _inherited, _current = _current, None  # kept: the child must not be the one that drops the parent's group


# Asking for the process id in every call would cost more than all else here.
os.register_at_fork(after_in_child=_forget)
