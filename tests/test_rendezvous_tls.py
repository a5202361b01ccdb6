"""The rendezvous over TLS, with a CA of its own, and secrets that lie in files."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import trustme
from support.rendezvous import TOKEN, client, world

import aiodist
from aiodist.errors import RendezvousError
from aiodist.rendezvous import server as server_module
from aiodist.rendezvous.server import RendezvousServer
from aiodist.rendezvous.tls import read_token, server_context

pytestmark = pytest.mark.timeout(60)


def private(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    path.chmod(0o600)
    return str(path)


@dataclass
class Issued:
    """A certificate and the CA that issued it, as files."""

    ca: str
    cert: str
    key: str

    @classmethod
    def to(cls, folder: Path, *names: str) -> Issued:
        ca = trustme.CA()
        made = ca.issue_cert(*names)
        chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
        return cls(
            private(folder / "ca.pem", ca.cert_pem.bytes()),
            private(folder / "cert.pem", chain),
            private(folder / "key.pem", made.private_key_pem.bytes()),
        )

    def server(self) -> RendezvousServer:
        return RendezvousServer(token=TOKEN, tls_cert=self.cert, tls_key=self.key)


@pytest.fixture
def issued(tmp_path: Path) -> Issued:
    return Issued.to(tmp_path, "127.0.0.1")


async def test_members_and_tools_meet_over_tls(issued: Issued) -> None:
    async with issued.server() as server:
        assert server.address.startswith("https://127.0.0.1:") and server.page_link().startswith(server.address)
        async with world(server, 2, tls_ca=issued.ca) as (a, b), aiohttp.ClientSession() as session:
            await a.set("key", b"value" * 50_000)
            assert await b.get("key") == b"value" * 50_000
            await asyncio.gather(a.barrier("b"), b.barrier("b"))
            async with session.get(f"{server.address}/healthz", ssl=ssl.create_default_context(cafile=issued.ca)) as response:
                assert response.status == 200
    assert server_context(issued.cert, issued.key).minimum_version is ssl.TLSVersion.TLSv1_2


async def test_who_is_not_trusted_is_told_what_to_change(issued: Issued, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    stranger = Issued.to(other, "elsewhere.example")
    async with issued.server() as server, stranger.server() as elsewhere, RendezvousServer(token=TOKEN) as plain:
        swapped = {"http": server.address.replace("https", "http"), "https": plain.address.replace("http", "https")}
        for address, ca, says in (
            (server.address, None, f"{server.address} is not trusted: .*the system's CAs .*AIODIST_TLS_CA"),
            (server.address, stranger.ca, f"not trusted: .*{stranger.ca} is what is trusted .*AIODIST_TLS_CA"),
            (elsewhere.address, stranger.ca, f"{elsewhere.address} is for another host: .*127.0.0.1.*AIODIST_RENDEZVOUS"),
            (swapped["http"], None, f"{swapped['http']} speaks TLS: write {server.address} .*AIODIST_RENDEZVOUS"),
            (swapped["https"], issued.ca, f"{swapped['https']} does not speak TLS .*write {plain.address} .*AIODIST_RENDEZVOUS"),
        ):
            with pytest.raises(RendezvousError, match=says):
                await asyncio.wait_for(client(address, tls_ca=ca, timeout=300.0).connect(), 20)


async def test_wrong_files_are_refused_by_name(issued: Issued, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    foreign = Issued.to(other, "127.0.0.1")
    for cert, key, kind, says in (
        (issued.cert, foreign.key, ValueError, f"{issued.cert} and {foreign.key} are no TLS certificate and its private key"),
        (issued.key, issued.key, ValueError, "are no TLS certificate"),
        (issued.cert, str(tmp_path / "none"), FileNotFoundError, "none"),
        (str(tmp_path / "none"), issued.key, FileNotFoundError, "none"),
    ):
        with pytest.raises(kind, match=says):
            await RendezvousServer(tls_cert=cert, tls_key=key).start()
    with pytest.raises(ValueError, match="together"):
        RendezvousServer(tls_cert=issued.cert)
    for ca in (issued.key, str(tmp_path / "none")):
        with pytest.raises(ValueError, match=f"{ca} .*AIODIST_TLS_CA"):
            client("https://host:1", tls_ca=ca)
    client("http://host:1", tls_ca=issued.key)  # it is of no interest there


def test_a_key_that_others_can_read_is_refused(issued: Issued) -> None:
    Path(issued.key).chmod(0o644)
    with pytest.raises(ValueError, match=f"the TLS key {issued.key} is open to other users .mode 644."):
        server_context(issued.cert, issued.key)


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(issued: Issued) -> None:
    from cryptography.hazmat.primitives import serialization as forms

    key = forms.load_pem_private_key(Path(issued.key).read_bytes(), None)
    locked = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.BestAvailableEncryption(b"secret"))
    private(Path(issued.key), locked)
    with pytest.raises(ValueError, match="encrypted"):
        server_context(issued.cert, issued.key)


async def test_who_never_greets_by_tls_is_dropped(issued: Issued, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_HANDSHAKE_S", 0.3)
    async with issued.server() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.address.rpartition(":")[2]))
        try:
            assert await asyncio.wait_for(reader.read(), 20) == b""
        finally:
            writer.close()
        async with world(server, 1, tls_ca=issued.ca):
            pass


# -- the token's file ------------------------------------------------------------------------------------------------------------


def test_a_token_is_read_from_a_file_that_is_its_owners(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert read_token(private(file, b"  a-token\n")) == "a-token"
    for mode, allowed in ((0o400, True), (0o640, True), (0o604, False), (0o660, False), (0o602, False)):
        file.chmod(mode)
        if allowed:
            assert read_token(str(file)) == "a-token"
        else:
            with pytest.raises(ValueError, match=f"the token file {file} is open to other users .mode {mode:o}."):
                read_token(str(file))
    for content, says in ((b"", "is empty"), (b" \n", "is empty"), (b"two words", "printable"), (b"\xff\xfe", "printable")):
        with pytest.raises(ValueError, match=f"the token file {file}.*{says}") as caught:
            read_token(private(file, content))
        assert "words" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match="missing"):
        read_token(str(tmp_path / "missing"))


def test_the_program_serves_tls_by_files_and_a_world_forms_there(issued: Issued, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "a-secret-token"
    token = private(tmp_path / "token", secret.encode())
    options = ["--token-file", token, "--tls-cert", issued.cert, "--tls-key", issued.key]
    monkeypatch.setenv("AIODIST_TLS_CA", issued.ca)
    monkeypatch.setenv("AIODIST_TOKEN", secret)

    async def form(address: str) -> int:
        async with aiodist.init(rendezvous=address, rank=0, world_size=1, timeout=20.0) as alone:
            return alone.size

    command = [sys.executable, "-m", "aiodist", "rendezvous", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert asyncio.run(form(process.stdout.readline().strip())) == 1
        assert secret.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        process.terminate()
        assert secret not in process.stderr.read()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--host", "0.0.0.0"], "--insecure"),
        (["--tls-cert", "/dev/null"], "tls_key"),
        (["--token-file", "/dev/null"], "/dev/null is empty"),
    ],
)
def test_the_program_refuses_what_is_not_safe(options: list[str], says: str) -> None:
    done = subprocess.run([sys.executable, "-m", "aiodist", "rendezvous", *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and says in done.stderr and "Traceback" not in done.stderr
