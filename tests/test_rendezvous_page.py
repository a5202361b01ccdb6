"""The page for people, in a real browser."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.browser import CHROMIUM, Page, browser
from support.rendezvous import TOKEN, client, info, world
from support.service import road_to

from aiodist.rendezvous import behind
from aiodist.rendezvous.client import RendezvousClient
from aiodist.rendezvous.job import Limits
from aiodist.rendezvous.messages import Progress
from aiodist.rendezvous.server import RendezvousServer

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"),
]

ROWS = "[...document.querySelectorAll('tbody tr')].map((row) => [row.dataset.rank, row.dataset.state])"

# A rank that does its work, says so, and stays until it is ended.
RANK = """
import asyncio, sys
import numpy, aiodist

async def main():
    world = await aiodist.init()
    await world.all_reduce(numpy.ones(4))
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def shown(name: str) -> Path | None:
    """Where a screenshot goes, for those who set AIODIST_SCREENSHOTS to a folder to look at."""
    folder = os.environ.get("AIODIST_SCREENSHOTS")
    return None if folder is None else Path(folder) / f"{name}.png"


async def photograph(page: Page, name: str) -> None:
    """Look at the page as it is in a window, in the dark and on a phone: nothing may stick out on the right."""
    for kind, options in {"light": {}, "dark": {"dark": True}, "phone": {"width": 360, "height": 740}}.items():
        await page.look(**options)  # type: ignore[arg-type]
        assert await page.value("document.documentElement.scrollWidth <= innerWidth"), f"{name}: too wide in {kind}"
        path = shown(f"{name}-{kind}")
        if path is not None:
            await page.screenshot(path)
    await page.look()


