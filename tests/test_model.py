"""The protocols of the native core hold in every interleaving of small configurations, and each of their rules is needed.

A test takes one rule out and expects the explorer to find what then goes wrong. Run with `-s` to see state counts and traces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TypeVar

import pytest
from model import large, ring
from model.explorer import Model, Report, TooManyStatesError, explore
from model.large import Large
from model.ring import Ring

S = TypeVar("S")
DEADLOCK = "deadlock"


def check(model: Model[S], problem: str = "") -> Report:
    """Explore and expect `problem` (a part of its text), or none."""
    report = explore(model)
    print(f"\n{model}\n{report}")
    if problem:
        assert problem in report.problem, report
    else:
        assert not report.problem, report
        assert report.ends
    return report


def ring_without(*names: str) -> ring.Rules:
    return dataclasses.replace(ring.Rules(), **dict.fromkeys(names, False))


def large_without(*names: str) -> large.Rules:
    return dataclasses.replace(large.Rules(), **dict.fromkeys(names, False))


# -- posting and reading --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "slots", "calls"),
    [(2, 1, 3), (2, 2, 4), (2, 3, 5), (3, 1, 3), (3, 2, 3)],
)
def test_ring_reads_whole_headers_of_its_own_call(ranks: int, slots: int, calls: int) -> None:
    check(Ring(ranks=ranks, slots=slots, calls=calls))


@pytest.mark.parametrize("memory", [False, True], ids=["sc", "tso"])
def test_ring_reads_whole_headers_under_both_memory_models(memory: bool) -> None:
    check(Ring(slots=2, calls=3, tso=memory))


@pytest.mark.parametrize(
    ("rule", "problem"),
    [("gate_peers", "was meant"), ("gate_own", "was meant"), ("gate_tight", "was meant"), ("post_last", "was meant")],
)
@pytest.mark.parametrize(("ranks", "slots"), [(2, 1), (2, 2), (3, 1)])
def test_ring_needs_its_gate(rule: str, problem: str, ranks: int, slots: int) -> None:
    check(Ring(ranks=ranks, slots=slots, calls=slots + 1, rules=ring_without(rule)), problem)


def test_two_slots_and_a_seen_flag_are_enough_only_when_each_call_is_awaited() -> None:
    rules = ring.Rules(gate_by_posted=True)
    check(Ring(slots=2, calls=4, window=1, rules=rules))
    check(Ring(slots=2, calls=4, window=2, rules=rules), "was meant")


# -- sleeping and waking --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [False, True], ids=["sc", "tso"])
@pytest.mark.parametrize(("ranks", "slots", "calls"), [(2, 1, 3), (2, 2, 3), (3, 1, 1)])
def test_no_wake_up_is_lost(ranks: int, slots: int, calls: int, memory: bool) -> None:
    check(Ring(ranks=ranks, slots=slots, calls=calls, sleep=True, tso=memory))


@pytest.mark.parametrize("rule", ["flag_seq_cst", "sleeper_seq_cst"])
def test_wake_ups_need_seq_cst(rule: str) -> None:
    """Release and acquire alone lose a wake-up as soon as a store may wait in a buffer; without one they would do."""
    rules = ring_without(rule)
    check(Ring(calls=3, sleep=True, rules=rules))
    check(Ring(calls=3, sleep=True, tso=True, rules=rules), DEADLOCK)


@pytest.mark.parametrize("rule", ["check_again", "drain_first"])
@pytest.mark.parametrize("memory", [False, True], ids=["sc", "tso"])
def test_wake_ups_need_the_right_order(rule: str, memory: bool) -> None:
    check(Ring(calls=2, sleep=True, tso=memory, rules=ring_without(rule)), DEADLOCK)


@pytest.mark.parametrize(("ranks", "slots", "calls"), [(2, 1, 3), (2, 2, 4)])
def test_the_ring_lives_without_a_bell_for_consumed(ranks: int, slots: int, calls: int) -> None:
    """A rank whose post waits for room is woken late, not never: the last reader's own next post rings it."""
    check(Ring(ranks=ranks, slots=slots, calls=calls, sleep=True, tso=True, rules=ring_without("ring_on_consumed")))


# -- giving up ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "slots", "calls", "timeouts"),
    [(2, 1, 3, 2), (2, 2, 3, 1), (3, 1, 2, 1)],
)
def test_an_abort_ends_every_call_and_no_reused_memory_is_believed(ranks: int, slots: int, calls: int, timeouts: int) -> None:
    check(Ring(ranks=ranks, slots=slots, calls=calls, timeouts=timeouts))


@pytest.mark.parametrize("memory", [False, True], ids=["sc", "tso"])
def test_an_abort_wakes_sleepers(memory: bool) -> None:
    check(Ring(calls=2, timeouts=1, sleep=True, tso=memory))
    check(Ring(calls=2, timeouts=1, sleep=True, tso=memory, rules=ring_without("ring_on_abort")), DEADLOCK)


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("abort_check", "though an abort was to be seen"),
        ("abort_check_last", "though an abort was to be seen"),
        ("abort_before_reuse", "with reused memory"),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_success_needs_a_look_at_abort_from_after_the_last_read(rule: str, problem: str, ranks: int) -> None:
    check(Ring(ranks=ranks, timeouts=1, rules=ring_without(rule)), problem)


# -- dying ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "slots", "calls"), [(2, 1, 3), (2, 2, 3), (3, 1, 2)])
def test_a_death_ends_every_call_and_what_was_posted_counts(ranks: int, slots: int, calls: int) -> None:
    check(Ring(ranks=ranks, slots=slots, calls=calls, deaths=1))


