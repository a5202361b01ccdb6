"""Arrays of every kind: how what callers hold is read as numpy arrays, and how a result becomes one of their kind.

No framework is imported here: an object of torch or JAX can not exist unless its caller has imported them.
"""

from __future__ import annotations

import sys
from array import array as typed_array
from collections.abc import Callable
from typing import Any, Final

import numpy as np

__all__ = ["NUMPY", "Kind", "kind_of"]

# Element types of torch that numpy knows through ml_dtypes, by the name that both give them, and the integers of their width.
_TORCH_BITS: Final = {
    "bfloat16": "int16",
    "complex32": "int32",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
}
# DLDeviceType of dlpack.h. Pinned host memory (3, 11) is read as any other.
_HOST_DEVICES: Final = frozenset({1, 3, 11})
_DEVICE_NAMES: Final = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA managed", 14: "oneAPI", 15: "WebGPU"}
# What reading a foreign array raises, as far as the libraries at hand do.
_UNREADABLE: Final = (TypeError, ValueError, RuntimeError, BufferError)


class Kind:
    """What an array of the caller is, and how a result becomes one of the same kind; this class is numpy's.

    Scalars, lists, and whatever offers ``__array__`` only are of this kind too: they give plain arrays.

    Attributes:
        name: What it is called.
    """

    __slots__ = ()
    name = "numpy"

    def view(self, x: Any, name: str) -> np.ndarray:
        """Return `x` as an ndarray, in its own memory where numpy can read that.

        Args:
            x: An array of this kind.
            name: The argument that it was, for errors.

        Raises:
            TypeError: it can not be read as an array.
        """
        if type(x) is np.ndarray:
            return x
        if _is_masked(x):
            raise TypeError(f"{name} has masked elements, whose hidden values would reach the peers; pass {name}.filled() or {name}.data")
        if not isinstance(x, np.ndarray) and hasattr(x, "__cuda_array_interface__"):
            raise TypeError(f"{name} is on a CUDA device, not in host memory; copy it there first")
        return _read(np.asarray, x, name)

    def target(self, out: Any, name: str) -> np.ndarray:
        """Return a writable ndarray that is the memory of `out`.

        Args:
            out: An array of this kind.
            name: The argument that it was, for errors.

        Raises:
            TypeError: such objects can not be written in place.
            ValueError: this one is read-only.
        """
        if not isinstance(out, np.ndarray):
            raise TypeError(f"{name} must be an array that can be written in place, not {type(out).__name__}")
        if _is_masked(out):
            raise TypeError(f"{name} has masked elements, which would hide the result; pass {name}.data")
        return _writable(np.asarray(out), name)

    def wrap(self, result: np.ndarray) -> Any:
        """Return `result`, a new array that nobody else holds, as one of this kind: in the same memory where that is possible.

        It is writable, but for JAX arrays and bytes, which never are. What the kind can not hold unchanged stays an ndarray, such as the
        float64 mean of integers for a bytearray, or for JAX unless its 64-bit types are switched on.
        """
        return result


class _Torch(Kind):
    """Tensors of torch on the CPU."""

    __slots__ = ()
    name = "torch"

    def view(self, x: Any, name: str) -> np.ndarray:
        extended = _check_tensor(x, name)
        return _read(lambda tensor: _tensor_array(tensor.resolve_conj().resolve_neg(), extended), x, name)

    def target(self, out: Any, name: str) -> np.ndarray:
        extended = _check_tensor(out, name)
        if out.is_conj() or out.is_neg():
            raise ValueError(f"{name} shows its memory conjugated or negated; pass {name}.resolve_conj().resolve_neg()")
        array = _read(lambda tensor: _tensor_array(tensor, extended), out, name)
        # So that a backward pass that needs the old values fails in place of using the new ones.
        sys.modules["torch"].autograd.graph.increment_version(out)
        return _writable(array, name)

    def wrap(self, result: np.ndarray) -> Any:
        torch: Any = sys.modules["torch"]
        bits = _TORCH_BITS.get(result.dtype.name)
        if bits is None:
            return torch.from_numpy(result)
        return torch.from_numpy(result.view(bits)).view(getattr(torch, result.dtype.name))


