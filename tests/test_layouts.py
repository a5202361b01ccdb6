"""Whatever shape, stride, dtype and axis: the values are numpy's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support import oracle
from support.oracle import Array, assert_same
from support.ranks import gather_ranks

import aiodist

pytestmark = pytest.mark.timeout(60)

SIZE = 3
COMMON = settings(
    deadline=None,
    max_examples=80,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


class World:
    """A local world that is kept from example to example and made anew after a failure."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._open: Any = None
        self._groups: list[aiodist.Group] = []

    def run(self, body: Callable[[aiodist.Group], Awaitable[Any]]) -> list[Any]:
        """Run the body on each rank and return the values."""
        return self._runner.run(self._run(body))

    async def _run(self, body: Callable[[aiodist.Group], Awaitable[Any]]) -> list[Any]:
        if self._open is None:
            self._open = aiodist.local_world(SIZE)
            self._groups = await self._open.__aenter__()
        try:
            return await gather_ranks(map(body, self._groups), deadline=20, grace=0.2)
        except BaseException:
            await self._close()
            raise

    async def _close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            await opened.__aexit__(None, None, None)

    def close(self) -> None:
        """Close the world and its loop."""
        self._runner.run(self._close())
        self._runner.close()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One world for all examples of this module."""
    held = World()
    yield held
    held.close()


@st.composite
def layouts(draw: st.DrawFn) -> Callable[[Array], Array]:
    """Draw a way to lay out an array in memory: a function that gives an equal array with other strides."""
    kind = draw(st.sampled_from(["C", "F", "gaps", "reversed", "offset", "read-only", "swapped", "axes"]))
    step = draw(st.integers(2, 3))
    order = draw(st.permutations(range(6)))

    def lay(x: Array) -> Array:
        return lay_out(x, kind, step, [axis for axis in order if axis < x.ndim])

    return lay


def lay_out(x: Array, kind: str, step: int, order: list[int]) -> Array:
    """Return an array equal to `x` whose memory is laid out in the named way."""
    if kind == "F":
        return np.array(x, order="F")
    if kind == "swapped":
        return x.astype(x.dtype.newbyteorder("S"))
    if kind == "axes":
        return np.array(x.transpose(order), order="C").transpose(np.argsort(order))
    if kind in ("gaps", "reversed"):
        sign = -1 if kind == "reversed" else 1
        big = np.zeros([size * step for size in x.shape], x.dtype)
        index: Any = (..., *(slice(None, None, sign * step) for _ in x.shape))
        view: Array = big[index]
        view[...] = x
        return view
    if kind == "offset":
        memory = np.zeros(x.nbytes + 1, np.uint8)[1:]
        view = memory.view(x.dtype).reshape(x.shape) if x.size else x.copy()
        view[...] = x
        return view
    copy = x.copy()
    copy.flags.writeable = kind != "read-only"
    return copy


@st.composite
def shapes(draw: st.DrawFn, min_dims: int = 0) -> tuple[int, ...]:
    """Draw small shapes, some without elements, and now and then one that fills several segments."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from([(20_011,), (3, 9001), (130, 2, 70)]))
    return draw(hnp.array_shapes(min_dims=min_dims, max_dims=4, min_side=0, max_side=5))


def values(shape: tuple[int, ...], dtype: oracle.DType, rank: int) -> Array:
    """Return an array in which elements of one rank and of different ranks differ."""
    return oracle.vector(dtype, int(np.prod(shape)), rank).reshape(shape)


def plain(x: Any) -> Any:
    """Return `x` in native byte order; which order a result has is not fixed."""
    return x if x.dtype.isnative or x.dtype.names is not None else x.astype(x.dtype.newbyteorder("="))


REDUCING = st.sampled_from([(op, dtype) for dtype in oracle.REDUCIBLE for op in oracle.OPS if oracle.is_defined(op, dtype)])
DTYPES = st.sampled_from([*oracle.REDUCIBLE, *oracle.MOVABLE_ONLY])


