"""`aiodist run` and `run_ranks`: exit codes, signals, output, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist.launch import RankExit, run_ranks
from aiodist.launch_output import LinePrefixer

MARK = "AIODIST_TEST_MARK"
HEAD = "import os, signal, subprocess, sys, time\nrank = int(os.environ['AIODIST_RANK'])\n"


def until(done: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def marked(mark: str) -> list[int]:
    """Live processes that have `mark` in their environment: the launcher, its guard, the ranks and all their children."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                found.append(int(name))
    return found


class Launcher:
    """Starts `aiodist run` on scripts in a folder; nothing may survive a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.env = os.environ | {MARK: self.mark}

    def command(self, ranks: int, body: str, *args: str) -> list[str]:
        (self.folder / "script.py").write_text(HEAD + body, encoding="utf-8")
        return [sys.executable, "-m", "aiodist", "run", "-n", str(ranks), str(self.folder / "script.py"), *args]

    def run(self, ranks: int, body: str, *args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(self.command(ranks, body, *args), input=stdin, capture_output=True, env=self.env, timeout=50, check=False)
        until(lambda: not marked(self.mark), 5.0)
        return done

    @contextlib.contextmanager
    def start(self, ranks: int, body: str, ready: int) -> Iterator[subprocess.Popen[bytes]]:
        """Start and wait until `ready` files ``ready*`` were made by the script."""
        process = subprocess.Popen(
            self.command(ranks, body, str(self.folder)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.env,
            start_new_session=True,
        )
        with process:
            until(lambda: len(list(self.folder.glob("ready*"))) >= ready)
            yield process
            process.kill()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    yield made
    survivors = marked(made.mark)
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    assert not survivors


def ready(name: str = "{rank}") -> str:
    return f"open(f'{{sys.argv[1]}}/ready{name}', 'w').close()\n"


# What a rank gets


def test_ranks_get_their_place_and_arguments(launcher: Launcher) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RENDEZVOUS", "JOB", "TOKEN")
    done = launcher.run(3, f"print(*(os.environ['AIODIST_' + n] for n in {names}), sys.argv[1:])", "-n", "9", "--", "-m", "x y")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.decode().splitlines())
    assert len(lines) == 3
    shared = set()
    for rank, line in enumerate(lines):
        match = re.fullmatch(r"\[(\d)\] (\d) (\d) (\d) (http://127\.0\.0\.1:\d+ \S+ \S+) (\[.*\])", line)
        assert match is not None, line
        assert [int(match[i]) for i in (1, 2, 3, 4)] == [rank, rank, 3, rank]
        assert match[6] == "['-n', '9', '--', '-m', 'x y']"
        shared.add(match[5])
    assert len(shared) == 1


def test_a_module_and_the_double_dash(launcher: Launcher) -> None:
    (launcher.folder / "some_module.py").write_text("import sys; print(__name__, sys.argv[1:])")
    env = launcher.env | {"PYTHONPATH": os.pathsep.join(filter(None, [str(launcher.folder), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "aiodist", "run", "-n", "2", "-m", "--", "some_module", "-n", "--flag"]
    done = subprocess.run(command, capture_output=True, env=env, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.decode().splitlines()) == [f"[{rank}] __main__ ['-n', '--flag']" for rank in range(2)]


def test_rank_0_reads_standard_input(launcher: Launcher) -> None:
    done = launcher.run(2, "print(repr(sys.stdin.read()))", stdin="é 1\n2".encode())
    assert sorted(done.stdout.decode().splitlines()) == ["[0] 'é 1\\n2'", "[1] ''"]


def test_wrong_usage_is_told_and_exits_with_2() -> None:
    for args, text in ((["run", "script.py"], "-n"), (["run", "-n", "0", "x.py"], "0"), (["run", "-n", "2", "/no/such.py"], "/no/such.py")):
        done = subprocess.run([sys.executable, "-m", "aiodist", *args], capture_output=True, timeout=50, check=False)
        assert done.returncode == 2
        assert text in done.stderr.decode()


# How it ends


@pytest.mark.parametrize(
    ("end", "code", "report"),
    [
        ("raise ValueError('boom')", 1, "rank 2: exit code 1"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "rank 2: signal 11 (SIGSEGV)"),
    ],
)
def test_one_rank_fails_and_decides(launcher: Launcher, end: str, code: int, report: str) -> None:
    done = launcher.run(4, f"if rank == 2:\n    {end}\ntime.sleep(120)")
    err = done.stderr.decode()
    assert done.returncode == code, err
    assert f"aiodist: {report}\n" in err
    assert "rank 2 failed: ending ranks 0, 1, 3" in err
    if "boom" in end:
        trace = [line.removeprefix("[2] ") for line in err.splitlines() if line.startswith("[2] ")]
        assert trace[0] == "Traceback (most recent call last):"
        assert trace[-1] == "ValueError: boom"


@pytest.mark.parametrize(
    ("end", "code", "report"),
    [
        ("sys.exit(3)", 3, "rank 1: exit code 3"),
        ("os._exit(255)", 255, "rank 1: exit code 255"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1: signal 9 (SIGKILL)"),
        ("os.kill(os.getpid(), 40)", 168, "rank 1: signal 40 (real-time)"),
    ],
)
def test_failures_have_a_code_and_a_text(capfd: pytest.CaptureFixture[str], end: str, code: int, report: str) -> None:
    result = run_ranks([sys.executable, "-c", HEAD + f"if rank: {end}\ntime.sleep(120)"], 2, settle=0.1)
    assert (result.exit_code, str(result.failure)) == (code, report)
    assert result.ranks[0] is not None
    assert result.ranks[0].signal == signal.SIGTERM
    assert capfd.readouterr().err == f"aiodist: {report}\naiodist: rank 1 failed: ending rank 0\n"


def test_the_first_failure_decides_and_the_others_still_speak(launcher: Launcher) -> None:
    body = """
