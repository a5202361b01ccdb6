"""A number and what it should be."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One number.

    Attributes:
        what: What was measured.
        value: The number; None where it could not be.
        unit: Its unit.
        due: Meets the target; None where there is none.
        stretch: Meets the ambition beyond it.
        least: The value must be at least that, not at most.
    """

    what: str
    value: float | None
    unit: str = ""
    due: float | None = None
    stretch: float | None = None
    least: bool = False

    @property
    def verdict(self) -> str:
        """``stretch``, ``met``, ``NOT MET`` or ``unknown``; where no target is due ``stretch`` or nothing."""
        if self.value is None:
            return "unknown"
        sign = -1 if self.least else 1
        if self.stretch is not None and sign * self.value <= sign * self.stretch:
            return "stretch"
        if self.due is None:
            return ""
        return "met" if sign * self.value <= sign * self.due else "NOT MET"

    @property
    def targets(self) -> dict[str, str]:
        """The limits as text, by ``due`` and ``stretch``, of those that there are."""
        relation = ">=" if self.least else "<="
        limits = {"due": self.due, "stretch": self.stretch}
        return {word: f"{relation} {digits(limit)}" for word, limit in limits.items() if limit is not None}

    def number(self) -> str:
        """Return the value and its unit as text."""
        return "not measured" if self.value is None else f"{digits(self.value)} {self.unit}".strip()

    def __str__(self) -> str:
        return f"{self.verdict:<8} {self.what}: " + ", ".join([self.number(), *(f"{word} {limit}" for word, limit in self.targets.items())])

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the verdict as JSON types."""
        return asdict(self) | {"verdict": self.verdict}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Finding:
        """Return what `to_json` gave."""
        return cls(**{name: value for name, value in fields.items() if name != "verdict"})


def digits(number: float) -> str:
    """Return a number with three digits that count, or all before the point."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"
