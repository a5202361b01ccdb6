"""Python objects between ranks: what travels, what is refused, and that nothing is unpickled unasked."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from conftest import RunRanks
from support.cases import FEW_SIZES
from support.checks import assert_usable, error_of
from support.oracle import assert_same

import aiodist
from aiodist import CommunicationError, MismatchError, PeerRefusedError

pytestmark = pytest.mark.timeout(60)

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    1.5,
    -0.0,
    1e-308,
    math.inf,
    "",
    "grüße, 世界 \x00 \U0001f600",
    b"",
    bytes(range(256)),
    [],
    {},
    [None, [True, [1, [2.5, ["x", [b"y"]]]]]],
    {"a": {"b": [1, {"c": None}]}, "": "", "ü": b"\x00"},
    {1: "an integer key", -5: []},
    [0] * 1000,
]


def own(value: Any, rank: int) -> Any:
    """Return a value that names its rank, so that no two ranks' are equal."""
    return {"rank": rank, "value": value}


async def _every_form(group: aiodist.Group) -> None:
    rank, size = group.rank, group.size
    for turn, value in enumerate(VALUES):
        root = turn % size
        everyone = [own(value, other) for other in range(size)]
        results = [
            await group.broadcast_object(own(value, rank) if rank == root else None, root),
            await group.all_gather_object(own(value, rank)),
            await group.gather_object(own(value, rank), root),
            await group.scatter_object(everyone if rank == root else None, root),
        ]
        due = [everyone[root], everyone, everyone if rank == root else None, everyone[rank]]
        assert repr(results) == repr(due)  # tells -0.0 from 0.0, True from 1, and the order of keys


@pytest.mark.parametrize("size", FEW_SIZES)
def test_plain_values_come_back_as_they_were(size: int, run_ranks: RunRanks) -> None:
    run_ranks(size, _every_form)


async def _bare(group: aiodist.Group) -> None:
    """Values that are no containers, and the arguments that may be left out."""
    at_root = group.rank == 0
    assert await group.broadcast_object("text" if at_root else None) == "text"
    assert await (group.broadcast_object(7) if at_root else group.broadcast_object()) == 7
    assert await (group.scatter_object(list(range(group.size))) if at_root else group.scatter_object()) == group.rank
    assert await group.gather_object(None) == ([None] * group.size if at_root else None)
    assert await group.all_gather_object(group.rank * 1.5) == [rank * 1.5 for rank in range(group.size)]
    nothing = await group.all_gather_object(math.nan)
    assert len(nothing) == group.size and all(math.isnan(value) for value in nothing)


def test_values_that_are_no_containers(run_ranks: RunRanks) -> None:
    run_ranks(3, _bare)


async def _tuples(group: aiodist.Group) -> None:
    assert await group.all_gather_object((group.rank, (1, 2))) == [[rank, [1, 2]] for rank in range(group.size)]
    assert await group.all_gather_object((group.rank, (1, 2)), pickle=True) == [(rank, (1, 2)) for rank in range(group.size)]


def test_tuples_come_back_as_lists_unless_pickled(run_ranks: RunRanks) -> None:
    run_ranks(2, _tuples)


def large(rank: int, turn: int) -> str:
    """Return a string: empty, or of up to about 1 MiB, of another length and other characters on each rank."""
    return "".join(chr(97 + (rank + turn + place) % 26) for place in range(26)) * ((0, 40_000, 1, 13_000, 300)[(rank + turn) % 5] + rank)


async def _large(group: aiodist.Group) -> None:
    rank, size = group.rank, group.size
    for turn in range(5):
        everyone, root = [large(other, turn) for other in range(size)], turn % size
        assert await group.all_gather_object(everyone[rank]) == everyone
        assert await group.gather_object(everyone[rank], root) == (everyone if rank == root else None)
        assert await group.broadcast_object(everyone[rank] if rank == root else None, root) == everyone[root]
        assert await group.scatter_object(everyone if rank == root else None, root) == everyone[rank]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_large_values_of_different_lengths(size: int, run_ranks: RunRanks) -> None:
    run_ranks(size, _large)


