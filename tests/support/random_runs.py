"""Run random programs on the ranks of a world and say what went wrong, where, and how to see it again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, Final

import aiodist
from support.random_arrays import Own, difference
from support.random_collectives import Operation, Place
from support.random_programs import Issue, Making, Pause, Program, Step, Wait, draw_program, draw_script, size_of
from support.ranks import Pools, run_local

DEADLINE: Final = 40.0
"""Seconds after which a program counts as hung; they take some milliseconds."""
_KEPT: Final = 0.25
_PAUSES: Final = (0.0, 0.0, 0.0005, 0.002)


def run_locally(seeds: Iterable[int]) -> None:
    """Run programs, each on the ranks of a new world in this process."""

    async def run(program: Program) -> None:
        await run_local(program.size, run_program, program, deadline=DEADLINE + 20)

    for seed in seeds:
        asyncio.run(run(draw_program(seed)))


def run_in_processes(pools: Pools, seeds: list[int]) -> None:
    """Run programs of one size one after the other on a pool of processes, in one world."""
    (size,) = {size_of(seed) for seed in seeds}
    pools.get(size).run(run_programs, seeds, deadline=DEADLINE + 20 + len(seeds))


async def run_programs(world: aiodist.Group, seeds: list[int]) -> None:
    """Run programs one after the other on this rank; there is nothing between them that keeps the ranks together."""
    for done, seed in enumerate(seeds):
        try:
            await run_program(world, draw_program(seed))
        except AssertionError as error:
            error.add_note(f"the programs before it in this world: {seeds[:done]}")
            raise


async def run_program(world: aiodist.Group, program: Program) -> None:
    """Do a rank's part of a program.

    Raises:
        AssertionError: a result is wrong or does not come; the text names seed, operation and rank.
    """
    await _Rank(world, program).run()


class _Rank:
    """One rank on its way through a program."""

    def __init__(self, world: aiodist.Group, program: Program) -> None:
        self._world = world
        self._program = program
        self._draw = random.Random(f"rank {program.seed} {world.rank}")
        loop = asyncio.get_running_loop()
        self._groups: list[asyncio.Future[aiodist.Group]] = [loop.create_future() for _ in program.places]
        self._groups[0].set_result(world)
        self._started: dict[Operation, tuple[Own, Any]] = {}
        self._steps: dict[int, Step] = {}
        self._kept: list[tuple[Operation, Any, Any]] = []

    async def run(self) -> None:
        script = draw_script(self._program, self._world.rank)
        try:
            async with asyncio.timeout(DEADLINE) as limit:
                await _side_by_side([self._lane(steps) for steps in script])
                await self._world.barrier()
                await self._close()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._hang() from error
        finally:
            tasks = [started for _, started in self._started.values() if isinstance(started, asyncio.Task)]
            await _end(tasks)
        for operation, value, due in self._kept:
            if text := difference(value, due):
                raise self._failure(operation, f"the result changed afterwards: {text}")

    def _hang(self) -> AssertionError:
        waited = [operation for step in self._steps.values() if isinstance(step, Wait) for operation in step.operations]
        waited = [operation for operation in waited if operation in self._started]
        joined = [step.operation.number for step in self._steps.values() if isinstance(step, Issue)]
        text = f"hangs in the wait for {[one.number for one in waited]} and to join the places of {joined}"
        return self._failure(waited[0] if waited else None, f"{text}; issued and not seen to end: {[one.number for one in self._started]}")

    def _failure(self, operation: Operation | None, problem: str) -> AssertionError:
        seed, number = self._program.seed, "the end" if operation is None else f"operation {operation.number}"
        return AssertionError(
            f"program {seed}, {number}, rank {self._world.rank} of {self._world.size}: {problem}\n"
            f"    {number}: {operation}\n"
            f"    again: python tests/run_random_programs.py --seed {seed} --count 1 (--show prints the program)"
        )

    async def _lane(self, steps: list[Step]) -> None:
        for step in steps:
            self._steps[id(steps)] = step
            if isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
            elif isinstance(step, Issue):
                await self._issue(step.operation, step.dropped)
            else:
                await self._wait(step)
        self._steps.pop(id(steps), None)

    async def _issue(self, operation: Operation, dropped: bool) -> None:
        group = await self._groups[operation.place.number]
        own = Own(group, random.Random(f"own {self._program.seed} {operation.number} {self._world.rank}"))
        try:
            started = operation.start(own, group.rank)
        except Exception as error:
            started = error
        if isinstance(operation, Making) and not isinstance(started, Exception):
            started = asyncio.ensure_future(self._join(operation, started, own))
        if not dropped:
            self._started[operation] = own, started
        elif isinstance(started, Exception) and (text := difference(started, operation.due(group.rank))):
            raise self._failure(operation, text) from started

    async def _join(self, operation: Making, awaitable: Awaitable[Any], own: Own) -> None:
        due = operation.due(own.group.rank)
        try:
            group = await awaitable
            text = self._wrong_group(group, due)
            if text is None and operation.way == "channel" and own.draw.random() < 0.3:
                again = await operation.start(own, own.group.rank)
                text = None if again is group else f"asked for again, it is another object: {again!r}"
        except Exception as error:
            text, group = f"{type(error).__name__}: {error}", None
        failure = None if text is None else self._failure(operation, text)
        if failure is None and due is not None:
            self._groups[due.number].set_result(group)
        if failure is not None:
            for place in operation.makes:
                self._groups[place.number].set_exception(failure)
                self._groups[place.number].exception()  # counts as seen: it is raised here
            raise failure

    def _wrong_group(self, group: Any, due: Place | None) -> str | None:
        if due is None:
            return None if group is None else f"{group!r} where None is due"
        if not isinstance(group, aiodist.Group):
            return f"{group!r} where a group is due"
        got = (tuple(group.ranks), group.rank, group.size)
        wanted = (due.ranks, due.ranks.index(self._world.rank), due.size)
        return None if got == wanted else f"ranks, rank and size are {got} where {wanted} is due"

    async def _wait(self, step: Wait) -> None:
        started = [self._started[operation][1] for operation in step.operations]
        outcomes = await self._outcomes(step, started)
        for operation, outcome in zip(step.operations, outcomes, strict=True):
            own = self._started.pop(operation)[0]
            if isinstance(operation, Making) and isinstance(outcome, AssertionError):
                raise outcome  # it says where it is from
            due = None if isinstance(operation, Making) else operation.due(own.group.rank)
            if text := own.problem(outcome, due):
                raise self._failure(operation, text) from (outcome if isinstance(outcome, BaseException) else None)
            if self._draw.random() < _KEPT:
                self._kept.append((operation, outcome, due))

    async def _outcomes(self, step: Wait, started: list[Any]) -> list[Any]:
        if step.way == "gather":
            return await asyncio.gather(*(_value(one) if isinstance(one, Exception) else one for one in started), return_exceptions=True)
        if step.way == "tasks":
            tasks = [asyncio.ensure_future(_outcome(one)) for one in started]
            return [await task for task in reversed(tasks)][::-1]
        steady = [operation.steady for operation in step.operations]
        return [await self._one_outcome("await" if held else step.way, one) for held, one in zip(steady, started, strict=True)]

    async def _one_outcome(self, way: str, started: Any) -> Any:
        if way == "timeout":
            async with asyncio.timeout(DEADLINE):
                return await _outcome(started)
        if way in ("cancel", "two waiters"):
            waiter = asyncio.ensure_future(_outcome(started))
            other = asyncio.ensure_future(_outcome(started))
            await asyncio.sleep(self._draw.choice(_PAUSES))
            for task in (waiter, other) if way == "cancel" else (waiter,):
                task.cancel()
            await asyncio.wait([waiter, other])
        outcome = await _outcome(started)
        if way == "twice" and not isinstance(started, Exception):
            again = await _outcome(started)
            same = again is outcome or (isinstance(outcome, Exception) and repr(again) == repr(outcome))
            if not same or not started.done() or started.cancelled():
                return AssertionError(f"a second await gives {again!r} after {outcome!r}")
        return outcome

    async def _close(self) -> None:
        groups = [future.result() for future in self._groups[1:] if future.done()]
        self._draw.shuffle(groups)
        for group in groups:
            await group.aclose()
            assert group.closed, f"{group} is not closed"


async def _value(value: Any) -> Any:
    return value


async def _outcome(started: Any) -> Any:
    """Return what a call gives or raises; a cancelled call gives its error, a cancelled wait raises it."""
    if isinstance(started, Exception):
        return started
    try:
        return await started
    except Exception as error:
        return error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return error


async def _side_by_side(bodies: list[Coroutine[Any, Any, None]]) -> None:
    """Await all of them; the first error ends the others and is raised, by itself."""
    tasks = [asyncio.ensure_future(body) for body in bodies]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
