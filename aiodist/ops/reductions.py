"""The general path of the reductions."""

from __future__ import annotations

import math
from typing import Any

from aiodist._core import TensorFuture
from aiodist.backends.base import Backend, Call
from aiodist.ops.checks import as_input, as_output, check_divisible, check_rank, check_timeout, refusing
from aiodist.types import ReduceOp, check_reduction

__all__ = ["all_reduce", "reduce", "reduce_scatter"]


def all_reduce(backend: Backend, x: Any, op: Any, out: Any, timeout: Any) -> TensorFuture[Any]:
    """Start an all_reduce of any array; see `Group.all_reduce`."""
    with refusing(backend, "all_reduce"):
        seconds = check_timeout(timeout)
        reduction = ReduceOp.of(op)
        array = as_input(x)
        target = as_output(out, array.shape, check_reduction(reduction, array.dtype), array, like=x)
        return backend.start(
            Call(
                "all_reduce",
                array,
                target.array,
                array.dtype,
                result=target.array,
                finish=target.finish,
                op=reduction,
                timeout=seconds,
            )
        )


def reduce(backend: Backend, rank: int, size: int, x: Any, op: Any, root: Any, out: Any, timeout: Any) -> TensorFuture[Any]:
    """Start a reduce of any array; see `Group.reduce`."""
    with refusing(backend, "reduce"):
        seconds = check_timeout(timeout)
        reduction = ReduceOp.of(op)
        target_rank = check_rank(root, size, "root")
        array = as_input(x)
        dtype = check_reduction(reduction, array.dtype)
        call = Call("reduce", array, None, array.dtype, op=reduction, root=target_rank, timeout=seconds)
        if rank == target_rank:
            target = as_output(out, array.shape, dtype, array, like=x)
            call.output = call.result = target.array
            call.finish = target.finish
        return backend.start(call)


def reduce_scatter(backend: Backend, size: int, x: Any, op: Any, axis: Any, out: Any, timeout: Any) -> TensorFuture[Any]:
    """Start a reduce_scatter of any array; see `Group.reduce_scatter`."""
    with refusing(backend, "reduce_scatter"):
        seconds = check_timeout(timeout)
        reduction = ReduceOp.of(op)
        array = as_input(x)
        index, shape = check_divisible(array, axis, size)
        target = as_output(out, shape, check_reduction(reduction, array.dtype), array, like=x)
        if size > 1 and out is not None and out is x:
            raise ValueError("out can not be x: the result is a part of it")
        return backend.start(
            Call(
                "reduce_scatter",
                array,
                target.array,
                array.dtype,
                result=target.array,
                finish=target.finish,
                op=reduction,
                axis=index,
                rows=math.prod(array.shape[:index]),
                timeout=seconds,
            )
        )
