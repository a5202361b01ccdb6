"""The collectives as functions that take ``group=WORLD``.

    total = await aiodist.ops.all_reduce(x)

`Group` has the same as methods, documented there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiodist._core import TensorFuture
from aiodist.registry import WORLD, resolve
from aiodist.types import ReduceOp

__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_many",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_many",
    "broadcast_object",
    "gather",
    "gather_object",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_object",
    "send",
]


def all_reduce(
    x: Any, op: ReduceOp | str = "sum", *, group: Any = WORLD, out: Any = None, timeout: float | None = None
) -> TensorFuture[Any]:
    """See `Group.all_reduce`."""
    future: TensorFuture[Any] = resolve(group).all_reduce(x, op, out=out, timeout=timeout)
    return future


def all_reduce_many(
    xs: Sequence[Any], op: ReduceOp | str = "sum", *, group: Any = WORLD, out: Sequence[Any] | None = None, timeout: float | None = None
) -> TensorFuture[list[Any]]:
    """See `Group.all_reduce_many`."""
    future: TensorFuture[list[Any]] = resolve(group).all_reduce_many(xs, op, out=out, timeout=timeout)
    return future


def reduce(
    x: Any, op: ReduceOp | str = "sum", root: int = 0, *, group: Any = WORLD, out: Any = None, timeout: float | None = None
) -> TensorFuture[Any]:
    """See `Group.reduce`."""
    future: TensorFuture[Any] = resolve(group).reduce(x, op, root, out=out, timeout=timeout)
    return future


def reduce_scatter(
    x: Any, op: ReduceOp | str = "sum", axis: int = 0, *, group: Any = WORLD, out: Any = None, timeout: float | None = None
) -> TensorFuture[Any]:
    """See `Group.reduce_scatter`."""
    future: TensorFuture[Any] = resolve(group).reduce_scatter(x, op, axis, out=out, timeout=timeout)
    return future


def broadcast(x: Any, root: int = 0, *, group: Any = WORLD, out: Any = None, timeout: float | None = None) -> TensorFuture[Any]:
    """See `Group.broadcast`."""
    future: TensorFuture[Any] = resolve(group).broadcast(x, root, out=out, timeout=timeout)
    return future


def broadcast_many(
    xs: Sequence[Any] | None, root: int = 0, *, group: Any = WORLD, out: Sequence[Any] | None = None, timeout: float | None = None
) -> TensorFuture[list[Any]]:
    """See `Group.broadcast_many`."""
    future: TensorFuture[list[Any]] = resolve(group).broadcast_many(xs, root, out=out, timeout=timeout)
    return future


def all_gather(
    x: Any, axis: int = 0, uneven: bool = False, *, group: Any = WORLD, out: Any = None, timeout: float | None = None
) -> TensorFuture[Any]:
    """See `Group.all_gather`."""
    future: TensorFuture[Any] = resolve(group).all_gather(x, axis, uneven, out=out, timeout=timeout)
    return future


def gather(
    x: Any, root: int = 0, axis: int = 0, uneven: bool = False, *, group: Any = WORLD, out: Any = None, timeout: float | None = None
) -> TensorFuture[Any]:
    """See `Group.gather`."""
    future: TensorFuture[Any] = resolve(group).gather(x, root, axis, uneven, out=out, timeout=timeout)
    return future


def scatter(
    x: Any, root: int = 0, axis: int = 0, *, group: Any = WORLD, out: Any = None, timeout: float | None = None
) -> TensorFuture[Any]:
    """See `Group.scatter`."""
    future: TensorFuture[Any] = resolve(group).scatter(x, root, axis, out=out, timeout=timeout)
    return future


def all_to_all(x: Any, axis: int = 0, *, group: Any = WORLD, out: Any = None, timeout: float | None = None) -> TensorFuture[Any]:
    """See `Group.all_to_all`."""
    future: TensorFuture[Any] = resolve(group).all_to_all(x, axis, out=out, timeout=timeout)
    return future


def send(x: Any, dst: int, tag: int = 0, *, group: Any = WORLD, timeout: float | None = None) -> TensorFuture[None]:
    """See `Group.send`."""
    future: TensorFuture[None] = resolve(group).send(x, dst, tag, timeout=timeout)
    return future


def recv(src: int, tag: int = 0, *, group: Any = WORLD, out: Any = None, timeout: float | None = None) -> TensorFuture[Any]:
    """See `Group.recv`."""
    future: TensorFuture[Any] = resolve(group).recv(src, tag, out=out, timeout=timeout)
    return future


def barrier(*, group: Any = WORLD, timeout: float | None = None) -> TensorFuture[None]:
    """See `Group.barrier`."""
    future: TensorFuture[None] = resolve(group).barrier(timeout=timeout)
    return future


def broadcast_object(
    value: Any = None, root: int = 0, *, pickle: bool = False, group: Any = WORLD, timeout: float | None = None
) -> TensorFuture[Any]:
    """See `Group.broadcast_object`."""
    future: TensorFuture[Any] = resolve(group).broadcast_object(value, root, pickle=pickle, timeout=timeout)
    return future


def all_gather_object(value: Any, *, pickle: bool = False, group: Any = WORLD, timeout: float | None = None) -> TensorFuture[list[Any]]:
    """See `Group.all_gather_object`."""
    future: TensorFuture[list[Any]] = resolve(group).all_gather_object(value, pickle=pickle, timeout=timeout)
    return future


def gather_object(
    value: Any, root: int = 0, *, pickle: bool = False, group: Any = WORLD, timeout: float | None = None
) -> TensorFuture[list[Any] | None]:
    """See `Group.gather_object`."""
    future: TensorFuture[list[Any] | None] = resolve(group).gather_object(value, root, pickle=pickle, timeout=timeout)
    return future


def scatter_object(
    values: Sequence[Any] | None = None, root: int = 0, *, pickle: bool = False, group: Any = WORLD, timeout: float | None = None
) -> TensorFuture[Any]:
    """See `Group.scatter_object`."""
    future: TensorFuture[Any] = resolve(group).scatter_object(values, root, pickle=pickle, timeout=timeout)
    return future
