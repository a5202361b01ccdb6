"""Groups made of a group: by members only or by all, of any ranks in any order, nested, overlapping, split, and closed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import RunRanks
from support.checks import assert_usable, error_of
from support.groups import MIB, assert_works, made
from support.oracle import assert_same

import aiodist
from aiodist import CollectiveTimeoutError, PeerRefusedError

pytestmark = pytest.mark.timeout(60)


async def _in_pairs(world: aiodist.Group) -> None:
    """Nobody but the members calls, and none of them knows what the others do."""
    draw = random.Random(world.rank)
    pair = [0, 3] if world.rank in (0, 3) else [1, 2]
    for turn in range(20):
        await asyncio.sleep(draw.random() * 0.01)
        group = await made(world.new_group(pair))
        assert group.ranks == tuple(pair) and group.rank == pair.index(world.rank)
        assert_same(await group.all_reduce(np.array([world.rank, turn])), np.array([3, 2 * turn]))
        await group.aclose()


def test_members_alone_make_a_group(run_ranks: RunRanks) -> None:
    run_ranks(4, _in_pairs)


async def _all_call(world: aiodist.Group) -> None:
    for ranks in ([0], [2, 0], [3, 1, 2]):
        group = await world.new_group(ranks)
        if world.rank in ranks:
            assert group is not None
            await assert_works(group)
            await group.aclose()
        else:
            assert group is None and world.new_group(ranks).done()
        await world.barrier()


def test_ranks_that_are_no_members_may_call_and_get_none(run_ranks: RunRanks) -> None:
    run_ranks(4, _all_call)


async def _in_order(world: aiodist.Group) -> None:
    if world.rank not in (3, 1):
        return
    group = await made(world.new_group([3, 1]))
    assert group.ranks == (3, 1) and group.size == 2
    assert group.rank == (0 if world.rank == 3 else 1)
    assert_same(await group.all_gather(np.array([world.rank])), np.array([3, 1]))
    assert_same(await group.broadcast(np.array([7 + world.rank]) if group.rank == 0 else None, root=0), np.array([10]))
    await group.aclose()


def test_a_group_keeps_the_order_of_its_ranks(run_ranks: RunRanks) -> None:
    run_ranks(4, _in_order)


async def _nested(world: aiodist.Group) -> None:
    if world.rank == 1:
        return
    outer = await made(world.new_group([4, 3, 2, 0]))
    if outer.rank in (3, 1):
        inner = await made(outer.new_group([3, 1]))
        assert inner.ranks == (0, 3)
        await assert_works(inner)
        core = await inner.new_group([1])
        assert (core is None) == (world.rank == 0)
        if core is not None:
            assert core.ranks == (3,) and core.size == 1
            await assert_works(core)
            await core.aclose()
    await assert_works(outer)
    await outer.aclose()  # which is not the others' end
    if world.rank in (0, 3):
        await assert_works(inner, 50_000)


def test_groups_of_groups(run_ranks: RunRanks) -> None:
    run_ranks(5, _nested)


async def _twice(world: aiodist.Group) -> None:
    """Two groups of one list, made and used at the same time: the first asked for meets the first."""
    first, second = world.new_group([1, 0]), world.new_group([1, 0])
    if world.rank == 0:
        b = await made(second)
        a = await made(first)
    else:
        a, b = await made(first), await made(second)
    assert a is not b and a.name != b.name
    order = [(b, 30.0), (a, 3.0)] if world.rank == 0 else [(a, 1.0), (b, 10.0)]
    results = await asyncio.gather(*(group.all_reduce(np.array([x])) for group, x in order))
    assert [float(result[0]) for result in results] == ([40.0, 4.0] if world.rank == 0 else [4.0, 40.0])
    assert await first is a and await second is b


def test_the_same_ranks_twice_are_two_groups(run_ranks: RunRanks) -> None:
    run_ranks(2, _twice)


async def _crosswise(world: aiodist.Group) -> None:
    """Several in flight, asked for and awaited in an order of each rank's own."""
    lists = [[0, 1, 2], [2, 1, 0], [0, 1], [1, 2], [2, 0], [0, 1]]
    mine = [(number, ranks) for number, ranks in enumerate(lists) if world.rank in ranks]
    random.Random(world.rank).shuffle(mine)
    mine.sort(key=lambda item: item[1] == [0, 1] and item[0])  # equal lists are told apart by their order alone
    pending = {number: world.new_group(ranks) for number, ranks in mine}
    groups = {number: await made(pending[number]) for number, _ in sorted(mine, key=lambda item: -item[0])}
    for number, group in groups.items():
        assert group.ranks == tuple(lists[number])
    results = await asyncio.gather(*(groups[number].all_reduce(np.array([number])) for number, _ in mine))
    for (number, ranks), result in zip(mine, results, strict=True):
        assert_same(result, np.array([number * len(ranks)]))


