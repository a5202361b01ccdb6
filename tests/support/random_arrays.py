"""The arrays of random programs: what they hold, how they lie in memory, and whether what came back is right."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

import aiodist
from support import oracle
from support.oracle import Array, DType

Shape = tuple[int, ...]
MOVABLE: Final = (*oracle.REDUCIBLE, *oracle.MOVABLE_ONLY)
LAYOUTS: Final = ("plain", "plain", "read-only", "strided", "reversed", "fortran", "shared", "part of shared", "swapped", "scalar")
_LARGE_BYTES: Final = (70_000, 400_000)
_LONGEST: Final = 30.0
"""Seconds that a call may take where a program gives it a time."""


@dataclass(frozen=True)
class Raises:
    """In place of a value: the call fails with one of these."""

    kinds: tuple[type[BaseException], ...]


def draw_shape(draw: random.Random, dtype: DType, size: int, least: int = 0) -> Shape:
    """Return a shape of at least `least` dimensions: none, no elements, few, about a slot of a group of `size`, or several segments."""
    kind = draw.choices(("none", "no elements", "few", "slot", "large"), (2, 2, 14, 4, 2))[0]
    if kind == "none" and least == 0:
        return ()
    if kind == "slot":
        slot = oracle.slot_count(dtype, size)
        return _folded(draw, max(1, slot + draw.choice((-1, 0, 1, 2, slot // 3, slot))), least)
    if kind == "large":
        return _folded(draw, draw.randint(*_LARGE_BYTES) // dtype.itemsize // max(1, size // 2), least)
    extents = [draw.randint(1, 5) for _ in range(draw.randint(max(1, least), 3))]
    if kind == "no elements":
        extents[draw.randrange(len(extents))] = 0
    return tuple(extents)


def _folded(draw: random.Random, count: int, least: int) -> Shape:
    """Return a shape of about `count` elements in up to two dimensions."""
    if least < 2 and draw.random() < 0.6:
        return (count,)
    rows = draw.randint(1, 7)
    return (rows, max(1, count // rows)) if draw.random() < 0.5 else (max(1, count // rows), rows)


def longer(shape: Shape, axis: int, factor: int) -> Shape:
    """Return `shape` with the extent along `axis` multiplied."""
    return tuple(extent * factor if place == axis % len(shape) else extent for place, extent in enumerate(shape))


@lru_cache(maxsize=256)
def values(seed: int, number: int, part: int, dtype: DType, shape: Shape) -> Array:
    """Return the read-only elements that one operation of one program has for one part: other ones than any other operation's."""
    stream = np.random.Generator(np.random.Philox(key=[seed, number << 16 | part]))
    array = oracle._random(stream, dtype, math.prod(shape)).reshape(shape)
    array.flags.writeable = False
    return array


def _laid_out(draw: random.Random, group: aiodist.Group, wanted: Array) -> Any:
    """Return something that equals `wanted` and lies in memory in a drawn way."""
    layout = draw.choice(LAYOUTS)
    numeric = wanted.dtype in oracle.REDUCIBLE
    if layout == "scalar" and wanted.ndim == 0 and numeric:
        return wanted[()]
    if layout == "swapped" and numeric and wanted.dtype.kind in "iufc" and wanted.dtype.itemsize > 1:
        return wanted.astype(wanted.dtype.newbyteorder("S"))
    if layout == "read-only":
        return wanted
    whole, part = _room(draw, group, wanted.shape, wanted.dtype, layout)
    array = whole[part]
    array[...] = wanted
    return array


def _room(draw: random.Random, group: aiodist.Group, shape: Shape, dtype: DType, layout: str) -> tuple[Array, Any]:
    """Return an array of zeros, and the index of the part of it that has the shape and lies as `layout` says."""
    if layout == "fortran":
        return np.zeros(shape, dtype, order="F"), ...
    if layout in ("shared", "part of shared"):
        margin = 3 if layout != "shared" and shape else 0
        whole = group.empty((shape[0] + margin, *shape[1:]) if shape else (), dtype)
        whole[...] = np.zeros((), dtype)
        return whole, slice(2, -1) if margin else ...
    if layout in ("strided", "reversed") and shape:
        axis = draw.randrange(len(shape))
        step = slice(None, None, 2 if layout == "strided" else -2)
        return np.zeros(longer(shape, axis, 2), dtype), tuple(step if place == axis else slice(None) for place in range(len(shape)))
    return np.zeros(shape, dtype), ...