gone = sys.argv[1] + '/gone'
READY
if rank == 1:
    while len(os.listdir(sys.argv[1])) < 4: time.sleep(0.01)  # the script and three files
    open(gone, 'w').close()
    sys.exit(3)
while not os.path.exists(gone): time.sleep(0.01)
time.sleep(0.3)
print('lost rank 1', file=sys.stderr)
sys.exit(7)
"""
    done = launcher.run(3, body.replace("READY", ready().strip()), str(launcher.folder))
    err = done.stderr.decode()
    assert done.returncode == 3
    assert {"[0] lost rank 1", "[2] lost rank 1", "aiodist: rank 0: exit code 7", "aiodist: rank 2: exit code 7"} <= set(err.splitlines())
    assert "ending" not in err


def test_ranks_that_ignore_sigterm_are_killed(launcher: Launcher) -> None:
    body = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        + ready()
        + "while rank == 0 and not os.path.exists(sys.argv[1] + '/ready1'): pass\n"
    )
    done = launcher.run(2, body + "if rank == 0: sys.exit(4)\ntime.sleep(120)", str(launcher.folder))
    assert done.returncode == 4
    assert b"killing rank 1" in done.stderr


def test_children_left_behind_are_ended(launcher: Launcher) -> None:
    body = """
for session in (False, True):
    subprocess.Popen(['sh', '-c', 'echo child; touch $0; sleep 120', f'{sys.argv[1]}/{rank}{session}'], start_new_session=session)
while not all(os.path.exists(f'{sys.argv[1]}/{rank}{session}') for session in (False, True)): time.sleep(0.01)
print('parent')
"""
    done = launcher.run(2, body, str(launcher.folder))
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == sorted(
        [b"[%d] %s" % (rank, word) for rank in range(2) for word in (b"child", b"child", b"parent")]
    )
    assert b"left behind" in done.stderr


# Signals


TIDY = """
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'], start_new_session=rank == 1)
try:
    READY
    time.sleep(120)
finally:
    time.sleep(0.5)
    print('tidy', flush=True)
