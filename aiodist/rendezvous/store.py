"""The rendezvous as the place where groups are made."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from aiodist.rendezvous.client import RendezvousClient
from aiodist.rendezvous.thread import ControlThread
from aiodist.store import Outcome

__all__ = ["ControlStore"]


class ControlStore:
    """What `aiodist.store.Store` says, for a process: it asks its client on the control thread, and the service is the judge of time."""

    def __init__(self, control: ControlThread, client: RendezvousClient) -> None:
        self._control = control
        self._client = client

    def gather(self, name: str, members: Sequence[int], value: bytes, timeout: float) -> Future[Outcome]:
        """See `aiodist.store.Store.gather`."""
        return self._control.submit(self._client.gather(name, members, value, timeout=timeout))

    def expire(self) -> None:
        """See `aiodist.store.Store.expire`."""
