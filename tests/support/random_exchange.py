"""What else random programs do: messages, objects, refused calls, and the making of groups and channels."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from aiodist import CollectiveTimeoutError, PeerRefusedError
from support.oracle import DType
from support.random_arrays import MOVABLE, Own, Raises, Shape, draw_shape
from support.random_collectives import Drawer, Operation, Place

TAGS: Final = (0, 0, 1, 7, 2**63 - 1)
_UNUSED_TAG: Final = 2**40
"""From here on: tags of one operation alone."""


@dataclass(eq=False)
class Message(Operation):
    """One message between two members, or of one to itself. Each side of it is an operation of its own; see `Send` and `Recv`."""

    source: int
    target: int
    tag: int
    dtype: DType
    shape: Shape

    @property
    def route(self) -> Hashable:
        """What it shares with the messages that it may not overtake."""
        return (self.place.number, self.source, self.target, self.tag)


@dataclass(eq=False)
class Send(Message):
    """``send``: a message as long as these is buffered, so that it ends by itself."""

    alone = True

    @classmethod
    def drawn(cls, draw: random.Random, seed: int, number: int, place: Place) -> Send:
        """Draw one."""
        source, target, dtype = draw.randrange(place.size), draw.randrange(place.size), draw.choice(MOVABLE)
        return cls(seed, number, place, source, target, draw.choice(TAGS), dtype, draw_shape(draw, dtype, place.size))

    @property
    def members(self) -> tuple[int, ...]:
        """The source."""
        return (self.place.ranks[self.source],)

    @property
    def order(self) -> Hashable:
        """The sends of one route."""
        return ("send", self.route)

    def due(self, rank: int) -> Any:
        """Return None."""
        return None

    def start(self, own: Own, rank: int) -> Any:
        """Make the call."""
        return own.call("send", own.input(self.given(0, self.dtype, self.shape)), self.target, self.tag)


@dataclass(eq=False)
class Recv(Message):
    """``recv`` of what a `Send` sends, which may come later in the program."""

    send: Send
    steady = True

    @property
    def members(self) -> tuple[int, ...]:
        """The target."""
        return (self.place.ranks[self.target],)

    @property
    def order(self) -> Hashable:
        """The receives of one route."""
        return ("recv", self.route)

    @property
    def settled(self) -> int:
        """With the later one of the two."""
        return max(self.number, self.send.number)

    def due(self, rank: int) -> Any:
        """Return what was sent."""
        return self.send.given(0, self.dtype, self.shape)

    def start(self, own: Own, rank: int) -> Any:
        """Make the call."""
        return own.call("recv", self.source, self.tag, out=own.output(self.shape, self.dtype))


@dataclass(eq=False)
class Withdrawal(Operation):
    """A receive that is given up before its message is sent; the next receive gets the message."""

    source: int
    target: int
    way: str
    dtype: DType
    shape: Shape
    steady = True

    @classmethod
    def drawn(cls, draw: random.Random, seed: int, number: int, place: Place) -> Withdrawal:
        """Draw one."""
        dtype, way = draw.choice(MOVABLE), draw.choice(("cancel", "timeout", "deadline"))
        return cls(
            seed, number, place, draw.randrange(place.size), draw.randrange(place.size), way, dtype, draw_shape(draw, dtype, place.size)
        )

    @property
    def members(self) -> tuple[int, ...]:
        """The two sides of the message."""
        return tuple(dict.fromkeys((self.place.ranks[self.source], self.place.ranks[self.target])))

    @property
    def order(self) -> Hashable:
        """Free: the tag is not used again."""
        return None

    def due(self, rank: int) -> Any:
        """Return the message."""
        return self.given(0, self.dtype, self.shape) if rank == self.target else None

    def start(self, own: Own, rank: int) -> Any:
        """Begin a task that does all of it."""
        return asyncio.ensure_future(self._receiver(own) if rank == self.target else self._sender(own))

    async def _sender(self, own: Own) -> None:
        tag = _UNUSED_TAG + self.number
        await own.group.recv(self.target, tag)  # once it is there the other receive is no more
        await own.group.send(own.input(self.given(0, self.dtype, self.shape)), self.target, tag)

    async def _receiver(self, own: Own) -> Any:
        tag = _UNUSED_TAG + self.number
        await self._give_up(own.group, tag, np.full(9, 7.5))
        if self.source == self.target:
            await own.group.send(self.due(self.target), self.target, tag)
        else:
            await own.group.send(np.zeros(1), self.source, tag)
        return await own.group.recv(self.source, tag, out=own.output(self.shape, self.dtype))

    async def _give_up(self, group: Any, tag: int, out: Any) -> None:
        withdrawn = group.recv(self.source, tag, out=out, timeout=0.002 if self.way == "deadline" else None)
        if self.way == "deadline":
            kind: type[BaseException] = CollectiveTimeoutError
        elif self.way == "timeout":
            kind = TimeoutError
        else:
            kind = asyncio.CancelledError
        waiter = asyncio.ensure_future(_wait_for(withdrawn, 0.002 if self.way == "timeout" else None))
        await asyncio.sleep(0.001)
        if self.way == "cancel":
            waiter.cancel()
        await asyncio.wait([waiter])  # before there is another waiter, who would keep the receive
        outcomes = await asyncio.gather(waiter, _wait_for(withdrawn, None), return_exceptions=True)
        expected = (kind, asyncio.CancelledError if self.way == "timeout" else kind)
        assert all(map(isinstance, outcomes, expected)), f"the withdrawn receive gave {outcomes!r} where {expected} are due"
        assert (out == 7.5).all(), "the withdrawn receive wrote to its out"


async def _wait_for(future: Any, seconds: float | None) -> Any:
    async with asyncio.timeout(seconds):
        return await future


@dataclass(eq=False)
class Objects(Operation):
    """The forms that move Python objects."""

    name: str
    root: int
    values: tuple[Any, ...]
    pickle: bool

    @classmethod
    def drawn(cls, draw: random.Random, seed: int, number: int, place: Place) -> Objects:
        """Draw one."""
        name = draw.choice(("broadcast_object", "all_gather_object", "gather_object", "scatter_object"))
        pickle = draw.random() < 0.25
        held = [_draw_object(draw, 3) for _ in range(place.size)]
        if pickle:
            held = [(rank, value, complex(rank, number), frozenset({rank, "set"})) for rank, value in enumerate(held)]
        return cls(seed, number, place, name, draw.randrange(place.size), tuple(held), pickle)

    def due(self, rank: int) -> Any:
        """Return what a rank gets."""
        if self.name == "broadcast_object":
            return self.values[self.root]
        if self.name == "scatter_object":
            return self.values[rank]
        return list(self.values) if self.name == "all_gather_object" or rank == self.root else None

    def start(self, own: Own, rank: int) -> Any:
        """Make the call."""
        more: dict[str, Any] = {"pickle": True} if self.pickle else {}
        if self.name == "all_gather_object":
            return own.call(self.name, self.values[rank], **more)
        if self.name == "gather_object":
            return own.call(self.name, self.values[rank], self.root, **more)
        if rank != self.root:
            return own.call(self.name, root=self.root, **more)
        return own.call(self.name, self.values[rank] if self.name == "broadcast_object" else list(self.values), self.root, **more)


def _draw_object(draw: random.Random, depth: int) -> Any:
    kind = draw.choice(("none", "bool", "int", "float", "text", "bytes", "long", "list", "dict") if depth else ("int", "text"))
    if kind in ("list", "dict"):
        items = [_draw_object(draw, depth - 1) for _ in range(draw.randint(0, 4))]
        return items if kind == "list" else {f"key {place}": item for place, item in enumerate(items)}
    makers: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "bool": lambda: draw.random() < 0.5,
        "int": lambda: draw.randint(-(2**63), 2**64 - 1),
        "float": lambda: draw.uniform(-1e9, 1e9),
        "text": lambda: "ü€" * draw.randint(0, 4) + str(draw.random()),
        "bytes": lambda: draw.randbytes(draw.randint(0, 40)),
        "long": lambda: draw.randbytes(draw.randint(5_000, 60_000)),
    }
    return makers[kind]()


@dataclass(frozen=True)
class _Wrong:
    """A call that is refused, and the call that the peers make."""

    wrong: Callable[[Any], Any]
    right: Callable[[Any], Any]
    kinds: tuple[type[Exception], ...] = (ValueError,)


WRONG: Final = {
    "op": _Wrong(lambda g: g.all_reduce(np.ones(3), op="average"), lambda g: g.all_reduce(np.ones(3))),
    "dtype": _Wrong(lambda g: g.all_reduce(np.array([None])), lambda g: g.all_reduce(np.ones(20_000)), (TypeError,)),
    "out": _Wrong(lambda g: g.all_reduce(np.ones(3), out=np.ones(4)), lambda g: g.all_reduce(np.ones(3))),
    "no array": _Wrong(lambda g: g.reduce(None), lambda g: g.reduce(np.ones(3)), (TypeError,)),
    "root": _Wrong(lambda g: g.broadcast(np.ones(3), root=g.size), lambda g: g.broadcast(np.ones(3))),
    "gather root": _Wrong(lambda g: g.gather(np.ones(3), root=-1), lambda g: g.gather(np.ones(3))),
    "axis": _Wrong(lambda g: g.all_gather(np.ones(3), axis=1), lambda g: g.all_gather(np.ones(3))),
    "no axis": _Wrong(lambda g: g.reduce_scatter(np.array(1.0)), lambda g: g.reduce_scatter(np.ones(2 * g.size))),
    "parts": _Wrong(lambda g: g.all_to_all([np.ones(1)] * (g.size + 1)), lambda g: g.all_to_all([np.ones(1)] * g.size)),
    "timeout": _Wrong(lambda g: g.barrier(timeout=-1.0), lambda g: g.barrier()),
    "list": _Wrong(lambda g: g.all_reduce_many([None]), lambda g: g.all_reduce_many([np.ones(3)]), (TypeError,)),
    "object": _Wrong(lambda g: g.all_gather_object(1j), lambda g: g.all_gather_object([1, 2]), (TypeError,)),
    "extent": _Wrong(
        lambda g: g.all_gather(np.ones(3), uneven=True, out=np.ones(3 * g.size + 1)), lambda g: g.all_gather(np.ones(3), uneven=True)
    ),
}
"""By name. The last one is known from the headers alone, so it is the future that raises."""


@dataclass(eq=False)
class Refused(Operation):
    """A call that one rank gets wrong: an error there, `PeerRefusedError` at its peers, and the group goes on."""

    name: str
    culprit: int

    @classmethod
    def drawn(cls, draw: random.Random, seed: int, number: int, place: Place) -> Refused:
        """Draw one."""
        return cls(seed, number, place, draw.choice(list(WRONG)), draw.randrange(place.size))

    def due(self, rank: int) -> Any:
        """Return which error."""
        return Raises(WRONG[self.name].kinds if rank == self.culprit else (PeerRefusedError,))

    def start(self, own: Own, rank: int) -> Any:
        """Make the call."""
        call = WRONG[self.name]
        return call.wrong(own.group) if rank == self.culprit else call.right(own.group)


@dataclass(eq=False)
class Wayward(Operation):
    """A send or receive with wrong arguments: an error of this rank alone."""

    culprit: int
    alone = True

    @classmethod
    def drawn(cls, draw: random.Random, seed: int, number: int, place: Place) -> Wayward:
        """Draw one."""
        return cls(seed, number, place, draw.randrange(place.size))

    @property
    def members(self) -> tuple[int, ...]:
        """The one that calls."""
        return (self.place.ranks[self.culprit],)

    @property
    def order(self) -> Hashable:
        """Free."""
        return None

    def due(self, rank: int) -> Any:
        """Return the error."""
        return Raises((ValueError,))

    def start(self, own: Own, rank: int) -> Any:
        """Make the call."""
        if own.draw.random() < 0.5:
            return own.call("send", np.ones(3), own.draw.choice((-1, self.place.size)))
        return own.call("recv", own.draw.randrange(self.place.size), own.draw.choice((-1, 2**63)))


EXCHANGES: Final[tuple[tuple[Drawer, int], ...]] = (
    (Send.drawn, 10),
    (Withdrawal.drawn, 1),
    (Objects.drawn, 4),
    (Refused.drawn, 2),
    (Wayward.drawn, 1),
)
"""How to draw one of these, and how often; the receive of a send is drawn with it."""
