"""What the ranks print: prefixed by whole lines, and written by threads of their own.

`LinePrefixer` turns the bytes of one stream of one rank into complete, prefixed lines. `Sink` is one destination of the launcher: it
takes everything at once and writes it from its own thread, so a slow terminal or pipe holds up neither the ranks nor the supervisor.
`Relay` carries a stream of a rank through the one to the other, on the supervisor's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import select
import tempfile
import threading
import unicodedata
from collections import deque
from collections.abc import Callable
from typing import IO, Any, Final

__all__ = ["MAX_LINE", "LinePrefixer", "Relay", "Sink", "destination"]

MAX_LINE: Final = 4 << 20
"""Bytes after which a line without an end is broken, so that a rank that never ends one costs bounded memory."""

_MEMORY_LIMIT: Final = 16 << 20  # bytes waiting in memory; what comes after goes to an unlinked file
_FILE_LIMIT: Final = 4 << 30  # bytes waiting in that file before the ranks are made to wait
_CHUNK: Final = 1 << 16
_DRAFT_SECONDS: Final = 0.05  # pause between redraws of an incomplete line
_FULL_SECONDS: Final = 0.05  # pause before a full sink is looked at again
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_ENDS: Final = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a carriage return at the very end may be half of \r\n: wait for more


def _clean(data: bytes) -> bytes:
    return data.decode("utf-8", "replace").encode()


class LinePrefixer:
    """Turns the bytes of one stream into whole lines that each start with `prefix`.

    A line is passed on once it is complete, so no line is mixed with another's and no character is cut. Bytes that are not UTF-8
    become U+FFFD. An update of a progress bar (text that ends in a carriage return) is a line of its own in a file or pipe; for a
    terminal it is only the `draft`, which the next update replaces.

    Args:
        prefix: What each line starts with.
        terminal: Whether the destination is a terminal.
    """

    def __init__(self, prefix: bytes, *, terminal: bool = False) -> None:
        self._prefix = prefix
        self._terminal = terminal
        self._pending = bytearray()
        self._update = b""

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream and return the lines that they complete."""
        if b"\n" not in data and b"\r" not in data and not self._pending.endswith(b"\r"):
            self._pending += data
            return self._broken() if len(self._pending) > MAX_LINE else b""
        text = bytes(self._pending) + data
        ready, end = bytearray(), 0
        if b"\r" in text:
            for match in _ENDS.finditer(text):
                ready += self._line(text[end : match.start()], match.group())
                end = match.end()
        elif b"\n" in text:
            end = text.rindex(b"\n") + 1
            ready += self._prefix + _clean(text[: end - 1]).replace(b"\n", b"\n" + self._prefix) + b"\n"
            self._update = b""
        self._pending = bytearray(text[end:])
        return bytes(ready) + (self._broken() if len(self._pending) > MAX_LINE else b"")

    def finish(self) -> bytes:
        """The stream ended: return its last line when it had no end."""
        text, ended = bytes(self._pending), self._pending.endswith(b"\r")
        self._pending.clear()
        if self._terminal and not text.strip():
            text = self._update if self._update.strip() else text
        self._update = b""
        if not text.strip(b"\r"):
            return b""
        return self._prefix + _clean(text.rstrip(b"\r")) + (b"\r\n" if ended and not self._terminal else b"\n")

    @property
    def draft(self) -> str:
        """The text of the line that is not complete yet, without the prefix."""
        return (bytes(self._pending).rstrip(b"\r") or self._update).decode("utf-8", "ignore")

    def _line(self, text: bytes, end: bytes) -> bytes:
        if end == b"\r":
            if self._terminal:
                self._update = text or self._update
                return b""
            return self._prefix + _clean(text) + b"\r\n" if text else b""
        self._update = b""
        return self._prefix + _clean(text) + end

    def _broken(self) -> bytes:
        cut = MAX_LINE
        while cut > MAX_LINE - 4 and self._pending[cut] & 0xC0 == 0x80:  # not inside a character
            cut -= 1
        line = self._prefix + _clean(bytes(self._pending[:cut])) + b"\n"
        del self._pending[:cut]
        return line


