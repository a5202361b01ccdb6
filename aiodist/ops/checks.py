"""Argument checks and layouts: from what callers pass to the plain arrays that a backend takes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

import numpy as np

from aiodist.backends.base import Backend
from aiodist.ops.arrays import NUMPY, kind_of

__all__ = [
    "Output",
    "as_input",
    "as_output",
    "as_target",
    "check_axis",
    "check_divisible",
    "check_flag",
    "check_rank",
    "check_tag",
    "check_timeout",
    "output_to",
    "plain_text",
    "reason_of",
    "refusing",
]


_MOST_DIMENSIONS: Final = 64  # numpy's own limit


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
        if error is not None:  # a KeyboardInterrupt too: the peers must not wait for this call
            self._backend.refuse(self._collective, reason_of(error))


def reason_of(error: BaseException) -> str:
    """Return what a peer is told of an error."""
    try:
        return plain_text(f"{type(error).__name__}: {error}")
    except Exception:  # its own text can not be made
        return type(error).__name__


def plain_text(text: str) -> str:
    """Return `text` as what can travel: what is no Unicode text, and a NUL, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


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
    try:
        seconds = float(timeout)
    except OverflowError:
        seconds = math.inf
    if not 0 < seconds < math.inf:
        raise ValueError(f"timeout must be a finite positive number of seconds, not {timeout!r}")
    return seconds


def check_rank(rank: Any, size: int, name: str) -> int:
    """Return `rank` as a group rank.

    Raises:
        TypeError: it is no whole number.
        ValueError: no rank of the group has it.
    """
    if isinstance(rank, bool):
        raise TypeError(f"{name} must be a group rank, not bool")
    try:
        index = operator.index(rank)
    except TypeError:
        raise TypeError(f"{name} must be a group rank, not {type(rank).__name__}") from None
    if not 0 <= index < size:
        raise ValueError(f"{name} {index} is not a rank of this group of {size}")
    return index


def check_tag(tag: Any) -> int:
    """Return `tag` as a number.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is negative, or larger than 64 bits hold.
    """
    if isinstance(tag, bool):
        raise TypeError("tag must be a whole number, not bool")
    try:
        number = operator.index(tag)
    except TypeError:
        raise TypeError(f"tag must be a whole number, not {type(tag).__name__}") from None
    if not 0 <= number < 2**63:
        raise ValueError(f"tag must be from 0 to 2**63 - 1, not {number}")
    return number


