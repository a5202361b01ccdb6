"""The XML-RPC server with a thread a request, for programs that serve functions of their own."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any, Final
from xmlrpc.server import SimpleXMLRPCRequestHandler, SimpleXMLRPCServer

from aiodist.config import Settings
from aiodist.rendezvous.sockets import is_loopback
from aiodist.rendezvous.xml_calls import FaultCode, MalformedCallError, decode_call, encode_fault

__all__ = ["ThreadXMLRPCServer"]

_BODY_NBYTES: Final = 4 << 20
_IDLE_S: Final = 30.0


class _Handler(SimpleXMLRPCRequestHandler):
    """Asks for the token where there is one, and takes no body without a bound."""

    timeout = _IDLE_S  # for a caller that neither writes nor reads

    def do_POST(self) -> None:
        """Answer one call."""
        length = self.headers.get("Content-Length", "")
        given = self.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        token = self.server.token if isinstance(self.server, ThreadXMLRPCServer) else None
        if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            self._refuse(401, "the bearer token is wrong or missing")
        elif "Origin" in self.headers:
            self._refuse(403, "this is not for pages in a browser")
        elif self.headers.get("Content-Encoding", "identity") != "identity":
            self._refuse(415, "compressed bodies are not read")
        elif not (length.isascii() and length.isdecimal() and int(length) <= _BODY_NBYTES):
            self._refuse(413, f"a body has a length, of {_BODY_NBYTES} bytes at most")
        else:
            super().do_POST()

    def _refuse(self, status: int, reason: str) -> None:
        self.close_connection = True
        self.send_error(status, reason)


class ThreadXMLRPCServer(ThreadingMixIn, SimpleXMLRPCServer):
    """A `SimpleXMLRPCServer` that answers each connection in a daemon thread of its own.

    For functions of the caller's own: a function that waits holds its thread, so let it have a deadline, as those of
    `aiodist.sync.server.Methods` have. The ranks themselves use `aiodist.sync.server.Server`, where nothing that waits holds a thread.

    Whatever `requestHandler` is, it reads bodies of 4 MiB at most and no document type declarations, and where AIODIST_TOKEN is set,
    callers have to give it as a bearer token; without it only an address of the loopback interface can be bound. Other arguments are
    those of `SimpleXMLRPCServer`.

    Raises:
        ValueError: the address can be reached from outside and AIODIST_TOKEN is not set.
        OSError: the address can not be bound.
    """

    daemon_threads = True

    def __init__(
        self,
        addr: tuple[str, int],
        requestHandler: type[SimpleXMLRPCRequestHandler] = _Handler,
        logRequests: bool = True,
        allow_none: bool = False,
        encoding: str | None = None,
        bind_and_activate: bool = True,
        use_builtin_types: bool = False,
    ) -> None:
        self.token = Settings.from_env().token
        if not issubclass(requestHandler, _Handler):  # the original's default is such a one
            requestHandler = type(requestHandler.__name__, (_Handler, requestHandler), {})
        super().__init__(addr, requestHandler, logRequests, allow_none, encoding, bind_and_activate, use_builtin_types)

    def server_bind(self) -> None:
        """Bind the address."""
        super().server_bind()
        if self.token is None and not is_loopback(self.socket):
            self.server_close()
            raise ValueError(f"listening on {self.server_address[0]!s} lets other hosts in: set AIODIST_TOKEN")

    def _marshaled_dispatch(
        self,
        data: Any,
        dispatch_method: Callable[..., Any] | None = None,
        path: Any = None,
    ) -> Any:
        try:
            decode_call(data)
        except MalformedCallError as error:
            return encode_fault(FaultCode.MALFORMED, str(error))
        return super()._marshaled_dispatch(data, dispatch_method, path)
