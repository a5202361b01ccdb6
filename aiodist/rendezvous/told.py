"""Answers that are kept until their member has them: what is sent again, because its answer was lost, is not carried out again."""

from __future__ import annotations

from dataclasses import dataclass

from aiodist.rendezvous.messages import Done, Number, Value, Values

__all__ = ["Result", "Told"]


@dataclass(slots=True, eq=False)
class Result:
    """What a gather gave, held once for all its members."""

    number: int
    values: list[bytes]
    holders: int = 0


@dataclass(frozen=True, slots=True)
class Told:
    """An answer that its member may not have got, kept to be given again."""

    answer: Done | Number | Value | Values
    result: Result | None = None

    @property
    def pieces(self) -> int:
        """What it counts in `Limits.answers`."""
        held = (
            self.answer.values if isinstance(self.answer, Values) else [self.answer.value or b""] if isinstance(self.answer, Value) else []
        )
        return 1 + sum(len(value) for value in held) // 4096
