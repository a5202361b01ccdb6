"""Launches beside other programs and other launches on the same host."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)

AIODIST = [sys.executable, "-m", "aiodist"]


@pytest.mark.parametrize("command", ["run", "rendezvous"])
def test_a_busy_port_is_told_and_nothing_is_started(command: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('started')")
    with socket.create_server(("127.0.0.1", 0)) as busy:  # accepts, and says nothing
        port: int = busy.getsockname()[1]
        rest = ["-n", "2", str(script)] if command == "run" else []
        done = subprocess.run([*AIODIST, command, "--port", str(port), *rest], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"can not listen on 127.0.0.1:{port}: Address already in use" in done.stderr


def test_a_launch_takes_the_port_it_is_given(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ['AIODIST_RENDEZVOUS'])")
    with socket.create_server(("127.0.0.1", 0)) as held:
        port: int = held.getsockname()[1]
    command = [*AIODIST, "run", "--port", str(port), "-n", "1", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (0, f"[0] http://127.0.0.1:{port}\n"), done.stderr


def test_launches_of_one_job_name_at_a_time_never_mix(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import asyncio, os, aiodist

async def main():
    async with aiodist.init() as world:
        print(await world.all_gather_object([os.getppid(), os.environ["AIODIST_JOB"]]))

asyncio.run(main())
""")
    command = [*AIODIST, "run", "-n", "2", "--job", "same", str(script)]
    launches = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for launch in launches:
        assert sorted(launch.communicate(timeout=50)[0].splitlines()) == [f"[{rank}] {[[launch.pid, 'same']] * 2}" for rank in range(2)]
        assert launch.returncode == 0
