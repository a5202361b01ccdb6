"""Spellings of a server's address, listening sockets, and sockets that notice a vanished host."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from aiodist.rendezvous.interfaces import is_loopback_address

__all__ = ["Address", "check_token", "is_loopback", "keep_alive", "listen", "numeric_host", "parse_address"]

_TOKEN: Final = re.compile(r"[\x21-\x7e]{1,1024}\Z")
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,253})\Z")
_BACKLOG: Final = 1024


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rendezvous listens; ``str()`` gives the canonical spelling."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read ``http[s]://host:port``; ``tcp://`` and no scheme at all mean ``http://``. IPv6 addresses stand in brackets.

    Raises:
        ValueError: the text is no such address; it says how it should look, with brackets where it is an IPv6 address without them.
    """
    scheme, separator, rest = text.strip().partition("://")
    if not separator:
        scheme, rest = "http", text.strip()
    scheme = {"tcp": "http"}.get(scheme.lower(), scheme.lower())
    if scheme not in ("http", "https"):
        raise ValueError(f"{text!r}: the scheme of a rendezvous is http or https, as in http://host:port")
    rest = rest.removesuffix("/")
    if "[" not in rest and rest.count(":") > 1 and "@" not in rest:
        raise ValueError(f"{text!r} is ambiguous: an IPv6 address stands in brackets, {_bracketed(scheme, rest)}")
    try:
        parts = urlsplit(f"{scheme}://{rest}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{text!r} is no rendezvous address like http://host:port ({error})") from None
    if not host or parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{text!r} is no rendezvous address: only a host and a port are expected, as in http://host:port")
    if not port:
        raise ValueError(f"{text!r} names no port: write http://host:port")
    if not (_is_ipv6(host) if "[" in rest else _HOST_NAME.match(host)):
        raise ValueError(f"{text!r} is no rendezvous address: {host!r} is neither a host name nor an IP address")
    return Address(scheme, host, port)


def _bracketed(scheme: str, rest: str) -> str:
    head, _, tail = rest.rpartition(":")
    if _is_ipv6(head) and tail.isdecimal() and 0 < int(tail) < 65536:
        return f"{scheme}://[{head}]:{tail}"
    return f"{scheme}://[{rest}]:PORT" if _is_ipv6(rest) else f"{scheme}://[ADDRESS]:PORT"


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def check_token(token: str | None) -> str | None:
    """Give the token back, or raise ValueError (without showing it) if it can not stand in an HTTP header."""
    if token is not None and not _TOKEN.match(token):
        raise ValueError("a token is 1 to 1024 printable ASCII characters without spaces")
    return token


def numeric_host(sockaddr: Any) -> str:
    """Return the address in what `socket.getsockname` and the like return; that of an IPv6 link with its interface."""
    return socket.getnameinfo(sockaddr, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def is_loopback(sock: socket.socket) -> bool:
    """Whether a bound socket can be reached from this host only."""
    return is_loopback_address(sock.getsockname()[0])


def listen(host: str, port: int) -> socket.socket:
    """Bind and return a listening socket on the first of the host's addresses that this machine has. It blocks to resolve a name.

    The host may be an IPv6 address in brackets. The port is never probed first: port 0 lets the kernel choose, and the socket that got
    the port is the one that is used.

    Raises:
        OSError: naming host and port, for example because the port is in use.
        ValueError: the port is no port.
    """
    if not 0 <= port < 65536:
        raise ValueError(f"port {port} is not between 0 and 65535")
    host = host.removeprefix("[").removesuffix("]")
    where = str(Address("", host, port)).removeprefix("://")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OSError(error.errno, f"can not listen on {where}: {error.strerror}") from None
    failure: OSError | None = None
    for family, kind, protocol, _, sockaddr in found:
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            failure = failure or error
            continue
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(sockaddr)
            sock.listen(_BACKLOG)
            sock.setblocking(False)
            return sock
        except OSError as error:
            sock.close()
            failure = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                break
    code = (failure.errno if failure else None) or errno.EADDRNOTAVAIL
    raise OSError(code, f"can not listen on {where}: {os.strerror(code)}")


def keep_alive(sock: socket.socket | None) -> None:
    """Let the kernel end a connection whose other host has vanished (30 s); a stopped process still counts as there."""
    if sock is None:
        return
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
