"""The conformance table: which cases there are, what each must give, and how a rank performs one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np

import aiodist
from support import oracle
from support.oracle import Array, DType

MOVERS: Final = ("gather", "scatter", "all_to_all", "uneven all_gather", "uneven gather", "list scatter", "list all_to_all")
COLLECTIVES: Final = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", *MOVERS)
TABLES: Final = {"all_reduce": ("all_reduce",), "reduce_scatter": ("reduce_scatter",), "broadcast": ("broadcast",)} | {
    "all_gather": ("all_gather",),
    "reduce": ("reduce",),
    "movers": MOVERS,
}
"""The tables by name, and the collectives in each."""
REDUCTIONS: Final = ("all_reduce", "reduce", "reduce_scatter")
ROOTED: Final = ("reduce", "broadcast", "gather", "scatter")
PLACEMENTS: Final = ("private", "shared", "out", "in-place", "mixed")
SIZES: Final = (1, 2, 3, 4, 5, 7, 8)
FEW_SIZES: Final = (1, 2, 3, 5, 8)
_IN_FLIGHT: Final = 5
# The results of these lie apart from the whole of their input, so they have no place in it.
_APART: Final = ("reduce_scatter", "scatter", "uneven all_gather", "uneven gather", "list scatter", "list all_to_all")
# What one rank passes to these is `size` times one part.
_CUT: Final = ("reduce_scatter", "scatter", "all_to_all")

Value = Array | list[Array] | None
"""What a rank passes or gets."""


@dataclass(frozen=True)
class Case:
    """One call that all ranks make.

    Attributes:
        collective: Name of the method, with "uneven" or "list" before it for that form of it.
        op: Name of the reduction, empty for a collective that only moves.
        dtype: Of the elements that go in.
        count: Elements of one rank's input; of one part for those that cut their input; the most of one part in uneven forms.
        placement: Where arrays lie: "private", "shared" (``group.empty``), "out", "in-place", or "mixed" (each rank its own).
        root: Root of a collective that has one; from it, the uneven forms choose which part has which extent.
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

    @property
    def method(self) -> str:
        """Name of the group's method."""
        return self.collective.split()[-1]


def placements(collective: str) -> tuple[str, ...]:
    """Return the placements that a collective, or any of a table's, has."""
    members = TABLES.get(collective, (collective,))
    return tuple(name for name in PLACEMENTS if name != "in-place" or any(member not in _APART for member in members))


