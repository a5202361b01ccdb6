"""Members whose connection breaks, or whose server starts again: they take up their place, and nothing is done twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import msgspec
import pytest
from support.rendezvous import TOKEN, Notices, client, info
from support.service import Road, road_to

from aiodist.errors import RendezvousError
from aiodist.rendezvous import pulse, talk
from aiodist.rendezvous.client import RendezvousClient
from aiodist.rendezvous.job import Limits
from aiodist.rendezvous.messages import Progress
from aiodist.rendezvous.server import RendezvousServer
from aiodist.rendezvous.sockets import parse_address
from aiodist.rendezvous.views import JobView

pytestmark = pytest.mark.timeout(90)

LIMITS = Limits(absent_s=20.0, restart_s=20.0)


class Stage:
    """Two members of a world: rank 0 behind a road that breaks, rank 1 beside the server."""

    def __init__(self, server: RendezvousServer, state: str | None, road: Road) -> None:
        self.server = server
        self.road = road
        self.notices = Notices()
        self.far = client(road.address, timeout=60.0)
        self.near = client(server, timeout=60.0, on_notice=self.notices)
        self._state = state

    async def join(self) -> None:
        await asyncio.gather(self.far.connect(), self.near.connect())
        await asyncio.gather(*(one.join(world_size=2, rank=rank, info=info(rank)) for rank, one in enumerate((self.far, self.near))))

    async def restart(self, limits: Limits = LIMITS) -> None:
        """End the server and start another one on its port; what was on its way is lost."""
        port = parse_address(self.server.address).port
        await self.server.aclose()
        self.server = RendezvousServer(port=port, token=TOKEN, limits=limits, state=self._state)
        await self.server.start()


@asynccontextmanager
async def stage(state: Path | None = None, limits: Limits = LIMITS) -> AsyncIterator[Stage]:
    where = None if state is None else str(state)
    server = RendezvousServer(token=TOKEN, limits=limits, state=where)
    await server.start()
    async with road_to(server.address) as road:
        scene = Stage(server, where, road)
        try:
            await scene.join()
            yield scene
        finally:
            await asyncio.gather(scene.far.aclose(), scene.near.aclose())
            await scene.server.aclose()


Call = Callable[[RendezvousClient], Awaitable[object]]


async def _gather(me: RendezvousClient) -> object:
    return await me.gather("g", [1, 0], b"value")


CALLS: dict[str, tuple[Call, object]] = {
    "set": (lambda me: me.set("done", b"1"), None),
    "add": (lambda me: me.add("done", 7), 7),
    "compare_and_set": (lambda me: me.compare_and_set("done", None, b"new"), (True, b"new")),
    "delete": (lambda me: me.delete("there"), True),
    "barrier": (lambda me: me.barrier("b"), None),
    "gather": (_gather, [b"value", b"value"]),
}


@pytest.mark.parametrize("how", ["break", "restart"])
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_whose_answer_was_lost_is_carried_out_once(call: str, how: str, tmp_path: Path) -> None:
    function, expected = CALLS[call]
    async with stage(tmp_path) as scene:
        await scene.near.set("there", b"x")
        scene.road.swallow = True
        asked = asyncio.ensure_future(function(scene.far))
        if call in ("barrier", "gather"):
            await function(scene.near)
        elif call == "delete":
            while not (await scene.near.compare_and_set("there", None, b""))[0]:
                pass
            await scene.near.set("there", b"another")
        else:
            await scene.near.get("done")
            await scene.near.set("done", b"another")  # so that a second time would be seen
        assert not asked.done()
        if how == "restart":
            await scene.restart()
        scene.road.cut()
        assert await asked == expected
        assert await scene.near.keys() == (["there"] if call in ("barrier", "gather", "delete") else ["done", "there"])
        if call not in ("barrier", "gather"):
            assert await scene.near.get("there" if call == "delete" else "done") == b"another"
        await asyncio.gather(scene.near.barrier("end"), scene.far.barrier("end"))
        await scene.far.leave()
        assert (await scene.notices.next()).kind == "left"  # and nothing before: nobody was lost


async def test_what_waits_goes_on_waiting_after_a_break() -> None:
    async with stage() as scene:
        calls = [scene.far.get("k"), scene.far.barrier("b"), scene.far.gather("g", [0, 1], b"far")]
        waiting = [asyncio.ensure_future(call) for call in calls]
        for _ in range(3):
            await asyncio.sleep(0.1)
            scene.road.cut()
        assert not any(task.done() for task in waiting)
        await scene.near.set("k", b"v")
        await scene.near.barrier("b")
        assert await scene.near.gather("g", [0, 1], b"near") == [b"far", b"near"]
        assert await asyncio.gather(*waiting) == [b"v", None, [b"far", b"near"]]


async def test_hearts_beat_on_after_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_BEAT_S", 0.02)
    told = 0

    def tell() -> list[Progress]:
        nonlocal told
        told += 1
        return [Progress("world", told, "all_reduce", "train.py:1")]

    async with (
        RendezvousServer(token=TOKEN, limits=LIMITS) as server,
        road_to(server.address) as road,
        client(road.address, progress=tell) as me,
    ):
        await me.join(world_size=1, rank=0, info=info())
        for _ in range(3):
            road.cut()
            await _until_beat(server, told + 3)


async def _until_beat(server: RendezvousServer, seq: int) -> None:
    """Look at the one member of job X until its heartbeats tell of so many calls."""
    async with asyncio.timeout(20), aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        while True:
            async with session.get(f"{server.address}/api/v1/jobs/X") as response:
                (member,) = msgspec.json.decode(await response.read(), type=JobView).worlds[0].members
            if member.state == "active" and member.progress and member.progress[0].seq >= seq:
                return
            await asyncio.sleep(0.02)


async def test_notices_of_a_time_without_a_connection_come_once() -> None:
    notices = Notices()
    async with stage() as scene, client(scene.server, job="Y", timeout=60.0) as other, client(scene.road.address, job="Y") as third:
        watcher = client(scene.road.address, job="Y", on_notice=notices)
        await watcher.connect()
        joins = [one.join(world_size=3, rank=rank, info=info(rank)) for rank, one in enumerate((watcher, other, third))]
        await asyncio.gather(*joins)
        scene.road.swallow = True
        await other.leave("ValueError: no")
        await asyncio.sleep(0.2)
        scene.road.cut()
        assert (await notices.next()).reason == "ValueError: no"
        scene.road.cut()
        await third.leave()
        assert (await notices.next()).rank == 2
        await watcher.leave()
        await watcher.aclose()


async def test_a_member_that_does_not_come_back_in_time_is_lost() -> None:
    async with stage(limits=Limits(absent_s=0.3)) as scene:
        waiting = asyncio.ensure_future(scene.near.barrier("b"))
        scene.road.closed = True
        scene.road.cut()
        notice = await scene.notices.next()
        assert (notice.kind, notice.rank) == ("lost", 0)
        with pytest.raises(RendezvousError, match=r"rank 0 \(h:0\) lost"):
            await waiting
        scene.road.closed = False
        with pytest.raises(RendezvousError, match="does not take this member up again: rank 0 of job X was given up"):
            await scene.far.get("k")


async def test_members_that_do_not_come_back_after_a_restart_are_lost(tmp_path: Path) -> None:
    async with stage(tmp_path) as scene:
        await scene.near.set("k", b"v")
        scene.road.closed = True
        await scene.restart(Limits(restart_s=1.0))
        scene.road.cut()
        waiting = asyncio.ensure_future(scene.near.barrier("b"))
        notice = await scene.notices.next()
        assert (notice.kind, notice.rank) == ("lost", 0)
        assert "did not return within 1 s after the rendezvous was started again" in notice.reason
        with pytest.raises(RendezvousError, match=r"rank 0 \(h:0\) lost"):
            await waiting
        assert await scene.near.get("k") == b"v"


async def test_a_server_that_knows_nothing_refuses_the_members_of_old_worlds() -> None:
    async with stage() as scene:
        waiting = [asyncio.ensure_future(one.barrier("b")) for one in (scene.near,)]
        await scene.restart()
        scene.road.cut()
        for call in (*waiting, scene.far.set("k", b"v"), scene.near.get("k"), scene.far.gather("g", [0, 1], b"")):
            with pytest.raises(RendezvousError, match=r"does not take this member up again: .* started again without its state"):
                await call
        fresh = client(scene.server, timeout=1.0)  # Nor do they take part in another world.
        await fresh.connect()
        with pytest.raises(RendezvousError, match="rank 1 of 2 did not join"):
            await fresh.join(world_size=2, rank=0, info=info())
        await fresh.aclose()


async def test_a_goodbye_whose_answer_was_lost_is_no_error() -> None:
    async with stage() as scene:
        scene.road.swallow = True
        leaving = asyncio.ensure_future(scene.far.leave())
        assert (await scene.notices.next()).kind == "left"
        scene.road.cut()
        await leaving


async def test_a_join_whose_answer_was_lost_is_found_again() -> None:
    async with (
        RendezvousServer(token=TOKEN, limits=LIMITS) as server,
        road_to(server.address) as road,
        client(road.address) as far,
        client(server) as near,
    ):
        road.swallow = True
        join = asyncio.ensure_future(far.join(world_size=2, rank=0, info=info(1)))
        place = await near.join(world_size=2, rank=1, info=info(2))
        road.cut()
        assert (await join).members == place.members
        await asyncio.gather(far.barrier("b"), near.barrier("b"))


async def test_closing_without_a_server_is_prompt_and_quiet() -> None:
    async with stage() as scene:
        await scene.server.aclose()
        scene.road.cut()
        await asyncio.wait_for(scene.far.__aexit__(None, None, None), 15)


async def test_names_of_keys_and_broadcasts() -> None:
    async with stage() as scene:
        await asyncio.gather(*(scene.far.set(f"many/{number:04}", b"") for number in range(2001)))
        assert await scene.near.keys("many/") == [f"many/{number:04}" for number in range(2001)]
        assert await scene.near.keys("many/1") == [f"many/1{number:03}" for number in range(1000)]
        assert await scene.near.keys("none") == []
        values = await asyncio.gather(scene.near.broadcast("v", b"from one", root=1), scene.far.broadcast("v", root=1))
        assert list(values) == [b"from one", b"from one"]
        with pytest.raises(ValueError, match="rank 2 is not between 0 and 1"):
            await scene.near.broadcast("v", b"", root=2)


async def test_calls_wait_for_a_lost_connection_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talk, "_DOWN_S", 1.0)
    monkeypatch.setattr(talk, "_GRACE_S", 0.3)
    async with stage() as scene:
        waiting = [asyncio.ensure_future(call) for call in (scene.far.get("k"), scene.far.gather("g", [0, 1], b""))]
        await asyncio.sleep(0.5)
        scene.road.closed = True
        scene.road.cut()
        for call in (*waiting, scene.far.barrier("b"), scene.far.set("k", b"")):
            with pytest.raises(RendezvousError, match=f"connection to the rendezvous at {scene.road.address} was lost"):
                await asyncio.wait_for(call, 20)  # their own timeout is 60 s
        scene.road.closed = False
        waiting = [asyncio.ensure_future(scene.near.get("k"))]
        while not waiting[0].done():
            with suppress(RendezvousError):  # until it is back
                await scene.far.set("k", b"v")
        assert await waiting[0] == b"v"
