"""The collectives of random programs: what the ranks agree on, how one rank makes the call, and what it must get."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from support import oracle
from support.oracle import Array, DType
from support.random_arrays import MOVABLE, Own, Shape, draw_shape, longer, values


@dataclass(frozen=True)
class Place:
    """A group or a channel.

    Attributes:
        number: 0 is the world.
        ranks: World ranks of its members, in its order.
        text: How it comes to be.
        made: Number of the operation that makes it.
    """

    number: int
    ranks: tuple[int, ...]
    text: str
    made: int

    @property
    def size(self) -> int:
        """How many members it has."""
        return len(self.ranks)

    def __str__(self) -> str:
        return f"place {self.number} ({self.text}: {list(self.ranks)})"


@dataclass(eq=False)
class Operation:
    """One step of a program; what it holds is the same on all ranks.

    Attributes:
        seed: Of the program.
        number: Its place in the program.
        place: Where it happens.
    """

    seed: int
    number: int
    place: Place

    alone = False
    """True where it ends whatever the peers do, so that a rank may wait for it at any time."""
    steady = False
    """True where waits for it may not be given up, and it may not be dropped."""

    @property
    def members(self) -> tuple[int, ...]:
        """World ranks that have a part in it."""
        return self.place.ranks

    @property
    def order(self) -> Hashable:
        """What it shares with the operations that no rank may issue in another order; None where it is free."""
        return self.place.number

    @property
    def settled(self) -> int:
        """Number of the operation with which all that it waits for has been issued."""
        return self.number

    def start(self, own: Own, rank: int) -> Any:
        """Make the call of a rank of the place and return what to await."""
        raise NotImplementedError

    def due(self, rank: int) -> Any:
        """Return what awaiting must give a rank of the place."""
        raise NotImplementedError

    def given(self, part: int, dtype: DType, shape: Shape) -> Array:
        """Return the elements that the operation has for one of its parts."""
        return values(self.seed, self.number, part, dtype, shape)

    def __str__(self) -> str:
        names = [name for name in self.__dataclass_fields__ if name not in ("seed", "number", "place")]
        texts = ((name, str(getattr(self, name))) for name in names)
        parts = " ".join(f"{name}={text if len(text) < 160 else text[:160] + '…'}" for name, text in texts)
        return f"{type(self).__name__} {parts} on {self.place}"


@dataclass(eq=False)
class Reduction(Operation):
    """``all_reduce``, ``reduce`` or ``reduce_scatter``."""

    name: str
    op: str
    dtype: DType
    shape: Shape
    root: int
    axis: int

    @classmethod
    def drawn(cls, draw: random.Random, seed: int, number: int, place: Place) -> Reduction:
        """Draw one."""
        name = draw.choice(("all_reduce", "all_reduce", "reduce", "reduce_scatter"))
        op, dtype = draw_reduction(draw)
        scattered = name == "reduce_scatter"
        shape = draw_shape(draw, dtype, place.size, least=1 if scattered else 0)
        axis = draw.randrange(-len(shape), len(shape)) if scattered else 0
        if scattered:
            shape = longer(shape, axis, place.size)
        return cls(seed, number, place, name, op, dtype, shape, draw.randrange(place.size), axis)

    @cached_property
    def _result(self) -> Array:
        return reduced(self.op, [self.given(rank, self.dtype, self.shape) for rank in range(self.place.size)])

    def due(self, rank: int) -> Any:
        """Return the reduced array or a share of it."""
        if self.name == "reduce_scatter":
            return np.split(self._result, self.place.size, axis=self.axis)[rank]
        return None if self.name == "reduce" and rank != self.root else self._result

    def start(self, own: Own, rank: int) -> Any:
        """Make the call."""
        x = own.input(self.given(rank, self.dtype, self.shape))
        target = oracle.result_dtype(self.op, self.dtype)
        if self.name == "reduce_scatter":
            return own.call("reduce_scatter", x, self.op, self.axis, out=own.output(self.due(rank).shape, target))
        if self.name == "all_reduce":
            return own.call("all_reduce", x, self.op, out=own.output(self.shape, target, x))
        out = own.output(self.shape, target, x) if rank == self.root else own.ignored()
        return own.call("reduce", x, self.op, self.root, out=out)


def draw_reduction(draw: random.Random) -> tuple[str, DType]:
    """Return an op and a dtype that it is defined for."""
    while True:
        op, dtype = draw.choice(oracle.OPS), draw.choice(oracle.REDUCIBLE)
        if oracle.is_defined(op, dtype):
            return op, dtype


def reduced(op: str, terms: list[Array]) -> Array:
    """Return what the oracle makes of these terms, of any dimensions."""
    return oracle.all_reduced(op, [term.reshape(-1) for term in terms]).reshape(terms[0].shape)


@dataclass(eq=False)
class Broadcast(Operation):
    """``broadcast``, with receivers that know what comes and others that do not."""

    dtype: DType
    shape: Shape
    root: int

    @classmethod
    def drawn(cls, draw: random.Random, seed: int, number: int, place: Place) -> Broadcast:
        """Draw one."""
        dtype = draw.choice(MOVABLE)
        return cls(seed, number, place, dtype, draw_shape(draw, dtype, place.size), draw.randrange(place.size))

    def due(self, rank: int) -> Any:
        """Return the root's array."""
        return self.given(self.root, self.dtype, self.shape)

    def start(self, own: Own, rank: int) -> Any:
        """Make the call."""
        x = own.input(self.given(rank, self.dtype, self.shape)) if rank == self.root or own.draw.random() < 0.5 else None
        return own.call("broadcast", x, self.root, out=own.output(self.shape, self.dtype, x))