async def _pickled(group: aiodist.Group) -> None:
    rank, size, root = group.rank, group.size, group.size - 1
    everyone = [(Fraction(other, 7), {other, "x"}, complex(other, -1), 2**70 + other) for other in range(size)]
    assert await group.all_gather_object(everyone[rank], pickle=True) == everyone
    assert await group.gather_object(everyone[rank], root, pickle=True) == (everyone if rank == root else None)
    assert await group.broadcast_object(everyone[rank] if rank == root else None, root, pickle=True) == everyone[root]
    assert await group.scatter_object(everyone if rank == root else None, root, pickle=True) == everyone[rank]
    array = await group.broadcast_object(np.arange(50_000) if rank == 0 else None, pickle=True)
    assert_same(array, np.arange(50_000))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_pickle_takes_what_python_can_pickle(size: int, run_ranks: RunRanks) -> None:
    run_ranks(size, _pickled)


async def _separate(group: aiodist.Group) -> None:
    """Ranks of one process do not share the objects either."""
    for result in (
        await group.broadcast_object([0] if group.rank == 0 else None),
        (await group.all_gather_object([group.rank]))[0],
        await group.scatter_object([[0], [0]] if group.rank == 0 else None),
    ):
        assert result == [0]
        await group.barrier()
        result.append(group.rank + 10)
        await group.barrier()
        assert result == [0, group.rank + 10]
    given = [group.rank]
    gathered = await group.gather_object(given)
    given.append(5)
    await group.barrier()
    assert gathered is None or gathered[1] == [1]


def test_ranks_do_not_share_what_they_get(run_ranks: RunRanks) -> None:
    run_ranks(2, _separate)


async def _in_flight(group: aiodist.Group) -> None:
    futures: list[tuple[Any, Any]] = []
    for turn in range(10):
        root = turn % group.size
        futures.append((group.broadcast_object(large(turn, turn) if group.rank == root else None, root), large(turn, turn)))
        futures.append((group.all_gather_object([group.rank, turn]), [[rank, turn] for rank in range(group.size)]))
        futures.append((group.all_reduce(np.array(turn)), np.array(turn * group.size)))
    for future, due in futures:
        result = await future
        assert result == due and type(result) is type(due)
        assert await future == due  # as often as one likes


def test_objects_in_flight_together_keep_their_order(run_ranks: RunRanks) -> None:
    run_ranks(3, _in_flight)


# --- Refused --------------------------------------------------------------------------------------------------------------------------

Call = Callable[[Any], Any]


def _broadcast(g: Any) -> Any:
    return g.broadcast_object("x" if g.rank == 0 else None)


def _all_gather(g: Any) -> Any:
    return g.all_gather_object("x")


def _scatter(g: Any) -> Any:
    return g.scatter_object(["x"] * g.size if g.rank == 0 else None)


