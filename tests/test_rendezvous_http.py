"""What the rendezvous server answers to people and tools: the API, its description, the live view, metrics and logs."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from support.rendezvous import TOKEN, client, info, until_forming, world

from aiodist.rendezvous import http
from aiodist.rendezvous.logs import JsonLines
from aiodist.rendezvous.openapi import document
from aiodist.rendezvous.server import RendezvousServer
from aiodist.rendezvous.views import JobList, JobView, KeyList, Snapshot

pytestmark = pytest.mark.timeout(120)

AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
SCHEMATHESIS = shutil.which("schemathesis", path=f"{Path(sys.executable).parent}") or shutil.which("schemathesis")
HTTP_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD")


class Api:
    """A server's API as a tool sees it."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session = session
        self._address = address

    async def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, bytes]:
        async with self._session.request(method, self._address + path, headers=headers) as response:
            return response.status, response.content_type, await response.read()

    async def read(self, path: str, kind: type[Any]) -> Any:
        """Read an answer of that type, which has every field of it and no other."""
        status, content_type, body = await self.ask(path)
        assert (status, content_type) == (200, "application/json"), body
        value = msgspec.json.decode(body, type=kind)
        assert msgspec.json.decode(body) == msgspec.to_builtins(value)
        return value

    async def refused(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        status, content_type, body = await self.ask(path, method, **headers)
        assert content_type == "application/json" and set(json.loads(body)) == {"error"}, body
        return status, json.loads(body)["error"]

    async def metrics(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """All samples by name and the values of their labels."""
        status, content_type, body = await self.ask("/metrics")
        assert (status, content_type) == (200, "text/plain")
        families = text_string_to_metric_families(body.decode())
        return {(s.name, tuple(value for _, value in sorted(s.labels.items()))): s.value for family in families for s in family.samples}


@asynccontextmanager
async def api(server: RendezvousServer) -> AsyncIterator[Api]:
    async with aiohttp.ClientSession(headers=AUTHORIZED) as session:
        yield Api(session, server.address)


class Live:
    """A reader of the live view."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def next(self) -> Snapshot:
        async with asyncio.timeout(20):
            while True:
                event = (await self.response.content.readuntil(b"\n\n")).decode()
                if match := re.fullmatch(r"event: jobs\ndata: (.*)\n\n", event):
                    return msgspec.json.decode(match[1], type=Snapshot)


# -- the API ---------------------------------------------------------------------------------------------------------------------


async def test_a_job_is_shown_with_its_members_and_who_is_missing_where_but_without_values() -> None:
    async with RendezvousServer(token=TOKEN) as server, api(server) as tool, world(server, 3, "train") as members:
        await members[0].set("k", b"secret")
        waits = [asyncio.create_task(members[1].barrier("b")), asyncio.create_task(members[2].gather("g", [2, 0], b"secret"))]
        async with asyncio.timeout(20):
            while True:
                job: JobView = await tool.read("/api/v1/jobs/train", JobView)
                (shown,) = job.worlds
                if shown.barriers and shown.gathers:
                    break
        assert (job.job, job.state, job.generation, shown.world_size, shown.keys) == ("train", "formed", 1, 3, 1)
        assert [(m.rank, m.state, m.host, m.pid) for m in shown.members] == [(r, "active", "h", r) for r in range(3)]
        assert (shown.barriers[0].name, shown.barriers[0].waiting, shown.barriers[0].missing) == ("b", [1], [0, 2])
        assert (shown.gathers[0].name, shown.gathers[0].waiting, shown.gathers[0].missing) == ("g", [2], [0])
        assert "secret" not in str(job)
        await asyncio.gather(members[0].barrier("b"), members[2].barrier("b"), members[0].gather("g", [2, 0], b""), *waits)


async def test_members_that_are_in_trouble_are_listed_first_where_not_all_are() -> None:
    async with RendezvousServer(token=TOKEN) as server, api(server) as tool, world(server, 5, "train") as members:
        await members[3].leave("ValueError: no")
        (shown,) = (await tool.read("/api/v1/jobs/train?members=2", JobView)).worlds
        assert [(m.rank, m.state, m.reason) for m in shown.members] == [(3, "failed", "ValueError: no"), (0, "active", None)]
        assert shown.members_left_out == 3 and shown.members_by_state == {"active": 4, "failed": 1}


async def test_a_job_that_forms_is_shown_with_the_ranks_that_are_missing() -> None:
    async with RendezvousServer(token=TOKEN) as server, api(server) as tool, client(server) as me:
        join = asyncio.create_task(me.join(world_size=4, rank=2, info={**info(7), "device": "cpu"}))
        await until_forming(server, 1)
        forming = (await tool.read("/api/v1/jobs/X", JobView)).forming
        assert [(m.rank, m.world_size, m.pid, m.device) for m in forming.members] == [(2, 4, 7, "cpu")]
        assert forming.missing == [0, 1, 3]
        join.cancel()


async def test_jobs_and_keys_are_listed_in_order_and_in_pages() -> None:
    async with RendezvousServer(token=TOKEN) as server, api(server) as tool, world(server, 1, "b") as (b,), world(server, 1, "a") as (a,):
        listed = await tool.read("/api/v1/jobs?limit=1", JobList)
        assert [job.job for job in listed.jobs] == ["a"] and listed.more
        listed = await tool.read("/api/v1/jobs?limit=1&after=a", JobList)
        assert [(job.job, job.members_by_state) for job in listed.jobs] == [("b", {"active": 1})] and not listed.more
        for number, key in enumerate(["x/1", "x/2", "y"]):
            await a.set(key, bytes(number))
        await b.set("x/0", b"")
        keys = await tool.read("/api/v1/jobs/a/keys?prefix=x/&limit=1", KeyList)
        assert [(key.key, key.nbytes) for key in keys.keys] == [("x/1", 0)] and keys.more
        keys = await tool.read("/api/v1/jobs/a/keys?prefix=x/&limit=1&after=x/1", KeyList)
        assert [(key.key, key.nbytes) for key in keys.keys] == [("x/2", 1)] and not keys.more


async def test_a_value_is_served_as_it_is_to_those_who_name_its_job() -> None:
    async with RendezvousServer(token=TOKEN) as server, api(server) as tool, world(server, 1, "a") as (a,), world(server, 1, "b"):
        for key, value in (("plain", bytes(range(256))), ("a/b c", b"1"), ("é", b"2")):
            await a.set(key, value)
        assert await tool.ask("/api/v1/jobs/a/keys/plain") == (200, "application/octet-stream", bytes(range(256)))
        assert [(await tool.ask(f"/api/v1/jobs/a/keys/{key}"))[2] for key in ("a%2Fb%20c", "a/b%20c", "%C3%A9")] == [b"1", b"1", b"2"]
        assert await tool.refused("/api/v1/jobs/b/keys/plain") == (404, "job b has no key 'plain'")
        assert (await tool.refused("/api/v1/jobs/a/keys/plain?generation=2"))[0] == 404


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/nothing", "GET", 404),
        ("/api/v1/jobs", "POST", 405),
        ("/healthz", "DELETE", 405),
        ("/api/v1/jobs/none", "GET", 404),
        ("/api/v1/jobs/none/keys", "GET", 404),
        ("/api/v1/jobs/none/keys/k", "GET", 404),
        ("/api/v1/jobs?limit=0", "GET", 400),
        ("/api/v1/jobs?limit=x", "GET", 400),
        ("/api/v1/jobs?limit=1&limit=2", "GET", 400),
        ("/api/v1/jobs?nonsense=1", "GET", 400),
        ("/api/v1/jobs/none?members=99999999", "GET", 400),
        ("/api/v1/events?members=-1", "GET", 400),
    ],
)
async def test_what_can_not_be_answered_is_an_error_in_json(path: str, method: str, status: int) -> None:
    async with RendezvousServer(token=TOKEN) as server, api(server) as tool:
        assert (await tool.refused(path, method))[0] == status


async def test_a_page_of_another_name_that_resolves_to_us_reads_nothing() -> None:
    async with RendezvousServer() as server, api(server) as tool:
        port = server.address.rpartition(":")[2]
        for host in ("127.0.0.1", "localhost", f"localhost:{port}", "[::1]:1"):
            assert (await tool.ask("/api/v1/jobs", Host=host))[0] == 200
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[", ""):
            assert (await tool.refused("/api/v1/jobs", Host=host))[0] in (400, 403)
        assert (await tool.ask("/healthz", Host="evil.example"))[0] == 200
    async with RendezvousServer(token=TOKEN) as server, api(server) as tool:
        assert (await tool.ask("/api/v1/jobs", Host="a.tunnel.example"))[0] == 200


# -- its description -------------------------------------------------------------------------------------------------------------


async def test_every_route_is_described_and_every_description_has_a_route() -> None:
    server = RendezvousServer()
    routes = {
        (method.lower(), route.resource.canonical)
        for route in server._app().router.routes()
        if route.resource is not None and (method := route.method)
    }
    described = {(method, path) for path, operations in document()["paths"].items() for method in operations}
    assert routes == described


async def test_the_description_is_served_and_refers_to_what_it_has() -> None:
    async with RendezvousServer(token=TOKEN) as server, api(server) as tool:
        status, content_type, body = await tool.ask("/api/v1/openapi.json")
        assert (status, content_type, json.loads(body)) == (200, "application/json", document())
        references = set(re.findall(rb'"#/components/schemas/(\w+)"', body))
        assert {name.decode() for name in references} <= set(document()["components"]["schemas"])
        assert {b"JobView", b"JobList", b"KeyList", b"ErrorBody"} <= references


@pytest.mark.skipif(SCHEMATHESIS is None, reason="schemathesis is not installed")
async def test_the_api_does_what_its_description_says(tmp_path: Path) -> None:
    async with RendezvousServer(token=TOKEN) as server, world(server, 2, "train") as (a, _):
        await a.set("key", b"value")
        process = await asyncio.create_subprocess_exec(
            *(str(SCHEMATHESIS), "run", f"{server.address}/api/v1/openapi.json", "-H", f"Authorization: Bearer {TOKEN}"),
            *("--exclude-path", "/api/v1/events", "--exclude-path", "/api/v1/members"),  # They do not end, or are no HTTP.
            *("--exclude-path", "/RPC2", "--no-color"),  # Its calls wait.
            *("--max-examples", "20", "--max-time", "20", "--generation-deterministic"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
        )
        out, _ = await process.communicate()
        assert process.returncode == 0, out.decode()[-10000:]


# -- bad input -------------------------------------------------------------------------------------------------------------------

segments = st.sampled_from(
    ["api", "v1", "jobs", "train", "keys", "key", "events", "members", "metrics", "healthz", "..", "%2F", "%", "%ff", ""]
)
paths = st.lists(segments | st.text(max_size=20).map(lambda text: text.encode("utf-8", "surrogatepass").hex()), max_size=8).map("/".join)
queries = st.lists(
    st.tuples(
        st.sampled_from(["limit", "after", "prefix", "generation", "members", "job", "x"]),
        st.sampled_from(["1", "0", "-1", "train", "%ff", "%ED%A0%80", "1e9", "9" * 30, "null", "true", ""]),
    ),
    max_size=4,
).map(lambda pairs: "&".join(f"{name}={value}" for name, value in pairs))
headers = st.sampled_from(["", f"Authorization: Bearer {TOKEN}\r\n"]).flatmap(
    lambda token: st.sampled_from(
        ["", "Host: \x7f\r\n", "Content-Length: 5\r\n\r\nab", "Upgrade: websocket\r\nConnection: upgrade\r\n", "x\r\n"]
    ).map(lambda more: token + more)
)


async def _exchange(port: int, request: bytes) -> bytes:
    """Send a request and return the first line of what comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.readline(), 20)
    finally:
        writer.close()


async def test_no_request_makes_the_server_fail_or_disturbs_members(caplog: pytest.LogCaptureFixture) -> None:
    async with RendezvousServer(token=TOKEN) as server, world(server, 2, "train") as (a, b):
        await a.set("key", b"value")
        port = int(server.address.rpartition(":")[2])
        loop = asyncio.get_running_loop()
        statuses = set()

        @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.sampled_from([*HTTP_METHODS, "\x00", "get"]), paths, queries, headers, st.binary(max_size=20))
        def send(method: str, path: str, query: str, head: str, tail: bytes) -> None:
            request = f"{method} /{path}?{query} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{head}\r\n".encode() + tail
            line = asyncio.run_coroutine_threadsafe(_exchange(port, request), loop).result(30)
            match = re.match(rb"HTTP/1\.[01] (\d+) ", line)
            assert match is None or match[1] < b"500", (request, line)
            statuses.add(match and match[1])

        await asyncio.to_thread(send)
        assert {b"200", b"400", b"401", b"404"} <= statuses
        await asyncio.gather(a.barrier("b"), b.barrier("b"))
    assert not [record for record in caplog.records if record.exc_info]