@contextmanager
def job_of(size: int, server: RendezvousServer) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Real ranks, each a process; they are there when they have said so."""
    env = {
        **os.environ,
        "AIODIST_RENDEZVOUS": server.address,
        "AIODIST_TOKEN": TOKEN,
        "AIODIST_JOB": "train",
        "AIODIST_WORLD_SIZE": str(size),
    }
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", RANK], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**env, "AIODIST_RANK": str(rank)}
                )
            )
            for rank in range(size)
        ]
        for process in ranks:
            stack.callback(process.kill)
        yield ranks


def wait_until_ready(ranks: list[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"


async def test_a_running_job_is_seen_live_and_the_row_of_a_killed_rank_turns_red(tmp_path: Path) -> None:
    async with RendezvousServer(token=TOKEN) as server, browser(tmp_path) as page:
        with job_of(4, server) as ranks:
            await asyncio.to_thread(wait_until_ready, ranks)
            await page.look()
            await page.open(server.page_link("train"))
            await page.until(
                f"JSON.stringify({ROWS}) === {json.dumps(json.dumps([[str(r), 'active'] for r in range(4)], separators=(',', ':')))}"
            )
            text = await page.text()
            assert "train" in text and "live" in text and all(str(process.pid) in text for process in ranks)
            assert TOKEN not in str(await page.value("location.href"))
            await photograph(page, "running")
            ranks[1].send_signal(signal.SIGSTOP)
            await page.until("document.querySelector('tr.trouble')?.dataset.state === 'stalled'")
            assert await page.value("document.querySelector('tr.trouble').dataset.rank") == "1"
            await photograph(page, "stalled")
            ranks[1].send_signal(signal.SIGCONT)
            await page.until("!document.querySelector('tr.trouble')")
            ranks[2].send_signal(signal.SIGKILL)
            await page.until("document.querySelector('tr.trouble')?.dataset.rank === '2'")
            assert await page.value("document.querySelector('tr[data-rank=\"2\"]').dataset.state") == "lost"
            red, plain = [
                await page.value(f"getComputedStyle(document.querySelector('tr[data-rank=\"{r}\"]')).backgroundColor") for r in (2, 0)
            ]
            assert red == "rgb(253, 236, 235)" != plain
            await photograph(page, "lost")
        await page.until("document.body.innerText.includes('this is how it was last seen')")
        assert await page.value("document.querySelectorAll('tbody tr').length") == 4
        assert page.problems == []


async def test_a_rank_that_is_away_is_shown_so_and_is_no_trouble(tmp_path: Path) -> None:
    async with (
        RendezvousServer(token=TOKEN, limits=Limits(absent_s=60.0)) as server,
        road_to(server.address) as road,
        browser(tmp_path) as page,
        client(road.address, "train") as a,
        client(server, "train") as b,
    ):
        await asyncio.gather(*(one.join(world_size=2, rank=rank, info=info(rank)) for rank, one in enumerate((a, b))))
        await page.look()
        await page.open(server.page_link("train"))
        road.closed = True
        road.cut()
        await page.until("document.querySelector('tr[data-rank=\"0\"]')?.dataset.state === 'away'")
        assert "1 active, 1 away" in await page.text()
        assert await page.value("document.querySelector('tr.trouble') === null")
        assert await page.value("document.querySelector('.dot').dataset.state") == "wait"
        await photograph(page, "away")
        road.closed = False
        await page.until("document.querySelector('tr[data-rank=\"0\"]').dataset.state === 'active'")
        assert page.problems == []


async def test_ranks_that_tell_their_progress_show_their_last_call_their_lag_and_a_plot_and_a_stuck_one_turns_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(behind, "STUCK_S", 4.0)
    began = time.monotonic()

    def member(rank: int) -> RendezvousClient:
        def progress() -> list[Progress]:
            done = int(100 * (time.monotonic() - began))
            return [Progress("world", done if rank else min(done, 5), "all_reduce", "train.py:42")]

        return client(server, "train", progress=progress)

    async with RendezvousServer(token=TOKEN) as server, browser(tmp_path) as page, member(0) as a, member(1) as b:
        await asyncio.gather(*(one.join(world_size=2, rank=rank, info=info(rank)) for rank, one in enumerate((a, b))))
        await page.look()
        await page.open(server.page_link())
        await page.until("document.querySelector('tr[data-rank=\"0\"] .call')?.textContent === 'all_reduce #5'")
        await page.until("Number(document.querySelector('tr[data-rank=\"0\"] .lag').textContent) > 100")
        await page.until("document.querySelector('.plot polyline')?.getAttribute('points').split(' ').length >= 4")
        rate = await page.value("parseFloat(document.querySelector('.plot').textContent)")
        assert 10 < rate < 1000, rate
        await photograph(page, "progress")
        await page.until("document.querySelector('tr.trouble')?.dataset.state === 'stuck'")
        text = str(await page.value("document.querySelector('tr.trouble').textContent"))
        assert "in group 'world' call #5 (all_reduce at train.py:42), while rank 1 is in call #" in text
        assert "1 active, 1 stuck" in await page.text()
        await photograph(page, "stuck")
        assert page.problems == []


async def test_the_page_asks_for_the_token_and_shows_nothing_before(tmp_path: Path) -> None:
    async with RendezvousServer(token=TOKEN) as server, browser(tmp_path) as page, world(server, 2, "secret-job"):
        await page.look()
        await page.open(f"{server.address}/")
        await page.until("!document.getElementById('ask').hidden")
        assert "secret-job" not in await page.text()
        for given, expected in (
            ("wrong", "!document.getElementById('wrong').hidden"),
            (TOKEN, "document.querySelectorAll('tbody tr').length === 2"),
        ):
            await page.value(f"document.getElementById('token').value = {given!r}; document.querySelector('#ask button').click()")
            await page.until(expected)
            await photograph(page, "asking" if given == "wrong" else "asked")
        await page.call("Page.reload")
        await page.until("document.querySelectorAll('tbody tr').length === 2")


async def test_what_members_say_of_themselves_is_shown_as_text(tmp_path: Path) -> None:
    evil = "<img src=x onerror='document.title=1'><script>document.title=2</script>"
    async with RendezvousServer() as server, browser(tmp_path) as page, client(server, token=None) as me:
        forming = asyncio.create_task(me.join(world_size=3, rank=1, info={**info(), "host": evil, "device": evil}))
        await page.look()
        await page.open(server.page_link())
        await page.until("document.querySelectorAll('tbody tr').length === 1")
        text = await page.text()
        assert evil in text and "waiting for ranks 0, 2" in text
        assert await page.value("document.title") == "aiodist rendezvous"
        await photograph(page, "forming")
        assert page.problems == []
        forming.cancel()


async def test_a_page_that_lost_its_server_says_so_and_finds_it_again(tmp_path: Path) -> None:
    async with browser(tmp_path) as page:
        async with RendezvousServer() as server:
            port = int(server.address.rpartition(":")[2])
            await page.open(server.page_link())
            await page.until("document.getElementById('link').dataset.state === 'live'")
        await page.until("document.getElementById('link').dataset.state === 'down'")
        async with RendezvousServer(port=port) as server, client(server, job="later", token=None) as me:
            await me.join(world_size=1, rank=None, info=info())
            await page.until("document.querySelectorAll('tbody tr').length === 1")
