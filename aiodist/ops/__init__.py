"""The collectives as functions that take ``group=WORLD``.

    total = await aiodist.ops.all_reduce(x)

`Group` has the same as methods, documented there.
"""

from __future__ import annotations

from typing import Any

from aiodist._core import TensorFuture
from aiodist.registry import WORLD, resolve
from aiodist.types import ReduceOp

__all__ = ["all_gather", "all_reduce", "barrier", "broadcast", "reduce_scatter"]


def all_reduce(
    x: Any, op: ReduceOp | str = "sum", *, group: Any = WORLD, out: Any = None, timeout: float | None = None
) -> TensorFuture[Any]:
    """See `Group.all_reduce`."""
    future: TensorFuture[Any] = resolve(group).all_reduce(x, op, out=out, timeout=timeout)
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


def all_gather(x: Any, axis: int = 0, *, group: Any = WORLD, out: Any = None, timeout: float | None = None) -> TensorFuture[Any]:
    """See `Group.all_gather`."""
    future: TensorFuture[Any] = resolve(group).all_gather(x, axis, out=out, timeout=timeout)
    return future


def barrier(*, group: Any = WORLD, timeout: float | None = None) -> TensorFuture[None]:
    """See `Group.barrier`."""
    future: TensorFuture[None] = resolve(group).barrier(timeout=timeout)
    return future