class Own:
    """What one rank brings to one operation: its way to call, its arrays in its layouts, and the checks of what became of them."""

    def __init__(self, group: aiodist.Group, draw: random.Random) -> None:
        self.group = group
        self.draw = draw
        self._kept: list[tuple[Any, Array]] = []
        self._rooms: list[tuple[Array, Any]] = []
        self._out: Any = None

    def call(self, name: str, *args: Any, **more: Any) -> Any:
        """Call a collective: as a method or as a function, with a time or without."""
        if self.draw.random() < 0.2:
            more["timeout"] = _LONGEST
        if self.draw.random() < 0.15:
            return getattr(aiodist.ops, name)(*args, group=self.group, **more)
        return getattr(self.group, name)(*args, **more)

    def input(self, wanted: Array) -> Any:
        """Return an array to hand in, which must not change."""
        array = _laid_out(self.draw, self.group, wanted)
        self._kept.append((array, wanted))
        return array

    def output(self, shape: Shape, dtype: DType, x: Any = None) -> Array | None:
        """Return where the result is to go: None, an array, or `x` itself."""
        fits = isinstance(x, np.ndarray) and x.shape == shape and x.dtype == dtype and x.flags.writeable
        if fits and self.draw.random() < 0.3:
            self._kept = [(array, wanted) for array, wanted in self._kept if array is not x]
            self._out = x
        elif self.draw.random() < 0.5:
            self._out = self._fresh(shape, dtype)
        out: Array | None = self._out
        return out

    def outputs(self, arrays: list[Array], xs: list[Any] | None = None) -> list[Array] | None:
        """Return where several results are to go: None, arrays like `arrays`, or `xs` itself if all of it can be written to."""
        fit = xs is not None and all(
            isinstance(x, np.ndarray) and x.dtype == like.dtype and x.flags.writeable for x, like in zip(xs, arrays, strict=True)
        )
        if fit and self.draw.random() < 0.4:
            self._kept, self._out = [], xs
        elif self.draw.random() < 0.5:
            self._out = [self._fresh(array.shape, array.dtype) for array in arrays]
        out: list[Array] | None = self._out
        return out

    def joined(self, shape: Shape, dtype: DType, wanted: Array, start: int) -> tuple[Any, Array]:
        """Return an input that is a part of the output from `start` on, and that output."""
        out = self.group.empty(shape, dtype) if self.draw.random() < 0.5 else np.zeros(shape, dtype)
        x = out[start : start + len(wanted)]
        x[...] = wanted
        self._out = out
        return x, out

    def ignored(self) -> Array | None:
        """Return what a rank may pass as out where it counts for nothing; it must not change."""
        if self.draw.random() < 0.7:
            return None
        array = np.full(self.draw.randint(0, 9), 7.25)
        self._kept.append((array, array.copy()))
        return array

    def _fresh(self, shape: Shape, dtype: DType) -> Array:
        layout = self.draw.choice(("plain", "plain", "strided", "reversed", "fortran", "shared", "part of shared"))
        whole, part = _room(self.draw, self.group, shape, dtype, layout)
        self._rooms.append((whole, part))
        array: Array = whole[part]
        return array

    def problem(self, outcome: Any, due: Any) -> str | None:
        """Say what is wrong with an outcome (a value, or what was raised) or with the arrays that were handed in; None if nothing is."""
        text = difference(outcome, due)
        if text is None and not isinstance(due, Raises):
            text = self._wrong_memory(outcome)
        if text is None and any(not np.array_equal(array, wanted) for array, wanted in self._kept):
            text = "an input was changed"
        if text is None and any(_beside(whole, part).strip(b"\0") for whole, part in self._rooms if part is not ...):
            text = "memory beside out was changed"
        return text

    def _wrong_memory(self, outcome: Any) -> str | None:
        if self._out is not None:
            pairs = zip(outcome, self._out, strict=True) if isinstance(self._out, list) else [(outcome, self._out)]
            return None if all(got is given for got, given in pairs) else "the result is not what was given as out"
        results = [item for item in (outcome if isinstance(outcome, list) else [outcome]) if isinstance(item, np.ndarray)]
        if not all(result.flags.writeable for result in results):
            return "the result is not writable"
        if any(np.may_share_memory(result, array) for result in results for array, _ in self._kept if isinstance(array, np.ndarray)):
            return "the result shares memory with an input"
        return None


def _beside(whole: Array, part: Any) -> bytes:
    rest = whole.copy()
    rest[part] = np.zeros((), whole.dtype)
    return rest.tobytes()


def difference(got: Any, due: Any) -> str | None:
    """Say how a value differs from the one that is due, or None. Arrays are compared bit for bit, NaN apart."""
    if isinstance(due, Raises):
        return None if isinstance(got, due.kinds) else f"{_shown(got)} where {due.kinds[0].__name__} is due"
    if isinstance(got, BaseException):
        return f"{type(got).__name__}: {got}"
    if isinstance(due, np.ndarray):
        try:
            oracle.assert_same(got, due)
        except AssertionError as error:
            return str(error)
        return None
    if isinstance(due, list):
        if not isinstance(got, list) or len(got) != len(due):
            return f"{_shown(got)} where a list of {len(due)} is due"
        problems = [(place, text) for place, pair in enumerate(zip(got, due, strict=True)) if (text := difference(*pair))]
        return f"at {problems[0][0]}: {problems[0][1]}" if problems else None
    if isinstance(due, bytes) and isinstance(got, bytes) and len(got) == len(due):  # such texts are long and begin alike
        return difference(np.frombuffer(got, np.uint8), np.frombuffer(due, np.uint8))
    return None if type(got) is type(due) and got == due else f"{_shown(got)} where {_shown(due)} is due"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else text[:200] + "…"
