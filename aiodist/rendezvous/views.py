"""What people and tools may see of the jobs: never a value of a key or of a gather. The types are what the HTTP API serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import islice
from typing import Any, Final, Literal

import msgspec

from aiodist.rendezvous.behind import furthest
from aiodist.rendezvous.identity import State, identity
from aiodist.rendezvous.job import Job, Member, World

__all__ = [
    "FormingView",
    "JobList",
    "JobSummary",
    "JobView",
    "JoinerView",
    "KeyList",
    "KeyView",
    "MeetingView",
    "MemberView",
    "ProgressView",
    "Snapshot",
    "WorldView",
    "list_keys",
    "show_job",
    "summarise",
]

_MEETINGS: Final = 64
_RANKS: Final = 256
_TEXT: Final = 255

_JobState = Literal["forming", "formed", "failed", "ended"]


class _View(msgspec.Struct, frozen=True):
    pass


class ProgressView(_View, frozen=True):
    """Where a rank is in a group.

    Attributes:
        seq: Number of its latest call, from 0; -1 before the first.
        site: The line that made it.
        lag: How many calls it is behind the rank that is furthest.
    """

    group: str
    seq: int
    collective: str
    site: str
    lag: int


class MemberView(_View, frozen=True):
    """A rank of a formed world; host, pid and device are what the process said of itself.

    Attributes:
        state: ``away`` is a rank whose connection broke; it may return for a while, and is lost then. ``stalled`` is one whose heartbeats
            are missing, and ``stuck`` one that makes no call while others of a group wait for it; both may go on any time.
        reason: Why it is not active.
        progress: Where it is in its groups, where it tells.
    """

    rank: int
    state: State
    host: str | None
    pid: int | None
    device: str | None
    reason: str | None
    progress: list[ProgressView]


class JoinerView(_View, frozen=True):
    """A process that waits for its world to form.

    Attributes:
        rank: The rank it wants, null for any.
    """

    rank: int | None
    world_size: int
    host: str | None
    pid: int | None
    device: str | None


class MeetingView(_View, frozen=True):
    """A barrier or gather that waits for members; of many ranks the first are listed, the counts tell how many there are."""

    name: str
    waiting: list[int]
    missing: list[int]
    waiting_count: int
    missing_count: int


class WorldView(_View, frozen=True):
    """One generation of a job.

    Attributes:
        members: The ranks; where they are more than asked for, those that are not active come first.
        members_left_out: How many ranks are not listed.
        members_by_state: How many ranks are in which state.
        barriers: Those that wait, 64 at most.
        gathers: Those that wait (groups and channels being made), 64 at most.
        keys: Number of keys.
    """

    generation: int
    world_size: int
    members: list[MemberView]
    members_left_out: int
    members_by_state: dict[str, int]
    barriers: list[MeetingView]
    gathers: list[MeetingView]
    keys: int


class FormingView(_View, frozen=True):
    """The world that is about to form: who is here, and which ranks are missing."""

    members: list[JoinerView]
    members_left_out: int
    missing: list[int]
    missing_count: int


class JobView(_View, frozen=True):
    """A job.

    Attributes:
        generation: How many worlds have formed under this name so far.
        failure: Why the last formation failed, where that is still being told.
    """

    job: str
    state: _JobState
    generation: int
    failure: str | None
    forming: FormingView
    worlds: list[WorldView]


class JobSummary(_View, frozen=True):
    """A job in a list: its state, the ranks of the newest world, and how many members are in which state."""

    job: str
    state: _JobState
    generation: int
    world_size: int
    members_by_state: dict[str, int]


class JobList(_View, frozen=True):
    """Jobs in the order of their names.

    Attributes:
        more: Whether further jobs follow; ask again with ``after`` set to the last name.
    """

    jobs: list[JobSummary]
    more: bool


class KeyView(_View, frozen=True):
    """A key and the length of its value."""

    key: str
    nbytes: int


class KeyList(_View, frozen=True):
    """Keys of one world in order.

    Attributes:
        more: Whether further keys follow; ask again with ``after`` set to the last key.
    """

    job: str
    generation: int
    keys: list[KeyView]
    more: bool


class Snapshot(_View, frozen=True):
    """One event of the live view: all jobs in short, and one of them in detail."""

    jobs: list[JobSummary]
    job: JobView | None


def show_job(job: Job, members: int) -> JobView:
    """Show a job with so many members of each world at most."""
    joiners = [_show_joiner(member) for member in islice(job.forming.values(), members)]
    missing = job.missing()
    forming = FormingView(joiners, len(job.forming) - len(joiners), missing[:_RANKS], len(missing))
    worlds = [_show_world(world, members) for world in job.worlds.values()]
    return JobView(job.name, _state(job), job.generation, job.failure.text if job.failure else None, forming, worlds)


def summarise(job: Job) -> JobSummary:
    """Show a job in a list."""
    counts: Counter[str] = Counter()
    if job.forming:
        counts["forming"] = len(job.forming)
    for world in job.worlds.values():
        counts.update(member.state for member in world.members)
    newest = next(reversed(job.worlds.values()), None)
    size = newest.size if newest else max((member.world_size for member in job.forming.values()), default=0)
    return JobSummary(job.name, _state(job), job.generation, size, dict(counts))


def list_keys(world: World, prefix: str, after: str, limit: int) -> KeyList:
    """List a world's keys that begin with the prefix and come after a key."""
    found = sorted(key for key in world.keys if key.startswith(prefix) and key > after)
    shown = [KeyView(key, len(world.keys[key])) for key in found[:limit]]
    return KeyList(world.job, world.generation, shown, len(found) > limit)


def _show_world(world: World, limit: int) -> WorldView:
    members = world.members
    if len(members) > limit:
        members = sorted(members, key=lambda member: (member.state == "active", member.rank))[:limit]
    ahead = {group: call.seq for group, (_, call) in furthest(world).items()}
    barriers = [
        _meeting(name, sorted(waiting), [member.rank for member in world.missing(name)])
        for name, waiting in islice(world.barriers.items(), _MEETINGS)
    ]
    gathers = [_meeting(one["name"], one["waiting"], one["missing"]) for one in world.gathers.view()[:_MEETINGS]]
    return WorldView(
        world.generation,
        world.size,
        [_show_member(member, ahead) for member in members],
        world.size - len(members),
        dict(Counter(member.state for member in world.members)),
        barriers,
        gathers,
        len(world.keys),
    )


def _show_joiner(member: Member) -> JoinerView:
    return JoinerView(member.wanted, member.world_size, **identity(member.info), device=_device(member.info))


def _show_member(member: Member, ahead: dict[str, int]) -> MemberView:
    progress = [
        ProgressView(one.group, one.seq, one.collective, one.site, max(0, ahead.get(one.group, -1) - one.seq)) for one in member.progress
    ]
    return MemberView(
        member.rank, member.state, **identity(member.info), device=_device(member.info), reason=member.reason, progress=progress
    )


def _meeting(name: str, waiting: Collection[int], missing: Collection[int]) -> MeetingView:
    return MeetingView(name, list(islice(waiting, _RANKS)), list(islice(missing, _RANKS)), len(waiting), len(missing))


def _state(job: Job) -> _JobState:
    return "formed" if job.worlds else "forming" if job.forming else "failed" if job.failure else "ended"


def _device(info: dict[str, Any]) -> str | None:
    device = info.get("device")
    return device[:_TEXT] if isinstance(device, str) else None