class Unreadable:
    """Refuses to be pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle of me")


EITHER = (TypeError, ValueError)
REFUSALS: dict[str, tuple[Call, Call, tuple[type[Exception], ...]]] = {
    "object": (lambda g: g.broadcast_object(object()), _broadcast, (TypeError,)),
    "complex": (lambda g: g.all_gather_object(1 + 2j), _all_gather, (TypeError,)),
    "nested": (lambda g: g.all_gather_object([1, {"a": [Fraction(1, 2)]}]), _all_gather, (TypeError,)),
    "array": (lambda g: g.broadcast_object(np.ones(3)), _broadcast, (TypeError,)),
    "function": (lambda g: g.gather_object(len), lambda g: g.gather_object("x"), (TypeError,)),
    "huge integer": (lambda g: g.all_gather_object(2**70), _all_gather, EITHER),
    "scattered": (lambda g: g.scatter_object(["x"] * (g.size - 1) + [object()]), _scatter, (TypeError,)),
    "too few to scatter": (lambda g: g.scatter_object(["x"] * (g.size - 1)), _scatter, (ValueError,)),
    "too many to scatter": (lambda g: g.scatter_object(["x"] * (g.size + 1)), _scatter, (ValueError,)),
    "none to scatter": (lambda g: g.scatter_object(None), _scatter, EITHER),
    "no list to scatter": (lambda g: g.scatter_object(7), _scatter, EITHER),
    "root out of range": (lambda g: g.broadcast_object("x", g.size), _broadcast, (ValueError,)),
    "root of a wrong type": (lambda g: g.gather_object("x", "0"), lambda g: g.gather_object("x"), (TypeError,)),
    "timeout": (lambda g: g.all_gather_object("x", timeout=0), _all_gather, (ValueError,)),
    "pickle that fails": (
        lambda g: g.all_gather_object(Unreadable(), pickle=True),
        lambda g: g.all_gather_object("x", pickle=True),
        (Exception,),
    ),
    "a list that holds itself": (lambda g: g.all_gather_object(_endless()), _all_gather, (Exception,)),
}


def _endless() -> list[Any]:
    endless: list[Any] = []
    endless.append(endless)
    return endless


async def _refuse(group: aiodist.Group, name: str) -> None:
    wrong, right, kinds = REFUSALS[name]
    if group.rank == 0:
        error = await error_of(lambda: wrong(group))
        assert isinstance(error, kinds) and not isinstance(error, aiodist.AiodistError), repr(error)
        if kinds == (TypeError,) and "root" not in name:
            assert "pickle" in str(error), f"the way out is missing in: {error}"
    else:
        refused = await error_of(lambda: right(group))
        assert type(refused) is PeerRefusedError, repr(refused)
        assert refused.ranks == (0,)
    await assert_usable(group)
    assert await group.all_gather_object(group.rank) == [0, 1, 2]


@pytest.mark.parametrize("name", REFUSALS)
def test_values_that_can_not_travel_are_refused_and_the_group_goes_on(name: str, run_ranks: RunRanks) -> None:
    run_ranks(3, _refuse, name)


# --- Ranks that disagree --------------------------------------------------------------------------------------------------------------

DISAGREEMENTS: dict[str, tuple[Call, Call]] = {
    "root": (lambda g: g.broadcast_object("x", 1), lambda g: g.broadcast_object("x", 0)),
    "form": (lambda g: g.gather_object("x"), lambda g: g.all_gather_object("x")),
    "broadcast": (lambda g: g.broadcast_object("x"), lambda g: g.scatter_object(["x"] * g.size)),
    "array": (lambda g: g.broadcast(None), lambda g: g.broadcast_object("x")),
    "arrays": (lambda g: g.broadcast_many(None), lambda g: g.broadcast_object("x")),
    "gathered array": (lambda g: g.all_gather(np.ones(3, "u1"), uneven=True), lambda g: g.all_gather_object("x")),
    "another collective": (lambda g: g.all_gather_object("x"), lambda g: g.all_reduce(np.ones(3))),
    "pickle": (lambda g: g.all_gather_object("x", pickle=True), lambda g: g.all_gather_object("x")),
    "broadcast pickle": (lambda g: g.broadcast_object("x"), lambda g: g.broadcast_object("x", pickle=True)),
}


async def _disagree(group: aiodist.Group, name: str) -> None:
    odd, others = DISAGREEMENTS[name]
    await assert_usable(group)
    error = await error_of(lambda: (odd if group.rank == 1 else others)(group))
    assert type(error) is MismatchError, repr(error)
    assert error.seq == 2
    assert "test_objects.py:" in str(error)
    assert isinstance(await error_of(lambda: group.all_gather_object(1)), CommunicationError)


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_disagreement_is_told_to_all(name: str, run_ranks: RunRanks) -> None:
    run_ranks(3, _disagree, name)


_sprung: list[int] = []


class Trap:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _spring, ()


def _spring() -> str:
    _sprung.append(os.getpid())
    return "sprung"


async def _unasked(group: aiodist.Group) -> None:
    """A pickle reaches a rank that did not ask for one: it is not opened."""
    _sprung.clear()
    await group.barrier()
    call = group.broadcast_object(Trap(), pickle=True) if group.rank == 0 else group.broadcast_object()
    assert isinstance(await error_of(call), CommunicationError)
    assert not _sprung


def test_nothing_is_unpickled_unasked(run_ranks: RunRanks) -> None:
    run_ranks(2, _unasked)
