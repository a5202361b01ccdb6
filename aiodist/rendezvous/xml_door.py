"""The XML-RPC calls of `aiodist.sync`: keys that are set, got and taken, barriers and broadcasts between any callers.

Values lie in a world of the rendezvous's state that has no members; what waits is here, as futures of the server's loop. Callers are
strangers to the state: XML-RPC has no sessions, so a caller that hung up is noticed when its turn comes, and gets nothing.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from aiohttp import web

from aiodist.rendezvous.job import Limits, World
from aiodist.rendezvous.messages import Refused
from aiodist.rendezvous.xml_calls import XMLRPC_PATH, FaultCode, MalformedCallError, decode_call, encode_fault, encode_value

__all__ = ["BOARD", "XmlDoor"]

BOARD: Final = "xmlrpc"
"""The name under which the page and the API show what the calls have set."""

_ENVELOPE_NBYTES: Final = 1 << 14
_READ_S: Final = 30.0
_CALLS: Final = 4096
_DONE: Final = encode_value(True)
_NONE: Final = encode_value(None)

_Alive: TypeAlias = Callable[[], bool]
_Method: TypeAlias = Callable[..., Awaitable[bytes]]


class _FaultError(Exception):
    def __init__(self, code: FaultCode, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(slots=True, eq=False)
class _Caller:
    """One who waits in a meeting, with the encoded value it brought, if any."""

    alive: _Alive
    value: bytes | None
    met: asyncio.Future[bytes]


class XmlDoor:
    """Answers the calls of one server, in its event loop.

    Args:
        board: Gives the world that holds the values.
        limits: What the server holds at most.
        port: Tells the server's port.
        wait: Seconds that a call may wait.
    """

    def __init__(self, board: Callable[[], World], limits: Limits, port: Callable[[], int], wait: float) -> None:
        self._board = board
        self._limits = limits
        self._port = port
        self._wait = wait
        self._closed = False
        self._calls = 0
        self._nbytes = 0
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._meetings: dict[str, tuple[int, list[_Caller]]] = {}
        self._methods: dict[str, _Method] = {
            "connect": self._connect,
            "get_mm_server_port": self._get_port,
            "user_set": self._user_set,
            "user_get": self._user_get,
            "user_pop": self._user_pop,
            "set_is_grad": self._set_is_grad,
            "check_is_grad": self._check_is_grad,
            "set_remote_tracer": self._set_remote_tracer,
            "check_remote_tracer": self._check_remote_tracer,
            "group_barrier": self._group_barrier,
            "bcast_val": self._bcast_val,
        }

    def install(self, app: web.Application) -> None:
        """Add the route; whoever asks has passed the application's guard."""
        app.router.add_post(XMLRPC_PATH, self._serve)
        app.on_shutdown.append(self._end)

    # -- bodies ------------------------------------------------------------------------------------------------------------------

    async def _serve(self, request: web.Request) -> web.Response:
        # A page in a browser can send a form anywhere, but no XML without being asked first, and it says where it is from.
        if "Origin" in request.headers:
            raise web.HTTPForbidden
        if request.content_type not in ("text/xml", "application/xml"):
            raise web.HTTPUnsupportedMediaType
        if self._calls >= _CALLS or self._closed:
            raise web.HTTPServiceUnavailable
        self._calls += 1
        try:
            body = await self._answer(await self._read(request), lambda: _is_there(request))
        finally:
            self._calls -= 1
        return web.Response(body=body, content_type="text/xml")

    async def _read(self, request: web.Request) -> bytes:
        bounded = request.clone(client_max_size=self._limits.value_nbytes + _ENVELOPE_NBYTES)
        try:
            return await asyncio.wait_for(bounded.read(), _READ_S)
        except TimeoutError:
            raise web.HTTPRequestTimeout from None

    async def _answer(self, body: bytes, alive: _Alive) -> bytes:
        self._nbytes += len(body)
        try:
            if self._nbytes > self._limits.keys_nbytes:
                raise _FaultError(FaultCode.LIMIT, f"calls that wait may hold {self._limits.keys_nbytes} bytes in all")
            name, params = decode_call(body)
            return await self._call(name, params, alive)
        except MalformedCallError as error:
            return encode_fault(FaultCode.MALFORMED, str(error))
        except _FaultError as error:
            return encode_fault(error.code, str(error))
        finally:
            self._nbytes -= len(body)

    async def _call(self, name: str, params: tuple[Any, ...], alive: _Alive) -> bytes:
        method = self._methods.get(name)
        if method is None:
            raise _FaultError(FaultCode.ARGUMENT, f"there is no method {name[:100]!r}")
        try:
            inspect.signature(method).bind(alive, *params)
            return await method(alive, *params)
        except TypeError as error:
            raise _FaultError(FaultCode.TYPE, f"{name}: {error}") from None
        except (ValueError, OverflowError) as error:
            raise _FaultError(FaultCode.ARGUMENT, f"{name}: {error}") from None

    # -- the calls ---------------------------------------------------------------------------------------------------------------

    async def _connect(self, alive: _Alive) -> bytes:
        return _DONE

    async def _get_port(self, alive: _Alive) -> bytes:
        return encode_value(self._port())

    async def _user_set(self, alive: _Alive, key: Any, val: Any) -> bytes:
        return self._store(_name("user", key), encode_value(val))

    async def _user_get(self, alive: _Alive, key: Any) -> bytes:
        name = _name("user", key)
        await self._until(name, True, f"user_get: nobody has set key {key!r}")
        return self._board().keys[name]

    async def _user_pop(self, alive: _Alive, key: Any) -> bytes:
        return await self._take("user", key, alive, f"user_pop: nobody has set key {key!r}")

    async def _set_is_grad(self, alive: _Alive, key: Any, is_grad: Any) -> bytes:
        return await self._put(
            "grad", key, encode_value(bool(is_grad)), f"set_is_grad: nobody has asked for the flag of {key!r} set before"
        )

    async def _check_is_grad(self, alive: _Alive, key: Any) -> bytes:
        return await self._take("grad", key, alive, f"check_is_grad: nobody has set the flag of {key!r}")

    async def _set_remote_tracer(self, alive: _Alive, key: Any, tracer_set: Any) -> bytes:
        late = f"set_remote_tracer: nobody has asked for the tracers of {key!r} set before"
        return await self._put("tracer", key, encode_value(tracer_set), late)

    async def _check_remote_tracer(self, alive: _Alive, key: Any) -> bytes:
        return await self._take("tracer", key, alive, f"check_remote_tracer: nobody has set the tracers of {key!r}")

    async def _group_barrier(self, alive: _Alive, key: Any, size: Any) -> bytes:
        await self._meet(_name("barrier", key), size, _Caller(alive, None, _future()), f"group_barrier {key!r}")
        return _DONE

    async def _bcast_val(self, alive: _Alive, val: Any, key: Any, size: Any) -> bytes:
        brought = None if val is None else encode_value(val)
        return await self._meet(_name("bcast", key), size, _Caller(alive, brought, _future()), f"bcast_val {key!r}")

    # -- keys --------------------------------------------------------------------------------------------------------------------

    def _store(self, name: str, value: bytes) -> bytes:
        done = self._board().set(0, name, value)
        if isinstance(done, Refused):
            raise _FaultError(FaultCode.ARGUMENT if done.code == "argument" else FaultCode.LIMIT, done.text)
        self._wake(name)
        return _DONE

    async def _put(self, kind: str, key: Any, value: bytes, late: str) -> bytes:
        """Set a key once it is free: what one caller takes, no other one may overwrite before."""
        name = _name(kind, key)
        await self._until(name, False, late)
        return self._store(name, value)

    async def _take(self, kind: str, key: Any, alive: _Alive, late: str) -> bytes:
        name = _name(kind, key)
        await self._until(name, True, late)
        if not alive():
            raise _FaultError(FaultCode.CLOSED, "the caller has hung up")
        value = self._board().keys[name]
        self._board().delete(0, name)
        self._wake(name)
        return value

    async def _until(self, name: str, present: bool, late: str) -> None:
        """Wait until a key is there, or is not."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait
        while (name in self._board().keys) is not present:
            left = deadline - loop.time()
            if left <= 0:
                raise _FaultError(FaultCode.LATE, f"{late} within {self._wait:g} s")
            changed: asyncio.Future[None] = loop.create_future()
            queue = self._waiting.setdefault(name, [])
            queue.append(changed)
            try:
                await asyncio.wait((changed,), timeout=left)
            finally:
                if not changed.done():
                    queue.remove(changed)
                    if not queue:
                        del self._waiting[name]
            self._check_open()

    def _wake(self, name: str) -> None:
        for changed in self._waiting.pop(name, ()):
            changed.set_result(None)

    # -- meetings ----------------------------------------------------------------------------------------------------------------

    async def _meet(self, name: str, size: Any, caller: _Caller, what: str) -> bytes:
        """Wait until `size` callers are in the meeting of that name; all get the value that one of them brought."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"size must be a positive whole number, not {size!r}")
        agreed, callers = self._meetings.get(name, (size, []))
        for gone in [other for other in callers if not other.alive()]:
            callers.remove(gone)
            gone.met.set_result(_NONE)
        if callers and agreed != size:
            raise ValueError(f"size {size} is given for the key, but {agreed} by those who wait")
        if caller.value is not None and any(other.value is not None for other in callers):
            raise ValueError("another caller has given a value")
        callers.append(caller)
        self._meetings[name] = (size, callers)
        if len(callers) == size:
            del self._meetings[name]
            value = next((one.value for one in callers if one.value is not None), _NONE)
            for one in callers:
                one.met.set_result(value)
        count = size
        try:
            await asyncio.wait((caller.met,), timeout=self._wait)
        finally:
            if not caller.met.done():
                count = len(callers)
                callers.remove(caller)
                if not callers:
                    del self._meetings[name]
        if not caller.met.done():
            raise _FaultError(FaultCode.LATE, f"{what}: {count} of {size} callers came within {self._wait:g} s")
        self._check_open()
        return caller.met.result()

    # -- the end -----------------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise _FaultError(FaultCode.CLOSED, "the server was closed")

    async def _end(self, app: web.Application) -> None:
        self._closed = True
        for name in list(self._waiting):
            self._wake(name)
        for _, callers in self._meetings.values():
            for caller in callers:
                caller.met.set_result(_NONE)
        self._meetings.clear()


def _future() -> asyncio.Future[bytes]:
    return asyncio.get_running_loop().create_future()


def _name(kind: str, key: Any) -> str:
    """Return the key of the state. Its kind says also whether it is a text or a number."""
    if isinstance(key, str):
        return f"{kind}/{key}"
    if isinstance(key, int) and not isinstance(key, bool):
        return f"{kind}#{key}"
    raise TypeError(f"key must be a str or an int, not {type(key).__name__}")


def _is_there(request: web.Request) -> bool:
    transport = request.transport
    return transport is not None and not transport.is_closing()
