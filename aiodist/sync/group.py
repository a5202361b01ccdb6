"""The process group of blocking code: `init_process_group`, `Group`, and what is known of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from aiodist import registry
from aiodist.errors import NotInitializedError
from aiodist.group import Group as AsyncGroup
from aiodist.naming import check_ranks
from aiodist.pending import PendingGroup
from aiodist.sync.session import Session, check_arguments, check_device

if TYPE_CHECKING:
    from aiodist.sync.server import Client

__all__ = [
    "WORLD",
    "AnyGroup",
    "Group",
    "StaticData",
    "as_async",
    "check_group",
    "destroy_process_group",
    "get_backend",
    "get_client",
    "get_mm_server_addr",
    "get_py_server_addr",
    "get_rank",
    "get_world_size",
    "group_barrier",
    "init_process_group",
    "is_distributed",
    "new_group",
]


class StaticData:
    """What a process knows of the world it is in.

    Attributes:
        server: The rendezvous, where this process serves it.
        client: A `Client` of it, once `get_client` was called.
        master_ip: Name or address of the rendezvous; None where `aiodist.init` opened the world, as with the ports.
        py_server_port: Its port.
        mm_server_port: The same: one service does what were two.
        world_size: Number of ranks.
        proc_rank: This rank.
        device: Number of this rank's device.
        backend: Name of the backend that was asked for.
        next_stream: The number that the next group gets.
    """

    server: Any = None
    client: Client | None = None
    master_ip: str | None = None
    py_server_port: int | None = None
    mm_server_port: int | None = None
    world_size: int | None = None
    proc_rank: int | None = None
    device: int | None = None
    backend: str | None = None
    next_stream: int | None = None


class _Current:
    """The world that `data` tells of."""

    def __init__(self, world: AsyncGroup, session: Session | None = None) -> None:
        self.world = weakref.ref(world)
        self.session = session
        self.data = StaticData()
        self.data.world_size, self.data.proc_rank = world.size, world.rank
        self.data.device, self.data.backend = 0, "auto"
        self.data.next_stream = 2  # WORLD has 1
        self.groups: list[Any] = []  # kept: a member may drop its group while others still use theirs


_current: _Current | None = None


def _world() -> AsyncGroup:
    world = registry.current_world()
    if not isinstance(world, AsyncGroup):
        raise NotInitializedError("no world is open: call init_process_group() first")
    return world


def _now() -> _Current:
    """Return what is known of the open world, whoever opened it."""
    global _current
    world = _world()
    if _current is None or _current.world() is not world:
        _current = _Current(world)
    return _current


class Group:
    """Some ranks of the world in an order: what `new_group` gives.

    Making one starts to make an async `aiodist.Group` of the same ranks and does not block; the first call on it waits for the other
    members. So members may make several groups in differing orders. It lasts until the process group is destroyed.

    Args:
        proc_ranks: World ranks, this one among them; the first is the group's rank 0. An empty list leaves the group empty until `reset`.

    Raises:
        TypeError, ValueError, NotInitializedError: as `check`.
    """

    def __init__(self, proc_ranks: Sequence[int]) -> None:
        self._ranks: list[int] = []
        self._stream: int | None = None
        self._pending: PendingGroup[AsyncGroup | None] | None = None
        self._made: AsyncGroup | None = None
        if not (isinstance(proc_ranks, Sized) and len(proc_ranks) == 0):
            self.reset(proc_ranks)

    def __repr__(self) -> str:
        return f"<aiodist.sync Group of ranks {self.proc_ranks}>"

    def reset(self, proc_ranks: Sequence[int]) -> None:
        """Make this the group of other ranks, a new one with a stream of its own.

        Raises:
            TypeError, ValueError, NotInitializedError: as `check`.
        """
        world, current = _world(), _now()
        ranks = check_ranks(proc_ranks, world.size)
        self.check(ranks)
        self._pending, self._made = world.new_group(ranks), None
        current.groups.append(self._pending)
        self._ranks = list(ranks)
        assert current.data.next_stream is not None  # _Current set it
        self._stream = current.data.next_stream
        current.data.next_stream += 1

    def check(self, proc_ranks: Sequence[int]) -> None:
        """Refuse ranks that can not form a group here.

        Raises:
            TypeError: they are not a sequence of whole numbers.
            ValueError: there are none, one is no rank of the world or comes twice, or this rank is not among them.
            NotInitializedError: there is no world.
        """
        world = _world()
        if world.rank not in check_ranks(proc_ranks, world.size):
            raise ValueError(f"rank {world.rank} is not among the ranks {list(proc_ranks)}: only members make a group")

    @property
    def async_group(self) -> AsyncGroup:
        """The async `aiodist.Group` that the calls go to, for code that awaits; blocks until the other members have made theirs.

        Raises:
            NotInitializedError: the group is empty.
            CollectiveTimeoutError, RendezvousError: a member did not make it in time, or is gone.
        """
        if self._made is None:
            if self._pending is None:
                raise _empty()
            self._made = self._pending.result()
            if self._made is None:  # `check` saw this rank among the members
                raise _empty()
        return self._made

    @property
    def proc_ranks(self) -> list[int]:
        """The world ranks in the group's order; none while it is empty."""
        return list(self._ranks)

    @property
    def stream(self) -> int | None:
        """Number of the group among those of this process, in order of creation; `WORLD` has 1. None while it is empty."""
        return self._stream

    @property
    def size(self) -> int:
        """Number of members. `NotInitializedError` while the group is empty, as with the following."""
        return len(self._members())

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self._members().index(_world().rank)

    @property
    def key(self) -> str:
        """The world ranks in the group's order, such as ``"2,0"``."""
        return ",".join(map(str, self._members()))

    @property
    def comp_node(self) -> str:
        """Device and stream, such as ``"cpu0:1"``."""
        self._members()
        return f"cpu{_now().data.device}:{self.stream}"

    def _members(self) -> list[int]:
        ranks = self.proc_ranks
        if not ranks:
            raise _empty()
        return ranks


