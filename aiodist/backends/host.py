"""The native core as a backend: arrays in host memory, ranks on one host."""

from __future__ import annotations

import ast
import asyncio
import atexit
import functools
import math
import os
from typing import Any, Final

import numpy as np

from aiodist import _core, errors
from aiodist._core import TensorFuture
from aiodist.backends.base import COLLECTIVE_CODES, Call, Form
from aiodist.devices.cpu import CpuEvent
from aiodist.types import DTYPE_CODES, OP_CODES, dtype_code

__all__ = ["HostBackend", "dtype_of_text", "dtype_text"]

_DTYPE_NAMES: Final = {code: name for name, code in DTYPE_CODES.items()}
# A description travels in the header; this much fits beside a shape of any length.
_LONGEST_TEXT: Final = 900

_ERROR_TYPES: Final[dict[str, type[errors.AiodistError]]] = {
    "communication": errors.CommunicationError,
    "timeout": errors.CollectiveTimeoutError,
    "peer_lost": errors.PeerLostError,
    "mismatch": errors.MismatchError,
    "transport": errors.TransportError,
    "refused": errors.PeerRefusedError,
    "closed": errors.GroupClosedError,
}


class HostBackend:
    """Starts calls on one member's native half."""

    def __init__(self, core: _core.GroupCore) -> None:
        self._core = core

    def start(self, call: Call) -> TensorFuture[Any]:
        """See `Backend.start`."""
        code = 0 if call.dtype is None else dtype_code(call.dtype)
        return self._core._start(
            COLLECTIVE_CODES[call.collective],
            0 if call.op is None else OP_CODES[call.op],
            code,
            call.axis,
            call.root,
            call.rows,
            call.form,
            call.tag,
            "" if call.dtype is None or code != 0 or Form.MANY in call.form else dtype_text(call.dtype),
            call.table,
            call.sections,
            call.input,
            call.output,
            call.result,
            call.finish,
            call.timeout,
        )

    def refuse(self, collective: str, reason: str) -> None:
        """See `Backend.refuse`."""
        self._core._refuse(COLLECTIVE_CODES[collective], reason)


@functools.lru_cache(maxsize=1024)
def dtype_text(dtype: np.dtype) -> str:
    """Describe a dtype that has no number, so that a receiver can make it again.

    Raises:
        TypeError: the description is too long to travel.
    """
    text = repr(_description(dtype))
    if len(text.encode()) > _LONGEST_TEXT:
        raise TypeError(f"dtype {dtype} takes {len(text.encode())} bytes to describe; at most {_LONGEST_TEXT} can travel")
    return text


def _description(dtype: np.dtype) -> Any:
    """Return the dtype as literals: a name, (base, shape) of a subarray, or the fields of a structure. Metadata stay behind."""
    if dtype.type.__module__ == "ml_dtypes":
        return f"ml_dtypes.{dtype.name}"
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return (_description(base), shape)
    if dtype.fields is None or dtype.names is None:
        return dtype.str
    fields = [dtype.fields[name] for name in dtype.names]
    titles = [field[2] if len(field) > 2 else None for field in fields]
    return {
        "names": list(dtype.names),
        "formats": [_description(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "itemsize": dtype.itemsize,
        **({"titles": titles} if any(title is not None for title in titles) else {}),
    }


def _described(description: Any) -> np.dtype:
    if isinstance(description, str):
        if description.startswith("ml_dtypes."):
            import ml_dtypes

            scalar: type[np.generic] = getattr(ml_dtypes, description.removeprefix("ml_dtypes."))
            return np.dtype(scalar)
        return np.dtype(description)
    if isinstance(description, tuple):
        base, shape = description
        return np.dtype((_described(base), shape))
    whole: Any = {**description, "formats": [_described(part) for part in description["formats"]]}
    structure: np.dtype = np.dtype(whole)
    return structure


def _dtype_of(code: int, text: str) -> np.dtype:
    name = _DTYPE_NAMES.get(code, "raw")
    if name == "bfloat16":
        text = "'ml_dtypes.bfloat16'"
    elif name != "raw" or not text:  # many arrays are plain bytes, until their own description is read
        return np.dtype(name if name != "raw" else np.uint8)
    return dtype_of_text(text)


def dtype_of_text(text: str) -> np.dtype:
    """Return the dtype that `dtype_text` described, perhaps in another process.

    Raises:
        ValueError: it can not be made here.
    """
    try:
        dtype = _described(ast.literal_eval(text))
    except ImportError:
        raise ValueError(f"{text} needs ml_dtypes: pip install ml_dtypes") from None
    except (ValueError, TypeError, KeyError, AttributeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"dtype {text[:100]!r} can not be made here ({error})") from None
    if dtype.hasobject:
        raise ValueError(f"dtype {text[:100]!r} holds Python objects")
    return dtype


def _make_array(
    data: np.ndarray, code: int, text: bytes, arrays: list[tuple[int, tuple[int, ...]]], is_list: bool
) -> np.ndarray | list[np.ndarray]:
    """Give received bytes, arrays at offsets in them, their dtype and shapes. What describes them was written by a peer."""
    try:
        dtype = _dtype_of(code, text.decode())
    except ValueError as error:
        raise errors.TransportError(f"what came can not be shown: {error}") from error
    made = [_array_at(data, offset, shape, dtype) for offset, shape in arrays]
    return made if is_list else made[0]


def _array_at(data: np.ndarray, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    nbytes = math.prod(shape) * dtype.itemsize
    return data[offset : offset + nbytes].view(dtype).reshape(shape) if nbytes else np.empty(shape, dtype)


def _make_error(
    kind: str,
    text: str,
    group: str,
    rank: int,
    collective: str,
    seq: int,
    dtype: str,
    shape: tuple[int, ...],
    ranks: tuple[int, ...],
) -> BaseException:
    if kind == "argument":
        return ValueError(text)
    if kind == "withdrawn":
        return asyncio.CancelledError(text)
    return _ERROR_TYPES[kind](text, group=group, rank=rank, collective=collective, seq=seq, dtype=dtype, shape=shape, ranks=ranks)


_core.set_hooks(_make_error, _make_array, CpuEvent)
_core.set_package_folder(os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep)
# Leaves every group and ends the threads while the interpreter is whole; does nothing where no world was ever opened.
atexit.register(_core.shutdown)