def table(name: str, size: int, placement: str) -> list[Case]:
    """Return the cases of one test.

    In the tables of ``all_reduce`` and ``reduce_scatter`` every (dtype, op) comes with 1 element, an odd number, and one of the four other
    lengths; which one turns with the placement, the number of ranks and the pair. In the others every pair comes with one length, and in
    that of the movers only every third dtype. Over the placements and sizes every pair meets every length in each.
    """
    if name == "movers":
        return _movers(size, placement)
    if name in REDUCTIONS:
        pairs = [(op, dtype) for dtype in oracle.REDUCIBLE for op in oracle.OPS if oracle.is_defined(op, dtype)]
    else:
        pairs = [("", dtype) for dtype in (*oracle.REDUCIBLE, *oracle.MOVABLE_ONLY)]
    turn, thorough = _turn(size, placement), name in ("all_reduce", "reduce_scatter")
    diagonal = PLACEMENTS.index(placement) + SIZES.index(size)
    cases = []
    for index, (op, dtype) in enumerate(pairs):
        counts = lengths(name, dtype, size)
        chosen = [*counts[:2], counts[2 + (diagonal + index) % 4]] if thorough else [counts[(turn + index) % 6]]
        for place, count in enumerate(chosen, 0 if thorough else turn // 6):
            # Roots and details turn apart from each other, so that each length meets all of them.
            cases.append(Case(name, op, dtype, count, placement, root=(index // 2 + place) % size, number=index + place))
    return cases


def _turn(size: int, placement: str) -> int:
    return PLACEMENTS.index(placement) * len(SIZES) + SIZES.index(size)


def _movers(size: int, placement: str) -> list[Case]:
    turn = _turn(size, placement)
    cases = []
    for index, dtype in enumerate((*oracle.REDUCIBLE, *oracle.MOVABLE_ONLY)):
        for place, collective in enumerate(MOVERS):
            if (turn + index + place) % 3 == 0 and placement in placements(collective):
                count = lengths(collective, dtype, size)[((turn + index + place) // 3 + index) % 6]
                cases.append(Case(collective, "", dtype, count, placement, root=(index + turn // 2) % size, number=index // 2 + place))
    return cases


def lengths(collective: str, dtype: DType, size: int) -> list[int]:
    """Return the six lengths that a collective comes with: 1, odd, none, a full slot, one more, and several segments."""
    wide = oracle.wide_count(dtype) // (1 if size <= 4 else 2)
    slot = oracle.slot_count(dtype, size)
    method = collective.split()[-1]
    if method in ("all_gather", "gather"):
        wide = 2 * wide // size
    elif method in _CUT:
        wide //= size
        slot = slot if method == "reduce_scatter" else slot // size
    return [1, 37, 0, slot, slot + 1, wide]


def expected(case: Case, size: int) -> tuple[str, ...]:
    """Return the fingerprint of what each rank must get."""
    matters = case.method in ROOTED or " " in case.collective
    return _expected(replace(case, placement="", number=0, root=case.root if matters else 0), size)


@lru_cache(maxsize=4096)
def _expected(case: Case, size: int) -> tuple[str, ...]:
    if case.method in ("all_reduce", "broadcast", "all_gather"):
        return (oracle.digest(due(case, size, 0)),) * size
    return tuple(oracle.digest(due(case, size, rank)) for rank in range(size))


def due(case: Case, size: int, rank: int) -> Value:
    """Return what `rank` must get."""
    dtype, count, share = case.dtype, case.count, slice(rank * case.count, (rank + 1) * case.count)
    if case.method in ("reduce", "gather") and rank != case.root:
        return None
    if case.collective == "list scatter":
        return parts(case, size, case.root)[rank]
    if case.collective == "list all_to_all":
        return [parts(case, size, sender)[rank] for sender in range(size)]
    if case.collective == "scatter":
        return oracle.vector(dtype, count * size, case.root)[share]
    if case.collective == "all_to_all":
        return np.concatenate([sent[share] for sent in oracle.vectors(dtype, count * size, size)])
    if case.collective == "broadcast":
        return oracle.vector(dtype, count, case.root)
    if case.method in ("all_gather", "gather"):
        return np.concatenate([oracle.vector(dtype, contributed(case, sender), sender) for sender in range(size)])
    if case.collective == "reduce_scatter":
        return oracle.all_reduced(case.op, oracle.vectors(dtype, count * size, size))[share]
    return oracle.all_reduced(case.op, oracle.vectors(dtype, count, size))


def contributed(case: Case, rank: int) -> int:
    """Return how many elements `rank` gives to a gathering."""
    return _extent(case, rank) if case.collective.startswith("uneven") else case.count


def _extent(case: Case, turn: int) -> int:
    return (case.count, 0, case.count // 2, min(case.count, 1))[(turn + case.root) % 4]


def _part_shapes(case: Case, size: int, sender: int) -> list[tuple[int, ...]]:
    """Return the shapes of the list that `sender` passes: several extents and numbers of dimensions."""
    extents = [_extent(case, sender + 2 * receiver) for receiver in range(size)]
    return [[(extent,), (1, extent), (extent, 1, 1)][(sender + index) % 3] for index, extent in enumerate(extents)]


def parts(case: Case, size: int, sender: int) -> list[Array]:
    """Return the list that `sender` passes."""
    shapes = _part_shapes(case, size, sender)
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes])
    pieces = np.split(oracle.vector(case.dtype, int(ends[-1]), sender), ends[:-1])
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def shapes_due(case: Case, size: int, rank: int) -> list[tuple[int, ...]]:
    """Return the shapes of what `rank` must get; unlike `due`, without making every rank's data."""
    if case.collective == "list scatter":
        return [_part_shapes(case, size, case.root)[rank]]
    if case.collective == "list all_to_all":
        return [_part_shapes(case, size, sender)[rank] for sender in range(size)]
    if case.method in ("all_gather", "gather"):
        return [(sum(contributed(case, sender) for sender in range(size)),)]
    return [(case.count * (size if case.collective == "all_to_all" else 1),)]


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
        self.elsewhere = case.method in ("reduce", "gather") and group.rank != case.root
        self.out: Value = None
        self.x = self._input()
        self.future = self._start()

    def _blank(self, shape: tuple[int, ...], dtype: DType) -> Array:
        return self.group.empty(shape, dtype) if self.placement == "shared" else np.empty(shape, dtype)

    def _given(self) -> Value:
        """Return what this rank passes, or would if it passed something."""
        case, size, rank = self.case, self.group.size, self.group.rank
        if case.collective == "list all_to_all":
            return parts(case, size, rank)
        if case.collective == "list scatter":
            return parts(case, size, rank) if rank == case.root else None
        if case.method in ("all_gather", "gather"):
            return oracle.vector(case.dtype, contributed(case, rank), rank)
        return oracle.vector(case.dtype, case.count * (size if case.collective in _CUT else 1), rank)

    def _input(self) -> Value:
        given = self._given()
        if self.placement == "private" and self.case.number % 2:
            return given  # read-only
        placed = [self._blank(array.shape, array.dtype) for array in _each(given)]
        for copy, array in zip(placed, _each(given), strict=True):
            copy[...] = array
        return placed if isinstance(given, list) else placed[0] if placed else None

    def _start(self) -> Any:
        case = self.case
        self.out = self._output()
        more: dict[str, Any] = {"op": case.op} if case.op else {}
        if case.method in ROOTED:
            more["root"] = case.root
        if case.collective.startswith("uneven"):
            more["uneven"] = True
        return getattr(self.group, case.method)(self._passed(), **more, out=self.out)

    def _passed(self) -> Value:
        """Return x; where a receiver's only says what to expect, now and then None."""
        receiving = self.case.method in ("broadcast", "scatter") and self.group.rank != self.case.root
        return None if receiving and self.placement != "in-place" and self.case.number % 3 else self.x

    def _output(self) -> Value:
        case, group = self.case, self.group
        if self.placement == "private" or (self.placement == "shared" and case.number % 2):
            return None
        if self.placement == "in-place":
            if case.method in ("all_gather", "gather"):
                return None if self.elsewhere else self._whole()
            if not case.op or oracle.result_dtype(case.op, case.dtype) == case.dtype:
                return self.x
        if self.elsewhere:
            return np.full(3, 7, "i1")  # of no matter here, whatever it is
        dtype = oracle.result_dtype(case.op, case.dtype) if case.op else case.dtype
        blanks = [self._blank(shape, dtype) for shape in shapes_due(case, group.size, group.rank)]
        return blanks if case.collective == "list all_to_all" else blanks[0]

    def _whole(self) -> Array:
        """Return an array to gather into, and let x be this rank's place in it."""
        count, rank = self.case.count, self.group.rank
        whole = np.zeros(count * self.group.size, self.case.dtype)
        own = whole[rank * count : (rank + 1) * count]
        own[...] = _each(self.x)[0]
        self.x = own
        return whole

    def problem(self, result: Any, expectation: str) -> str | None:
        """Say what is wrong with a result, or None."""
        if (self.placement != "in-place" or self.elsewhere) and not _same_bytes(self.x, self._given()):
            return "the input was changed"
        if self.elsewhere:
            untouched = self.out is None or self.out is self.x or _same_bytes(self.out, np.full(3, 7, "i1"))
            return None if result is None and untouched else f"not the root, but the result is {result!r} and out {self.out!r}"
        if self.out is not None and [id(array) for array in _each(result)] != [id(array) for array in _each(self.out)]:
            return "the result is not the array given as out"
        if not all(isinstance(array, np.ndarray) and array.flags.writeable for array in _each(result)):
            return f"the result is no writable array: {type(result)}"
        if oracle.digest(result) == expectation:
            return None
        try:
            oracle.assert_same(result, due(self.case, self.group.size, self.group.rank))
        except AssertionError as error:
            return str(error)
        return "only the bits of NaN differ"


def _each(value: Value) -> list[Array]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _same_bytes(one: Value, other: Value) -> bool:
    pairs = zip(_each(one), _each(other), strict=True)
    return all(np.array_equal(a.reshape(-1).view("u1"), b.reshape(-1).view("u1")) for a, b in pairs)
