"""A machine's profile: how groups of some numbers of ranks cut their messages, read from the file that AIODIST_TUNING names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from aiodist import _core

__all__ = ["FORMAT", "Profile", "Row", "check_rows", "read_profile", "write_profile"]

FORMAT: Final = 1

_STAGING_MOST: Final = 256 << 20


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tuning of groups of `ranks` members.

    Attributes:
        ranks: Number of members.
        slots: Small calls that a member may have in flight.
        slot_nbytes: Largest small call: up to here a call's bytes travel beside its header.
        segment_nbytes: Piece of a large call that is moved at once.
        depth: Segments of a rank's share that are staged at once.
    """

    ranks: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    slots: Annotated[int, msgspec.Meta(ge=2, le=256)]
    slot_nbytes: Annotated[int, msgspec.Meta(ge=64, le=1 << 20, multiple_of=64)]
    segment_nbytes: Annotated[int, msgspec.Meta(ge=4096, le=4 << 20, multiple_of=4096)]
    depth: Annotated[int, msgspec.Meta(ge=2, le=256)]

    def __post_init__(self) -> None:
        if self.staging_nbytes > _STAGING_MOST:
            raise ValueError(
                f"ranks * segment_nbytes * depth is {self.staging_nbytes}: every rank would stage that much, the most is {_STAGING_MOST}"
            )

    @property
    def staging_nbytes(self) -> int:
        """Bytes that a rank stages for large calls."""
        return self.ranks * self.segment_nbytes * self.depth

    @property
    def tuning(self) -> _core.Tuning:
        """The row as the core takes it."""
        return self.slots, self.slot_nbytes, self.segment_nbytes, self.depth

    @classmethod
    def default(cls, ranks: int) -> Row:
        """Return what groups of `ranks` members have without a profile."""
        return cls(ranks, *_core.default_tuning(ranks))


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `aiodist bench --tune` writes.

    Attributes:
        format: Version of this form.
        tunings: A row for each number of ranks that was measured; other groups have the default.
        machine: What it was measured on, for people.
    """

    format: Literal[1]
    tunings: Annotated[list[Row], msgspec.Meta(max_length=64)]
    machine: dict[str, str | int] = {}

    def __post_init__(self) -> None:
        ranks = [row.ranks for row in self.tunings]
        twice = sorted({one for one in ranks if ranks.count(one) > 1})
        if twice:
            raise ValueError(f"tunings has more than one row for {twice[0]} ranks")


def read_profile(path: str | Path) -> Profile:
    """Read a profile.

    Raises:
        ValueError: the file can not be read or holds no profile; the text names the file and the field.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Profile)
    except OSError as error:
        raise ValueError(f"the tuning profile {str(path)!r} can not be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"the tuning profile {str(path)!r} is wrong: {error}") from None


def write_profile(path: str | Path, profile: Profile) -> None:
    """Write a profile as `read_profile` reads it."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")


def check_rows(rows: Iterable[tuple[Any, ...]]) -> list[Row]:
    """Return the rows whose values another rank told, checked like a file's.

    Raises:
        ValueError: they make no sense.
    """
    return msgspec.convert([dict(zip(Row.__struct_fields__, row, strict=True)) for row in rows], list[Row])
