"""Blocking in a thread whose event loop runs."""

from __future__ import annotations

import copy
import warnings
from typing import Final, TypeVar

from aiodist._core import TensorFuture
from aiodist.errors import CollectiveTimeoutError
from aiodist.group import Group

__all__ = ["wait"]

T = TypeVar("T")

_PATIENCE_SECONDS: Final = 3.0


def wait(future: TensorFuture[T], group: Group, collective: str) -> T:
    """Return the result of a call, blocking this thread and its running event loop.

    Where other ranks of the group are in this process, perhaps in that very loop, a warning and the error say what does not block it.
    """
    if group.size == 1 or not group.in_process:
        return future.result()
    advice = (
        f"{collective} of group {group.name!r} blocks an event loop of the process that other ranks of the group are in: if they run in "
        f"that loop, they can never come; `await group.{collective}(...)` there, or block in a thread by asyncio.to_thread"
    )
    try:
        try:
            return future.result(_PATIENCE_SECONDS)
        except TimeoutError:
            if future.done():
                raise
        warnings.warn(advice, RuntimeWarning, stacklevel=4)
        return future.result()
    except CollectiveTimeoutError as error:
        raise _explained(error, advice) from None


def _explained(error: CollectiveTimeoutError, advice: str) -> CollectiveTimeoutError:
    explained = copy.copy(error)
    explained.args = (f"{error}\n  {advice}",)
    return explained
