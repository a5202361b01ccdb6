"""Heartbeats: who is stalled, and where everyone is."""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import msgspec
import pytest
from support.desk import Desk, refused
from support.rendezvous import TOKEN, client, info

from aiodist.rendezvous import pulse
from aiodist.rendezvous.client import RendezvousClient
from aiodist.rendezvous.messages import Barrier, Beat, Progress
from aiodist.rendezvous.pulse import STALLED_S
from aiodist.rendezvous.server import RendezvousServer
from aiodist.rendezvous.views import JobView, MemberView, ProgressView, show_job

pytestmark = pytest.mark.timeout(60)


def states(desk: Desk) -> list[str]:
    job = desk.service.job("X", desk.now)
    assert job is not None
    return [member.state for member in show_job(job, 10).worlds[0].members]


def test_a_member_without_heartbeats_is_stalled_and_goes_on_at_the_next_one() -> None:
    desk = Desk()
    desk.world(3)
    for conn in (0, 1):
        desk.send(conn, Beat())
    desk.service.take_events()
    desk.sleep(STALLED_S / 2)
    desk.send(0, Beat())
    assert desk.service.next_deadline() == 1000.0 + STALLED_S
    desk.sleep(STALLED_S / 2)
    assert states(desk) == ["active", "stalled", "active"]  # The last has never sent one: it may be of a kind that does not.
    desk.send(1, Beat())
    assert states(desk) == ["active", "active", "active"]
    assert [(event.event, event.rank) for event in desk.service.take_events()] == [("stalled", 1), ("resumed", 1)]
    assert desk.read(0) == desk.read(1) == desk.read(2) == []  # Nobody is told: it may go on any time.


def test_a_stalled_member_is_lost_when_its_connection_ends_and_no_sooner() -> None:
    desk = Desk()
    desk.world(2)
    desk.send(1, Beat())
    desk.sleep(1000.0)
    assert states(desk) == ["active", "stalled"]
    desk.hang_up(1)
    assert states(desk) == ["active", "lost"]
    assert desk.service.next_deadline() is None


def test_a_barrier_that_times_out_says_who_is_stalled() -> None:
    desk = Desk()
    desk.world(3)
    desk.send(1, Beat())
    desk.send(0, Barrier(2, "b", 2 * STALLED_S))
    desk.sleep(STALLED_S)
    desk.sleep(STALLED_S)
    assert "waiting for rank 1 (h:1, stalled), rank 2 (h:2)" in refused(desk.read(0)).text


def test_heartbeats_before_the_world_has_formed_and_after_its_end_are_fine() -> None:
    desk = Desk()
    desk.send(0, Beat())
    desk.join(0, 0, 2, timeout=100)
    desk.send(0, Beat())
    desk.sleep(2 * STALLED_S)
    desk.join(1, 1, 2)
    assert states(desk) == ["stalled", "active"]
    for conn in (0, 1):
        desk.hang_up(conn)
        desk.send(conn, Beat())
    assert desk.service.next_deadline() is None


async def _until(server: RendezvousServer, session: aiohttp.ClientSession, expected: list[tuple[int, int]]) -> list[MemberView]:
    """Look at the members until their numbers of calls and their lags are the expected ones."""
    async with asyncio.timeout(20):
        while True:
            async with session.get(f"{server.address}/api/v1/jobs/X") as response:
                members = msgspec.json.decode(await response.read(), type=JobView).worlds[0].members
            if [(one.seq, one.lag) for member in members for one in member.progress] == expected:
                return members
            await asyncio.sleep(0.02)


async def test_people_see_where_every_rank_is_and_how_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_BEAT_S", 0.05)
    seqs = [7, 3]

    def member(rank: int) -> RendezvousClient:
        return client(server, progress=lambda: [Progress("world", seqs[rank], "all_reduce", f"train.py:{rank}")])

    async with (
        RendezvousServer(token=TOKEN) as server,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session,
        member(0) as a,
        member(1) as b,
    ):
        await asyncio.gather(*(one.join(world_size=2, rank=rank, info=info(rank)) for rank, one in enumerate((a, b))))
        for expected in ([(7, 0), (3, 4)], [(7, 1), (8, 0)]):
            shown = await _until(server, session, expected)
            assert shown[0].progress == [ProgressView("world", 7, "all_reduce", "train.py:0", expected[0][1])]
            seqs[1] = 8


async def test_progress_that_fails_is_logged_once_and_the_heart_beats_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pulse, "_BEAT_S", 0.01)
    beats: list[Beat] = []
    sent = asyncio.Event()

    def send(beat: Beat) -> None:
        beats.append(beat)
        if len(beats) >= 3:
            sent.set()

    task = asyncio.create_task(pulse.Heart(lambda: [Progress("g", 1 // 0, "c", "s")]).run(send))
    await asyncio.wait_for(sent.wait(), 20)
    task.cancel()
    assert set(map(repr, beats)) == {repr(Beat())}
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
