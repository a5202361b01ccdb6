"""This host's network interfaces, and the address by which others reach it."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["address_of", "interfaces", "is_loopback_address", "own_name"]

_SIOCGIFADDR: Final = 0x8915
_LINK_SCOPE: Final = 0x20
# Addresses that nobody has: who asks for the way there learns by which of its own addresses this host goes out.
_ELSEWHERE: Final = ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1"))


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of each network interface that has any: IPv4 first, then IPv6, those of its own link last."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for name, addresses in found.items():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                addresses.append(socket.inet_ntoa(answer[20:24]))
    rows: list[list[str]] = []
    with suppress(OSError):  # there is no IPv6
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    for digits, _, _, scope, _, name in sorted(rows, key=lambda row: int(row[3], 16) == _LINK_SCOPE):
        zone = f"%{name}" if int(scope, 16) == _LINK_SCOPE else ""
        found.setdefault(name, []).append(f"{ipaddress.IPv6Address(int(digits, 16))}{zone}")
    return {name: addresses for name, addresses in found.items() if addresses}


def address_of(interface: str) -> str:
    """Return the first address of a network interface that is named, or an address of this host as it is.

    Raises:
        TypeError: it is no string.
        ValueError: there is no such interface or address here; the text lists those that there are.
    """
    if not isinstance(interface, str):
        raise TypeError(f"interface must be a string, not {type(interface).__name__}")
    there = interfaces()
    if interface in there:
        return there[interface][0]
    address = interface.removeprefix("[").removesuffix("]")
    if not _is_here(address):
        listed = ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in there.items())
        raise ValueError(
            f"interface {interface!r} (interface=, AIODIST_INTERFACE) names neither a network interface of this host that has an address "
            f"nor an address of it; there are {listed}"
        )
    return address


def _is_here(address: str) -> bool:
    """Whether it is an address of this host that others may be told."""
    try:
        if ipaddress.ip_address(address).is_unspecified:
            return False
        family, _, _, _, sockaddr = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind(sockaddr)
    except (OSError, ValueError):
        return False
    return True


def is_loopback_address(address: str) -> bool:
    """Whether an address leads back to the host that uses it; False for what is no address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def own_name() -> str:
    """Return what other hosts may call this one: its name, unless that means the loopback interface here, as on many systems it does.

    Then it is the address by which this host goes out. It blocks to resolve the name.
    """
    name = socket.gethostname()
    with suppress(OSError):
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
        if not any(is_loopback_address(address) for address in found):
            return name
    for family, elsewhere in _ELSEWHERE:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((elsewhere, 9))  # Nothing is sent.
            return str(sock.getsockname()[0])
    there = (address for addresses in interfaces().values() for address in addresses)
    return next((address for address in there if not is_loopback_address(address)), name)
