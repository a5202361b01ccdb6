"""The contract of a device: what a `TensorFuture` asks of where its array lives.

"The host may read the result" and "a stream is ordered after the result" are two things and two methods: `Event.wait` blocks the calling
thread for the first; `Stream.wait_event` orders a stream for the second and blocks nobody.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Device", "Event", "Stream"]


class Event(Protocol):
    """A moment in the work of a device."""

    def done(self) -> bool:
        """Return True once the moment has come. Never blocks."""
        ...

    def wait(self, timeout: float | None = None) -> None:
        """Block this thread until then, at most `timeout` seconds.

        Raises:
            TimeoutError: `timeout` is over.
        """
        ...


class Stream(Protocol):
    """Work in order."""

    def wait_event(self, event: Event) -> None:
        """Order what is put on the stream from now on after `event`, without blocking the host where the device can do that."""
        ...


class Device(Protocol):
    """Where arrays live."""

    @property
    def name(self) -> str:
        """Such as ``cpu`` or ``cuda:0``."""
        ...

    def current_stream(self) -> Stream:
        """Return the stream that the caller's work goes to."""
        ...
