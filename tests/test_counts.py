"""What a call may cost, in counts that are the same on every machine and however busy it is: no clock is read here."""

from __future__ import annotations

import pytest

from benchmarks.counting.calls import Counted
from benchmarks.counting.functions import count_alone, count_suspended
from benchmarks.counting.instructions import Unavailable, count

# Instructions of the core, for one rank's awaited all_reduce of 8 bytes: a tenth above what they were when this was written.
CEILINGS = {2: 3_600, 8: 6_100}
# Functions of the library, in Python or called from there: none, but where a call learns the shape of its result from the peers.
NATIVE = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "all_to_all", "barrier")
LEARNS = ("broadcast", "scatter", "send_recv")
# On asyncio, in Python and C: a turn of the loop and two callbacks.
SUSPENDED = 22


def test_the_instructions_of_small_calls_stay_below_their_ceilings() -> None:
    """The path of a call from one line of Python to the next, of which the core's own part is judged."""
    cases = [Counted(ranks=ranks, rounds=100) for ranks in CEILINGS]
    try:
        found = count(cases, timeout=110)
    except Unavailable as error:
        pytest.skip(f"instructions can not be counted: {error}")
    for counted, parts in found.items():
        assert 500 < parts["core"] <= CEILINGS[counted.ranks], f"{counted}: {parts}"


@pytest.mark.parametrize("collective", NATIVE)
async def test_an_awaited_call_runs_no_function_of_the_library(collective: str) -> None:
    assert await count_alone(Counted(collective, 64, 2, 20)) == {}


@pytest.mark.parametrize("collective", LEARNS)
async def test_a_call_that_learns_its_shape_runs_few_functions(collective: str) -> None:
    """Only to make the array of its result, and that on the ranks that learn it only."""
    found = await count_alone(Counted(collective, 64, 2, 20))
    assert sum(found.values()) <= 10, found


async def test_a_suspended_call_runs_few_functions() -> None:
    """All of them: those of asyncio too."""
    assert 1 < await count_suspended(Counted(rounds=100)) <= SUSPENDED
