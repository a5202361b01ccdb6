"""Lists of arrays: what an operation on several arrays needs to know about them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiodist import _core
from aiodist.ops.checks import as_input, as_target, output_to

__all__ = ["apart", "as_inputs", "as_many", "as_targets", "finishing", "is_list", "listed"]


def is_list(x: Any) -> bool:
    """True where `x` is a list of arrays rather than an array."""
    return isinstance(x, list | tuple)


def as_many(xs: Any, name: str) -> list[np.ndarray]:
    """Return the arrays of a list as plain ones (see `as_input`).

    Raises:
        TypeError: it is no list, or one of them is no array.
    """
    if not is_list(xs):
        raise TypeError(f"{name} must be a list of arrays, not {type(xs).__name__}")
    return [as_input(x, f"{name}[{index}]") for index, x in enumerate(xs)]


def as_inputs(xs: Any, size: int, name: str) -> list[np.ndarray]:
    """Return the arrays of a list that has one for each rank, all of one dtype.

    Raises:
        TypeError: one of them is no array, or has another dtype than the first.
        ValueError: there are not as many as ranks.
    """
    if len(xs) != size:
        raise ValueError(f"{name} has {len(xs)} arrays, the group {size} ranks")
    arrays = as_many(xs, name)
    for index, array in enumerate(arrays):
        if array.dtype != arrays[0].dtype:
            raise TypeError(f"{name}[{index}] has dtype {array.dtype}, {name}[0] {arrays[0].dtype}: a list moves arrays of one dtype")
    return arrays


def as_targets(outs: Any, count: int, name: str = "out") -> list[np.ndarray]:
    """Return the memory of a list of outputs.

    Raises:
        TypeError: it is no list, or one of them is no array that can be written.
        ValueError: there are not `count` of them, one is read-only, or two share memory.
    """
    if not is_list(outs):
        raise TypeError(f"{name} must be a list of arrays, not {type(outs).__name__}")
    if len(outs) != count:
        raise ValueError(f"{name} has {len(outs)} arrays, the result {count}")
    targets = [as_target(out, f"{name}[{index}]") for index, out in enumerate(outs)]
    bounds = _core.bounds(targets)
    reach: list[int] = []  # those before that end after the present one begins
    for index in sorted((index for index, target in enumerate(targets) if target.size), key=bounds.__getitem__):
        reach = [other for other in reach if bounds[other][1] > bounds[index][0]]
        for other in reach:
            if np.shares_memory(targets[other], targets[index]):
                raise ValueError(f"{name}[{max(index, other)}] overlaps {name}[{min(index, other)}]")
        reach.append(index)
    return targets


def apart(arrays: Sequence[np.ndarray], targets: Sequence[np.ndarray], *, in_place: bool) -> list[np.ndarray]:
    """Return the arrays, with copies for those that writing the targets could change too early.

    Args:
        arrays: What goes in.
        targets: What is written, none of which shares memory with another.
        in_place: Target k may be array k.
    """
    bounds, written = _core.bounds(arrays), _core.bounds(targets)
    order = sorted(range(len(targets)), key=written.__getitem__)
    begins = [written[index][0] for index in order]
    ends = list(itertools.accumulate((written[index][1] for index in order), max))  # the furthest of those up to here
    result = list(arrays)
    for number, (begin, end) in enumerate(bounds):
        place = bisect.bisect_left(begins, end) - 1
        while end > begin and place >= 0 and ends[place] > begin:
            index = order[place]
            same = in_place and index == number and written[index] == (begin, end)
            if not same and np.may_share_memory(arrays[number], targets[index]):
                result[number] = arrays[number].copy()
                break
            place -= 1
    return result


def listed(arrays: Sequence[np.ndarray]) -> list[int]:
    """Return the shapes as a call's table holds them: the number of dimensions and the extents of each."""
    return [number for array in arrays for number in (array.ndim, *array.shape)]


def finishing(outs: Any, targets: Sequence[np.ndarray]) -> tuple[list[np.ndarray], Callable[[Any], Any]]:
    """Return what is written for the caller's list of arrays, whose memory is `targets`, and what is to be called at the end."""
    parts = [output_to(out, target) for out, target in zip(outs, targets, strict=True)]

    def finish(_: Any) -> Any:
        for part in parts:
            if part.finish is not None:
                part.finish(part.array)
        return outs

    return [part.array for part in parts], finish
