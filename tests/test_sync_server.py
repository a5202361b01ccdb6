"""`aiodist.sync.server`: what the ranks tell each other over XML-RPC, with deadlines and bounds."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import xmlrpc.client
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from xmlrpc.server import SimpleXMLRPCRequestHandler

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist.errors import RendezvousError
from aiodist.rendezvous.xml_calls import MalformedCallError, decode_call
from aiodist.sync.server import Client, Methods, Server, ThreadXMLRPCServer


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as held:
        yield held


@pytest.fixture
def client(server: Server) -> Client:
    return Client("127.0.0.1", server.py_server_port)


@pytest.fixture
def side() -> Iterator[ThreadPoolExecutor]:
    """Threads for calls that wait."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def still_waits(*calls: Future[Any]) -> bool:
    """Whether calls have not returned a while after they were made."""
    time.sleep(0.15)
    return not any(call.done() for call in calls)


def post(port: int, body: bytes, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(
        "POST", "/RPC2", body, {"Content-Type": "text/xml"} | {name.replace("_", "-"): text for name, text in headers.items()}
    )
    response = connection.getresponse()
    response.body = response.read()  # type: ignore[attr-defined]
    connection.close()
    return response


def fault_of(port: int, body: bytes) -> str:
    response = post(port, body)
    assert response.status == 200
    with pytest.raises(xmlrpc.client.Fault) as caught:
        xmlrpc.client.loads(response.body)  # type: ignore[attr-defined]
    return str(caught.value.faultString)


def dial(port: int, name: str, *params: Any) -> socket.socket:
    """Make a call over a bare socket and do not wait for the answer."""
    body = xmlrpc.client.dumps(params, name, allow_none=True).encode()
    sock = socket.create_connection(("127.0.0.1", port), 20)
    sock.sendall(b"POST /RPC2 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/xml\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    return sock


def hang_up(port: int, name: str, *params: Any) -> None:
    """Make a call, and leave once it waits."""
    with dial(port, name, *params):
        time.sleep(0.1)
    time.sleep(0.1)


# --- What the calls do ---------------------------------------------------------------------------------------------------------------


def test_a_plain_proxy_makes_all_calls(server: Server) -> None:
    """Nothing but the standard library on the other side."""
    value = {"a": [1, -2.5, True, None, "é", b"\0\xff"], "b": {}}
    with xmlrpc.client.ServerProxy(f"http://127.0.0.1:{server.py_server_port}", allow_none=True, use_builtin_types=True) as proxy:
        assert proxy.connect() is True
        assert proxy.get_mm_server_port() == server.mm_server_port == server.py_server_port
        assert proxy.user_set("key", value) is True
        assert proxy.user_get("key") == proxy.user_get("key") == value
        assert proxy.user_pop("key") == value
        assert proxy.set_is_grad("0->1", True) is True
        assert proxy.check_is_grad("0->1") is True
        assert proxy.set_remote_tracer("0->1", {"x": True}) is True
        assert proxy.check_remote_tracer("0->1") == {"x": True}
        assert proxy.group_barrier("0", 1) is True
        assert proxy.bcast_val(value, "0", 1) == value


def test_what_is_set_lies_in_the_state_of_the_rendezvous(server: Server, client: Client) -> None:
    """There is no second store: the HTTP API shows it."""
    client.user_set("key", "value")
    with urllib.request.urlopen(f"{server.address}/api/v1/jobs/xmlrpc/keys/user/key", timeout=20) as response:
        assert xmlrpc.client.loads(response.read())[0] == ("value",)


def test_a_getter_waits_for_the_key_and_a_text_is_no_number(client: Client, side: ThreadPoolExecutor) -> None:
    """A value may be replaced; key 1 is another one than key "1"."""
    getters = [side.submit(client.user_get, 1) for _ in range(3)]
    client.user_set("1", "text")
    assert still_waits(*getters)
    client.user_set(1, None)
    assert [getter.result(20) for getter in getters] == [None] * 3
    client.user_set("1", "new")
    assert client.user_get("1") == "new"


def test_each_value_is_popped_by_one_caller(client: Client, side: ThreadPoolExecutor) -> None:
    """Also when several wait."""
    takers = [side.submit(client.user_pop, "key") for _ in range(3)]
    until(lambda: all(taker.running() for taker in takers))
    for number in range(3):
        client.user_set("key", number)
        due = number + 1
        until(lambda due=due: sum(taker.done() for taker in takers) == due)  # type: ignore[misc]
    assert sorted(taker.result(0) for taker in takers) == [0, 1, 2]


def test_no_flag_is_overwritten_before_it_is_taken(client: Client, side: ThreadPoolExecutor) -> None:
    """Two sends under one key reach two receives, in their order."""
    client.set_is_grad("key", True)
    second = side.submit(client.set_is_grad, "key", False)
    assert still_waits(second)
    assert client.check_is_grad("key") is True
    assert second.result(20) is True
    assert client.check_is_grad("key") is False


def test_a_barrier_holds_until_all_have_come_and_can_be_used_again(client: Client, side: ThreadPoolExecutor) -> None:
    """Three rounds; nobody slips through with the round before."""
    for _ in range(3):
        early = [side.submit(client.group_barrier, "0,1,2", 3) for _ in range(2)]
        assert still_waits(*early)
        client.group_barrier("0,1,2", 3)
        assert all(one.result(20) for one in early)


def test_a_broadcast_gives_all_callers_the_value_of_one(client: Client, side: ThreadPoolExecutor) -> None:
    """Rounds under one key do not mix; without a giver there is nothing to get."""
    for value in ("first", [2], None):
        calls = [side.submit(client.bcast_val, given, "key", 3) for given in (None, value, None)]
        assert [call.result(20) for call in calls] == [value] * 3


# --- What goes wrong -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda client: client.user_get("key"), "user_get: nobody has set key 'key' within 0.3 s"),
        (lambda client: client.user_pop("key"), "user_pop: nobody has set key 'key' within 0.3 s"),
        (lambda client: client.check_is_grad("key"), "check_is_grad: nobody has set the flag of 'key'"),
        (lambda client: [client.set_is_grad("key", True) for _ in range(2)], "set_is_grad: nobody has asked for the flag of 'key'"),
        (lambda client: client.group_barrier("key", 2), "group_barrier 'key': 1 of 2 callers came within 0.3 s"),
        (lambda client: client.bcast_val(1, "key", 3), "bcast_val 'key': 1 of 3 callers came within 0.3 s"),
    ],
)
def test_every_wait_ends(monkeypatch: pytest.MonkeyPatch, call: Callable[[Client], object], text: str) -> None:
    """After AIODIST_TIMEOUT, with an error that says what was waited for."""
    monkeypatch.setenv("AIODIST_TIMEOUT", "0.3")
    with Server() as server, pytest.raises(RendezvousError) as caught:
        call(Client("127.0.0.1", server.py_server_port))
    assert text in str(caught.value)


