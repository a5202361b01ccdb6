"""Arrays of many kinds, made of numpy arrays, and what is due where they are given to a collective."""

from __future__ import annotations

import importlib
import importlib.util
import mmap
from array import array as typed_array
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest

from support.oracle import Array


def framework(name: str) -> Any:
    """Import a framework that need not be installed, in the process that asks."""
    return importlib.import_module(name)


def lacking(name: str) -> pytest.MarkDecorator:
    """Return the mark that skips a test where a package is not installed."""
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


class Labelled(np.ndarray):
    """An array with more to it than its elements."""


class Boxed:
    """An array that others reach through DLPack only."""

    def __init__(self, array: Array, device: tuple[int, int] = (1, 0)) -> None:
        self.array = array
        self.device = device

    def __dlpack__(self, **more: Any) -> Any:
        return self.array.__dlpack__(**more)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class Spoken(Boxed):
    """An array whose library makes such arrays of what speaks DLPack."""

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda other: Spoken(np.from_dlpack(other)))


class Narrow(Boxed):
    """An array whose library keeps 32 bits a number at most, whatever it is given."""

    @classmethod
    def from_dlpack(cls, other: Any) -> Narrow:
        array = np.from_dlpack(other)
        return cls(array.astype("f4") if array.itemsize > 4 else array)


class Lossy(Boxed):
    """An array whose library can not make one of its arrays."""

    def __array_namespace__(self) -> Any:
        raise LookupError("no namespace here")


def unbox(x: Any) -> Array:
    """Return the content of one of the above, or of an ndarray."""
    return np.asarray(getattr(x, "array", x))


def _mapped(array: Array) -> mmap.mmap:
    memory = mmap.mmap(-1, array.nbytes)
    memory[:] = array.tobytes()
    return memory


def _c_array(array: Array) -> Any:
    return (np.ctypeslib.as_ctypes_type(array.dtype) * array.size)(*array.tolist())


def tensor(array: Array) -> Any:
    return framework("torch").from_numpy(array.copy())


def jax_array(array: Array) -> Any:
    return framework("jax.numpy").asarray(array)


def _jax_type() -> type:
    cls: type = type(framework("jax.numpy").zeros(1))
    return cls


@dataclass(frozen=True)
class Made:
    """A kind of array: how one is made of a numpy array, how it is read, and what results are due.

    Attributes:
        make: Makes one that shares nothing with the numpy array.
        result: The type of results.
        read: Gives the content of a result.
        writable: Whether it can take a result.
        dtypes: What to try.
    """

    make: Callable[[Array], Any]
    result: Callable[[], type]
    read: Callable[[Any], Array] = np.asarray
    writable: bool = True
    dtypes: tuple[str, ...] = ("f8", "i2", "f4")


MADE: Final[dict[str, Made]] = {
    "subclass of ndarray": Made(lambda a: a.reshape(-1, 1).copy().view(Labelled), lambda: np.ndarray),
    "list": Made(lambda a: a.tolist(), lambda: np.ndarray, writable=False, dtypes=("f8", "i8")),
    "tuple": Made(lambda a: tuple(a.tolist()), lambda: np.ndarray, writable=False, dtypes=("f8", "?")),
    "memoryview": Made(lambda a: a.copy().data, lambda: memoryview),
    "strided memoryview": Made(lambda a: np.repeat(a, 2).data[::2], lambda: memoryview),
    "array.array": Made(lambda a: typed_array(a.dtype.char, a.tobytes()), lambda: typed_array),
    "bytearray": Made(lambda a: bytearray(a), lambda: bytearray, lambda r: np.frombuffer(r, "u1"), dtypes=("u1",)),
    "bytes": Made(lambda a: a.tobytes(), lambda: bytes, lambda r: np.frombuffer(r, "u1"), writable=False, dtypes=("u1",)),
    "read-only memoryview": Made(lambda a: memoryview(a.tobytes()), lambda: memoryview, writable=False, dtypes=("u1",)),
    "characters": Made(lambda a: memoryview(bytearray(a)).cast("c"), lambda: memoryview, lambda r: np.frombuffer(r, "u1"), dtypes=("u1",)),
    "mmap": Made(_mapped, lambda: np.ndarray, lambda r: np.frombuffer(r, "u1"), dtypes=("u1",)),
    "ctypes": Made(_c_array, lambda: np.ndarray),
    "DLPack": Made(lambda a: Boxed(a.copy()), lambda: np.ndarray, unbox),
    "DLPack with a namespace": Made(lambda a: Spoken(a.copy()), lambda: Spoken, unbox),
    "DLPack with a constructor": Made(lambda a: Narrow(a.copy()), lambda: Narrow, unbox, dtypes=("f4", "i2")),
    "DLPack that would round": Made(lambda a: Narrow(a.copy()), lambda: np.ndarray, unbox, dtypes=("f8",)),
    "DLPack that can not be made": Made(lambda a: Lossy(a.copy()), lambda: np.ndarray, unbox),
    "torch": Made(tensor, lambda: framework("torch").Tensor, dtypes=("f8", "i2", "f4", "u2", "c8", "?")),
    "jax": Made(jax_array, _jax_type, writable=False, dtypes=("f4", "i2", "c8", "?")),
}
CASES: Final = [
    pytest.param(name, dtype, marks=lacking(name) if name in ("torch", "jax") else (), id=f"{name}-{dtype}")
    for name, made in MADE.items()
    for dtype in made.dtypes
]
WRITABLE: Final = [case for case in CASES if MADE[str(case.values[0])].writable]