def lay_all(parts: list[Array], ways: list[Callable[[Array], Array]]) -> list[Array]:
    """Lay out each rank's part in its own way; ranks agree on byte order, which is part of the dtype."""
    laid = [way(part) for way, part in zip(ways, parts, strict=True)]
    return [part if part.dtype == first.dtype else first for part, first in zip(laid, parts, strict=True)]


@COMMON
@given(shape=shapes(), reducing=REDUCING, ways=st.lists(layouts(), min_size=SIZE, max_size=SIZE), into=st.none() | layouts())
def test_all_reduce(world: World, shape: tuple[int, ...], reducing: tuple[str, oracle.DType], ways: list[Any], into: Any) -> None:
    op, dtype = reducing
    parts = [values(shape, dtype, rank) for rank in range(SIZE)]
    laid = lay_all(parts, ways)
    due = oracle.all_reduced(op, parts)

    async def body(group: aiodist.Group) -> None:
        out = writable(into(np.zeros_like(due)), due.dtype) if into and group.rank != 1 else None
        result = await group.all_reduce(laid[group.rank], op=op, out=out)
        assert out is None or result is out
        assert_same(result, due)

    world.run(body)


def writable(out: Array, dtype: oracle.DType) -> Array | None:
    """Return `out` if it can take a result of `dtype`, else None."""
    return out if out.flags.writeable and out.dtype == dtype else None


@COMMON
@given(shape=shapes(), dtype=DTYPES, way=layouts(), root=st.integers(0, SIZE - 1), into=st.none() | layouts())
def test_broadcast(world: World, shape: tuple[int, ...], dtype: oracle.DType, way: Any, root: int, into: Any) -> None:
    due = values(shape, dtype, root)
    laid = way(due)
    laid = laid if laid.dtype == dtype else due

    async def body(group: aiodist.Group) -> None:
        out = writable(into(np.zeros_like(due)), dtype) if into else None
        result = await group.broadcast(laid if group.rank == root else None, root, out=out)
        assert out is None or result is out
        assert_same(result, due)

    world.run(body)


@COMMON
@given(shape=shapes(), dtype=DTYPES, ways=st.lists(layouts(), min_size=SIZE, max_size=SIZE), data=st.data())
def test_all_gather(world: World, shape: tuple[int, ...], dtype: oracle.DType, ways: list[Any], data: st.DataObject) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1)) if shape else 0
    parts = [values(shape, dtype, rank) for rank in range(SIZE)]
    laid = lay_all(parts, ways)
    due = np.concatenate(parts, axis=axis) if shape else np.stack(parts)

    async def body(group: aiodist.Group) -> None:
        assert_same(await group.all_gather(laid[group.rank], axis), due)

    world.run(body)


@COMMON
@given(shape=shapes(min_dims=1), reducing=REDUCING, ways=st.lists(layouts(), min_size=SIZE, max_size=SIZE), data=st.data())
def test_reduce_scatter(
    world: World, shape: tuple[int, ...], reducing: tuple[str, oracle.DType], ways: list[Any], data: st.DataObject
) -> None:
    op, dtype = reducing
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    whole = tuple(size * SIZE if index == axis % len(shape) else size for index, size in enumerate(shape))
    parts = [values(whole, dtype, rank) for rank in range(SIZE)]
    laid = lay_all(parts, ways)
    due = np.split(oracle.all_reduced(op, parts), SIZE, axis=axis)

    async def body(group: aiodist.Group) -> None:
        assert_same(await group.reduce_scatter(laid[group.rank], op, axis), due[group.rank])

    world.run(body)


