"""What runs in a process that the launcher started: one rank."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from aiodist.sync.group import destroy_process_group, group_barrier, init_process_group, is_distributed
from aiodist.sync.parcel import Call, Outcome, put, take

__all__ = ["Place", "main"]


class Place(NamedTuple):
    """Where the ranks meet.

    Attributes:
        master_ip: Name or address of the rendezvous.
        port: Its port.
        world_size: Number of ranks.
        device_type: As `init_process_group` takes it.
        backend: Likewise.
        several: Whether the world has ranks that another launcher started.
    """

    master_ip: str
    port: int
    world_size: int
    device_type: str
    backend: str
    several: bool


def main(fds: Sequence[int], place: tuple[Any, ...]) -> None:
    """Make the call that the launcher left in the first memory, and leave what comes of it in the memory of this rank."""
    call_fd, outcome_fd = fds[0], fds[1 + int(os.environ["AIODIST_LOCAL_RANK"])]
    call = take(call_fd, Call)
    for fd in set(fds) - {outcome_fd}:
        os.close(fd)
    if call is None:
        raise RuntimeError("the launcher left no call")
    sys.argv[:] = call.argv
    failed_at = 0.0
    try:
        with _world(Place(*place)):
            try:
                outcome = _make(call)
                if Place(*place).several and is_distributed():
                    group_barrier()  # the machine of rank 0 serves the others until they are done
            except BaseException:
                failed_at = time.monotonic()  # before the others can hear of it
                raise
        put(outcome_fd, outcome)
    except (Exception, asyncio.CancelledError) as error:
        outcome = Outcome.of_error(error, failed_at or time.monotonic(), __file__)
        put(outcome_fd, outcome)
        sys.stderr.write(outcome.text)
        sys.exit(1)


def _make(call: Call) -> Outcome:
    func, args, kwargs = call.load()
    result = func(*args, **kwargs)
    return Outcome.of(asyncio.run(result) if inspect.iscoroutine(result) else result)


@contextmanager
def _world(place: Place) -> Iterator[None]:
    """Open the world of this rank, and close it unless the function has: the one place that does."""
    rank, device = int(os.environ["AIODIST_RANK"]), int(os.environ["AIODIST_LOCAL_RANK"])
    init_process_group(place.master_ip, place.port, place.world_size, rank, device, place.backend, device_type=place.device_type)
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        if is_distributed():
            destroy_process_group(error)