@dataclass(eq=False)
class Gathering(Operation):
    """``all_gather`` or ``gather``, of equal or of differing extents."""

    name: str
    dtype: DType
    shapes: tuple[Shape, ...]
    axis: int
    uneven: bool
    root: int

    @classmethod
    def drawn(cls, draw: random.Random, seed: int, number: int, place: Place) -> Gathering:
        """Draw one."""
        dtype, uneven = draw.choice(MOVABLE), draw.random() < 0.4
        shape = draw_shape(draw, dtype, place.size, least=1 if uneven else 0)
        axis = draw.randrange(-len(shape), len(shape)) if shape else draw.choice((0, -1))
        shapes = [shape] * place.size
        if uneven:
            extents = [draw.choice((0, 1, shape[axis] // 2, shape[axis], shape[axis] + draw.randint(0, 3))) for _ in shapes]
            at = axis % len(shape)
            shapes = [(*shape[:at], extent, *shape[at + 1 :]) for extent in extents]
        name = draw.choice(("all_gather", "gather"))
        return cls(seed, number, place, name, dtype, tuple(shapes), axis, uneven, draw.randrange(place.size))

    @cached_property
    def _joined(self) -> Array:
        terms = [self.given(rank, self.dtype, shape) for rank, shape in enumerate(self.shapes)]
        return np.concatenate([np.atleast_1d(term) for term in terms], axis=self.axis)

    def due(self, rank: int) -> Any:
        """Return the joined array."""
        return self._joined if self.name == "all_gather" or rank == self.root else None

    def start(self, own: Own, rank: int) -> Any:
        """Make the call."""
        shape, wanted = self._joined.shape, self.given(rank, self.dtype, self.shapes[rank])
        more: dict[str, Any] = {"uneven": True} if self.uneven else {}
        if self.name == "gather":
            out = own.output(shape, self.dtype) if rank == self.root else own.ignored()
            return own.call("gather", own.input(wanted), self.root, self.axis, out=out, **more)
        if not self.uneven and wanted.ndim and self.axis % wanted.ndim == 0 and own.draw.random() < 0.2:
            x, out = own.joined(shape, self.dtype, wanted, rank * len(wanted))
            return own.call("all_gather", x, self.axis, out=out)
        return own.call("all_gather", own.input(wanted), self.axis, out=own.output(shape, self.dtype), **more)


@dataclass(eq=False)
class Scatter(Operation):
    """``scatter`` of an array in equal parts, or of a list."""

    dtype: DType
    shapes: tuple[Shape, ...]
    axis: int | None
    root: int

    @classmethod
    def drawn(cls, draw: random.Random, seed: int, number: int, place: Place) -> Scatter:
        """Draw one."""
        dtype = draw.choice(MOVABLE)
        shapes, axis = draw_parts(draw, dtype, place.size)
        return cls(seed, number, place, dtype, shapes, axis, draw.randrange(place.size))

    def due(self, rank: int) -> Any:
        """Return the rank's part."""
        return self.given(rank, self.dtype, self.shapes[rank])

    def start(self, own: Own, rank: int) -> Any:
        """Make the call."""
        first = 0 if rank == self.root else self.place.size  # what the others show is not what comes
        parts = [self.given(first + part, self.dtype, shape) for part, shape in enumerate(self.shapes)]
        x: Any = None
        if self.axis is None:
            x = [own.input(part) for part in parts] if rank == self.root else None
        elif rank == self.root or own.draw.random() < 0.4:
            x = own.input(np.concatenate(parts, axis=self.axis))
        return own.call("scatter", x, self.root, self.axis or 0, out=own.output(self.shapes[rank], self.dtype))


def draw_parts(draw: random.Random, dtype: DType, size: int) -> tuple[tuple[Shape, ...], int | None]:
    """Return the shapes of one part a rank, and the axis along which they make one array; None where they make a list."""
    if draw.random() < 0.4:
        return tuple(draw_shape(draw, dtype, size * size) for _ in range(size)), None
    shape = draw_shape(draw, dtype, size, least=1)
    return (shape,) * size, draw.randrange(-len(shape), len(shape))


@dataclass(eq=False)
class AllToAll(Operation):
    """``all_to_all`` of arrays in equal parts, or of lists."""

    dtype: DType
    shapes: tuple[tuple[Shape, ...], ...]
    axis: int | None

    @classmethod
    def drawn(cls, draw: random.Random, seed: int, number: int, place: Place) -> AllToAll:
        """Draw one; ``shapes[q][r]`` is what rank q has for rank r."""
        dtype = draw.choice(MOVABLE)
        shapes, axis = draw_parts(draw, dtype, place.size)
        rows = [shapes if axis is not None else tuple(draw_shape(draw, dtype, place.size**2) for _ in shapes) for _ in shapes]
        return cls(seed, number, place, dtype, tuple(rows), axis)

    def _part(self, source: int, target: int) -> Array:
        return self.given(source * self.place.size + target, self.dtype, self.shapes[source][target])

    def due(self, rank: int) -> Any:
        """Return what all ranks have for this one."""
        parts = [self._part(source, rank) for source in range(self.place.size)]
        return parts if self.axis is None else np.concatenate(parts, axis=self.axis)

    def start(self, own: Own, rank: int) -> Any:
        """Make the call."""
        parts = [self._part(rank, target) for target in range(self.place.size)]
        if self.axis is None:
            return own.call("all_to_all", [own.input(part) for part in parts], out=own.outputs(self.due(rank)))
        x = own.input(np.concatenate(parts, axis=self.axis))
        return own.call("all_to_all", x, self.axis, out=own.output(self.due(rank).shape, self.dtype))


@dataclass(eq=False)
class Many(Operation):
    """``all_reduce_many`` or ``broadcast_many``."""

    name: str
    op: str
    layout: tuple[tuple[DType, Shape], ...]
    root: int

    @classmethod
    def drawn(cls, draw: random.Random, seed: int, number: int, place: Place) -> Many:
        """Draw one."""
        name, op = draw.choice(("all_reduce_many", "broadcast_many")), draw.choice(oracle.OPS)
        if name == "all_reduce_many":
            kinds = [dtype for dtype in oracle.REDUCIBLE if oracle.is_defined(op, dtype) and oracle.result_dtype(op, dtype) == dtype]
        else:
            op, kinds = "", list(MOVABLE)
        dtypes = [draw.choice(kinds) for _ in range(draw.randint(1, 5))]
        layout = tuple((dtype, draw_shape(draw, dtype, place.size)) for dtype in dtypes)
        return cls(seed, number, place, name, op, layout, draw.randrange(place.size))

    def _given(self, rank: int) -> list[Array]:
        count = len(self.layout)
        return [self.given(rank * count + place, dtype, shape) for place, (dtype, shape) in enumerate(self.layout)]

    @cached_property
    def _results(self) -> list[Array]:
        if self.name == "broadcast_many":
            return self._given(self.root)
        return [reduced(self.op, list(terms)) for terms in zip(*map(self._given, range(self.place.size)), strict=True)]

    def due(self, rank: int) -> Any:
        """Return the list of results."""
        return self._results

    def start(self, own: Own, rank: int) -> Any:
        """Make the call."""
        xs: list[Any] | None = None
        if self.name == "all_reduce_many" or rank == self.root or own.draw.random() < 0.5:
            xs = [own.input(array) for array in self._given(rank)]
        out = own.outputs(self._results, xs)
        if self.name == "all_reduce_many":
            return own.call("all_reduce_many", xs, self.op, out=out)
        return own.call("broadcast_many", xs, self.root, out=out)


@dataclass(eq=False)
class Barrier(Operation):
    """``barrier``."""

    @classmethod
    def drawn(cls, draw: random.Random, seed: int, number: int, place: Place) -> Barrier:
        """Draw one."""
        return cls(seed, number, place)

    def due(self, rank: int) -> Any:
        """Return None."""
        return None

    def start(self, own: Own, rank: int) -> Any:
        """Make the call."""
        return own.call("barrier")


Drawer = Callable[[random.Random, int, int, Place], Operation]
COLLECTIVES: Final[tuple[tuple[Drawer, int], ...]] = (
    (Reduction.drawn, 12),
    (Broadcast.drawn, 6),
    (Gathering.drawn, 9),
    (Scatter.drawn, 6),
    (AllToAll.drawn, 6),
    (Many.drawn, 5),
    (Barrier.drawn, 2),
)
"""How to draw a collective, and how often."""
