"""A server process that is killed and started again on its port, while members join, use their groups, and ask it for things."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.rendezvous import TOKEN, client, info
from support.service import Service

from aiodist.errors import RendezvousError
from aiodist.rendezvous.client import RendezvousClient

pytestmark = pytest.mark.timeout(150)

RANK = """
import asyncio, os, sys, time
import numpy as np
import aiodist

rank, address, stop = int(sys.argv[1]), sys.argv[2], sys.argv[3]

async def main():
    init = aiodist.init(rendezvous=address, rank=rank, world_size=3, job="J", token=sys.argv[4], timeout=float(sys.argv[5]))
    async with init as world:
        print("formed", flush=True)
        rounds = 0
        while True:
            mine = np.array([os.path.exists(stop), rank + rounds, 1.0])
            told = await world.all_reduce(mine)
            assert (told[1], told[2]) == (3 * rounds + 3, 3), (rounds, told)
            rounds += 1
            if told[0]:
                break
            if rounds % 20 == 0:
                print("round", rounds, flush=True)
            await asyncio.sleep(0.005)
        if rank < 2:
            try:
                group = await world.new_group([0, 1])
                print("group", (await group.all_reduce(np.array([rank + 1.0])))[0], flush=True)
            except aiodist.RendezvousError as error:
                print("error", error, flush=True)
        told = await world.all_reduce(np.array([rank + 5.0]))
        assert told[0] == 18, told
        print("right", flush=True)
        began = time.monotonic()
    print("closed", time.monotonic() - began, flush=True)

asyncio.run(main())
"""

HOST = """
import asyncio, sys
import aiodist
from aiodist.rendezvous.server import RendezvousServer

async def rank(address, number):
    async with aiodist.init(rendezvous=address, rank=number, world_size=3, job="J", token="a-token", timeout=60) as world:
        if number == 0:
            await world.barrier()
            return
        group = await world.new_group([1, 2])
        await world.barrier()
        print("alone", flush=True)
        sys.stdin.readline()
        for turn in range(200):
            assert float(await group.all_reduce(1.0 * number + turn)) == 3.0 + 2 * turn
    print("right", flush=True)

async def host():
    async with RendezvousServer(token="a-token") as server:
        print(server.address, flush=True)
        await rank(server.address, 0)

asyncio.run(rank(sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 1 else host())
"""


class Rank:
    """A process of a world of three that runs all_reduces until the stop file is there, and then asks for a group of ranks 0 and 1."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, rank: int, service: Service, stop: Path, seconds: float) -> Rank:
        command = [sys.executable, "-W", "error", "-c", textwrap.dedent(RANK), str(rank), service.address, str(stop), TOKEN, str(seconds)]
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, stdin=asyncio.subprocess.DEVNULL))

    async def until(self, word: str) -> str:
        """Read to the line that begins so, and return its rest."""
        assert self.process.stdout is not None and self.process.stderr is not None
        while line := (await asyncio.wait_for(self.process.stdout.readline(), 60)).decode():
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise AssertionError(f"no {word!r}: {(await self.process.stderr.read()).decode()}")

    async def rounds(self, more: int) -> None:
        """See it make progress."""
        last = first = int(await self.until("round"))
        while last < first + more:
            last = int(await self.until("round"))

    async def end(self) -> None:
        """See it end well and without a word."""
        assert self.process.stderr is not None
        words = await asyncio.wait_for(self.process.stderr.read(), 60)
        assert (await self.process.wait(), words) == (0, b"")


@asynccontextmanager
async def ranks(service: Service, stop: Path, *numbers: int, seconds: float = 60.0) -> AsyncIterator[list[Rank]]:
    started = [await Rank.start(rank, service, stop, seconds) for rank in numbers]
    try:
        yield started
    finally:
        for rank in started:
            if rank.process.returncode is None:
                rank.process.kill()
                await rank.process.communicate()


async def _until_joined(service: Service, count: int) -> None:
    import aiohttp

    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        while True:
            async with session.get(f"{service.address}/api/v1/jobs/J") as response:
                if response.status == 200 and len((await response.json())["forming"]["members"]) == count:
                    return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("kept", [True, False])