def _empty() -> NotInitializedError:
    return NotInitializedError("this group is empty: WORLD is filled by init_process_group(), another one by reset()")


class _World(Group):
    """All ranks of whichever world is open when it is used."""

    def reset(self, proc_ranks: Sequence[int]) -> None:
        """Do nothing: the world fills this group."""
        self.check(proc_ranks)

    def check(self, proc_ranks: Sequence[int]) -> None:
        """Refuse all but the ranks of the world in their order."""
        if check_ranks(proc_ranks, _world().size) != tuple(self.proc_ranks):
            raise ValueError(f"WORLD has all ranks: make another group of {list(proc_ranks)} by new_group()")

    @property
    def async_group(self) -> AsyncGroup:
        """The open world."""
        return _world()

    @property
    def proc_ranks(self) -> list[int]:
        """All ranks; none while there is no world."""
        return list(range(_world().size)) if is_distributed() else []

    @property
    def stream(self) -> int | None:
        """1; None while there is no world."""
        return 1 if is_distributed() else None


WORLD: Final[Group] = _World([])
"""All ranks in their order. It exists at import and is filled when `init_process_group`, or `aiodist.init`, opens a world."""

AnyGroup: TypeAlias = Group | AsyncGroup | registry.World
"""What blocking calls take: a group of blocking code, or one of async code, `aiodist.WORLD` included."""


def as_async(group: AnyGroup) -> AsyncGroup:
    """Return the async group that calls on `group` go to.

    Raises:
        TypeError: it is no group; `new_group` gives None to a rank that is no member.
        NotInitializedError: it is empty, or there is no world.
    """
    if isinstance(group, Group):
        return group.async_group
    if isinstance(group, AsyncGroup):
        return group
    check_group(group)
    return _world()


def check_group(group: AnyGroup) -> None:
    """Refuse what is no group, which `new_group` gives to a rank that is no member.

    Raises:
        TypeError: it is neither a group of blocking code nor one of async code.
    """
    if not isinstance(group, Group | AsyncGroup) and group is not registry.WORLD:
        hint = ": this rank is no member" if group is None else ""
        raise TypeError(f"group must be a Group of aiodist.sync or of aiodist, not {type(group).__name__}{hint}")


