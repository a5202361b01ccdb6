"""What groups and channels are called, and the arguments that say which group is meant.

A name spells out how its group came to be, in a way that can not be read as another's: ``world[0,2]`` is the group of these ranks of the
world, ``world/left`` one that was given a name, ``world(color=1)`` a part of a split, ``world:eval`` a channel; ``#2`` marks the second
of its kind. Names that are not plain words are quoted.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Iterable, Sequence, Set
from typing import Any, Final

__all__ = ["channel_name", "check_name", "check_ranks", "check_split", "group_name", "ranks_name", "split_name"]

_PLAIN: Final = re.compile(r"[\w.@+-]+\Z")
_GIVEN_NBYTES: Final = 200
# Past this, a name is its beginning and a hash of all of it: the control plane bounds names.
_NBYTES: Final = 512
_KEPT: Final = 160
_INT64: Final = range(-(2**63), 2**63)


def group_name(parent: str, name: str) -> str:
    """Name a group that was given a name."""
    return _bounded(f"{parent}/{_quoted(name)}")


def ranks_name(parent: str, ranks: Sequence[int]) -> str:
    """Name the group of these ranks of its parent, in this order."""
    return _bounded(f"{parent}[{_runs(ranks)}]")


def split_name(parent: str, color: int) -> str:
    """Name one part of a split."""
    return _bounded(f"{parent}(color={color})")


def channel_name(group: str, name: str) -> str:
    """Name a group's channel."""
    return _bounded(f"{group}:{_quoted(name)}")


def check_name(name: Any) -> str:
    """Return the name that a caller gives.

    Raises:
        TypeError: it is no string.
        ValueError: it is empty, or too long.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, not {type(name).__name__}")
    if not 0 < len(name.encode(errors="surrogatepass")) <= _GIVEN_NBYTES:
        raise ValueError(f"name must have 1 to {_GIVEN_NBYTES} bytes, not {len(name.encode(errors='surrogatepass'))}")
    return name


def check_ranks(ranks: Any, size: int) -> tuple[int, ...]:
    """Return different ranks of a group of `size`, in the caller's order.

    Raises:
        TypeError: they are not a sequence of whole numbers.
        ValueError: there are none, one is no rank of the group, or one comes twice.
    """
    if isinstance(ranks, Set) or not isinstance(ranks, Iterable):
        raise TypeError(f"ranks must be a sequence of ranks, which has an order, not {type(ranks).__name__}")
    checked = tuple(_whole("a rank", rank) for rank in ranks)
    if not checked:
        raise ValueError("ranks is empty: a group has at least one member")
    for rank in checked:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not a rank of this group of {size}")
    twice = sorted({rank for rank in checked if checked.count(rank) > 1}) if len(set(checked)) < len(checked) else []
    if twice:
        raise ValueError(f"ranks {list(checked)} name rank {twice[0]} more than once")
    return checked


def check_split(color: Any, key: Any) -> tuple[int, int]:
    """Return color and key as numbers, -1 for no color.

    Raises:
        TypeError: one is no whole number.
        ValueError: the color is negative, or one does not fit into 64 bits.
    """
    number = -1 if color is None else _whole("color", color)
    if color is not None and number < 0:
        raise ValueError(f"color must be None or not negative, not {number}")
    order = _whole("key", key)
    if number not in _INT64 or order not in _INT64:
        raise ValueError("color and key must fit into 64 bits")
    return number, order


def _whole(what: str, value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{what} must be a whole number, not bool")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be a whole number, not {type(value).__name__}") from None


def _quoted(name: str) -> str:
    return name if _PLAIN.match(name) else ascii(name)


def _runs(ranks: Sequence[int]) -> str:
    """Spell 0, 1, 2, 5 as ``0-2,5``."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def _bounded(name: str) -> str:
    if len(name.encode()) <= _NBYTES:
        return name
    return f"{name[:_KEPT]}~{hashlib.sha256(name.encode()).hexdigest()[:24]}"
