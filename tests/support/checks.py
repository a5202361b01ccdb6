"""Small helpers of the tests' rank functions."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

import aiodist
from support.oracle import assert_same


async def error_of(call: Callable[[], Awaitable[Any]] | Awaitable[Any]) -> Exception:
    """Make a call, or take one that was made, await it, and return what was raised by the one or the other.

    Raises:
        AssertionError: nothing was raised.
    """
    try:
        value = await (call() if callable(call) else call)
    except Exception as error:
        return error
    raise AssertionError(f"nothing was raised; the value is {value!r}")


def here(offset: int = 0) -> str:
    """Return the caller's "file:line", `offset` lines further down."""
    frame = inspect.currentframe()
    caller = frame.f_back if frame is not None else None
    if caller is None:
        raise RuntimeError("no caller")
    return f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno + offset}"


async def assert_usable(group: aiodist.Group) -> None:
    """Fail unless the group still works: small and large, in step."""
    for count in (1, 50_000):
        x = np.arange(count, dtype=np.int64) * (group.rank + 1)
        total = await group.all_reduce(x, timeout=20)
        assert_same(total, np.arange(count, dtype=np.int64) * (group.size * (group.size + 1) // 2))


def ramp(shape: tuple[int, ...], rank: int, dtype: str = "f8") -> np.ndarray[Any, Any]:
    """Return an array in which every element of every rank differs."""
    return (np.arange(int(np.prod(shape))).reshape(shape) + 1000 * rank + 1).astype(dtype)
