"""The native core as a backend: arrays in host memory, ranks on one host."""

from __future__ import annotations

import ast
import atexit
import os
from typing import Any, Final

import numpy as np

from aiodist import _core, errors
from aiodist._core import TensorFuture
from aiodist.backends.base import COLLECTIVE_CODES, Call
from aiodist.devices.cpu import CpuEvent
from aiodist.types import DTYPE_CODES, OP_CODES, dtype_code

__all__ = ["HostBackend", "dtype_text"]

_WILDCARD: Final = 1
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
            _WILDCARD if call.wildcard else 0,
            "" if call.dtype is None or code != 0 else dtype_text(call.dtype),
            call.input,
            call.output,
            call.result,
            call.finish,
            call.timeout,
        )

    def refuse(self, collective: str, reason: str) -> None:
        """See `Backend.refuse`."""
        self._core._refuse(COLLECTIVE_CODES[collective], reason)


def dtype_text(dtype: np.dtype) -> str:
    """Describe a dtype that has no number, so that a receiver can make it again.

    Raises:
        TypeError: the description is too long to travel.
    """
    if type(dtype).__module__ != "numpy.dtypes" and dtype.kind == "V" and dtype.type.__module__ == "ml_dtypes":
        return f"ml_dtypes.{dtype.name}"
    text = repr(np.lib.format.dtype_to_descr(dtype))
    if len(text.encode()) > _LONGEST_TEXT:
        raise TypeError(f"dtype {dtype} takes {len(text.encode())} bytes to describe; at most {_LONGEST_TEXT} can travel")
    return text


def _dtype_of(code: int, text: str) -> np.dtype:
    name = _DTYPE_NAMES.get(code, "raw")
    if name == "bfloat16":
        text = "ml_dtypes.bfloat16"
    elif name != "raw":
        return np.dtype(name)
    if text.startswith("ml_dtypes."):
        import ml_dtypes

        scalar: type[np.generic] = getattr(ml_dtypes, text.removeprefix("ml_dtypes."))
        return np.dtype(scalar)
    dtype: np.dtype = np.lib.format.descr_to_dtype(ast.literal_eval(text))
    return dtype


def _make_array(data: np.ndarray, code: int, text: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """Give received bytes their dtype and shape. What describes them was written by a peer."""
    try:
        dtype = _dtype_of(code, text.decode())
    except (ValueError, TypeError, KeyError, AttributeError, SyntaxError) as error:
        raise errors.TransportError(f"the root describes a dtype that can not be made here: {text[:100]!r} ({error})") from error
    return data.view(dtype).reshape(shape) if data.size else np.empty(shape, dtype)


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
) -> Exception:
    return _ERROR_TYPES[kind](text, group=group, rank=rank, collective=collective, seq=seq, dtype=dtype, shape=shape, ranks=ranks)


_core.set_hooks(_make_error, _make_array, CpuEvent)
_core.set_package_folder(os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep)
# Leaves every group and ends the threads while the interpreter is whole; does nothing where no world was ever opened.
atexit.register(_core.shutdown)
