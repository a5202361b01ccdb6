"""`aiodist.sync.util`: ports that stay free for whoever was given them."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from aiodist.sync.server import Client, Server
from aiodist.sync.util import get_free_ports


def test_ports_are_handed_out_once() -> None:
    """Also to other processes, and not to servers that ask for any port."""
    own = get_free_ports(100) + get_free_ports(100)
    code = "from aiodist.sync.util import get_free_ports; print(*get_free_ports(200))"
    theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert len({*own, *map(int, theirs)}) == 400
    for port in own:
        with socket.socket() as bare, pytest.raises(OSError, match="in use"):
            bare.bind(("127.0.0.1", port))


def test_a_reserved_port_can_be_used_here() -> None:
    """Once at a time."""
    (port,) = get_free_ports(1)
    with Server(port) as server:
        assert server.py_server_port == port
        assert Client("127.0.0.1", port).connect()
        with pytest.raises(OSError, match="in use"):
            Server(port)
    with Server(port):
        pass


def test_a_reserved_port_can_be_used_by_another_process() -> None:
    """While it is held here."""
    (port,) = get_free_ports(1)
    code = f"import socket; socket.create_server(('127.0.0.1', {port}), reuse_port=False).close(); print('served')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout == "served\n"


@pytest.mark.parametrize(("num", "error"), [(-1, ValueError), (257, ValueError), (1.0, TypeError), (True, TypeError)])
def test_a_wrong_number_is_refused(num: int, error: type[Exception]) -> None:
    """And none at all is fine."""
    with pytest.raises(error, match="num must be"):
        get_free_ports(num)
    assert get_free_ports(0) == []
