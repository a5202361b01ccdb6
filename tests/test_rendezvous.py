"""Members of a job over real sockets: joining, keys, barriers, going."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest
from support.rendezvous import TOKEN, Notices, client, info, until_away, until_forming, world
from support.service import road_to

from aiodist.errors import RendezvousError
from aiodist.rendezvous.client import Membership, Notice
from aiodist.rendezvous.job import Limits
from aiodist.rendezvous.server import RendezvousServer

pytestmark = pytest.mark.timeout(60)


async def test_a_world_forms_exchanges_keys_and_meets() -> None:
    async with RendezvousServer(token=TOKEN) as server:

        async def member(pid: int) -> Membership:
            async with client(server) as me:
                place = await me.join(world_size=4, rank=None, info=info(pid))
                await me.set(f"key/{place.rank}", bytes([place.rank]) * 1000)
                assert await me.get(f"key/{(place.rank + 1) % 4}") == bytes([(place.rank + 1) % 4]) * 1000
                await me.add("count", 10)
                await me.barrier("b")
                assert await me.get("count") == b"40"
                swapped, held = await me.compare_and_set("first", None, bytes([place.rank]))
                assert swapped == (held == bytes([place.rank]))
                await me.barrier("b")
                await me.delete("first")
                return place

        places = await asyncio.gather(*(member(pid) for pid in range(4)))
    assert sorted(place.rank for place in places) == [0, 1, 2, 3]
    assert {place.members for place in map(_hashable, places)} == {_hashable(places[0]).members}
    assert all(place.members[place.rank]["pid"] == pid and place.generation == 1 for pid, place in enumerate(places))


def _hashable(place: Membership) -> Any:
    return Membership(place.rank, place.world_size, place.generation, tuple(sorted(str(member) for member in place.members)))  # type: ignore[arg-type]


async def test_twenty_jobs_started_together_never_mix() -> None:
    async with RendezvousServer() as server:

        async def job(number: int) -> None:
            async with world(server, 2, f"job-{number}", token=None) as (first, second):
                await first.set("k", b"%d" % number)
                assert await second.get("k") == b"%d" % number

        await asyncio.gather(*(job(number) for number in range(20)))


# -- joining badly ---------------------------------------------------------------------------------------------------------------


async def test_a_rank_that_is_taken_is_refused_with_its_holder_and_fails_the_job() -> None:
    async with RendezvousServer(token=TOKEN) as server, client(server) as a, client(server) as b, client(server) as c:
        first = asyncio.create_task(a.join(world_size=4, rank=0, info={"pid": 11, "host": "here"}))
        second = asyncio.create_task(b.join(world_size=4, rank=1, info=info(12)))
        await until_forming(server, 2)
        with pytest.raises(RendezvousError, match="rank 0 is taken by here:11") as caught:
            await c.join(world_size=4, rank=0, info=info(13))
        assert caught.value.ranks == (0,)
        for task in (first, second):
            with pytest.raises(RendezvousError, match="rank 0 is taken by here:11"):
                await task


async def test_unequal_world_sizes_are_named_to_all() -> None:
    async with RendezvousServer(token=TOKEN) as server, client(server) as a, client(server) as b:
        joins = (a.join(world_size=4, rank=0, info=info(1)), b.join(world_size=3, rank=1, info=info(2)))
        for error in await asyncio.gather(*joins, return_exceptions=True):
            assert isinstance(error, RendezvousError) and "4" in str(error) and "3" in str(error) and "h:2" in str(error)


async def test_missing_ranks_are_listed_at_the_timeout() -> None:
    async with RendezvousServer(token=TOKEN) as server, client(server, timeout=1.0) as a, client(server, timeout=1.0) as b:
        joins = (a.join(world_size=4, rank=0, info=info()), b.join(world_size=4, rank=1, info=info()))
        for error in await asyncio.gather(*joins, return_exceptions=True):
            assert isinstance(error, RendezvousError) and error.ranks == (2, 3) and "ranks 2, 3 of 4" in str(error)


async def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    async with RendezvousServer(token=TOKEN) as server, client(server) as me:
        for rank, size in ((4, 4), (-1, 4), (0, 0)):
            with pytest.raises(ValueError):
                await me.join(world_size=size, rank=rank, info=info())
        with pytest.raises(TypeError):
            await me.join(world_size=1, rank=0, info={"pid": object()})
        await me.join(world_size=1, rank=0, info=info())
        with pytest.raises(ValueError, match="the limit is 1048576"):
            await me.set("k", bytes((1 << 20) + 1))
        with pytest.raises(ValueError, match="1 to 1024 bytes"):
            await me.set("k" * 1025, b"")
        with pytest.raises(TypeError):
            await me.set("k", "text")  # type: ignore[arg-type]
        await me.set("text", b"text")
        with pytest.raises(ValueError, match="decimal"):
            await me.add("text")
        await me.set("k", bytes(1 << 20))
        assert len(await me.get("k")) == 1 << 20
    with pytest.raises(ValueError, match="job"):
        client("http://h:1", job="a/b")
    with pytest.raises(ValueError, match="token"):
        client("http://h:1", token="a\r\nb")
    with pytest.raises(ValueError, match="timeout"):
        client("http://h:1", timeout=float("nan"))


async def test_late_joiners_are_refused_and_running_members_undisturbed() -> None:
    notices = Notices()
    async with RendezvousServer(token=TOKEN) as server:
        async with world(server, 2, on_notice=notices) as (a, b):
            for rank in (1, None):
                async with client(server) as late:
                    with pytest.raises(RendezvousError, match=r"job X is already formed \(world 2\)"):
                        await late.join(world_size=2, rank=rank, info=info())
            await asyncio.gather(a.barrier("b"), b.barrier("b"))
            await a.leave()
            await b.leave()
            assert (await notices.next()).kind == "left"  # Of rank 0, to rank 1; nothing of the late ones.
        async with client(server) as late:
            with pytest.raises(RendezvousError, match="job X has ended"):
                await late.join(world_size=2, rank=0, info=info())


async def test_members_may_form_a_second_world_in_the_same_job() -> None:
    async with RendezvousServer(token=TOKEN) as server:

        async def member(rank: int) -> list[int]:
            generations: list[int] = []
            for _ in range(3):
                async with client(server) as me:
                    place = await me.join(world_size=2, rank=rank, info=info(), after=generations[-1] if generations else 0)
                    generations.append(place.generation)
                    await me.set(f"{place.generation}", b"")
                    if generations[1:]:
                        with pytest.raises(RendezvousError, match="was not set within 0 s"):
                            await me.get(f"{place.generation - 1}", timeout=0)
            return generations

        assert list(await asyncio.gather(member(0), member(1))) == [[1, 2, 3], [1, 2, 3]]


async def test_a_crashed_job_leaves_nothing_for_the_next_one_of_its_name() -> None:
    async with RendezvousServer(token=TOKEN) as server:
        async with world(server, 4) as members:
            await members[0].set("k", b"old")
        async with world(server, 3) as members:  # The four closed without a goodbye.
            with pytest.raises(RendezvousError, match="key 'k' of job X was not set"):
                await members[0].get("k", timeout=0.1)


async def test_a_killed_job_can_be_started_again_at_once_with_another_size() -> None:
    script = """
        import asyncio, sys
        from aiodist.rendezvous.client import RendezvousClient
        async def main():
            members = [RendezvousClient(sys.argv[1], job="X", token=sys.argv[2]) for _ in range(4)]
            for member in members:
                await member.connect()
            await asyncio.gather(*(member.join(world_size=4, rank=rank, info={}) for rank, member in enumerate(members)))
            await members[0].set("k", b"old")
            print("formed", flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """
    async with RendezvousServer(token=TOKEN) as server:
        command = [sys.executable, "-c", textwrap.dedent(script), server.address, TOKEN]
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert child.stdout is not None
        assert await child.stdout.readline() == b"formed\n"
        child.kill()
        await child.wait()
        async with world(server, 3) as members:
            with pytest.raises(RendezvousError, match="was not set within 0 s"):
                await members[0].get("k", timeout=0)
            await asyncio.gather(*(member.barrier("b") for member in members))


async def test_a_newcomer_waits_no_longer_than_its_timeout_for_members_to_come_back() -> None:
    async with (
        RendezvousServer(token=TOKEN, limits=Limits(absent_s=30.0)) as server,
        road_to(server.address) as road,
        client(server, timeout=1.0) as late,
    ):
        member = client(road.address)
        await member.connect()
        await member.join(world_size=1, rank=0, info=info())
        road.closed = True
        road.cut()
        await until_away(server, 1)
        with pytest.raises(RendezvousError, match=r"job X is already formed \(world 1\), though none of its members is connected now"):
            await late.join(world_size=1, rank=0, info=info())
        await member.aclose()


async def test_a_cancelled_join_frees_its_rank() -> None:
    async with RendezvousServer(token=TOKEN) as server, client(server) as a, client(server) as b:
        join = asyncio.create_task(a.join(world_size=1 + 1, rank=0, info=info()))
        await until_forming(server, 1)
        join.cancel()
        with pytest.raises(asyncio.CancelledError):
            await join
        again = asyncio.gather(a.join(world_size=2, rank=1, info=info()), b.join(world_size=2, rank=0, info=info()))
        assert [place.rank for place in await again] == [1, 0]


async def test_a_join_sent_again_over_another_connection_is_recognised() -> None:
    async with (
        RendezvousServer(token=TOKEN) as server,
        client(server, member="same-member") as a,
        client(server, member="same-member") as a2,
        client(server) as b,
    ):
        lost = asyncio.create_task(a.join(world_size=2, rank=0, info=info()))
        await until_forming(server, 1)
        found = asyncio.create_task(a2.join(world_size=2, rank=0, info=info()))
        with pytest.raises(RendezvousError, match="joined again"):
            await lost
        assert (await b.join(world_size=2, rank=1, info=info())).rank == 1
        assert await found == await a2.join(world_size=2, rank=0, info=info())


# -- members that go -------------------------------------------------------------------------------------------------------------


async def test_a_killed_member_is_named_to_the_others_and_breaks_their_barrier() -> None:
    script = """
        import asyncio, os, sys, time
        from aiodist.rendezvous.client import RendezvousClient
        async def main():
            async with RendezvousClient(sys.argv[1], job="X", token=sys.argv[2]) as me:
                await me.join(world_size=2, rank=1, info={"pid": os.getpid(), "host": "there"})
                await asyncio.sleep(60)
        asyncio.run(main())
    """
    notices = Notices()
    async with RendezvousServer(token=TOKEN) as server, client(server, on_notice=notices) as me:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(script), server.address, TOKEN)
        try:
            await me.join(world_size=2, rank=0, info=info())
            barrier = asyncio.create_task(me.barrier("b"))
            child.send_signal(signal.SIGKILL)
            notice = await notices.next()
            assert (notice.kind, notice.rank, notice.info) == ("lost", 1, {"pid": child.pid, "host": "there"})
            with pytest.raises(RendezvousError, match=rf"rank 1 \(there:{child.pid}\) lost") as caught:
                await barrier
            assert caught.value.ranks == (1,)
        finally:
            await child.wait()


async def test_a_block_left_by_an_exception_tells_it_to_the_others() -> None:
    notices = Notices()
    async with RendezvousServer(token=TOKEN) as server, client(server, on_notice=notices) as me:

        async def fail() -> None:
            async with client(server) as other:
                await other.join(world_size=2, rank=1, info=info(2))
                raise ValueError("bad data")

        with pytest.raises(ValueError, match="bad data"):
            await asyncio.gather(me.join(world_size=2, rank=0, info=info()), fail())
        assert await notices.next() == Notice("failed", 1, "ValueError: bad data", info(2))


async def test_a_barrier_names_who_is_missing() -> None:
    async with RendezvousServer(token=TOKEN) as server, world(server, 3) as members:
        with pytest.raises(RendezvousError, match=r"waiting for rank 0 \(h:0\), rank 2 \(h:2\)") as caught:
            await members[1].barrier("b", timeout=0.2)
        assert caught.value.ranks == (0, 2)
        await asyncio.gather(*(member.barrier("b") for member in members))


async def test_calls_end_by_their_timeouts_while_the_server_is_gone() -> None:
    server = RendezvousServer(token=TOKEN)
    await server.start()
    async with client(server, timeout=1.0) as me:
        await me.join(world_size=1, rank=0, info=info())
        waiting = asyncio.create_task(me.get("k"))
        await me.set("other", b"")
        await server.aclose()
        with pytest.raises(RendezvousError, match=f"rendezvous at {server.address} was lost"):
            await waiting
        with pytest.raises(RendezvousError, match="was lost"):
            await me.set("k", b"")


# -- clean ends ------------------------------------------------------------------------------------------------------------------


async def test_nothing_is_left_after_many_worlds() -> None:
    async with RendezvousServer(token=TOKEN) as server:

        async def rounds(count: int) -> tuple[int, int, int]:
            for number in range(count):
                async with world(server, 2, f"job-{number}"):
                    pass
            await asyncio.sleep(0.1)
            return len(os.listdir("/proc/self/fd")), threading.active_count(), len(asyncio.all_tasks())

        before = await rounds(2)
        assert await rounds(30) == before


@pytest.mark.parametrize("end", ["connect", "close", "nothing"])
async def test_a_client_may_be_ended_at_any_time(end: str) -> None:
    async with RendezvousServer(token=TOKEN) as server:
        me = client(server if end != "connect" else "http://127.0.0.1:9", timeout=60.0)
        connecting = asyncio.create_task(me.connect())
        await asyncio.sleep(0 if end == "nothing" else 0.1)
        if end == "close":
            await connecting
        else:
            connecting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await connecting
        await me.aclose()
        await me.aclose()
        with pytest.raises(RendezvousError, match="closed"):
            await me.set("k", b"")


def test_the_package_loads_neither_aiohttp_nor_asyncio() -> None:
    code = "import sys, aiodist.rendezvous; sys.exit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
