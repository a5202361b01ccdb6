"""Parts of unequal extent: uneven gatherings, and lists of arrays that are exchanged and scattered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import RunRanks
from support.cases import FEW_SIZES
from support.checks import assert_usable, error_of, ramp
from support.oracle import Array, assert_same

import aiodist
from aiodist import CommunicationError, MismatchError, PeerRefusedError

pytestmark = pytest.mark.timeout(60)


def extent(rank: int, turn: int) -> int:
    """Return how far a rank's array reaches: nothing, a little, past a slot, over several segments, by turns."""
    return (3, 0, 1, 20_000, 7, 0, 40_001)[(rank + turn) % 7]


async def _gather_counts(group: aiodist.Group) -> None:
    count = [0, 3, 1, 2][group.rank]
    x = 10 * group.rank + np.arange(count)
    due = np.array([10, 11, 12, 20, 30, 31])
    for root in range(4):
        assert_same(await group.gather(x, root, uneven=True), due if group.rank == root else None)
    assert_same(await group.all_gather(x, uneven=True), due)


def test_gathered_parts_lie_in_rank_order(run_ranks: RunRanks) -> None:
    run_ranks(4, _gather_counts)


async def _exchange_counts(group: aiodist.Group) -> None:
    counts = [[3, 2, 1], [2, 2, 2], [1, 2, 3]]
    x = np.split(100 * group.rank + np.arange(6), np.cumsum(counts[group.rank])[:-1])
    received = await group.all_to_all(x)
    assert [array.size for array in received] == [row[group.rank] for row in counts]
    due = [[0, 1, 2, 100, 101, 200], [3, 4, 102, 103, 201, 202], [5, 104, 105, 203, 204, 205]][group.rank]
    assert_same(np.concatenate(received), np.array(due))


def test_a_block_goes_by_its_senders_counts(run_ranks: RunRanks) -> None:
    run_ranks(3, _exchange_counts)


async def _gather_uneven(group: aiodist.Group) -> None:
    rank, size = group.rank, group.size
    for turn in range(0, 7, 2):
        for axis, rest in ((0, ()), (-1, ()), (0, (2,)), (1, (3,)), (-1, (2, 2)), (1, (2, 1)), (0, (0,))):
            index = axis % (len(rest) + 1)
            terms = [ramp((*rest[:index], extent(other, turn), *rest[index:]), other, "i4") for other in range(size)]
            due, root = np.concatenate(terms, axis=axis), turn % size
            joined = await group.all_gather(terms[rank], axis, uneven=True)
            assert_same(joined, due)
            assert_same(await group.gather(terms[rank], root, axis, uneven=True), due if rank == root else None)
            if turn == 0:
                out = np.zeros_like(due)
                assert await group.all_gather(terms[rank], axis, True, out=out) is out
                assert_same(out, due)
                joined += 1  # writable


async def _exchange_lists(group: aiodist.Group) -> None:
    rank, size = group.rank, group.size
    for turn in range(4):
        lists = [[_entry(sender, receiver, turn) for receiver in range(size)] for sender in range(size)]
        due = [sent[rank] for sent in lists]
        x = [array.copy() for array in lists[rank]]
        received = await group.all_to_all(x)
        assert_same(received, due)
        assert_same(x, lists[rank])
        outs = [np.full_like(array, -1) for array in due]
        filled = await group.all_to_all(x, out=outs)
        assert [id(array) for array in filled] == [id(array) for array in outs]
        assert_same(outs, due)
        for array in received:
            array += 1  # writable


async def _scatter_lists(group: aiodist.Group) -> None:
    for turn in range(4):
        for root in range(group.size):
            x = [_entry(root, receiver, turn) for receiver in range(group.size)]
            due = x[group.rank].copy()
            received = await group.scatter(x if group.rank == root else None, root)
            assert_same(received, due)
            out = np.full_like(due, -1)
            assert await group.scatter(x if group.rank == root else None, root, out=out) is out
            assert_same(out, due)
            received += 1


def _entry(sender: int, receiver: int, turn: int) -> Array:
    """Return an array for one receiver: of no, one, two or three dimensions, with none, some or many elements."""
    reach = extent(receiver, 2 * sender + turn)
    shapes: list[tuple[int, ...]] = [(), (reach,), (reach, 2), (1, reach, 1), (2, 0)]
    return np.asarray(ramp(shapes[(sender + receiver + turn) % 5], 10 * sender + receiver))


@pytest.mark.parametrize("body", [_gather_uneven, _exchange_lists, _scatter_lists])
@pytest.mark.parametrize("size", FEW_SIZES)
def test_uneven_parts(size: int, body: Any, run_ranks: RunRanks) -> None:
    run_ranks(size, body)


