"""`aiodist.sync.helper`: packing, gradients, futures, and what a rank that fails does to the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.oracle import assert_same
from support.ranks import Pools

import aiodist
import aiodist.sync as dist
from aiodist import MismatchError, NotReadyError, PeerRefusedError
from aiodist.sync import helper

pytestmark = pytest.mark.timeout(60)


def test_the_reference_s_example_of_param_pack_concat(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints what the page says."""
    a, b = np.ones((1,), np.int32), np.ones((3, 3), np.int32)
    offsets_val = [0, 1, 1, 10]
    print(helper.param_pack_concat([a, b], np.array(offsets_val, np.int32), offsets_val))
    assert capsys.readouterr().out == "[1 1 1 1 1 1 1 1 1 1]\n"


def test_the_reference_s_example_of_param_pack_split(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints what the page says."""
    b, c = helper.param_pack_split(np.ones((10,), np.int32), [0, 1, 1, 10], [(1,), (3, 3)])
    print(b)
    print(c)
    assert capsys.readouterr().out == "[1]\n[[1 1 1]\n [1 1 1]\n [1 1 1]]\n"


def test_packing_undoes_itself() -> None:
    """0-d and empty arrays too; gaps are zeros."""
    arrays = [np.arange(6.0).reshape(2, 3).T, np.array(7.0), np.empty((0, 4)), np.array([8.0])]
    shapes = [array.shape for array in arrays]
    offsets = helper.get_offsets(shapes)
    assert offsets == [0, 6, 6, 7, 7, 7, 7, 8]
    assert helper.get_offsets([]) == []
    for array, again in zip(
        arrays, helper.param_pack_split(helper.param_pack_concat(arrays, offsets, offsets), offsets, shapes), strict=True
    ):
        assert_same(again, np.asarray(array))
    assert_same(helper.param_pack_concat([np.ones(1), np.ones(1)], None, [0, 1, 3, 4]), np.array([1.0, 0.0, 0.0, 1.0]))


WRONG: Any = helper  # whose types these calls do not keep to


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: WRONG.param_pack_concat([], None, []), ValueError, "empty"),
        (lambda: WRONG.param_pack_concat([np.ones(1), np.ones(1, np.int8)], None, [0, 1, 1, 2]), TypeError, "float64 and int8"),
        (lambda: WRONG.param_pack_concat([np.ones(2)], None, [0, 1]), ValueError, "leave 1 elements"),
        (lambda: WRONG.param_pack_concat([np.ones(2)], None, [0, 2, 2, 3]), ValueError, "2 numbers"),
        (lambda: WRONG.param_pack_concat([np.ones(2)], [0, 3], [0, 2]), ValueError, "differ"),
        (lambda: WRONG.param_pack_split(np.ones(3), [0, 4], [(4,)]), ValueError, "3 elements"),
        (lambda: WRONG.param_pack_split(np.ones(3), [2, 3, 0, 2], [(1,), (2,)]), ValueError, "rise"),
        (lambda: WRONG.param_pack_split(np.ones(3), [-1, 2], [(3,)]), ValueError, "begin at 0"),
        (lambda: WRONG.apply(3), TypeError, "op must be"),
        (lambda: WRONG.AllreduceCallback("max"), ValueError, "'sum' or 'mean'"),
        (lambda: WRONG.AllreduceCallback(np.add), TypeError, "reduce_method"),
        (lambda: WRONG.AllreduceCallback("sum", "world"), TypeError, "group must be a Group"),
        (lambda: WRONG.param_pack_concat(None, None, [0, 1]), TypeError, "inps"),
        (lambda: WRONG.param_pack_concat([None], None, [0, 1]), TypeError, "inps must hold numbers"),
        (lambda: WRONG.param_pack_concat([np.ones(2)], None, [0.9, 2.9]), TypeError, "offsets_val must be"),
        (lambda: WRONG.param_pack_concat([np.ones(2)], None, ["0", "2"]), TypeError, "offsets_val must be"),
        (lambda: WRONG.param_pack_split(np.ones(3), None, [(3,)]), TypeError, "offsets must be"),
        (lambda: WRONG.param_pack_split(np.ones(3), [0, 3], [3]), TypeError, "shapes must be"),
        (lambda: WRONG.param_pack_split(np.ones(4), [0, 4], [(-2, -2)]), ValueError, "negative"),
        (lambda: WRONG.get_offsets([(2.5,)]), TypeError, "shapes must be"),
        (lambda: WRONG.get_offsets([(-1,)]), ValueError, "negative"),
        (lambda: WRONG.get_offsets(None), TypeError, "shapes must be"),
        (lambda: WRONG.TensorFuture().get(-1), ValueError, "timeout"),
        (lambda: WRONG.TensorFuture().set(1, "x"), TypeError, "timeout"),
        (lambda: WRONG.get_device_count_by_fork("tpu"), ValueError, "tpu"),
        (lambda: WRONG.get_device_count_by_fork(None), TypeError, "device_type"),
    ],
)
def test_a_wrong_argument(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    """It is named."""
    with pytest.raises(error, match=text):
        call()


def test_apply() -> None:
    """It always gives a tuple."""
    (result,) = helper.apply(np.add, 1, 2)
    assert result == 3
    assert helper.apply(divmod, 7, 2) == (3, 1)


def test_counting_devices_loads_no_driver_here() -> None:
    """A process of its own asks it."""
    assert helper.get_device_count_by_fork("gpu") == helper.get_device_count_by_fork("cuda") >= 0
    assert helper.get_device_count_by_fork("cpu") >= 1
    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert "libcuda.so" not in maps.read()


def test_a_future_before_and_after_its_value() -> None:
    """Errors are exceptions, and a value comes once."""
    future = helper.TensorFuture(ack=False)
    for question in (future.device, future.dtype, future.numpy, future.shape):
        with pytest.raises(NotReadyError):
            question()
    with pytest.raises(TimeoutError):
        future.get(timeout=0.01)
    future.set(np.ones((2, 3), np.float32))
    assert (future.shape(), future.dtype(), future.device()) == ((2, 3), np.float32, "cpu")
    assert_same(future.numpy(), future.get())
    with pytest.raises(RuntimeError, match="already"):
        future.set(np.ones(1))


def test_setting_a_future_waits_until_it_is_got() -> None:
    """Unless it is made without ack, and not for ever."""
    future = helper.TensorFuture()
    setter = threading.Thread(target=future.set, args=(5,))
    setter.start()
    assert future.get() == 5
    setter.join(20)
    assert not setter.is_alive()
    with pytest.raises(TimeoutError, match="nobody got"):
        helper.TensorFuture().set(5, timeout=0.01)


def test_a_future_waits_no_longer_than_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not a time is given."""
    monkeypatch.setenv("AIODIST_TIMEOUT", "0.1")
    for timeout in ((), (None,)):
        with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
            helper.TensorFuture().get(*timeout)
        with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
            helper.TensorFuture().set(5, *timeout)


async def _gradients(world: aiodist.Group, named: bool) -> None:
    """Three steps; gradients come in other orders on other ranks where they are named. A later step may leave some out."""
    callback = dist.make_allreduce_cb("mean")
    shapes = {"a": (2, 3), "b": (4,), "c": ()}
    params: dict[str, Any] = {name: name if named else np.zeros(shape) for name, shape in shapes.items()}
    kept: list[np.ndarray] = []
    for step in range(3):
        names = list(shapes)[:: -1 if named and world.rank % 2 else 1][: 2 if step == 2 else 3]
        gradients = {name: np.full(shapes[name], world.rank + step, np.float32 if name == "b" else np.float64) for name in names}
        futures = {name: callback(params[name], gradient) for name, gradient in gradients.items()}
        for gradient in gradients.values():
            gradient[...] = -1
        for name, future in futures.items():
            given = [rank for rank in range(world.size) if step < 2 or not named or name == "b" or (name == "c") == (rank % 2 == 1)]
            due = sum(rank + step for rank in given) / world.size
            assert_same(future.get(), np.full(shapes[name], due, np.float32 if name == "b" else np.float64))
        kept.append(futures["b"].get())
    assert len({float(array[0]) for array in kept}) == 3
    callback.flush()


@pytest.mark.parametrize(("size", "named"), [(1, True), (2, True), (3, True), (3, False)])
def test_gradients_are_reduced(pools: Pools, size: int, named: bool) -> None:
    """By name and by identity, and what was got stays as it was."""
    pools.get(size).run(_gradients, named)


class _NoArray:
    def __array__(self, *given: Any, **named: Any) -> np.ndarray:
        raise RuntimeError("this can not be made an array")


async def _unused(world: aiodist.Group) -> list[np.ndarray]:
    """One step of descent after another on `a` and `b`, of which rank 1 does not use `b` in the second, and nobody in the third."""
    a, b = np.zeros(1), np.zeros(1)
    callback = dist.make_allreduce_cb("mean")
    dues = [(2.0, 1.0), (2.0, 2.0), (2.0, 0.0)]
    for step, due in enumerate(dues):
        callback(a, np.array([3.0 if world.rank else 1.0]))
        if step == 0 or (step == 1 and world.rank == 0):
            callback(b, np.array([4.0 if step else 1.0]))
        reduced = callback.flush()
        assert [param is own for (param, _), own in zip(reduced, (a, b), strict=True)] == [True, True]
        for (param, gradient), value in zip(reduced, due, strict=True):
            assert_same(gradient, np.full(1, value))
            param -= gradient
    assert callback.flush() == []
    return [a, b]


def test_parameters_that_some_ranks_do_not_use(pools: Pools) -> None:
    """Are changed alike on all."""
    first, second = pools.get(2).run(_unused)
    for mine, theirs in zip(first, second, strict=True):
        assert_same(mine, theirs)


async def _not_there_at_first(world: aiodist.Group) -> None:
    weight, other = np.zeros(1), np.zeros(1)
    callback = dist.make_allreduce_cb("mean")
    bad: Any = _NoArray()
    with pytest.raises(RuntimeError if world.rank else PeerRefusedError, match="can not be made"):
        callback(other if world.rank else weight, bad if world.rank else np.ones(1)).get()
    for _ in range(2):  # what rank 1 gave at first does not count
        futures = [callback(param, np.ones(1)) for param in (weight, other)]
        assert_same(futures[0].get(), np.ones(1))
    with pytest.raises(ValueError, match="change parameters in place, or give names"):
        callback(weight - 0.1, np.ones(1))
    with pytest.raises(MismatchError, match=r"rank 0: all_reduce.*test_sync_helper\.py"):
        if world.rank == 0:
            callback(weight, np.ones(1))
            callback.flush()
        else:  # has no step, and goes on
            dist.group_barrier()


def test_what_is_not_a_parameter_or_not_a_gradient(pools: Pools) -> None:
    """All ranks hear of it, with the place in the source."""
    pools.get(2).run(_not_there_at_first, fresh=True)


async def _wrong_gradients(world: aiodist.Group) -> None:
    """A step that rank 1 gets wrong fails on both, the first one and later ones; the next step works."""
    callback = dist.make_allreduce_cb("SUM", world)
    error: type[Exception] = ValueError if world.rank else PeerRefusedError
    for wrong, text in (("w", "twice"), ("w", "twice"), ("other", "not among")):
        future = callback("w", np.ones(2))
        with pytest.raises(error, match=text):
            callback(wrong if world.rank else "v", np.ones(1)).get()
        with pytest.raises(error, match=text):
            future.get()
        futures = [callback("w", np.ones(2)), callback("v", np.ones(1))]
        assert_same(futures[0].get(), np.full(2, 2.0))
        assert_same(futures[1].get(), np.full(1, 2.0))


def test_a_wrong_gradient(pools: Pools) -> None:
    """It harms its step only."""
    pools.get(2).run(_wrong_gradients)


async def _different_parameters(world: aiodist.Group) -> None:
    callback = dist.make_allreduce_cb("sum")
    future = callback("w", np.ones(2 + world.rank))
    for _ in range(2):
        with pytest.raises(MismatchError, match="plans differ"):
            future.get()


def test_ranks_with_different_parameters(pools: Pools) -> None:
    """All hear how they differ."""
    pools.get(2).run(_different_parameters, fresh=True)


async def _lists(world: aiodist.Group) -> None:
    dist.bcast_list_([])
    grid = np.arange(24).reshape(4, 6) + 100 * world.rank
    parts = [grid[::2, 1::2], grid[1::2, ::-2].T, np.array(world.rank)]
    dist.bcast_list_(part for part in parts)
    assert_same(parts[0], np.arange(24).reshape(4, 6)[::2, 1::2])
    assert_same(parts[1], np.arange(24).reshape(4, 6)[1::2, ::-2].T)
    assert_same(parts[2], np.array(0))
    assert_same(grid[:, ::2][::2], np.arange(24).reshape(4, 6)[::2, ::2] + 100 * world.rank)
    wrong: list[Any] = [5, ["a"], [[1.0]], [np.broadcast_to(1.0, 1)]]
    for inps in wrong:
        with pytest.raises((TypeError, ValueError) if world.rank else PeerRefusedError):
            dist.bcast_list_(inps if world.rank else [np.ones(1)])
    xs = [np.full(3, world.rank), np.full((2, 2), world.rank + 0.5)]
    first = xs[0]
    dist.bcast_list_(xs)
    assert xs[0] is first
    assert_same(first, np.zeros(3, first.dtype))
    assert_same(xs[1], np.full((2, 2), 0.5))
    reduced = helper.pack_allreduce_split([xs[0] + 1, xs[0] + 2], [(3,), (3,)], dist.WORLD, "mean")
    assert_same(reduced[1], np.full(3, 2.0))
    error: type[Exception] = PeerRefusedError if world.rank else ValueError
    for method, shapes in (("max", [(3,)]), ("sum", [(4,)])):
        bad = world.rank == 0
        with pytest.raises(error, match="reduce_method" if method == "max" else "elements"):
            helper.pack_allreduce_split([first], shapes if bad else [(3,)], dist.WORLD, method if bad else "sum")


def test_lists_of_arrays(pools: Pools) -> None:
    """In place, or packed; what is wrong the peers hear."""
    pools.get(2).run(_lists)


async def _synchronized(world: aiodist.Group) -> None:
    @dist.synchronized
    def load(fails: bool) -> int:
        """Load."""
        if fails:
            raise KeyError("no such model")
        return world.rank

    assert load.__doc__ == "Load."
    assert load(False) == world.rank
    with pytest.raises(KeyError if world.rank == 1 else PeerRefusedError, match="no such model"):
        load(world.rank == 1)
    assert load(False) == world.rank


def test_synchronized(pools: Pools) -> None:
    """A rank whose function fails does not let the others wait."""
    pools.get(3).run(_synchronized)
    assert dist.synchronized(divmod)(7, 2) == (3, 1)
