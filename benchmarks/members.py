"""A process of `benchmarks.rendezvous`: all members of one job, or the server of torch's store.

Members do the same in the same order: meet (connect, and wait until all are there), set a key of their own and wait for that of their
neighbour, and pass one barrier. A phase begins for a member when the one before has ended for all.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final

__all__ = ["PHASES", "main"]

PHASES: Final = ("join", "keys", "barrier")
_TIMEOUT_S: Final = 120.0
_STACK_NBYTES: Final = 1 << 18


def main(arguments: Sequence[str] | None = None) -> int:
    """Be the members, or the server, that the command line names, and print the outcome as a line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.members", description=__doc__)
    parser.add_argument("role", choices=("aiodist", "tcpstore", "tcpstore-server"))
    parser.add_argument("--members", type=int, required=True)
    parser.add_argument("--address", help="of the server, host:port")
    args = parser.parse_args(arguments)
    if args.role == "tcpstore-server":
        return _serve_torch()
    body = asyncio.run(_aiodist(args.address, args.members)) if args.role == "aiodist" else _torch(args.address, args.members)
    print(json.dumps(body), flush=True)
    return 0


class _Clock:
    """The time each phase took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def stop(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase], self._last = now - self._last, now


def _value(rank: int) -> bytes:
    return f"value of {rank}".encode()


async def _aiodist(address: str, count: int) -> dict[str, Any]:
    from aiodist.rendezvous.client import RendezvousClient

    token = os.environ.get("AIODIST_TOKEN")
    wrong = 0
    clock = _Clock()
    members = [RendezvousClient(address, job="bench", token=token, timeout=_TIMEOUT_S) for _ in range(count)]

    async def join(rank: int) -> None:
        nonlocal wrong
        await members[rank].connect()
        place = await members[rank].join(world_size=count, rank=rank, info={"pid": rank, "host": "bench", "address": "127.0.0.1"})
        wrong += place.rank != rank or [member["pid"] for member in place.members] != list(range(count))

    async def keys(rank: int) -> None:
        nonlocal wrong
        await members[rank].set(f"key/{rank}", _value(rank))
        neighbour = (rank + 1) % count
        wrong += await members[rank].get(f"key/{neighbour}") != _value(neighbour)

    async def barrier(rank: int) -> None:
        await members[rank].barrier("b")

    bodies: dict[str, Callable[[int], Awaitable[None]]] = {"join": join, "keys": keys, "barrier": barrier}
    for phase in PHASES:
        await asyncio.gather(*(bodies[phase](rank) for rank in range(count)))
        clock.stop(phase)
    await asyncio.gather(*(member.leave() for member in members))
    clock.stop("leave")
    await asyncio.gather(*(member.aclose() for member in members))
    return {"seconds": clock.seconds, "wrong": wrong}


def _torch(address: str, count: int) -> dict[str, Any]:
    """Members are threads: the store's calls block, outside the GIL."""
    tcp_store: Any = importlib.import_module("torch.distributed").TCPStore
    host, _, port = address.rpartition(":")
    timeout = timedelta(seconds=_TIMEOUT_S)
    stores: list[Any] = [None] * count

    def join(rank: int) -> bool:
        stores[rank] = tcp_store(host, int(port), is_master=False, timeout=timeout, wait_for_workers=False)
        stores[rank].barrier("join", count)
        return True

    def keys(rank: int) -> bool:
        store, neighbour = stores[rank], (rank + 1) % count
        store.set(f"key/{rank}", _value(rank))
        store.wait([f"key/{neighbour}"])
        return bool(store.get(f"key/{neighbour}") == _value(neighbour))

    def barrier(rank: int) -> bool:
        stores[rank].barrier("b", count)
        return True

    members = [_Thread() for _ in range(count)]
    bodies: dict[str, Callable[[int], bool]] = {"join": join, "keys": keys, "barrier": barrier}
    wrong = 0
    clock = _Clock()
    for phase in PHASES:
        ends = [member.start(bodies[phase], rank) for rank, member in enumerate(members)]
        wrong += sum(not end.result(_TIMEOUT_S) for end in ends)
        clock.stop(phase)
    for member in members:
        member.end()
    return {"seconds": clock.seconds, "wrong": wrong}


class _Thread:
    """A thread that stands for one member over all phases; made before the clock starts."""

    def __init__(self) -> None:
        self._go = threading.Semaphore(0)
        self._task: Callable[[], bool] | None = None
        self._end: Future[bool] = Future()
        threading.stack_size(_STACK_NBYTES)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def start(self, body: Callable[[int], bool], rank: int) -> Future[bool]:
        self._end = Future()
        self._task = lambda: body(rank)
        self._go.release()
        return self._end

    def end(self) -> None:
        self._task = None
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        while self._go.acquire() and (task := self._task) is not None:
            try:
                self._end.set_result(task())
            except Exception as error:
                self._end.set_exception(error)


def _serve_torch() -> int:
    """Serve torch's store until standard input ends; the first line says where."""
    store = importlib.import_module("torch.distributed").TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(f"127.0.0.1:{store.port}", flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