async def _nothing_at_all(group: aiodist.Group) -> None:
    size = group.size
    assert_same(await group.all_gather(np.ones((0, 2), "f4"), uneven=True), np.ones((0, 2), "f4"))
    assert_same(await group.gather(np.ones((2, 0), "f4"), 1, 1, uneven=True), np.ones((2, 0), "f4") if group.rank == 1 else None)
    assert_same(await group.all_to_all([np.ones((0, 3), "u2")] * size), [np.ones((0, 3), "u2")] * size)
    assert_same(await group.scatter([np.ones(0)] * size if group.rank == 0 else None), np.ones(0))
    assert_same(await group.all_gather(np.array(group.rank), uneven=True), np.arange(size))
    assert_same(await group.gather(np.array(group.rank), 1, uneven=True), np.arange(size) if group.rank == 1 else None)
    last = np.arange(5) if group.rank == size - 1 else np.arange(0)
    assert_same(await group.all_gather(last, uneven=True), np.arange(5))
    await assert_usable(group)


def test_parts_of_no_elements_and_of_no_dimension(run_ranks: RunRanks) -> None:
    run_ranks(3, _nothing_at_all)


async def _equal_extents(group: aiodist.Group) -> None:
    x = ramp((2, 3), group.rank)
    assert_same(await group.all_gather(x, 1, uneven=True), await group.all_gather(x, 1))
    assert_same(await group.gather(x, uneven=True), await group.gather(x))
    rows = ramp((group.size, 3), group.rank)
    assert_same(np.concatenate(await group.all_to_all(np.split(rows, group.size))), await group.all_to_all(rows))
    root_rows = rows if group.rank == 0 else None
    assert_same(await group.scatter(np.split(rows, group.size) if group.rank == 0 else None), await group.scatter(root_rows))


def test_equal_extents_give_what_the_even_forms_give(run_ranks: RunRanks) -> None:
    run_ranks(3, _equal_extents)


async def _in_flight(group: aiodist.Group) -> None:
    futures: list[tuple[Any, Any]] = []
    for turn in range(12):
        terms = [ramp((extent(other, turn),), other + turn) for other in range(group.size)]
        futures.append((group.all_gather(terms[group.rank], uneven=True), np.concatenate(terms)))
        lists = [[_entry(sender, receiver, turn) for receiver in range(group.size)] for sender in range(group.size)]
        futures.append((group.all_to_all(lists[group.rank]), [sent[group.rank] for sent in lists]))
        root = turn % group.size
        futures.append((group.scatter(lists[root] if group.rank == root else None, root), lists[root][group.rank]))
    for future, due in futures:
        assert_same(await future, due)


@pytest.mark.parametrize("size", [2, 5])
def test_uneven_calls_in_flight_together(size: int, run_ranks: RunRanks) -> None:
    run_ranks(size, _in_flight)


# --- An out that only the peers' headers show to be wrong -----------------------------------------------------------------------------


async def _does_not_fit(group: aiodist.Group, call: Callable[[Any, Any], Any], outs: Any, wrong: list[int], words: tuple[str, ...]) -> None:
    """Rank `wrong` gets a ValueError, the others hear that it did; none of the arrays given as out is written."""
    before = [np.array(out) for out in _listed(outs)]
    error = await error_of(lambda: call(group, outs))
    if group.rank in wrong:
        assert type(error) is ValueError, repr(error)
        assert all(word in str(error).replace("_", "") for word in ("out", *words)), f"{words} are missing in: {error}"
    else:
        assert type(error) is PeerRefusedError, repr(error)
        assert error.ranks and set(error.ranks) <= set(wrong), error.ranks
    assert_same([np.array(out) for out in _listed(outs)], before)
    await assert_usable(group)


def _listed(outs: Any) -> list[Any]:
    return outs if isinstance(outs, list) else [] if outs is None else [outs]


async def _short_gather(group: aiodist.Group, factor: int) -> None:
    x = 10 * group.rank + np.arange([0, 3, 1, 2][group.rank] * factor)
    words = (str(6 * factor), str(5 * factor))
    out = np.full(5 * factor, -1) if group.rank == 0 else None
    await _does_not_fit(group, lambda g, o: g.gather(x, uneven=True, out=o), out, [0], words)
    for wrong in ([2], [0, 3], [0, 1, 2, 3]):
        out = np.full((5 if group.rank in wrong else 6) * factor, -1)
        await _does_not_fit(group, lambda g, o: g.all_gather(x, uneven=True, out=o), out, wrong, words)
    out = np.full(7 * factor, -1)  # too long is no better
    await _does_not_fit(group, lambda g, o: g.all_gather(x, uneven=True, out=o), out, [0, 1, 2, 3], (str(6 * factor), str(7 * factor)))
    out = np.full(6 * factor, -1)
    assert await group.all_gather(x, uneven=True, out=out) is out
    assert_same(out, np.concatenate([10 * rank + np.arange([0, 3, 1, 2][rank] * factor) for rank in range(4)]))


