"""The general path of the collectives that only move data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiodist._core import TensorFuture
from aiodist.backends.base import Backend, Call
from aiodist.ops.checks import Output, as_input, as_output, check_axis, check_root, check_timeout, refusing

__all__ = ["all_gather", "barrier", "broadcast"]


def broadcast(backend: Backend, rank: int, size: int, x: Any, root: Any, out: Any, timeout: Any) -> TensorFuture[Any]:
    """Start a broadcast of any array; see `Group.broadcast`."""
    with refusing(backend, "broadcast"):
        seconds = check_timeout(timeout)
        source = check_root(root, size)
        array: np.ndarray | None = None
        target: Output | None = None
        if rank == source:
            array = as_input(x)
            target = as_output(out, array.shape, array.dtype, array)
        elif x is not None:
            expected = as_input(x)
            target = as_output(out, expected.shape, expected.dtype)
        elif out is not None:
            if not isinstance(out, np.ndarray):
                raise TypeError(f"out must be a numpy array, not {type(out).__name__}")
            target = as_output(out, out.shape, as_input(out, "out").dtype)
        return backend.start(
            Call(
                "broadcast",
                array,
                None if target is None else target.array,
                None if target is None else target.array.dtype,
                result=None if target is None else target.array,
                finish=None if target is None else target.finish,
                root=source,
                wildcard=target is None,
                timeout=seconds,
            )
        )


def all_gather(backend: Backend, rank: int, size: int, x: Any, axis: Any, out: Any, timeout: Any) -> TensorFuture[Any]:
    """Start an all_gather of any array; see `Group.all_gather`."""
    with refusing(backend, "all_gather"):
        seconds = check_timeout(timeout)
        array = as_input(x)
        shape = array.shape or (1,)
        index = check_axis(axis, len(shape))
        joined = (*shape[:index], shape[index] * size, *shape[index + 1 :])
        rows = math.prod(shape[:index])
        own = isinstance(out, np.ndarray) and _is_own_slot(array, out, rank, rows)
        target = as_output(out, joined, array.dtype, array, own_slot=own)
        return backend.start(
            Call(
                "all_gather",
                array,
                target.array,
                array.dtype,
                result=target.array,
                finish=target.finish,
                axis=index,
                rows=rows,
                timeout=seconds,
            )
        )


def barrier(backend: Backend, timeout: Any) -> TensorFuture[None]:
    """Start a barrier; see `Group.barrier`."""
    with refusing(backend, "barrier"):
        seconds = check_timeout(timeout)
        return backend.start(Call("barrier", timeout=seconds))


def _is_own_slot(x: np.ndarray, out: np.ndarray, rank: int, rows: int) -> bool:
    """True where `x` is exactly the part of `out` that this rank's contribution goes to, so that no copy is needed."""
    plain = x.flags.c_contiguous and out.flags.c_contiguous and rows == 1
    return bool(plain and x.ctypes.data == out.ctypes.data + rank * x.nbytes)
