"""Where the ranks of a job meet, and what they tell each other there.

`Server` is one rendezvous service: its port answers the members of a world (and shows them on a page) and also the XML-RPC calls that
`Client` makes, so `py_server_port` and `mm_server_port` are the same. ``python -m aiodist.sync.server -p PORT`` serves by itself.

Keys are texts or whole numbers. Values are what XML-RPC can carry: None, bool, int of 32 bits, float, str, bytes, datetime, and lists and
dicts (with keys that are str) of these; up to 1 MiB of XML. Tuples arrive as lists.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import logging
import threading
import time
import weakref
import xmlrpc.client
from types import TracebackType
from typing import Any, Final, NoReturn, Self
from xml.parsers import expat

from aiodist.config import DEFAULT_TIMEOUT, Settings
from aiodist.errors import RendezvousError
from aiodist.rendezvous.sockets import Address, check_token, parse_address
from aiodist.rendezvous.thread import ControlThread
from aiodist.rendezvous.xml_calls import FaultCode
from aiodist.sync.threaded import ThreadXMLRPCServer

__all__ = ["Client", "Methods", "Server", "ThreadXMLRPCServer", "main"]

_START_S: Final = 30.0
_CLOSE_S: Final = 5.0
_MARGIN_S: Final = 30.0
_TRY_S: Final = 10.0


class Server:
    """A rendezvous service on a thread of its own, for the ranks of one job or more.

    Calls may wait for AIODIST_TIMEOUT seconds (300 unless set); those that wait hold no thread. It serves until `close`, until it is
    garbage, or until the process ends.

    Args:
        port: The port; 0 lets the kernel choose one.
        host: The name or address to listen on. Outside the loopback interface it needs a token.
        token: The bearer token that callers must give; None takes AIODIST_TOKEN, and asks for none where that is not set.

    Attributes:
        py_server_port: The port for `Client` and for ``init_process_group``.
        mm_server_port: The port of the rendezvous service: the same.

    Raises:
        TypeError, ValueError: an argument is wrong, or the host can be reached from outside and there is no token.
        OSError: naming host and port, for example because the port is in use.
    """

    def __init__(self, port: int = 0, *, host: str = "127.0.0.1", token: str | None = None) -> None:
        from aiodist.rendezvous.server import RendezvousServer

        _check_port(port, 0)
        self._server = RendezvousServer(host.strip("[]"), port, token=Settings.from_env().token if token is None else token)
        self._control = ControlThread()
        self._end = weakref.finalize(self, self._control.close)
        try:
            self._control.submit(self._server.start()).result(_START_S)
        except ValueError:
            self._end()
            raise ValueError(f"{host} lets other hosts in: give a token, or set AIODIST_TOKEN to the same secret everywhere") from None
        except BaseException:
            self._end()
            raise
        self.py_server_port = self.mm_server_port = self._server.port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def address(self) -> str:
        """``http://host:port``, for AIODIST_RENDEZVOUS."""
        return self._server.address

    def linger(self, seconds: float) -> None:
        """Wait until no member of a world is connected, for so many seconds at most: they can say goodbye before `close`."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._control.submit(asyncio.wait_for(self._server.deserted(), seconds)).result(seconds + _CLOSE_S)

    def close(self) -> None:
        """End the service; blocks a few seconds at most. Calls that wait get an error. Closing again does nothing."""
        if self._end.alive:
            # The thread may be gone in a child of a fork, and where the interpreter ends.
            with contextlib.suppress(RuntimeError, TimeoutError):
                self._control.submit(self._server.aclose()).result(_CLOSE_S)
            self._end()


class Methods:
    """The calls, made on the service of this machine; may be registered as the instance of a `ThreadXMLRPCServer`.

    Every call blocks its thread until the service answers. The service ends waits after its AIODIST_TIMEOUT.

    Args:
        mm_server_port: The port of the rendezvous service (`Server.mm_server_port`).

    Raises:
        TypeError, ValueError: the port is none.

    The calls raise `RendezvousError` where there is no service or what they wait for does not come in time, TypeError and ValueError
    where an argument is wrong.
    """

    def __init__(self, mm_server_port: int) -> None:
        self._reach("127.0.0.1", mm_server_port, None)

    def _reach(self, host: str, port: int, token: str | None) -> None:
        _check_port(port, 1)
        settings = Settings.from_env()
        self._address = str(parse_address(str(Address("http", host.strip("[]"), port))))
        self._token = check_token(settings.token if token is None else token)
        self._timeout = settings.timeout or DEFAULT_TIMEOUT

    def connect(self) -> bool:
        """Return True when the service answers."""
        return bool(self._call("connect"))

    def get_mm_server_port(self) -> int:
        """Return the port of the rendezvous service."""
        return int(self._call("get_mm_server_port"))

    def set_is_grad(self, key: str | int, is_grad: bool) -> bool:
        """Say whether a send or receive needs gradients.

        Waits while the flag that was set before under this key has not been taken, so that none is lost.

        Args:
            key: Matches the send with its receive.
            is_grad: Whether gradients are needed.
        """
        return bool(self._call("set_is_grad", key, is_grad))

    def check_is_grad(self, key: str | int) -> bool:
        """Wait for the flag of a send or receive, and take it: the next caller gets the next one.

        Args:
            key: Matches the send with its receive.
        """
        return bool(self._call("check_is_grad", key))

    def set_remote_tracer(self, key: str | int, tracer_set: Any) -> bool:
        """Leave the tracers of a send or receive.

        Waits while those that were left before under this key have not been taken.

        Args:
            key: Matches the send with its receive.
            tracer_set: The tracers; a set can not travel, a list or dict can.
        """
        return bool(self._call("set_remote_tracer", key, tracer_set))

    def check_remote_tracer(self, key: str | int) -> Any:
        """Wait for the tracers of a send or receive, and take them.

        Args:
            key: Matches the send with its receive.
        """
        return self._call("check_remote_tracer", key)

    def group_barrier(self, key: str | int, size: int) -> bool:
        """Wait until `size` callers are in the barrier of this key; then the key may be used again.

        Args:
            key: Names the barrier.
            size: How many callers there are; the same for all.
        """
        return bool(self._call("group_barrier", key, size))

    def user_set(self, key: str | int, val: Any) -> bool:
        """Store a value under a key, also over an earlier one; all who wait for it get it.

        Args:
            key: A name that the callers agree on.
            val: What XML-RPC can carry, None included.
        """
        return bool(self._call("user_set", key, val))

    def user_get(self, key: str | int) -> Any:
        """Wait until the key is set and return its value, which stays.

        Args:
            key: A name that the callers agree on.
        """
        return self._call("user_get", key)

    def user_pop(self, key: str | int) -> Any:
        """Wait until the key is set, remove it and return its value: of several callers one gets it.

        Args:
            key: A name that the callers agree on.
        """
        return self._call("user_pop", key)

    def bcast_val(self, val: Any, key: str | int, size: int) -> Any:
        """Return the value that one of `size` callers gives, once all of them have come; then the key may be used again.

        Args:
            val: The value; None for those who only want to have it. Without any giver all get None.
            key: Names the broadcast.
            size: How many callers there are; the same for all.
        """
        return self._call("bcast_val", val, key, size)

    def _call(self, name: str, *params: Any, seconds: float | None = None) -> Any:
        """Make one call over a connection of its own: any thread may call, and an interrupted call disturbs no other."""
        headers = [("Authorization", f"Bearer {self._token}")] if self._token else []
        transport = _Transport(self._timeout + _MARGIN_S if seconds is None else seconds, headers)
        try:
            with xmlrpc.client.ServerProxy(self._address, transport=transport, allow_none=True, use_builtin_types=True) as proxy:
                return getattr(proxy, name)(*params)
        except xmlrpc.client.Fault as fault:
            _raise_fault(fault)
        except xmlrpc.client.ProtocolError as error:
            hint = ": the token is wrong or missing (AIODIST_TOKEN)" if error.errcode == 401 else ""
            raise RendezvousError(f"{name}: {self._address} answered {error.errcode} {error.errmsg}{hint}") from None
        except (TypeError, OverflowError) as error:  # before anything was sent
            raise TypeError(f"{name}: an argument can not travel by XML-RPC: {error}") from None
        except OSError as error:
            raise _UnreachableError(f"{name}: {self._address} can not be reached: {error}") from None
        except (http.client.HTTPException, expat.ExpatError, xmlrpc.client.Error, UnicodeError) as error:
            raise RendezvousError(f"{name}: what {self._address} answered makes no sense: {error!r}") from None


class Client(Methods):
    """The calls, made on the service of a job. Making one waits until the service answers (see `connect`).

    Args:
        master_ip: Name or address of the machine where the `Server` is.
        port: Its port.
        token: Its token; None takes AIODIST_TOKEN.

    Attributes:
        master_ip, port: Where the service is.

    Raises:
        TypeError, ValueError: an argument is wrong.
        RendezvousError: nobody answered within AIODIST_TIMEOUT seconds (300 unless set), or who answered is no such service.

    The calls are those of `Methods`.
    """

    def __init__(self, master_ip: str, port: int, *, token: str | None = None) -> None:
        if not isinstance(master_ip, str):
            raise TypeError(f"master_ip must be a str, not {type(master_ip).__name__}")
        self.master_ip = master_ip
        self.port = port
        self._reach(master_ip, port, token)
        self.connect()

    def connect(self) -> bool:
        """Wait until the service answers; one that is not up yet is tried again until the timeout."""
        deadline = time.monotonic() + self._timeout
        pause = 0.05
        while True:
            try:
                return bool(self._call("connect", seconds=_TRY_S))
            except _UnreachableError as error:
                if time.monotonic() + pause > deadline:
                    raise RendezvousError(f"no service came up within {self._timeout:g} s: {error}") from None
            time.sleep(pause)
            pause = min(2 * pause, 1.0)


class _UnreachableError(RendezvousError):
    pass


class _Transport(xmlrpc.client.Transport):
    """A connection with a deadline. A call is never made twice: a barrier would count the caller twice."""

    def __init__(self, seconds: float, headers: list[tuple[str, str]]) -> None:
        super().__init__(use_builtin_types=True, headers=headers)
        self._seconds = seconds

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        connection = super().make_connection(host)
        connection.timeout = self._seconds
        return connection

    def request(self, host: Any, handler: str, request_body: Any, verbose: bool = False) -> Any:
        return self.single_request(host, handler, request_body, verbose)


def _raise_fault(fault: xmlrpc.client.Fault) -> NoReturn:
    kinds: dict[int, type[Exception]] = {FaultCode.ARGUMENT: ValueError, FaultCode.TYPE: TypeError}
    raise kinds.get(fault.faultCode, RendezvousError)(str(fault.faultString)) from None


def _check_port(port: int, lowest: int) -> None:
    if isinstance(port, bool) or not isinstance(port, int):
        raise TypeError(f"port must be a whole number, not {type(port).__name__}")
    if not lowest <= port < 65536:
        raise ValueError(f"port {port} is not between {lowest} and 65535")


def main(port: int = 0, verbose: bool = True, *, host: str = "127.0.0.1") -> None:
    """Serve until Ctrl-C or a signal ends the process; prints the port.

    Args:
        port: The port; 0 lets the kernel choose one.
        verbose: Log what happens to standard error.
        host: The name or address to listen on; outside the loopback interface AIODIST_TOKEN must be set.

    Raises:
        ValueError, OSError: as `Server` does.
    """
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with Server(port, host=host) as server, contextlib.suppress(KeyboardInterrupt):
        print("serving on port", server.py_server_port, flush=True)
        threading.Event().wait()  # for the signal


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m aiodist.sync.server", description="Serve the meeting of ranks; AIODIST_TOKEN is the token."
    )
    parser.add_argument("-p", "--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    parser.add_argument("-v", "--verbose", action=argparse.BooleanOptionalAction, default=True, help="log to standard error")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = _parse()
    main(port=arguments.port, verbose=arguments.verbose, host=arguments.host)