@COMMON
@given(data=st.data(), shape=hnp.array_shapes(max_dims=3, max_side=6), dtype=st.sampled_from(["i4", "f8", "c8", "u1"]))
def test_any_basic_index_of_an_array(world: World, data: st.DataObject, shape: tuple[int, ...], dtype: str) -> None:
    index = data.draw(hnp.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
    wholes = [values(shape, np.dtype(dtype), rank) for rank in range(SIZE)]
    terms = [np.asarray(whole[index]) for whole in wholes]

    async def body(group: aiodist.Group) -> None:
        assert_same(await group.all_reduce(wholes[group.rank][index]), oracle.all_reduced("sum", terms))
        target = np.zeros(shape, dtype)
        if isinstance(target[index], np.ndarray):
            await group.all_reduce(terms[group.rank], out=target[index])
            due = np.zeros(shape, dtype)
            due[index] = oracle.all_reduced("sum", terms)
            assert_same(target, due)

    world.run(body)


@COMMON
@given(
    shape=shapes(),
    dtype=st.sampled_from([np.dtype(name) for name in ("i2", "i8", "u4", "f2", "f4", "f8", "c8", "c16", "M8[s]")]),
    reverse=st.booleans(),
)
def test_swapped_bytes(world: World, shape: tuple[int, ...], dtype: oracle.DType, reverse: bool) -> None:
    parts = [values(shape, dtype, rank) for rank in range(SIZE)]
    swapped = [part.astype(dtype.newbyteorder("S")) for part in parts]
    laid = [part[::-1] if reverse and part.ndim else part for part in swapped]
    due = [part[::-1] if reverse and part.ndim else part for part in parts]

    async def body(group: aiodist.Group) -> None:
        assert_same(plain(await group.all_gather(laid[group.rank])), np.concatenate(due) if shape else np.stack(due))
        assert_same(plain(await group.broadcast(laid[group.rank] if group.rank == 2 else None, root=2)), due[2])
        if dtype.kind != "M":
            assert_same(plain(await group.all_reduce(laid[group.rank])), oracle.all_reduced("sum", due))

    world.run(body)


# --- The collectives that have a root, or exchange ------------------------------------------------------------------------------------


def target(into: Callable[[Array], Array] | None, shape: tuple[int, ...], dtype: oracle.DType) -> Array | None:
    """Return an array to write a result into, in the drawn layout, or None where none is drawn or it can not be written."""
    out = into(np.zeros(shape, dtype)) if into is not None else None
    return out if out is not None and out.flags.writeable else None


def native(x: Any) -> Any:
    """Return `x` in native byte order, the fields of a structured array too."""
    return x.astype(x.dtype.newbyteorder("="))


def check_result(result: Any, out: Array | None, due: Any) -> None:
    """Fail unless `result` is `out`, where there is one, and holds what is due."""
    assert out is None or due is None or result is out
    assert_same(None if result is None else native(result), due)


def joined_shape(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Return the shape of the ranks' arrays of `shape` joined along `axis`."""
    return tuple(size * SIZE if index == axis % len(shape) else size for index, size in enumerate(shape)) or (SIZE,)


@COMMON
@given(
    shape=shapes(),
    reducing=REDUCING,
    ways=st.lists(layouts(), min_size=SIZE, max_size=SIZE),
    into=st.none() | layouts(),
    root=st.integers(0, SIZE - 1),
)
def test_reduce(world: World, shape: tuple[int, ...], reducing: tuple[str, oracle.DType], ways: list[Any], into: Any, root: int) -> None:
    op, dtype = reducing
    parts = [values(shape, dtype, rank) for rank in range(SIZE)]
    laid = lay_all(parts, ways)
    due = oracle.all_reduced(op, parts)

    async def body(group: aiodist.Group) -> None:
        out = target(into, due.shape, due.dtype)
        result = await group.reduce(laid[group.rank], op, root, out=out)
        check_result(result, out, due if group.rank == root else None)
        assert group.rank == root or out is None or not out.astype(bool).any()
        assert_same(native(laid[group.rank]), parts[group.rank])

    world.run(body)


@COMMON
@given(
    shape=shapes(),
    dtype=DTYPES,
    ways=st.lists(layouts(), min_size=SIZE, max_size=SIZE),
    into=st.none() | layouts(),
    root=st.integers(0, SIZE - 1),
    uneven=st.booleans(),
    data=st.data(),
)
def test_gather(
    world: World, shape: tuple[int, ...], dtype: oracle.DType, ways: list[Any], into: Any, root: int, uneven: bool, data: st.DataObject
) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1)) if shape else 0
    keep = [data.draw(st.integers(0, shape[axis])) if uneven and shape else None for _ in range(SIZE)]
    parts = [
        np.moveaxis(np.moveaxis(values(shape, dtype, rank), axis, 0)[: keep[rank]], 0, axis) if shape else values(shape, dtype, rank)
        for rank in range(SIZE)
    ]
    laid = lay_all(parts, ways)
    due = np.concatenate(parts, axis=axis) if shape else np.stack(parts)

    async def body(group: aiodist.Group) -> None:
        out = target(into, due.shape, dtype)
        result = await group.gather(laid[group.rank], root, axis, uneven, out=out)
        check_result(result, out, due if group.rank == root else None)
        everywhere = target(into, due.shape, dtype)
        check_result(await group.all_gather(laid[group.rank], axis, uneven, out=everywhere), everywhere, due)

    world.run(body)


