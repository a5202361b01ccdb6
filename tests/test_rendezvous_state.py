"""The rendezvous as a state machine: no socket, no clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.desk import Desk, refused

from aiodist.rendezvous.job import Limits
from aiodist.rendezvous.messages import (
    Add,
    Barrier,
    Beat,
    Cancel,
    Compare,
    Delete,
    Done,
    Formed,
    Gather,
    Get,
    Hello,
    Join,
    Leave,
    List,
    MalformedMessageError,
    Notice,
    Number,
    Resume,
    Roster,
    Seen,
    Set,
    Value,
    decode_request,
)
from aiodist.rendezvous.views import show_job

pytestmark = pytest.mark.timeout(60)


def test_a_world_forms_when_the_last_member_joins() -> None:
    desk = Desk()
    assert desk.join(7, None, 3) == []
    assert desk.join(8, 0, 3) == []
    answers = desk.join(9, None, 3)
    roster = Roster([{"host": "h", "pid": 8}, {"host": "h", "pid": 7}, {"host": "h", "pid": 9}])
    assert answers == [roster, Formed(1, 2, 3, 1)]
    assert desk.read(7) == [roster, Formed(1, 1, 3, 1)]
    assert desk.read(8) == [roster, Formed(1, 0, 3, 1)]
    assert desk.service.next_deadline() is None


def test_a_rank_that_is_claimed_twice_fails_the_job_for_all_of_it() -> None:
    desk = Desk()
    desk.join(1, 0, 4)
    desk.join(2, 1, 4)
    claimant = refused(desk.join(3, 0, 4))
    assert "rank 0 is taken by h:1" in claimant.text and "h:3" in claimant.text and claimant.ranks == [0]
    assert refused(desk.read(1)).text == refused(desk.read(2)).text == claimant.text
    assert refused(desk.join(4, 1, 4)).text == claimant.text  # The fourth came late and is told as well,
    assert desk.service.job("X", desk.now) is None
    desk.world(2, first=10)  # and then the name is free.


def test_a_failure_is_told_to_late_ranks_for_a_short_time_only() -> None:
    desk = Desk(Limits(failed_s=5))
    desk.join(1, 0, 4)
    desk.join(2, 0, 4)
    desk.sleep(6)
    assert desk.join(3, 0, 4) == []


def test_members_that_disagree_on_the_world_size_are_all_told_both() -> None:
    desk = Desk()
    desk.join(1, 0, 4)
    desk.join(2, 1, 4)
    text = refused(desk.join(3, 2, 3)).text
    assert "world size 4 (h:1) and 3 (h:3)" in text
    assert refused(desk.read(1)).text == refused(desk.read(2)).text == refused(desk.join(4, 3, 4)).text == text


@pytest.mark.parametrize(("rank", "size"), [(4, 4), (-1, 4), (0, 0), (None, -3), (0, 20)])
def test_a_join_outside_the_world_is_a_wrong_argument(rank: int | None, size: int) -> None:
    desk = Desk(Limits(members=16))
    assert refused(desk.join(1, rank, size)).code == "argument"
    assert desk.service.job("X", desk.now) is None


def test_missing_ranks_are_listed_at_the_timeout_to_everyone_who_waits() -> None:
    desk = Desk()
    desk.join(0, 0, 4, timeout=5)
    desk.sleep(1)
    desk.join(1, 1, 4, timeout=5)
    assert desk.service.next_deadline() == 1005.0
    desk.sleep(3.9)
    assert desk.read(0) == desk.read(1) == []
    desk.sleep(0.2)
    first, second = refused(desk.read(0)), refused(desk.read(1))
    assert first.ranks == second.ranks == [2, 3]
    assert "ranks 2, 3 of 4 did not join within 5 s" in first.text and "rank 1 is h:1" in first.text
    assert desk.service.next_deadline() is None and desk.service.job("X", desk.now) is None


@pytest.mark.parametrize("early", [0.5, 1e-9, 0.0, -1e-9])
def test_a_joiner_at_the_last_moment_is_in_for_all_or_out_for_all(early: float) -> None:
    desk = Desk()
    desk.join(0, 0, 2, timeout=5)
    desk.now += 5 - early  # the server's timer may be late
    last = desk.join(1, 1, 2, timeout=5)
    desk.sleep(0)
    first = desk.read(0)
    assert any(isinstance(answer, Formed) for answer in first) == any(isinstance(answer, Formed) for answer in last)
    if not isinstance(first[-1], Formed):
        desk.sleep(10)
        assert refused(desk.read(1)).ranks == [0]


@pytest.mark.parametrize("way", ["cancel", "hang_up", "leave"])
def test_a_withdrawn_join_frees_its_rank_at_once(way: str) -> None:
    desk = Desk()
    desk.join(1, 0)
    if way == "cancel":
        desk.send(1, Cancel(1))
    elif way == "leave":
        desk.send(1, Leave(2))
    else:
        desk.hang_up(1)
    assert desk.join(2, 0) == []
    assert isinstance(desk.join(3, 1)[-1], Formed)


def test_a_join_that_is_sent_again_is_recognised() -> None:
    desk = Desk()
    desk.join(1, 0, member="the-same-one")
    assert desk.join(5, 0, member="the-same-one") == []  # Over a new connection, before the world has formed,
    assert refused(desk.read(1)).code == "withdrawn"
    desk.hang_up(1)
    desk.join(2, 1)
    formed = desk.read(5)
    assert isinstance(formed[-1], Formed) and formed[-1].rank == 0
    assert desk.join(6, 0, member="the-same-one") == formed  # and after it.
    desk.hang_up(5)
    assert desk.read(2) == []  # Nobody was lost.
    assert refused(desk.join(7, 1, member="the-same-one")).code == "argument"


def test_a_late_joiner_is_refused_and_disturbs_nobody() -> None:
    desk = Desk()
    desk.world(2)
    assert refused(desk.join(8, 1)).text == "job X is already formed (world 2)"
    assert refused(desk.join(9, None)).text == "job X is already formed (world 2)"
    assert desk.ask(0, Set(2, "k", b"v")) == Done(2)
    assert desk.read(1) == []


def test_a_job_that_ended_well_refuses_newcomers_for_a_while() -> None:
    desk = Desk(Limits(ended_s=10))
    desk.world(2)
    for conn in (0, 1):
        desk.send(conn, Leave(2))
    assert refused(desk.join(8, 0)).text.startswith("job X has ended")
    desk.sleep(10)
    assert desk.join(8, 0) == []


def test_a_job_that_ended_badly_can_start_again_at_once_with_another_size() -> None:
    desk = Desk()
    desk.world(4)
    desk.send(0, Set(2, "k", b"old"))
    for conn in range(4):
        desk.hang_up(conn)
    desk.world(3, first=10)
    desk.read(10)
    desk.send(10, Get(2, "k", 0.0))
    desk.sleep(0)
    assert refused(desk.read(10)).code == "timeout"


def test_members_of_one_world_may_form_the_next_one() -> None:
    desk = Desk()
    desk.world(2)
    desk.send(0, Set(2, "k", b"old"))
    desk.send(0, Leave(3))
    assert desk.join(10, 0, after=1) == []  # Rank 1 is still in the first world.
    desk.send(1, Leave(2))
    assert desk.join(11, 1, after=1)[-1] == Formed(1, 1, 2, 2)
    desk.read(10)
    desk.send(10, Get(2, "k", 1.0))
    desk.sleep(1)
    assert "was not set within 1 s" in refused(desk.read(10)).text


def test_the_others_are_told_what_befell_a_member() -> None:
    desk = Desk()
    desk.world(4)
    for conn in range(4):
        desk.read(conn)
    desk.hang_up(1)
    desk.send(2, Leave(2, "ValueError: no"))
    desk.send(3, Leave(2))
    (lost,) = desk.read(0)  # At once; those that follow closely come together.
    desk.sleep(0.1)
    failed, left = desk.read(0)
    assert lost == Notice("lost", 1, "its connection ended", {"host": "h", "pid": 1})
    assert failed == Notice("failed", 2, "ValueError: no", {"host": "h", "pid": 2})
    assert isinstance(left, Notice) and (left.kind, left.rank) == ("left", 3)
    job = desk.service.job("X", desk.now)
    assert job is not None
    assert [member.state for member in show_job(job, 4).worlds[0].members] == ["active", "lost", "failed", "left"]


def test_a_join_cancelled_while_its_world_forms_is_told_to_the_others() -> None:
    desk = Desk()
    desk.join(0, 0)
    desk.join(1, 1)
    desk.read(0)
    desk.send(1, Cancel(1))
    assert desk.read(0) == [Notice("failed", 1, "its join was cancelled", {"host": "h", "pid": 1})]


def test_keys() -> None:
    desk = Desk()
    desk.world(2)
    desk.world(2, job="Y", first=10)
    desk.send(1, Get(2, "k", 5))
    desk.send(1, Get(3, "k", 5))
    assert desk.read(1) == []
    assert desk.ask(0, Set(2, "k", b"v")) == Done(2)
    assert desk.read(1) == [Value(2, b"v"), Value(3, b"v")]
    assert desk.ask(0, Add(3, "n", 5)) == Number(3, 5)
    assert desk.ask(1, Add(4, "n", -7)) == Number(4, -2)
    assert desk.ask(0, Compare(4, "k", b"w", b"x")) == Value(4, b"v")
    assert desk.ask(0, Compare(5, "k", b"v", b"x")) == Value(5, b"x", swapped=True)
    assert desk.ask(0, Compare(6, "new", None, b"1")) == Value(6, b"1", swapped=True)
    assert desk.ask(0, Delete(7, "k")) == Number(7, 1)
    assert desk.ask(0, Delete(8, "k")) == Number(8, 0)
    assert refused([desk.ask(0, Add(9, "n", 2**63 - 1)), desk.ask(0, Add(10, "n", 2**63 - 1))][1:]).code == "argument"
    desk.send(0, Set(11, "text", b"abc"))
    desk.read(0)
    assert refused([desk.ask(0, Add(12, "text", 1))]).code == "argument"
    desk.send(10, Get(2, "n", 1))
    desk.sleep(1)
    assert refused(desk.read(10)).code == "timeout"  # The other job's key is not to be seen.


def test_a_cancelled_get_is_answered_by_its_withdrawal_only() -> None:
    desk = Desk()
    desk.world(2)
    desk.send(0, Get(2, "k", 5))
    desk.send(0, Cancel(2))
    assert refused(desk.read(0)).code == "withdrawn"
    desk.send(1, Set(2, "k", b"v"))
    desk.sleep(10)
    assert desk.read(0) == []


def test_barriers_complete_name_the_missing_and_can_be_used_again() -> None:
    desk = Desk()
    desk.world(3)
    for conn in range(3):
        desk.read(conn)
    for _ in range(2):
        desk.send(0, Barrier(2, "b", 5))
        desk.send(1, Barrier(2, "b", 5))
        assert desk.read(0) == desk.read(1) == []
        desk.send(2, Barrier(2, "b", 5))
        assert [desk.read(conn) for conn in range(3)] == [[Done(2)]] * 3
    desk.send(1, Barrier(3, "b", 5))
    assert refused([desk.ask(1, Barrier(4, "b", 5))]).text == "rank 1 is in barrier 'b' already"
    desk.sleep(5)
    late = refused(desk.read(1))
    assert late.ranks == [0, 2] and "waiting for rank 0 (h:0), rank 2 (h:2)" in late.text
    desk.send(1, Barrier(5, "b", 5))
    desk.hang_up(2)
    broken = refused([answer for answer in desk.read(1) if not isinstance(answer, Notice)])
    assert broken.ranks == [2] and "rank 2 (h:2) lost" in broken.text
    assert desk.ask(1, Barrier(6, "c", 5)) != Done(6)
    assert desk.service.next_deadline() is None


def test_limits() -> None:
    desk = Desk(Limits(jobs=1, keys=2, key_nbytes=4, value_nbytes=8, keys_nbytes=16, waits=2, info_nbytes=64))
    desk.world(2)
    assert refused(desk.join(9, 0, job="Y")).code == "limit"
    assert refused([desk.ask(0, Set(2, "a" * 5, b""))]).code == "argument"
    assert refused([desk.ask(0, Set(2, "a", b"v" * 9))]).code == "argument"
    assert desk.ask(0, Set(2, "a", b"v" * 8)) == Done(2)
    assert refused([desk.ask(0, Set(2, "b", b"v" * 8))]).code == "limit"
    assert desk.ask(0, Set(2, "b", b"")) == Done(2)
    assert refused([desk.ask(0, Set(2, "c", b""))]).code == "limit"
    for number in (3, 4, 5):
        desk.send(0, Get(number, "z", 5))
    assert refused(desk.read(0)).text == "a member may wait for 2 things at a time"
    desk.send(9, Join(1, "X", "m" * 8, 2, 0, {"pid": "p" * 100}, 5))
    assert refused(desk.read(9)).code == "argument"


ids = st.integers(1, 4)
names = st.sampled_from(["a", "b", "é"])
members = st.sampled_from(["member-1", "member-2", "member-3"])
timeouts = st.sampled_from([0.0, 1.0, 5.0])
requests = st.one_of(
    st.builds(
        Join,
        ids,
        st.sampled_from(["X", "Y"]),
        members,
        st.integers(0, 3),
        st.none() | st.integers(-1, 3),
        st.just({"pid": 1}),
        timeouts,
        st.integers(0, 2),
    ),
    st.builds(Set, ids, names, st.binary(max_size=3)),
    st.builds(Get, ids, names, timeouts),
    st.builds(Add, ids, names, st.integers(-3, 3)),
    st.builds(Compare, ids, names, st.none() | st.just(b"1"), st.just(b"2")),
    st.builds(Delete, ids, names),
    st.builds(Barrier, ids, names, timeouts),
    st.builds(Gather, ids, names, st.lists(st.integers(0, 3), max_size=3), st.binary(max_size=3), timeouts),
    st.builds(Leave, ids, st.none() | st.just("why")),
    st.builds(Cancel, ids),
    st.builds(Seen, st.lists(ids, max_size=3)),
    st.builds(List, ids, names),
    st.builds(Resume, ids, st.sampled_from(["X", "Y"]), members, st.integers(1, 2), st.lists(ids, max_size=3)),
    st.builds(Beat),
    st.builds(Hello, st.just(1)),
)
steps = st.one_of(
    st.tuples(st.integers(0, 3), requests),
    st.tuples(st.integers(0, 3), st.sampled_from(["hang up", "break"])),
    st.tuples(st.just(-1), timeouts),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(steps, max_size=40))
def test_no_order_of_requests_breaks_the_machine(history: list[tuple[int, Any]]) -> None:
    desk = Desk()
    for conn, step in history:
        if conn < 0:
            desk.sleep(step)
        elif step in ("hang up", "break"):
            desk.hang_up(conn, may_return=step == "break")
        else:
            desk.send(conn, step)
            for job in desk.service.jobs(desk.now):
                show_job(job, 2)
    for conn in range(4):
        desk.hang_up(conn)
    desk.sleep(100)
    assert desk.service.next_deadline() is None  # Nobody waits,
    assert desk.service.job("X", desk.now) is desk.service.job("Y", desk.now) is None  # and nothing is left.
    desk.world(2)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_refused(frame: bytes) -> None:
    try:
        decode_request(frame)
    except MalformedMessageError as error:
        assert str(error)
