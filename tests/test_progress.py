"""What a real member's heartbeats say of where it is."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import numpy as np
import pytest
from support.checks import here

import aiodist
from aiodist.rendezvous.server import RendezvousServer

pytestmark = pytest.mark.timeout(30)


async def _told(server: RendezvousServer, due: set[str]) -> dict[str, dict[str, Any]]:
    """Return what the API shows of rank 0's groups once it shows those that are due, and no others."""
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{server.address}/api/v1/jobs/told") as response:
                job = await response.json()
            (member,) = job["worlds"][0]["members"]
            assert member["device"] == "cpu"
            progress = {entry["group"]: entry for entry in member["progress"]}
            if due == progress.keys():
                return progress
            await asyncio.sleep(0.1)


async def test_members_tell_the_latest_call_of_each_group() -> None:
    """Its number, its name and its line; of groups without a call that there was none, of closed ones nothing any more."""
    async with RendezvousServer() as server, aiodist.init(rendezvous=server.address, rank=0, world_size=1, job="told") as world:
        await world.all_reduce(np.ones(2))
        line = here(1)
        await world.barrier()
        first, second = await world.new_group([0]), await world.channel("quiet")
        assert first is not None and second.name == "world:quiet"
        await first.all_gather(np.ones(2))
        told = await _told(server, {"world", first.name, "world:quiet"})
        assert (told["world"]["seq"], told["world"]["collective"]) == (1, "barrier")
        assert told["world"]["site"].endswith(line)
        assert (told[first.name]["seq"], told[first.name]["collective"]) == (0, "all_gather")
        assert (told["world:quiet"]["seq"], told["world:quiet"]["collective"], told["world:quiet"]["site"]) == (-1, "", "")
        await first.aclose()
        await _told(server, {"world", "world:quiet"})
