"""What travels between a member and the server: one MessagePack map per binary WebSocket frame, told apart by its ``type``.

A member first sends `Hello` and gets `Welcome`. After that every request carries a number that its answer repeats; `Roster` and
`Notices` come unasked. Unknown fields are ignored, so that a field may be added without a new `PROTOCOL_VERSION`.

When a connection ends, the member opens another one, takes up its place with `Resume`, and sends again what was not answered, under
the same numbers. The server keeps what it answered to requests that change something until the member has `Seen` it, so that
nothing is carried out twice.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

__all__ = [
    "BEAT_PROGRESS",
    "JOB_NAME",
    "LIST_NAMES",
    "MARK_HEADER",
    "MEMBERS_PATH",
    "OCCUPIED",
    "PROTOCOL_VERSION",
    "Add",
    "Answer",
    "Barrier",
    "Beat",
    "Cancel",
    "Compare",
    "Count",
    "Delete",
    "Done",
    "Formed",
    "Gather",
    "Get",
    "Hello",
    "Int64",
    "Join",
    "Leave",
    "List",
    "MalformedMessageError",
    "MemberId",
    "Name",
    "Names",
    "Notice",
    "Notices",
    "Number",
    "Progress",
    "Refused",
    "Request",
    "RequestId",
    "Resume",
    "Roster",
    "Seconds",
    "Seen",
    "Set",
    "Value",
    "Values",
    "Welcome",
    "decode_answer",
    "decode_request",
    "encode",
]

PROTOCOL_VERSION: Final = 5
MEMBERS_PATH: Final = "/api/v1/members"
MARK_HEADER: Final = "X-Aiodist-Rendezvous"
"""Stands in every HTTP answer of our server, so that its refusals are told from a stranger's."""
BEAT_PROGRESS: Final = 8
"""Groups that a heartbeat tells of at most."""
JOB_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]{0,127}\Z")
"""What a job may be called: it stands in addresses and log lines."""
LIST_NAMES: Final = 1000
"""How many names one answer to `List` holds at most."""
OCCUPIED: Final = "occupied"
"""The code of a join's refusal by a world without connected members: it may soon be over, so the join may be tried again."""

RequestId: TypeAlias = Annotated[int, Meta(ge=1, lt=2**53)]
Int64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=4096)]
MemberId: TypeAlias = Annotated[str, Meta(min_length=8, max_length=64)]
"""Who has it may take the member's place: it is random, and shown to nobody."""


class MalformedMessageError(ValueError):
    """Raised when a frame is not a message of this protocol; the text says what is wrong with it."""


class _Message(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower, omit_defaults=True):
    pass


class Hello(_Message, frozen=True):
    """A client's first words."""

    version: int


class Join(_Message, frozen=True):
    """Take part in forming a world.

    Attributes:
        member: A random id of this member; a join with the same id is the same join sent again.
        rank: The wanted rank, or None for any.
        after: The generation this process was last a member of; 0 for a fresh process.
        spent: Seconds of the timeout that were over when this was sent (again); the same in other requests.
    """

    id: RequestId
    job: Name
    member: MemberId
    world_size: int
    rank: int | None
    info: dict[str, Any]
    timeout: Seconds
    after: Count = 0
    spent: Seconds = 0.0


class Resume(_Message, frozen=True):
    """Take up, over this connection, the place of a member that joined; answered by `Done`.

    Attributes:
        generation: Of the world that the member is in.
        pending: The numbers of its requests that were not answered: of all others it has seen the answer.
    """

    id: RequestId
    job: Name
    member: MemberId
    generation: Count
    pending: list[RequestId]


class Seen(_Message, frozen=True):
    """The member has the answers to these requests; not answered."""

    ids: list[RequestId]


class Set(_Message, frozen=True):
    """Give a key a value."""

    id: RequestId
    key: Name
    value: bytes


class Get(_Message, frozen=True):
    """Give the key's value as soon as it has one."""

    id: RequestId
    key: Name
    timeout: Seconds
    spent: Seconds = 0.0


class Add(_Message, frozen=True):
    """Add to a decimal number; an absent key counts as 0. Answered by the sum."""

    id: RequestId
    key: Name
    amount: Int64


class Compare(_Message, frozen=True):
    """Set the key if it holds ``expected`` (None: if it is absent). Answered by what it holds then."""

    id: RequestId
    key: Name
    expected: bytes | None
    value: bytes


class Delete(_Message, frozen=True):
    """Answered by the number of keys deleted, 0 or 1."""

    id: RequestId
    key: Name


