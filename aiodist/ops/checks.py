"""Argument checks and layouts: from what callers pass to the plain arrays that a backend takes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from aiodist.backends.base import Backend

__all__ = ["Output", "as_input", "as_output", "check_axis", "check_root", "check_timeout", "refusing"]


class refusing:  # used as a with statement's verb
    """While entered: what stops this call here is told to its peers, who fail with the reason in place of waiting."""

    __slots__ = ("_backend", "_collective")

    def __init__(self, backend: Backend, collective: str) -> None:
        self._backend = backend
        self._collective = collective

    def __enter__(self) -> None:
        pass

    # Not a generator: its frame would be the standard library's, and pass for the call site.
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self._backend.refuse(self._collective, f"{type(error).__name__}: {error}")


def check_timeout(timeout: Any) -> float | None:
    """Return `timeout` as seconds.

    Raises:
        TypeError: it is no number.
        ValueError: it is not positive, or not finite.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float | np.integer | np.floating):
        raise TypeError(f"timeout must be a number of seconds or None, not {type(timeout).__name__}")
    seconds = float(timeout)
    if not 0 < seconds < math.inf:
        raise ValueError(f"timeout must be a finite positive number of seconds, not {timeout!r}")
    return seconds


def check_root(root: Any, size: int) -> int:
    """Return `root` as a group rank.

    Raises:
        TypeError: it is no whole number.
        ValueError: no rank of the group has it.
    """
    if isinstance(root, bool):
        raise TypeError("root must be a group rank, not bool")
    try:
        rank = operator.index(root)
    except TypeError:
        raise TypeError(f"root must be a group rank, not {type(root).__name__}") from None
    if not 0 <= rank < size:
        raise ValueError(f"root {rank} is not a rank of this group of {size}")
    return rank


def check_axis(axis: Any, ndim: int) -> int:
    """Return `axis` counted from 0.

    Raises:
        TypeError: it is no whole number.
        ValueError: the array has no such axis.
    """
    try:
        index = operator.index(axis)
    except TypeError:
        raise TypeError(f"axis must be a whole number, not {type(axis).__name__}") from None
    if not -ndim <= index < ndim:
        raise ValueError(f"axis {index} is out of range for an array of {ndim} dimensions")
    return index % ndim


def as_input(x: Any, name: str = "x") -> np.ndarray:
    """Return `x` as a plain array: exactly ndarray, C-contiguous, aligned, native byte order. Copies only where it must.

    Raises:
        TypeError: `x` is no array, or holds Python objects.
    """
    if x is None:
        raise TypeError(f"{name} must be an array, not None")
    try:
        array = np.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} can not be read as an array: {error}") from None
    if array.dtype.hasobject:
        raise TypeError(f"{name} holds Python objects (dtype {array.dtype}): no pointer may leave the process")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if type(array) is not np.ndarray or not (array.flags.c_contiguous and array.flags.aligned):
        array = np.array(array, order="C", copy=True, subok=False)
    return array


class Output:
    """Where a result goes: a plain array for the backend, and what brings it to the caller's own layout.

    Attributes:
        array: What the backend writes.
        finish: Called with `array` at the end; None where it is the caller's array already.
    """

    __slots__ = ("array", "finish")

    def __init__(self, array: np.ndarray, finish: Callable[[Any], Any] | None = None) -> None:
        self.array = array
        self.finish = finish


def as_output(out: Any, shape: tuple[int, ...], dtype: np.dtype, source: np.ndarray | None = None, *, own_slot: bool = False) -> Output:
    """Return where a result of `shape` and `dtype` goes: a new array, or the caller's `out`.

    Args:
        out: The caller's array, or None.
        shape: Shape of the result.
        dtype: Element type of the result.
        source: The plain input (see `as_input`): it may be `out` itself, but not overlap it in part. A copy of the caller's never does.
        own_slot: The input may lie anywhere inside `out`; the caller sees to it.

    Raises:
        TypeError: `out` is no ndarray or has another dtype.
        ValueError: `out` has another shape, is read-only, repeats memory, or overlaps the input in part.
    """
    if out is None:
        return Output(np.empty(shape, dtype))
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy array, not {type(out).__name__}")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape} ({out.size} elements), the result {shape} ({math.prod(shape)} elements)")
    if out.dtype.newbyteorder("=") != dtype:
        raise TypeError(f"out has dtype {out.dtype}, the result {dtype}")
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    if out.size and any(extent > 1 and stride == 0 for extent, stride in zip(out.shape, out.strides, strict=True)):
        raise ValueError("out repeats its memory (a stride of 0)")
    if not own_slot and source is not None and not _same_memory(source, out) and _overlap(source, out):
        raise ValueError("out overlaps x in part; pass the same array, or a separate one")
    plain = type(out) is np.ndarray and out.flags.c_contiguous and out.flags.aligned and out.dtype.isnative
    if plain:
        return Output(out)

    def finish(result: np.ndarray) -> np.ndarray:
        np.copyto(out, result)
        return out

    return Output(np.empty(shape, dtype), finish)


def _same_memory(a: np.ndarray, b: np.ndarray) -> bool:
    return a is b or (a.ctypes.data == b.ctypes.data and a.shape == b.shape and a.strides == b.strides and a.dtype == b.dtype)


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    if not np.may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]  # its stub knows 0 and -1 only
    except np.exceptions.TooHardError:
        return True  # undecided: refused, as if it did
