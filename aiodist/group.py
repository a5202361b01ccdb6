"""Groups: members in an order, and the collectives between them."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Final

import numpy as np

from aiodist import _core
from aiodist._core import TensorFuture
from aiodist.backends.host import HostBackend
from aiodist.errors import AiodistError
from aiodist.ops import movement, reductions
from aiodist.types import ReduceOp

__all__ = ["Group"]

# How long a closing group waits for its calls in flight: longer than any call that peers have joined takes to end.
_DRAIN_SECONDS: Final = 10.0


class Group(_core.GroupCore):
    """A rank's membership of a group: what `aiodist.init` and `aiodist.local_world` give.

    Calls are matched by the order in which each rank makes them. Every collective is a plain function: it takes its place and starts at
    once, never blocks on a peer, and returns a `TensorFuture`. Awaiting that any number of times gives the result or raises; cancelling an
    await leaves the collective running, since peers are in it.

    Attributes:
        name: Name of the group.
        rank: This rank in the group.
        size: Number of members.
        ranks: The members' world ranks, in the group's order.
        timeout: Seconds that a call waits for its peers unless it says otherwise.
        closed: True once this member closed the group.
    """

    def __init__(
        self,
        name: str,
        id: int,
        rank: int,
        tuning: _core.Tuning,
        offset: int,
        members: list[tuple[_core.Process, int]],
        timeout: float,
        *,
        ranks: Sequence[int] | None = None,
        on_close: Callable[[str | None], Awaitable[None]] | None = None,
        drain_seconds: float = _DRAIN_SECONDS,
    ) -> None:
        super().__init__(name, id, rank, tuning, offset, members, timeout)
        self._ranks = tuple(range(len(members))) if ranks is None else tuple(ranks)
        self._on_close = on_close
        self._drain_seconds = drain_seconds
        self._reason: str | None = None

    def __repr__(self) -> str:
        return f"<Group {self.name!r}: rank {self.rank} of {self.size}>"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' world ranks, in the group's order."""
        return self._ranks

    @property
    def _backend(self) -> HostBackend:
        # Made when asked for: kept, it would be a reference cycle, and a dropped group would not be noticed at once.
        return HostBackend(self)

    def _all_reduce(self, x: Any, op: Any, out: Any, timeout: Any) -> TensorFuture[Any]:
        # What all_reduce calls for everything but plain arrays.
        return reductions.all_reduce(self._backend, x, op, out, timeout)

    def reduce_scatter(
        self, x: Any, op: ReduceOp | str = "sum", axis: int = 0, *, out: np.ndarray | None = None, timeout: float | None = None
    ) -> TensorFuture[Any]:
        """Combine the arrays of all ranks and give each rank its share.

        With y = op over r of x_r, rank r ends with the r-th of `size` equal parts of y along `axis`.

        Args:
            x: An array of the same shape and dtype on every rank; its extent along `axis` must be a multiple of `size`.
            op: A `ReduceOp` or its name.
            axis: The axis to divide.
            out: Array for the result, separate from x.
            timeout: Seconds from now until the call fails; None is the group's.

        Returns:
            A `TensorFuture` of an array like x, but `size` times shorter along `axis`.

        Raises:
            TypeError, ValueError: an argument is wrong; the peers of the call get `PeerRefusedError`.
        """
        return reductions.reduce_scatter(self._backend, self.size, x, op, axis, out, timeout)

    def broadcast(self, x: Any, root: int = 0, *, out: np.ndarray | None = None, timeout: float | None = None) -> TensorFuture[Any]:
        """Give every rank the root's array.

        Every rank ends with a copy of the root's x. Shape and dtype travel with it.

        Args:
            x: The array on the root. Elsewhere None, or an array of the shape and dtype to expect (its values are not read).
            root: Group rank whose array is given.
            out: Array for the result; on the root `out is x` spares the copy.
            timeout: Seconds from now until the call fails; None is the group's.

        Returns:
            A `TensorFuture` of an array like the root's x.

        Raises:
            TypeError, ValueError: an argument is wrong; the peers of the call get `PeerRefusedError`.
        """
        return movement.broadcast(self._backend, self.rank, self.size, x, root, out, timeout)

    def all_gather(self, x: Any, axis: int = 0, *, out: np.ndarray | None = None, timeout: float | None = None) -> TensorFuture[Any]:
        """Give every rank the arrays of all ranks, joined along `axis` in rank order.

        Args:
            x: An array of the same shape and dtype on every rank; 0-dimensional ones count as of shape (1,).
            axis: The axis to join along.
            out: Array for the result; x may be this rank's part of it.
            timeout: Seconds from now until the call fails; None is the group's.

        Returns:
            A `TensorFuture` of an array like x, but `size` times longer along `axis`.

        Raises:
            TypeError, ValueError: an argument is wrong; the peers of the call get `PeerRefusedError`.
        """
        return movement.all_gather(self._backend, self.rank, self.size, x, axis, out, timeout)

    def barrier(self, *, timeout: float | None = None) -> TensorFuture[None]:
        """Resolve once every rank has called it.

        Args:
            timeout: Seconds from now until the call fails, naming the ranks that are missing; None is the group's.

        Returns:
            A `TensorFuture` of None.
        """
        return movement.barrier(self._backend, timeout)

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32) -> np.ndarray:
        """Return a new array in memory that the peers read in place, so that collectives on it are not staged.

        Local: no other rank need do the same. The content is arbitrary. The array is an ordinary one that outlives the group, but for one
        thing: a forked child shares its memory, where it would have its own copy of another.

        Args:
            shape: Its shape.
            dtype: Its element type.

        Raises:
            MemoryError: the machine or its cgroup has not that much memory left.
        """
        extents = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        element = np.dtype(dtype)
        if element.hasobject:
            raise TypeError(f"dtype {element} holds Python objects: no pointer may leave the process")
        if any(extent < 0 for extent in extents):
            raise ValueError(f"shape {extents} has a negative extent")
        nbytes = math.prod(extents) * element.itemsize
        array: np.ndarray = _core.shared_bytes(max(nbytes, 1))[:nbytes].view(element).reshape(extents)
        return array

    def abort(self, reason: str) -> None:
        """Stop everything on the group, here and on the peers: calls in flight and later ones fail with `reason`.

        Args:
            reason: What the errors say.
        """
        if not isinstance(reason, str):
            raise TypeError(f"reason must be a string, not {type(reason).__name__}")
        self._abort(reason)

    async def aclose(self) -> None:
        """Wait for the calls in flight, then leave the group; afterwards its calls raise `GroupClosedError`.

        Bounded: calls that peers do not join within ten seconds fail. Prompt on a broken group. Closing twice does nothing.
        """
        if self.closed:
            return
        try:
            with contextlib.suppress(TimeoutError, AiodistError):
                async with asyncio.timeout(min(self.timeout, self._drain_seconds)):
                    await self._drained()
        finally:  # also where the waiting is cancelled: a group is never left half closed
            self._close()
            on_close, self._on_close = self._on_close, None
            if on_close is not None:
                await on_close(self._reason)

    async def __aenter__(self) -> Group:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None and not self.closed:
            self._reason = f"{type(error).__name__}: {error}"
            self.abort(f"rank {self.rank} left with {self._reason}")
        await self.aclose()
