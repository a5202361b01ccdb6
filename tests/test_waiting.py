"""Futures that are waited for from several places at once, only looked at, dropped, or still waited for at the end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import aiodist


async def test_a_cancelled_wait_leaves_those_of_other_loops() -> None:
    async with aiodist.local_world(2, timeout=30) as (first, second):
        future = first.all_reduce(np.arange(4.0))
        waiting = threading.Event()
        got: list[object] = []

        async def wait() -> None:
            async def take() -> object:
                return await future

            task = asyncio.create_task(take())
            await asyncio.sleep(0.1)
            waiting.set()
            got.append(await asyncio.wait_for(task, 20))

        other = threading.Thread(target=lambda: asyncio.run(wait()))
        other.start()
        assert await asyncio.to_thread(waiting.wait, 20)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future, 0.05)
        await second.all_reduce(np.arange(4.0))
        await asyncio.to_thread(other.join, 20)
        assert len(got) == 1
        np.testing.assert_array_equal(got[0], 2 * np.arange(4.0))


async def test_a_future_dropped_by_an_exception_on_its_way() -> None:
    async with aiodist.local_world(2, timeout=30) as (first, second):
        with pytest.raises(ZeroDivisionError):
            print(first.all_reduce(np.ones(4)), 1 / 0)
        np.testing.assert_array_equal(await second.all_reduce(np.ones(4)), np.full(4, 2.0))


@pytest.mark.parametrize("trouble", ["timeout", "abort"])
async def test_a_future_that_is_only_polled_ends(trouble: str) -> None:
    async with aiodist.local_world(2, timeout=0.5 if trouble == "timeout" else 60) as (first, second):
        future = first.all_reduce(np.ones(3))
        if trouble == "abort":
            second.abort("enough")
        deadline = time.monotonic() + 20
        while not future.done() and time.monotonic() < deadline:  # noqa: ASYNC110 - being polled is the subject
            await asyncio.sleep(0.02)
        assert isinstance(future.exception(), aiodist.CommunicationError)


async def test_many_threads_take_one_received_array() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        async with aiodist.local_world(2, timeout=30) as (first, second):
            for turn in range(50):
                future = second.broadcast(None)
                start = threading.Barrier(4)
                got: list[object] = []

                def take(future: aiodist.TensorFuture[object] = future, start: threading.Barrier = start, got: list[object] = got) -> None:
                    start.wait(20)
                    got.append(future.result(20))

                threads = [threading.Thread(target=take) for _ in range(3)]
                for thread in threads:
                    thread.start()
                first.broadcast(np.arange(5) + turn)
                await asyncio.to_thread(start.wait, 20)
                for thread in threads:
                    await asyncio.to_thread(thread.join, 20)
                assert len(got) == 3
                assert got[0] is got[1] is got[2]
                np.testing.assert_array_equal(got[0], np.arange(5) + turn)
    finally:
        sys.setswitchinterval(interval)


async def test_a_cancelled_close_closes_all_the_same() -> None:
    async with aiodist.local_world(2, timeout=30) as (first, _second):
        first.all_reduce(np.ones(3))  # the other never joins, so closing would wait
        closing = asyncio.create_task(first.aclose())
        await asyncio.sleep(0.05)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert first.closed


@pytest.mark.parametrize("threads", [1, 8])
def test_the_interpreter_ends_while_threads_block(threads: int) -> None:
    program = f"""
import asyncio, threading, numpy as np, aiodist

async def main():
    world = aiodist.local_world(2, timeout=60)
    groups = await world.__aenter__()
    globals()["kept"] = groups
    for _ in range({threads}):
        threading.Thread(target=lambda: groups[0].barrier().result(), daemon=True).start()
    await asyncio.sleep(0.3)