def _clip(text: str, columns: int) -> str:
    """Return the longest beginning of `text` that fits on one row of `columns` cells, without colours and controls."""
    room, kept = columns, []
    for char in _ESCAPE.sub("", text):
        char = " " if char == "\t" else char
        if unicodedata.category(char) == "Cc":
            continue
        room -= 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if room < 0:
            break
        kept.append(char)
    return "".join(kept)


def _fd_writer(fd: int) -> Callable[[bytes], None]:
    """Return a function that writes all of its argument to `fd`, also when that is in non-blocking mode."""

    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(fd, view[:_CHUNK]) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(fd, select.POLLOUT)
                poll.poll(1000)

    return write


def _text_writer(stream: IO[Any]) -> Callable[[bytes], None]:
    """Return a function that writes to a text stream without a descriptor (a notebook's, a test's)."""

    def write(data: bytes) -> None:
        stream.write(data.decode("utf-8", "replace"))
        stream.flush()

    return write


def destination(stream: IO[Any] | None) -> tuple[object, Callable[[bytes], None], Callable[[], int] | None]:
    """Return what identifies the file behind a stream, how to write to it, and how wide it is when it is a terminal."""
    if stream is None:  # the launcher was started with this descriptor closed
        return None, lambda data: None, None
    try:
        stream.flush()
        fd = stream.fileno()
        status = os.fstat(fd)
    except (OSError, ValueError, AttributeError):
        return id(stream), _text_writer(stream), None

    def columns() -> int:
        with contextlib.suppress(OSError):
            return os.get_terminal_size(fd).columns or 80
        return 80

    return (status.st_dev, status.st_ino), _fd_writer(fd), columns if os.isatty(fd) else None


class _Spool:
    """First in, first out, for bytes: in memory, and behind that in an unlinked file."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._memory: deque[bytes] = deque()
        self._size = 0
        self._late: deque[bytes] = deque()  # what came after the file and found no room on the disk
        self._file: IO[bytes] | None = None
        self._read = self._written = 0
        self._closed = False

    @property
    def full(self) -> bool:
        return self._written - self._read > _FILE_LIMIT or self._size > 2 * _MEMORY_LIMIT

    def put(self, data: bytes) -> None:
        with self._changed:
            behind = self._written > self._read
            to_file = not self._late and (behind or self._size > _MEMORY_LIMIT) and self._to_file(data)
            if not to_file:
                (self._late if behind else self._memory).append(data)
                self._size += len(data)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def get(self) -> bytes | None:
        """Wait for the next bytes; None once the spool is closed and empty."""
        with self._changed:
            while not self._memory and self._written == self._read and not self._closed:
                self._changed.wait()
            if self._memory:
                data = self._memory.popleft()
                self._size -= len(data)
                return data
            return self._from_file()

    def _to_file(self, data: bytes) -> bool:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 -- lives as long as the spool
            done = 0
            while done < len(data):
                done += os.pwrite(self._file.fileno(), memoryview(data)[done:], self._written + done)
        except OSError:  # no room for it on disk
            return False
        self._written += len(data)
        return True

    def _from_file(self) -> bytes | None:
        if self._file is None:
            return None
        data = os.pread(self._file.fileno(), min(1 << 20, self._written - self._read), self._read)
        self._read += len(data)
        if self._read == self._written:
            self._file.truncate(0)
            self._read = self._written = 0
            self._memory, self._late = self._late, self._memory
        if self._closed and not data:
            self._file.close()
        return data or None


class Sink:
    """One destination of output, written by a thread of its own in the order of the calls.

    Args:
        write: Writes all bytes it is given; may block.
        columns: For a terminal, returns its width; None for a file or pipe.
        on_error: Called from the thread at the first error of `write`; what comes after it is dropped.
        on_end: Called from the thread when it ended.
    """

    def __init__(
        self,
        write: Callable[[bytes], None],
        *,
        columns: Callable[[], int] | None = None,
        on_error: Callable[[OSError], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self._write = write
        self._columns = columns
        self._on_error = on_error
        self._on_end = on_end
        self._spool = _Spool()
        self._draft: tuple[object, bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="aiodist-output", daemon=True)
        self._thread.start()

    @property
    def terminal(self) -> bool:
        """Whether this is a terminal."""
        return self._columns is not None

    @property
    def full(self) -> bool:
        """Whether so much waits that the ranks should wait too."""
        return self._spool.full

    def lines(self, owner: object, data: bytes) -> None:
        """Write complete lines; on a terminal they replace the draft of `owner` and go above another's."""
        if self._draft is None:
            self._spool.put(data)
            return
        if self._draft[0] is owner:
            self._draft = None
        self._spool.put(b"\r\x1b[K" + data + (self._draft[1] if self._draft else b""))

    def draft(self, owner: object, prefix: str, text: str) -> None:
        """On a terminal, show the incomplete line of `owner` on the bottom row."""
        if self._columns is not None and text.strip():
            row = _clip(prefix + text, max(self._columns() - 1, 1)).encode()
            if (owner, row) != self._draft:
                self._draft = (owner, row)
                self._spool.put(b"\r\x1b[K" + row)

    def close(self) -> None:
        """Let the thread end when everything is written. Does not wait."""
        if self._draft is not None:
            self.lines(self._draft[0], b"")
        self._spool.close()

    def _run(self) -> None:
        failed = False
        while (data := self._spool.get()) is not None:
            if failed:
                continue
            try:
                self._write(data)
            except (OSError, ValueError) as error:  # ValueError: a Python stream that was closed
                failed = True
                if self._on_error is not None:
                    self._on_error(error if isinstance(error, OSError) else OSError(errno.EBADF, str(error)))
        if self._on_end is not None:
            self._on_end()


