"""Plain scripts with `aiodist.sync`: no loop, no launcher, no goodbye at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.ranks import assert_clean
from test_sync import free_port

pytestmark = pytest.mark.timeout(60)

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("AIODIST_")} | {"AIODIST_TIMEOUT": "30"}
WORKER = """
import multiprocessing, sys, time
import numpy as np
import aiodist.sync as dist

def worker(rank, size, port):
    dist.init_process_group("localhost", port, size, rank, rank, "auto")
    sys.stdout.write(f"{dist.functional.all_reduce_sum(np.array(rank + 1))}\\n")
    if "fail" in sys.argv and rank == 1:
        raise ValueError("boom")
    dist.functional.all_gather(np.ones(1))
    if rank > 0:  # rank 0 has ended by then
        time.sleep(0.5)
        dist.functional.all_gather(np.ones(1), dist.new_group([1, 2]))
"""
FORKS = """
context = multiprocessing.get_context("fork")
ranks = [context.Process(target=worker, args=(rank, 3, int(sys.argv[1]))) for rank in range(3)]
for process in ranks:
    process.start()
for process in ranks:
    process.join(30)
sys.exit(max(process.exitcode for process in ranks))
"""


@pytest.mark.parametrize("server", ["", "server = dist.Server(int(sys.argv[1]))"])
def test_forked_workers_that_never_close_the_group(server: str) -> None:
    """All end well: rank 0 not before those that it serves, or with a server in the process that forked them."""
    command = [sys.executable, "-c", WORKER + server + FORKS, str(free_port())]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["6"] * 3, "")


def test_a_script_that_fails() -> None:
    """The others hear why at once, in processes that were started by hand."""
    port = free_port()
    call = f"\nworker(int(sys.argv[1]), 2, {port})"
    commands = [[sys.executable, "-c", WORKER + call, str(rank), "fail"] for rank in range(2)]
    ranks = [subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate(timeout=25)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1]
    assert "CommunicationError: group 'world' was broken by rank 1: rank 1 left with ValueError: boom" in errors[0]
    assert errors[1].endswith("ValueError: boom\n")
    assert_clean(*errors)


INTERRUPTED = """
import sys, time
import aiodist.sync as dist
from aiodist.sync import session

session._LINGER_SECONDS = 1000.0
dist.init_process_group("127.0.0.1", int(sys.argv[2]), 2, int(sys.argv[1]), 0, "auto")
try:
    print("blocks", flush=True)
    dist.group_barrier() if sys.argv[1] == "0" else time.sleep(100)
finally:
    print("cleaned up", flush=True)
"""


def test_an_interrupt_ends_a_rank_that_blocks() -> None:
    """Its clean-up runs, and though it serves the others it does not wait for one that goes on."""
    port = str(free_port())
    commands = [[sys.executable, "-c", INTERRUPTED, str(rank), port] for rank in range(2)]
    ranks = [subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "blocks\n"
        ranks[0].send_signal(signal.SIGINT)
        out, errors = ranks[0].communicate(timeout=30)
        assert (out, errors.splitlines()[-1]) == ("cleaned up\n", "KeyboardInterrupt")
        assert ranks[1].poll() is None
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_a_master_that_lets_other_hosts_in_needs_a_token() -> None:
    """Without one the error says what to set."""
    code = f'import aiodist.sync as dist; dist.init_process_group("0.0.0.0", {free_port()}, 1, 0, 0, "shm")'
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=50)
    assert "ValueError: master_ip '0.0.0.0' lets other hosts in: set AIODIST_TOKEN" in done.stderr


def test_the_legacy_script(tmp_path: Path) -> None:
    """The example that ran on the original learns, and its ranks agree."""
    pytest.importorskip("aiodist.sync.launcher", reason="the launcher is not there yet")
    script = Path(__file__).parent.parent / "examples" / "legacy_train.py"
    done = subprocess.run([sys.executable, str(script)], env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stderr
    assert "the ranks agree" in done.stdout
