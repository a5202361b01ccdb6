"""Small things: free ports."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from typing import Final

__all__ = ["get_free_ports"]

_HELD: Final = 256
# Descriptors of the sockets that hold what was handed out.
_held: Final[deque[int]] = deque()
_lock: Final = threading.Lock()


def get_free_ports(num: int) -> list[int]:
    """Return TCP ports that nobody uses, and keep them from being handed out again.

    Each stays bound, without listening, by a socket with SO_REUSEADDR of this process. While that is so, the kernel gives the port to
    nobody who asks for any port (neither a server on port 0, nor the near end of an outgoing connection, nor another call of this
    function, in any process), yet a server that asks for it by number and sets SO_REUSEADDR gets it, in this process and in others:
    `aiodist.sync.Server`, asyncio, aiohttp, `http.server` and `xmlrpc.server` all do. A second listener is refused as usual.

    The reservation ends with this process, or when it has handed out 256 more ports. It does not hold against a program that asks for
    the same number on purpose. A server without SO_REUSEADDR (a bare `socketserver.TCPServer`) finds the port in use. A server that can
    take port 0 and tell which one it got needs none of this.

    Args:
        num: How many.

    Raises:
        TypeError, ValueError: `num` is no whole number from 0 to 256.
        OSError: there are no free ports or descriptors left.
    """
    if isinstance(num, bool) or not isinstance(num, int):
        raise TypeError(f"num must be a whole number, not {type(num).__name__}")
    if not 0 <= num <= _HELD:
        raise ValueError(f"num must be 0 to {_HELD}, not {num}")
    ports = []
    with _lock:
        for _ in range(num):
            if len(_held) >= _HELD:
                os.close(_held.popleft())
            ports.append(_hold())
    return ports


def _hold() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", 0))
        port: int = sock.getsockname()[1]
        _held.append(sock.detach())
    return port
