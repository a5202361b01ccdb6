"""`aiodist.sync.launcher`: a function on several ranks, its results and its failures."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiodist.sync as dist
from aiodist.errors import CommunicationError, RankFailedError
from aiodist.registry import current_world
from aiodist.sync.launcher import launcher
from aiodist.sync.util import get_free_ports


def total() -> float:
    result: np.ndarray = dist.functional.all_reduce_sum(np.full(3, 2.0 ** dist.get_rank()))
    return float(result[0])


@launcher(n_gpus=2)
def decorated(text: str, *, repeat: int) -> tuple[int, float, str]:
    """Documented."""
    return current_world().rank, total(), text * repeat


class CarriedError(Exception):
    """Raised on a rank; equal to nothing but itself."""


class StubbornError(Exception):
    """Can be pickled, and not be made again from that."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} {code}")


def start(body: str) -> subprocess.Popen[str]:
    head = "import os, sys, time\nfrom aiodist.registry import current_world\nfrom aiodist.sync.launcher import launcher\n"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", head + body], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


# --- Results -------------------------------------------------------------------------------------------------------------------------


def test_a_decorated_function_returns_the_results_of_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of ranks, with the arguments given; what it is called and says of itself stays."""
    assert decorated("ab", repeat=2) == [(0, 3.0, "abab"), (1, 3.0, "abab")]
    assert (decorated.__name__, decorated.__doc__) == ("decorated", "Documented.")
    assert capsys.readouterr() == ("", "")


def test_functions_made_in_functions_travel_with_what_they_use() -> None:
    """As do exceptions and results of classes made there, which are the same class again."""
    offset = np.arange(3)

    class Point:
        def __init__(self, x: float) -> None:
            self.x = x

    def work(factor: int) -> Point:
        return Point(float((offset * factor).sum()) + total())

    results = launcher(work, n_gpus=2)(10)
    assert [type(result) for result in results] == [Point, Point]
    assert [result.x for result in results] == [33.0, 33.0]


def test_a_coroutine_function_is_awaited_on_each_rank() -> None:
    """Also called where a loop runs, whose thread it blocks; one rank is a world too."""

    @launcher(n_gpus=1)
    async def work() -> tuple[float, int]:
        await asyncio.sleep(0)
        result = await current_world().all_reduce(np.full(3, 5.0))
        return float(result[0]), current_world().size

    async def main() -> Any:
        return work()

    assert asyncio.run(main()) == [(5.0, 1)]


def test_a_thread_may_launch() -> None:
    """And two launches at a time are two worlds."""
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(launcher(total, n_gpus=size)) for size in (1, 2)]
        assert [call.result(60) for call in calls] == [[1.0], [3.0, 3.0]]


def test_launchers_on_several_machines_make_one_world() -> None:
    """Here both are on this one, and the one that serves comes last; its function is done first."""
    (port,) = get_free_ports(1)

    def work() -> tuple[int, float, str]:
        world = current_world()
        found = world.rank, total(), os.environ["AIODIST_LOCAL_RANK"]
        time.sleep(0.5 if world.rank else 0.0)
        return found

    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(launcher(work, n_gpus=1, world_size=2, rank_start=1, port=port))
        time.sleep(0.1)
        first = pool.submit(launcher(work, n_gpus=1, world_size=2, port=port))
        assert first.result(60) + second.result(60) == [(0, 3.0, "0"), (1, 3.0, "0")]


def test_a_script_needs_no_guard_and_prints_with_ranks() -> None:
    """It is not run again by the ranks; what it computed before is there, and so are its arguments."""
    body = """
factor = int("21")
class Thing: pass
@launcher(n_gpus=2, device_type="cpu")
def work():
    import pickle
    print("rank", current_world().rank, sys.argv)
    return type(pickle.loads(pickle.dumps(Thing()))) is Thing and factor * current_world().size
print(work())
"""
    with start(body) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] rank 0 ['-c']", "[1] rank 1 ['-c']", "[42, 42]"]


def test_ranks_have_a_client_of_the_server() -> None:
    """What the launcher serves answers its calls too, and the fields tell where it is."""

    def work() -> tuple[Any, ...]:
        client, rank = dist.get_client(), dist.get_rank()
        if rank == 1:
            client.user_set("key", [1, 2])
        told = client.bcast_val("told" if rank == 0 else None, "all", dist.get_world_size())
        return client.user_get("key"), told, dist.WORLD.comp_node, dist.get_py_server_addr() == dist.get_mm_server_addr()

    assert launcher(work, n_gpus=2, device_type="cpu")() == [([1, 2], "told", f"cpu{rank}:1", True) for rank in range(2)]


def test_a_backend_that_is_not_here_is_refused_by_name() -> None:
    """By the ranks."""
    with pytest.raises(ValueError, match=r"backend 'nccl' needs CUDA, which is not built yet.*use backend='auto'"):
        launcher(total, n_gpus=1, backend="nccl")()


def test_large_arguments_and_results_travel() -> None:
    """Far above what a pipe holds."""
    array = np.arange(1 << 21)
    (result,) = launcher(lambda x: x[::-1], n_gpus=1)(array)
    assert np.array_equal(result, array[::-1])


# --- Failures ------------------------------------------------------------------------------------------------------------------------


def test_the_first_failure_is_raised_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 fails while rank 0 waits for it in a call; the failure of rank 0 is no more than printed."""

    def work() -> None:
        if current_world().rank == 1:
            raise CarriedError("at", 7)
        total()

    with pytest.raises(CarriedError) as caught:
        launcher(work, n_gpus=2)()
    assert caught.value.args == ("at", 7)
    text = str(caught.value.__cause__)
    assert "rank 1:\nTraceback" in text
    assert f'{__file__}", line ' in text and 'raise CarriedError("at", 7)' in text
    assert f"[0] {CommunicationError.__module__}.CommunicationError: group 'world' was broken by rank 1" in capsys.readouterr().err


