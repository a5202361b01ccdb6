"""The description of the HTTP API, made of the types it reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from aiodist.rendezvous.messages import MARK_HEADER, MEMBERS_PATH
from aiodist.rendezvous.views import JobList, JobView, KeyList, Snapshot
from aiodist.rendezvous.xml_calls import XMLRPC_PATH

__all__ = ["ErrorBody", "EventsQuery", "Health", "JobQuery", "JobsQuery", "KeyQuery", "KeysQuery", "document"]

_JOB: Final = "^[A-Za-z0-9_][A-Za-z0-9_.:@+-]{0,127}$"

_Limit = Annotated[int, Meta(ge=1, le=1000, description="How many to give at most.")]
_Members = Annotated[int, Meta(ge=1, le=16384, description="How many members of each world to list at most.")]
_Generation = Annotated[int, Meta(ge=0, lt=2**31, description="Which world of the job; 0 is the newest.")]
_After = Annotated[str, Meta(max_length=1024, description="Begin after this name.")]
_Prefix = Annotated[str, Meta(max_length=1024, description="Only names that begin with this.")]
_Watched = Annotated[str, Meta(max_length=128, description="The job to show in detail; without it, or while it is unknown, none.")]


class _Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class JobsQuery(_Query, frozen=True):
    """What may stand after the question mark of the list of jobs."""

    prefix: _Prefix = ""
    after: _After = ""
    limit: _Limit = 100


class JobQuery(_Query, frozen=True):
    """The same of a job."""

    members: _Members = 1000


class KeysQuery(_Query, frozen=True):
    """The same of a job's keys."""

    prefix: _Prefix = ""
    after: _After = ""
    limit: _Limit = 100
    generation: _Generation = 0


class KeyQuery(_Query, frozen=True):
    """The same of a key."""

    generation: _Generation = 0


class EventsQuery(_Query, frozen=True):
    """The same of the live view."""

    job: _Watched = ""
    members: _Members = 1000


class ErrorBody(msgspec.Struct, frozen=True):
    """Why a request was refused."""

    error: str


class Health(msgspec.Struct, frozen=True):
    """The server is up."""

    status: str
    service: str
    protocol: int


@dataclass(frozen=True, slots=True)
class _Operation:
    summary: str
    media: str
    body: type | None = None
    query: type[_Query] | None = None
    refusals: tuple[int, ...] = ()
    open: bool = False
    status: int = 200
    method: str = "get"
    takes: str = ""


_MEANING: Final = {
    400: "A parameter is not of the form that is described.",
    401: "The bearer token is wrong or missing.",
    403: "The request names a host that this server is not, or comes from a page of a browser.",
    404: "There is no such job, world or key.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is not of the type that is described.",
    426: "This is for WebSockets.",
    503: "The server holds as many connections or calls of this kind as it may.",
}
_JSON: Final = "application/json"
_BYTES: Final = "application/octet-stream"
_XML: Final = "text/xml"

_OPERATIONS: Final[dict[str, _Operation]] = {
    "/": _Operation("The page for people", "text/html", open=True),
    "/page.css": _Operation("The page's looks", "text/css", open=True),
    "/page.js": _Operation("The page's program", "text/javascript", open=True),
    "/healthz": _Operation("Whether the server is up", _JSON, Health, open=True),
    "/metrics": _Operation("Metrics for Prometheus", "text/plain"),
    "/api/v1/openapi.json": _Operation("This description", _JSON),
    "/api/v1/jobs": _Operation("The jobs", _JSON, JobList, JobsQuery),
    "/api/v1/jobs/{job}": _Operation("A job: its members, and what waits for whom", _JSON, JobView, JobQuery, (404,)),
    "/api/v1/jobs/{job}/keys": _Operation("The keys of a job's world, without their values", _JSON, KeyList, KeysQuery, (404,)),
    "/api/v1/jobs/{job}/keys/{key}": _Operation("The value of a key, as it is", _BYTES, None, KeyQuery, (404,)),
    "/api/v1/events": _Operation(
        "The jobs live: a Server-Sent Event with a Snapshot at once and after every change, comments in between",
        "text/event-stream",
        None,
        EventsQuery,
        (503,),
    ),
    XMLRPC_PATH: _Operation("The XML-RPC calls of aiodist.sync", _XML, None, None, (408, 413, 415, 503), method="post", takes=_XML),
    MEMBERS_PATH: _Operation("Where members connect by WebSocket", "", refusals=(426, 503), status=101),
}
_PARAMETERS: Final = {
    "job": {"type": "string", "pattern": _JOB},
    "key": {"type": "string", "minLength": 1, "maxLength": 1024, "description": "Slashes in it may be written as %2F or as they are."},
}


def document() -> dict[str, Any]:
    """Return the OpenAPI description of everything the server answers."""
    kinds = [ErrorBody, Snapshot, *(operation.body for operation in _OPERATIONS.values() if operation.body)]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "aiodist rendezvous",
            "version": "1",
            "description": f"Errors are JSON objects with a text in `error`. Every answer carries the header {MARK_HEADER}.",
        },
        "paths": {path: {operation.method: _describe(path, operation)} for path, operation in _OPERATIONS.items()},
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}],
    }


def _describe(path: str, operation: _Operation) -> dict[str, Any]:
    refusals = sorted({*operation.refusals, *(() if operation.open else (401, 403)), *((400,) if operation.query else ())})
    answers = {str(status): {"description": _MEANING[status], "content": _content(_JSON, ErrorBody)} for status in refusals}
    answers[str(operation.status)] = {"description": operation.summary} | (
        {"content": _content(operation.media, operation.body)} if operation.media else {}
    )
    described: dict[str, Any] = {"summary": operation.summary, "parameters": _parameters(path, operation), "responses": answers}
    if operation.takes:
        described["requestBody"] = {"required": True, "content": {operation.takes: {}}}
    return described | ({"security": []} if operation.open else {})


def _content(media: str, body: type | None) -> dict[str, Any]:
    if body is None:
        return {media: {"schema": {"type": "object"}}} if media == _JSON else {media: {}}
    return {media: {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}


def _parameters(path: str, operation: _Operation) -> list[dict[str, Any]]:
    found = [
        {"name": name, "in": "path", "required": True, "schema": schema} for name, schema in _PARAMETERS.items() if f"{{{name}}}" in path
    ]
    if operation.query is not None:
        name = operation.query.__name__
        _, schemas = msgspec.json.schema_components([operation.query])
        found += [{"name": name, "in": "query", "schema": schema} for name, schema in schemas[name]["properties"].items()]
    return found
