"""XML-RPC bodies: read without trusting them, and written."""

from __future__ import annotations

import xmlrpc.client
from enum import IntEnum
from typing import Any, Final, NoReturn
from xml.parsers import expat

__all__ = ["XMLRPC_PATH", "FaultCode", "MalformedCallError", "decode_call", "encode_fault", "encode_value"]

XMLRPC_PATH: Final = "/RPC2"
"""Where `xmlrpc.client.ServerProxy` sends its calls to a server that is named without a path."""


class FaultCode(IntEnum):
    """Why a call got a fault in place of a value."""

    LATE = 1
    ARGUMENT = 2
    TYPE = 3
    LIMIT = 4
    CLOSED = 5
    MALFORMED = 6


class MalformedCallError(ValueError):
    """Raised when a body is no XML-RPC call; the text says what is wrong with it."""


def decode_call(body: bytes) -> tuple[str, tuple[Any, ...]]:
    """Read the name and the arguments of a call.

    Document type declarations are refused, and with them all entities: those that name files, and those that grow without bound.

    Raises:
        MalformedCallError: the body is no call.
    """
    target = xmlrpc.client.Unmarshaller(use_builtin_types=True)
    parser = expat.ParserCreate(None, None)
    parser.StartElementHandler = target.start
    parser.EndElementHandler = target.end
    parser.CharacterDataHandler = target.data
    parser.StartDoctypeDeclHandler = _refuse_doctype
    target.xml("", None)  # what the parser gives is text already
    try:
        parser.Parse(body, True)
        params = target.close()
    except (expat.ExpatError, xmlrpc.client.Error, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        # The standard library's reader stumbles over tags in a wrong order in many ways.
        raise MalformedCallError(f"that is no XML-RPC call: {error}") from None
    name = target.getmethodname()
    if not isinstance(name, str):
        raise MalformedCallError("that is no XML-RPC call: it names no method")
    return name, tuple(params)


def encode_value(value: Any) -> bytes:
    """Return the body that answers a call by a value.

    Raises:
        TypeError, OverflowError: XML-RPC has no form for it.
    """
    try:
        return xmlrpc.client.dumps((value,), methodresponse=True, allow_none=True).encode()
    except RecursionError:
        raise TypeError("it is nested too deeply") from None


def encode_fault(code: FaultCode, text: str) -> bytes:
    """Return the body that answers a call by a fault."""
    return xmlrpc.client.dumps(xmlrpc.client.Fault(int(code), text)).encode()


def _refuse_doctype(*declaration: object) -> NoReturn:
    raise MalformedCallError("it declares a document type")