def test_several_are_asked_for_in_differing_orders(run_ranks: RunRanks) -> None:
    run_ranks(3, _crosswise)


async def _opposite(world: aiodist.Group, count: int, rounds: int) -> None:
    groups = [await made(world.new_group([0, 1])), await made(world.new_group([1, 0], name="other"))]
    for turn in range(rounds):
        x = [np.full(count, 1.0 + turn), np.full(count, 10.0)]
        order = (0, 1) if world.rank == 0 else (1, 0)
        results = await asyncio.gather(*(groups[i].all_reduce(x[i]) for i in order))
        for i, result in zip(order, results, strict=True):
            assert_same(result, 2 * x[i])


@pytest.mark.parametrize(("count", "rounds"), [(1, 100), (MIB // 8, 20)], ids=["8 B", "1 MiB"])
def test_overlapping_groups_are_used_in_opposite_orders(count: int, rounds: int, run_ranks: RunRanks) -> None:
    run_ranks(2, _opposite, count, rounds)


async def _wait_crosswise(world: aiodist.Group) -> tuple[str, str]:
    a = await made(world.new_group([0, 1], name="a"))
    b = await made(world.new_group([0, 1], name="b"))
    mine = a if world.rank == 0 else b
    error = await error_of(mine.all_reduce(np.array([1.0]), timeout=1.0))
    assert isinstance(error, CollectiveTimeoutError), repr(error)
    assert error.group == mine.name and error.ranks == (1 - world.rank,)
    await world.barrier()
    return str(error), type(await error_of(mine.barrier)).__name__


def test_waiting_crosswise_on_two_groups_times_out_on_both(run_ranks: RunRanks) -> None:
    texts = run_ranks(2, _wait_crosswise)
    assert all("all_reduce" in text and later == "CollectiveTimeoutError" for text, later in texts), texts


async def _missed(world: aiodist.Group, asked: list[Any], words: list[str]) -> None:
    """Both ranks ask for what the other does not; each is told what the other asked for."""
    error = await error_of(_ask(world, asked[world.rank], timeout=1.0 + 0.1 * world.rank))
    assert isinstance(error, CollectiveTimeoutError) and isinstance(error, TimeoutError), repr(error)
    other = 1 - world.rank
    assert error.ranks == (other,), error.ranks
    assert f"rank {other}" in str(error) and words[other] in str(error), str(error)
    await assert_works(await made(world.new_group([0, 1])))  # as if nobody had asked before


def _ask(world: aiodist.Group, asked: tuple[Any, ...], timeout: float) -> Any:
    method, *args = asked
    return getattr(world, method)(*args, timeout=timeout)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([("new_group", [0, 1]), ("new_group", [1, 0])], ["of ranks [0, 1]", "of ranks [1, 0]"]),
        ([("new_group", [0, 1], "left"), ("new_group", [0, 1], "right")], ["'world/left'", "'world/right'"]),
        ([("new_group", [0, 1]), ("new_group", [0, 1], "mine")], ["'world[0-1]'", "'world/mine'"]),
        ([("channel", "a"), ("channel", "b")], ["'world:a'", "'world:b'"]),
    ],
    ids=["order", "name", "no name", "channel"],
)
def test_a_near_miss_is_named_on_both_sides(asked: list[Any], words: list[str], run_ranks: RunRanks) -> None:
    run_ranks(2, _missed, asked, words)


async def _nobody_comes(world: aiodist.Group, kind: str) -> None:
    if world.rank == 1:
        pending: Any = world.new_group([2, 1, 0], timeout=0.5) if kind == "new_group" else world.channel("late", timeout=0.5)
        error = await error_of(pending)
        assert isinstance(error, CollectiveTimeoutError) and error.collective == kind
        assert set(error.ranks) == {0, 2} and "0.5 s" in str(error)
        again = await error_of(pending)
        assert (type(again), str(again)) == (type(error), str(error)) and again is not error
    await world.barrier()
    await assert_usable(world)
    # It may be asked for again, by those who did before and those who did not.
    ranks = [2, 1, 0]
    group = await made(world.new_group(ranks)) if kind == "new_group" else await world.channel("late")
    await assert_works(group)


@pytest.mark.parametrize("kind", ["new_group", "channel"])
def test_members_that_do_not_ask_are_named(kind: str, run_ranks: RunRanks) -> None:
    run_ranks(3, _nobody_comes, kind)


async def _divide(world: aiodist.Group) -> None:
    size, rank = world.size, world.rank
    halves = await made(world.split(rank % 2, key=-rank))
    assert halves.ranks == tuple(sorted(range(rank % 2, size, 2), reverse=True))
    await assert_works(halves)
    if rank == 1:
        assert await world.split(None, key=1) is None
    else:
        some = await made(world.split(7, key=rank % 3))
        assert some.ranks == tuple(sorted((r for r in range(size) if r != 1), key=lambda r: (r % 3, r)))
        await assert_works(some)
        inner = await made(some.split(0))  # equal keys: the group's order
        assert inner.ranks == some.ranks and inner is not some
        await assert_works(inner)
    numpy: Any = np.int64(rank % 2), np.int32(-rank)
    again = await made(world.split(*numpy))
    assert again is not halves and again.ranks == halves.ranks and again.name != halves.name
    # Two in flight are two calls in the group's order.
    first, second = world.split(0, rank), world.split(0, -rank)
    assert (await made(second)).ranks == tuple(reversed((await made(first)).ranks)) == tuple(reversed(range(size)))


def test_split_by_color_and_key(run_ranks: RunRanks) -> None:
    run_ranks(5, _divide)


async def _divide_wrongly(world: aiodist.Group, color: Any, key: Any, kind: type[Exception]) -> None:
    if world.rank == 1:
        assert type(await error_of(lambda: world.split(color, key))) is kind
    else:
        error = await error_of(lambda: world.split(0))
        assert isinstance(error, PeerRefusedError) and error.ranks == (1,), repr(error)
    await assert_usable(world)
    await assert_works(await made(world.split(0)))


@pytest.mark.parametrize(
    ("color", "key", "kind"),
    [(-1, 0, ValueError), (True, 0, TypeError), ("red", 0, TypeError), (0, 0.5, TypeError), (0, None, TypeError), (2**63, 0, ValueError)],
)
def test_a_wrong_split_is_refused_and_the_group_goes_on(color: Any, key: Any, kind: type[Exception], run_ranks: RunRanks) -> None:
    run_ranks(3, _divide_wrongly, color, key, kind)


WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    "no ranks": (lambda g: g.new_group([]), ValueError),
    "a rank beyond": (lambda g: g.new_group([0, 2]), ValueError),
    "a negative rank": (lambda g: g.new_group([0, -1]), ValueError),
    "a rank twice": (lambda g: g.new_group([0, 1, 0]), ValueError),
    "no number": (lambda g: g.new_group([0, "1"]), TypeError),
    "a truth value": (lambda g: g.new_group([0, True]), TypeError),
    "one number": (lambda g: g.new_group(0), TypeError),
    "a set": (lambda g: g.new_group({0, 1}), TypeError),
    "an empty name": (lambda g: g.new_group([0, 1], ""), ValueError),
    "a long name": (lambda g: g.new_group([0, 1], "x" * 201), ValueError),
    "a name that is none": (lambda g: g.new_group([0, 1], 5), TypeError),
    "no time": (lambda g: g.new_group([0, 1], timeout=0), ValueError),
    "time in words": (lambda g: g.channel("x", timeout="long"), TypeError),
    "an empty channel": (lambda g: g.channel(""), ValueError),
    "a channel that is none": (lambda g: g.channel(None), TypeError),
}


