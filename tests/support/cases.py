"""The conformance table: which cases there are, what each must give, and how a rank performs one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

import aiodist
from support import oracle
from support.oracle import Array, DType

REDUCTIONS: Final = ("all_reduce", "reduce_scatter")
COLLECTIVES: Final = (*REDUCTIONS, "broadcast", "all_gather")
PLACEMENTS: Final = ("private", "shared", "out", "in-place", "mixed")
SIZES: Final = (1, 2, 3, 4, 5, 7, 8)
_IN_FLIGHT: Final = 5


@dataclass(frozen=True)
class Case:
    """One call that all ranks make.

    Attributes:
        collective: Name of the method.
        op: Name of the reduction, empty for a collective that only moves.
        dtype: Of the elements that go in.
        count: Elements of one rank's input; of one rank's output for ``reduce_scatter``.
        placement: Where arrays lie: "private", "shared" (``group.empty``), "out", "in-place", or "mixed" (each rank its own).
        root: Root of a broadcast.
        number: From which the ranks choose details.
    """

    collective: str
    op: str
    dtype: DType
    count: int
    placement: str
    root: int
    number: int

    def __str__(self) -> str:
        op = f" {self.op}" if self.op else ""
        return f"{self.collective}{op} of {self.count} × {self.dtype} {self.placement}, root {self.root}"


def placements(collective: str) -> tuple[str, ...]:
    """Return the placements that a collective has; a chunk of ``reduce_scatter``'s input is no place for its output."""
    return tuple(name for name in PLACEMENTS if (collective, name) != ("reduce_scatter", "in-place"))


