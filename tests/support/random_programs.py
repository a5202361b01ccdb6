"""Random programs: what P ranks do on groups and channels, drawn from a seed, and the legal way that each rank goes through it.

Every rank draws the same program, so only the seed travels. In it operations are numbered; on one group or channel every rank issues them
in that order. Between groups and channels, and for what stands outside their order, each rank draws an order of its own. That can not
deadlock: a rank waits for an operation only once it has issued all that come before whatever completes that operation.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Awaitable, Hashable
from dataclasses import dataclass
from typing import Any, Final

from support.random_arrays import Own
from support.random_collectives import COLLECTIVES, Operation, Place
from support.random_exchange import EXCHANGES, Recv, Send

LARGEST: Final = 6
"""Most ranks of a program."""
WAYS: Final = ("await", "await", "gather", "tasks", "timeout", "cancel", "two waiters", "twice")
"""How a rank may wait for operations that it has issued."""
_MOST_PLACES: Final = 7
_DROPPED: Final = 0.04


@dataclass(eq=False)
class Making(Operation):
    """``new_group``, ``split`` or ``channel`` on a place; awaiting it gives the group or None.

    Attributes:
        way: Name of the method.
        makes: The places that come of it.
        callers: World ranks that call.
        arguments: Of each rank of the place.
    """

    way: str
    makes: tuple[Place, ...]
    callers: tuple[int, ...]
    arguments: tuple[dict[str, Any], ...]
    steady = True

    @property
    def members(self) -> tuple[int, ...]:
        """Those that call."""
        return self.callers

    @property
    def order(self) -> Hashable:
        """A split is a collective; the others are found by their names, which for a group is its list and how often it was made."""
        if self.way == "split":
            return self.place.number
        return None if self.way == "channel" else (self.place.number, self.makes[0].ranks)

    def start(self, own: Own, rank: int) -> Awaitable[Any]:
        """Make the call."""
        awaitable: Awaitable[Any] = getattr(own.group, self.way)(**self.arguments[rank])
        return awaitable

    def due(self, rank: int) -> Place | None:
        """Return the place that the caller becomes a member of."""
        world_rank = self.place.ranks[rank]
        return next((place for place in self.makes if world_rank in place.ranks), None)


@dataclass(frozen=True)
class Program:
    """What all ranks of a program agree on."""

    seed: int
    places: tuple[Place, ...]
    operations: tuple[Operation, ...]

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return self.places[0].size

    def __str__(self) -> str:
        return "\n".join(f"{operation.number:3} {operation}" for operation in self.operations)


def size_of(seed: int) -> int:
    """Return how many ranks the program of `seed` has; consecutive seeds go through all numbers."""
    return 1 + seed % LARGEST


def draw_program(seed: int) -> Program:
    """Return the program of `seed`."""
    return _Drawing(seed).program()


class _Drawing:
    """A program that is being drawn."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = random.Random(f"program {seed}")
        self.places = [Place(0, tuple(range(size_of(seed))), "world", -1)]
        self.operations: list[Operation] = []
        self._count = self.draw.randint(5, 40)
        self._owed: list[Operation] = []
        self._sent_first: dict[Hashable, bool] = {}

    def program(self) -> Program:
        """Draw operations until there are enough."""
        draw = self.draw
        while (left := self._count - len(self.operations) - len(self._owed)) > 0:
            if self._owed and draw.random() < 0.4:
                self._add(self._owed.pop(0))
            elif len(self.places) < _MOST_PLACES and draw.random() < 0.15:
                self._make()
            else:
                self._step(left)
        for operation in self._owed:
            self._add(operation)
        return Program(self.seed, tuple(self.places), tuple(self.operations))

    def _add(self, operation: Operation) -> None:
        operation.number = len(self.operations)
        self.operations.append(operation)

    def _step(self, left: int) -> None:
        makers, weights = zip(*COLLECTIVES, *EXCHANGES, strict=True)
        maker = self.draw.choices(makers, weights)[0]
        operation = maker(self.draw, self.seed, len(self.operations), self.draw.choice(self.places))
        if not isinstance(operation, Send):
            self._add(operation)
        elif left > 1:  # room for both of its sides
            self._message(operation)

    def _message(self, send: Send) -> None:
        receive = Recv(send.seed, 0, send.place, send.source, send.target, send.tag, send.dtype, send.shape, send)
        # Always the same side first on one route: so both sides meet its messages in one order.
        sides = (send, receive) if self._sent_first.setdefault(send.route, self.draw.random() < 0.5) else (receive, send)
        self._add(sides[0])
        self._owed.append(sides[1])

    def _make(self) -> None:
        draw, parent, number = self.draw, self.draw.choice(self.places), len(self.operations)
        way = draw.choice(("new_group", "new_group", "split", "channel", "channel"))
        text = f"{way} on {parent.number} by {number}"
        if way == "split":
            colors = [draw.choice((None, 0, 1, 1000)) for _ in parent.ranks]
            keys = [draw.randint(-2, 2) for _ in parent.ranks]
            arguments: list[dict[str, Any]] = [{"color": color, "key": key} for color, key in zip(colors, keys, strict=True)]
            parts = [
                [parent.ranks[rank] for rank in sorted(range(parent.size), key=keys.__getitem__) if colors[rank] == color]
                for color in dict.fromkeys(colors)
                if color is not None
            ]
            callers = list(parent.ranks)
        elif way == "channel":
            arguments = [{"name": f"channel {self.seed}-{number}"}] * parent.size
            parts = [list(parent.ranks)]
            callers = parts[0]
        else:
            ranks = draw.sample(range(parent.size), draw.randint(1, parent.size))
            name = f"group {self.seed}-{number}" if draw.random() < 0.3 else None
            arguments = [{"ranks": ranks, "name": name}] * parent.size
            parts = [[parent.ranks[rank] for rank in ranks]]
            callers = [rank for rank in parent.ranks if rank in parts[0] or draw.random() < 0.5]
        made = [Place(len(self.places) + at, tuple(part), text, number) for at, part in enumerate(parts)]
        self.places += made
        self._add(Making(self.seed, number, parent, way, tuple(made), tuple(callers), tuple(arguments)))