class _Jax(Kind):
    """Arrays of JAX on the CPU, of which each never changes."""

    __slots__ = ("_like",)
    name = "jax"

    def __init__(self, like: Any) -> None:
        self._like = like

    def view(self, x: Any, name: str) -> np.ndarray:
        if isinstance(x, sys.modules["jax"].core.Tracer):
            raise TypeError(f"{name} is traced: a collective can not be called inside a function that JAX transforms")
        if x.is_deleted():
            raise TypeError(f"{name} can not be read as an array: it was deleted or donated")
        if not x.is_fully_addressable:
            raise TypeError(f"{name} lies in part on devices of other processes; pass what this one holds of it")
        for device in x.devices():
            if device.platform != "cpu":
                raise TypeError(f"{name} is on device {device}, not in host memory; copy it there first")
        return _read(np.asarray, x, name)

    def target(self, out: Any, name: str) -> np.ndarray:
        raise TypeError(f"{name} can not be a JAX array, which never changes; use the result in its place")

    def wrap(self, result: np.ndarray) -> Any:
        like = self._like
        # A sharded array's layout need not fit the result's shape; JAX places that where it places any other.
        place = like.sharding if like.committed and len(like.devices()) == 1 else None
        made = sys.modules["jax"].device_put(result, place)
        return made if made.dtype == result.dtype else result


class _DLPack(Kind):
    """Whatever else speaks DLPack, on the CPU."""

    __slots__ = ("_like",)
    name = "DLPack"

    def __init__(self, like: Any) -> None:
        self._like = like

    def view(self, x: Any, name: str) -> np.ndarray:
        _check_device(x, name)
        try:
            return np.from_dlpack(x)
        except _UNREADABLE as error:
            if not hasattr(type(x), "__array__"):
                raise TypeError(f"{name} can not be read as an array: {error}") from None
        return _read(np.asarray, x, name)  # bfloat16, say, which numpy does not take through DLPack

    def target(self, out: Any, name: str) -> np.ndarray:
        _check_device(out, name)
        return _writable(_read(np.from_dlpack, out, name), name, " to those who get it through DLPack")

    def wrap(self, result: np.ndarray) -> Any:
        try:
            like = self._like
            namespace = like.__array_namespace__() if hasattr(like, "__array_namespace__") else type(like)
            made = namespace.from_dlpack(result)
            held = np.from_dlpack(made)
            return made if held.dtype == result.dtype and held.shape == result.shape else result
        except Exception:  # whatever a library unknown to us raises: the result must not be lost for it
            return result


class _Buffer(Kind):
    """Whatever else has the buffer protocol; `make` gives results of `dtype` (any where None) in one dimension the caller's type."""

    __slots__ = ("_dtype", "_make", "name")

    def __init__(self, name: str, make: Callable[[np.ndarray], Any] | None = None, dtype: np.dtype | None = None) -> None:
        self.name = name
        self._make = make
        self._dtype = dtype

    def view(self, x: Any, name: str) -> np.ndarray:
        return _read(_buffer_array, x, name)

    def target(self, out: Any, name: str) -> np.ndarray:
        return _writable(self.view(out, name), name)

    def wrap(self, result: np.ndarray) -> Any:
        fits = self._dtype is None or (result.ndim == 1 and result.dtype == self._dtype)
        return self._make(result) if self._make is not None and fits else result


NUMPY: Final = Kind()
_TORCH: Final = _Torch()
_BYTE: Final = np.dtype(np.uint8)
_MEMORYVIEW: Final = _Buffer("memoryview", lambda result: result.data)
_BYTES: Final = _Buffer("bytes", np.ndarray.tobytes, _BYTE)
_BYTEARRAY: Final = _Buffer("bytearray", bytearray, _BYTE)
_OTHER_BUFFER: Final = _Buffer("buffer")


