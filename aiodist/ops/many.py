"""Lists of arrays that move as one packed operation."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import operator
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from aiodist._core import TensorFuture
from aiodist.backends.base import Backend, Call, Form
from aiodist.backends.host import dtype_of_text, dtype_text
from aiodist.errors import TransportError
from aiodist.ops.checks import as_output, check_rank, check_timeout, refusing
from aiodist.ops.lists import apart, as_many, as_targets, finishing
from aiodist.types import ReduceOp, check_reduction, dtype_code

__all__ = ["all_reduce_many", "broadcast_many"]

# Arrays begin at multiples of this in a packed broadcast, so that receivers can use them where they lie.
_ALIGN: Final = 64


def all_reduce_many(backend: Backend, xs: Any, op: Any, out: Any, timeout: Any) -> TensorFuture[list[Any]]:
    """Start an all_reduce of many arrays; see `Group.all_reduce_many`."""
    with refusing(backend, "all_reduce"):
        seconds = check_timeout(timeout)
        reduction = ReduceOp.of(op)
        arrays = as_many(xs, "xs")
        for index, array in enumerate(arrays):
            if check_reduction(reduction, array.dtype) != array.dtype:
                raise TypeError(f"xs[{index}] has dtype {array.dtype}, whose mean has another one: reduce it alone, or sum")
        inputs, outputs, finish = _places(arrays, xs, out)
        # One dtype after the other, the widest first: then all of them are aligned in a packed payload.
        order = sorted(range(len(arrays)), key=lambda index: (-arrays[index].itemsize, dtype_code(arrays[index].dtype)))
        sections: list[tuple[int, int]] = []
        for index in order:
            code = dtype_code(arrays[index].dtype)
            count = sections.pop()[1] if sections and sections[-1][0] == code else 0
            sections.append((code, count + 1))
        return backend.start(
            Call(
                "all_reduce",
                [inputs[index] for index in order],
                [outputs[index] for index in order],
                np.dtype("V1"),
                finish=finish,
                op=reduction,
                form=Form.MANY,
                table=(len(arrays), _digest(_described(arrays))),
                sections=sections,
                timeout=seconds,
            )
        )


def broadcast_many(backend: Backend, rank: int, size: int, xs: Any, root: Any, out: Any, timeout: Any) -> TensorFuture[list[Any]]:
    """Start a broadcast of many arrays; see `Group.broadcast_many`."""
    with refusing(backend, "broadcast"):
        source = check_rank(root, size, "root")
        call = Call("broadcast", dtype=np.dtype("V1"), root=source, form=Form.MANY, timeout=check_timeout(timeout))
        if rank != source and xs is None and out is None:
            call.form |= Form.WILDCARD
            call.result, call.finish = ..., _unpack
            return backend.start(call)
        arrays = as_many(out if xs is None and rank != source else xs, "out" if xs is None and rank != source else "xs")
        inputs, outputs, call.finish = _places(arrays, out if xs is None else xs, out)
        layout = _layout(_described(arrays))
        if rank == source:
            call.input = _padded(inputs, layout)
        call.output = _padded(outputs, layout.copy())
        call.table = (len(arrays), _digest(_described(arrays)))
        return backend.start(call)


def _places(arrays: list[np.ndarray], xs: Any, out: Any) -> tuple[list[np.ndarray], list[np.ndarray], Any]:
    """Return what goes in, what is written, and what makes the caller's list of it."""
    if out is None:
        parts = [as_output(None, array.shape, array.dtype, like=x) for array, x in zip(arrays, xs, strict=True)]

        def finish(_: Any) -> list[Any]:
            return [part.array if part.finish is None else part.finish(part.array) for part in parts]

        return arrays, [part.array for part in parts], finish
    targets = as_targets(out, len(arrays))
    for index, (array, target) in enumerate(zip(arrays, targets, strict=True)):
        if target.shape != array.shape:
            raise ValueError(f"out[{index}] has shape {target.shape}, the result {array.shape}")
        if target.dtype.newbyteorder("=") != array.dtype:
            raise TypeError(f"out[{index}] has dtype {target.dtype}, the result {array.dtype}")
    return apart(arrays, targets, in_place=True), *finishing(out, targets)


_Described: TypeAlias = tuple[tuple[np.dtype, tuple[int, ...]], ...]


def _described(arrays: Sequence[np.ndarray]) -> _Described:
    return tuple((array.dtype, array.shape) for array in arrays)


@functools.lru_cache(maxsize=64)
def _text(described: _Described) -> bytes:
    return json.dumps([(dtype_text(dtype), shape) for dtype, shape in described]).encode()


@functools.lru_cache(maxsize=64)
def _digest(described: _Described) -> int:
    """Return a number that tells lists of other dtypes or shapes apart."""
    return int.from_bytes(hashlib.blake2b(_text(described), digest_size=7).digest(), "little")


def _layout(described: _Described) -> np.ndarray:
    """Return the dtypes and shapes as bytes, behind their number."""
    text = _text(described)
    whole = np.zeros(_aligned(8 + len(text)), np.uint8)
    whole[:8] = np.array([len(text)], "<u8").view(np.uint8)
    whole[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
    return whole


def _padded(arrays: Sequence[np.ndarray], layout: np.ndarray) -> list[np.ndarray]:
    """Return the layout and the arrays with bytes between them, so that each begins at a multiple of `_ALIGN`."""
    pieces = [layout]
    filler = np.zeros(_ALIGN, np.uint8)
    for array in arrays:
        pieces.append(array)
        gap = _aligned(array.nbytes) - array.nbytes
        if gap:
            pieces.append(filler[:gap])
    return pieces


def _unpack(whole: np.ndarray) -> list[np.ndarray]:
    """Return the arrays that a root has packed, in the memory that they came in. What describes them was written by a peer."""
    data = whole.view(np.uint8)
    try:
        length = int(data[:8].view("<u8")[0])
        described = json.loads(data[8 : 8 + length].tobytes())
        offset = _aligned(8 + length)
        arrays = []
        for text, shape in described:
            dtype = dtype_of_text(text)
            nbytes = math.prod(map(operator.index, shape)) * dtype.itemsize
            arrays.append(data[offset : offset + nbytes].view(dtype).reshape(shape) if nbytes else np.empty(shape, dtype))
            offset += _aligned(nbytes)
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise TransportError(f"the root describes arrays that can not be made here ({error})") from error
    return arrays


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