@pytest.mark.parametrize("memory", [False, True], ids=["sc", "tso"])
def test_a_death_wakes_sleepers_at_the_end_of_a_slice(memory: bool) -> None:
    check(Ring(calls=2, deaths=1, sleep=True, tso=memory))


def test_a_death_and_a_timeout_together() -> None:
    check(Ring(calls=2, deaths=1, timeouts=1, sleep=True))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_death_needs_a_second_look_at_the_flags(ranks: int) -> None:
    problem = "whose headers were all posted before the death"
    check(Ring(ranks=ranks, deaths=1, rules=ring_without("look_again_at_death")), problem)


def test_a_rank_that_fails_because_of_a_death_must_say_so() -> None:
    """Else its memory is reused under a third rank that saw every header posted and does not know of the death yet."""
    rules = ring_without("publish_every_failure")
    check(Ring(ranks=2, deaths=1, rules=rules))
    check(Ring(ranks=3, deaths=1, rules=rules), "with reused memory")


# -- the segment pipeline ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True], ids=["free-start", "strict-start"])
@pytest.mark.parametrize("gathers", [(), (0,), (1,), (0, 1)], ids=["sum-sum", "gather-sum", "sum-gather", "gather-gather"])
@pytest.mark.parametrize(
    ("ranks", "depth", "rounds"),
    [(2, 1, (3, 3)), (2, 2, (4, 3)), (2, 2, (3, 1)), (2, 3, (4, 1)), (2, 3, (2, 2, 2)), (3, 1, (2, 2)), (3, 2, (2, 1))],
)
def test_pipeline_reads_the_segments_it_means(
    ranks: int, depth: int, rounds: tuple[int, ...], gathers: tuple[int, ...], strict: bool
) -> None:
    check(Large(ranks=ranks, depth=depth, rounds=rounds, gathers=gathers, strict=strict))


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("gate_staging", "was meant"),
        ("gate_result", "was meant"),
        ("wait_staged", "was meant"),
        ("wait_reduced", "was meant"),
        ("count_last", "was meant"),
        ("numbered", "was meant"),
        ("finish_at_least", DEADLOCK),
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_pipeline_needs_each_rule(rule: str, problem: str, depth: int) -> None:
    check(Large(depth=depth, rounds=(3, 3), rules=large_without(rule)), problem)


@pytest.mark.parametrize("ranks", [2, 3])
def test_pipeline_needs_the_wait_at_the_end_of_a_call(ranks: int) -> None:
    """Two sums guard each other by their staging; a gather behind a sum waits for nobody and needs the wait (or strict gates)."""
    rules = large_without("finish_wait")
    check(Large(ranks=ranks, rounds=(2, 2), gathers=(1,), rules=rules), "was meant")
    check(Large(ranks=ranks, rounds=(2, 2), rules=rules))
    check(Large(ranks=ranks, rounds=(2, 2), gathers=(1,), strict=True, rules=rules))


def test_pipeline_that_copies_its_own_result_needs_its_own_copied() -> None:
    check(Large(rounds=(3, 3), own_result=True))
    check(Large(rounds=(3, 3), own_result=True, rules=large_without("gate_own_result")), "was meant")


@pytest.mark.parametrize(("ranks", "depth", "rounds", "timeouts"), [(2, 2, (3, 3), 1), (3, 2, (1, 1), 1), (3, 1, (2,), 2)])
def test_pipeline_survives_a_timeout(ranks: int, depth: int, rounds: tuple[int, ...], timeouts: int) -> None:
    model = Large(ranks=ranks, depth=depth, rounds=rounds, timeouts=timeouts)
    check(model)
    check(dataclasses.replace(model, rules=large_without("abort_check")), "with reused memory")


# -- the explorer itself ------------------------------------------------------------------------------------------------------


class Walk:
    """Numbers as states: `edges` lists what each leads to, negative ones by a step that is not due."""

    def __init__(self, edges: dict[int, list[int]], ends: set[int], bad: int | None = None) -> None:
        self.edges, self.ends, self.bad = edges, ends, bad

    def first(self) -> int:
        return 1

    def steps(self, state: int) -> Iterator[tuple[str, int, bool]]:
        for to in self.edges.get(state, []):
            yield f"{state}-{abs(to)}", abs(to), to > 0

    def broken(self, state: int) -> str:
        return "bad" if state == self.bad else ""

    def ended(self, state: int) -> bool:
        return state in self.ends


def test_explorer_gives_a_shortest_trace() -> None:
    report = explore(Walk({1: [2, 3], 2: [4], 4: [5], 3: [5]}, {5}, bad=5))
    assert (report.problem, report.trace) == ("bad", ("1-3", "3-5"))


def test_explorer_finds_states_without_a_due_step_and_loops_without_an_end() -> None:
    assert explore(Walk({1: [2, 3], 3: [-2]}, {2})).trace == ("1-3",)
    report = explore(Walk({1: [2, 3], 3: [4], 4: [3]}, {2}))
    assert (report.problem, report.trace) == ("no end can be reached from here", ("1-3",))
    assert explore(Walk({1: [2, 3], 3: [1]}, {2})) == Report(states=3, steps=3, ends=1)


def test_explorer_refuses_to_go_on_for_ever() -> None:
    with pytest.raises(TooManyStatesError):
        explore(Walk({at: [at + 1] for at in range(1, 99)}, {99}), limit=10)