@dataclass(frozen=True)
class Issue:
    """Make the call of an operation; one that is `dropped` is never waited for."""

    operation: Operation
    dropped: bool


@dataclass(frozen=True)
class Wait:
    """Wait for operations, one way or another."""

    operations: tuple[Operation, ...]
    way: str


@dataclass(frozen=True)
class Pause:
    """Leave the loop to others."""

    seconds: float


Step = Issue | Wait | Pause


def draw_script(program: Program, rank: int) -> list[list[Step]]:
    """Return how a rank goes through a program: one list of steps, or one for each of its places, to be done side by side."""
    draw = random.Random(f"script {program.seed} {rank}")
    own = [operation for operation in program.operations if rank in operation.members]
    if draw.random() < 0.6:
        return [_lane(draw, own)]
    numbers = dict.fromkeys(operation.place.number for operation in own)
    return [_lane(draw, [operation for operation in own if operation.place.number == number]) for number in numbers]


def _lane(draw: random.Random, operations: list[Operation]) -> list[Step]:
    order = _reordered(draw, operations, draw.choice((1, 3, 8, 100)))
    eagerness, haste = draw.choice((0.05, 0.3, 1.0)), draw.choice((0.0, 0.0, 0.1, 0.4))
    steps: list[Step] = []
    open_: list[Operation] = []
    for place, operation in enumerate(order):
        if draw.random() < haste:
            steps.append(Pause(draw.choice((0.0, 0.0005, 0.001, 0.003))))
        dropped = not operation.steady and draw.random() < _DROPPED
        steps.append(Issue(operation, dropped))
        if not dropped:
            open_.append(operation)
        if draw.random() < eagerness:
            first = min((later.number for later in order[place + 1 :]), default=sys.maxsize)
            steps += _waits(draw, open_, [one for one in open_ if one.alone or one.settled < first])
    return steps + _waits(draw, open_, list(open_), all_=True)


def _waits(draw: random.Random, open_: list[Operation], allowed: list[Operation], all_: bool = False) -> list[Step]:
    """Return steps that wait for some of the allowed operations, and take those off the open ones."""
    steps: list[Step] = []
    draw.shuffle(allowed)
    keep = 0 if all_ else draw.choice((0, 0, len(allowed) // 2))
    while len(allowed) > keep:
        together = [allowed.pop() for _ in range(min(len(allowed), draw.choice((1, 1, 2, 5))))]
        steps.append(Wait(tuple(together), draw.choice(WAYS)))
        for operation in together:
            open_.remove(operation)
    return steps


def _reordered(draw: random.Random, operations: list[Operation], most: int) -> list[Operation]:
    """Return the operations in another legal order; none moves further than its window of up to `most`."""
    order: list[Operation] = []
    while len(order) < len(operations):
        window = operations[len(order) : len(order) + draw.randint(1, most)]
        while window:
            order.append(window.pop(draw.choice(_ready(window))))
    return order


def _ready(window: list[Operation]) -> list[int]:
    """Return which may come first: those that no other must precede. The first always may."""
    ready, met = [], set()
    for at, operation in enumerate(window):
        # To use a place means to wait for what made it; so everything up to that must have been issued.
        waits = window[0].number <= operation.place.made
        if not waits and (operation.order is None or operation.order not in met):
            ready.append(at)
        met.add(operation.order)
    return ready
