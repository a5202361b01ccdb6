"""What training scripts use besides the collectives."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np

from aiodist.ops.checks import reason_of, refusing
from aiodist.sync.devices import get_device_count_by_fork
from aiodist.sync.futures import TensorFuture
from aiodist.sync.gradients import AllreduceCallback
from aiodist.sync.group import WORLD, AnyGroup, as_async, group_barrier, is_distributed

__all__ = [
    "AllreduceCallback",
    "TensorFuture",
    "apply",
    "bcast_list_",
    "get_device_count_by_fork",
    "get_offsets",
    "make_allreduce_cb",
    "pack_allreduce_split",
    "param_pack_concat",
    "param_pack_split",
    "synchronized",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")

make_allreduce_cb: Final = AllreduceCallback


def apply(op: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    """Call an operation and return its results, always as a tuple: ``(result,) = apply(np.exp, x)``.

    Raises:
        TypeError: `op` can not be called.
    """
    if not callable(op):
        raise TypeError(f"op must be something to call, not {type(op).__name__}")
    results = op(*args)
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def bcast_list_(inps: Iterable[Any], group: AnyGroup = WORLD) -> None:
    """Fill the arrays of every rank, in place, with those of the group's rank 0; blocks until that is done here.

    Args:
        inps: Writable arrays, such as a model's parameters; their number, shapes and dtypes are the same on every rank.
        group: The group.

    Raises:
        TypeError, ValueError: an argument is wrong; the peers get `PeerRefusedError`.
    """
    group = as_async(group)
    with refusing(group._backend, "broadcast"):
        arrays = list(inps)
    group.broadcast_many(arrays, out=arrays).result()


def get_offsets(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return where arrays of these shapes lie when packed behind each other: ``[begin0, end0, begin1, end1, …]``, in elements.

    Raises:
        TypeError, ValueError: these are no shapes.
    """
    offsets = [0]
    for shape in _shapes(shapes):
        begin = offsets[-1]
        offsets += [begin, begin + math.prod(shape)]
    return offsets[1:]


def param_pack_concat(inps: Sequence[Any], offsets: Any, offsets_val: Sequence[int]) -> np.ndarray:
    """Pack arrays into one.

    Args:
        inps: Arrays of one dtype.
        offsets: The same as `offsets_val`, as an array; None is fine.
        offsets_val: Where each array goes, in elements, as `get_offsets` gives it; in order, gaps become zeros.

    Returns:
        A new array of one dimension, as long as the last offset says.

    Raises:
        TypeError: the dtypes differ, or an argument is of another kind.
        ValueError: there are no arrays, or the offsets do not fit them.
    """
    if not isinstance(inps, Iterable):
        raise TypeError(f"inps must be a sequence of arrays, not {type(inps).__name__}")
    arrays = [np.asarray(inp) for inp in inps]
    if not arrays:
        raise ValueError("inps is empty")
    dtypes = list(dict.fromkeys(array.dtype for array in arrays))
    if any(dtype.hasobject for dtype in dtypes):
        raise TypeError("inps must hold numbers, not Python objects")
    if len(dtypes) > 1:
        raise TypeError(f"inps must have one dtype, not {dtypes[0]} and {dtypes[1]}")
    spans = _spans(offsets_val, [array.shape for array in arrays], "offsets_val")
    if offsets is not None and not np.array_equal(np.asarray(offsets), np.asarray(offsets_val)):
        raise ValueError("offsets and offsets_val differ")
    packed = np.zeros(spans[-1][1], arrays[0].dtype)
    for array, (begin, end) in zip(arrays, spans, strict=True):
        packed[begin:end] = array.reshape(-1)
    return packed


def param_pack_split(inp: Any, offsets: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Undo `param_pack_concat`.

    Args:
        inp: An array, whose elements are taken in C order.
        offsets: Where each result lies in it, in elements: ``[begin0, end0, begin1, end1, …]``.
        shapes: Shapes of the results.

    Returns:
        The arrays: views of `inp` where it is contiguous.

    Raises:
        TypeError: offsets or shapes are no whole numbers.
        ValueError: offsets, shapes and `inp` do not fit each other.
    """
    flat, extents = np.asarray(inp).reshape(-1), _shapes(shapes)
    spans = _spans(offsets, extents, "offsets")
    if spans and spans[-1][1] > flat.size:
        raise ValueError(f"offsets end at {spans[-1][1]}, inp has {flat.size} elements")
    return [flat[begin:end].reshape(shape) for (begin, end), shape in zip(spans, extents, strict=True)]


def _shapes(shapes: Iterable[Iterable[int]]) -> list[tuple[int, ...]]:
    try:
        checked = [tuple(map(operator.index, shape)) for shape in shapes]
    except TypeError:
        raise TypeError(f"shapes must be a sequence of shapes, which are sequences of whole numbers, not {str(shapes)[:100]}") from None
    if any(extent < 0 for shape in checked for extent in shape):
        raise ValueError(f"shapes must have no negative extent: {str(checked)[:100]}")
    return checked


def _spans(offsets: Iterable[int], shapes: Sequence[tuple[int, ...]], name: str) -> list[tuple[int, int]]:
    try:
        values = [operator.index(offset) for offset in offsets]
    except TypeError:
        raise TypeError(f"{name} must be a sequence of whole numbers, not {str(offsets)[:100]}") from None
    if len(values) != 2 * len(shapes):
        raise ValueError(f"{name} must have {2 * len(shapes)} numbers for {len(shapes)} arrays, not {len(values)}")
    if any(value < 0 for value in values) or values != sorted(values):
        raise ValueError(f"{name} must begin at 0 or later and rise, not {values}")
    spans = list(zip(values[::2], values[1::2], strict=True))
    for (begin, end), shape in zip(spans, shapes, strict=True):
        if end - begin != math.prod(shape):
            raise ValueError(f"{name} leave {end - begin} elements for an array of shape {shape}")
    return spans


def pack_allreduce_split(
    pack_list: Sequence[Any], shapes: Sequence[Sequence[int]], group: AnyGroup, reduce_method: str
) -> list[np.ndarray]:
    """Reduce arrays over a group as one packed array; blocks until that is done.

    Args:
        pack_list: Arrays of one dtype; their number, shapes and dtype are the same on every rank.
        shapes: Their shapes.
        group: The group.
        reduce_method: ``"sum"`` or ``"mean"``; a mean of integers is float64.

    Returns:
        The reduced arrays, the same bits on every rank: views of one new array.

    Raises:
        TypeError, ValueError: an argument is wrong; the peers get `PeerRefusedError`.
    """
    group = as_async(group)
    with refusing(group._backend, "all_reduce"):
        if reduce_method not in ("sum", "mean"):
            raise ValueError(f"reduce_method must be 'sum' or 'mean', not {reduce_method!r}")
        offsets = get_offsets(shapes)
        packed = param_pack_concat(pack_list, None, offsets)
    return param_pack_split(group.all_reduce(packed, reduce_method).result(), offsets, shapes)


def synchronized(func: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function return on all ranks of the world together: it ends with a barrier. Without a world it is as it was.

    Where it raises on a rank, that rank raises the same, and the others, which wait in the barrier, get `PeerRefusedError` with its text
    at once; the world stays usable.
    """

    @functools.wraps(func)
    def call_together(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            if is_distributed():
                as_async(WORLD)._backend.refuse("barrier", f"{getattr(func, '__name__', func)} failed: {reason_of(error)}")
            raise
        if is_distributed():
            group_barrier()
        return result

    return call_together