@pytest.mark.parametrize("factor", [1, 20_000])
def test_gathering_into_an_out_of_another_extent_writes_nothing(factor: int, run_ranks: RunRanks) -> None:
    run_ranks(4, _short_gather, factor)


async def _short_gather_along(group: aiodist.Group) -> None:
    """Along an inner axis, and into a view."""
    x = ramp((4, group.rank + 1), group.rank)
    out = np.full((4, 5 if group.rank == 1 else 6), -1.0)
    await _does_not_fit(group, lambda g, o: g.all_gather(x, 1, uneven=True, out=o), out, [1], ("6", "5"))
    gaps = np.full((4, 10), -1.0)[:, ::2] if group.rank == 1 else out
    await _does_not_fit(group, lambda g, o: g.all_gather(x, -1, uneven=True, out=o), gaps, [1], ("6", "5"))


def test_gathering_along_an_inner_axis_into_an_out_of_another_extent(run_ranks: RunRanks) -> None:
    run_ranks(3, _short_gather_along)


async def _short_exchange(group: aiodist.Group, factor: int) -> None:
    counts = np.array([[3, 2, 1], [2, 2, 2], [1, 2, 3]]) * factor
    x = [np.full(count, 10 * group.rank + index) for index, count in enumerate(counts[group.rank])]
    for wrong in ([1], [0, 2]):
        due = list(counts[:, group.rank])
        if group.rank in wrong:
            due[2] -= 1
        outs = [np.full(count, -1) for count in due]
        words = (str(counts[2, group.rank]), str(due[2]))
        await _does_not_fit(group, lambda g, o: g.all_to_all(x, out=o), outs, wrong, words)


@pytest.mark.parametrize("factor", [1, 20_000])
def test_exchanging_into_an_out_of_another_extent_writes_nothing(factor: int, run_ranks: RunRanks) -> None:
    run_ranks(3, _short_exchange, factor)


async def _short_scatter(group: aiodist.Group, factor: int) -> None:
    x = [np.full((2, (index + 2) * factor), index) for index in range(3)] if group.rank == 0 else None
    out = np.full((2, 4 * factor - (group.rank == 2) if group.rank == 2 else (group.rank + 2) * factor), -1)
    await _does_not_fit(group, lambda g, o: g.scatter(x, out=o), out, [2], (str(4 * factor), str(4 * factor - 1)))


@pytest.mark.parametrize("factor", [1, 20_000])
def test_scattering_a_list_into_an_out_of_another_extent_writes_nothing(factor: int, run_ranks: RunRanks) -> None:
    run_ranks(3, _short_scatter, factor)


# --- Ranks that disagree --------------------------------------------------------------------------------------------------------------

Call = Callable[[Any], Any]
DISAGREEMENTS: dict[str, tuple[Call, Call, tuple[str, ...]]] = {
    "even": (lambda g: g.all_gather(np.ones(3)), lambda g: g.all_gather(np.ones(3), uneven=True), ("all_gather", "uneven")),
    "even gather": (lambda g: g.gather(np.ones(3)), lambda g: g.gather(np.ones(3), uneven=True), ("gather", "uneven")),
    "other extents": (
        lambda g: g.all_gather(np.ones((2, 3)), uneven=True),
        lambda g: g.all_gather(np.ones((2, 4)), uneven=True),
        ("(2, 3)", "(2, 4)"),
    ),
    "other extents of nothing": (
        lambda g: g.all_gather(np.ones((0, 3)), uneven=True),
        lambda g: g.all_gather(np.ones((2, 4)), uneven=True),
        ("(0, 3)", "(2, 4)"),
    ),
    "dimensions": (
        lambda g: g.gather(np.ones((3, 1)), uneven=True),
        lambda g: g.gather(np.ones(3), uneven=True),
        ("(3, 1)", "(3,)"),
    ),
    "dtype": (
        lambda g: g.all_gather(np.ones(3, "f4"), uneven=True),
        lambda g: g.all_gather(np.ones(4), uneven=True),
        ("float32", "float64"),
    ),
    "axis": (lambda g: g.all_gather(np.ones((2, 2)), 1, True), lambda g: g.all_gather(np.ones((2, 2)), 0, True), ("axis",)),
    "root": (lambda g: g.gather(np.ones(3), 1, uneven=True), lambda g: g.gather(np.ones(3), 0, uneven=True), ("root",)),
    "array for a list": (lambda g: g.all_to_all(np.ones(g.size)), lambda g: g.all_to_all([np.ones(1)] * g.size), ("all_to_all",)),
    "dtype in a list": (
        lambda g: g.all_to_all([np.ones(1, "i4")] * g.size),
        lambda g: g.all_to_all([np.ones(1, "u4")] * g.size),
        ("int32", "uint32"),
    ),
    "dtype of an empty list": (
        lambda g: g.all_to_all([np.ones(0, "M8[s]")] * g.size),
        lambda g: g.all_to_all([np.ones(2, "M8[us]")] * g.size),
        ("[s]", "[us]"),
    ),
}


