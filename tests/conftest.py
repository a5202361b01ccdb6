"""Fixtures: the rendezvous service of the session, pools of rank processes, and the loops that tests run under."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop
from support.ranks import Pools, RankPool, ServerThread, run_local

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
RunRanks = Callable[..., list[Any]]
RunLoop = Callable[[Coroutine[Any, Any, Any]], Any]

LOOPS: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def server() -> Iterator[ServerThread]:
    """A rendezvous service that hosts the jobs of the session."""
    with ServerThread() as thread:
        yield thread


@pytest.fixture(scope="session")
def pools(server: ServerThread) -> Iterator[Pools]:
    """Pools of rank processes by size."""
    held = Pools(server)
    yield held
    held.close()


@pytest.fixture(params=["asyncio", "uvloop"])
def run_loop(request: pytest.FixtureRequest) -> RunLoop:
    """Run a coroutine to its end, under each kind of loop."""
    factory = LOOPS[request.param]

    def run(body: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(body)

    return run


@pytest.fixture(params=["local", "processes"])
def run_ranks(request: pytest.FixtureRequest) -> RunRanks:
    """Run ``function(group, *args)`` on `size` ranks: all in this process, then as processes; each call has a world of its own."""
    if request.param == "processes":
        held: Pools = request.getfixturevalue("pools")
        return lambda size, function, *args: held.get(size).run(function, *args, fresh=True)
    return lambda size, function, *args: asyncio.run(run_local(size, function, *args))


@pytest.fixture
def doomed(server: ServerThread) -> Iterator[Callable[..., RankPool]]:
    """Make pools whose ranks the test will harm."""
    made: list[RankPool] = []

    def make(size: int, **environment: str) -> RankPool:
        made.append(RankPool(server, size, **environment))
        return made[-1]

    yield make
    for pool in made:
        pool.broken = True
        pool.close()
