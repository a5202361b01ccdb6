"""The state machine made again of what it has written down: no socket, no clock, a database in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.desk import Desk, refused
from test_rendezvous_state import steps

from aiodist.rendezvous.job import Limits
from aiodist.rendezvous.logs import Event
from aiodist.rendezvous.messages import (
    OCCUPIED,
    Add,
    Barrier,
    Beat,
    Done,
    Formed,
    Gather,
    Get,
    Join,
    Leave,
    Notice,
    Number,
    Resume,
    Seen,
    Set,
    Value,
    Values,
)
from aiodist.rendezvous.pulse import STALLED_S
from aiodist.rendezvous.views import show_job, summarise

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk(Limits(restart_s=30, absent_s=0.5, ended_s=10))
    yield made
    made.close()


def _resume(desk: Desk, conn: int, rank: int, *pending: int, job: str = "X") -> list[Any]:
    desk.send(conn, Resume(90, job, f"member-{rank}", 1, list(pending)))
    return desk.read(conn)


def _states(desk: Desk) -> list[str]:
    job = desk.service.job("X", desk.now)
    assert job is not None
    return [member.state for member in show_job(job, 10).worlds[0].members]


def test_members_return_to_their_world_and_keys(desk: Desk) -> None:
    desk.world(3)
    desk.ask(0, Set(2, "k", b"v"))
    desk.ask(1, Add(2, "n", 5))
    desk.restart()
    assert _resume(desk, 11, 1) == [Done(90)]
    assert desk.ask(11, Get(3, "k", 5)) == Value(3, b"v")
    assert desk.ask(11, Add(4, "n", 1)) == Number(4, 6)
    desk.send(11, Barrier(5, "b", 20))
    for rank in (0, 2):
        _resume(desk, 10 + rank, rank)
        desk.send(10 + rank, Barrier(5, "b", 20))
    assert desk.read(11) == [Done(5)]
    desk.sleep(60)
    assert desk.read(11) == []  # Nobody was lost,
    assert refused(desk.join(20, 1, 3)).text == "job X is already formed (world 3)"  # and the world is closed to others.


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("back", [True, False])
def test_a_newcomer_is_asked_to_wait_while_all_members_are_away(restart: bool, back: bool, desk: Desk) -> None:
    desk.world(2)
    if restart:
        desk.restart()
    else:
        desk.hang_up(0, may_return=True)
        assert refused(desk.join(20, 0, 1)).code == "formed"  # one is there
        desk.hang_up(1, may_return=True)
    assert refused(desk.join(20, 0, 1)).code == OCCUPIED
    if back:
        _resume(desk, 11, 1)
        assert refused(desk.join(20, 0, 1)).code == "formed"
    else:
        desk.sleep(31)
        assert isinstance(desk.join(20, 0, 1)[-1], Formed)


def test_members_that_stay_away_after_a_restart_are_lost_at_its_bound(desk: Desk) -> None:
    desk.world(3)
    desk.restart()
    _resume(desk, 10, 0)
    desk.send(10, Barrier(2, "b", 60))
    desk.sleep(29)
    assert desk.read(10) == []
    desk.sleep(2)
    desk.sleep(0.1)  # those that follow closely are told together
    answers = desk.read(10)
    assert sorted(answer.rank for answer in answers if isinstance(answer, Notice)) == [1, 2]
    assert {answer.kind for answer in answers if isinstance(answer, Notice)} == {"lost"}
    assert refused([answer for answer in answers if not isinstance(answer, Notice)]).code == "gone"
    late = refused(_resume(desk, 11, 1))
    assert late.code == "unknown" and "rank 1 of job X was given up: it did not return within 30 s" in late.text


def test_a_member_whose_connection_broke_may_return_for_a_moment(desk: Desk) -> None:
    desk.world(2)
    desk.hang_up(1, may_return=True)
    desk.sleep(0.4)
    job = desk.service.job("X", desk.now)
    assert job is not None
    view = show_job(job, 10)
    assert [member.state for member in view.worlds[0].members] == ["active", "away"]
    assert [member.rank for member in show_job(job, 1).worlds[0].members] == [1]  # those of interest first
    assert summarise(job).members_by_state == {"active": 1, "away": 1}
    assert "member-1" not in str(view)  # Who knows the id may take the place.
    assert _resume(desk, 5, 1) == [Done(90)]
    desk.sleep(10)
    desk.hang_up(5, may_return=True)
    assert [answer for answer in desk.read(0) if isinstance(answer, Notice)] == []
    desk.sleep(0.6)
    (notice,) = [answer for answer in desk.read(0) if isinstance(answer, Notice)]
    assert (notice.kind, notice.rank, notice.reason) == ("lost", 1, "its connection ended")


def test_absences_returns_and_restarts_are_told_to_people(desk: Desk) -> None:
    desk.world(2)
    desk.service.take_events()
    desk.hang_up(1, may_return=True)
    _resume(desk, 5, 1)
    _resume(desk, 6, 1)  # The server had not noticed that the connection was gone.
    desk.hang_up(6, may_return=True)
    desk.sleep(1)
    events = desk.service.take_events()
    assert [(event.event, event.generation, event.rank) for event in events] == [
        ("away", 1, 1),
        ("returned", 1, 1),
        ("returned", 1, 1),
        ("away", 1, 1),
        ("lost", 1, 1),
    ]
    assert (events[0].reason, events[0].host, events[0].pid) == ("its connection ended", "h", 1)
    desk.restart()
    _resume(desk, 7, 0)
    assert desk.service.take_events() == [
        Event("restored", "X", 1, reason="1 of 2 ranks may return"),
        Event("returned", "X", 1, 0, "h", 0),
    ]


def test_heartbeats_of_a_member_that_is_away_are_not_missed_and_go_on_when_it_is_back(desk: Desk) -> None:
    desk.world(2)
    desk.send(1, Beat())
    desk.hang_up(1, may_return=True)
    assert desk.service.next_deadline() == desk.now + 0.5
    _resume(desk, 5, 1)
    assert desk.service.next_deadline() is None
    desk.send(5, Beat())
    desk.sleep(STALLED_S)
    assert _states(desk) == ["active", "stalled"]
    desk.hang_up(5, may_return=True)
    assert _states(desk) == ["active", "away"]
    desk.service.take_events()
    _resume(desk, 6, 1)
    assert _states(desk) == ["active", "stalled"]  # as far as is known
    desk.send(6, Beat())
    assert _states(desk) == ["active", "active"]
    assert [event.event for event in desk.service.take_events()] == ["returned", "resumed"]


def test_a_barrier_that_times_out_says_who_is_away() -> None:
    desk = Desk(Limits(absent_s=60))
    desk.world(2)
    desk.hang_up(1, may_return=True)
    desk.send(0, Barrier(2, "b", 1))
    desk.sleep(1)
    assert "waiting for rank 1 (h:1, away)" in refused(desk.read(0)).text
    desk.close()


def test_the_old_connection_of_a_member_that_returned_means_nothing(desk: Desk) -> None:
    desk.world(2)
    desk.send(1, Get(2, "k", 5))
    _resume(desk, 5, 1)
    desk.read(1)
    desk.hang_up(1)
    desk.send(1, Set(3, "k", b""))
    assert refused(desk.read(1)).code == "state"
    desk.sleep(10)
    assert desk.read(5) == []
    assert desk.ask(5, Set(2, "k", b"")) == Done(2)


def test_answers_are_kept_until_they_are_seen(desk: Desk) -> None:
    desk.world(2)
    before = desk.rows()
    desk.send(0, Add(2, "n", 5))
    desk.send(0, Gather(3, "g", [0, 1], b"a", 5))
    desk.send(1, Gather(2, "g", [0, 1], b"b", 5))
    desk.restart()
    _resume(desk, 10, 0, 2, 3)
    _resume(desk, 11, 1, 2)
    assert desk.rows() == before + 1 + 1 + 3  # the key, the gather's result, and three answers
    for _ in range(2):
        desk.send(10, Add(2, "n", 5))
        desk.send(10, Gather(3, "g", [0, 1], b"a", 5))
        desk.send(11, Gather(2, "g", [0, 1], b"b", 5))
        assert [answer for conn in (10, 11) for answer in desk.peek(conn)] == [Number(2, 5), *[Values(n, [b"a", b"b"]) for n in (3, 2)]]
    desk.send(10, Seen([2, 3, 77]))
    desk.send(11, Seen([2]))
    assert desk.rows() == before + 1


def test_a_member_that_resumes_has_seen_all_it_does_not_ask_for(desk: Desk) -> None:
    desk.world(2)
    desk.send(0, Set(2, "k", b""))
    desk.send(0, Add(3, "n", 1))
    rows = desk.rows()
    _resume(desk, 5, 0, 3)
    assert desk.rows() == rows - 1
    assert desk.ask(5, Add(3, "n", 1)) == Number(3, 1)


def test_answers_that_nobody_sees_are_bounded() -> None:
    desk = Desk(Limits(answers=4))
    desk.world(2)
    for number in range(2, 6):
        desk.send(0, Set(number, "k", b""))
    desk.send(0, Set(6, "k", b""))
    assert desk.peek(0)[-1].code == "limit"
    desk.send(0, Seen([2, 3]))
    assert desk.ask(0, Set(7, "k", b"")) == Done(7)
    desk.close()


def test_a_timeout_counts_from_when_the_request_was_sent_first(desk: Desk) -> None:
    desk.world(2)
    desk.send(0, Get(2, "k", 5, 4))
    desk.sleep(0.9)
    assert desk.read(0) == []
    desk.sleep(0.2)
    assert "was not set within 5 s" in refused(desk.read(0)).text


def test_a_world_that_is_not_known_is_never_formed_again(desk: Desk) -> None:
    answers = _resume(desk, 1, 1)
    assert refused(answers).code == "unknown" and "started again without its state" in refused(answers).text
    assert desk.service.job("X", desk.now) is None
    desk.world(2)
    desk.send(9, Resume(1, "X", "member-1", 2, []))  # of another generation
    assert refused(desk.read(9)).code == "unknown"
    desk.send(0, Resume(5, "X", "member-1", 1, []))
    assert refused(desk.read(0)).code == "state"


def test_those_who_wait_for_a_world_join_again_after_a_restart(desk: Desk) -> None:
    desk.join(1, 0, 3)
    desk.join(2, 1, 3)
    desk.restart()
    assert desk.rows() == 0
    desk.send(11, Join(1, "X", "member-1", 3, 0, {"host": "h", "pid": 1}, 5, 0, 1.0))
    desk.send(12, Join(1, "X", "member-2", 3, 1, {"host": "h", "pid": 2}, 5, 0, 1.0))
    assert desk.join(3, 2, 3)[-1] == Formed(1, 2, 3, 1)


def test_a_join_whose_answer_was_lost_with_the_server_is_found_again(desk: Desk) -> None:
    desk.world(2)
    desk.restart()
    assert desk.join(11, 1, member="member-1")[-1] == Formed(1, 1, 2, 1)
    desk.sleep(1)
    assert _resume(desk, 10, 0) == [Done(90)]


@pytest.mark.parametrize("well", [True, False])
def test_nothing_is_kept_of_a_job_that_is_over(well: bool, desk: Desk) -> None:
    desk.world(2)
    desk.ask(0, Set(2, "k", b"v"))
    desk.send(1, Add(2, "n", 1))
    desk.send(0, Leave(3))
    desk.restart()
    _resume(desk, 11, 1)
    desk.send(11, Leave(4, None if well else "why"))
    assert desk.rows() == (1 if well else 0)  # that it has ended
    desk.restart()
    if well:
        assert refused(desk.join(20, 0)).text.startswith("job X has ended")
        desk.sleep(10)
    assert desk.join(20, 0) == []
    assert desk.rows() == 0


def _facts(desk: Desk) -> Any:
    """What has to survive of all worlds."""
    return {
        (job.name, world.generation): (
            [(m.id, m.rank, m.wanted, m.request, m.after, m.info, m.fate, m.pieces) for m in world.members],
            [{number: (told.answer, told.result and told.result.number) for number, told in m.told.items()} for m in world.members],
            dict(world.keys),
        )
        for job in desk.service._jobs.values()
        for world in job.worlds.values()
    }


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, max_size=40))
def test_all_that_was_promised_is_written_down_at_any_time(history: list[tuple[int, Any]]) -> None:
    desk = Desk()
    for conn, step in history:
        if conn < 0:
            desk.sleep(step)
        elif step in ("hang up", "break"):
            desk.hang_up(conn, may_return=step == "break")
        else:
            desk.send(conn, step)
        before, live = _facts(desk), desk.service
        desk.restart()
        assert _facts(desk) == before
        desk.service = live
    desk.restart()
    desk.sleep(100)
    assert _facts(desk) == {}
    assert desk.service.next_deadline() is None
    desk.close()
