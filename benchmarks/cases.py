"""What is measured: one collective at one size, the data it moves, the right answer, and its bandwidth factors.

Runs inside every peer's environment, so it needs numpy alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

__all__ = ["COLLECTIVES", "DTYPES", "GARBAGE", "MANY", "OPS", "ROOT", "Case"]

Array = npt.NDArray[Any]

COLLECTIVES: Final = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "send_recv",
    "exchange",
    "barrier",
    "all_reduce_many",
    "broadcast_many",
)
"""``send_recv`` is a ping-pong of the first two ranks; ``exchange`` goes both ways at once between ranks 2i and 2i + 1."""

DTYPES: Final = ("float32", "float64", "int32", "int64")
OPS: Final = {"sum": np.add, "min": np.minimum, "max": np.maximum}

GARBAGE: Final = -1
"""Fills outputs before a checked call; no right result holds it."""

ROOT: Final = 0
"""Root of the calls that have one."""

# The layers of a small transformer, in parts of a norm's length: norm, query-key-value, projection, norm, up, down.
MANY: Final = (1, 192, 64, 1, 256, 256) * 8
"""How long the arrays of a ``_many`` call are, one beside another."""

_CHUNKS_IN: Final = ("reduce_scatter", "scatter", "all_to_all")
_CHUNKS_OUT: Final = ("all_gather", "gather", "all_to_all")
_ROOT_GETS: Final = ("reduce", "gather")

# Values are whole numbers below a prime. Whole, so that a sum is exact in float32 whatever order a library adds in (ranks × prime < 2**24);
# prime, so that the pattern's period divides no segment size and a segment put in the wrong place shows.
_PRIMES: Final = ((16, 1_048_573), (128, 131_071), (2048, 8_191))


@dataclass(frozen=True, slots=True)
class Case:
    """One collective at one size.

    Attributes:
        collective: one of `COLLECTIVES`.
        count: elements: of one rank's chunk where there are chunks, of all arrays together where a call takes many, of the array otherwise.
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
        """Return the case nearest below `nbytes`, with one element per chunk and per array at least.

        Raises:
            ValueError: an unknown name, a call between two ranks in a world of one, or more ranks than the test pattern can tell apart.
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
        one = cls(collective, 1, dtype, op if "reduce" in collective else "", ranks)
        if one.active == 0:
            raise ValueError(f"{collective} needs 2 ranks")
        return replace(one, count=max(len(MANY) if one.many else 1, nbytes // one.nbytes))

    @classmethod
    def from_wire(cls, fields: dict[str, Any]) -> Self:
        """Return the case that `to_wire` described."""
        return cls(**fields)

    def to_wire(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self)

    @property
    def many(self) -> bool:
        """Whether a call takes a list of arrays."""
        return self.collective.endswith("_many")

    @property
    def single(self) -> str:
        """The collective that moves one array of the list; the collective itself where there is no list."""
        return self.collective.removesuffix("_many")

    @property
    def chunked(self) -> bool:
        """Whether the whole is one chunk for each rank on a side of the call."""
        return self.collective in _CHUNKS_IN + _CHUNKS_OUT

    @property
    def active(self) -> int:
        """How many ranks take part, counted from rank 0; the others make no call."""
        if self.collective == "send_recv":
            return 2 if self.ranks > 1 else 0
        return self.ranks - self.ranks % 2 if self.collective == "exchange" else self.ranks

    @property
    def trips(self) -> int:
        """How often one repetition moves the message, one after the other: there and back in a ping-pong."""
        return 2 if self.collective == "send_recv" else 1

    @property
    def nbytes(self) -> int:
        """Size as nccl-tests counts it: of one rank's array, or of all chunks together where there are chunks."""
        return self.count * self.itemsize * (self.ranks if self.chunked else 1)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return np.dtype(self.dtype).itemsize if self.dtype else 0

    def input_length(self, rank: int) -> int:
        """Return how many elements `rank` passes in; for a broadcast, which is in place, how many its buffer has."""
        if rank >= self.active or (self.collective == "scatter" and rank != ROOT):
            return 0
        return self.count * (self.ranks if self.collective in _CHUNKS_IN else 1)

    def output_length(self, rank: int) -> int:
        """Return how many elements `rank` gets."""
        if rank >= self.active or (self.collective in _ROOT_GETS and rank != ROOT):
            return 0
        return self.count * (self.ranks if self.collective in _CHUNKS_OUT else 1)

    def arrays(self, flat: Array) -> list[Array]:
        """Return the arrays of a ``_many`` call, views of `flat`: lengths in proportion to `MANY`, and none empty."""
        ends = np.arange(1, len(MANY) + 1) + (self.count - len(MANY)) * np.cumsum(MANY) // sum(MANY)
        return np.split(flat, ends[:-1])

    def algbw(self, seconds: float) -> float:
        """Return bytes over time, in GB/s."""
        return self.nbytes / seconds / 1e9 if seconds > 0 else 0.0

    def busbw(self, seconds: float) -> float:
        """Return the rate in GB/s at which a rank's busiest link moves bytes, so that rank counts can be compared."""
        return self.algbw(seconds) * self.bus_factor

    @property
    def bus_factor(self) -> float:
        """busbw over algbw, as nccl-tests defines it."""
        if self.single == "all_reduce":
            return 2 * (self.ranks - 1) / self.ranks
        if self.chunked:
            return (self.ranks - 1) / self.ranks
        return 1.0

    def contribution(self, rank: int, round_: int) -> Array:
        """Return what `rank` passes in; no two ranks and no two rounds pass the same in one place."""
        prime = next(prime for most, prime in _PRIMES if self.ranks <= most)
        step = 48_271 + 2 * rank + 2 * self.ranks * (round_ % 64)
        offset = (7_919 * (round_ + 1) + 104_729 * rank) % prime
        length = self.input_length(rank)
        pattern = ((np.arange(min(prime, max(length, 1)), dtype=np.int64) * step + offset) % prime).astype(self.dtype)
        return np.resize(pattern, length)

    def expected(self, rank: int, round_: int) -> Array:
        """Return what `rank`, one that gets something, must end with, by numpy."""
        chunk = slice(rank * self.count, (rank + 1) * self.count)
        match self.single:
            case "broadcast":
                return self.contribution(ROOT, round_)
            case "all_gather" | "gather":
                return np.concatenate([self.contribution(peer, round_) for peer in range(self.ranks)])
            case "scatter":
                return self.contribution(ROOT, round_)[chunk]
            case "all_to_all":
                return np.concatenate([self.contribution(peer, round_)[chunk] for peer in range(self.ranks)])
            case "send_recv" | "exchange":
                return self.contribution(rank ^ 1, round_)
            case "reduce_scatter":
                return self._total(round_)[chunk]
            case _:
                return self._total(round_)

    def _total(self, round_: int) -> Array:
        total = self.contribution(0, round_)
        for peer in range(1, self.ranks):
            OPS[self.op](total, self.contribution(peer, round_), out=total)
        return total

    def wrong(self, result: Array, expected: Array) -> int:
        """Return how many elements of `result` are not exactly `expected`; a wrong length counts every element."""
        if result.shape != expected.shape or result.dtype != expected.dtype:
            return max(result.size, expected.size, 1)
        return int(np.count_nonzero(result != expected))