def test_a_failure_ends_ranks_that_would_never_end() -> None:
    """They are not waited for in order; what was raised is carried as a text if need be."""

    def work() -> None:
        if current_world().rank == 1:
            raise StubbornError(7, "code")
        time.sleep(1000)

    with pytest.raises(RankFailedError, match=r"(?s)rank 1:\nTraceback.*StubbornError: code 7") as caught:
        launcher(work, n_gpus=2)()
    assert caught.value.ranks == (1,)


def test_a_coroutine_that_is_cancelled_has_failed() -> None:
    """By itself, on its rank."""

    async def work() -> None:
        raise asyncio.CancelledError("enough")

    with pytest.raises(asyncio.CancelledError) as caught:
        launcher(work, n_gpus=1)()
    assert "raise asyncio.CancelledError" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"rank 0: signal 9 \(SIGKILL\)"),
        (lambda: sys.exit(3), "rank 0: exit code 3"),
        (lambda: os._exit(4), "rank 0: exit code 4"),
    ],
)
def test_a_rank_that_ends_without_an_exception_is_named(end: Callable[[], object], text: str) -> None:
    """Killed, or by itself."""
    with pytest.raises(RankFailedError, match=text) as caught:
        launcher(end, n_gpus=1)()
    assert caught.value.ranks == (0,)


def test_what_can_not_be_pickled_is_told() -> None:
    """Of an argument before anything is started, of a result by the rank."""
    lock = threading.Lock()
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: launcher(print, n_gpus=1)(1, lock), "argument 1"),
        (lambda: launcher(print, n_gpus=1)(1, end=lock), "argument 'end'"),
        (lambda: launcher(lambda: lock, n_gpus=1)(), "'lock', which the function uses"),
    ]
    for call, what in wrong:
        with pytest.raises(TypeError, match=rf"the function or an argument can not be pickled: cannot pickle .* \(in {what}\)"):
            call()
    with pytest.raises(TypeError, match="the result can not be pickled: cannot pickle"):
        launcher(threading.Lock, n_gpus=1)()


@pytest.mark.parametrize("inside", ["", "async "])
def test_an_interrupt_ends_all_ranks(inside: str) -> None:
    """Also where the launching thread runs a loop."""
    body = f"""
import asyncio
@launcher(n_gpus=2)
def work():
    print(os.getpid())
    time.sleep(1000)
{inside}def main():
    try:
        work()
    except KeyboardInterrupt:
        print("interrupted")
{"asyncio.run(main())" if inside else "main()"}
"""
    with start(body) as process:
        try:
            assert process.stdout is not None
            pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
            assert out.splitlines()[-1] == "interrupted"
        finally:
            process.kill()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"n_gpus": 0}, ValueError, "n_gpus must be at least 1, not 0"),
        ({"n_gpus": "2"}, TypeError, "n_gpus must be a whole number, not str"),
        ({"n_gpus": 2, "world_size": 1}, ValueError, "ranks 0 to 1 are not in a world_size of 1"),
        ({"n_gpus": 1, "rank_start": 1}, ValueError, "ranks 1 to 1 are not in a world_size of 1"),
        ({"n_gpus": 1, "world_size": 2}, ValueError, "port must be given"),
        ({"n_gpus": 1, "port": -1}, ValueError, "port must be at least 0"),
        ({"n_gpus": 1, "port": 70000}, ValueError, "port must be at most 65535"),
        ({"n_gpus": 1, "master_ip": 1}, TypeError, "master_ip must be a str, not int"),
        ({"n_gpus": 1, "backend": None}, TypeError, "backend must be a str, not NoneType"),
        ({"device_type": "abacus"}, ValueError, "device_type 'abacus' is none of auto, cpu"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    """Where the function is decorated."""
    with pytest.raises(error, match=text):
        launcher(**options)(print)
    with pytest.raises(error, match=text):
        launcher(print, **options)


def test_without_options_there_is_a_rank_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without GPUs, for each core that this process may use."""
    monkeypatch.setattr(sys.modules[launcher.__module__], "get_device_count_by_fork", {"cpu": 5, "gpu": 0}.get)
    made: list[Any] = [launcher(print), launcher()(print), launcher(print, device_type="cpu"), launcher(print, 3)]
    assert [(one.n_gpus, one.world_size) for one in made] == [(5, 5), (5, 5), (5, 5), (3, 3)]
    with pytest.raises(ValueError, match="this machine has no device of type 'gpu': give n_gpus, or device_type='cpu'"):
        launcher(print, device_type="gpu")
    with pytest.raises(TypeError, match="func must be a function, not int"):
        launcher(7)  # type: ignore[arg-type]
