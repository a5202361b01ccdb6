"""What a member tells people of where it is."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

from aiodist.group import Group
from aiodist.membership import Founder

if TYPE_CHECKING:
    from aiodist.rendezvous.messages import Progress

__all__ = ["Reporter"]

_MOST_GROUPS: Final = 16
_NAME_LENGTH: Final = 256
_SITE_LENGTH: Final = 512


class Reporter:
    """Tells the latest call on each of a rank's groups; called on the control thread, every second."""

    def __init__(self) -> None:
        self._world: weakref.ref[Group] | None = None
        self._founder: Founder | None = None

    def watch(self, world: Group, founder: Founder) -> None:
        """Tell of `world`, which is not kept alive by this, and of the groups made from it."""
        self._world, self._founder = weakref.ref(world), founder

    def __call__(self) -> list[Progress]:
        from aiodist.rendezvous.messages import Progress

        world = None if self._world is None else self._world()
        if world is None or self._founder is None or world.closed:
            return []
        told = []
        for group in [world, *self._founder.groups()][:_MOST_GROUPS]:
            seq, collective, site = group._latest() or (-1, "", "")
            told.append(Progress(group.name[:_NAME_LENGTH], seq, collective, site[-_SITE_LENGTH:]))
        return told