def init_process_group(
    master_ip: str, port: int, world_size: int, rank: int, device: int, backend: str = "nccl", *, device_type: str = "auto"
) -> None:
    """Open the world, and block until all its ranks are here.

    Rank 0 serves the rendezvous on the port where nobody serves it yet: beyond this host only with a token. All ranks take token, job and
    timeout from AIODIST_TOKEN, AIODIST_JOB and AIODIST_TIMEOUT. The world is closed by `destroy_process_group`, or when the process ends.

    Args:
        master_ip: Name or address of the rendezvous, the same for all ranks.
        port: Its port, likewise.
        world_size: Number of ranks; 1 works.
        rank: This rank.
        device: Number of the device of this rank.
        backend: ``auto`` or ``shm``. ``nccl``, the default as in the original, and ``ucx`` are not built yet: they are refused.
        device_type: ``cpu`` or ``auto``; ``gpu`` is not built yet either.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, a backend is not available here, or serving beyond this host needs a token.
        RuntimeError: a world is open in this process already.
        OSError: the port can not be used.
        RendezvousError, TransportError: the ranks did not find each other in time.
    """
    global _current
    check_arguments(master_ip, port, world_size, rank, device, backend)
    if is_distributed():
        way = "by its aclose()" if _now().session is None else "by destroy_process_group()"
        raise RuntimeError(f"a world is open in this process already: close it first, {way}")
    check_device(device_type, backend)
    master_ip = master_ip.strip("[]")
    session = Session(master_ip, port, world_size, rank, backend)
    current = _Current(session.world, session)
    data = current.data
    data.server, data.master_ip, data.py_server_port, data.mm_server_port = session.server, master_ip, port, port
    data.device, data.backend = device, backend
    _current = current


def destroy_process_group(error: BaseException | None = None) -> None:
    """Leave the world that `init_process_group` opened, after the calls in flight; another one may be opened then.

    Blocks for at most some 15 s. Where rank 0 serves the rendezvous, its process does so until it ends, and then waits for the others to
    leave: 10 s at most, or 2 s where an exception ends it.

    Args:
        error: Why this rank leaves early: calls in flight are given up, and the others hear its text.

    Raises:
        RuntimeError: there is no world, or `aiodist.init` opened it, which closes it too.
    """
    global _current
    current = _now()
    if current.session is None:
        raise RuntimeError("this world was opened by aiodist.init(): close it by its aclose()")
    _current = None
    current.session.close(error)


def is_distributed() -> bool:
    """Tell whether a world is open in this process."""
    return isinstance(registry.current_world(), AsyncGroup)


def get_rank() -> int:
    """Return this process's rank in the world; 0 without one."""
    return _world().rank if is_distributed() else 0


def get_world_size() -> int:
    """Return the number of ranks of the world; 1 without one."""
    return _world().size if is_distributed() else 1


def get_backend() -> str:
    """Return the name of the backend that was asked for. Raises `NotInitializedError` without a world."""
    return str(_now().data.backend)


def get_py_server_addr() -> tuple[str, int]:
    """Return master_ip and port of the rendezvous. Raises `NotInitializedError` where `init_process_group` was not called."""
    data = _now().data
    if data.master_ip is None or data.py_server_port is None:
        raise NotInitializedError("this world was opened by aiodist.init(): only init_process_group() knows an address")
    return data.master_ip, data.py_server_port


def get_mm_server_addr() -> tuple[str, int]:
    """Return the same as `get_py_server_addr`: one service does what were two."""
    return get_py_server_addr()


def get_client() -> Client:
    """Return a client of the rendezvous, made when first asked for. Raises `NotInitializedError` as `get_py_server_addr` does."""
    address, data = get_py_server_addr(), _now().data
    from aiodist.sync.server import Client

    if data.client is None:
        data.client = Client(*address)
    return data.client


def new_group(proc_ranks: Sequence[int]) -> Group | None:
    """Make a group of some ranks.

    Its members call this; the others may. It does not block, see `Group`.

    Args:
        proc_ranks: World ranks; the first is the group's rank 0.

    Returns:
        The group; None to a rank that is no member.

    Raises:
        TypeError, ValueError: the ranks can not form a group.
        NotInitializedError: there is no world.
    """
    world = _world()
    ranks = check_ranks(proc_ranks, world.size)
    return Group(ranks) if world.rank in ranks else None


def group_barrier(group: AnyGroup = WORLD) -> None:
    """Block until all ranks of the group have called it.

    Raises:
        NotInitializedError: there is no world.
        AiodistError: a rank did not come in time, or is gone.
    """
    as_async(group).barrier().result()
