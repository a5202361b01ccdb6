"""What the server answers to people and tools over HTTP: the page, the API, metrics, and the refusal of everything else."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from aiodist.rendezvous.job import Job, World
from aiodist.rendezvous.lobby import Lobby
from aiodist.rendezvous.messages import MARK_HEADER, MEMBERS_PATH, PROTOCOL_VERSION
from aiodist.rendezvous.metrics import CONTENT_TYPE, Census, Metrics
from aiodist.rendezvous.openapi import ErrorBody, EventsQuery, Health, JobQuery, JobsQuery, KeyQuery, KeysQuery, document
from aiodist.rendezvous.state import Service
from aiodist.rendezvous.views import JobList, Snapshot, list_keys, show_job, summarise
from aiodist.rendezvous.xml_calls import XMLRPC_PATH

__all__ = ["HttpApi", "http_log", "json_answer"]

Q = TypeVar("Q", JobsQuery, JobQuery, KeysQuery, KeyQuery, EventsQuery)

_PAGE: Final = Path(__file__).parent / "page"
_PAGE_FILES: Final = {"/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript")}
_OPEN: Final = frozenset({"/healthz", *_PAGE_FILES})
_LASTING: Final = frozenset({"/api/v1/events", MEMBERS_PATH, XMLRPC_PATH})
_CONTENT_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PERIOD_S: Final = 0.5
_FRESH_S: Final = 0.2
_KEEP_ALIVE_S: Final = 5.0
_SLOW_S: Final = 10.0
_WATCHERS: Final = 64
_LISTED_JOBS: Final = 1000

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_log = logging.getLogger("aiodist.rendezvous")


class HttpApi:
    """The routes of one server that are not for members.

    Args:
        service: The jobs to show.
        metrics: The server's counts.
        token: The bearer token that everything but the empty page and ``/healthz`` asks for.
        connections: Tells how many members are connected.
    """

    def __init__(self, service: Service, metrics: Metrics, token: str | None, connections: Callable[[], int]) -> None:
        self._service = service
        self._metrics = metrics
        self._token = token
        self._connections = connections
        self.lobby = Lobby()
        self._stop = asyncio.Event()
        self._watchers = 0
        self._warn_at = 0.0
        self._drawn: dict[EventsQuery, tuple[float, bytes]] = {}
        self.own_names: frozenset[str] | None = None
        """Names by which a browser may call this server, where others are a sign of DNS rebinding; None: any."""

    def install(self, app: web.Application) -> None:
        """Add the routes; the guard must be among the application's middlewares."""
        routes: dict[str, _Handler] = {
            **dict.fromkeys(_PAGE_FILES, self._page),
            "/healthz": self._healthz,
            "/metrics": self._show_metrics,
            "/api/v1/openapi.json": self._describe,
            "/api/v1/jobs": self._list_jobs,
            "/api/v1/jobs/{job}": self._show_job,
            "/api/v1/jobs/{job}/keys": self._list_keys,
            "/api/v1/jobs/{job}/keys/{key:.+}": self._show_key,
            "/api/v1/events": self._events,
        }
        for path, handler in routes.items():
            app.router.add_get(path, handler, allow_head=False)
        app.on_response_prepare.append(_finish_headers)
        app.on_shutdown.append(self._end)

    # -- who may ask -------------------------------------------------------------------------------------------------------------

    @web.middleware
    async def guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Let those in who may, turn every failure into JSON, and count."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        resource = request.match_info.route.resource
        route = "other" if resource is None else resource.canonical
        self.lobby.leave(request.protocol)
        try:
            response = self._refusal(request, route) or await _answer(request, handler)
        finally:
            self.lobby.enter(request.protocol)
        if response.status >= 400:
            self._metrics.refused[f"http {response.status}"] += 1
        self._metrics.served(route, response.status, None if route in _LASTING else loop.time() - began)
        return response

    def _refusal(self, request: web.Request, route: str) -> web.Response | None:
        if route in _OPEN:
            return None
        if self._token is None:
            if self.own_names is None or route == MEMBERS_PATH or _host(request) in self.own_names or _is_ip(_host(request)):
                return None
            self._warn("refused a request from %s: it is for host %.100r", request.remote, request.host)
            return json_answer(ErrorBody("this server has another name; where that is meant, give the server a token"), 403)
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return None
        self._warn("refused a request from %s: wrong or missing token", request.remote)
        return json_answer(ErrorBody("the bearer token is wrong or missing"), 401, {"WWW-Authenticate": "Bearer"})

    def _warn(self, text: str, *parts: object) -> None:
        """Log a refusal, one a second at most: a stranger must not fill the log. The metrics count all."""
        now = _now()
        if now >= self._warn_at:
            self._warn_at = now + 1.0
            _log.warning(text, *parts, extra={"event": "refused"})

    # -- the answers -------------------------------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.Response:
        name, kind = _PAGE_FILES[request.path]
        body = await asyncio.to_thread((_PAGE / name).read_bytes)
        headers = {"Content-Security-Policy": _CONTENT_POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)

    async def _healthz(self, request: web.Request) -> web.Response:
        return json_answer(Health("ok", "aiodist-rendezvous", PROTOCOL_VERSION))

    async def _show_metrics(self, request: web.Request) -> web.Response:
        census = Census(self._service.jobs(_now()), self._service.waits(), self._connections(), self._watchers)
        return web.Response(body=self._metrics.exposition(census), headers={"Content-Type": CONTENT_TYPE})

    async def _describe(self, request: web.Request) -> web.Response:
        return json_answer(document())

    async def _list_jobs(self, request: web.Request) -> web.Response:
        query = _query(request, JobsQuery)
        found = [job for job in self._service.jobs(_now()) if job.name.startswith(query.prefix) and job.name > query.after]
        found.sort(key=lambda job: job.name)
        return json_answer(JobList([summarise(job) for job in found[: query.limit]], len(found) > query.limit))

    async def _show_job(self, request: web.Request) -> web.Response:
        query = _query(request, JobQuery)
        return json_answer(show_job(self._job(request), query.members))

    async def _list_keys(self, request: web.Request) -> web.Response:
        query = _query(request, KeysQuery)
        return json_answer(list_keys(self._world(request, query.generation), query.prefix, query.after, query.limit))

    async def _show_key(self, request: web.Request) -> web.Response:
        query = _query(request, KeyQuery)
        world, key = self._world(request, query.generation), request.match_info["key"]
        value = world.keys.get(key)
        if value is None:
            raise _refuse(404, f"job {world.job} has no key {key[:128]!r}")
        return web.Response(body=value, content_type="application/octet-stream")

    def _job(self, request: web.Request) -> Job:
        name = request.match_info["job"]
        job = self._service.job(name, _now())
        if job is None:
            raise _refuse(404, f"no job {name[:128]!r} is known")
        return job

    def _world(self, request: web.Request, generation: int) -> World:
        job = self._job(request)
        world = job.worlds.get(generation or max(job.worlds, default=0))
        if world is None:
            raise _refuse(404, f"job {job.name} has no {'formed world' if generation == 0 else f'generation {generation}'}")
        return world

    # -- the live view -----------------------------------------------------------------------------------------------------------

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send the newest state whenever it differs from what was sent last; a client that does not read is dropped."""
        query = _query(request, EventsQuery)
        if self._watchers >= _WATCHERS or self._stop.is_set():
            raise _refuse(503, f"the rendezvous shows itself live to {_WATCHERS} clients and no more")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"})
        self._watchers += 1
        try:
            await response.prepare(request)
            with suppress(ConnectionError):
                await self._watch(response, query)
        except TimeoutError:  # Without this, what it has not read would be waited for.
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._watchers -= 1
        return response

    async def _watch(self, response: web.StreamResponse, query: EventsQuery) -> None:
        last, at = b"", 0.0
        while not self._stop.is_set():
            snapshot = self._snapshot(query)
            if snapshot != last:
                last, at = snapshot, _now()
                await asyncio.wait_for(response.write(b"event: jobs\ndata: " + snapshot + b"\n\n"), _SLOW_S)
            elif _now() - at >= _KEEP_ALIVE_S:
                at = _now()
                await asyncio.wait_for(response.write(b": nothing new\n\n"), _SLOW_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _PERIOD_S)

    def _snapshot(self, query: EventsQuery) -> bytes:
        """Those who look at the same at about the same time are shown the same bytes."""
        now = _now()
        self._drawn = {known: drawn for known, drawn in self._drawn.items() if now - drawn[0] < _FRESH_S}
        if query not in self._drawn:
            self._drawn[query] = (now, self._draw(query, now))
        return self._drawn[query][1]

    def _draw(self, query: EventsQuery, now: float) -> bytes:
        jobs = sorted(self._service.jobs(now), key=lambda job: job.name)[:_LISTED_JOBS]
        shown = self._service.job(query.job, now)
        return msgspec.json.encode(Snapshot([summarise(job) for job in jobs], None if shown is None else show_job(shown, query.members)))

    async def _end(self, app: web.Application) -> None:
        self._stop.set()


class _NoGarbage(logging.Filter):
    """Strangers that do not speak HTTP would fill the log with tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def http_log() -> logging.Logger:
    """Where aiohttp's server logs for us."""
    log = _log.getChild("http")
    if not log.filters:
        log.addFilter(_NoGarbage())
    return log


