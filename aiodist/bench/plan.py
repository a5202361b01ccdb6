"""What is measured, and what was found: the words between ``aiodist bench`` and its ranks."""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["COLLECTIVES", "WAYS", "Case", "Found", "Plan"]

COLLECTIVES: Final = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
WAYS: Final = ("blocking", "awaited")


class Case(msgspec.Struct, frozen=True):
    """One kind of call.

    Attributes:
        collective: One of `COLLECTIVES`.
        nbytes: Size of one rank's array.
        way: One of `WAYS`: how the caller waits.
        shared: Whether the arrays are those of `Group.empty`.
    """

    collective: str
    nbytes: int
    way: str = "blocking"
    shared: bool = False


class Plan(msgspec.Struct, frozen=True):
    """A measurement.

    Attributes:
        cases: What to call.
        profiles: Tuning profiles to compare, by path; each has a world of its own in every round. Empty for the one that holds anyway.
        rounds: How often all is measured; the order of the profiles turns by one every round.
        batch_ms: About how long one case is called in one round.
    """

    cases: list[Case]
    profiles: list[str] = []
    rounds: int = 5
    batch_ms: float = 20.0


class Found(msgspec.Struct, frozen=True):
    """The time of one case under one profile.

    Attributes:
        case: What was called.
        profile: Place of the profile in the plan.
        rounds_us: Time of a call in each round, at the slowest rank, in µs.
        wrong: Elements that were not what numpy says, over all ranks and rounds.
    """

    case: Case
    profile: int
    rounds_us: list[float]
    wrong: int