class Relay:
    """Carries one output stream of one rank to a sink. Belongs to the running loop.

    Args:
        pipe: The stream's end of the launcher; the relay closes it.
        label: What each line starts with.
        sink: Where the lines go.
        on_end: Called when the stream ended.
    """

    def __init__(self, pipe: IO[bytes], label: str, sink: Sink, on_end: Callable[[], None]) -> None:
        self._pipe = pipe
        self._label = label
        self._sink = sink
        self._on_end = on_end
        self._lines = LinePrefixer(label.encode(), terminal=sink.terminal)
        self._loop = asyncio.get_running_loop()
        self._drawing: asyncio.TimerHandle | None = None
        self.ended = False
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe.fileno(), self._ready)

    def drain(self, limit: int = 1 << 20) -> None:
        """Take what the stream holds now, up to `limit` bytes."""
        while limit > 0 and not self.ended:
            try:
                data = os.read(self._pipe.fileno(), _CHUNK)
            except BlockingIOError:
                return
            limit -= len(data)
            self._take(data)

    def close(self) -> None:
        """Stop reading, also when a process still holds the stream; the last line is written."""
        if not self.ended:
            self.ended = True
            if self._drawing is not None:
                self._drawing.cancel()
            self._loop.remove_reader(self._pipe.fileno())
            self._put(self._lines.finish())
            self._pipe.close()
            self._on_end()

    def _ready(self) -> None:
        if self._sink.full:
            self._loop.remove_reader(self._pipe.fileno())
            self._loop.call_later(_FULL_SECONDS, self._resume)
        else:
            self.drain(_CHUNK)

    def _resume(self) -> None:
        if not self.ended:
            self._loop.add_reader(self._pipe.fileno(), self._ready)

    def _take(self, data: bytes) -> None:
        if not data:
            self.close()
            return
        self._put(self._lines.feed(data))
        if self._sink.terminal and self._drawing is None:
            self._drawing = self._loop.call_later(_DRAFT_SECONDS, self._draw)

    def _put(self, data: bytes) -> None:
        if data:
            self._sink.lines(self, data)

    def _draw(self) -> None:
        self._drawing = None
        self._sink.draft(self, self._label, self._lines.draft)
