"""The exceptions aiodist raises.

Wrong arguments are ``TypeError`` or ``ValueError``, wrong use in one process is a ``RuntimeError``, a shortage of memory a
``MemoryError``. What goes wrong between ranks derives from `AiodistError`:

    AiodistError
    ├── NotInitializedError         (also a RuntimeError) no world is open
    ├── NotReadyError               a future has no value yet
    ├── RendezvousError             the world could not be formed, or the control plane failed
    ├── GroupClosedError            the group was closed
    ├── PeerRefusedError            a peer refused the call; the group stays usable
    ├── RankFailedError             a rank that the launcher started ended without an exception to raise
    └── CommunicationError          the group is broken; every later call on it fails at once
        ├── CollectiveTimeoutError  (also a TimeoutError) members did not arrive in time
        ├── PeerLostError           members died or left
        ├── MismatchError           members asked for different things
        └── TransportError          moving the data failed

Each carries fields as well as text, so that a program can act on what a person would read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "AiodistError",
    "CollectiveTimeoutError",
    "CommunicationError",
    "GroupClosedError",
    "MismatchError",
    "NotInitializedError",
    "NotReadyError",
    "PeerLostError",
    "PeerRefusedError",
    "RankFailedError",
    "RendezvousError",
    "TransportError",
]


class AiodistError(Exception):
    """Raised when an operation of aiodist can not give its result.

    Attributes:
        group: Name of the group, or None where no group is concerned.
        rank: The rank of the caller in that group.
        collective: Name of the call, such as ``"all_reduce"``.
        seq: Number of the call in the group's order, from 0.
        dtype: Name of the element type.
        shape: Shape that this rank asked for.
        ranks: Group ranks that the error is about (lost, missing or refusing), in order.
    """

    def __init__(
        self,
        message: str,
        *,
        group: str | None = None,
        rank: int | None = None,
        collective: str | None = None,
        seq: int | None = None,
        dtype: str | None = None,
        shape: tuple[int, ...] | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.group = group
        self.rank = rank
        self.collective = collective
        self.seq = seq
        self.dtype = dtype
        self.shape = shape
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword fields do not survive the default pickling (the launcher sends them between processes).
        return _rebuild, (type(self), str(self), self.__dict__)


def _rebuild(cls: type[AiodistError], message: str, fields: dict[str, Any]) -> AiodistError:
    error = cls(message)
    error.__dict__.update(fields)
    return error


class NotInitializedError(AiodistError, RuntimeError):
    """Raised when a call needs the world and none is open."""


class NotReadyError(AiodistError):
    """Raised when a future is asked for something it does not know yet."""


class RendezvousError(AiodistError):
    """Raised when the ranks of a job can not find each other, or the control plane fails."""


class GroupClosedError(AiodistError):
    """Raised when a group was closed: by its calls that were in flight then or come later, and by what would make groups of it."""


class PeerRefusedError(AiodistError):
    """Raised when a peer's call with the same number was refused; the group stays usable.

    ``ranks`` holds the group ranks that refused, the message their reasons.
    """


class RankFailedError(AiodistError):
    """Raised where a rank that the launcher started was killed, ended its process, or raised what can not be pickled.

    ``ranks`` holds the rank, the message how it ended or its traceback.
    """


class CommunicationError(AiodistError):
    """Raised when the group broke; every later call on it fails at once with the first reason.

    Three things raise one and leave the group as it is: a `recv` that times out, or whose sender has left, before a message was there, and
    a new group or channel that could not be made in time.
    """


class CollectiveTimeoutError(CommunicationError, TimeoutError):
    """Raised when members did not arrive in time; ``ranks`` holds those who are missing."""


class PeerLostError(CommunicationError):
    """Raised when members died or left while they were needed; ``ranks`` holds them."""


class MismatchError(CommunicationError):
    """Raised when members called different things with the same number."""


class TransportError(CommunicationError):
    """Raised when the data could not be moved (memory, sockets, a damaged peer)."""
