"""Reduction operators and the element types that the native core knows."""

from __future__ import annotations

import enum
import functools
from typing import Final

import numpy as np

__all__ = ["DTYPE_CODES", "OP_CODES", "ReduceOp", "check_reduction", "dtype_code"]


class ReduceOp(enum.Enum):
    """How the contributions of the ranks are combined, element by element, in rank order.

    ``SUM`` and ``PROD`` wrap in their own type for integers and are *or* and *and* for bool. ``MIN`` and ``MAX`` propagate NaN and
    put −0 below +0. ``MEAN`` divides the sum by the number of ranks; of integers it gives float64. ``BAND``, ``BOR`` and ``BXOR``
    work on integers and bool.
    """

    SUM = "sum"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    MEAN = "mean"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """Return the member for `op`, a member or its name.

        Raises:
            TypeError: `op` is neither a `ReduceOp` nor a string.
            ValueError: no member has that name.
        """
        if isinstance(op, cls):
            return op
        if not isinstance(op, str):
            raise TypeError(f"op must be a ReduceOp or its name, not {type(op).__name__}")
        try:
            return cls(op)
        except ValueError:
            names = ", ".join(repr(member.value) for member in cls)
            raise ValueError(f"op {op!r} is unknown; it is one of {names}") from None


# The numbers of csrc/types.hpp. "raw" moves but does not reduce.
DTYPE_CODES: Final[dict[str, int]] = {
    "raw": 0,
    "bool": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "uint8": 6,
    "uint16": 7,
    "uint32": 8,
    "uint64": 9,
    "float16": 10,
    "bfloat16": 11,
    "float32": 12,
    "float64": 13,
    "complex64": 14,
    "complex128": 15,
}
OP_CODES: Final[dict[ReduceOp, int]] = {op: code for code, op in enumerate(ReduceOp, start=1)}

_FLOATS: Final = frozenset({"float16", "bfloat16", "float32", "float64"})
_COMPLEX: Final = frozenset({"complex64", "complex128"})


@functools.lru_cache(maxsize=1024)  # a dtype's name is slow to make
def dtype_code(dtype: np.dtype) -> int:
    """Return the core's number of `dtype`: 0 ("raw") for whatever moves but does not reduce."""
    return DTYPE_CODES.get(dtype.name, 0) if dtype.isnative else 0


@functools.lru_cache(maxsize=1024)
def check_reduction(op: ReduceOp, dtype: np.dtype) -> np.dtype:
    """Return the dtype of the result of `op` over arrays of `dtype`.

    Raises:
        TypeError: `op` is not defined for `dtype`.
    """
    name = dtype.name
    if name == "raw" or name not in DTYPE_CODES:
        raise TypeError(f"op {op.value!r} is not defined for dtype {dtype}, which moves but does not reduce")
    inexact = name in _FLOATS or name in _COMPLEX
    if op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR) and inexact:
        raise TypeError(f"op {op.value!r} needs integers or bool, not {dtype}")
    if op in (ReduceOp.MIN, ReduceOp.MAX) and name in _COMPLEX:
        raise TypeError(f"op {op.value!r} is not defined for {dtype}: complex numbers have no order")
    if op is ReduceOp.MEAN and name == "bool":
        raise TypeError("op 'mean' is not defined for bool")
    if op is ReduceOp.MEAN and not inexact:
        return np.dtype(np.float64)
    return dtype