"""


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_lets_finally_blocks_run_and_ends_all(launcher: Launcher, times: int) -> None:
    with launcher.start(3, TIDY.replace("READY", ready().strip()), ready=3) as process:
        for _ in range(times):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.2)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 130, err
        assert sorted(out.splitlines()) == [b"[0] tidy", b"[1] tidy", b"[2] tidy"]
        assert b"aiodist: SIGINT: ending ranks 0, 1, 2" in err
        assert re.search(rb"^(?!\[|aiodist: )", err.rstrip(), re.MULTILINE) is None, err  # no traceback of the launcher
        assert not marked(launcher.mark)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_reach_the_tree_and_stubborn_ranks_are_killed(launcher: Launcher, signum: int, code: int) -> None:
    body = "for s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\nif rank == 1: subprocess.Popen(['sleep', '120'])\n" + ready()
    with launcher.start(2, body + "if rank == 0: os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(120)", ready=2) as process:
        os.kill(process.pid, signum)
        process.communicate(timeout=20)
        assert process.returncode == code
        assert not marked(launcher.mark)


def test_user_signals_reach_the_ranks(launcher: Launcher) -> None:
    body = "signal.signal(signal.SIGUSR1, lambda *a: print('usr1') or sys.exit(0))\n" + ready() + "time.sleep(120)"
    with launcher.start(2, body, ready=2) as process:
        os.kill(process.pid, signal.SIGUSR1)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, sorted(out.splitlines())) == (0, [b"[0] usr1", b"[1] usr1"]), err


def test_a_killed_launcher_takes_everything_with_it(launcher: Launcher) -> None:
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsubprocess.Popen(['sleep', '120'], start_new_session=rank == 1)\n" + ready()
    with launcher.start(2, body + "time.sleep(120)", ready=2) as process:
        assert len(marked(launcher.mark)) == 6  # launcher, guard, two ranks, two children
        process.kill()
        process.wait()
        until(lambda: not marked(launcher.mark), 5.0)


def test_a_launch_inside_a_rank_ends_with_it(launcher: Launcher) -> None:
    inner = "import sys, time; open(sys.argv[1] + '/ready', 'w').close(); time.sleep(120)"
    (launcher.folder / "inner.py").write_text(inner)
    body = "subprocess.run([sys.executable, '-m', 'aiodist', 'run', '-n', '2', sys.argv[1] + '/inner.py', sys.argv[1]])"
    with launcher.start(1, body, ready=1) as process:
        process.kill()
        process.wait()
        until(lambda: not marked(launcher.mark), 10.0)


# Output


def test_lines_keep_to_their_rank_and_nothing_is_lost(launcher: Launcher) -> None:
    body = """
for out in (sys.stdout.buffer, sys.stderr.buffer):
    for i in range(150):
        out.write(f'{i} {rank} '.encode() + bytes([65 + rank]) * 10_000 + b'\\n')
    bar = '\\r10% ███\\r20% ███\\n'.encode()
    for i in range(len(bar)):
        out.write(bar[i:i + 1]); out.flush(); time.sleep(0.002)
    out.write(b'bad \\xff byte\\nlast \\xe2\\x96')
"""
    done = launcher.run(4, body)
    assert done.returncode == 0
    for output in (done.stdout, done.stderr):
        lines = output.decode().splitlines()
        for rank in range(4):
            own = [line.removeprefix(f"[{rank}] ") for line in lines if line.startswith(f"[{rank}] ")]
            want = [f"{i} {rank} {chr(65 + rank) * 10_000}" for i in range(150)]
            assert own == [*want, "10% ███", "20% ███", "bad \ufffd byte", "last \ufffd"]
        assert len(lines) == 4 * 154


def test_a_reader_that_does_not_read_blocks_no_rank(launcher: Launcher) -> None:
    body = "for i in range(2000): print(i, chr(65 + rank) * 10_000)\n" + ready()
    with launcher.start(2, body, ready=2) as process:  # both ranks are through, and nobody has read a byte
        out, err = process.communicate(timeout=40)
        assert process.returncode == 0, err
        for rank in range(2):
            own = [line for line in out.splitlines() if line.startswith(b"[%d] " % rank)]
            assert own == [b"[%d] %d %s" % (rank, i, bytes([65 + rank]) * 10_000) for i in range(2000)]


def test_ctrl_c_ends_it_also_when_nobody_reads(launcher: Launcher) -> None:
    body = "if rank == 0:\n    for i in range(1000): print('x' * 10_000)\n" + ready() + "time.sleep(120)"
    with launcher.start(2, body, ready=2) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130


def test_a_closed_pipe_ends_the_ranks(launcher: Launcher) -> None:
    with launcher.start(2, ready() + "while True: print('x'); time.sleep(0.01)", ready=2) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=20) == 128 + signal.SIGPIPE


def test_on_a_terminal_a_progress_bar_is_redrawn_and_lines_stay(launcher: Launcher) -> None:
    body = """
