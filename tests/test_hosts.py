"""Ranks and members on several hosts, which are network namespaces here: who reaches whom by which address, and what is said if not.

Both hosts have the same name, which each of them maps to 127.0.1.1, as Debian does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.ranks import ServerThread, new_job

pytestmark = pytest.mark.timeout(90)

SERVERS = """
    import asyncio, sys
    from aiodist.rendezvous.server import RendezvousServer

    async def main():
        async with RendezvousServer("0.0.0.0", token="a-token") as four, RendezvousServer("[2001:db8:77::1]", token="a-token") as six:
            print(four.address, six.address, flush=True)
            await asyncio.to_thread(sys.stdin.read)

    asyncio.run(main())
"""
MEMBER = """
    import asyncio, sys
    from aiodist.rendezvous.client import RendezvousClient

    async def main():
        for number, address in enumerate(sys.argv[1:]):
            async with RendezvousClient(address, job=f"member-{number}", token="a-token", timeout=4.0) as me:
                await me.join(world_size=1, rank=0, info={})
                await me.set("k", b"v")
                print(me.local_address)

    asyncio.run(main())
"""
RANK = """
    import asyncio, sys
    import aiodist

    async def main():
        rank = int(sys.argv[1])
        for number, attempt in enumerate(sys.argv[2:]):
            address, _, interface = attempt.partition(" ")
            options = {"rendezvous": address, "rank": rank, "world_size": 4, "job": f"rank-{number}", "token": "a-token", "timeout": 40}
            try:
                await aiodist.init(**options, interface=interface or None)
            except aiodist.TransportError as error:
                print(error.rank, *error.ranks, error, sep="|")

    asyncio.run(main())
"""
OWN = """
    import asyncio, logging
    from aiodist.rendezvous.client import RendezvousClient
    from aiodist.rendezvous.server import RendezvousServer

    logging.basicConfig(level=logging.WARNING)

    async def main():
        for host in ("127.0.0.1", "localhost"):
            async with RendezvousServer(host) as server:
                port = server.address.rpartition(":")[2]
                for job, name in enumerate(("127.0.0.1", "localhost")):
                    async with RendezvousClient(f"http://{name}:{port}", job=str(job), timeout=20.0) as me:
                        await me.join(world_size=1, rank=0, info={})
                        print(me.local_address)

    asyncio.run(main())
"""
SHARED = """
    import asyncio, os, sys
    import aiodist

    async def main():
        print(os.listdir("/dev/shm"))
        async with aiodist.init() as world:
            print(float(await world.all_reduce(1.0 + world.rank)))

    asyncio.run(main())
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


@dataclass
class Host:
    """A network namespace."""

    name: str

    def start(self, script: str, *arguments: str) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", self.name, sys.executable, "-W", "error", "-c", textwrap.dedent(script), *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@contextlib.contextmanager
def host(letter: str) -> Iterator[Host]:
    name = f"aiodist-{os.getpid()}-{letter}"
    files = Path("/etc/netns", name)
    try:
        run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"there are no network namespaces here: {error.stderr.decode().strip()}")
    try:
        files.mkdir(parents=True)
        entries = ["127.0.0.1 localhost", "::1 localhost", f"127.0.1.1 {socket.gethostname()}"]
        entries += ["2001:db8:77::1 refuses.example", "10.77.0.1 refuses.example"]
        entries += ["2001:db8:77::9 silent.example", "10.77.0.1 silent.example"]
        (files / "hosts").write_text("\n".join([*entries, ""]))
        run("ip", "-n", name, "link", "set", "lo", "up")
        yield Host(name)
    finally:
        run("ip", "netns", "del", name)
        shutil.rmtree(files)
        with contextlib.suppress(OSError):
            files.parent.rmdir()


@pytest.fixture(scope="module")
def root() -> None:
    if os.geteuid() != 0:
        pytest.skip("making network namespaces needs root")
    if shutil.which("ip") is None:
        pytest.skip("making network namespaces needs ip, of Debian's iproute2")


