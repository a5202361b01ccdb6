"""The collectives of a group, as methods."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, cast

from aiodist import _core
from aiodist._core import TensorFuture
from aiodist.backends.base import COLLECTIVE_CODES
from aiodist.backends.host import HostBackend
from aiodist.ops import exchange, many, movement, objects, reductions
from aiodist.types import ReduceOp

__all__ = ["Collectives"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Method: TypeAlias = Callable[Concatenate["Collectives", _P], TensorFuture[_R]]


def _in_order(collective: str, *, plain: bool = False) -> Callable[[_Method[_P, _R]], _Method[_P, _R]]:
    """Let a call whose arguments do not fit the method's signature take its place all the same, as one that was refused.

    What the method itself finds wrong it refuses itself. With `plain` there is a native form, which serves calls with plain arrays
    without coming here.
    """

    def decorate(method: _Method[_P, _R]) -> _Method[_P, _R]:
        return cast(_Method[_P, _R], functools.update_wrapper(_core.Collective(COLLECTIVE_CODES[collective], method, plain), method))

    return decorate


class Collectives(_core.GroupCore):
    """What the members of a group do together; `Group` adds how groups begin and end.

    Every collective is a plain function: it takes its place in the group's order and starts at once, never blocks on a peer, and returns
    a `TensorFuture`. Awaiting that any number of times gives the result or raises; cancelling an await leaves the collective running,
    since peers are in it. What goes in must not change until the future is done.
    """

    @property
    def _backend(self) -> HostBackend:
        # Made when asked for: kept, it would be a reference cycle, and a dropped group would not be noticed at once.
        return HostBackend(self)

    @_in_order("all_reduce", plain=True)
    def all_reduce(self, x: Any, op: ReduceOp | str = "sum", *, out: Any = None, timeout: float | None = None) -> TensorFuture[Any]:
        """Combine the arrays of all ranks, element by element, in rank order.

        Every rank ends with result[i] = op over r of x_r[i], the same bits on all of them.

        Args:
            x: An array of the same shape and dtype on every rank. It must not change until the future is done.
            op: A `ReduceOp` or its name: sum, prod, min, max, mean, band, bor, bxor.
            out: Array for the result, of x's shape and the result's dtype; `out is x` works in place.
            timeout: Seconds from now until the call fails; None is the group's.

        Returns:
            A `TensorFuture` of an array like x; of float64 where op is mean and x holds integers.

        Raises:
            TypeError, ValueError: an argument is wrong; the peers of the call get `PeerRefusedError`.

        The call is issued at once and never blocks on a peer. Cancelling an await leaves it running.
        """
        return reductions.all_reduce(self._backend, x, op, out, timeout)

    @_in_order("reduce", plain=True)
    def reduce(
        self, x: Any, op: ReduceOp | str = "sum", root: int = 0, *, out: Any = None, timeout: float | None = None
    ) -> TensorFuture[Any]:
        """Combine the arrays of all ranks on one of them.

        The root ends with result[i] = op over r of x_r[i]; the other ranks with None, and their x as it was.

        Args:
            x: An array of the same shape and dtype on every rank.
            op: A `ReduceOp` or its name.
            root: Group rank that gets the result.
            out: Array for the result, of x's shape and the result's dtype; `out is x` works in place. Counts on the root only.
            timeout: Seconds from now until the call fails; None is the group's.

        Returns:
            A `TensorFuture` of an array like x on the root, of None elsewhere.

        Raises:
            TypeError, ValueError: an argument is wrong; the peers of the call get `PeerRefusedError`.
        """
        return reductions.reduce(self._backend, self.rank, self.size, x, op, root, out, timeout)

    @_in_order("reduce_scatter", plain=True)
    def reduce_scatter(
        self, x: Any, op: ReduceOp | str = "sum", axis: int = 0, *, out: Any = None, timeout: float | None = None
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

    @_in_order("all_reduce")
    def all_reduce_many(
        self, xs: Sequence[Any], op: ReduceOp | str = "sum", *, out: Sequence[Any] | None = None, timeout: float | None = None
    ) -> TensorFuture[list[Any]]:
        """Combine lists of arrays, array by array, as one packed operation for each dtype among them.

        Every rank ends with result[k][i] = op over r of xs_r[k][i], the same bits as `all_reduce` of each array alone.

        Args:
            xs: Arrays; their number, shapes and dtypes are the same on every rank.
            op: A `ReduceOp` or its name. `mean` needs inexact arrays here.
            out: As many arrays for the results; `out is xs` works in place.
            timeout: Seconds from now until the call fails; None is the group's.

        Returns:
            A `TensorFuture` of a list of arrays like xs.

        Raises:
            TypeError, ValueError: an argument is wrong; the peers of the call get `PeerRefusedError`.
        """
        return many.all_reduce_many(self._backend, xs, op, out, timeout)

    @_in_order("broadcast", plain=True)
    def broadcast(self, x: Any, root: int = 0, *, out: Any = None, timeout: float | None = None) -> TensorFuture[Any]:
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

    @_in_order("broadcast")
    def broadcast_many(
        self, xs: Sequence[Any] | None, root: int = 0, *, out: Sequence[Any] | None = None, timeout: float | None = None
    ) -> TensorFuture[list[Any]]:
        """Give every rank the root's list of arrays, as one packed operation: what a refresh of weights makes.

        Every rank ends with copies of the root's arrays. Their number, shapes and dtypes travel with them.

        Args:
            xs: The arrays on the root. Elsewhere None, or a list of arrays like those to expect (their values are not read).
            root: Group rank whose arrays are given.
            out: As many arrays for the results, to be filled in place.
            timeout: Seconds from now until the call fails; None is the group's.

        Returns:
            A `TensorFuture` of a list of arrays like the root's. New ones share one block of memory.

        Raises:
            TypeError, ValueError: an argument is wrong; the peers of the call get `PeerRefusedError`.
        """
        return many.broadcast_many(self._backend, self.rank, self.size, xs, root, out, timeout)

    @_in_order("all_gather", plain=True)
    def all_gather(
        self, x: Any, axis: int = 0, uneven: bool = False, *, out: Any = None, timeout: float | None = None
    ) -> TensorFuture[Any]:
        """Give every rank the arrays of all ranks, joined along `axis` in rank order.

        Args:
            x: An array of the same shape and dtype on every rank; 0-dimensional ones count as of shape (1,).
            axis: The axis to join along.
            uneven: The extents along `axis` may differ, and be 0; the same on every rank.
            out: Array for the result; x may be this rank's part of it.
            timeout: Seconds from now until the call fails; None is the group's.

        Returns:
            A `TensorFuture` of an array like x, but as long along `axis` as all of them together.

        Raises:
            TypeError, ValueError: an argument is wrong; the peers of the call get `PeerRefusedError`. Of an uneven call only the peers
                tell how long `out` must be: then the future raises ValueError.
        """
        return movement.all_gather(self._backend, self.rank, self.size, x, axis, uneven, out, timeout)

    @_in_order("gather", plain=True)
    def gather(
        self, x: Any, root: int = 0, axis: int = 0, uneven: bool = False, *, out: Any = None, timeout: float | None = None
    ) -> TensorFuture[Any]:
        """Give one rank the arrays of all ranks, joined along `axis` in rank order.

        Args:
            x: An array of the same shape and dtype on every rank; 0-dimensional ones count as of shape (1,).
            root: Group rank that gets the result.
            axis: The axis to join along.
            uneven: The extents along `axis` may differ, and be 0; the same on every rank.
            out: Array for the result; x may be the root's part of it. Counts on the root only.
            timeout: Seconds from now until the call fails; None is the group's.

        Returns:
            A `TensorFuture` of the joined array on the root, of None elsewhere.

        Raises:
            TypeError, ValueError: an argument is wrong; the peers of the call get `PeerRefusedError`. Of an uneven call only the peers
                tell how long `out` must be: then the future raises ValueError.
        """
        return movement.gather(self._backend, self.rank, self.size, x, root, axis, uneven, out, timeout)

    @_in_order("scatter", plain=True)
    def scatter(self, x: Any, root: int = 0, axis: int = 0, *, out: Any = None, timeout: float | None = None) -> TensorFuture[Any]:
        """Give every rank its share of the root's array.

        Rank r ends with the r-th of `size` equal parts of the root's x along `axis`; where that x is a list, with its r-th array.

        Args:
            x: On the root an array whose extent along `axis` is a multiple of `size`, or a list of `size` arrays of one dtype and any
                shapes. Elsewhere None, or an array of the shape and dtype to expect of the whole (its values are not read).
            root: Group rank whose array is divided.
            axis: The axis to divide; a list knows none.
            out: Array for this rank's share.
            timeout: Seconds from now until the call fails; None is the group's.

        Returns:
            A `TensorFuture` of this rank's share.

        Raises:
            TypeError, ValueError: an argument is wrong; the peers of the call get `PeerRefusedError`.
        """
        return movement.scatter(self._backend, self.rank, self.size, x, root, axis, out, timeout)

    @_in_order("all_to_all", plain=True)
    def all_to_all(self, x: Any, axis: int = 0, *, out: Any = None, timeout: float | None = None) -> TensorFuture[Any]:
        """Give every rank a share of every rank's array.

        Rank r ends with the r-th of `size` equal parts of each rank's x along `axis`, joined along it in rank order. Where the x are lists,
        with a list of their r-th arrays.

        Args:
            x: An array of the same shape and dtype on every rank, its extent along `axis` a multiple of `size`; or, on every rank, a
                list of `size` arrays of one dtype and any shapes, empty ones too.
            axis: The axis to divide and to join along; lists know none.
            out: Array for the result; of a list, `size` arrays.
            timeout: Seconds from now until the call fails; None is the group's.

        Returns:
            A `TensorFuture` of an array like x; of a list, of `size` arrays, which share one block of memory where they are new.

        Raises:
            TypeError, ValueError: an argument is wrong; the peers of the call get `PeerRefusedError`. Of lists only the peers tell the
                shapes that `out` must have: then the future raises ValueError.
        """
        return exchange.all_to_all(self._backend, self.size, x, axis, out, timeout)

    @_in_order("send", plain=True)
    def send(self, x: Any, dst: int, tag: int = 0, *, timeout: float | None = None) -> TensorFuture[None]:
        """Send an array to one rank, which calls `recv`. Stands outside the order of the collectives.

        Messages of one sender, receiver and tag arrive in the order in which they were sent. A message waits in a buffer of this process;
        where more than 256 MiB wait there already, the future is done once its receive has taken it.

        Args:
            x: The array. It may change once the future is done.
            dst: Group rank of the receiver; oneself works.
            tag: Number from 0 on that the receive asks for.
            timeout: Seconds from now until the call fails; None is the group's.

        Returns:
            A `TensorFuture` of None.

        Raises:
            TypeError, ValueError: an argument is wrong; nothing was sent.
        """
        return exchange.send(self._backend, self.size, x, dst, tag, timeout)

    @_in_order("recv", plain=True)
    def recv(self, src: int, tag: int = 0, *, out: Any = None, timeout: float | None = None) -> TensorFuture[Any]:
        """Receive an array from one rank, which calls `send`. Stands outside the order of the collectives.

        A receive that nobody waits for any more (its last await was cancelled, its future dropped) before a message was there is
        withdrawn, and takes none; the same holds for one that times out, which leaves the group usable.

        Args:
            src: Group rank of the sender; oneself works.
            tag: Number from 0 on that the message was sent with.
            out: Array for the message, of its shape and dtype; another one is a `MismatchError`.
            timeout: Seconds from now until the call fails; None is the group's.

        Returns:
            A `TensorFuture` of the array; its shape and dtype travel with it.

        Raises:
            TypeError, ValueError: an argument is wrong; no message was taken.
        """
        return exchange.recv(self._backend, self.size, src, tag, out, timeout)

    @_in_order("barrier", plain=True)
    def barrier(self, *, timeout: float | None = None) -> TensorFuture[None]:
        """Resolve once every rank has called it.

        Args:
            timeout: Seconds from now until the call fails, naming the ranks that are missing; None is the group's.

        Returns:
            A `TensorFuture` of None.
        """
        return movement.barrier(self._backend, timeout)

    @_in_order("broadcast")
    def broadcast_object(
        self, value: Any = None, root: int = 0, *, pickle: bool = False, timeout: float | None = None
    ) -> TensorFuture[Any]:
        """Give every rank the root's object.

        Args:
            value: On the root, what msgpack can express: None, bool, int, float, str, bytes, lists and dicts of them (tuples arrive as
                lists), and the like. Elsewhere ignored.
            root: Group rank whose object is given.
            pickle: Use pickle, which expresses more and lets the sender run code in the receivers; the same on every rank.
            timeout: Seconds from now until the call fails; None is the group's.

        Returns:
            A `TensorFuture` of the object, on the root too of a copy.

        Raises:
            TypeError: the object can not be expressed; the peers of the call get `PeerRefusedError`.
        """
        return objects.broadcast_object(self._backend, self.rank, self.size, value, root, pickle, timeout)

    @_in_order("all_gather")
    def all_gather_object(self, value: Any, *, pickle: bool = False, timeout: float | None = None) -> TensorFuture[list[Any]]:
        """Give every rank the objects of all ranks; see `broadcast_object` for what they can be.

        Returns:
            A `TensorFuture` of a list, in rank order.
        """
        return objects.all_gather_object(self._backend, value, pickle, timeout)

    @_in_order("gather")
    def gather_object(
        self, value: Any, root: int = 0, *, pickle: bool = False, timeout: float | None = None
    ) -> TensorFuture[list[Any] | None]:
        """Give the root the objects of all ranks; see `broadcast_object` for what they can be.

        Returns:
            A `TensorFuture` of a list in rank order on the root, of None elsewhere.
        """
        return objects.gather_object(self._backend, self.rank, self.size, value, root, pickle, timeout)

    @_in_order("scatter")
    def scatter_object(
        self, values: Sequence[Any] | None = None, root: int = 0, *, pickle: bool = False, timeout: float | None = None
    ) -> TensorFuture[Any]:
        """Give every rank its one of the root's objects; see `broadcast_object` for what they can be.

        Args:
            values: `size` objects on the root; elsewhere ignored.
            root: Group rank whose objects are given.
            pickle: See `broadcast_object`.
            timeout: Seconds from now until the call fails; None is the group's.

        Returns:
            A `TensorFuture` of this rank's object.
        """
        return objects.scatter_object(self._backend, self.rank, self.size, values, root, pickle, timeout)
