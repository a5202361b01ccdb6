"""The collectives as functions that block the calling thread.

Each is one call on an async `aiodist.Group` and a wait for its result: order, arrays, numbers and errors are those of that call. Rooted
calls have the group's rank 0 as their root. `group` is a `Group` of this package or of `aiodist`; `device` is where the original would
have computed: ``""`` or ``"cpu…"``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiodist.errors import MismatchError
from aiodist.group import Group as AsyncGroup
from aiodist.ops.arrays import kind_of
from aiodist.sync.group import WORLD, AnyGroup, as_async

__all__ = [
    "all_gather",
    "all_reduce_max",
    "all_reduce_min",
    "all_reduce_sum",
    "all_to_all",
    "broadcast",
    "gather",
    "reduce_scatter_sum",
    "reduce_sum",
    "remote_recv",
    "remote_send",
    "scatter",
]


def all_gather(inp: Any, group: AnyGroup = WORLD, device: str = "") -> Any:
    """Return the arrays of all ranks, joined along the first axis in rank order; see `aiodist.Group.all_gather`."""
    return _async(group, device, "all_gather").all_gather(inp).result()


def all_reduce_max(inp: Any, group: AnyGroup = WORLD, device: str = "") -> Any:
    """Return the largest of each element on all ranks, on every rank; see `aiodist.Group.all_reduce`."""
    return _async(group, device, "all_reduce").all_reduce(inp, "max").result()


def all_reduce_min(inp: Any, group: AnyGroup = WORLD, device: str = "") -> Any:
    """Return the smallest of each element on all ranks, on every rank; see `aiodist.Group.all_reduce`."""
    return _async(group, device, "all_reduce").all_reduce(inp, "min").result()


def all_reduce_sum(inp: Any, group: AnyGroup = WORLD, device: str = "") -> Any:
    """Return the sum of the arrays of all ranks, on every rank; see `aiodist.Group.all_reduce`."""
    return _async(group, device, "all_reduce").all_reduce(inp).result()


def all_to_all(inp: Any, group: AnyGroup = WORLD, device: str = "") -> Any:
    """Return on rank r the r-th of equal parts of each rank's array, joined along the first axis; see `aiodist.Group.all_to_all`."""
    return _async(group, device, "all_to_all").all_to_all(inp).result()


def broadcast(inp: Any, group: AnyGroup = WORLD, device: str = "") -> Any:
    """Return rank 0's array on every rank.

    The others give None, or an array of the shape and dtype to expect; see `aiodist.Group.broadcast`.
    """
    return _async(group, device, "broadcast").broadcast(inp).result()


def gather(inp: Any, group: AnyGroup = WORLD, device: str = "") -> Any:
    """Return on rank 0 the arrays of all ranks, joined along the first axis, elsewhere None; see `aiodist.Group.gather`."""
    return _async(group, device, "gather").gather(inp).result()


def reduce_scatter_sum(inp: Any, group: AnyGroup = WORLD, device: str = "") -> Any:
    """Return on rank r the r-th of equal parts, along the first axis, of the sum; see `aiodist.Group.reduce_scatter`."""
    return _async(group, device, "reduce_scatter").reduce_scatter(inp).result()


def reduce_sum(inp: Any, group: AnyGroup = WORLD, device: str = "") -> Any:
    """Return on rank 0 the sum of the arrays of all ranks, elsewhere None; see `aiodist.Group.reduce`."""
    return _async(group, device, "reduce").reduce(inp).result()


def scatter(inp: Any, group: AnyGroup = WORLD, device: str = "") -> Any:
    """Return on rank r the r-th of equal parts of rank 0's array along the first axis.

    The others give None, or an array of the shape and dtype to expect of the whole; see `aiodist.Group.scatter`.
    """
    return _async(group, device, "scatter").scatter(inp).result()


def remote_send(inp: Any, dest_rank: int) -> Any:
    """Send an array to a rank of the world, which calls `remote_recv`.

    Blocks until `inp` may be changed: for a moment, or until it is received where more than 256 MiB wait to be; see `aiodist.Group.send`.

    Args:
        inp: The array.
        dest_rank: World rank of the receiver; oneself works.

    Returns:
        `inp`.

    Raises:
        TypeError, ValueError: an argument is wrong; nothing was sent.
        NotInitializedError: there is no world.
    """
    as_async(WORLD).send(inp, dest_rank).result()
    return inp


def remote_recv(src_rank: int, shape: Sequence[int], dtype: Any, device: str | None = None, inp: Any = None) -> Any:
    """Receive an array from a rank of the world, which calls `remote_send`.

    Args:
        src_rank: World rank of the sender.
        shape: The shape that is expected.
        dtype: The element type that is expected.
        device: None, ``""`` or ``"cpu…"``.
        inp: An array of the kind that the result is to have, such as a torch tensor; None for numpy's.

    Returns:
        The array.

    Raises:
        TypeError, ValueError: an argument is wrong; no message was taken.
        MismatchError: what came has another shape or dtype. It is lost, the group stays usable.
        NotInitializedError: there is no world.
    """
    if device:
        _check_device(device)
    expected = _expected(shape, dtype)
    kind = None if inp is None else kind_of(inp)
    world = as_async(WORLD)
    got: np.ndarray = world.recv(src_rank).result()
    if (got.shape, got.dtype) != expected:
        raise MismatchError(
            f"rank {world.rank} expected {expected[1]} {expected[0]} from rank {src_rank}, and got {got.dtype} {got.shape}",
            group=world.name,
            rank=world.rank,
            collective="recv",
            dtype=expected[1].name,
            shape=expected[0],
            ranks=(src_rank,),
        )
    return got if kind is None else kind.wrap(got)


def _expected(shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read what a receiver expects before it takes a message, which is lost to it afterwards."""
    try:
        extents = tuple(map(operator.index, shape))
    except TypeError:
        raise TypeError(f"shape must be a sequence of whole numbers, not {str(shape)[:100]}") from None
    if any(extent < 0 for extent in extents):
        raise ValueError(f"shape must have no negative extent: {extents}")
    element = None if dtype is None else np.dtype(dtype)  # numpy takes None for float64
    if element is None or element.hasobject:
        raise TypeError(f"dtype must be the type of numbers or other plain elements, not {element}")
    return extents, element.newbyteorder("=")


def _async(group: AnyGroup, device: str, collective: str) -> AsyncGroup:
    if device:
        _check_device(device, collective, group)
    return as_async(group)


def _check_device(device: Any, collective: str | None = None, group: AnyGroup = WORLD) -> None:
    """Refuse a device that the world does not compute on; a collective then counts as refused, so that no peer waits for it."""
    if not isinstance(device, str):
        error: Exception = TypeError(f"device must be a string, not {type(device).__name__}")
    elif not device.startswith("cpu"):
        error = ValueError(f"device {device!r} is not one of this world, which is on the CPU: use '' or 'cpu'")
    else:
        return
    if collective is not None:
        as_async(group)._backend.refuse(collective, f"{type(error).__name__}: {error}")
    raise error
