"""The blocking face of `aiodist.AllreduceCallback`."""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np

from aiodist import buckets
from aiodist.ops.checks import reason_of
from aiodist.sync.futures import TensorFuture
from aiodist.sync.group import WORLD, AnyGroup, as_async, check_group
from aiodist.sync.session import run

__all__ = ["AllreduceCallback"]

_METHODS: Final = ("sum", "mean")


class AllreduceCallback:
    """Reduces gradients over a group in buckets, while the computation of others goes on.

    Call it with each gradient of a step; then get their futures, or `flush`::

        callback = make_allreduce_cb("mean")
        for batch in batches:
            futures = {name: callback(name, gradient) for name, gradient in backward(batch)}
            gradients = {name: future.get() for name, future in futures.items()}

    The first step tells which parameters there are, and so is reduced at its end; from then on a bucket starts as soon as it is full. In
    later steps a parameter may be left out, on some ranks or all: it counts as zeros, and ranks that left it out find its gradient in what
    `flush` returns. A rank without any gradient in a step gives zeros for one. Parameters that are not given by name are told apart by
    identity, so they are changed in place, and are matched by the order of their first gradients, which then is the same on all ranks.
    Until a step is flushed make no other calls on the group. What goes wrong raises as in `aiodist.AllreduceCallback`.

    Args:
        reduce_method: ``"sum"`` or ``"mean"``; a mean of integers is float64.
        group: The group to reduce over.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    def __init__(self, reduce_method: str, group: AnyGroup = WORLD) -> None:
        if not isinstance(reduce_method, str):
            raise TypeError(f"reduce_method must be a string, not {type(reduce_method).__name__}")
        if reduce_method.lower() not in _METHODS:
            raise ValueError(f"reduce_method must be 'sum' or 'mean', not {reduce_method!r}")
        check_group(group)
        self._method = reduce_method.lower()
        self._group = group
        self._lock = threading.RLock()
        self._inner: buckets.AllreduceCallback | None = None
        self._params: dict[str, Any] = {}  # by name; kept, so that no other object gets the identity of one
        self._names: dict[int | str, str] = {}
        self._first: dict[str, np.ndarray] = {}
        self._futures: dict[str, TensorFuture] = {}

    def __call__(self, param: Any, grad: Any) -> TensorFuture:
        """Take the gradient of a parameter; blocks for a copy of it only.

        Args:
            param: The parameter, or its name.
            grad: Its gradient; it may be changed afterwards.

        Returns:
            A future whose `get` flushes the step and returns the reduced gradient.

        Raises:
            TypeError, ValueError: the gradient does not fit, the parameter was given before in this step, or it was not there in the
                first step. What is not reduced yet of the step then fails on all ranks.
        """
        with self._lock:
            name = self._name(param)
            try:
                if self._inner is not None:
                    self._inner(name, grad)
                elif name in self._first:
                    raise ValueError(f"the gradient of {name!r} was given twice in one step")
                else:
                    self._first[name] = np.array(grad)
            except Exception as error:  # what makes an array of a gradient may raise anything
                self._abandon(error)
                raise
            self._futures[name] = future = _Reduced(self)
            return future

    def flush(self) -> list[tuple[Any, np.ndarray]]:
        """End the step: block until all gradients are reduced. Without a step do nothing.

        Returns:
            Every parameter of the first step with its reduced gradient, also where it was left out here, in the same order on all ranks;
            nothing without a step.

        Raises:
            AiodistError: a peer failed, refused the step or gave other parameters; the futures of the step raise the same.
        """
        with self._lock:
            if not self._futures:
                return []
            try:
                reduced = self._reduce()
            except BaseException as error:
                self._fail(error)
                raise
            futures, self._futures = self._futures, {}
            kept = {name: gradient.copy() for name, gradient in reduced.items()}  # the next step writes into the buckets
            for name, future in futures.items():
                future._settle(kept[name], None)
            return [(self._params[name], gradient) for name, gradient in kept.items()]

    def _reduce(self) -> dict[str, np.ndarray]:
        if self._inner is not None:
            self._inner._complete("zero")  # in this thread, so that errors tell its place in the source
            return run(self._inner.wait(missing="zero"))
        first, self._first = self._first, {}
        if all(isinstance(key, str) for key in self._names):
            first = dict(sorted(first.items()))
        inner = buckets.AllreduceCallback(first, as_async(self._group), op=self._method)
        for name, grad in first.items():
            inner(name, grad)
        reduced = run(inner.wait())
        self._inner = inner  # not before: where a peer refused the first step, all start anew
        return reduced

    def _abandon(self, error: Exception) -> None:
        """Give up the step on all ranks; the next one starts anew."""
        self._fail(error)
        if self._inner is not None:
            self._inner.reset()
        else:
            as_async(self._group)._backend.refuse("all_gather", f"AllreduceCallback: {reason_of(error)}")

    def _fail(self, error: BaseException) -> None:
        futures, self._futures = self._futures, {}
        for future in futures.values():
            future._settle(None, error)
        if self._inner is None:  # the next step is the first one
            for known in (self._first, self._names, self._params):
                known.clear()

    def _name(self, param: Any) -> str:
        key = param if isinstance(param, str) else id(param)
        name = self._names.get(key)
        if name is None:
            name = param if isinstance(param, str) else f"parameter {len(self._names)}"
            if self._inner is None:
                self._names[key], self._params[name] = name, param
            elif not isinstance(param, str):
                name = "an object without a gradient in the first step (give all before get(), change parameters in place, or give names)"
        return name


class _Reduced(TensorFuture):
    """A gradient that is reduced when its step is flushed."""

    def __init__(self, owner: AllreduceCallback) -> None:
        super().__init__(ack=False)
        self._owner = owner

    def get(self, timeout: float | None = None) -> Any:
        """Flush the step if that was not done, and return the reduced gradient."""
        if not self._ready.is_set():
            self._owner.flush()
        return super().get(timeout)