def test_a_caller_that_left_a_barrier_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one whose time was over nor one that hung up."""
    monkeypatch.setenv("AIODIST_TIMEOUT", "0.5")
    with Server() as server:
        client = Client("127.0.0.1", server.py_server_port)
        for _ in range(2):
            with pytest.raises(RendezvousError, match="1 of 2"):
                client.group_barrier("key", 2)
        hang_up(server.py_server_port, "group_barrier", "key", 2)
        with pytest.raises(RendezvousError, match="1 of 2"):
            client.group_barrier("key", 2)


def test_a_caller_that_hung_up_takes_nothing(server: Server, client: Client) -> None:
    """What it waited for goes to the next."""
    hang_up(server.py_server_port, "user_pop", "key")
    client.user_set("key", "value")
    assert client.user_pop("key") == "value"


def test_callers_that_wait_hold_no_threads(server: Server, client: Client) -> None:
    """Two hundred wait, all are served."""
    before = len(os.listdir("/proc/self/task"))
    waiting = [dial(server.py_server_port, "user_get", "key") for _ in range(200)]
    time.sleep(0.15)
    assert len(os.listdir("/proc/self/task")) == before
    client.user_set("key", "value")
    for sock in waiting:
        assert b" 200 " in sock.recv(1 << 16)
        sock.close()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda client: client.user_set(["key"], 1), TypeError, "key must be a str or an int, not list"),
        (lambda client: client.user_set("key", {1, 2}), TypeError, "user_set: an argument can not travel"),
        (lambda client: client.user_set("key", 1 << 40), TypeError, "user_set: an argument can not travel"),
        (lambda client: client.user_set("key", "x" * (1 << 20)), ValueError, "the limit is"),
        (lambda client: client.user_set("k" * 2000, 1), ValueError, "the key has more than"),
        (lambda client: client.group_barrier("key", 0), ValueError, "size must be a positive whole number, not 0"),
        (lambda client: client._call("user_get"), TypeError, "user_get: missing a required argument: 'key'"),
        (lambda client: client._call("user_steal", 1), ValueError, "there is no method 'user_steal'"),
    ],
)
def test_a_wrong_argument_is_named(client: Client, call: Callable[[Client], object], error: type[Exception], text: str) -> None:
    """And the service goes on."""
    with pytest.raises(error) as caught:
        call(client)
    assert text in str(caught.value)
    assert client.connect()


def test_callers_that_disagree_are_told(client: Client, side: ThreadPoolExecutor) -> None:
    """On the size of a barrier, or on who gives the value."""
    waiting = side.submit(client.group_barrier, "key", 2)
    assert still_waits(waiting)
    with pytest.raises(ValueError, match="size 3 is given for the key, but 2 by those who wait"):
        client.group_barrier("key", 3)
    client.group_barrier("key", 2)
    assert waiting.result(20)
    giver = side.submit(client.bcast_val, 1, "key", 2)
    assert still_waits(giver)
    with pytest.raises(ValueError, match="another caller has given a value"):
        client.bcast_val(2, "key", 2)
    assert client.bcast_val(None, "key", 2) == 1


def test_closing_ends_the_calls_that_wait(side: ThreadPoolExecutor) -> None:
    """With an error, and at once."""
    server = Server()
    client = Client("127.0.0.1", server.py_server_port)
    calls = [side.submit(client.user_get, "key"), side.submit(client.group_barrier, "key", 2)]
    assert still_waits(*calls)
    server.close()
    server.close()
    for call in calls:
        with pytest.raises(RendezvousError, match="the server was closed"):
            call.result(20)


def test_a_client_waits_for_its_server(monkeypatch: pytest.MonkeyPatch, side: ThreadPoolExecutor) -> None:
    """One that comes up later is found, one that never does is named."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    early = side.submit(Client, "127.0.0.1", port)
    assert still_waits(early)
    with Server(port):
        assert early.result(20).get_mm_server_port() == port
    monkeypatch.setenv("AIODIST_TIMEOUT", "0.3")
    with pytest.raises(RendezvousError, match=f"no service came up within 0.3 s: connect: http://127.0.0.1:{port} can not be reached"):
        Client("127.0.0.1", port)