def table(collective: str, size: int, placement: str) -> list[Case]:
    """Return the cases of one test.

    Every (dtype, op) comes with 1 element, an odd number, and one of the four other lengths; which one turns with the placement, the
    number of ranks and the pair, so that over the placements and sizes every pair meets every length.
    """
    if collective in REDUCTIONS:
        pairs = [(op, dtype) for dtype in oracle.REDUCIBLE for op in oracle.OPS if oracle.is_defined(op, dtype)]
    else:
        pairs = [("", dtype) for dtype in (*oracle.REDUCIBLE, *oracle.MOVABLE_ONLY)]
    turn = PLACEMENTS.index(placement) + SIZES.index(size)
    cases = []
    for index, (op, dtype) in enumerate(pairs):
        for place, count in enumerate(_counts(collective, dtype, size, turn + index)):
            # Roots and details turn apart from each other, so that each length meets all of them.
            cases.append(Case(collective, op, dtype, count, placement, root=(index // 2 + place) % size, number=index + place))
    return cases


def _counts(collective: str, dtype: DType, size: int, turn: int) -> list[int]:
    wide = oracle.wide_count(dtype) // (1 if size <= 4 else 2)
    if collective == "reduce_scatter":
        wide //= size
    elif collective == "all_gather":
        wide = 2 * wide // size
    slot = oracle.slot_count(dtype, size)
    return [1, 37, (0, slot, slot + 1, wide)[turn % 4]]


@lru_cache(maxsize=4096)
def _expected(collective: str, op: str, dtype: DType, count: int, size: int, root: int) -> tuple[str, ...]:
    results = [due(collective, op, dtype, count, size, root, rank) for rank in range(size if collective == "reduce_scatter" else 1)]
    digests = tuple(oracle.digest(result) for result in results)
    return digests if collective == "reduce_scatter" else digests * size


def expected(case: Case, size: int) -> tuple[str, ...]:
    """Return the fingerprint of what each rank must get."""
    root = case.root if case.collective == "broadcast" else 0
    return _expected(case.collective, case.op, case.dtype, case.count, size, root)


def due(collective: str, op: str, dtype: DType, count: int, size: int, root: int, rank: int) -> Array:
    """Return what `rank` must get."""
    if collective == "broadcast":
        return oracle.vector(dtype, count, root)
    if collective == "all_gather":
        return np.concatenate(oracle.vectors(dtype, count, size))
    if collective == "all_reduce":
        return oracle.all_reduced(op, oracle.vectors(dtype, count, size))
    return oracle.all_reduced(op, oracle.vectors(dtype, count * size, size))[rank * count : (rank + 1) * count]


async def perform(group: aiodist.Group, cases: list[Case], expectations: list[tuple[str, ...]]) -> list[str]:
    """Perform the cases, a few in flight at a time, and return a line for each that went wrong on this rank."""
    problems: list[str] = []
    for start in range(0, len(cases), _IN_FLIGHT):
        calls = [_Call(group, case) for case in cases[start : start + _IN_FLIGHT]]
        for call, expectation in zip(calls, expectations[start : start + _IN_FLIGHT], strict=True):
            problem = call.problem(await call.future, expectation[group.rank])
            if problem:
                problems.append(f"rank {group.rank} of {group.size}, {call.case}: {problem}")
    return problems


class _Call:
    """A case under way on one rank."""

    def __init__(self, group: aiodist.Group, case: Case) -> None:
        self.case = case
        self.group = group
        self.placement = case.placement
        if case.placement == "mixed":
            names = [name for name in placements(case.collective) if name != "mixed"]
            self.placement = names[(case.number + group.rank) % len(names)]
        self.out: Array | None = None
        self.x = self._input()
        self.future = self._start()

    def _empty(self, count: int, dtype: DType) -> Array:
        if self.placement == "shared":
            return self.group.empty((count,), dtype)
        return np.empty(count, dtype)

    def _given(self) -> Array:
        count = self.case.count * (self.group.size if self.case.collective == "reduce_scatter" else 1)
        return oracle.vector(self.case.dtype, count, self.group.rank)

    def _input(self) -> Array:
        given = self._given()
        if self.placement == "private" and self.case.number % 2:
            return given  # read-only
        x = self._empty(given.size, given.dtype)
        x[...] = given
        return x

    def _start(self) -> Any:
        case, group = self.case, self.group
        self.out = self._output()
        if case.collective == "all_reduce":
            return group.all_reduce(self.x, op=case.op, out=self.out)
        if case.collective == "reduce_scatter":
            return group.reduce_scatter(self.x, op=case.op, out=self.out)
        if case.collective == "all_gather":
            return group.all_gather(self.x, out=self.out)
        return group.broadcast(self._broadcast_input(), root=case.root, out=self.out)

    def _broadcast_input(self) -> Array | None:
        if self.group.rank == self.case.root or self.placement == "in-place" or self.case.number % 3 == 0:
            return self.x
        return None

    def _output(self) -> Array | None:
        case, group = self.case, self.group
        if self.placement == "private" or (self.placement == "shared" and case.number % 2):
            return None
        dtype = oracle.result_dtype(case.op, case.dtype) if case.op else case.dtype
        if self.placement == "in-place":
            if case.collective == "all_gather":
                whole = np.zeros(case.count * group.size, dtype)
                own = whole[group.rank * case.count : (group.rank + 1) * case.count]
                own[...] = self.x
                self.x = own
                return whole
            if dtype == case.dtype:
                return self.x
        return self._empty(case.count * (group.size if case.collective == "all_gather" else 1), dtype)

    def problem(self, result: Any, expectation: str) -> str | None:
        """Say what is wrong with a result, or None."""
        case = self.case
        if self.out is not None and result is not self.out:
            return "the result is not the array given as out"
        if not isinstance(result, np.ndarray) or not result.flags.writeable:
            return f"the result is no writable array: {type(result)}"
        if self.placement != "in-place" and not np.array_equal(self.x.view("u1"), self._given().view("u1")):
            return "the input was changed"
        if oracle.digest(result) == expectation:
            return None
        try:
            oracle.assert_same(result, due(case.collective, case.op, case.dtype, case.count, self.group.size, case.root, self.group.rank))
        except AssertionError as error:
            return str(error)
        return "only the bits of NaN differ"
