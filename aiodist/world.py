"""Opening the world: how a rank finds its place and its peers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from aiodist import _core, registry
from aiodist.backends import attach
from aiodist.config import DEFAULT_TIMEOUT, Settings
from aiodist.errors import RendezvousError, TransportError
from aiodist.group import DRAIN_SECONDS, Group
from aiodist.hosts import check_one_host
from aiodist.local import LocalWorld, local_world, make_local
from aiodist.membership import Founder
from aiodist.ops.checks import check_timeout
from aiodist.progress import Reporter
from aiodist.tuning import TOLD, Tunings, own_tunings, told_tunings, tuning_for

if TYPE_CHECKING:  # loaded when a world has peers: a world of one needs no HTTP
    from aiodist.rendezvous.client import Membership, Notice, RendezvousClient

__all__ = ["LocalWorld", "Opening", "init", "local_world"]

_DEFAULT_JOB: Final = "default"
# The generation of each job that this process was last a member of: the service then knows a comeback from a late joiner.
_generations: dict[tuple[str, str], int] = {}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank belongs: arguments first, then AIODIST_* variables, then a world of one."""

    rendezvous: str | None
    rank: int | None
    world_size: int
    job: str
    token: str | None
    tls_ca: str | None
    timeout: float
    address: str | None
    """Where others reach this rank, if it was told."""
    tunings: Tunings


def init(
    *,
    rendezvous: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    job: str | None = None,
    token: str | None = None,
    timeout: float | None = None,
    device: str | None = None,
    backend: str = "auto",
    interface: str | None = None,
) -> Opening:
    """Open the world: ``async with aiodist.init() as world``, or ``world = await aiodist.init()`` and later ``await world.aclose()``.

    What is not given comes from the AIODIST_* variables, which ``aiodist run`` sets; without either it is a world of one. Leaving the
    block by an exception aborts the world, and that exception's text is what the other ranks' errors say.

    Args:
        rendezvous: Address of the rendezvous service, ``http[s]://host:port``; IPv6 in brackets.
        rank: This process's rank; None takes a free one.
        world_size: Number of ranks.
        job: Name of the job on the service.
        token: The service's bearer token.
        timeout: Seconds that forming the world, and later each call, may take; 300 by default.
        device: ``cpu``; other devices are not built yet.
        backend: ``auto`` (or what AIODIST_BACKEND says) or ``shm``; others are not built yet.
        interface: Name of a network interface of this host, or one of its addresses, by which other hosts reach this rank. By default it
            is the address by which this rank reaches the rendezvous. It is only told so far: all ranks must be on one host.

    Returns:
        An object to await or to enter, which gives the world's `Group`.

    Raises:
        TypeError, ValueError: an argument or a variable is wrong.
        RuntimeError: a world is open already.

    Awaiting it raises `RendezvousError` or `TransportError` where the ranks do not find each other.
    """
    settings = Settings.from_env()
    device = settings.device if device is None else device
    backend = settings.backend or "auto" if backend == "auto" else backend
    if device not in (None, "cpu"):
        raise ValueError(f"device {device!r} (device= or AIODIST_DEVICE) is not built yet: only 'cpu' is")
    if backend not in ("auto", "shm"):
        raise ValueError(f"backend {backend!r} (backend= or AIODIST_BACKEND) is not built yet: 'auto' and 'shm' are")
    _refuse_second()
    return Opening(_place(settings, rendezvous, rank, world_size, job, token, timeout, interface))


class Opening:
    """A world about to be opened; see `init`."""

    def __init__(self, place: _Place) -> None:
        self._place = place
        self._world: Group | None = None

    def __await__(self) -> Generator[Any, Any, Group]:
        return self._open().__await__()

    async def __aenter__(self) -> Group:
        self._world = await self._open()
        return self._world

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._world is not None:
            await self._world.__aexit__(kind, error, traceback)

    async def _open(self) -> Group:
        _refuse_second()
        registry.set_world(registry.FORMING)
        try:
            world = _open_alone(self._place) if self._place.rendezvous is None else await _Forming(self._place).form()
        except BaseException:
            registry.set_world(None)
            raise
        registry.set_world(world)
        return world


def _refuse_second() -> None:
    if registry.is_taken():
        raise RuntimeError("a world is open in this process already: close it with aclose() first")