def check_flag(flag: Any, name: str) -> bool:
    """Return `flag`, which is True or False.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(flag, bool | np.bool):
        raise TypeError(f"{name} must be True or False, not {type(flag).__name__}")
    return bool(flag)


def check_axis(axis: Any, ndim: int | None) -> int:
    """Return `axis` counted from 0, or as it is where the number of dimensions is not known (None).

    Raises:
        TypeError: it is no whole number.
        ValueError: the array has no such axis.
    """
    if isinstance(axis, bool):
        raise TypeError("axis must be a whole number, not bool")
    try:
        index = operator.index(axis)
    except TypeError:
        raise TypeError(f"axis must be a whole number, not {type(axis).__name__}") from None
    if ndim is None:
        if not -_MOST_DIMENSIONS <= index < _MOST_DIMENSIONS:
            raise ValueError(f"axis {index} is out of range: no array has so many dimensions")
        return index
    if not -ndim <= index < ndim:
        raise ValueError(f"axis {index} is out of range for an array of {ndim} dimensions")
    return index % ndim


def check_divisible(array: np.ndarray, axis: Any, size: int) -> tuple[int, tuple[int, ...]]:
    """Return `axis` counted from 0, and the shape of each of `size` equal parts of x along it.

    Raises:
        TypeError, ValueError: there is no such axis, or its extent is no multiple of `size`.
    """
    if array.ndim == 0:
        raise ValueError("x has no axis to divide: it is 0-dimensional")
    index = check_axis(axis, array.ndim)
    extent = array.shape[index]
    if extent % size:
        raise ValueError(f"x has {extent} elements along axis {index}, which {size} ranks can not share evenly")
    return index, (*array.shape[:index], extent // size, *array.shape[index + 1 :])


def as_input(x: Any, name: str = "x") -> np.ndarray:
    """Return `x` as a plain array: exactly ndarray, C-contiguous, aligned, native byte order. Copies only where it must.

    Raises:
        TypeError: `x` is no array, or holds Python objects.
    """
    if x is None:
        raise TypeError(f"{name} must be an array, not None")
    array = kind_of(x).view(x, name)
    if array.dtype.hasobject:
        raise TypeError(f"{name} holds Python objects (dtype {array.dtype}): no pointer may leave the process")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if type(array) is not np.ndarray or not (array.flags.c_contiguous and array.flags.aligned):
        array = np.array(array, order="C", copy=True, subok=False)
    return array


class Output:
    """Where a result goes: a plain array for the backend, and what makes the caller's array of it.

    Attributes:
        array: What the backend writes.
        finish: Called with `array` at the end; None where it is what the caller gets.
    """

    __slots__ = ("array", "finish")

    def __init__(self, array: np.ndarray, finish: Callable[[Any], Any] | None = None) -> None:
        self.array = array
        self.finish = finish


def as_output(
    out: Any,
    shape: tuple[int, ...],
    dtype: np.dtype,
    source: np.ndarray | None = None,
    *,
    like: Any = None,
    own_slot: bool = False,
    name: str = "out",
) -> Output:
    """Return where a result of `shape` and `dtype` goes: a new array, or the caller's `out`.

    Args:
        out: The caller's array, or None.
        shape: Shape of the result.
        dtype: Element type of the result.
        source: The plain input (see `as_input`): it may be `out` itself, but not overlap it in part. A copy of the caller's never does.
        like: What the caller passed in: without `out` the result becomes one of its kind.
        own_slot: The input may lie anywhere inside `out`; the caller sees to it.
        name: What errors call `out`.

    Raises:
        TypeError: `out` is no array that can be written, or has another dtype.
        ValueError: `out` has another shape, is read-only, repeats memory, or overlaps the input in part.
    """
    if out is None:
        kind = kind_of(like)
        return Output(np.empty(shape, dtype), None if kind is NUMPY else kind.wrap)
    target = as_target(out, name)
    if target.shape != shape:
        raise ValueError(f"{name} has shape {target.shape} ({target.size} elements), the result {shape} ({math.prod(shape)} elements)")
    if target.dtype.newbyteorder("=") != dtype:
        raise TypeError(f"{name} has dtype {target.dtype}, the result {dtype}")
    if not own_slot and source is not None and not _same_memory(source, target) and _overlap(source, target):
        raise ValueError(f"{name} overlaps x in part; pass the same array, or a separate one")
    return output_to(out, target)


def as_target(out: Any, name: str = "out") -> np.ndarray:
    """Return the memory of the caller's `out` as an array.

    Raises:
        TypeError: it is no array that can be written.
        ValueError: it is read-only, or repeats memory.
    """
    target = kind_of(out).target(out, name)
    if target.dtype.hasobject:
        raise TypeError(f"{name} holds Python objects (dtype {target.dtype}): no pointer may leave the process")
    if target.nbytes and any(extent > 1 and stride == 0 for extent, stride in zip(target.shape, target.strides, strict=True)):
        raise ValueError(f"{name} repeats its memory (a stride of 0)")
    return target


def output_to(out: Any, target: np.ndarray) -> Output:
    """Return how a result reaches `out`, whose memory is `target`: at once where that is a plain array, else by a copy at the end."""
    if type(target) is np.ndarray and target.flags.c_contiguous and target.flags.aligned and target.dtype.isnative:
        return Output(target, None if out is target else lambda _: out)

    def finish(result: np.ndarray) -> Any:
        np.copyto(target, result)
        return out

    return Output(np.empty(target.shape, target.dtype.newbyteorder("=")), finish)


def _same_memory(a: np.ndarray, b: np.ndarray) -> bool:
    return a is b or (a.ctypes.data == b.ctypes.data and a.shape == b.shape and a.strides == b.strides and a.dtype == b.dtype)


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    if not np.may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]  # its stub knows 0 and -1 only
    except np.exceptions.TooHardError:
        return True  # undecided: refused, as if it did