def kind_of(x: Any) -> Kind:
    """Return the kind of `x`, which need not be readable: `Kind.view` tells."""
    if type(x) is np.ndarray or isinstance(x, np.ndarray | np.generic | int | float | complex | str | list | tuple):
        return NUMPY
    if _is_instance(x, "torch", "Tensor"):
        return _TORCH
    if _is_instance(x, "jax", "Array"):
        return _Jax(x)
    if isinstance(x, bytes):
        return _BYTES
    if isinstance(x, bytearray):
        return _BYTEARRAY
    if isinstance(x, memoryview):
        return _MEMORYVIEW
    if isinstance(x, typed_array):
        return _array_kind(x.typecode)
    if hasattr(type(x), "__dlpack__"):
        return _DLPack(x)
    return _OTHER_BUFFER if _has_buffer(x) else NUMPY


def _is_instance(x: Any, module: str, name: str) -> bool:
    """True where the module is loaded and `x` is an instance of that class of it."""
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(x, cls)


def _array_kind(code: str) -> Kind:
    dtype = np.dtype("U1" if code in "uw" else code)
    return _Buffer("array.array", lambda result: typed_array(code, result.tobytes()), dtype)


def _has_buffer(x: Any) -> bool:
    try:
        memoryview(x).release()
    except TypeError:
        return False
    except (ValueError, BufferError):  # it has, but for now gives none, like a closed mmap
        return True
    return True


def _read(read: Callable[[Any], np.ndarray], x: Any, name: str) -> np.ndarray:
    try:
        return read(x)
    except _UNREADABLE as error:
        raise TypeError(f"{name} can not be read as an array: {error}") from None


def _writable(array: np.ndarray, name: str, why: str = "") -> np.ndarray:
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only{why}")
    return array


def _is_masked(x: Any) -> bool:
    if not _is_instance(x, "numpy.ma", "MaskedArray"):
        return False
    mask = np.ascontiguousarray(np.ma.getmaskarray(x))
    return bool(mask.reshape(-1).view(np.bool_).any())  # a structured mask is bools throughout


def _buffer_array(x: Any) -> np.ndarray:
    # Not np.asarray(x), which takes bytes as one string.
    held = memoryview(x)
    array = np.asarray(held)
    return array.view(np.uint8) if held.format.endswith("c") else array


def _check_device(x: Any, name: str) -> None:
    code, number = x.__dlpack_device__()
    if code not in _HOST_DEVICES:
        device = f"{_DEVICE_NAMES.get(int(code), f'of DLPack type {int(code)}')}, number {number}"
        raise TypeError(f"{name} is on a device ({device}), not in host memory; copy it there first")


def _check_tensor(x: Any, name: str) -> np.dtype | None:
    """Return the dtype of ml_dtypes by which numpy knows the elements of `x`, None where numpy has one itself; raise what rules it out."""
    if x.requires_grad:
        raise TypeError(f"{name} requires grad, and no gradient flows through a collective; pass {name}.detach()")
    if x.device.type != "cpu":
        raise TypeError(f"{name} is on device {x.device}, not in host memory; copy it there first")
    if x.layout is not sys.modules["torch"].strided:
        raise TypeError(f"{name} has layout {x.layout}, not a dense one; pass {name}.to_dense()")
    if getattr(x, "is_quantized", False):  # torch means to drop them
        raise TypeError(f"{name} is quantized ({x.dtype}), and its scale would not travel; pass {name}.dequantize() or {name}.int_repr()")
    dtype = str(x.dtype).removeprefix("torch.")
    return _extended(dtype, name) if dtype in _TORCH_BITS else None


def _tensor_array(x: Any, extended: np.dtype | None) -> np.ndarray:
    if extended is None:
        array: np.ndarray = x.numpy()
        return array
    bits = getattr(sys.modules["torch"], _TORCH_BITS[extended.name])
    return np.asarray(x.view(bits).numpy()).view(extended)


def _extended(dtype: str, name: str) -> np.dtype:
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(f"{name} holds {dtype}, which numpy knows through ml_dtypes only: pip install ml_dtypes") from None
    scalar: type[np.generic] | None = getattr(ml_dtypes, dtype, None)
    if scalar is None:
        raise TypeError(f"{name} holds {dtype}, which the installed ml_dtypes {ml_dtypes.__version__} lacks: pip install -U ml_dtypes")
    return np.dtype(scalar)
