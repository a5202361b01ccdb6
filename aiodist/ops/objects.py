"""Python objects, as bytes, through the collectives that move arrays of uneven extents."""

from __future__ import annotations

import pickle as pickling
from collections.abc import Callable
from typing import Any

import numpy as np

from aiodist._core import TensorFuture
from aiodist.backends.base import Backend, Call, Form
from aiodist.errors import TransportError
from aiodist.ops.checks import check_flag, check_rank, check_timeout, refusing
from aiodist.ops.lists import is_list, listed

__all__ = ["all_gather_object", "broadcast_object", "gather_object", "scatter_object"]


def broadcast_object(backend: Backend, rank: int, size: int, value: Any, root: Any, pickle: Any, timeout: Any) -> TensorFuture[Any]:
    """Start a broadcast of an object; see `Group.broadcast_object`."""
    with refusing(backend, "broadcast"):
        source, pickled = check_rank(root, size, "root"), check_flag(pickle, "pickle")
        call = Call("broadcast", root=source, form=_form(pickled) | Form.WILDCARD, result=..., timeout=check_timeout(timeout))
        call.finish = _decoding(pickled)
        if rank == source:
            call.form, call.input = _form(pickled), _encode(value, pickled, "value")
            call.dtype = call.input.dtype
        return backend.start(call)


def all_gather_object(backend: Backend, value: Any, pickle: Any, timeout: Any) -> TensorFuture[list[Any]]:
    """Start an all_gather of objects; see `Group.all_gather_object`."""
    with refusing(backend, "all_gather"):
        pickled = check_flag(pickle, "pickle")
        call = Call("all_gather", form=_form(pickled) | Form.UNEVEN, result=..., timeout=check_timeout(timeout))
        return backend.start(_gathering(call, value, pickled, True))


def gather_object(
    backend: Backend, rank: int, size: int, value: Any, root: Any, pickle: Any, timeout: Any
) -> TensorFuture[list[Any] | None]:
    """Start a gather of objects; see `Group.gather_object`."""
    with refusing(backend, "gather"):
        target, pickled = check_rank(root, size, "root"), check_flag(pickle, "pickle")
        call = Call("gather", form=_form(pickled) | Form.UNEVEN, root=target, timeout=check_timeout(timeout))
        return backend.start(_gathering(call, value, pickled, rank == target))


def _gathering(call: Call, value: Any, pickled: bool, reads: bool) -> Call:
    data = _encode(value, pickled, "value")
    # Its length goes before each, so that the receiver can tell them apart.
    call.input = np.concatenate([np.array([data.size], "<u8").view(np.uint8), data])
    call.dtype = data.dtype
    if reads:
        decode = _decoding(pickled)
        call.result, call.finish = ..., lambda joined: [decode(part) for part in _parts(joined)]
    return call


def scatter_object(backend: Backend, rank: int, size: int, values: Any, root: Any, pickle: Any, timeout: Any) -> TensorFuture[Any]:
    """Start a scatter of objects; see `Group.scatter_object`."""
    with refusing(backend, "scatter"):
        source, pickled = check_rank(root, size, "root"), check_flag(pickle, "pickle")
        call = Call("scatter", root=source, form=_form(pickled) | Form.WILDCARD, result=..., timeout=check_timeout(timeout))
        call.finish = _decoding(pickled)
        if rank == source:
            if not is_list(values):
                raise TypeError(f"values must be a list of objects on the root, not {type(values).__name__}")
            if len(values) != size:
                raise ValueError(f"values has {len(values)} objects, the group {size} ranks")
            parts = [_encode(value, pickled, f"values[{index}]") for index, value in enumerate(values)]
            call.input, call.dtype = parts, parts[0].dtype
            call.form, call.table = _form(pickled) | Form.LIST, listed(parts)
        return backend.start(call)


def _form(pickled: bool) -> Form:
    return Form.OBJECT | Form.PICKLED if pickled else Form.OBJECT


def _encode(value: Any, pickled: bool, name: str) -> np.ndarray:
    if pickled:
        try:
            return np.frombuffer(pickling.dumps(value), np.uint8)
        except Exception as error:  # whatever the object's own methods raise
            raise TypeError(f"{name} can not be pickled ({type(error).__name__}: {error})") from error
    import msgspec  # when it is needed: importing aiodist loads nothing but numpy

    try:
        return np.frombuffer(msgspec.msgpack.encode(value), np.uint8)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"{name} can not be expressed in msgpack ({error}); pickle=True on every rank expresses more") from None


def _decoding(pickled: bool) -> Callable[[np.ndarray], Any]:
    # That all ranks mean the same the headers have said: a pickle is opened only by who asked for one.
    if pickled:
        return _unpickle
    import msgspec

    def decode(data: np.ndarray) -> Any:
        try:
            return msgspec.msgpack.decode(data.tobytes())
        except msgspec.DecodeError as error:
            raise TransportError(f"a peer's object can not be read ({error})") from error

    return decode


def _unpickle(data: np.ndarray) -> Any:
    try:
        return pickling.loads(data.tobytes())
    except Exception as error:  # whatever the object's own methods raise
        raise TransportError(f"a peer's object can not be unpickled here ({type(error).__name__}: {error})") from error


def _parts(joined: np.ndarray) -> list[np.ndarray]:
    parts, offset = [], 0
    while offset < joined.size:
        length = int(joined[offset : offset + 8].view("<u8")[0])
        parts.append(joined[offset + 8 : offset + 8 + length])
        offset += 8 + length
    return parts
