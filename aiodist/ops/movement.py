"""The general path of the collectives that move without reducing, but for those that exchange."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiodist._core import TensorFuture
from aiodist.backends.base import NO_AXIS, Backend, Call, Form
from aiodist.ops.arrays import NUMPY, kind_of
from aiodist.ops.checks import (
    Output,
    as_input,
    as_output,
    as_target,
    check_axis,
    check_divisible,
    check_flag,
    check_rank,
    check_timeout,
    output_to,
    refusing,
)
from aiodist.ops.lists import as_inputs, is_list, listed

__all__ = ["all_gather", "barrier", "broadcast", "gather", "scatter"]


def broadcast(backend: Backend, rank: int, size: int, x: Any, root: Any, out: Any, timeout: Any) -> TensorFuture[Any]:
    """Start a broadcast of any array; see `Group.broadcast`."""
    with refusing(backend, "broadcast"):
        seconds = check_timeout(timeout)
        source = check_rank(root, size, "root")
        call = Call("broadcast", root=source, timeout=seconds)
        if rank == source:
            array = _given(x, rank)
            call.input = array
            _set_output(call, as_output(out, array.shape, array.dtype, array, like=x))
        elif x is not None:
            expected = as_input(x)
            _set_output(call, as_output(out, expected.shape, expected.dtype, like=x))
        elif out is not None:
            _set_output(call, output_to(out, as_target(out)))
        else:
            _receive(call)
        return backend.start(call)


def all_gather(backend: Backend, rank: int, size: int, x: Any, axis: Any, uneven: Any, out: Any, timeout: Any) -> TensorFuture[Any]:
    """Start an all_gather of any array; see `Group.all_gather`."""
    with refusing(backend, "all_gather"):
        return backend.start(_joining(Call("all_gather", timeout=check_timeout(timeout)), rank, size, x, axis, uneven, out, True))


def gather(backend: Backend, rank: int, size: int, x: Any, root: Any, axis: Any, uneven: Any, out: Any, timeout: Any) -> TensorFuture[Any]:
    """Start a gather of any array; see `Group.gather`."""
    with refusing(backend, "gather"):
        call = Call("gather", root=check_rank(root, size, "root"), timeout=check_timeout(timeout))
        return backend.start(_joining(call, rank, size, x, axis, uneven, out, rank == call.root))


def _joining(call: Call, rank: int, size: int, x: Any, axis: Any, uneven: Any, out: Any, reads: bool) -> Call:
    """Complete a call that joins the arrays of all ranks; `reads`: on this rank."""
    array = as_input(x)
    shape = array.shape or (1,)
    index = check_axis(axis, len(shape))
    call.input, call.dtype, call.axis = array, array.dtype, index
    if check_flag(uneven, "uneven"):
        call.form = Form.UNEVEN
    if not reads:
        return call
    if not call.form:
        joined = (*shape[:index], shape[index] * size, *shape[index + 1 :])
        own = out is not None and _is_own_slot(array, as_target(out), rank * array.nbytes, math.prod(shape[:index]))
        target = as_output(out, joined, array.dtype, array, like=x, own_slot=own)
        call.output, call.result, call.finish = target.array, target.array, target.finish
    elif out is None:
        call.result, call.finish = ..., _wrapping(x)
    else:
        _join_into(call, array, out, index)
    return call


def _join_into(call: Call, array: np.ndarray, out: Any, axis: int) -> None:
    """Set the output of an uneven call; how long it must be only the headers tell."""
    memory = as_target(out)
    shape = array.shape or (1,)
    if memory.ndim != len(shape):
        raise ValueError(f"out has {memory.ndim} dimensions, the result {len(shape)}")
    due = (*shape[:axis], memory.shape[axis], *shape[axis + 1 :])
    target = as_output(out, due, array.dtype)
    if np.may_share_memory(array, target.array):
        call.input = array.copy()
    call.output, call.result, call.finish = target.array, target.array, target.finish
    call.table = (memory.shape[axis] + 1,)


def scatter(backend: Backend, rank: int, size: int, x: Any, root: Any, axis: Any, out: Any, timeout: Any) -> TensorFuture[Any]:
    """Start a scatter of any array, or of a list of arrays; see `Group.scatter`."""
    with refusing(backend, "scatter"):
        call = Call("scatter", root=check_rank(root, size, "root"), timeout=check_timeout(timeout))
        if is_list(x):
            return backend.start(_dealing(call, rank, size, x, out))
        if rank == call.root or x is not None:
            return backend.start(_dividing(call, rank, size, x, axis, out))
        if out is None:
            _receive(call)
        else:
            _set_output(call, output_to(out, as_target(out)))
            call.form = Form.SHARE
        call.axis = check_axis(axis, None)
        return backend.start(call)


def _dealing(call: Call, rank: int, size: int, xs: Any, out: Any) -> Call:
    """Complete a scatter of a list, given on the root or described elsewhere."""
    arrays = as_inputs(xs, size, "x")
    target = as_output(out, arrays[rank].shape, arrays[rank].dtype, like=xs[rank])
    _set_output(call, target)
    call.form, call.axis = Form.SHARE, NO_AXIS
    if rank == call.root:
        call.input = [_apart(array, target.array) for array in arrays]
        call.form, call.axis, call.table = Form.LIST, 0, listed(arrays)
    return call


def _given(x: Any, rank: int) -> np.ndarray:
    if x is None:
        raise TypeError(f"x must be an array on the root, which is this rank {rank}, not None")
    return as_input(x)


def _dividing(call: Call, rank: int, size: int, x: Any, axis: Any, out: Any) -> Call:
    """Complete a scatter of one array, given on the root or described elsewhere."""
    array = _given(x, rank)
    call.axis, share = check_divisible(array, axis, size)
    own = out is not None and _is_own_slot(as_target(out), array, rank * array.nbytes // size, math.prod(array.shape[: call.axis]))
    is_root = rank == call.root
    target = as_output(out, share, array.dtype, array if is_root else None, like=x, own_slot=own)
    _set_output(call, target)
    if is_root:
        call.input = array
    else:
        call.form = Form.SHARE
    return call


def barrier(backend: Backend, timeout: Any) -> TensorFuture[None]:
    """Start a barrier; see `Group.barrier`."""
    with refusing(backend, "barrier"):
        seconds = check_timeout(timeout)
        return backend.start(Call("barrier", timeout=seconds))


def _set_output(call: Call, target: Output) -> None:
    call.output, call.dtype = target.array, target.array.dtype
    call.result, call.finish = target.array, target.finish


def _receive(call: Call) -> None:
    """Let the call take what comes."""
    call.form, call.result = Form.WILDCARD, ...


def _wrapping(x: Any) -> Any:
    kind = kind_of(x)
    return None if kind is NUMPY else kind.wrap


def _apart(array: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return `array`, or a copy where writing `target` could change it."""
    same = array.ctypes.data == target.ctypes.data and array.nbytes == target.nbytes
    return array.copy() if not same and np.may_share_memory(array, target) else array


def _is_own_slot(part: np.ndarray, whole: np.ndarray, at: int, rows: int) -> bool:
    """True where `part` is exactly what lies at byte `at` of `whole`, so that what belongs there is in its place already."""
    plain = part.flags.c_contiguous and whole.flags.c_contiguous and rows == 1
    return bool(plain and part.ctypes.data == whole.ctypes.data + at)