# --- Who may call, and what is read --------------------------------------------------------------------------------------------------


def test_who_has_no_token_gets_nothing() -> None:
    """Where the server has one; it has to, outside the loopback interface."""
    with Server(token="secret") as server:
        assert Client("127.0.0.1", server.py_server_port, token="secret").user_set("key", 1)
        with pytest.raises(RendezvousError, match=r"401.*AIODIST_TOKEN"):
            Client("127.0.0.1", server.py_server_port)
        with pytest.raises(RendezvousError, match="401"):
            Client("127.0.0.1", server.py_server_port, token="guess")
    with pytest.raises(ValueError, match=r"0.0.0.0 lets other hosts in: give a token, or set AIODIST_TOKEN"):
        Server(host="0.0.0.0")
    with Server(host="0.0.0.0", token="secret") as server:
        assert Client("127.0.0.1", server.py_server_port, token="secret").connect()


LAUGHS = b'<?xml version="1.0"?><!DOCTYPE b [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><methodCall><methodName>&b;</methodName></methodCall>'
FILE = b'<?xml version="1.0"?><!DOCTYPE b SYSTEM "file:///etc/passwd"><methodCall><methodName>connect</methodName></methodCall>'
DEEP = b"<methodCall><methodName>user_set</methodName><params><param><value>k</value></param><param>%s%s</param></params></methodCall>" % (
    b"<value><array><data>" * 20000,
    b"</data></array></value>" * 20000,
)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (LAUGHS, "it declares a document type"),
        (FILE, "it declares a document type"),
        (DEEP, "it is nested too deeply"),
        (b"", "no element found"),
        (b"<methodCall><params/></methodCall>", "it names no method"),
        (
            b"<methodCall><methodName>user_get</methodName><params><param><value><int>x</int></value></param></params></methodCall>",
            "invalid",
        ),
    ],
)
def test_a_body_that_is_no_call_is_refused(server: Server, body: bytes, text: str) -> None:
    """With a fault, and the service goes on."""
    assert text in fault_of(server.py_server_port, body)
    assert Client("127.0.0.1", server.py_server_port).connect()


@pytest.mark.parametrize(
    ("size", "headers", "status"),
    [
        (3 << 20, {}, 413),
        (10, {"Content_Type": "text/plain"}, 415),
        (10, {"Origin": "http://evil.example"}, 403),
        (10, {"Host": "evil.example"}, 403),
    ],
)
def test_a_body_that_should_not_be_here_is_not_read(server: Server, size: int, headers: dict[str, str], status: int) -> None:
    """It is too large, or sent by a page in a browser."""
    assert post(server.py_server_port, b"x" * size, **headers).status == status