@pytest.fixture(scope="module")
def hosts(root: None) -> Iterator[tuple[Host, Host]]:
    """Two hosts on one wire: 10.77.0.1 and 2001:db8:77::1, and the same with 2."""
    with host("a") as a, host("b") as b:
        run("ip", "link", "add", "wire", "netns", a.name, "type", "veth", "peer", "name", "wire", "netns", b.name)
        for number, one in enumerate((a, b), 1):
            run("ip", "-n", one.name, "address", "add", f"10.77.0.{number}/24", "dev", "wire")
            run("ip", "-n", one.name, "address", "add", f"2001:db8:77::{number}/64", "dev", "wire", "nodad")
            run("ip", "-n", one.name, "link", "set", "wire", "up")
        # Nobody has that address: what is sent there is lost, and no error comes back.
        run("ip", "-n", b.name, "neighbour", "add", "2001:db8:77::9", "lladdr", "02:00:00:00:00:09", "dev", "wire", "nud", "permanent")
        yield a, b


@pytest.fixture(scope="module")
def servers(hosts: tuple[Host, Host]) -> Iterator[tuple[str, str]]:
    """The addresses of two rendezvous on the first host: of all its IPv4 addresses, and of its IPv6 address."""
    with hosts[0].start(SERVERS) as process:
        assert process.stdout is not None
        four, six = process.stdout.readline().split()
        yield four, six
        printed, complained = process.communicate(timeout=20)
        assert printed == "" and all("plain HTTP" in line for line in complained.splitlines()), complained


def outcome(process: subprocess.Popen[str]) -> list[str]:
    """What a script printed; it must have ended well and without a warning."""
    with process:
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, err) == (0, "")
    return out.splitlines()


def test_a_server_on_all_addresses_tells_one_that_other_hosts_reach(servers: tuple[str, str]) -> None:
    assert servers[0].startswith("http://10.77.0.1:") and servers[1].startswith("http://[2001:db8:77::1]:")


def test_members_reach_the_server_by_any_address_of_its_name(hosts: tuple[Host, Host], servers: tuple[str, str]) -> None:
    four, six = servers
    addresses = [four, six, *(four.replace("10.77.0.1", f"{name}.example") for name in ("refuses", "silent"))]
    assert outcome(hosts[1].start(MEMBER, *addresses)) == ["10.77.0.2", "2001:db8:77::2", "10.77.0.2", "10.77.0.2"]


def test_ranks_on_two_hosts_learn_by_which_addresses_they_would_be_reached(hosts: tuple[Host, Host], servers: tuple[str, str]) -> None:
    there = servers[0]
    here = there.replace("10.77.0.1", "127.0.0.1")
    ranks = [hosts[0].start(RANK, str(rank), there, here, f"{here} wire") for rank in (0, 1)]
    ranks += [hosts[1].start(RANK, str(rank), there, there, there) for rank in (2, 3)]
    name = socket.gethostname()
    both = f"ranks 0, 1 on {name} (10.77.0.1); ranks 2, 3 on {name} (10.77.0.2). There is no path between hosts yet"
    loopback = f"ranks 0, 1 on {name} (127.0.0.1): that address leads other hosts to themselves."
    for rank, process in enumerate(ranks):
        others = "2|3" if rank < 2 else "0|1"
        told = outcome(process)
        assert all(line.startswith(f"{rank}|{others}|the ranks of the world are on 2 hosts: ") for line in told)
        assert [both in told[0], loopback in told[1] and "AIODIST_INTERFACE" in told[1], both in told[2]] == [True] * 3


def test_without_ipv6_all_works_by_ipv4_and_without_a_word(root: None) -> None:
    with host("c") as alone:
        run("ip", "netns", "exec", alone.name, "sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6")
        assert outcome(alone.start(OWN)) == ["127.0.0.1"] * 4


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="making mount namespaces needs root and unshare")
def test_ranks_with_mounts_of_their_own_share_memory_all_the_same(server: ServerThread) -> None:
    job = new_job()
    apart = 'mount -t tmpfs none /dev/shm && touch /dev/shm/own && exec "$@"'
    ranks = []
    for rank in range(2):
        command = ["unshare", "--mount", "sh", "-c", apart, "sh", sys.executable, "-W", "error", "-c", textwrap.dedent(SHARED)]
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen(command, env=server.environment(rank, 2, job), stdin=pipe, stdout=pipe, stderr=pipe, text=True))
    assert [outcome(process) for process in ranks] == [["['own']", "3.0"]] * 2
