"""The general path of all_to_all, and of send and recv."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiodist._core import TensorFuture
from aiodist.backends.base import Backend, Call, Form
from aiodist.ops.arrays import kind_of
from aiodist.ops.checks import as_input, as_output, as_target, check_divisible, check_rank, check_tag, check_timeout, output_to, refusing
from aiodist.ops.lists import apart, as_inputs, as_targets, finishing, is_list, listed

__all__ = ["all_to_all", "recv", "send"]


def all_to_all(backend: Backend, size: int, x: Any, axis: Any, out: Any, timeout: Any) -> TensorFuture[Any]:
    """Start an all_to_all of any array, or of lists of arrays; see `Group.all_to_all`."""
    with refusing(backend, "all_to_all"):
        seconds = check_timeout(timeout)
        if is_list(x):
            return backend.start(_of_lists(size, x, out, seconds))
        array = as_input(x)
        index, _ = check_divisible(array, axis, size)
        target = as_output(out, array.shape, array.dtype, array, like=x)
        if np.may_share_memory(array, target.array):
            array = array.copy()  # in place the parts that come would overwrite those that have not gone
        return backend.start(
            Call(
                "all_to_all",
                array,
                target.array,
                array.dtype,
                result=target.array,
                finish=target.finish,
                axis=index,
                timeout=seconds,
            )
        )


def _of_lists(size: int, xs: Any, out: Any, timeout: float | None) -> Call:
    arrays = as_inputs(xs, size, "x")
    call = Call("all_to_all", arrays, None, arrays[0].dtype, form=Form.LIST, table=listed(arrays), timeout=timeout)
    if out is None:
        call.result = ...
        call.finish = lambda results: [kind_of(given).wrap(result) for given, result in zip(xs, results, strict=True)]
        return call
    targets = as_targets(out, size)
    for index, target in enumerate(targets):
        if target.dtype.newbyteorder("=") != arrays[0].dtype:
            raise TypeError(f"out[{index}] has dtype {target.dtype}, the result {arrays[0].dtype}")
    call.input = apart(arrays, targets, in_place=False)
    call.table = [*listed(arrays), *listed(targets)]
    call.output, call.finish = finishing(out, targets)
    return call


def send(backend: Backend, size: int, x: Any, dst: Any, tag: Any, timeout: Any) -> TensorFuture[None]:
    """Start a send of any array; see `Group.send`. What is refused here has no place in any order, so no peer hears of it."""
    seconds = check_timeout(timeout)
    peer, number = check_rank(dst, size, "dst"), check_tag(tag)
    array = as_input(x)
    return backend.start(Call("send", array, None, array.dtype, root=peer, tag=number, timeout=seconds))


def recv(backend: Backend, size: int, src: Any, tag: Any, out: Any, timeout: Any) -> TensorFuture[Any]:
    """Start a receive; see `Group.recv`."""
    seconds = check_timeout(timeout)
    call = Call("recv", root=check_rank(src, size, "src"), tag=check_tag(tag), timeout=seconds, result=...)
    if out is not None:
        target = output_to(out, as_target(out))
        call.output, call.dtype = target.array, target.array.dtype
        call.result, call.finish = target.array, target.finish
    return backend.start(call)
