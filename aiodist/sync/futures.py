"""A value that one thread sets and another gets."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from aiodist.config import DEFAULT_TIMEOUT, Settings
from aiodist.errors import NotReadyError
from aiodist.ops.checks import check_timeout

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

    def set(self, value: Any, timeout: float | None = None) -> None:
        """Give the value.

        Args:
            value: An array.
            timeout: Seconds to wait, with `ack`, until somebody has got it; None for AIODIST_TIMEOUT (300 unless set).

        Raises:
            TypeError, ValueError: `timeout` is no finite positive number; the value was not taken.
            RuntimeError: it was given before.
            TimeoutError: nobody got it in time; it is there all the same.
        """
        seconds = _seconds(timeout)
        self._settle(value, None)
        if self._taken is not None and not self._taken.wait(seconds):
            raise TimeoutError(f"nobody got the value within {seconds:g} s")

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the value and return it.

        Args:
            timeout: Seconds to wait; None for AIODIST_TIMEOUT (300 unless set).

        Raises:
            TypeError, ValueError: `timeout` is no finite positive number.
            TimeoutError: the value did not come in time.
            BaseException: what failed in its place.
        """
        seconds = _seconds(timeout)
        if not self._ready.wait(seconds):
            raise TimeoutError(f"the value was not set within {seconds:g} s")
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


def _seconds(timeout: float | None) -> float:
    seconds = check_timeout(timeout) or Settings.from_env().timeout or DEFAULT_TIMEOUT
    return min(seconds, threading.TIMEOUT_MAX)
