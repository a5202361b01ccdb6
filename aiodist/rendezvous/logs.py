"""What the server logs: events with fields, and how they become lines of JSON."""

from __future__ import annotations

import logging
import time
from typing import Any, Final, NamedTuple

import msgspec

__all__ = ["Event", "JsonLines", "log_event", "one_line"]

_FIELDS: Final = ("event", "job", "generation", "rank", "host", "pid", "reason")


class Event(NamedTuple):
    """Something that happened to a job or to a member of it.

    Attributes:
        event: ``joined``, ``withdrew`` (before its world formed), ``formed``, ``refused`` (a newcomer), ``unformed`` (the formation
            failed), or a member's end: ``lost``, ``left``, ``failed``. A member that is ``stalled`` or ``stuck`` may have ``resumed``
            later, and one that is ``away``, because its connection broke, may have ``returned``; the
            latter is lost otherwise. ``restored`` is a world that an earlier server had written down: its members are away.
        rank: The rank, or the wanted one before the world has formed; None where it is not known.
    """

    event: str
    job: str
    generation: int
    rank: int | None = None
    host: str | None = None
    pid: int | None = None
    reason: str | None = None


def log_event(log: logging.Logger, event: Event) -> None:
    """Log an event: a text for people, and its parts as fields of the record."""
    if not log.isEnabledFor(logging.INFO):
        return
    who = f" {event.host or '?'}:{event.pid or '?'}" if event.host or event.pid else ""
    rank = "" if event.rank is None else f" rank {event.rank}"
    why = f": {one_line(event.reason)}" if event.reason else ""
    log.info("job %s: %s%s%s%s", event.job, event.event, rank, who, why, extra=event._asdict())


def one_line(text: str) -> str:
    """The text with whatever could begin a line of the log, or command a terminal, written as an escape."""
    return text if text.isprintable() else repr(text)[1:-1]


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, text, and the fields of an event that the record carries."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": record.getMessage().encode("utf-8", "backslashreplace").decode(),
        }
        line |= {field: value for field in _FIELDS if (value := getattr(record, field, None)) is not None}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=repr).decode()