def json_answer(content: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """An answer whose body is JSON."""
    return web.Response(body=msgspec.json.encode(content), status=status, headers=headers, content_type="application/json")


class _RefusedRequest(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def _refuse(status: int, text: str) -> _RefusedRequest:
    return _RefusedRequest(status, text)


async def _answer(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except _RefusedRequest as error:
        return json_answer(ErrorBody(str(error)), error.status)
    except web.HTTPException as error:
        allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return json_answer(ErrorBody(f"{error.reason.lower()}; /api/v1/openapi.json tells what there is"), error.status, allowed)
    except ConnectionError:  # whoever asked has gone, and gets nothing
        return json_answer(ErrorBody("the connection has ended"), 499)
    except Exception:
        _log.exception("a request for %.200r failed", request.path)
        return json_answer(ErrorBody("the rendezvous failed at this request; its log says why"), 500)


def _query(request: web.Request, kind: type[Q]) -> Q:
    """Read the parameters after the question mark."""
    given = request.query
    if len(given) > len(set(given)):
        raise _refuse(400, "a parameter is given twice")
    try:
        return msgspec.convert(dict(given), kind, strict=False)
    except msgspec.ValidationError as error:
        raise _refuse(400, str(error).encode("utf-8", "backslashreplace").decode()[:500]) from None


def _host(request: web.Request) -> str:
    with suppress(ValueError):
        return urlsplit(f"//{request.host}").hostname or ""
    return ""


def _is_ip(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]) is not None
    return False


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _finish_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers[MARK_HEADER] = str(PROTOCOL_VERSION)
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers.setdefault("Cache-Control", "no-store")
