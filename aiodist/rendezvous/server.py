"""The rendezvous server: an aiohttp application that carries the state machine of `state` to its members and shows it to people."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import ssl
from collections.abc import Iterable
from functools import partial
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote, urlencode

from aiohttp import WSMsgType, web

from aiodist.config import DEFAULT_TIMEOUT, Settings
from aiodist.rendezvous.connection import Connection, check_hello, why_ended
from aiodist.rendezvous.http import HttpApi, http_log, json_answer
from aiodist.rendezvous.interfaces import own_name
from aiodist.rendezvous.job import Limits
from aiodist.rendezvous.journal import Journal, JournalError
from aiodist.rendezvous.lobby import HEAD_S
from aiodist.rendezvous.logs import log_event
from aiodist.rendezvous.messages import (
    MEMBERS_PATH,
    PROTOCOL_VERSION,
    Answer,
    MalformedMessageError,
    Refused,
    Welcome,
    decode_request,
    encode,
)
from aiodist.rendezvous.metrics import Metrics
from aiodist.rendezvous.openapi import ErrorBody
from aiodist.rendezvous.sockets import Address, check_token, is_loopback, keep_alive, listen
from aiodist.rendezvous.state import Delivery, Service
from aiodist.rendezvous.thread import on_a_thread
from aiodist.rendezvous.tls import server_context
from aiodist.rendezvous.xml_door import BOARD, XmlDoor

__all__ = ["RendezvousServer"]

_WILDCARDS: Final = frozenset({"0.0.0.0", "::"})
_HELLO_S: Final = 10.0
_CLOSE_S: Final = 1.0
_ENVELOPE_NBYTES: Final = 1 << 17
_BODY_NBYTES: Final = 1 << 16
_LINE_NBYTES: Final = 1 << 15
_BACKLOG: Final = 1024
_HANDSHAKE_S: Final = 10.0

_log = logging.getLogger("aiodist.rendezvous")


class RendezvousServer:
    """Serves many jobs on one port, in the event loop it is started on.

    Members hold a WebSocket at ``/api/v1/members``. People look at the page at ``/``; tools read ``/healthz``, ``/metrics`` and the API
    that ``/api/v1/openapi.json`` describes. ``/RPC2`` answers the calls of `aiodist.sync`, which wait for AIODIST_TIMEOUT seconds. What
    happens is logged to ``aiodist.rendezvous``, with fields. With a state directory, the next server on the same address goes on with the
    worlds of this one, however it ended; without one, members of those worlds are refused by the next.

    Args:
        host: The name or address to listen on, IPv6 in brackets or not. Outside the loopback interface it needs a token.
        port: The port; 0 lets the kernel choose one, which `address` then tells.
        token: The bearer token that everything but ``/healthz`` and the empty page asks for.
        insecure: Listen outside the loopback interface without a token all the same.
        tls_cert: PEM file with the certificate for TLS, the server's own first; clients then write ``https``.
        tls_key: PEM file with its private key.
        limits: What the server holds at most.
        state: The directory in which worlds are written down. A server whose state can not be written ends.

    Raises:
        ValueError: the token is empty or can not stand in an HTTP header, one of ``tls_cert`` and ``tls_key`` is missing, or
            AIODIST_TIMEOUT is no time.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        insecure: bool = False,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        limits: Limits | None = None,
        state: str | None = None,
    ) -> None:
        self._host = host.removeprefix("[").removesuffix("]")
        self._port = port
        self._token = check_token(token)
        self._insecure = insecure
        if (tls_cert is None) != (tls_key is None):
            raise ValueError("tls_cert and tls_key are given together")
        self._tls = None if tls_cert is None or tls_key is None else (tls_cert, tls_key)
        self._state = state
        self._journal: Journal | None = None
        self._failure: JournalError | None = None
        self._service = Service(limits, journalled=state is not None)
        self._limits = self._service.limits
        self._xml_wait = Settings.from_env().timeout or DEFAULT_TIMEOUT
        self._connections: dict[int, Connection] = {}
        self._metrics = Metrics()
        self._http = HttpApi(self._service, self._metrics, self._token, lambda: len(self._connections))
        self._numbers = itertools.count(1)
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._owner: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._deserted = asyncio.Event()
        self._deserted.set()
        self._timer: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._address: Address | None = None
        self._closing = False

    @property
    def address(self) -> str:
        """``http[s]://host:port`` with the real port.

        Raises:
            RuntimeError: the server was not started.
        """
        if self._address is None:
            raise RuntimeError("the rendezvous server has no address before it is started")
        return str(self._address)

    @property
    def port(self) -> int:
        """The real port.

        Raises:
            RuntimeError: the server was not started.
        """
        if self._address is None:
            raise RuntimeError("the rendezvous server has no port before it is started")
        return self._address.port

    def page_link(self, job: str | None = None) -> str:
        """Return the link to the page, on a job if one is named. It carries the token, in the part that browsers do not send.

        Raises:
            RuntimeError: the server was not started.
        """
        fragment = urlencode({name: value for name, value in (("token", self._token), ("job", job)) if value}, quote_via=quote)
        return f"{self.address}/" + (f"#{fragment}" if fragment else "")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Listen, and serve from now on.

        Raises:
            OSError: naming host and port, for example because the port is in use; or naming the state or TLS file that can not be used.
            ValueError: the host can be reached from outside and there is no token; or the TLS files are wrong.
        """
        if self._runner is not None:
            raise RuntimeError("the rendezvous server was started before")
        self._journal = self._open_journal()
        try:
            await self._listen()
        except BaseException:
            if self._journal is not None:
                self._journal.close()
            raise
        if self._journal is not None:
            self._journal.start(self._fail)
        _log.info("rendezvous listens at %s", self._address)
        self._tell_events()

    def _open_journal(self) -> Journal | None:
        if self._state is None:
            return None
        journal = Journal(self._state)
        try:
            self._service.restore(journal.load(self._limits), asyncio.get_running_loop().time())
        except BaseException:
            journal.close()
            raise
        return journal

    async def _listen(self) -> None:
        tls = None if self._tls is None else server_context(*self._tls)
        sock = listen(self._host, self._port)
        keep_alive(sock)  # Accepted connections inherit it: one that does not read, or whose host has vanished, ends.
        if not (is_loopback(sock) or self._token or self._insecure):
            sock.close()
            raise ValueError(f"listening on {self._host} lets other hosts in: give a token (--token-file), or say so (--insecure)")
        if is_loopback(sock):
            self._http.own_names = frozenset({"localhost", self._host.lower(), socket.gethostname().lower()})
        elif tls is None:
            _log.warning("other hosts reach this by plain HTTP: whoever is on the way reads the token and all else; --tls-cert ends that")
        runner = await self._accept(sock, tls)
        host = await on_a_thread(own_name) if self._host in _WILDCARDS else self._host
        self._address = Address("https" if tls else "http", host, sock.getsockname()[1])
        self._owner = asyncio.create_task(self._own(runner), name=f"aiodist rendezvous {self._address}")
        await asyncio.sleep(0)  # A task that is cancelled before its first step would clean nothing up.
        self._set_timer()
        self._drop_unjoined()

    async def _accept(self, sock: socket.socket, tls: ssl.SSLContext | None) -> web.AppRunner:
        """Serve the socket's connections."""
        self._runner = runner = web.AppRunner(
            self._app(),
            handle_signals=False,
            access_log=None,
            logger=http_log(),
            max_line_size=_LINE_NBYTES,
            auto_decompress=False,  # a small body would hold the loop for seconds, without a token
            keepalive_timeout=HEAD_S,
            shutdown_timeout=_CLOSE_S,
        )
        try:
            await runner.setup()
            times: Any = {} if tls is None else {"ssl_handshake_timeout": _HANDSHAKE_S, "ssl_shutdown_timeout": _CLOSE_S}
            assert runner.server is not None  # setup() made it
            self._listener = await asyncio.get_running_loop().create_server(
                self._http.lobby.factory(runner.server), sock=sock, backlog=_BACKLOG, ssl=tls, **times
            )
        except BaseException:
            sock.close()
            await runner.cleanup()
            raise
        return runner

    async def wait(self) -> None:
        """Wait until the server is closed.

        Raises:
            OSError: it ended because its state could not be written.
        """
        if self._owner is not None:
            await asyncio.wait((self._owner,))
        if self._failure is not None:
            raise self._failure

    async def deserted(self) -> None:
        """Wait until no member is connected; a server that others depend on waits so before it closes."""
        await self._deserted.wait()

    def _fail(self, error: JournalError) -> None:
        _log.critical("the rendezvous ends: %s", error)
        self._failure = error
        self._stop.set()

    async def aclose(self) -> None:
        """Stop listening and close all connections; takes a few seconds at most. Nobody is told that members are lost."""
        self._stop.set()
        if self._owner is not None:
            await asyncio.wait((self._owner,))

    async def _own(self, runner: web.AppRunner) -> None:
        """Ends the server when it is closed, or when the loop ends and cancels its tasks."""
        try:
            await self._stop.wait()
        finally:
            self._closing = True
            if self._listener is not None:
                self._listener.close()
            if self._sweep is not None:
                self._sweep.cancel()
            if self._timer is not None:
                self._timer.cancel()
            await runner.cleanup()
            if self._journal is not None:
                self._journal.close()

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._http.guard], client_max_size=_BODY_NBYTES)
        self._http.install(app)
        app.router.add_get(MEMBERS_PATH, self._serve_member, allow_head=False)
        XmlDoor(lambda: self._service.board(BOARD), self._limits, lambda: self.port, self._xml_wait).install(app)
        app.on_shutdown.append(self._close_connections)
        return app

    # -- members -----------------------------------------------------------------------------------------------------------------

    async def _serve_member(self, request: web.Request) -> web.StreamResponse:
        if "Origin" in request.headers:
            return json_answer(ErrorBody("this is for members, not for pages in a browser"), 403)
        if self._closing or len(self._connections) >= self._limits.connections:
            return json_answer(ErrorBody(f"the rendezvous holds {self._limits.connections} connections and takes no more"), 503)
        ws = web.WebSocketResponse(timeout=_CLOSE_S, compress=False, max_msg_size=self._limits.value_nbytes + _ENVELOPE_NBYTES)
        if not ws.can_prepare(request):
            return json_answer(ErrorBody("members speak WebSocket here"), 426, {"Upgrade": "websocket"})
        await ws.prepare(request)
        connection = Connection(next(self._numbers), request, ws, self._limits.outgoing_nbytes)
        self._connections[connection.number] = connection
        self._deserted.clear()
        writer = asyncio.create_task(connection.write())
        reason, may_return = "the server failed", True
        try:
            reason, may_return = await self._converse(connection)
        finally:
            del self._connections[connection.number]
            if not self._connections:
                self._deserted.set()
            if not self._closing:
                now = asyncio.get_running_loop().time()
                self._deliver(self._service.disconnect(connection.number, reason, now, may_return=may_return))
            connection.finish()
            await asyncio.wait((writer,), timeout=_CLOSE_S)
            writer.cancel()
            await ws.close()
        return ws

    async def _converse(self, connection: Connection) -> tuple[str, bool]:
        """Take a member's frames until its connection ends, and say how it ended, and whether the member may return."""
        limits = self._limits
        welcome = Welcome(PROTOCOL_VERSION, limits.key_nbytes, limits.value_nbytes)
        greeted = False
        while True:
            try:
                frame = await connection.ws.receive(timeout=None if greeted else _HELLO_S)
            except TimeoutError:
                return "it did not say hello", False
            if frame.type not in (WSMsgType.BINARY, WSMsgType.TEXT):
                return why_ended(frame.type, connection.ws), frame.type is not WSMsgType.CLOSE
            try:
                if frame.type is WSMsgType.TEXT:
                    raise MalformedMessageError("a text frame; messages are binary")
                request = decode_request(frame.data)
            except MalformedMessageError as error:
                self._metrics.refused["message"] += 1
                connection.post(encode(Refused(0, "malformed", f"that is no message of protocol {PROTOCOL_VERSION}: {error}")))
                return f"it sent what is no message: {error}", False
            if greeted:
                now = asyncio.get_running_loop().time()
                self._metrics.arrived(connection.open, request, now)
                self._deliver(self._service.handle(connection.number, request, now))
                continue
            refusal = check_hello(request)
            connection.post(encode(refusal or welcome))
            if refusal is not None:
                self._metrics.refused["hello"] += 1
                return refusal.text, False
            greeted = True

    def _deliver(self, deliveries: Iterable[Delivery]) -> None:
        """Send messages as soon as what they promise is written down."""
        if self._journal is None:
            self._post(deliveries)
        else:
            self._journal.write(self._service.changes.take(), partial(self._post, deliveries))
        self._tell_events()
        self._set_timer()

    def _tell_events(self) -> None:
        for event in self._service.take_events():
            self._metrics.events[event.event] += 1
            log_event(_log, event)

    def _post(self, deliveries: Iterable[Delivery]) -> None:
        """Queue messages for their connections; the same message for many of them is encoded once."""
        last: Answer | None = None
        frame = b""
        now = asyncio.get_running_loop().time()
        for conn, message in deliveries:
            if message is not last:
                last, frame = message, encode(message)
            connection = self._connections.get(conn)
            if connection is not None:
                self._metrics.answered(connection.open, message, now)
                connection.post(frame)

    def _set_timer(self) -> None:
        deadline = self._service.next_deadline()
        if self._timer is not None:
            if self._timer.when() == deadline and not self._timer.cancelled():
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None and not self._closing:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._deliver(self._service.expire(asyncio.get_running_loop().time()))

    def _drop_unjoined(self) -> None:
        """Close the connections that have been of no use for long: no heartbeat tells a stopped process from one that never joins."""
        loop = asyncio.get_running_loop()
        self._sweep = loop.call_later(self._limits.unjoined_s / 4, self._drop_unjoined)
        now = loop.time()
        for connection in self._connections.values():
            if self._service.has_member(connection.number):
                connection.idle_since = now
            elif now - connection.idle_since >= self._limits.unjoined_s:
                self._metrics.refused["unjoined"] += 1
                connection.abort()

    async def _close_connections(self, app: web.Application) -> None:
        closing = [connection.ws.close(code=1001, message=b"the rendezvous is closed") for connection in self._connections.values()]
        await asyncio.gather(*closing, return_exceptions=True)
