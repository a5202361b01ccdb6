"""Why members are refused, in words."""

from __future__ import annotations

import msgspec

from aiodist.rendezvous.job import Job, Limits, listed, name_ranks
from aiodist.rendezvous.messages import JOB_NAME, Join, Resume

__all__ = ["late_join", "why_unknown", "wrong_join"]


def wrong_join(request: Join, limits: Limits) -> str | None:
    """Say what is wrong with a join by itself."""
    if not JOB_NAME.match(request.job):
        return f"{request.job[:128]!r} is no name of a job: letters, digits and _.:@+- , 128 at most"
    if not 1 <= request.world_size <= limits.members:
        return f"world size {request.world_size} is not between 1 and {limits.members}"
    if request.rank is not None and not 0 <= request.rank < request.world_size:
        return f"rank {request.rank} is not between 0 and {request.world_size - 1}"
    try:
        nbytes = len(msgspec.json.encode(request.info))
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        return "the info can not be written as JSON"
    return f"the info has {nbytes} bytes as JSON, the limit is {limits.info_nbytes}" if nbytes > limits.info_nbytes else None


def why_unknown(job: Job | None, request: Resume) -> str:
    """Say why a member can not take its place up again."""
    world = job.worlds.get(request.generation) if job is not None else None
    for member in world.members if world is not None else ():
        if member.id == request.member and member.fate is not None:
            return f"rank {member.rank} of job {request.job} was given up: {member.fate.reason}"
    return f"it knows nothing of this member of job {request.job} (world {request.generation}): it was started again without its state"


def late_join(job: Job, world_size: int, timeout: float) -> tuple[str, tuple[int, ...]]:
    """What those in a formation are told at the timeout, and the ranks that are missing."""
    missing = job.missing()
    here = listed([f"rank {'?' if m.wanted is None else m.wanted} is {m.label}" for m in job.forming.values()])
    return f"job {job.name}: {name_ranks(missing)} of {world_size} did not join within {timeout:g} s ({here})", tuple(missing)