async def test_joiners_go_on_after_the_server_was_killed(kept: bool, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    async with Service(str(tmp_path / "state") if kept else None) as service, ranks(service, stop, 0, 1) as two:
        await _until_joined(service, 2)
        await service.kill()
        await asyncio.sleep(0.5)
        await service.start()
        async with ranks(service, stop, 2) as (third,):
            stop.touch()
            for rank in (*two, third):
                await rank.until("right")
                await rank.end()
            assert [await rank.process.wait() for rank in two] == [0, 0]


async def test_joiners_name_the_address_at_their_timeout_when_the_server_stays_away() -> None:
    async with Service() as service:
        members = [client(service.address, "J", timeout=4.0) for _ in range(2)]
        await asyncio.gather(*(one.connect() for one in members))
        joins = [asyncio.ensure_future(one.join(world_size=3, rank=rank, info=info())) for rank, one in enumerate(members)]
        await _until_joined(service, 2)
        await service.kill()
        for join in joins:
            with pytest.raises(RendezvousError, match=f"connection to the rendezvous at {service.address} was lost"):
                await asyncio.wait_for(join, 30)
        await asyncio.gather(*(one.aclose() for one in members))


@pytest.mark.parametrize("then", ["journal", "empty", "away"])
async def test_a_formed_group_does_not_notice_that_the_server_was_killed(then: str, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    state = str(tmp_path / "state") if then == "journal" else None
    seconds = 5.0 if then == "away" else 60.0
    async with Service(state) as service, ranks(service, stop, 0, 1, 2, seconds=seconds) as three:
        for rank in three:
            await rank.until("formed")
            await rank.rounds(20)
        await service.kill()
        await three[0].rounds(100)  # traffic goes on while there is no server
        if then != "away":
            await service.start()
            await three[0].rounds(100)
        stop.touch()
        for rank in three[:2]:
            if then == "journal":
                assert await rank.until("group") == "3.0"
            else:
                words = "started again without its state" if then == "empty" else "was lost"
                error = await rank.until("error")
                assert words in error and service.address in error
        for rank in three:
            await rank.until("right")
            assert float(await rank.until("closed")) < 20  # a few seconds; the rest is for a loaded machine
            await rank.end()


async def _user(me: RendezvousClient, rank: int, rounds: int) -> list[int]:
    """Do a bit of everything, and check it; returns the sums that `add` gave."""
    sums = []
    for turn in range(rounds):
        await me.set(f"own/{rank}", b"%d" % turn)
        sums.append(await me.add("count"))
        assert await me.get(f"own/{rank}") == b"%d" % turn
        swapped, _ = await me.compare_and_set(f"once/{turn}", None, b"%d" % rank)
        if swapped:
            await me.add("swaps")
        await me.barrier("b")
        assert int(await me.get("count")) >= 20 * (turn + 1)
        assert await me.get(f"once/{turn}") != b""
    return sums


async def test_nothing_is_lost_or_doubled_under_load_while_the_server_is_killed_three_times(tmp_path: Path) -> None:
    rounds = 40
    async with Service(str(tmp_path)) as service:
        members = [client(service.address, "J", timeout=100.0) for _ in range(20)]
        await asyncio.gather(*(one.connect() for one in members))
        await asyncio.gather(*(one.join(world_size=20, rank=rank, info=info(rank)) for rank, one in enumerate(members)))
        users = asyncio.gather(*(_user(one, rank, rounds) for rank, one in enumerate(members)))
        for part in (1, 2, 3):
            await members[0].get(f"once/{part * rounds // 4}", timeout=100.0)
            await service.kill()
            await service.start()
        sums = await asyncio.wait_for(users, 120)
        assert sorted(number for some in sums for number in some) == list(range(1, 20 * rounds + 1))
        assert await members[3].get("count") == b"%d" % (20 * rounds)
        assert await members[4].get("swaps") == b"%d" % rounds
        await asyncio.gather(*(one.leave() for one in members))
        await asyncio.gather(*(one.aclose() for one in members))


async def test_the_end_of_a_rank_that_hosts_the_server_harms_nobody() -> None:
    pipe = asyncio.subprocess.PIPE

    async def start(*arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-W", "error", "-c", HOST, *arguments, stdin=pipe, stdout=pipe, stderr=pipe
        )

    host = await start()
    assert host.stdout is not None
    address = (await host.stdout.readline()).decode().strip()
    others = [await start(address, str(rank)) for rank in (1, 2)]
    try:
        assert await asyncio.wait_for(host.communicate(), 60) == (b"", b"")
        assert host.returncode == 0
        ends = await asyncio.gather(*(asyncio.wait_for(other.communicate(b"go on\n"), 60) for other in others))
        assert ends == [(b"alone\nright\n", b"")] * 2
        assert [other.returncode for other in others] == [0, 0]
    finally:
        for process in (host, *others):
            if process.returncode is None:
                process.kill()
                await process.communicate()