# -- the live view ---------------------------------------------------------------------------------------------------------------


async def test_the_live_view_tells_every_change_and_ends_with_the_server() -> None:
    async with aiohttp.ClientSession(headers=AUTHORIZED) as session:
        async with RendezvousServer(token=TOKEN) as server, world(server, 3, "train") as members:
            response = await session.get(f"{server.address}/api/v1/events?job=train")
            assert response.content_type == "text/event-stream"
            live = Live(response)
            first = await live.next()
            assert [job.job for job in first.jobs] == ["train"] and first.job is not None
            assert [member.state for member in first.job.worlds[0].members] == ["active"] * 3
            await members[1].aclose()
            second = await live.next()
            assert second.job is not None and [m.state for m in second.job.worlds[0].members] == ["active", "lost", "active"]
            assert second.jobs[0].members_by_state == {"active": 2, "lost": 1}
        async with asyncio.timeout(20):
            await response.content.read()  # It ends.


async def test_watchers_are_limited_and_those_who_went_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_WATCHERS", 1)
    monkeypatch.setattr(http, "_KEEP_ALIVE_S", 0.0)
    async with RendezvousServer(token=TOKEN) as server, api(server) as tool, aiohttp.ClientSession(headers=AUTHORIZED) as session:
        async with session.get(f"{server.address}/api/v1/events") as response:
            await Live(response).next()
            assert (await tool.refused("/api/v1/events"))[0] == 503
            assert (await tool.metrics())["aiodist_rendezvous_watchers", ()] == 1
        async with asyncio.timeout(20):
            while (await tool.metrics())["aiodist_rendezvous_watchers", ()]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


