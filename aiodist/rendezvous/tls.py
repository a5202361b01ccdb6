"""Secrets that lie in files, TLS contexts made of them, and what a failed handshake means."""

from __future__ import annotations

import os
import ssl
import stat
from typing import Final

from aiodist.rendezvous.sockets import Address, check_token

__all__ = ["client_context", "explain", "plain_refused", "read_token", "server_context"]

_TOKEN_NBYTES: Final = 4096
_CA_SETTING: Final = "AIODIST_TLS_CA"
_ADDRESS_SETTING: Final = "rendezvous= or AIODIST_RENDEZVOUS"
_OF_THE_NAME: Final = (62, 63, 64)
"""OpenSSL's verdicts that a certificate is for another host name, mail or IP address."""


def read_token(path: str) -> str:
    """Read a bearer token from a file; white space around it does not count.

    Raises:
        OSError: the file can not be read.
        ValueError: other users can read or change the file, or what it holds is no token; the text never shows it.
    """
    with open(path, "rb") as file:
        _check_private(file.fileno(), f"the token file {path}")
        text = file.read(_TOKEN_NBYTES).decode("ascii", "replace").strip()
    if not text:
        raise ValueError(f"the token file {path} is empty")
    try:
        check_token(text)
    except ValueError as error:
        raise ValueError(f"the token file {path}: {error}") from None
    return text


def server_context(cert: str, key: str) -> ssl.SSLContext:
    """Make the context of a server, for TLS 1.2 and newer.

    Args:
        cert: PEM file with the server's certificate, and behind it those between it and the CA's.
        key: PEM file with its private key, not encrypted.

    Raises:
        OSError: a file can not be read.
        ValueError: other users can read the key, or the files hold no certificate and its key.
    """
    with open(key, "rb") as file:
        _check_private(file.fileno(), f"the TLS key {key}")
    with open(cert, "rb"):
        pass
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # of TLS 1.2: it costs the server more than the client
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        raise ValueError(f"{cert} and {key} are no TLS certificate and its private key: {error.reason or error}") from None
    return context


def client_context(ca: str | None) -> ssl.SSLContext:
    """Make the context of a client, which checks the server's certificate and host name.

    Args:
        ca: PEM file with the certificates of the CAs to trust in place of the system's; None: the system's.

    Raises:
        ValueError: the file can not be read, or holds no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:  # ssl.SSLError too
        why = "it holds no certificate in PEM" if isinstance(error, ssl.SSLError) else error.strerror
        raise ValueError(f"the file of trusted certificates {ca} ({_CA_SETTING}) can not be used: {why}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def explain(address: Address, error: Exception, ca: str | None) -> str:
    """Say why there is no TLS connection to a rendezvous, and what to change."""
    cause = error.__cause__  # OpenSSL's own words
    if isinstance(cause, ssl.SSLCertVerificationError):
        why = cause.verify_message.rstrip(".")
        if cause.verify_code in _OF_THE_NAME:
            return f"the certificate of the rendezvous at {address} is for another host: {why}; write a name of it ({_ADDRESS_SETTING})"
        trusted = f"{ca} is what is trusted" if ca else "the system's CAs are what is trusted"
        return f"the certificate of the rendezvous at {address} is not trusted: {why}; {trusted} ({_CA_SETTING} names a file of CAs)"
    reason = (cause.reason if isinstance(cause, ssl.SSLError) else None) or str(error)
    plain = Address("http", address.host, address.port)
    return f"what listens at {address} does not speak TLS as we do ({reason}); if it serves plain HTTP, write {plain} ({_ADDRESS_SETTING})"


def plain_refused(address: Address) -> str:
    """Say that a server wants TLS."""
    return f"what listens at {address} speaks TLS: write {Address('https', address.host, address.port)} ({_ADDRESS_SETTING})"


def _check_private(descriptor: int, what: str) -> None:
    """Refuse a file that all users of the host can read, or its group can change. Pipes are nobody else's."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) and mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ValueError(f"{what} is open to other users (mode {stat.S_IMODE(mode):03o}): chmod 600 it")


def _no_password() -> str:
    # Without this, OpenSSL asks on the terminal.
    raise ValueError("the TLS key is encrypted: give one that is not")