asyncio.run(main())
print("end")
"""
    ended = subprocess.run([sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "end\n"), ended.stderr
    assert "terminate" not in ended.stderr


async def test_a_thread_is_not_taken_for_one_that_has_ended() -> None:
    """Whose id it has got from the system: a rank whose calls came from that one would be waited for in vain."""

    def run_in_thread(function: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=function)
        thread.start()
        return thread

    async with aiodist.local_world(2, timeout=30) as (first, second):
        run_in_thread(lambda: first.send(np.arange(3), 1)).join()
        got: list[np.ndarray] = []
        receiver = run_in_thread(lambda: got.extend((second.recv(0).result(), second.recv(0).result())))
        await asyncio.sleep(0.1)
        first.send(np.arange(4), 1)
        await asyncio.to_thread(receiver.join)
        assert [len(array) for array in got] == [3, 4]


def test_the_interpreter_ends_while_threads_call() -> None:
    """Whenever a daemon thread comes back from waiting, or learns that its call has failed."""
    program = """
import asyncio, threading, numpy as np, aiodist

def calls(group):
    while True:
        try:
            group.all_reduce(np.ones(5000)).result()
        except aiodist.AiodistError:
            pass

async def main():
    groups = await aiodist.local_world(2, timeout=60).__aenter__()
    globals()["kept"] = groups
    for group in groups * 8:
        threading.Thread(target=calls, args=(group,), daemon=True).start()
    await asyncio.sleep(0.1)

asyncio.run(main())
"""
    fails = "kept[0].abort('enough')\n"
    for code in (program, program + fails) * 4:  # what is looked for is a matter of moments
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
        assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("kind", ["other dtype", "memoryview"])
async def test_overlaps_are_seen_whatever_the_input_is(kind: str) -> None:
    memory = np.arange(64.0)
    async with aiodist.local_world(2, timeout=30) as (first, second):
        with pytest.raises(ValueError, match="overlaps x"):
            if kind == "memoryview":
                first.all_reduce(memory.data[:32], out=memory[5:37])
            else:  # at the same address, but the results are wider than what they are made of
                first.all_reduce(memory.view(np.int32)[:64], "mean", out=memory)
        with pytest.raises(aiodist.PeerRefusedError):
            await second.all_reduce(np.ones(3))


class _Unreadable:
    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise RuntimeError("it can not be read now")


@pytest.mark.parametrize("kind", ["no memory", "unreadable", "unknown keyword", "too many", "long dtype"])
async def test_whatever_stops_a_call_is_told_to_its_peers(kind: str) -> None:
    async with aiodist.local_world(2, timeout=30) as (first, second):
        with pytest.raises((MemoryError, RuntimeError, TypeError)):
            if kind == "no memory":
                first.all_reduce(np.broadcast_to(np.float32(1), (2**46,)))
            elif kind == "unreadable":
                first.all_reduce(_Unreadable())
            elif kind == "unknown keyword":
                first.all_reduce(np.ones(3), axis=1)  # type: ignore[call-arg]
            elif kind == "too many":
                first.all_reduce(np.ones(3), "sum", None)  # type: ignore[call-arg]
            else:
                first.broadcast(np.zeros(2, np.dtype([(f"a field with a long name, number {i}", "f8") for i in range(60)])))
        with pytest.raises(aiodist.PeerRefusedError):
            await (second.broadcast(None) if kind == "long dtype" else second.all_reduce(np.ones(3)))
        totals = await asyncio.gather(first.all_reduce(np.ones(2)), second.all_reduce(np.ones(2)))
        np.testing.assert_array_equal(totals, np.full((2, 2), 2.0))


def test_worlds_open_and_close_in_several_threads() -> None:
    failures: list[BaseException] = []

    async def rounds() -> None:
        x = np.arange(60_000.0)
        for _ in range(30):
            async with aiodist.local_world(2, timeout=30) as groups:
                totals = await asyncio.gather(*(group.all_reduce(x) for group in groups))
                np.testing.assert_array_equal(totals[0], 2 * x)

    def run() -> None:
        try:
            asyncio.run(rounds())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