# -- the page (in a browser: test_rendezvous_page.py) ----------------------------------------------------------------------------


async def test_the_page_is_served_to_all_and_needs_nothing_from_elsewhere() -> None:
    async with RendezvousServer(token=TOKEN) as server, aiohttp.ClientSession() as session, world(server, 1, "secret-job"):
        for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
            async with session.get(server.address + path) as response:
                body = await response.text()
                assert (response.status, response.content_type) == (200, kind)
                assert response.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self';")
                assert set(re.findall(r"\w+://[^\"]*", body)) <= {"http://www.w3.org/2000/svg"} and "secret-job" not in body


def test_the_launcher_tells_the_link_to_the_page_when_asked() -> None:
    body = """
import os, urllib.request
print(urllib.request.urlopen(os.environ["AIODIST_RENDEZVOUS"] + "/").status, os.environ["AIODIST_TOKEN"])
"""
    command = [sys.executable, "-m", "aiodist", "run", "-n", "1", "--job", "a+b", "--page", "/dev/stdin"]
    done = subprocess.run(command, input=body, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    token = done.stdout.split()[-1]
    assert re.search(rf"watch the job at http://127\.0\.0\.1:\d+/#token={token}&job=a%2Bb\n", done.stderr) and "200" in done.stdout


# -- metrics and logs ------------------------------------------------------------------------------------------------------------


async def test_metrics_count_what_there_is_and_what_was_asked() -> None:
    async with RendezvousServer(token=TOKEN) as server, api(server) as tool, world(server, 3, "train") as members:
        await members[0].set("key", b"value")
        for _ in range(2):
            await members[0].get("key")
        wait = asyncio.create_task(members[1].get("never", timeout=100))
        await members[1].set("other", b"")
        await members[2].leave("ValueError: no")
        async with aiohttp.ClientSession() as stranger, stranger.get(f"{server.address}/metrics") as refused:
            assert refused.status == 401
        found = await tool.metrics()
        name = "aiodist_rendezvous_"
        for key, labels, value in (
            ("jobs", ("formed",), 1),
            ("members", ("active",), 2),
            ("members", ("failed",), 1),
            ("connections", (), 3),
            ("waits", ("get",), 1),
            ("keys", (), 2),
            ("requests_total", ("get", "done"), 2),
            ("requests_total", ("set", "done"), 2),
            ("request_seconds_count", ("get",), 2),
            ("request_seconds_bucket", ("get", "+Inf"), 2),
            ("refused_total", ("http 401",), 1),
            ("http_requests_total", ("/metrics", "401"), 1),
            ("events_total", ("failed",), 1),
            ("events_total", ("joined",), 3),
        ):
            assert found[name + key, labels] == value, key
        wait.cancel()
        await members[1].set("other", b"")
        assert (await tool.metrics())[name + "requests_total", ("get", "cancelled")] == 1


async def test_two_servers_count_apart() -> None:
    async with (
        RendezvousServer(token=TOKEN) as one,
        RendezvousServer(token=TOKEN) as other,
        world(one, 1),
        api(one) as tool,
        api(other) as another,
    ):
        assert (await tool.metrics())["aiodist_rendezvous_connections", ()] == 1
        assert (await another.metrics())["aiodist_rendezvous_connections", ()] == 0


async def test_what_happens_is_logged_with_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiodist.rendezvous")
    async with RendezvousServer(token=TOKEN) as server, world(server, 2, "train") as members:
        await members[1].aclose()
        await members[0].leave()
    events = [record for record in caplog.records if hasattr(record, "event")]
    assert [record.__dict__["event"] for record in events] == ["joined", "joined", "formed", "lost", "left"]
    fields = {name: events[3].__dict__[name] for name in ("job", "generation", "rank", "host", "pid", "reason")}
    assert fields == {"job": "train", "generation": 1, "rank": 1, "host": "h", "pid": 1, "reason": fields["reason"]}
    line = json.loads(JsonLines().format(events[3]))
    assert line.items() >= {**fields, "event": "lost", "level": "info", "logger": "aiodist.rendezvous"}.items()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])


def test_a_line_of_json_holds_any_text_and_traceback() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "x %s", ("\ud800\n",), sys.exc_info())
    line = JsonLines().format(record)
    assert "\n" not in line and "ValueError: a" in json.loads(line)["traceback"]


def test_the_program_logs_lines_of_json_and_keeps_the_token_to_itself() -> None:
    command = [sys.executable, "-m", "aiodist", "rendezvous", "--token", TOKEN, "--log-json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    lines = [json.loads(line) for line in err.splitlines()]
    assert lines[0]["text"] == f"rendezvous listens at {address}" and TOKEN not in err


async def test_a_request_that_fails_is_an_error_in_json_and_its_cause_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> web.Response:
        raise ZeroDivisionError("inside")

    monkeypatch.setattr(http, "summarise", fail)
    async with RendezvousServer(token=TOKEN) as server, api(server) as tool, world(server, 1):
        status, text = await tool.refused("/api/v1/jobs")
        assert status == 500 and "inside" not in text
    assert any("ZeroDivisionError: inside" in str(record.exc_text) for record in caplog.records)
