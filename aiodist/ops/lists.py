"""Lists of arrays: what an operation on several arrays needs to know about them."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

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
    order = sorted((target for target in enumerate(targets) if target[1].size), key=lambda item: _bounds(item[1])[0])
    reach: list[tuple[int, np.ndarray]] = []  # those before that end after the present one begins
    for index, target in order:
        begin = _bounds(target)[0]
        reach = [item for item in reach if _bounds(item[1])[1] > begin]
        for other, held in reach:
            if np.shares_memory(held, target):
                raise ValueError(f"{name}[{max(index, other)}] overlaps {name}[{min(index, other)}]")
        reach.append((index, target))
    return targets


def apart(arrays: Sequence[np.ndarray], targets: Sequence[np.ndarray], *, in_place: bool) -> list[np.ndarray]:
    """Return the arrays, with copies for those that writing the targets could change too early.

    Args:
        arrays: What goes in.
        targets: What is written, none of which shares memory with another.
        in_place: Target k may be array k.
    """
    order = sorted(range(len(targets)), key=lambda index: _bounds(targets[index])[0])
    begins = [_bounds(targets[index])[0] for index in order]
    ends: list[int] = []  # the furthest end of the targets up to here
    for index in order:
        ends.append(max(_bounds(targets[index])[1], ends[-1] if ends else 0))
    return [_copied(array, number, targets, order, begins, ends, in_place) for number, array in enumerate(arrays)]


def _copied(
    array: np.ndarray,
    number: int,
    targets: Sequence[np.ndarray],
    order: list[int],
    begins: list[int],
    ends: list[int],
    in_place: bool,
) -> np.ndarray:
    begin, end = _bounds(array)
    place = bisect.bisect_left(begins, end) - 1
    while array.size and place >= 0 and ends[place] > begin:
        index = order[place]
        same = in_place and index == number and array.ctypes.data == targets[index].ctypes.data and array.nbytes == targets[index].nbytes
        if not same and np.may_share_memory(array, targets[index]):
            return array.copy()
        place -= 1
    return array


def _bounds(array: np.ndarray) -> tuple[int, int]:
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(high)


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
