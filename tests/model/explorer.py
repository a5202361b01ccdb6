"""A breadth-first explorer of every reachable state of a small model.

A model gives its first state, the steps out of a state, what is wrong with a state, and whether a state is a proper end.
The explorer visits each state once. It stops at the first broken state; after that come states that nothing leads out of,
and last states from which no end can be reached. Search goes level by level, so the trace it reports is a shortest one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

S = TypeVar("S")


class Model(Protocol[S]):
    """What the explorer needs to know of a model; states are hashable and never change.

    A step is what happened, the next state, and whether it is due, that is: must happen some day. Steps that are not due
    belong to the world outside (a timeout, a death, a buffer reused); a state that only such steps lead out of is a
    deadlock all the same.
    """

    def first(self) -> S: ...

    def steps(self, state: S) -> Iterator[tuple[str, S, bool]]: ...

    def broken(self, state: S) -> str: ...

    def ended(self, state: S) -> bool: ...


@dataclass(frozen=True)
class Report:
    """What an exploration found: sizes, and the first problem with a shortest trace to it (empty: none)."""

    states: int
    steps: int
    ends: int
    problem: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{self.states} states, {self.steps} steps, {self.ends} ends"
        if not self.problem:
            return head
        return "\n".join([f"{head}: {self.problem}", *(f"{at:3d}. {label}" for at, label in enumerate(self.trace, 1))])


class TooManyStatesError(Exception):
    """The model has more states than the caller allowed."""


class _Search:
    """The states seen so far, by number, each with the step that first led to it."""

    def __init__(self) -> None:
        self.came: list[tuple[int, str]] = []
        self.into: list[list[int]] = []
        self.ends: list[int] = []
        self.steps = 0

    def add(self, parent: int, label: str) -> None:
        self.came.append((parent, label))
        self.into.append([])

    def report(self, problem: str = "", at: int = 0) -> Report:
        trace: list[str] = []
        while problem and at:
            at, label = self.came[at]
            trace.append(label)
        return Report(len(self.came), self.steps, len(self.ends), problem, tuple(reversed(trace)))

    def lost(self) -> int | None:
        """The first state from which no end can be reached by steps that are due."""
        alive = bytearray(len(self.came))
        todo = list(self.ends)
        for at in todo:
            alive[at] = 1
        while todo:
            for before in self.into[todo.pop()]:
                if not alive[before]:
                    alive[before] = 1
                    todo.append(before)
        at = alive.find(0)
        return None if at < 0 else at


def explore(model: Model[S], limit: int = 2_000_000) -> Report:
    """Visit every reachable state of `model`.

    Args:
        model: The model.
        limit: The most states to visit.

    Returns:
        The report: the first broken state, else the first deadlock, else the first state no end can be reached from.

    Raises:
        TooManyStatesError: When there are more than `limit` states.
    """
    start = model.first()
    numbers: dict[S, int] = {start: 0}
    queue: list[S] = [start]
    search = _Search()
    search.add(0, "")
    deadlock: int | None = None
    for at, state in enumerate(queue):
        problem = model.broken(state)
        if problem:
            return search.report(problem, at)
        due_steps = 0
        for label, after, due in model.steps(state):
            search.steps += 1
            number = numbers.get(after)
            if number is None:
                number = numbers[after] = len(queue)
                queue.append(after)
                search.add(at, label)
            if due:
                due_steps += 1
                search.into[number].append(at)
        if model.ended(state):
            search.ends.append(at)
        elif not due_steps and deadlock is None:
            deadlock = at
        if len(queue) > limit:
            raise TooManyStatesError(f"more than {limit} states")
    if deadlock is not None:
        return search.report("deadlock", deadlock)
    lost = search.lost()
    return search.report() if lost is None else search.report("no end can be reached from here", lost)
