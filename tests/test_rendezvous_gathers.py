"""Gathers, by which groups are made: as the rendezvous keeps them, and as ranks of one process do. No socket; one clock is the test's."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from support.desk import Desk, refused

from aiodist.local_store import LocalSeat, LocalStore
from aiodist.rendezvous.job import Limits
from aiodist.rendezvous.messages import Barrier, Cancel, Done, Gather, Get, Leave, Notice, Refused, Set, Values
from aiodist.rendezvous.views import MeetingView, show_job
from aiodist.store import Unmet

pytestmark = pytest.mark.timeout(60)


def _formed(size: int, limits: Limits | None = None) -> Desk:
    desk = Desk(limits)
    desk.world(size)
    for conn in range(size):
        desk.read(conn)
    return desk


def _refusal(desk: Desk, conn: int) -> Refused:
    return refused([answer for answer in desk.read(conn) if not isinstance(answer, Notice)])


def test_every_member_gets_the_values_of_all_in_the_members_order() -> None:
    desk = _formed(4)
    for turn in range(2):  # then the name may be used again
        desk.send(3, Gather(2, "g", [3, 1, 0], b"three", 5))
        desk.send(0, Gather(7, "g", [3, 1, 0], b"", 5))
        assert [desk.read(conn) for conn in range(4)] == [[]] * 4
        desk.send(1, Gather(3 + turn, "g", [3, 1, 0], b"one", 5))
        values = [b"three", b"one", b""]
        assert [desk.read(conn) for conn in range(4)] == [[Values(7, values)], [Values(3 + turn, values)], [], [Values(2, values)]]
    desk.sleep(10)
    assert [desk.read(conn) for conn in range(4)] == [[]] * 4
    assert desk.service.next_deadline() is None


def test_names_and_orders_are_kept_apart() -> None:
    desk = _formed(3)
    desk.send(0, Gather(2, "g", [0, 1], b"a", 5))
    desk.send(0, Gather(3, "g", [1, 0], b"b", 5))
    desk.send(0, Gather(4, "h", [0, 1], b"c", 5))
    desk.send(0, Gather(5, "g", [0, 1, 2], b"d", 5))
    desk.send(1, Gather(2, "h", [0, 1], b"C", 5))
    desk.send(1, Gather(3, "g", [1, 0], b"B", 5))
    assert desk.read(0) == [Values(4, [b"c", b"C"]), Values(3, [b"B", b"b"])]
    assert desk.read(1) == [Values(2, [b"c", b"C"]), Values(3, [b"B", b"b"])]


def test_a_timeout_names_the_missing_and_what_they_asked_for() -> None:
    desk = _formed(3)
    desk.send(0, Gather(2, "g", [0, 1, 2], b"", 5))
    desk.send(1, Gather(2, "g", [0, 2, 1], b"", 6))
    desk.send(1, Gather(3, "other", [1, 2], b"", 6))  # is about other ranks, and not named
    desk.sleep(5)
    late = _refusal(desk, 0)
    assert (late.code, late.ranks) == ("timeout", [1, 2])
    assert "'g' was not made within 5 s: waiting for rank 1 (h:1), rank 2 (h:2)" in late.text
    assert "rank 1 (h:1) asked for 'g' of ranks [0, 2, 1]" in late.text and "other" not in late.text
    desk.send(0, Gather(3, "mine", [0, 1, 2], b"", 5))
    desk.sleep(1)
    late, other = (refused([answer]) for answer in desk.read(1))
    assert "rank 0 (h:0) asked for 'g' of ranks [0, 1, 2] and gave up after 5 s" in late.text  # earlier,
    assert "rank 0 (h:0) asked for 'mine' of ranks [0, 1, 2]" in late.text  # and now
    assert other.ranks == [2] and "asked" not in other.text
    desk.send(1, Gather(4, "mine", [0, 1, 2], b"", 5))
    desk.send(2, Gather(4, "mine", [0, 1, 2], b"", 5))
    assert [len(desk.read(conn)) for conn in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("end", "words"), [("hang up", "lost: its connection ended"), ("leave", "left: it said goodbye"), ("fail", "failed: ValueError: no")]
)
def test_a_member_that_goes_ends_the_gathers_that_need_it_and_no_others(end: str, words: str) -> None:
    desk = _formed(4)
    desk.send(0, Gather(2, "g", [2, 1, 0], b"", 50))
    desk.send(1, Gather(2, "g", [2, 1, 0], b"", 50))
    desk.send(2, Gather(2, "g", [1, 2], b"", 50))
    desk.send(0, Gather(3, "h", [0, 3], b"x", 50))
    if end == "hang up":
        desk.hang_up(2)
    else:
        desk.send(2, Leave(3, "ValueError: no" if end == "fail" else None))
        assert [type(answer) for answer in desk.read(2)] == [Refused, Done]
    for conn in (0, 1):
        broken = _refusal(desk, conn)
        assert (broken.code, broken.ranks) == ("gone", [2]) and f"rank 2 (h:2) {words}" in broken.text
    desk.read(3)
    later = refused([desk.ask(3, Gather(9, "new", [3, 2], b"", 50))])
    assert (later.code, later.ranks) == ("gone", [2])
    desk.send(3, Gather(10, "h", [0, 3], b"y", 50))
    assert desk.read(3)[-1] == Values(10, [b"x", b"y"])


def test_a_gather_is_asked_for_once_and_rightly() -> None:
    desk = _formed(3)
    desk.send(0, Gather(2, "g", [0, 1], b"", 5))
    assert "rank 0 asked for it already" in refused([desk.ask(0, Gather(3, "g", [0, 1], b"", 5))]).text
    for members in ([1, 2], [0, 0], [0, 3], []):
        assert refused([desk.ask(0, Gather(4, "w", members, b"", 5))]).code == "argument"
    desk.send(0, Cancel(2))
    assert _refusal(desk, 0).code == "withdrawn"
    desk.send(1, Gather(2, "g", [0, 1], b"", 5))
    assert desk.read(1) == []
    desk.send(0, Gather(5, "g", [0, 1], b"", 5))
    assert len(desk.read(0)) == len(desk.read(1)) == 1


def test_gathers_are_bounded() -> None:
    desk = _formed(3, Limits(key_nbytes=4, value_nbytes=8, keys_nbytes=16, waits=3))
    assert refused([desk.ask(0, Gather(2, "a" * 5, [0, 1], b"", 5))]).code == "argument"
    assert refused([desk.ask(0, Gather(2, "a", [0, 1], b"v" * 9, 5))]).code == "argument"
    desk.send(0, Gather(2, "a", [0, 1], b"v" * 8, 5))
    desk.send(0, Gather(3, "b", [0, 1], b"v" * 8, 5))
    assert refused([desk.ask(0, Gather(4, "c", [0, 1], b"v", 5))]).code == "limit"
    desk.send(1, Gather(2, "a", [0, 1], b"", 5))
    assert len(desk.read(0)) == 1
    desk.send(0, Gather(4, "c", [0, 1], b"v" * 8, 5))
    desk.send(0, Get(5, "key", 5))
    assert refused([desk.ask(0, Gather(6, "d", [0, 1], b"", 5))]).code == "limit"


def test_people_see_the_gathers_that_wait() -> None:
    desk = _formed(3)
    desk.send(2, Gather(2, "g", [2, 0], b"secret", 5))
    job = desk.service.job("X", desk.now)
    assert job is not None
    view = show_job(job, 3)
    assert view.worlds[0].gathers == [MeetingView("g", [2], [0], 1, 1)]
    assert "secret" not in str(view)


def test_only_members_have_keys_barriers_and_gathers() -> None:
    desk = Desk()
    for request in (Set(1, "k", b""), Barrier(1, "k", 1), Gather(1, "k", [0], b"", 1)):
        assert refused([desk.ask(1, request)]).code == "state"
    assert desk.ask(1, Leave(1)) == Done(1)


def _seats(size: int) -> list[LocalSeat]:
    store = LocalStore(size)
    return [LocalSeat(store, rank) for rank in range(size)]


def test_ranks_of_a_process_meet_from_any_threads() -> None:
    seats = _seats(4)
    got: dict[tuple[int, int], Any] = {}

    def work(rank: int) -> None:
        for turn in range(200):
            got[turn, rank] = seats[rank].gather("g", [3, 1, 0, 2], b"%d/%d" % (turn, rank), 20).result(20)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    for turn in range(200):
        assert [got[turn, rank] for rank in range(4)] == [[b"%d/%d" % (turn, rank) for rank in (3, 1, 0, 2)]] * 4


def test_a_rank_of_a_process_that_is_late_or_gone_is_named() -> None:
    seats = _seats(3)
    early, other = seats[0].gather("g", [0, 1], b"", 0.05), seats[0].gather("h", [0, 2], b"", 20)
    time.sleep(0.1)
    assert not early.done()  # nobody looks at the time,
    seats[1].gather("i", [1, 2], b"", 20)  # until somebody comes
    assert early.result(0) == Unmet("timeout", "'g' was not made within 0.05 s: waiting for rank 1", (1,))
    again = seats[0].gather("g", [0, 1], b"", 0.05)
    time.sleep(0.1)
    seats[2].expire()  # or waits
    assert isinstance(again.result(0), Unmet)
    own = seats[2].gather("j", [1, 2], b"", 20)
    seats[2].leave("left its world")
    assert other.result(0) == Unmet("gone", "'h' can not be made: rank 2 left its world", (2,))
    withdrawn = own.result(0)
    assert isinstance(withdrawn, Unmet) and withdrawn.code == "withdrawn"
    assert seats[1].gather("k", [2, 1], b"", 20).result(0) == Unmet("gone", "'k' can not be made: rank 2 left its world", (2,))
