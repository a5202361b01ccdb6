"""A value that one thread sets and another gets."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from aiodist.config import DEFAULT_TIMEOUT
from aiodist.errors import NotReadyError

__all__ = ["TensorFuture"]


class TensorFuture:
    """An array that is not there yet. For what a call on a group returns there is `aiodist.TensorFuture`.

    Args:
        ack: Whether `set` blocks until somebody has got the value.
    """

    def __init__(self, ack: bool = True) -> None:
        self._ready = threading.Event()
        self._taken = threading.Event() if ack else None
        self._lock = threading.Lock()
        self._value: Any = None
        self._error: BaseException | None = None

    def set(self, value: Any, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Give the value.

        Args:
            value: An array.
            timeout: Seconds to wait, with `ack`, until somebody has got it.

        Raises:
            RuntimeError: it was given before.
            TimeoutError: nobody got it in time; it is there all the same.
        """
        self._settle(value, None)
        if self._taken is not None and not self._taken.wait(timeout):
            raise TimeoutError(f"nobody got the value within {timeout:g} s")

    def get(self, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """Wait for the value and return it.

        Raises:
            TimeoutError: it did not come within `timeout` seconds.
            BaseException: what failed in its place.
        """
        if not self._ready.wait(timeout):
            raise TimeoutError(f"the value was not set within {timeout:g} s")
        if self._taken is not None:
            self._taken.set()
        if self._error is not None:
            raise self._error
        return self._value

    def device(self) -> str:
        """Return the device of the array, such as ``cpu``. Raises `NotReadyError` before it is there, as the following do."""
        return str(getattr(self._look(), "device", "cpu"))

    def dtype(self) -> Any:
        """Return its element type."""
        return self._look().dtype

    def numpy(self) -> np.ndarray:
        """Return it as numpy's."""
        return np.asarray(self._look())

    def shape(self) -> tuple[int, ...]:
        """Return its shape."""
        return tuple(self._look().shape)

    def _settle(self, value: Any, error: BaseException | None) -> None:
        with self._lock:
            if self._ready.is_set():
                raise RuntimeError("this future has a value already")
            self._value, self._error = value, error
            self._ready.set()

    def _look(self) -> Any:
        if not self._ready.is_set():
            raise NotReadyError("this future has no value yet: get() waits for it")
        if self._error is not None:
            raise self._error
        return self._value