async def _disagree(group: aiodist.Group, name: str) -> None:
    odd, others, words = DISAGREEMENTS[name]
    error = await error_of(lambda: (odd if group.rank == 1 else others)(group))
    assert type(error) is MismatchError, repr(error)
    assert "test_uneven.py:" in str(error)
    text = str(error).replace("test_uneven.py", "")
    assert all(word in text for word in words), f"{words} are missing in: {error}"
    assert isinstance(await error_of(lambda: group.all_reduce(np.ones(3))), CommunicationError)


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_disagreement_is_told_to_all(name: str, run_ranks: RunRanks) -> None:
    run_ranks(3, _disagree, name)


LISTS: dict[str, tuple[Call, Call, tuple[type[Exception], ...]]] = {
    "too few to exchange": (
        lambda g: g.all_to_all([np.ones(1)] * (g.size - 1)),
        lambda g: g.all_to_all([np.ones(1)] * g.size),
        (ValueError,),
    ),
    "too many to exchange": (
        lambda g: g.all_to_all([np.ones(1)] * (g.size + 1)),
        lambda g: g.all_to_all([np.ones(1)] * g.size),
        (ValueError,),
    ),
    "none to exchange": (lambda g: g.all_to_all([]), lambda g: g.all_to_all([np.ones(1)] * g.size), (ValueError,)),
    "too few to scatter": (lambda g: g.scatter([np.ones(1)] * (g.size - 1)), lambda g: g.scatter(None), (ValueError,)),
    "mixed dtypes": (
        lambda g: g.all_to_all([np.ones(1, "f4"), *[np.ones(1)] * (g.size - 1)]),
        lambda g: g.all_to_all([np.ones(1)] * g.size),
        (TypeError, ValueError),
    ),
    "mixed dtypes to scatter": (
        lambda g: g.scatter([np.ones(1, "f4"), *[np.ones(1)] * (g.size - 1)]),
        lambda g: g.scatter(None),
        (TypeError, ValueError),
    ),
    "an entry that is no array": (
        lambda g: g.all_to_all([None, *[np.ones(1)] * (g.size - 1)]),
        lambda g: g.all_to_all([np.ones(1)] * g.size),
        (TypeError,),
    ),
    "objects": (lambda g: g.all_to_all([np.array([None])] * g.size), lambda g: g.all_to_all([np.ones(1)] * g.size), (TypeError,)),
    "out of too few": (
        lambda g: g.all_to_all([np.ones(1)] * g.size, out=[np.ones(1)] * (g.size - 1)),
        lambda g: g.all_to_all([np.ones(1)] * g.size),
        (ValueError,),
    ),
    "out is an array": (
        lambda g: g.all_to_all([np.ones(1)] * g.size, out=np.ones(g.size)),
        lambda g: g.all_to_all([np.ones(1)] * g.size),
        (TypeError,),
    ),
    "out of another dtype": (
        lambda g: g.all_gather(np.ones(2), uneven=True, out=np.ones(2 * g.size, "f4")),
        lambda g: g.all_gather(np.ones(2), uneven=True),
        (TypeError, ValueError),
    ),
    "one array twice in out": (
        lambda g: g.all_to_all([np.ones(1)] * g.size, out=[np.ones(1)] * g.size),
        lambda g: g.all_to_all([np.ones(1)] * g.size),
        (ValueError,),
    ),
    "out read-only": (
        lambda g: g.all_to_all([np.ones(1)] * g.size, out=[np.frombuffer(bytes(8)) for _ in range(g.size)]),
        lambda g: g.all_to_all([np.ones(1)] * g.size),
        (ValueError,),
    ),
}


async def _refuse(group: aiodist.Group, name: str) -> None:
    wrong, right, kinds = LISTS[name]
    if group.rank == 0:
        with pytest.raises(kinds):
            wrong(group)
    else:
        error = await error_of(lambda: right(group))
        assert type(error) is PeerRefusedError, repr(error)
        assert error.ranks == (0,)
    await assert_usable(group)


@pytest.mark.parametrize("name", LISTS)
def test_wrong_lists_are_refused_and_the_group_goes_on(name: str, run_ranks: RunRanks) -> None:
    run_ranks(3, _refuse, name)