async def _ask_wrongly(world: aiodist.Group, name: str) -> None:
    call, kind = WRONG[name]
    with pytest.raises(kind):
        call(world)
    await assert_works(await made(world.new_group([0, 1], "x" * 200)))
    await assert_works(await world.channel("x" * 200))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str, run_ranks: RunRanks) -> None:
    run_ranks(2, _ask_wrongly, name)


async def _named(world: aiodist.Group) -> None:
    group = await made(world.new_group([0, 1], "left"))
    assert "left" in group.name
    with pytest.raises(ValueError, match="left"):
        world.new_group([1, 0], "left")
    other = world.new_group([0, 1], "right")
    with pytest.raises(ValueError, match="right"):
        world.new_group([0, 1], "right")
    await assert_works(await made(other))
    for _ in range(5):
        await group.aclose()
        group = await made(world.new_group([1, 0], "left"))
        assert group.ranks == (1, 0)
        await assert_works(group)


def test_a_name_is_used_once_at_a_time(run_ranks: RunRanks) -> None:
    run_ranks(2, _named)


async def _alike(world: aiodist.Group) -> None:
    """Names that look alike when they are put together are not mixed up."""
    x = await made(world.new_group([0, 1], "x"))
    pending = [
        x.channel("y"),
        world.new_group([0, 1], "x:y"),
        world.channel("x:y"),
        x.new_group([0, 1], "y"),
        world.new_group([0, 1], "x/y"),
    ]
    groups = [await made(one) for one in (pending if world.rank else reversed(pending))]
    if world.rank == 0:
        groups.reverse()
    assert len({group.name for group in groups}) == len(groups)
    results = await asyncio.gather(*(group.all_reduce(np.array([number])) for number, group in enumerate(groups)))
    assert [int(result[0]) for result in results] == [0, 2, 4, 6, 8]


