"""How the groups of a world cut their messages: by the core's defaults, or as the profile of the world's rank 0 says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from aiodist import _core
from aiodist.config import Settings
from aiodist.errors import RendezvousError

__all__ = ["TOLD", "Tunings", "own_tunings", "told_tunings", "tuning_for"]

Tunings: TypeAlias = "Mapping[int, _core.Tuning]"
"""By number of members, where it is not the default."""

TOLD: Final = "tunings"
"""What a member's rows are called in what it tells the others when it joins."""


def own_tunings(settings: Settings) -> Tunings:
    """Return what AIODIST_TUNING says here.

    Raises:
        ValueError: its file can not be read, or is no profile.
    """
    if settings.tuning is None:
        return {}
    from aiodist.profile import read_profile

    try:
        return {row.ranks: row.tuning for row in read_profile(settings.tuning).tunings}
    except ValueError as error:
        raise ValueError(f"AIODIST_TUNING: {error}") from None


def told_tunings(members: Sequence[Mapping[str, Any]]) -> Tunings:
    """Return what holds in a world whose members told this of themselves: what rank 0 says, since all must cut alike.

    Raises:
        RendezvousError: what rank 0 told makes no sense.
    """
    told = members[0].get(TOLD)
    if not told:
        return {}
    from aiodist.profile import check_rows

    try:
        return {row.ranks: row.tuning for row in check_rows([(int(ranks), *tuning) for ranks, tuning in told.items()])}
    except (AttributeError, TypeError, ValueError) as error:
        raise RendezvousError(f"rank 0 told a tuning that makes no sense: {error}", ranks=(0,)) from None


def tuning_for(tunings: Tunings, size: int) -> _core.Tuning:
    """Return the tuning of a group of `size` members."""
    return tunings.get(size) or _core.default_tuning(size)