@COMMON
@given(shape=shapes(min_dims=1), dtype=DTYPES, way=layouts(), into=st.none() | layouts(), root=st.integers(0, SIZE - 1), data=st.data())
def test_scatter(world: World, shape: tuple[int, ...], dtype: oracle.DType, way: Any, into: Any, root: int, data: st.DataObject) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    whole = values(joined_shape(shape, axis), dtype, root)
    laid = way(whole)
    due = np.split(whole, SIZE, axis=axis)

    async def body(group: aiodist.Group) -> None:
        out = target(into, shape, dtype)
        result = await group.scatter(laid if group.rank == root else None, root, axis, out=out)
        check_result(result, out, due[group.rank])

    world.run(body)


@COMMON
@given(
    shape=shapes(min_dims=1),
    dtype=DTYPES,
    ways=st.lists(layouts(), min_size=SIZE, max_size=SIZE),
    into=st.none() | layouts(),
    data=st.data(),
)
def test_all_to_all(world: World, shape: tuple[int, ...], dtype: oracle.DType, ways: list[Any], into: Any, data: st.DataObject) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    parts = [values(joined_shape(shape, axis), dtype, rank) for rank in range(SIZE)]
    laid = lay_all(parts, ways)
    cut = [np.split(part, SIZE, axis=axis) for part in parts]

    async def body(group: aiodist.Group) -> None:
        due = np.concatenate([pieces[group.rank] for pieces in cut], axis=axis)
        out = target(into, due.shape, dtype)
        check_result(await group.all_to_all(laid[group.rank], axis, out=out), out, due)
        assert_same(native(laid[group.rank]), parts[group.rank])
        if laid[group.rank].flags.writeable:
            check_result(await group.all_to_all(laid[group.rank], axis, out=laid[group.rank]), laid[group.rank], due)
        else:
            await group.all_to_all(laid[group.rank], axis)

    world.run(body)


@COMMON
@given(
    entries=st.lists(st.lists(shapes(), min_size=SIZE, max_size=SIZE), min_size=SIZE, max_size=SIZE),
    dtype=DTYPES,
    way=layouts(),
    into=st.none() | layouts(),
    root=st.integers(0, SIZE - 1),
)
def test_lists(world: World, entries: list[list[tuple[int, ...]]], dtype: oracle.DType, way: Any, into: Any, root: int) -> None:
    lists = [[values(shape, dtype, 3 * sender + index) for index, shape in enumerate(row)] for sender, row in enumerate(entries)]
    laid = [[way(array) for array in row] for row in lists]

    async def body(group: aiodist.Group) -> None:
        due = [row[group.rank] for row in lists]
        outs = [target(into, array.shape, dtype) for array in due]
        out = None if any(array is None for array in outs) else outs
        result = await group.all_to_all(laid[group.rank], out=out)
        assert len(result) == SIZE
        for got, goal, expected in zip(result, outs if out else [None] * SIZE, due, strict=True):
            check_result(got, goal, expected)
        goal = target(into, lists[root][group.rank].shape, dtype)
        scattered = await group.scatter(laid[root] if group.rank == root else None, root, out=goal)
        check_result(scattered, goal, lists[root][group.rank])

    world.run(body)
