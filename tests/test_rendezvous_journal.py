"""The state directory: who may use it, what is refused, and what is in it."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.rendezvous import TOKEN, client, info, world

from aiodist.errors import RendezvousError
from aiodist.rendezvous.journal import JournalError
from aiodist.rendezvous.server import RendezvousServer
from aiodist.rendezvous.sockets import parse_address

pytestmark = pytest.mark.timeout(60)


async def _write_some(where: Path) -> Path:
    """A state file of a world with a large key; returns its path."""
    async with RendezvousServer(token=TOKEN, state=str(where)) as server:
        me = client(server)
        await me.connect()
        await me.join(world_size=1, rank=0, info=info())
        await me.set("large", os.urandom(200_000))
        await server.aclose()
        await me.aclose()
    return where / "rendezvous.sqlite"


def _rows(path: Path) -> dict[str, int]:
    database = sqlite3.connect(path)
    try:
        tables = ("members", "keys", "results", "answers", "ended")
        return {table: database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}
    finally:
        database.close()


async def test_a_directory_belongs_to_one_server_at_a_time(tmp_path: Path) -> None:
    async with RendezvousServer(state=str(tmp_path)) as server:
        with pytest.raises(JournalError, match=f"{tmp_path} is in use by another rendezvous, process {os.getpid()}"):
            await RendezvousServer(state=str(tmp_path)).start()
        command = [sys.executable, "-m", "aiodist", "rendezvous", "--state", str(tmp_path)]
        done = subprocess.run(command, check=False, timeout=50, capture_output=True, text=True, stdin=subprocess.DEVNULL)  # noqa: ASYNC221
        assert (done.returncode, done.stdout) == (1, "")
        assert f"in use by another rendezvous, process {os.getpid()}" in done.stderr and "Traceback" not in done.stderr
        port = parse_address(server.address).port
        with pytest.raises(OSError, match="Address already in use"):
            await RendezvousServer(port=port, state=str(tmp_path / "other")).start()
    async with RendezvousServer(state=str(tmp_path)), RendezvousServer(state=str(tmp_path / "other")):
        pass  # Both were given back.


@pytest.mark.parametrize("damage", ["garbage", "truncated", "overwritten", "rows"])
async def test_a_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    path = await _write_some(tmp_path)
    if damage == "garbage":
        path.write_bytes(b"this is no database at all\n" * 100)
    elif damage == "truncated":
        os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)
    elif damage == "overwritten":
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(os.urandom(path.stat().st_size - 4096))
    else:
        with sqlite3.connect(path) as database:
            database.execute("UPDATE members SET body = x'00'")
        database.close()
    for _ in range(2):  # and it stays as it is
        with pytest.raises(JournalError, match=f"state file {path} is damaged"):
            await RendezvousServer(state=str(tmp_path)).start()


async def test_a_file_of_another_program_or_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rendezvous.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE precious (x)")
    database.close()
    before = path.read_bytes()
    with pytest.raises(JournalError, match=f"{path} is no state file of this version"):
        await RendezvousServer(state=str(tmp_path)).start()
    assert path.read_bytes() == before


async def test_a_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=f"can not use the state directory {tmp_path / 'file'}"):
        await RendezvousServer(state=str(tmp_path / "file")).start()


async def test_only_the_owner_can_read_the_state(tmp_path: Path) -> None:
    where = tmp_path / "new" / "place"
    async with RendezvousServer(state=str(where)):
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (where, *where.iterdir())}
    assert {"place", "rendezvous.lock", "rendezvous.sqlite"} <= set(modes)
    assert all(mode & 0o077 == 0 for mode in modes.values()), modes


async def test_the_state_of_a_job_that_has_ended_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rendezvous.sqlite"
    async with RendezvousServer(token=TOKEN, state=str(tmp_path)) as server:
        async with world(server, 2) as (a, b):
            await a.set("k", b"v")
            await b.add("n", 1)
            assert _rows(path) | {"results": 0} == {"members": 2, "keys": 2, "answers": 2, "results": 0, "ended": 0}
            await a.leave()
            await b.leave()
        assert _rows(path) == {"members": 0, "keys": 0, "answers": 0, "results": 0, "ended": 1}
        async with world(server, 2, "Y") as (a, b):
            await a.set("k", b"v")  # Both close without a goodbye: the job ends badly.
        async with world(server, 1, "Z") as (a,):
            await a.leave()
        assert _rows(path) == {"members": 0, "keys": 0, "answers": 0, "results": 0, "ended": 2}


async def test_a_server_whose_state_can_not_be_written_ends_and_answers_nothing(tmp_path: Path) -> None:
    server = RendezvousServer(token=TOKEN, state=str(tmp_path))
    await server.start()
    me = client(server, timeout=1.0)
    await me.connect()
    await me.join(world_size=1, rank=0, info=info())
    other = sqlite3.connect(tmp_path / "rendezvous.sqlite")
    other.execute("DROP TABLE keys")  # as good as a disk that fails
    other.close()
    with pytest.raises(RendezvousError, match="was lost"):
        await me.set("k", b"v")
    with pytest.raises(JournalError, match=f"can not write the state file {tmp_path / 'rendezvous.sqlite'}: no such table: keys"):
        await server.wait()
    await me.aclose()
