"""Which gradient goes into which bucket, and how the ranks compare their plans. Pure functions, no communication."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from aiodist.types import ReduceOp, check_reduction

__all__ = [
    "Array",
    "Parameter",
    "Parameters",
    "describe",
    "difference",
    "matching",
    "pad",
    "plan",
    "read",
    "record",
    "texts",
]

Array: TypeAlias = npt.NDArray[Any]
Parameters: TypeAlias = Mapping[str, Any] | Iterable[tuple[str, Sequence[int], npt.DTypeLike]]

# What a rank tells the others: the digest of its plan, and the length of the plan's text.
_DIGEST_NBYTES: Final = 32
_RECORD_NBYTES: Final = _DIGEST_NBYTES + 8


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, and its place in the order in which gradients are expected."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    position: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of one gradient."""
        return self.size * self.dtype.itemsize


def read(parameters: Parameters, op: ReduceOp) -> list[Parameter]:
    """Read arrays by name, or (name, shape, dtype) triples.

    Raises:
        TypeError: a dtype can not be reduced with `op`, or a name is no string.
        ValueError: a name occurs twice, or a shape is negative.
    """
    triples: Iterable[tuple[str, Sequence[int], npt.DTypeLike]]
    if isinstance(parameters, Mapping):
        triples = [(name, np.shape(value), np.asarray(value).dtype) for name, value in parameters.items()]
    else:
        triples = parameters
    found: dict[str, Parameter] = {}
    for position, (name, shape, dtype) in enumerate(triples):
        if not isinstance(name, str):
            raise TypeError(f"the name of a parameter must be a string, not {name!r}")
        if name in found:
            raise ValueError(f"two parameters are named {name!r}")
        native = np.dtype(dtype).newbyteorder("=")
        try:
            check_reduction(op, native)
        except TypeError as error:
            raise TypeError(f"parameter {name!r}: {error}") from None
        extents = tuple(operator.index(extent) for extent in shape)
        if any(extent < 0 for extent in extents):
            raise ValueError(f"parameter {name!r} has the negative shape {extents}")
        found[name] = Parameter(name, extents, native, position)
    return list(found.values())


def plan(parameters: Iterable[Parameter], limit: int) -> list[list[Parameter]]:
    """Return the members of each bucket, the buckets ordered by when their last gradient is expected.

    One bucket per dtype is open at a time; it is closed when the next parameter would take it past `limit` bytes.

    Raises:
        ValueError: `limit` is not positive.
    """
    if operator.index(limit) <= 0:
        raise ValueError(f"bucket_nbytes must be positive, not {limit}")
    full: list[list[Parameter]] = []
    filling: dict[np.dtype[Any], list[Parameter]] = {}
    filled: dict[np.dtype[Any], int] = {}
    for parameter in parameters:
        kind = parameter.dtype
        if kind in filling and filled[kind] + parameter.nbytes > limit:
            full.append(filling.pop(kind))
        if kind not in filling:
            filling[kind], filled[kind] = [], 0
        filling[kind].append(parameter)
        filled[kind] += parameter.nbytes
    full.extend(filling.values())
    return sorted(full, key=lambda members: members[-1].position)


def describe(buckets: Iterable[Iterable[Parameter]], op: ReduceOp, limit: int) -> bytes:
    """Return the plan as text, a line a fact; equal texts are equal plans."""
    lines = [f"op {op.value!r}", f"bucket_nbytes {limit}"]
    members = [(parameter, index) for index, bucket in enumerate(buckets) for parameter in bucket]
    for parameter, index in sorted(members, key=lambda member: member[0].position):
        lines.append(f"parameter {parameter.position}: {parameter.name!r} {parameter.shape} {parameter.dtype.name} in bucket {index}")
    return "\n".join(lines).encode()


def record(text: bytes) -> Array:
    """Return the bytes that a rank tells the others about its plan."""
    return np.frombuffer(hashlib.sha256(text).digest() + len(text).to_bytes(8, "little"), np.uint8)


def matching(records: Array) -> bool:
    """Return whether all ranks said the same."""
    rows = records.reshape(-1, _RECORD_NBYTES)
    return bool((rows == rows[0]).all())


def pad(text: bytes, records: Array) -> Array:
    """Return `text` as an array as long as the longest text of all ranks."""
    return np.frombuffer(text.ljust(max(_lengths(records))), np.uint8)


def texts(gathered: Array, records: Array) -> list[str]:
    """Return every rank's text from the padded ones."""
    lengths = _lengths(records)
    return [row[:length].tobytes().decode() for row, length in zip(gathered.reshape(len(lengths), -1), lengths, strict=True)]


def difference(plans: Sequence[str]) -> str:
    """Return the first fact about which the ranks disagree, and what each says."""
    tables = [text.splitlines() for text in plans]
    for number in range(max(len(table) for table in tables)):
        facts: dict[str, list[int]] = {}
        for rank, table in enumerate(tables):
            facts.setdefault(table[number] if number < len(table) else "no more parameters", []).append(rank)
        if len(facts) > 1:
            return "; ".join(f"{_ranks(ranks)}: {fact[:200]}" for fact, ranks in facts.items())
    return "none"


def _lengths(records: Array) -> list[int]:
    return [int.from_bytes(row[_DIGEST_NBYTES:].tobytes(), "little") for row in records.reshape(-1, _RECORD_NBYTES)]


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{', …' if len(ranks) > 8 else ''}"