class List(_Message, frozen=True):
    """Give the names of the keys that begin so, in order, from the first one behind ``after``: `LIST_NAMES` of them at most."""

    id: RequestId
    prefix: Annotated[str, Meta(max_length=4096)]
    after: Annotated[str, Meta(max_length=4096)] = ""


class Barrier(_Message, frozen=True):
    """Wait until every member of the world has sent the same."""

    id: RequestId
    name: Name
    timeout: Seconds
    spent: Seconds = 0.0


class Gather(_Message, frozen=True):
    """Bring a value and get those of all ``members`` once each of them has sent the same name and members.

    Attributes:
        members: Ranks of the world in an order, the sender's among them.
    """

    id: RequestId
    name: Name
    members: list[Count]
    value: bytes
    timeout: Seconds
    spent: Seconds = 0.0


class Progress(msgspec.Struct, frozen=True):
    """Where a member is in a group.

    Attributes:
        group: The group's name.
        seq: Number of the latest call, from 0; -1 before the first.
        collective: Its name.
        site: The line that made it, ``file:line``.
    """

    group: Annotated[str, Meta(max_length=256)]
    seq: Annotated[int, Meta(ge=-1, le=2**63 - 1)]
    collective: Annotated[str, Meta(max_length=64)]
    site: Annotated[str, Meta(max_length=512)]


class Beat(_Message, frozen=True):
    """A heartbeat, every second; not answered."""

    progress: Annotated[list[Progress], Meta(max_length=BEAT_PROGRESS)] = []


class Leave(_Message, frozen=True):
    """Say goodbye; a reason makes it a failure that every other member is told."""

    id: RequestId
    reason: Annotated[str, Meta(max_length=65536)] | None = None


class Cancel(_Message, frozen=True):
    """Withdraw the request of that number; not answered."""

    id: RequestId


Request: TypeAlias = Hello | Join | Resume | Seen | Set | Get | Add | Compare | Delete | List | Barrier | Gather | Leave | Cancel | Beat


class Welcome(_Message, frozen=True):
    """The server's first words, with the sizes it accepts."""

    version: int
    max_key_nbytes: int
    max_value_nbytes: int


class Roster(_Message, frozen=True):
    """Every rank's info, indexed by rank; comes before `Formed` and is the same bytes for all members."""

    members: list[dict[str, Any]]


class Formed(_Message, frozen=True):
    """The world has formed: the member's place in it."""

    id: int
    rank: int
    world_size: int
    generation: int


class Done(_Message, frozen=True):
    """The request of that number was carried out."""

    id: int


class Value(_Message, frozen=True):
    """A key's value (None: absent), and for a compare-and-set whether it took place."""

    id: int
    value: bytes | None
    swapped: bool = False


class Values(_Message, frozen=True):
    """What all members of a gather brought, in the order of its members."""

    id: int
    values: list[bytes]


class Names(_Message, frozen=True):
    """Names of keys, in order."""

    id: int
    names: list[str]


class Number(_Message, frozen=True):
    """The request of that number was carried out, and gave a number."""

    id: int
    number: int


class Refused(_Message, frozen=True):
    """The request of that number failed; number 0 concerns the connection.

    Attributes:
        code: ``"argument"`` for a wrong argument, `OCCUPIED`; any other word is for logs.
        ranks: The ranks that the text is about (missing, lost), in order.
    """

    id: int
    code: str
    text: str
    ranks: list[int] = []


class Notice(_Message, frozen=True):
    """What befell another member of the world.

    Attributes:
        kind: ``"lost"``: its connection ended without a goodbye. ``"left"``: it said goodbye. ``"failed"``: it said why it fails.
        rank: Its rank in the world.
        reason: Why, as a text.
        info: What it told the others when it joined.
    """

    kind: Literal["lost", "left", "failed"]
    rank: int
    reason: str
    info: dict[str, Any]


class Notices(_Message, frozen=True):
    """What befell other members since the last such message."""

    notices: list[Notice]


Answer: TypeAlias = Welcome | Roster | Formed | Done | Value | Values | Names | Number | Refused | Notices

_encoder: Final = msgspec.msgpack.Encoder()
_request_decoder: Final = msgspec.msgpack.Decoder(Request)
_answer_decoder: Final = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    """Return the frame of a message."""
    return _encoder.encode(message)


def decode_request(frame: bytes) -> Request:
    """Read what a member sent.

    Raises:
        MalformedMessageError: the frame is no request.
    """
    try:
        request: Request = _request_decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedMessageError(str(error)) from None
    return request


def decode_answer(frame: bytes) -> Answer:
    """Read what a server sent.

    Raises:
        MalformedMessageError: the frame is no answer.
    """
    try:
        answer: Answer = _answer_decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedMessageError(str(error)) from None
    return answer
