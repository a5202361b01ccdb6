"""Members that are alive and stuck: who is named, where, and from when until when."""

from __future__ import annotations

import pytest
from support.desk import Desk, refused

from aiodist.rendezvous.behind import STUCK_S
from aiodist.rendezvous.job import Job
from aiodist.rendezvous.messages import Barrier, Beat, Gather, Progress
from aiodist.rendezvous.metrics import Census, Metrics
from aiodist.rendezvous.views import MemberView, show_job

pytestmark = pytest.mark.timeout(30)


def beat(desk: Desk, conn: int, **seqs: int) -> None:
    desk.send(conn, Beat([Progress(group, seq, "all_reduce" if seq >= 0 else "", f"train.py:{conn}") for group, seq in seqs.items()]))


def live(desk: Desk, seconds: float, *calls: dict[str, int] | None) -> None:
    """Let all members of a world send heartbeats that tell of these calls, None for those that are stopped."""
    for _ in range(round(seconds)):
        desk.sleep(1.0)
        for conn, seqs in enumerate(calls):
            if seqs is not None:
                beat(desk, conn, **seqs)


def job(desk: Desk) -> Job:
    found = desk.service.job("X", desk.now)
    assert found is not None
    return found


def members(desk: Desk) -> list[MemberView]:
    return show_job(job(desk), 10).worlds[0].members


def states(desk: Desk) -> list[str]:
    return [member.state for member in members(desk)]


@pytest.fixture
def desk() -> Desk:
    made = Desk()
    made.world(3)
    made.service.take_events()
    return made


def test_a_member_that_lives_and_makes_no_call_is_stuck_and_named_with_its_call_until_it_goes_on(desk: Desk) -> None:
    ahead = {"world": 42, "eval": 3}
    live(desk, STUCK_S - 2, ahead, {"world": 41, "eval": 3}, ahead)
    assert states(desk) == ["active"] * 3
    live(desk, 4, ahead, {"world": 41, "eval": 3}, ahead)
    assert states(desk) == ["active", "stuck", "active"]
    text = "in group 'world' call #41 (all_reduce at train.py:1), while rank 0 is in call #42 (all_reduce at train.py:0)"
    assert [member.reason for member in members(desk)] == [None, text, None]
    exposed = Metrics().exposition(Census([job(desk)], desk.service.waits(), 0, 0)).decode()
    assert 'members{state="stuck"} 1.0' in exposed and 'members{state="active"} 2.0' in exposed
    live(desk, 2, ahead, ahead, ahead)
    assert states(desk) == ["active"] * 3
    events = [(event.event, event.rank, event.reason) for event in desk.service.take_events()]
    assert events == [("stuck", 1, text), ("resumed", 1, None)]
    assert desk.read(0) == desk.read(1) == desk.read(2) == []  # as with stalled ones, nobody is told


def test_a_member_that_has_made_no_call_at_all_is_stuck_too(desk: Desk) -> None:
    live(desk, STUCK_S + 3, {"world": 0}, {"world": 0}, {"world": -1})
    assert states(desk) == ["active", "active", "stuck"]
    assert members(desk)[2].reason == "in group 'world' it has made no call yet, while rank 0 is in call #0 (all_reduce at train.py:0)"
    assert members(desk)[2].progress[0].lag == 1


@pytest.mark.parametrize("wait", ["all wait for something else", "behind but going on", "working in another group", "the others have gone"])
def test_those_who_hold_nobody_up_are_not_stuck(desk: Desk, wait: str) -> None:
    for step in range(round(STUCK_S) + 5):
        ahead = {"world": 100, "eval": 0}
        match wait:
            case "all wait for something else":
                live(desk, 1, ahead, ahead, ahead)
            case "behind but going on":
                live(desk, 1, ahead, {"world": step}, ahead)
            case "working in another group":
                live(desk, 1, {**ahead, "eval": step}, {"world": 99, "eval": step}, {**ahead, "eval": step})
            case _:
                live(desk, 1, {"world": 100} if step < 5 else None, {"world": 99}, {"world": 99})
                if step == 5:
                    desk.hang_up(0)
        assert "stuck" not in states(desk)


def test_one_that_was_waiting_with_the_others_gets_its_time_from_their_next_call_on(desk: Desk) -> None:
    same = {"world": 5}
    live(desk, 5 * STUCK_S, same, same, same)
    live(desk, STUCK_S - 3, {"world": 6}, same, same)
    assert states(desk) == ["active"] * 3
    live(desk, 6, {"world": 6}, same, same)
    assert states(desk) == ["active", "stuck", "stuck"]


def test_a_stopped_member_is_stalled_and_not_stuck_and_counts_again_when_it_goes_on(desk: Desk) -> None:
    ahead, behind = {"world": 42}, {"world": 41}
    live(desk, STUCK_S + 3, ahead, behind, ahead)
    assert states(desk)[1] == "stuck"
    live(desk, STUCK_S, ahead, None, ahead)
    assert states(desk)[1] == "stalled"
    assert members(desk)[1].reason == "its heartbeats are missing"
    live(desk, 2, ahead, behind, ahead)
    assert states(desk)[1] == "active"
    desk.hang_up(1, may_return=True)
    assert (members(desk)[1].state, members(desk)[1].reason) == ("away", "its connection ended")
    live(desk, 1, ahead, None, ahead)
    assert states(desk)[1] == "lost"


def test_texts_of_timeouts_say_who_is_stalled_and_who_is_stuck_where(desk: Desk) -> None:
    ahead, behind = {"world": 42}, {"world": 41}
    for conn in range(3):
        beat(desk, conn, world=40)
    live(desk, 3, ahead, behind, None)
    seconds = STUCK_S + 2
    desk.send(0, Barrier(2, "b", seconds))
    desk.send(0, Gather(3, "new_group", [2, 0, 1], b"", seconds))
    live(desk, seconds, ahead, behind, None)
    texts = [refused([answer]).text for answer in desk.read(0)]
    at = "in group 'world' call #41 (all_reduce at train.py:1), while rank 0 is in call #42 (all_reduce at train.py:0)"
    stuck, stalled = f"rank 1 (h:1, stuck: {at})", "rank 2 (h:2, stalled)"
    assert sorted(text.partition("waiting for ")[2] for text in texts) == [f"{stuck}, {stalled}", f"{stalled}, {stuck}"]


def test_a_world_that_is_over_is_looked_at_no_more(desk: Desk) -> None:
    for conn in range(3):
        beat(desk, conn, world=conn)
    for conn in range(3):
        desk.hang_up(conn)
    desk.sleep(STUCK_S)
    assert desk.service.next_deadline() is None
