"""How the processes of a host come to read each other's memory.

Every process makes its own memory, a doorbell and a pidfd. The lowest local rank is the *hub*: the others connect to its abstract unix
socket (no name in any file system, gone with the process), both sides prove that they know the job's token, and the hub hands the
descriptors of all to all, in batches. Having received them is the proof that two ranks share a host.

Everything here blocks, bounded by a deadline, and runs on a thread of its own.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from aiodist import _core
from aiodist.errors import TransportError

__all__ = ["Attachment", "Secret", "attach_as_hub", "attach_to_hub", "host_identity", "listen"]

_FDS_A_RANK: Final = 3
# The kernel passes at most 253 descriptors in a message (SCM_MAX_FD).
_RANKS_A_BATCH: Final = 80
_LARGEST_MESSAGE: Final = 64 * 1024
# What one that connects may take to say who it is; the ranks behind it wait meanwhile.
_HELLO_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a group needs to be made: `members` in rank order, as (process, offset of its block)."""

    members: list[tuple[_core.Process, int]]
    tuning: _core.Tuning


@dataclass(frozen=True, slots=True)
class Secret:
    """What both sides of a connection must know: the job, its generation and its token."""

    job: str
    generation: int
    token: str | None

    def proof(self, who: str, *parts: str) -> str:
        """Return the proof of knowing the token, for one direction of one connection."""
        key = (self.token or "").encode()
        message = "\0".join((who, self.job, str(self.generation), *parts)).encode()
        return hmac.new(key, message, hashlib.sha256).hexdigest()


def host_identity() -> str:
    """Name what must be equal for two processes to be able to pass descriptors: the running kernel and the network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}"


def listen() -> tuple[socket.socket, str]:
    """Return a listening socket and its name, chosen by the kernel."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind("")  # autobind: a name that no other socket of this network namespace has
    server.listen(1024)
    name = server.getsockname()
    return server, name.hex() if isinstance(name, bytes) else name.encode().hex()


def attach_as_hub(server: socket.socket, secret: Secret, size: int, offset: int, tuning: _core.Tuning, deadline: float) -> Attachment:
    """Gather all ranks' descriptors as rank 0 and hand them out. `deadline` is of time.monotonic().

    Raises:
        TransportError: a rank did not come, or runs another version.
    """
    connections: dict[int, socket.socket] = {}
    descriptors: dict[int, list[int]] = {0: list(_core.fds()[:_FDS_A_RANK])}
    told: dict[int, dict[str, int]] = {0: {"pid": _core.fds()[_FDS_A_RANK], "offset": offset}}
    try:
        while len(told) < size:
            server.settimeout(_left(deadline))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(size)) - set(told))
                raise TransportError(f"ranks {missing} did not come to rank 0 to share memory", ranks=missing) from None
            greeting = _welcome(connection, secret, deadline)
            if greeting is None:
                connection.close()  # a stranger, or one that gave up
                continue
            rank, hello, fds = greeting
            if rank in told or not 0 < rank < size:
                connection.close()
                _close_all(fds)
                continue
            connections[rank], descriptors[rank], told[rank] = connection, fds, hello
        for connection in connections.values():
            _send(connection, {"tuning": tuning, "members": [told[rank] for rank in range(size)]})
            for batch in _batches(size):
                flat = [fd for rank in batch for fd in descriptors[rank]]
                socket.send_fds(connection, [b"fds"], flat)
        members = [(_core.this_process(), offset)]
        for rank in range(1, size):
            arena, bell, pidfd = descriptors.pop(rank)
            members.append((_core.attach(arena, bell, pidfd, told[rank]["pid"]), told[rank]["offset"]))
        return Attachment(members, tuning)
    finally:
        for connection in connections.values():
            connection.close()
        for rank, fds in descriptors.items():
            if rank != 0:  # its own stay the engine's
                _close_all(fds)