if rank == 0:
    for i in range(5):
        print(f'\\rbar {i}/4', end='', flush=True)
        time.sleep(0.15)
    print()
else:
    time.sleep(0.4)
    print('line')
"""
    master, slave = pty.openpty()
    with subprocess.Popen(launcher.command(2, body), stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, env=launcher.env) as process:
        os.close(slave)
        seen = bytearray()
        with contextlib.suppress(OSError):  # the end of a terminal is an error
            while data := os.read(master, 4096):
                seen += data
        os.close(master)
        assert process.wait(timeout=20) == 0
    assert re.search(rb"\r\x1b\[K\[0\] bar [0-3]/4", seen)  # drawn while it was incomplete
    rows = [row.rpartition(b"\x1b[K")[2].rstrip(b"\r") for row in seen.split(b"\n")]  # what stays of each row
    assert sorted(rows) == [b"", b"[0] bar 4/4", b"[1] line"]


PIECES = st.lists(st.sampled_from(["é", "█", "a", "\n", "\r", "\r\n", "\x1b[1m"]).map(str.encode) | st.just(b"\xff"), max_size=30)


@settings(deadline=None)
@given(PIECES.map(b"".join), st.lists(st.integers(0, 60), max_size=8), st.booleans())
def test_prefixing_does_not_depend_on_how_the_bytes_arrive(data: bytes, cuts: list[int], terminal: bool) -> None:
    whole, pieces = LinePrefixer(b"[7] ", terminal=terminal), LinePrefixer(b"[7] ", terminal=terminal)
    expected = whole.feed(data) + whole.finish()
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    got = b"".join(pieces.feed(data[start:stop]) for start, stop in itertools.pairwise(edges)) + pieces.finish()
    assert got == expected
    lines = re.split(r"\r\n|\n", got.decode())
    assert lines.pop() == ""
    assert all(line.startswith("[7] ") and line.count("[7] ") == 1 and "\r" not in line for line in lines)
    if not terminal:
        want = [line for line in re.split(r"\r\n|\n|\r(?=.)", data.decode("utf-8", "replace"), flags=re.DOTALL)]
        assert [line[4:] for line in lines if line[4:]] == [line.strip("\r") for line in want if line.strip("\r")]


def test_an_endless_line_is_broken_between_characters() -> None:
    lines = LinePrefixer(b"[0] ")
    text = "é" * 3_000_000
    got = b"".join(lines.feed(("x" + text).encode()[i : i + 65536]) for i in range(0, 6_000_001, 65536)) + lines.finish()
    assert got.decode().replace("\n[0] ", "") == "[0] x" + text + "\n"


# The function


def test_run_ranks_returns_how_each_rank_ended(capfd: pytest.CaptureFixture[str]) -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count(), signal.getsignal(signal.SIGINT)
    code = HEAD + "print(rank)\nif rank: time.sleep(0.2); sys.exit(rank + 4)"
    result = run_ranks([sys.executable, "-c", code], 2, settle=20)
    assert result.exit_code == 5
    assert result.failure == RankExit(1, 5, None)
    assert result.ranks == (RankExit(0, 0, None), RankExit(1, 5, None))
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 0", "[1] 1"]
    assert (len(os.listdir("/proc/self/fd")), threading.active_count(), signal.getsignal(signal.SIGINT)) == before


def test_run_ranks_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="world_size"):
        run_ranks(["true"], 0)
    with pytest.raises(ValueError, match="command"):
        run_ranks([], 1)
    with pytest.raises(FileNotFoundError):
        run_ranks(["/no/such/program"], 2)
