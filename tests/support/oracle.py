"""What collectives must give, computed by numpy, and the data that they are given.

The rules are those of the project's design page: a left fold in rank order, float16 and bfloat16 accumulated in float32 and rounded
once, integers that wrap, the mean of integers in float64, NaN that propagates through min and max, and -0 below +0.
"""

from __future__ import annotations

import zlib
from functools import lru_cache, reduce
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
DType = np.dtype[Any]

BFLOAT16: Final[DType] = np.dtype(ml_dtypes.bfloat16)
INTEGERS: Final = tuple(np.dtype(name) for name in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"))
FLOATS: Final = (np.dtype("f2"), BFLOAT16, np.dtype("f4"), np.dtype("f8"))
COMPLEX: Final = (np.dtype("c8"), np.dtype("c16"))
BOOL: Final = np.dtype("?")
REDUCIBLE: Final[tuple[DType, ...]] = (BOOL, *INTEGERS, *FLOATS, *COMPLEX)
MOVABLE_ONLY: Final[tuple[DType, ...]] = (
    np.dtype("M8[us]"),
    np.dtype("m8[s]"),
    np.dtype("U5"),
    np.dtype("S3"),
    np.dtype("V2"),
    np.dtype("longdouble"),
    np.dtype([("id", "i4"), ("weight", "f8"), ("tag", "S3")]),
)
OPS: Final = ("sum", "prod", "min", "max", "mean", "band", "bor", "bxor")
WIDE_BYTES: Final = 1_200_004
"""Bytes of the longest vectors: several segments and a remainder; 300,001 elements of float32."""


def is_defined(op: str, dtype: DType) -> bool:
    """Tell whether `op` reduces arrays of `dtype`."""
    if dtype in MOVABLE_ONLY:
        return False
    inexact = dtype in FLOATS or dtype in COMPLEX
    if op in ("band", "bor", "bxor"):
        return not inexact
    if op in ("min", "max"):
        return dtype not in COMPLEX
    return not (op == "mean" and dtype == BOOL)


def result_dtype(op: str, dtype: DType) -> DType:
    """Return the dtype that `op` gives for arrays of `dtype`."""
    return np.dtype("f8") if op == "mean" and dtype in INTEGERS else dtype


def wide_count(dtype: DType) -> int:
    """Return the length of the longest vectors of `dtype`, an odd number."""
    return (WIDE_BYTES // dtype.itemsize) | 1


def slot_count(dtype: DType, size: int) -> int:
    """Return how many elements of `dtype` fill the small slot of a group of `size` ranks."""
    return min(16384, 65536 // size) // dtype.itemsize


@lru_cache(maxsize=256)
def _stream(dtype: DType, rank: int) -> Array:
    count = 2 * wide_count(dtype)
    random = np.random.Generator(np.random.Philox(key=[rank, dtype.itemsize * 256 + ord(dtype.kind)]))
    stream = _random(random, dtype, count)
    stream.flags.writeable = False
    return stream


def _random(random: np.random.Generator, dtype: DType, count: int) -> Array:
    if dtype in FLOATS or dtype in COMPLEX:
        return _random_floats(random, dtype, count)
    if dtype == BOOL:
        return random.integers(0, 2, count).astype(bool)
    if dtype.names is not None:
        fields = np.zeros(count, dtype)
        fields["id"], fields["weight"] = random.integers(0, 2**31, count), random.standard_normal(count)
        fields["tag"] = random.integers(0, 999, count).astype("S3")
        return fields
    if dtype.kind in "US":
        return random.integers(0, 10 ** (dtype.itemsize // np.dtype(dtype.kind + "1").itemsize) - 1, count).astype(dtype)
    if dtype.kind in "Mm":
        return random.integers(-(2**40), 2**40, count).astype(dtype)
    if dtype == np.dtype("longdouble"):
        padded = np.zeros(count, dtype)  # its padding bytes move too, so they must be the same everywhere
        padded[...] = random.standard_normal(count)
        return padded
    return np.frombuffer(random.bytes(count * dtype.itemsize), dtype).copy()


def _random_floats(random: np.random.Generator, dtype: DType, count: int) -> Array:
    """Signed values over a range of exponents, so that another order of additions gives other bits."""
    parts = count * (2 if dtype in COMPLEX else 1)
    values = random.uniform(1.0, 2.0, parts) * np.exp2(random.integers(-6, 7, parts)) * random.choice([-1.0, 1.0], parts)
    if dtype in COMPLEX:
        return np.asarray(values.view(np.complex128).astype(dtype))
    return np.asarray(values.astype(dtype))


def vector(dtype: DType, count: int, rank: int) -> Array:
    """Return `count` elements of `rank`: read-only, and every shorter vector is a prefix of every longer one.

    Two ranks, and two places of one rank, hold different values as far as `dtype` has enough of them.
    """
    stream = _stream(dtype, rank)
    if count > stream.size:
        raise ValueError(f"vectors of {dtype} have at most {stream.size} elements, not {count}")
    return stream[:count]


def vectors(dtype: DType, count: int, size: int) -> list[Array]:
    """Return the vectors of all ranks of a group of `size`."""
    return [vector(dtype, count, rank) for rank in range(size)]


def special_vector(dtype: DType, count: int, rank: int, *, one_nan: bool = False) -> Array:
    """Return floats rich in NaN (several payloads unless `one_nan`), infinities, signed zeros, subnormals and extremes."""
    tiny, huge = (float(x) for x in _extremes(dtype))
    pool = np.array([0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, tiny, -tiny, huge, -huge, 3.0], np.float64)
    random = np.random.Generator(np.random.Philox(key=[rank, 77]))
    values = pool[random.integers(0, pool.size, 4096)]
    result = np.resize(values, count) if count > values.size else values[:count]
    with np.errstate(all="ignore"):
        typed = result.astype(dtype)
    if not one_nan:
        bits = typed.view(f"u{dtype.itemsize}")
        bits[np.isnan(result)] |= np.array(rank + 1, bits.dtype)
    return typed


def _extremes(dtype: DType) -> tuple[Any, Any]:
    info = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return info.smallest_subnormal, info.max


def all_reduced(op: str, arrays: list[Array]) -> Array:
    """Return what ``all_reduce`` gives for these contributions, in rank order."""
    with np.errstate(all="ignore"):
        return _fold(op, arrays)


def _fold(op: str, arrays: list[Array]) -> Array:
    dtype = arrays[0].dtype
    target = result_dtype(op, dtype)
    wide = np.dtype("f4") if dtype in (np.dtype("f2"), BFLOAT16) else target
    terms = [np.asarray(array).astype(wide) for array in arrays]
    total = reduce(lambda a, b: _combine(op, a, b), terms)
    if op == "mean":
        total = _divide(total, len(arrays))
    return np.asarray(total).astype(target)


def _divide(total: Array, size: int) -> Array:
    if total.dtype in COMPLEX:
        parts = np.ascontiguousarray(total).view(f"f{total.dtype.itemsize // 2}")
        return np.asarray((parts / parts.dtype.type(size)).view(total.dtype).reshape(total.shape))
    return np.asarray(total / total.dtype.type(size))


def _combine(op: str, a: Array, b: Array) -> Array:
    if op in ("min", "max") and a.dtype in FLOATS:
        return _extremum(op, a, b)
    if op == "prod" and a.dtype in COMPLEX:
        return _complex_product(a, b)
    functions: dict[str, Any] = {
        "sum": np.logical_or if a.dtype == BOOL else np.add,
        "prod": np.logical_and if a.dtype == BOOL else np.multiply,
        "mean": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }
    return np.asarray(functions[op](a, b))


def _extremum(op: str, a: Array, b: Array) -> Array:
    first = np.signbit(a) if op == "min" else ~np.signbit(a)
    chosen = np.minimum(a, b) if op == "min" else np.maximum(a, b)
    chosen = np.where((a == 0) & (b == 0), np.where(first, a, b), chosen)
    chosen[np.isnan(a) | np.isnan(b)] = np.nan
    return np.asarray(chosen)


def _complex_product(a: Array, b: Array) -> Array:
    """Multiply by the schoolbook formula; numpy's own may contract a product and a sum into one rounding."""
    result = np.empty_like(a)
    result.real = a.real * b.real - a.imag * b.imag
    result.imag = a.real * b.imag + a.imag * b.real
    return result


def raw_bytes(array: Any) -> bytes:
    """Return the bytes of `array` in C order."""
    return np.ascontiguousarray(array).tobytes()


def digest(value: Any) -> str:
    """Return a fingerprint of dtype, shape and every bit of an array, of a list of arrays, or of what is no array."""
    if isinstance(value, list):
        return f"[{', '.join(digest(array) for array in value)}]"
    if not isinstance(value, np.ndarray):
        return repr(value)
    array = value
    words = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return f"{array.dtype!r} {array.shape} {zlib.crc32(words.data):08x}"


def canonical(array: Any) -> Array:
    """Return a copy in which every NaN of a float array has the same bits."""
    result = np.array(array)
    if result.dtype in FLOATS:
        result[np.isnan(result)] = np.nan
    return result


def assert_same(actual: Any, expected: Any) -> None:
    """Fail unless both arrays, or all of two lists of arrays, have the same shape, dtype and, NaN apart, bits.

    Raises:
        AssertionError: naming the first place where they differ.
    """
    if expected is None or isinstance(expected, list):
        _assert_same_structure(actual, expected)
        return
    assert isinstance(actual, np.ndarray), f"{type(actual).__name__} is no ndarray"
    expected = np.asarray(expected)
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype} where {expected.dtype} is due"
    assert actual.shape == expected.shape, f"shape {actual.shape} where {expected.shape} is due"
    got, due = canonical(actual), canonical(expected)
    if raw_bytes(got) == raw_bytes(due):
        return
    width = max(got.dtype.itemsize, 1)
    rows = np.frombuffer(raw_bytes(got), np.uint8).reshape(-1, width), np.frombuffer(raw_bytes(due), np.uint8).reshape(-1, width)
    wrong = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
    at = int(wrong[0])
    raise AssertionError(
        f"{wrong.size} of {got.size} elements differ; first at {at}: {got.reshape(-1)[at]!r} where {due.reshape(-1)[at]!r} is due"
    )


def _assert_same_structure(actual: Any, expected: list[Any] | None) -> None:
    if expected is None:
        assert actual is None, f"{actual!r} where None is due"
        return
    assert isinstance(actual, list) and len(actual) == len(expected), f"{actual!r} where a list of {len(expected)} is due"
    for index, (array, due) in enumerate(zip(actual, expected, strict=True)):
        try:
            assert_same(array, due)
        except AssertionError as error:
            raise AssertionError(f"entry {index} of {len(expected)}: {error}") from None
