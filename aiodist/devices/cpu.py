"""The host as a device: one stream, which is the calling thread itself."""

from __future__ import annotations

from typing import Any

from aiodist._core import TensorFuture
from aiodist.devices.base import Event

__all__ = ["CpuDevice", "CpuEvent", "CpuStream"]


class CpuEvent:
    """The completion of a future whose result lies in host memory."""

    def __init__(self, future: TensorFuture[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        """See `Event.done`."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """See `Event.wait`. A call that failed raises its error."""
        self._future.result(timeout)


class CpuStream:
    """The work of the calling thread, which is in order as it is."""

    def wait_event(self, event: Event) -> None:
        """Block until `event`: a thread's next statement can not be put off in another way."""
        event.wait()


class CpuDevice:
    """The host."""

    @property
    def name(self) -> str:
        """``cpu``."""
        return "cpu"

    def current_stream(self) -> CpuStream:
        """Return the calling thread's stream."""
        return CpuStream()
