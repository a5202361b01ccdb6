"""What the launcher and its ranks hand each other, in memory that only they have: a function with its arguments, and what came of it."""

from __future__ import annotations

import importlib
import inspect
import io
import marshal
import operator
import os
import pickle
import sys
import time
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import CodeType
from typing import Any, ClassVar, Self, TypeVar

import cloudpickle

__all__ = ["Call", "Outcome", "memory", "put", "take"]

T = TypeVar("T")


@contextmanager
def memory(name: str) -> Iterator[int]:
    """Give the descriptor of new anonymous memory: who inherits it may read and write there, and nobody else finds it.

    Unlike a pipe it holds everything at once: nobody has to read while ranks run.
    """
    fd = os.memfd_create(f"aiodist {name}")
    try:
        yield fd
    finally:
        os.close(fd)


def put(fd: int, value: Call | Outcome) -> None:
    """Write into memory, in place of what is there."""
    with open(f"/proc/self/fd/{fd}", "wb") as file:  # a position of its own, where the descriptor's is shared
        pickle.dump(value, file)


def take(fd: int, kind: type[T]) -> T | None:
    """Return what was put into memory; None where nothing was, or not all of it."""
    with open(f"/proc/self/fd/{fd}", "rb") as file:
        try:
            value = pickle.load(file)
        except (EOFError, pickle.UnpicklingError):
            return None
    return value if isinstance(value, kind) else None


@dataclass(frozen=True, slots=True)
class Call:
    """A function with its arguments.

    Attributes:
        argv: The launching program's arguments.
        place: Module and name of the function where the ranks can import it, else None.
        wrapped: Whether the launcher, or something else that decorates the function, is there.
        content: Function (None where it is imported), arguments and keyword arguments, pickled.
    """

    argv: list[str]
    place: tuple[str, str] | None
    wrapped: bool
    content: bytes

    @classmethod
    def of(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """Pack a call.

        Raises:
            TypeError: something in it can not be pickled.
        """
        place = _place(func)
        wrapped = place is not None and _find(*place) is not func
        try:
            content = _dumps((None if place else func, args, kwargs), "the function or an argument")
        except TypeError as error:
            raise TypeError(f"{error}{_culprit(func, args, kwargs)}") from error
        return cls(list(sys.argv), place, wrapped, content)

    def load(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Unpack it, in the process that is to make it."""
        func, args, kwargs = pickle.loads(self.content)
        if self.place is not None:
            func = _find(*self.place)
            func = func.__wrapped__ if self.wrapped else func
        elif func.__module__ == "__main__":
            # The script is not run again. What the function uses of it can be found where it was, for pickle's sake.
            new = {name: value for name, value in getattr(func, "__globals__", {}).items() if not name.startswith("__")}
            sys.modules["__main__"].__dict__.update(new)
        return func, args, kwargs


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank returned or raised.

    Attributes:
        failed: Whether it raised.
        time: When, on the monotonic clock that all processes of a machine share.
        text: The traceback.
        content: The value or the exception, pickled; empty where it can not be.
    """

    failed: bool
    time: float
    text: str
    content: bytes

    @classmethod
    def of(cls, value: object) -> Self:
        """Pack a result.

        Raises:
            TypeError: it can not be pickled.
        """
        return cls(False, time.monotonic(), "", _dumps(value, "the result"))

    @classmethod
    def of_error(cls, error: BaseException, time: float, skip: str) -> Self:
        """Pack an exception; at least its text survives, which begins behind the frames of the file `skip`."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == skip:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace))
        try:
            return cls(True, time, text, _dumps(error, "the exception"))
        except TypeError:
            return cls(True, time, text, b"")

    def load(self) -> Any:
        """Unpack the value or exception."""
        return pickle.loads(self.content)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Keeps the names of source files, which errors tell of: both ends run the same Python."""

    dispatch_table: ClassVar[ChainMap[type, Any]] = ChainMap(
        {CodeType: lambda code: (marshal.loads, (marshal.dumps(code),))}, cloudpickle.Pickler.dispatch_table
    )


def _dumps(value: object, what: str) -> bytes:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
        return buffer.getvalue()
    except Exception as error:  # what is inside decides what pickling it may raise
        raise TypeError(f"{what} can not be pickled: {error}") from error


def _culprit(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Say which of the things that travel can not be pickled by itself."""
    parts = {f"argument {place!r}": value for place, value in (*enumerate(args), *kwargs.items())}
    with suppress(TypeError, ValueError):  # no function of Python, or one that uses what is not there yet
        used = inspect.getclosurevars(func)
        names = (*used.globals.items(), *used.nonlocals.items())
        parts |= {f"{name!r}, which the function uses": value for name, value in names}
    for what, value in parts.items():
        try:
            _dumps(value, what)
        except TypeError:
            return f" (in {what})"
    return ""


def _place(func: Callable[..., Any]) -> tuple[str, str] | None:
    """Return module and name where they lead to the function, or to what decorates it."""
    module, name = getattr(func, "__module__", None), getattr(func, "__qualname__", "<locals>")
    if module not in sys.modules or module == "__main__" or "<locals>" in name:
        return None
    try:
        found = _find(module, name)
    except AttributeError:
        return None
    return (module, name) if found is func or getattr(found, "__wrapped__", None) is func else None


def _find(module: str, name: str) -> Any:
    return operator.attrgetter(name)(importlib.import_module(module))