TAGS = (
    "methodCall",
    "methodName",
    "methodResponse",
    "params",
    "param",
    "value",
    "array",
    "data",
    "struct",
    "member",
    "name",
    "int",
    "nil",
    "fault",
)
tags = st.sampled_from(TAGS)
pieces = st.one_of(tags.map("<{}>".format), tags.map("</{}>".format), st.sampled_from(["connect", "7", "é", "&lt;", "<!DOCTYPE a>"]))


@settings(max_examples=200, deadline=None)
@given(st.lists(pieces, max_size=20).map("".join), st.booleans())
def test_any_body_is_a_call_or_malformed(text: str, closed: bool) -> None:
    """Whatever order the tags come in."""
    body = f"<methodCall><methodName>connect</methodName>{text}</methodCall>" if closed else text
    with contextlib.suppress(MalformedCallError):
        name, params = decode_call(body.encode())
        assert isinstance(name, str) and isinstance(params, tuple)


# --- The rest of the module ----------------------------------------------------------------------------------------------------------


def test_methods_can_be_registered_with_a_threaded_server(server: Server, client: Client) -> None:
    """As programs do that serve calls of their own; bodies are bounded there too."""
    with ThreadXMLRPCServer(("127.0.0.1", 0), logRequests=False, allow_none=True) as threaded:
        threaded.register_instance(Methods(server.mm_server_port))
        thread = threading.Thread(target=threaded.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        port = threaded.server_address[1]
        try:
            with xmlrpc.client.ServerProxy(f"http://127.0.0.1:{port}", allow_none=True) as proxy:
                assert proxy.get_mm_server_port() == server.mm_server_port
                assert proxy.user_set("key", None) is True
            assert client.user_get("key") is None
            assert "it declares a document type" in fault_of(port, LAUGHS)
            assert post(port, b"x", Content_Length=str(1 << 40)).status == 413
            assert post(port, b"x", Origin="http://evil.example").status == 403
        finally:
            threaded.shutdown()
            thread.join()


class _OwnHandler(SimpleXMLRPCRequestHandler):
    rpc_paths = ("/RPC2",)


@pytest.mark.parametrize("handler", [SimpleXMLRPCRequestHandler, _OwnHandler])
def test_a_threaded_server_asks_for_the_token(monkeypatch: pytest.MonkeyPatch, handler: type[SimpleXMLRPCRequestHandler]) -> None:
    """Where AIODIST_TOKEN is set; without it it stays on the loopback interface."""
    with pytest.raises(ValueError, match="lets other hosts in: set AIODIST_TOKEN"):
        ThreadXMLRPCServer(("0.0.0.0", 0))
    monkeypatch.setenv("AIODIST_TOKEN", "secret")
    with ThreadXMLRPCServer(("127.0.0.1", 0), handler, logRequests=False) as threaded:
        threaded.register_function(lambda: 7, "seven")
        thread = threading.Thread(target=threaded.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        call = xmlrpc.client.dumps((), "seven").encode()
        try:
            assert post(threaded.server_address[1], call).status == 401
            assert post(threaded.server_address[1], call, Authorization="Bearer secret", Content_Length=str(1 << 40)).status == 413
            assert post(threaded.server_address[1], call, Authorization="Bearer secret").status == 200
        finally:
            threaded.shutdown()
            thread.join()


def test_the_module_serves_by_itself() -> None:
    """``python -m aiodist.sync.server``; Ctrl-C ends it."""
    command = [sys.executable, "-W", "error", "-m", "aiodist.sync.server", "-p", "0", "--no-verbose"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("serving on port ")
            assert Client("127.0.0.1", int(line.split()[-1])).connect()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
            assert (process.returncode, errors) == (0, "")
        finally:
            process.kill()


def test_an_address_in_brackets_is_the_one_within() -> None:
    """As in URLs."""
    with Server(host="[::1]") as server:
        assert Client("[::1]", server.py_server_port).connect() and Client("::1", server.py_server_port).connect()


def test_wrong_arguments_are_refused() -> None:
    """Before anything is opened."""
    with pytest.raises(TypeError, match="port must be a whole number, not str"):
        Server("80")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="port 65536 is not between 0 and 65535"):
        Server(65536)
    with pytest.raises(TypeError, match="master_ip must be a str, not bytes"):
        Client(b"localhost", 80)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="port 0 is not between 1 and 65535"):
        Client("localhost", 0)
    with Server() as server, pytest.raises(OSError, match=f"127.0.0.1:{server.py_server_port}"):
        Server(server.py_server_port)