def attach_to_hub(name: str, secret: Secret, rank: int, size: int, offset: int, deadline: float) -> Attachment:
    """Give rank 0 this process's descriptors and take all ranks'. `deadline` is of time.monotonic().

    Raises:
        TransportError: rank 0 can not be reached, is not of this job, or runs another version.
    """
    received: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hub:
        hub.settimeout(_left(deadline))
        try:
            hub.connect(bytes.fromhex(name))
            _introduce(hub, secret, rank, offset)
            world = _receive(hub, deadline)
            for batch in _batches(size):
                hub.settimeout(_left(deadline))
                _, fds, _, _ = socket.recv_fds(hub, 16, len(batch) * _FDS_A_RANK)
                received += fds
        except (OSError, ValueError, KeyError) as error:
            _close_all(received)
            raise TransportError(f"rank {rank} could not share memory with rank 0: {error}", ranks=(0,)) from error
    if len(received) != size * _FDS_A_RANK:
        _close_all(received)
        raise TransportError(f"rank 0 handed out {len(received)} descriptors for {size} ranks", ranks=(0,))
    members: list[tuple[_core.Process, int]] = []
    for peer, told in enumerate(world["members"]):
        fds = received[peer * _FDS_A_RANK : (peer + 1) * _FDS_A_RANK]
        if peer == rank:
            _close_all(fds)
            members.append((_core.this_process(), offset))
        else:
            arena, bell, pidfd = fds
            members.append((_core.attach(arena, bell, pidfd, told["pid"]), told["offset"]))
    slots, slot_nbytes, segment_nbytes, depth = world["tuning"]
    return Attachment(members, (slots, slot_nbytes, segment_nbytes, depth))


def _welcome(connection: socket.socket, secret: Secret, deadline: float) -> tuple[int, dict[str, int], list[int]] | None:
    """Check one that connected: credentials first, then the proofs both ways. None if it is not one of us."""
    fds: list[int] = []
    soon = min(deadline, time.monotonic() + _HELLO_SECONDS)
    try:
        if not _same_user(connection):
            return None
        theirs = _receive(connection, soon)["nonce"]
        mine = secrets.token_hex(16)
        _send(connection, {"nonce": mine, "proof": secret.proof("hub", theirs, mine), "build": _core.build_hash()})
        connection.settimeout(_left(soon))
        data, fds, _, _ = socket.recv_fds(connection, _LARGEST_MESSAGE, _FDS_A_RANK)
        hello = json.loads(data)
        rank, pid, offset = int(hello["rank"]), int(hello["pid"]), int(hello["offset"])
        expected = secret.proof("member", mine, theirs, str(rank), str(pid), str(offset))
        if not hmac.compare_digest(str(hello["proof"]), expected) or len(fds) != _FDS_A_RANK:
            raise ValueError("no proof")
        return rank, {"pid": pid, "offset": offset}, fds
    except (OSError, ValueError, KeyError, TypeError):
        _close_all(fds)
        return None


def _introduce(hub: socket.socket, secret: Secret, rank: int, offset: int) -> None:
    if not _same_user(hub):
        raise ValueError("its socket belongs to another user")
    mine = secrets.token_hex(16)
    _send(hub, {"nonce": mine})
    answer = json.loads(hub.recv(_LARGEST_MESSAGE) or b"{}")
    theirs = str(answer["nonce"])
    if not hmac.compare_digest(str(answer["proof"]), secret.proof("hub", mine, theirs)):
        raise ValueError("it does not know the job's token")
    if answer["build"] != _core.build_hash():
        raise ValueError(
            f"it runs another build of aiodist ({answer['build']}, here {_core.build_hash()}): install one version for all ranks"
        )
    *fds, pid = _core.fds()
    proof = secret.proof("member", theirs, mine, str(rank), str(pid), str(offset))
    socket.send_fds(hub, [json.dumps({"rank": rank, "pid": pid, "offset": offset, "proof": proof}).encode()], fds)


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.send(json.dumps(message).encode())


def _receive(connection: socket.socket, deadline: float) -> dict[str, Any]:
    connection.settimeout(_left(deadline))
    message = json.loads(connection.recv(_LARGEST_MESSAGE) or b"{}")
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message


def _batches(size: int) -> Iterable[range]:
    return (range(first, min(first + _RANKS_A_BATCH, size)) for first in range(0, size, _RANKS_A_BATCH))


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
