"""Opening a member's connection to a server, and telling the server from a stranger on its port."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final, NamedTuple

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from aiodist.errors import RendezvousError
from aiodist.rendezvous.messages import (
    MARK_HEADER,
    MEMBERS_PATH,
    PROTOCOL_VERSION,
    Hello,
    MalformedMessageError,
    Refused,
    Welcome,
    decode_answer,
    encode,
)
from aiodist.rendezvous.sockets import Address, keep_alive, numeric_host
from aiodist.rendezvous.thread import on_a_thread
from aiodist.rendezvous.tls import explain, plain_refused

__all__ = ["Link", "Trust", "open_link"]

_ANSWER_S: Final = 10.0
"""Many members that come at once are not answered at once."""
_CONNECT_S: Final = 5.0
_LOOK_UP_S: Final = 15.0
_CLOSE_S: Final = 1.0
_HANG_UPS: Final = 3
_MAX_ANSWER_NBYTES: Final = 1 << 30

Link = tuple[aiohttp.ClientWebSocketResponse, Welcome]


class Trust(NamedTuple):
    """What an ``https`` server is checked by: a context, and the file of CAs in it, None for the system's."""

    context: ssl.SSLContext | None = None
    ca: str | None = None


class _Resolver(AbstractResolver):
    """All addresses of a name, looked up on a daemon thread: a name server that does not answer must not hold the interpreter's exit."""

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC) -> list[ResolveResult]:
        try:
            async with asyncio.timeout(_LOOK_UP_S):
                return await on_a_thread(_look_up, host, port, family)
        except TimeoutError:
            raise socket.gaierror(socket.EAI_AGAIN, f"looking {host!r} up took more than {_LOOK_UP_S:g} s") from None

    async def close(self) -> None:
        pass


def _look_up(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    found = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
    return [
        ResolveResult(
            hostname=host,
            host=numeric_host(sockaddr),
            port=port,
            family=kind,
            proto=protocol,
            flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
        )
        for kind, _, protocol, _, sockaddr in found
    ]


@asynccontextmanager
async def open_link(address: Address, token: str | None, within: float, trust: Trust) -> AsyncIterator[Link]:
    """Connect and exchange hellos; a server that is not up yet is tried again until ``within`` seconds have passed.

    Raises:
        RendezvousError: naming the address: nobody answered in time, someone answered who is no rendezvous, or it refused us.
    """
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    # All addresses of a name are tried, a quarter of a second apart. A name is looked up again at each try: it may come up late.
    connector = aiohttp.TCPConnector(resolver=_Resolver(), use_dns_cache=False, limit=0, ssl=trust.context or True)
    limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_ANSWER_S)
    async with aiohttp.ClientSession(connector=connector, timeout=limits, headers=headers) as session:
        try:
            ws, welcome = await _open(session, address, within)
        except aiohttp.ClientSSLError as error:
            raise RendezvousError(explain(address, error, trust.ca)) from None
        except _StrangerError as error:
            if address.scheme == "http" and await _speaks_tls(address):
                raise RendezvousError(plain_refused(address)) from None
            raise RendezvousError(str(error)) from None
        try:
            yield ws, welcome
        finally:
            with suppress(ConnectionError):
                await ws.close()


async def _open(session: aiohttp.ClientSession, address: Address, within: float) -> Link:
    """Connect and exchange hellos; a server that is killed in between may come back."""
    deadline = asyncio.get_running_loop().time() + within
    for _ in range(_HANG_UPS):
        ws = await _dial(session, address, within, deadline)
        try:
            keep_alive(ws.get_extra_info("socket"))
            return ws, await _greet(ws, address)
        except BaseException as error:
            with suppress(ConnectionError):
                await ws.close()
            if not isinstance(error, ConnectionError):
                raise
    raise _stranger(address, "it closes the connection before it returned our hello")


async def _dial(session: aiohttp.ClientSession, address: Address, within: float, deadline: float) -> aiohttp.ClientWebSocketResponse:
    loop = asyncio.get_running_loop()
    pause, hang_ups, cause = 0.02, 0, "the last try got no answer"
    while True:
        try:
            # What sends a byte now and then keeps every other timeout from ending the wait for an answer.
            async with asyncio.timeout_at(min(deadline, loop.time() + _LOOK_UP_S + _CONNECT_S + _ANSWER_S)):
                return await session.ws_connect(
                    str(address) + MEMBERS_PATH,
                    timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
                    max_msg_size=_MAX_ANSWER_NBYTES,
                    compress=0,
                )
        except aiohttp.ClientSSLError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ConnectionTimeoutError) as error:
            cause = _why_down(error)
            if not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
                hang_ups += 1  # Someone listens. A proxy before a server that is not up does this for a while, a stranger always.
            if hang_ups >= _HANG_UPS:
                raise _stranger(address, "it closes the connection without an answer") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            if loop.time() < deadline or not isinstance(error, TimeoutError):
                raise _unwanted(address, error) from None
        if loop.time() + pause >= deadline:
            raise RendezvousError(f"no rendezvous answered at {address} within {within:g} s: {cause}")
        await asyncio.sleep(pause * (1 + random.random()) / 2)  # a thousand members must not come in one wave
        pause = min(2 * pause, 1.0)


def _why_down(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        code = error.os_error.errno or 0
        return os.strerror(code) if code > 0 else error.os_error.strerror or str(error.os_error)
    return str(error) or type(error).__name__


def _unwanted(address: Address, error: Exception) -> RendezvousError:
    """Turn the answer of someone who is there, but does not take us, into what the user should know."""
    match error:
        case aiohttp.WSServerHandshakeError() if error.headers is not None and MARK_HEADER in error.headers:
            why = {
                401: "it does not accept our token (AIODIST_TOKEN)",
                503: "it has as many connections as it may have",
            }.get(error.status, f"it answered {error.status}")
            return RendezvousError(f"the rendezvous at {address} refused the connection: {why}")
        case aiohttp.WSServerHandshakeError():
            return _stranger(address, f"it answered like another HTTP server (status {error.status})")
        case TimeoutError():
            return _stranger(address, "it accepted the connection and gave no answer")
        case _:
            return _stranger(address, "it does not speak HTTP")


async def _speaks_tls(address: Address) -> bool:
    """Tell whether there is TLS where plain HTTP was not understood. The token is not sent there."""
    connector = aiohttp.TCPConnector(resolver=_Resolver(), ssl=False)  # whose certificate it is does not matter
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as session:
        with suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with session.get(f"https{str(address).removeprefix('http')}/healthz", allow_redirects=False):
                return True
    return False


class _StrangerError(RendezvousError):
    """Raised when what answers is no rendezvous."""


def _stranger(address: Address, why: str) -> _StrangerError:
    return _StrangerError(f"what listens at {address} is no aiodist rendezvous: {why}; is another program on that port?")


async def _greet(ws: aiohttp.ClientWebSocketResponse, address: Address) -> Welcome:
    try:
        await ws.send_bytes(encode(Hello(PROTOCOL_VERSION)))
        frame = await ws.receive(timeout=_ANSWER_S)
        if frame.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.ERROR):
            raise ConnectionResetError("the connection ended")
        answer = decode_answer(frame.data) if frame.type is aiohttp.WSMsgType.BINARY else None
    except (TimeoutError, MalformedMessageError) as error:
        raise _stranger(address, f"it did not return our hello ({type(error).__name__})") from None
    if isinstance(answer, Welcome):
        return answer
    if isinstance(answer, Refused):
        raise RendezvousError(f"the rendezvous at {address} refused us: {answer.text}")
    raise _stranger(address, "it did not return our hello")
