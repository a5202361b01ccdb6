"""The file that a rendezvous writes its worlds to, so that the next server on its address goes on with them."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from aiodist.rendezvous.job import Limits
from aiodist.rendezvous.records import SCHEMA, Change, Saved, revive

__all__ = ["Journal", "JournalError"]

_FORMAT: Final = 1
_APPLICATION: Final = 0x61696F64  # "aiod"
_CLOSE_S: Final = 10.0
_log = logging.getLogger("aiodist.rendezvous")


class JournalError(OSError):
    """Raised when the state of a rendezvous can not be read or written; the text names the file."""


class _Batch(NamedTuple):
    changes: list[Change]
    then: Callable[[], None]


class Journal:
    """One directory's state file, ``rendezvous.sqlite``, which one server at a time may have open.

    Changes are written by a thread of its own, as many as have come up in one transaction, so that a slow disk delays answers but
    nothing else. Files can be read by their owner only: who knows a member's id may take its place.

    Args:
        directory: Made if it is not there.

    Raises:
        JournalError: another server uses the directory, the file is damaged or of another version, or it can not be used.
    """

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, "rendezvous.sqlite")
        self._lock = _lock(directory)
        try:
            self._database = self._open()
        except BaseException:
            os.close(self._lock)
            raise
        self._queue: list[_Batch] = []
        self._wake = threading.Condition()
        self._closed = False
        self._outstanding = 0
        self._thread: threading.Thread | None = None

    def load(self, limits: Limits) -> Saved:
        """Read what is there.

        Raises:
            JournalError: the file is damaged.
        """
        try:
            return revive(self._database.execute, limits)
        except sqlite3.OperationalError as error:
            raise JournalError(f"can not use the state file {self.path}: {error}") from None
        except (sqlite3.Error, ValueError, LookupError, TypeError) as error:
            raise _damaged(self.path, error) from None

    def start(self, failed: Callable[[JournalError], None]) -> None:
        """Write from now on; to be called in the event loop that `write` is called in, where `failed` is called at most once."""
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop, failed), name="aiodist-journal", daemon=True)
        self._thread.start()

    def write(self, changes: list[Change], then: Callable[[], None]) -> None:
        """Call ``then`` once these changes and all earlier ones are on the disk: at once where nothing is to be written."""
        if not changes and not self._outstanding:
            then()
            return
        self._outstanding += 1
        with self._wake:
            self._queue.append(_Batch(changes, then))
            self._wake.notify()

    def close(self) -> None:
        """Write what was given and let go of the directory."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
        if self._thread is None or not self._thread.is_alive():
            self._database.close()
            os.close(self._lock)

    def _run(self, loop: asyncio.AbstractEventLoop, failed: Callable[[JournalError], None]) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closed)
                batches, self._queue = self._queue, []
            if not batches:
                return
            try:
                self._commit(batches)
            except sqlite3.Error as error:
                # What was promised to nobody yet is not promised at all: the server ends, and the members look for the next one.
                failure = JournalError(f"can not write the state file {self.path}: {error}")
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(failed, failure)
                return
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._done, batches)

    def _commit(self, batches: list[_Batch]) -> None:
        self._database.execute("BEGIN IMMEDIATE")
        for batch in batches:
            for statement, values in batch.changes:
                self._database.execute(statement, values)
        self._database.execute("COMMIT")

    def _done(self, batches: Iterable[_Batch]) -> None:
        for batch in batches:
            self._outstanding -= 1
            batch.then()

    def _open(self) -> sqlite3.Connection:
        try:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            database = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise JournalError(f"can not use the state file {self.path}: {error}") from None
        try:
            self._prepare(database)
        except BaseException:
            database.close()
            raise
        return database

    def _prepare(self, database: sqlite3.Connection) -> None:
        try:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            (application,) = database.execute("PRAGMA application_id").fetchone()
            (pages,) = database.execute("PRAGMA page_count").fetchone()
            if pages and (application, version) != (_APPLICATION, _FORMAT):
                raise JournalError(f"{self.path} is no state file of this version of aiodist: give another directory")
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise _damaged(self.path, verdict)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")  # a reply promises what it says, through a power cut too
            if not pages:
                _create(database)
        except sqlite3.OperationalError as error:
            raise JournalError(f"can not use the state file {self.path}: {error}") from None
        except sqlite3.Error as error:
            raise _damaged(self.path, error) from None


def _create(database: sqlite3.Connection) -> None:
    database.execute("BEGIN IMMEDIATE")
    for statement in (*SCHEMA, f"PRAGMA application_id = {_APPLICATION}", f"PRAGMA user_version = {_FORMAT}"):
        database.execute(statement)
    database.execute("COMMIT")


def _damaged(path: str, why: object) -> JournalError:
    return JournalError(f"the state file {path} is damaged ({why}): move it away to begin without it")


def _lock(directory: str) -> int:
    """Take the directory for this process; the kernel lets go of it when the process ends, however it ends."""
    path = os.path.join(directory, "rendezvous.lock")
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise JournalError(f"can not use the state directory {directory}: {error}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(lock, 20, 0).decode(errors="replace").strip()
        os.close(lock)
        raise JournalError(f"the state directory {directory} is in use by another rendezvous, process {holder or '?'}") from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    return lock
