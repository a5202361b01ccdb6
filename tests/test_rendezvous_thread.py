"""The control thread: it serves a process whose own loop is busy, and it ends without a trace."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from aiodist.rendezvous.thread import ControlThread

pytestmark = pytest.mark.timeout(60)

SETUP = """
import asyncio, sys, threading, time
from aiodist.rendezvous.client import RendezvousClient
from aiodist.rendezvous.server import RendezvousServer
from aiodist.rendezvous.thread import ControlThread

async def session(address, closing=False):
    me = RendezvousClient(address, job="X", timeout=20)
    await me.connect()
    await me.join(world_size=1, rank=0, info={"pid": 1, "host": "h"})
    if closing:
        await me.leave()
        await me.aclose()
    return me

async def serve():
    server = RendezvousServer()
    await server.start()
    return server

control = ControlThread()
server = control.submit(serve()).result(20)
"""

ENDINGS = {
    "all closed": """
        control.submit(session(server.address, closing=True)).result(20)
        control.submit(server.aclose()).result(20)
        control.close()
        assert threading.active_count() == 1
    """,
    "nothing closed": "me = control.submit(session(server.address)).result(20)",
    "a call in flight": """
        other = ControlThread()
        me = other.submit(session(server.address)).result(20)
        waiting = other.submit(me.get("never"))
    """,
    # Not to the server above: asyncio loses a connection that it has accepted where its loop ends before the next step.
    "just submitted": """
        import socket
        silent = socket.create_server(("127.0.0.1", 0))
        control.submit(session(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        silent.detach()
    """,
    "a user thread that never closes it": """
        def user():
            mine = ControlThread()
            mine.submit(session(server.address)).result(20)
            ready.set()
            time.sleep(3600)
        ready = threading.Event()
        threading.Thread(target=user, daemon=True).start()
        ready.wait(20)
    """,
    "a user loop": """
        async def main():
            me = await asyncio.wrap_future(control.submit(session(server.address)))
            waiting = asyncio.wrap_future(control.submit(me.get("never")))
            await asyncio.sleep(0.05)
        asyncio.run(main())
    """,
    "an exception": """
        me = control.submit(session(server.address)).result(20)
        sys.stderr.write("the end")
        sys.exit(0)
    """,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends_without_a_word(ending: str) -> None:
    code = SETUP + textwrap.dedent(ENDINGS[ending])
    done = subprocess.run([sys.executable, "-X", "dev", "-W", "error", "-c", code], check=False, timeout=50, capture_output=True, text=True)
    # A loaded machine makes asyncio's debug mode tell of slow steps; everything else is a fault.
    words = [line for line in done.stderr.splitlines() if not line.startswith("Executing <") and line != "the end"]
    assert (done.returncode, words) == (0, [])


def test_results_and_errors_come_back() -> None:
    async def where() -> str:
        return threading.current_thread().name

    async def fail() -> None:
        raise KeyError("x")

    control = ControlThread()
    try:
        assert control.submit(where()).result(20) == "aiodist-control"
        with pytest.raises(KeyError):
            control.submit(fail()).result(20)
    finally:
        control.close()


async def test_it_goes_on_while_the_users_loop_is_blocked() -> None:
    control = ControlThread()
    beats: list[float] = []

    async def beat() -> None:
        while True:
            beats.append(time.monotonic())
            await asyncio.sleep(0.01)

    try:
        control.submit(beat())
        time.sleep(0.5)  # noqa: ASYNC251 -- the user's compute, on the user's loop
        assert len(beats) > 5
    finally:
        control.close()


def test_close_cancels_what_runs_and_leaves_no_thread() -> None:
    before = threading.active_count()
    control = ControlThread()
    futures = [control.submit(asyncio.sleep(3600)) for _ in range(10)]
    control.close()
    control.close()
    assert threading.active_count() == before
    for future in futures:
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(0)
    with pytest.raises(RuntimeError, match="closed"):
        control.submit(asyncio.sleep(0))


def test_close_is_bounded_when_a_task_refuses_to_end() -> None:
    started = threading.Event()

    async def stubborn() -> None:
        started.set()
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    control = ControlThread()
    control.submit(stubborn())
    assert started.wait(20)
    begin = time.monotonic()
    control.close()
    assert time.monotonic() - begin < 10  # 2 s; the rest is for a loaded machine.


def test_close_on_its_own_thread_does_not_wait_for_itself() -> None:
    control = ControlThread()

    async def close() -> None:
        control.close()

    control.submit(close())
    control.close()
    with pytest.raises(RuntimeError, match="closed"):
        control.submit(asyncio.sleep(0))


def test_a_forked_child_is_told() -> None:
    control = ControlThread()
    try:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                control.submit(asyncio.sleep(0))
            except RuntimeError as error:
                code = 0 if "fork" in str(error) else 2
            finally:
                control.close()
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        control.close()