def test_names_that_look_alike_are_different_groups(run_ranks: RunRanks) -> None:
    run_ranks(2, _alike)


async def _alone(world: aiodist.Group) -> None:
    for pending in (world.new_group([world.rank]), world.new_group([world.rank], f"only {world.rank}"), world.split(world.rank)):
        group = await made(pending)
        assert (group.size, group.rank, group.ranks) == (1, 0, (world.rank,))
        x = np.array([1.5, world.rank])
        for op in ("sum", "mean", "max"):
            total = await group.all_reduce(x, op=op)
            assert_same(total, x)
            assert total is not x
        await group.barrier()
        await assert_works(await group.channel("eval"))
        await group.aclose()


@pytest.mark.parametrize("size", [1, 3])
def test_a_group_of_one(size: int, run_ranks: RunRanks) -> None:
    run_ranks(size, _alone)


async def _random_pairs(world: aiodist.Group) -> None:
    """All ranks draw the same pairs; those not in one go on to the next."""
    draw = random.Random(5)
    for turn in range(30):
        pair = draw.sample(range(world.size), 2)
        if world.rank in pair:
            group = await made(world.new_group(pair))
            assert_same(await group.all_reduce(np.array([world.rank, turn])), np.array([sum(pair), 2 * turn]))
            await group.aclose()


def test_random_pairs(run_ranks: RunRanks) -> None:
    run_ranks(4, _random_pairs)
