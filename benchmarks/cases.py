"""What is measured: one collective at one size, the data it moves, the right answer, and its bandwidth factors.

Runs inside every peer's environment, so it needs numpy alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

__all__ = ["COLLECTIVES", "DTYPES", "GARBAGE", "OPS", "Case"]

Array = npt.NDArray[Any]

COLLECTIVES: Final = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier")
DTYPES: Final = ("float32", "float64", "int32", "int64")
OPS: Final = {"sum": np.add, "min": np.minimum, "max": np.maximum}

GARBAGE: Final = -1
"""Fills outputs before a checked call; no right result holds it."""

# Values are whole numbers below a prime. Whole, so that a sum is exact in float32 whatever order a library adds in (ranks × prime < 2**24);
# prime, so that the pattern's period divides no segment size and a segment put in the wrong place shows.
_PRIMES: Final = ((16, 1_048_573), (128, 131_071), (2048, 8_191))


@dataclass(frozen=True, slots=True)
class Case:
    """One collective at one size.

    Attributes:
        collective: one of `COLLECTIVES`.
        count: elements per rank: of the whole array for all_reduce and broadcast, of one rank's chunk for all_gather and reduce_scatter.
        dtype: numpy's name of the element type.
        op: reduction; empty where nothing is reduced.
        ranks: size of the world.
    """

    collective: str
    count: int
    dtype: str
    op: str
    ranks: int

    @classmethod
    def sized(cls, collective: str, nbytes: int, *, dtype: str = "float32", op: str = "sum", ranks: int) -> Self:
        """Return the case nearest below `nbytes`, with one element per rank at least.

        Raises:
            ValueError: an unknown name, or more ranks than the test pattern can tell apart.
        """
        if collective not in COLLECTIVES:
            raise ValueError(f"collective {collective!r} is unknown; it is one of {', '.join(COLLECTIVES)}")
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is unknown; it is one of {', '.join(DTYPES)}")
        if op not in OPS:
            raise ValueError(f"op {op!r} is unknown; it is one of {', '.join(OPS)}")
        if not 1 <= ranks <= _PRIMES[-1][0]:
            raise ValueError(f"ranks must be between 1 and {_PRIMES[-1][0]}, not {ranks}")
        if collective == "barrier":
            return cls(collective, 0, "", "", ranks)
        whole = np.dtype(dtype).itemsize * (ranks if collective in ("all_gather", "reduce_scatter") else 1)
        return cls(collective, max(1, nbytes // whole), dtype, op if "reduce" in collective else "", ranks)

    @classmethod
    def from_wire(cls, fields: dict[str, Any]) -> Self:
        """Return the case that `to_wire` described."""
        return cls(**fields)

    def to_wire(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self)

    @property
    def chunked(self) -> bool:
        """Whether each rank holds one chunk of the whole on one side of the call."""
        return self.collective in ("all_gather", "reduce_scatter")

    @property
    def nbytes(self) -> int:
        """Size as nccl-tests counts it: of one rank's array, or of all chunks together where there are chunks."""
        return self.count * self.itemsize * (self.ranks if self.chunked else 1)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return np.dtype(self.dtype).itemsize if self.dtype else 0

    @property
    def input_length(self) -> int:
        """Elements that a rank passes in."""
        return self.count * (self.ranks if self.collective == "reduce_scatter" else 1)

    @property
    def output_length(self) -> int:
        """Elements that a rank gets."""
        return self.count * (self.ranks if self.collective == "all_gather" else 1)

    def algbw(self, seconds: float) -> float:
        """Return bytes over time, in GB/s."""
        return self.nbytes / seconds / 1e9 if seconds > 0 else 0.0

    def busbw(self, seconds: float) -> float:
        """Return the rate in GB/s at which a rank's busiest link moves bytes, so that rank counts can be compared."""
        return self.algbw(seconds) * self.bus_factor

    @property
    def bus_factor(self) -> float:
        """busbw over algbw, as nccl-tests defines it."""
        if self.collective == "all_reduce":
            return 2 * (self.ranks - 1) / self.ranks
        if self.chunked:
            return (self.ranks - 1) / self.ranks
        return 1.0

    def contribution(self, rank: int, round_: int) -> Array:
        """Return what `rank` passes in; no two ranks and no two rounds pass the same in one place."""
        prime = next(prime for most, prime in _PRIMES if self.ranks <= most)
        step = 48_271 + 2 * rank + 2 * self.ranks * (round_ % 64)
        offset = (7_919 * (round_ + 1) + 104_729 * rank) % prime
        pattern = ((np.arange(min(prime, max(self.input_length, 1)), dtype=np.int64) * step + offset) % prime).astype(self.dtype)
        return np.resize(pattern, self.input_length)

    def expected(self, rank: int, round_: int) -> Array:
        """Return what `rank` must end with, by numpy."""
        if self.collective == "broadcast":
            return self.contribution(0, round_)
        if self.collective == "all_gather":
            return np.concatenate([self.contribution(peer, round_) for peer in range(self.ranks)])
        total = self.contribution(0, round_)
        for peer in range(1, self.ranks):
            OPS[self.op](total, self.contribution(peer, round_), out=total)
        if self.collective == "reduce_scatter":
            return total[rank * self.count : (rank + 1) * self.count].copy()
        return total

    def wrong(self, result: Array, expected: Array) -> int:
        """Return how many elements of `result` are not exactly `expected`; a wrong length counts every element."""
        if result.shape != expected.shape or result.dtype != expected.dtype:
            return max(result.size, expected.size, 1)
        return int(np.count_nonzero(result != expected))