def _place(
    settings: Settings,
    rendezvous: str | None,
    rank: int | None,
    world_size: int | None,
    job: str | None,
    token: str | None,
    timeout: float | None,
    interface: str | None,
) -> _Place:
    for name, value in (("rank", rank), ("world_size", world_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name} must be a whole number, not {type(value).__name__}")
    address = rendezvous if rendezvous is not None else settings.rendezvous
    size = world_size if world_size is not None else settings.world_size
    own = rank if rank is not None else settings.rank
    if address is None and size in (None, 1) and own in (None, 0):
        size = 1
    elif address is None:
        raise ValueError(f"a world of {size} ranks needs a rendezvous: pass rendezvous= or set AIODIST_RENDEZVOUS, or use `aiodist run`")
    if size is None:
        raise ValueError("world_size is not given: pass it or set AIODIST_WORLD_SIZE")
    if size < 1:
        raise ValueError(f"world_size must be at least 1, not {size}")
    if own is not None and not 0 <= own < size:
        raise ValueError(f"rank {own} is not a rank of a world of {size}")
    return _Place(
        address,
        own,
        size,
        job or settings.job or _DEFAULT_JOB,
        token if token is not None else settings.token,
        settings.tls_ca,
        check_timeout(timeout) or settings.timeout or DEFAULT_TIMEOUT,
        _address(interface if interface is not None else settings.interface),
        own_tunings(settings),
    )


def _address(interface: str | None) -> str | None:
    if interface is None:
        return None
    from aiodist.rendezvous.interfaces import address_of

    return address_of(interface)


def _open_alone(place: _Place) -> Group:
    def on_close() -> None:
        registry.set_world(None)
        _core.rest()

    return make_local(1, place.timeout, place.tunings, DRAIN_SECONDS, on_close)[0]


class _Forming:
    """Forms a world with peers. Its I/O is on the control thread, so that nothing the caller's loop does can delay it."""

    def __init__(self, place: _Place) -> None:
        self._place = place
        self._deadline = time.monotonic() + place.timeout
        self._notice: Notice | None = None
        self._server: socket.socket | None = None
        self._client: RendezvousClient | None = None
        self._reporter = Reporter()
        self._tunings: Tunings = {}

    async def form(self) -> Group:
        from aiodist.rendezvous.store import ControlStore
        from aiodist.rendezvous.thread import ControlThread

        place = self._place
        control = ControlThread()
        try:
            membership, attachment, offset = await asyncio.wrap_future(control.submit(self._meet()))
        except BaseException:
            control.close()
            raise

        async def on_close(reason: str | None) -> None:
            try:
                with contextlib.suppress(RendezvousError, RuntimeError):
                    await asyncio.wrap_future(control.submit(self._leave(reason)))
            finally:
                control.close()
                registry.set_world(None)
                _core.rest()

        assert self._client is not None  # _meet() made it
        processes = [process for process, _ in attachment.members]
        name = _unique_name(place.job, membership)
        founder = Founder(ControlStore(control, self._client), membership.rank, processes, name, self._tunings)
        world = Group(
            "world",
            _channel_id(name),
            membership.rank,
            attachment.tuning,
            offset,
            attachment.members,
            place.timeout,
            founder=founder,
            on_close=on_close,
        )
        self._reporter.watch(world, founder)
        return world

    async def _meet(self) -> tuple[Membership, attach.Attachment, int]:
        from aiodist.rendezvous.client import RendezvousClient
        from aiodist.rendezvous.thread import on_a_thread

        place = self._place
        assert place.rendezvous is not None  # _open() looked
        self._server, name = attach.listen()
        self._client = client = RendezvousClient(
            place.rendezvous,
            job=place.job,
            token=place.token,
            tls_ca=place.tls_ca,
            timeout=place.timeout,
            on_notice=self._on_notice,
            progress=self._reporter,
        )
        try:
            await client.connect()
            address = place.address or client.local_address
            info = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "device": "cpu",
                "address": address,
                "identity": attach.host_identity(),
                "socket": name,
                TOLD: place.tunings,
                "nonce": secrets.token_hex(8),
            }
            key = (place.rendezvous, place.job)
            membership = await client.join(world_size=place.world_size, rank=place.rank, info=info, after=_generations.get(key, 0))
            _generations[key] = membership.generation
            self._tunings = told_tunings(membership.members)
            attachment, offset = await on_a_thread(self._attach, membership)
        except BaseException as error:
            await self._leave(f"{type(error).__name__}: {error}")
            raise
        finally:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # ends an accept() that nobody waits for any more
            self._server.close()
        return membership, attachment, offset

    def _attach(self, membership: Membership) -> tuple[attach.Attachment, int]:
        """Exchange memory with the other ranks; on a thread of its own, since sockets with descriptors are best used blocking."""
        place, rank = self._place, membership.rank
        check_one_host(membership)
        tuning = tuning_for(self._tunings, place.world_size)
        offset = _core.reserve(tuning, _channel_id(_unique_name(place.job, membership)), rank, place.world_size)
        secret = attach.Secret(place.job, membership.generation, place.token)
        try:
            if rank == 0:
                assert self._server is not None  # _meet() made it
                return attach.attach_as_hub(self._server, secret, place.world_size, offset, tuning, self._deadline), offset
            hub = membership.members[0]["socket"]
            return attach.attach_to_hub(hub, secret, rank, place.world_size, offset, self._deadline), offset
        except (OSError, TransportError) as error:
            # The block stays: the others may know of it, and must never find another group's calls there.
            if self._notice is None:
                raise
            peer = self._notice.rank
            raise RendezvousError(
                f"rank {peer} was {self._notice.kind} while the world formed: {self._notice.reason}", ranks=(peer,)
            ) from error

    def _on_notice(self, notice: Notice) -> None:
        # Only of interest while the world forms: afterwards the data path itself sees who is gone.
        if self._notice is None:
            self._notice = notice
        if self._server is not None and self._server.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # ends a pending accept()

    async def _leave(self, reason: str | None) -> None:
        if self._client is not None:
            with contextlib.suppress(RendezvousError):
                await self._client.leave(reason)
            await self._client.aclose()


def _unique_name(job: str, membership: Membership) -> str:
    """Name the world as no other one that its processes were or will be in: a service that lost its state counts generations anew."""
    return f"job {job} {membership.generation} {membership.members[0].get('nonce')}"


def _channel_id(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
