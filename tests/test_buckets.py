"""AllreduceCallback: the plan, arrival in any order, errors that reach every rank, and the semantics of a step."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import aiodist
from aiodist import AllreduceCallback
from aiodist.group import Group

Array = npt.NDArray[Any]
SHAPES: dict[str, tuple[int, ...]] = {"c.b": (3,), "c.w": (5, 3), "b.scale": (), "b.none": (0, 4), "a.b": (7,), "a.w": (2, 7)}
TRIPLES = [(name, shape, np.float64) for name, shape in SHAPES.items()]


def gradient(name: str, rank: int, step: int = 0, dtype: npt.DTypeLike = np.float64) -> Array:
    """Return an array of which every element differs, between ranks and steps too."""
    size = int(np.prod(SHAPES[name]))
    start = 1000 * step + 100 * rank + 10 * list(SHAPES).index(name)
    return (np.arange(size) + start).astype(dtype).reshape(SHAPES[name])


def mean_of(name: str, ranks: int, step: int = 0) -> Array:
    total = sum((gradient(name, rank, step) for rank in range(ranks)), np.zeros(SHAPES[name]))
    return np.asarray(total / ranks)


async def on_all(groups: Sequence[Group], run: Callable[[Group], Awaitable[Any]]) -> list[Any]:
    """Run one coroutine a rank; return results and exceptions."""
    async with asyncio.timeout(30):
        return list(await asyncio.gather(*(run(group) for group in groups), return_exceptions=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
async def test_the_mean_of_every_gradient_over_several_steps(ranks: int) -> None:
    async def run(group: Group) -> None:
        callback = AllreduceCallback(TRIPLES, group, bucket_nbytes=64)
        assert len(callback.buckets) > 2
        for step in range(3):
            for name in SHAPES:
                callback(name, gradient(name, group.rank, step))
            reduced = await callback.wait()
            assert list(reduced) == list(SHAPES)
            for name, value in reduced.items():
                assert value.shape == SHAPES[name]
                assert value.dtype == np.float64
                np.testing.assert_allclose(value, mean_of(name, ranks, step), rtol=1e-15)

    async with aiodist.local_world(ranks) as groups:
        assert await on_all(groups, run) == [None] * ranks


async def test_gradients_may_arrive_in_another_order_on_every_rank() -> None:
    orders = list(itertools.islice(itertools.permutations(SHAPES), 0, 720, 97))

    async def run(group: Group) -> None:
        callback = AllreduceCallback(TRIPLES, group, bucket_nbytes=64)
        for step in range(len(orders)):
            for name in orders[(step + 3 * group.rank) % len(orders)]:
                callback(name, gradient(name, group.rank, step))
                await asyncio.sleep(0)
            for name, value in (await callback.wait()).items():
                np.testing.assert_allclose(value, mean_of(name, 3, step), rtol=1e-15)

    async with aiodist.local_world(3) as groups:
        assert await on_all(groups, run) == [None] * 3


async def test_gradients_given_from_threads() -> None:
    async def run(group: Group) -> None:
        callback = AllreduceCallback(TRIPLES, group, bucket_nbytes=64)
        for step in range(4):
            jobs = (asyncio.to_thread(callback, name, gradient(name, group.rank, step)) for name in SHAPES)
            await asyncio.gather(*jobs)
            for name, value in (await callback.wait()).items():
                np.testing.assert_allclose(value, mean_of(name, 2, step), rtol=1e-15)

    async with aiodist.local_world(2) as groups:
        assert await on_all(groups, run) == [None] * 2


def members(callback: AllreduceCallback) -> list[tuple[str, ...]]:
    return [bucket.names for bucket in callback.buckets]


async def test_a_bucket_holds_one_dtype_and_no_more_than_its_bytes() -> None:
    triples = [
        ("a", (4,), np.float64),
        ("b", (4,), np.float32),
        ("large", (100,), np.float64),
        ("c", (4,), np.float32),
        ("d", (4,), np.float64),
        ("e", (4,), np.float64),
        ("f", (1,), np.float64),
        ("empty", (0,), np.float64),
    ]
    async with aiodist.init() as world:
        callback = AllreduceCallback(triples, world, bucket_nbytes=64)
        assert members(callback) == [("a",), ("large",), ("b", "c"), ("d", "e"), ("f", "empty")]
        assert [bucket.nbytes for bucket in callback.buckets] == [32, 800, 32, 64, 8]
        assert [bucket.dtype for bucket in callback.buckets] == [np.float64, np.float64, np.float32, np.float64, np.float64]
        assert members(AllreduceCallback(triples, world)) == [("b", "c"), ("a", "large", "d", "e", "f", "empty")]
        assert members(AllreduceCallback([], world)) == []
        arrays = {"x": np.zeros((2, 3), np.float32), "y": np.zeros(5)}
        assert members(AllreduceCallback(arrays, world)) == [("x",), ("y",)]
        await asyncio.gather(*(AllreduceCallback(triples, world).wait(missing="zero") for _ in range(2)))


async def test_a_bucket_is_reduced_while_others_are_not_full() -> None:
    async def run(group: Group) -> None:
        callback = AllreduceCallback([("first", (2,), "f8"), ("second", (3,), "f8")], group, bucket_nbytes=8)
        first, second = callback.buckets
        assert callback("first", np.full(2, group.rank + 1.0)) is first
        np.testing.assert_array_equal((await first)["first"], [1.5, 1.5])
        assert first.done()
        assert not second.done()
        assert first.issued_at is not None
        assert second.issued_at is None
        waiting = asyncio.ensure_future(second)
        await asyncio.sleep(0)
        callback("second", np.arange(3.0) * (group.rank + 1))
        np.testing.assert_array_equal((await waiting)["second"], [0, 1.5, 3])
        assert set(await callback.wait()) == {"first", "second"}

    async with aiodist.local_world(2) as groups:
        assert await on_all(groups, run) == [None] * 2


async def test_a_later_bucket_waits_for_the_earlier_ones() -> None:
    async with aiodist.init() as world:
        callback = AllreduceCallback([("first", (2,), "f8"), ("second", (3,), "f8")], world, bucket_nbytes=8)
        callback("second", np.ones(3))
        await asyncio.sleep(0.01)
        assert callback.buckets[1].issued_at is None
        callback("first", np.ones(2))
        await callback.wait()
        assert callback.buckets[1].issued_at is not None


async def test_the_gradient_may_change_once_it_is_given() -> None:
    async def run(group: Group) -> None:
        callback = AllreduceCallback([("w", (3,), "f8"), ("v", (1,), "f8")], group)
        mine = np.full(3, group.rank + 1.0)
        callback("w", mine)
        mine[:] = -99
        callback("v", np.zeros(1))
        np.testing.assert_array_equal((await callback.wait())["w"], [1.5] * 3)

    async with aiodist.local_world(2) as groups:
        assert await on_all(groups, run) == [None] * 2


async def test_layouts_and_scalars_are_taken_by_value() -> None:
    weight = np.arange(6.0).reshape(2, 3)
    async with aiodist.init() as world:
        callback = AllreduceCallback([("w", (2, 3), "f8"), ("s", (), "f8")], world)
        for given in (np.asfortranarray(weight), np.repeat(weight, 2, axis=1)[:, ::2], weight.astype(">f8"), weight.tolist()):
            callback("w", given)
            callback("s", 2.5)
            reduced = await callback.wait()
            np.testing.assert_array_equal(reduced["w"], weight)
            assert reduced["s"].shape == ()
            assert reduced["s"] == 2.5


async def test_every_dtype_keeps_its_own_and_a_mean_of_integers_is_float64() -> None:
    # Mixed dtypes must never meet in one bucket (the integer one is a counter kept beside the weights).
    kinds: dict[str, Any] = {"half": np.float16, "brain": ml_dtypes.bfloat16, "single": np.float32, "complex": np.complex64}
    kinds |= {"counter": np.int32, "large": np.float32}
    shapes = {name: (1000,) if name == "large" else (2,) for name in kinds}

    async def run(group: Group) -> None:
        callback = AllreduceCallback([(name, shapes[name], kind) for name, kind in kinds.items()], group, bucket_nbytes=100)
        for name, kind in kinds.items():
            value: complex = 1 + group.rank
            if name == "complex":
                value = 1 + 2j if group.rank == 0 else 3 - 1j
            callback(name, np.full(shapes[name], value).astype(kind))
        reduced = await callback.wait()
        for name, kind in kinds.items():
            assert reduced[name].dtype == (np.float64 if name == "counter" else kind), name
            assert (reduced[name] == (2 + 0.5j if name == "complex" else 1.5)).all(), name

    async with aiodist.local_world(2) as groups:
        assert await on_all(groups, run) == [None] * 2


async def test_the_operator_is_a_choice() -> None:
    async def run(group: Group) -> tuple[float, float]:
        values = []
        for op in ("sum", aiodist.ReduceOp.MAX):
            callback = AllreduceCallback([("w", (1,), "f8")], group, op=op)
            callback("w", np.array([group.rank + 1.0]))
            values.append(float((await callback.wait())["w"][0]))
        return values[0], values[1]

    async with aiodist.local_world(3) as groups:
        assert await on_all(groups, run) == [(6.0, 3.0)] * 3


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (("w", np.zeros(4)), ValueError, r"gradient of 'w' has shape \(4,\), its parameter \(3,\)"),
        (("w", np.zeros(3, np.float32)), TypeError, "gradient of 'w' has dtype float32, its parameter float64"),
        (("w", None), TypeError, "gradient of 'w' has dtype object"),
        (("u", np.zeros(3)), ValueError, "'u' is not among the 2 parameters"),
        (("v", np.zeros(1)), ValueError, "gradient of 'v' was given twice"),
    ],
)
async def test_a_wrong_gradient_is_an_error_here_and_on_the_peers(given: tuple[str, Any], error: type[Exception], text: str) -> None:
    async def run(group: Group) -> Any:
        callback = AllreduceCallback([("w", (3,), "f8"), ("v", (1,), "f8")], group, bucket_nbytes=8)
        callback("v", np.zeros(1))
        if group.rank == 1:
            with pytest.raises(error, match=text):
                callback(*given)
            with pytest.raises(ValueError, match="refused already"):
                callback("w", np.zeros(3))
            with pytest.raises(ValueError, match=text):
                await callback.wait()
        else:
            callback("w", np.zeros(3))
            with pytest.raises(aiodist.PeerRefusedError, match=text):
                await callback.wait()
        callback("w", np.full(3, float(group.rank)))
        callback("v", np.ones(1))
        return (await callback.wait())["w"].tolist()

    async with aiodist.local_world(3) as groups:
        assert await on_all(groups, run) == [[1.0] * 3] * 3


async def test_missing_gradients_are_named_on_all_ranks() -> None:
    async def run(group: Group) -> Any:
        callback = AllreduceCallback([(name, (2,), "f8") for name in "abc"], group, bucket_nbytes=16)
        waiter = asyncio.ensure_future(callback.buckets[2])
        for name in "abc" if group.rank else "b":
            callback(name, np.ones(2))
        expected, text = (aiodist.PeerRefusedError, "'a', 'c'") if group.rank else (ValueError, "no gradient was given for 'a', 'c'")
        with pytest.raises(expected, match=text):
            await callback.wait()
        with pytest.raises(expected, match=text):
            await waiter
        return list(await callback.wait(missing="zero"))

    async with aiodist.local_world(2) as groups:
        assert await on_all(groups, run) == [["a", "b", "c"]] * 2


async def test_unused_parameters_count_as_zero_when_asked() -> None:
    # Unused on both ranks, on one rank, and a rank that used nothing at all.
    given: list[list[dict[str, float]]] = [
        [{"a": 1}, {"a": 3}],
        [{"a": 1, "b": 4}, {"a": 3}],
        [{"a": 1, "b": 4}, {}],
    ]

    async def run(group: Group) -> list[tuple[float, float]]:
        callback = AllreduceCallback([("a", (1,), "f8"), ("b", (1,), "f8")], group, bucket_nbytes=8)
        seen = []
        for step in given:
            for name, value in step[group.rank].items():
                callback(name, np.array([value], np.float64))
            reduced = await callback.wait(missing="zero")
            seen.append((float(reduced["a"][0]), float(reduced["b"][0])))
        return seen

    async with aiodist.local_world(2) as groups:
        assert await on_all(groups, run) == [[(2.0, 0.0), (2.0, 2.0), (0.5, 2.0)]] * 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"parameters": [("w", (3,), "f8"), ("v", (2,), "f8")]}, r"rank 0: parameter 1: 'v' \(1,\) .*; rank 1: parameter 1: 'v' \(2,\)"),
        ({"parameters": [("w", (3,), "f4"), ("v", (1,), "f8")]}, "parameter 0: 'w' .*float64.*float32"),
        ({"parameters": [("w", (3,), "f8")]}, "rank 1: no more parameters"),
        ({"parameters": [("v", (1,), "f8"), ("w", (3,), "f8")]}, "parameter 0: 'w'.*parameter 0: 'v'"),
        ({"op": "sum"}, "rank 0: op 'mean'; rank 1: op 'sum'"),
        ({"bucket_nbytes": 9}, "bucket_nbytes 8; rank 1: bucket_nbytes 9"),
    ],
)
async def test_plans_that_differ_are_an_error_on_all_ranks(change: dict[str, Any], text: str) -> None:
    async def run(group: Group) -> Any:
        arguments: dict[str, Any] = {"parameters": [("w", (3,), "f8"), ("v", (1,), "f8")], "bucket_nbytes": 8}
        callback = AllreduceCallback(group=group, **(arguments | change if group.rank == 1 else arguments))
        with pytest.raises(aiodist.MismatchError, match=text) as caught:
            await callback.wait(missing="zero")
        assert caught.value.rank == group.rank
        with pytest.raises(aiodist.MismatchError):
            callback("w", np.zeros(3))
        with pytest.raises(aiodist.CommunicationError, match="plans differ"):
            await group.barrier()

    async with aiodist.local_world(2) as groups:
        assert await on_all(groups, run) == [None] * 2


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"parameters": [("w", (1,), "f8"), ("w", (2,), "f8")]}, ValueError, "two parameters are named 'w'"),
        ({"parameters": [("w", (1,), object)]}, TypeError, "parameter 'w'"),
        ({"parameters": [("w", (1,), bool)]}, TypeError, "parameter 'w': op 'mean' is not defined for bool"),
        ({"parameters": [("w", (-1,), "f8")]}, ValueError, "parameter 'w'"),
        ({"parameters": [(3, (1,), "f8")]}, TypeError, "name"),
        ({"parameters": [], "op": "median"}, ValueError, "'median' is unknown"),
        ({"parameters": [], "bucket_nbytes": 0}, ValueError, "bucket_nbytes"),
    ],
)
async def test_wrong_arguments_are_an_error_here_and_on_the_peers(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    async def run(group: Group) -> Any:
        if group.rank == 0:
            with pytest.raises(error, match=text):
                AllreduceCallback(group=group, **arguments)
        else:
            callback = AllreduceCallback([("w", (1,), "f8")], group)
            with pytest.raises(aiodist.PeerRefusedError, match=text) as caught:
                await callback.wait(missing="zero")
            assert caught.value.ranks == (0,)
        return float((await group.all_reduce(np.ones(1)))[0])

    async with aiodist.local_world(2) as groups:
        assert await on_all(groups, run) == [2.0] * 2


async def test_reset_gives_up_the_step_and_tells_the_peers() -> None:
    async def run(group: Group) -> Any:
        callback = AllreduceCallback([("w", (3,), "f8"), ("v", (1,), "f8")], group, bucket_nbytes=8)
        callback.reset()
        if group.rank == 0:
            callback("w", np.zeros(3))
            callback.reset()
        else:
            callback("w", np.zeros(3))
            callback("v", np.zeros(1))
            with pytest.raises(aiodist.PeerRefusedError, match="given up by reset"):
                await callback.wait()
        callback("w", np.ones(3))
        callback("v", np.ones(1))
        return (await callback.wait())["v"].tolist()

    async with aiodist.local_world(2) as groups:
        assert await on_all(groups, run) == [[1.0]] * 2


async def test_a_cancelled_wait_can_be_taken_up_again() -> None:
    async with aiodist.local_world(2) as groups:
        callbacks = [AllreduceCallback([("w", (3,), "f8")], group) for group in groups]
        callbacks[0]("w", np.ones(3))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await callbacks[0].wait()
        waiting = asyncio.create_task(callbacks[0].wait())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="not over"):
            await callbacks[0].wait()
        with pytest.raises(RuntimeError, match="not over"):
            callbacks[0].reset()
        callbacks[1]("w", np.full(3, 3.0))
        results = await asyncio.wait_for(asyncio.gather(waiting, callbacks[1].wait()), 30)
        assert [result["w"].tolist() for result in results] == [[2.0] * 3] * 2


async def test_a_broken_group_ends_the_step() -> None:
    async def run(group: Group) -> None:
        callback = AllreduceCallback([("w", (3,), "f8")], group)
        callback("w", np.ones(3))
        await callback.wait()
        await group.barrier()
        if group.rank == 0:
            group.abort("enough for today")
        callback("w", np.ones(3))
        with pytest.raises(aiodist.CommunicationError, match="enough for today"):
            await callback.wait()

    async with aiodist.local_world(2) as groups:
        assert await on_all(groups, run) == [None] * 2


async def test_a_wrong_word_for_missing_is_refused() -> None:
    async with aiodist.init() as world:
        callback = AllreduceCallback([("w", (3,), "f8")], world)
        callback("w", np.ones(3))
        wrong: Any = "ignore"
        with pytest.raises(ValueError, match="'ignore'"):
            await callback.wait(missing=wrong)
        callback("w", np.ones(3))
        assert list(await callback.wait()) == ["w"]
