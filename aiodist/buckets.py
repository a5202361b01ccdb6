"""Gradients reduced in buckets while backward still runs.

A plan puts the parameters into buckets of one dtype each, in an order that every rank agrees on. Gradients arrive in any order; bucket
k is reduced as soon as it and all earlier ones are full, so ranks whose gradients come in different orders still issue in one order.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from aiodist import bucket_plan
from aiodist.bucket_plan import Array, Parameter, Parameters
from aiodist.errors import AiodistError, MismatchError
from aiodist.types import ReduceOp, check_reduction

if TYPE_CHECKING:
    from aiodist._core import TensorFuture
    from aiodist.group import Group

    _Outcome: TypeAlias = tuple[TensorFuture[Any] | None, Exception | None, dict[str, Array]]

__all__ = ["DEFAULT_BUCKET_NBYTES", "AllreduceCallback", "Bucket"]

DEFAULT_BUCKET_NBYTES: Final = 10 << 20


class Bucket:
    """Gradients of one dtype that are reduced together, in one flat array.

    ``await bucket`` waits until the bucket of the step in progress (or, between two steps, of the next one) is reduced and gives its
    reduced gradients by name. Cancelling gives up the wait only.

    Attributes:
        index: Place of the bucket in the agreed order.
        dtype: Element type of its gradients.
        result_dtype: Element type of the reduced gradients: float64 for a mean of integers, else `dtype`.
        names: Its parameters, in the order in which their gradients are expected.
        nbytes: Bytes of gradients that it holds.
        issued_at: ``time.perf_counter()`` of its latest all_reduce; None before the first.
    """

    def __init__(self, owner: AllreduceCallback, index: int, parameters: Sequence[Parameter]) -> None:
        self.index = index
        self.dtype = parameters[0].dtype
        self.result_dtype = check_reduction(owner.op, self.dtype)
        self.names = tuple(parameter.name for parameter in parameters)
        self.nbytes = sum(parameter.nbytes for parameter in parameters)
        self.issued_at: float | None = None
        self._owner = owner
        self._parameters = tuple(parameters)
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[_Outcome]]] = []
        self._future: TensorFuture[Any] | None = None
        self._error: Exception | None = None
        self._missing = set(self.names)
        self._allocate()

    def __repr__(self) -> str:
        return f"<Bucket {self.index}: {len(self.names)} gradients, {self.nbytes} bytes of {self.dtype.name}>"

    def __await__(self) -> Generator[Any, None, dict[str, Array]]:
        return self._reduced().__await__()

    def done(self) -> bool:
        """Return whether the all_reduce of the step in progress is over, well or not."""
        return self._error is not None or (self._future is not None and self._future.done())

    async def _reduced(self) -> dict[str, Array]:
        await self._owner._agree()
        waiter: asyncio.Future[_Outcome] | None = None
        with self._owner._lock:
            outcome: _Outcome = (self._future, self._error, self._results)
            if outcome[:2] == (None, None):
                loop = asyncio.get_running_loop()
                waiter = loop.create_future()
                self._waiters.append((loop, waiter))
        if waiter is not None:  # it brings the outcome along: the next step may have begun when this task goes on
            outcome = await waiter
        future, error, results = outcome
        if future is None:
            raise error or RuntimeError("this bucket has neither a result nor an error")
        await future
        return dict(results)

    def _allocate(self) -> None:
        group, size = self._owner.group, sum(parameter.size for parameter in self._parameters)
        self._flat: Array = group.empty((size,), self.dtype)
        self._out: Array = self._flat if self.result_dtype == self.dtype else group.empty((size,), self.result_dtype)
        self._inputs = self._split(self._flat)
        self._results = self._split(self._out)

    def _split(self, flat: Array) -> dict[str, Array]:
        views, start = {}, 0
        for parameter in self._parameters:
            views[parameter.name] = flat[start : start + parameter.size].reshape(parameter.shape)
            start += parameter.size
        return views

    def _pack(self, name: str, gradient: Any) -> None:
        target = self._inputs[name]
        if name not in self._missing:
            raise ValueError(f"gradient of {name!r} was given twice in one step")
        try:
            array = np.asarray(gradient)
        except Exception as error:
            raise TypeError(f"gradient of {name!r} can not be read as an array: {error}") from error
        if array.dtype.newbyteorder("=") != target.dtype:
            raise TypeError(f"gradient of {name!r} has dtype {array.dtype}, its parameter {target.dtype}")
        if array.shape != target.shape:
            raise ValueError(f"gradient of {name!r} has shape {array.shape}, its parameter {target.shape}")
        target[...] = array
        self._missing.discard(name)

    def _issue(self) -> None:
        owner = self._owner
        self.issued_at = time.perf_counter()
        try:
            self._future = owner.group.all_reduce(self._flat, owner.op, out=self._out, timeout=owner.timeout)
        except Exception as error:  # a broken or closed group: wait() and the bucket's waiters tell
            self._error = error
        self._wake()

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for loop, waiter in waiters:
            with contextlib.suppress(RuntimeError):  # that loop was closed
                loop.call_soon_threadsafe(_resolve, waiter, (self._future, self._error, self._results))

    def _renew(self) -> None:
        in_flight = self._future is not None and not self._future.done()
        self._future = self._error = None
        self._missing = set(self.names)
        if in_flight:  # the peers may still read the old array; its future keeps it alive
            self._allocate()


class AllreduceCallback:
    """Reduces the gradients of a step over a group, bucket by bucket, while backward still runs.

    Call it with each gradient, in any order and from any thread, then await `wait`::

        callback = aiodist.AllreduceCallback(parameters, world)
        for batch in batches:
            for name, gradient in backward(batch):
                callback(name, gradient)            # copies; starts a bucket as soon as it is full
            gradients = await callback.wait()       # this starts over for the next step

    All ranks create it at the same point of the group's order with the same arguments. Creating it starts one small all_gather that
    compares the plans; until its answer is seen, full buckets wait. From the first gradient of a step to the end of `wait` the group's
    order belongs to the callback: make other calls on another group.

    The ranks stay aligned when one of them goes wrong: every rank issues each bucket of a step exactly once, and what a rank can not
    contribute is issued as a refused call, for which the peers' `wait` raises `PeerRefusedError` with the reason. The next step works.

    Args:
        parameters: Arrays by name, or (name, shape, dtype) triples, in the order in which gradients are expected.
        group: The group to reduce over.
        op: How gradients are combined. A mean of integers is float64.
        bucket_nbytes: Upper bound of a bucket; a larger parameter has a bucket of its own.
        timeout: Seconds that a bucket waits for the peers; None for the group's.

    Raises:
        TypeError: a parameter's dtype can not be reduced with `op`.
        ValueError: a name occurs twice, or an argument is out of range.
    """

    def __init__(
        self,
        parameters: Parameters,
        group: Group,
        *,
        op: ReduceOp | str = "mean",
        bucket_nbytes: int = DEFAULT_BUCKET_NBYTES,
        timeout: float | None = None,
    ) -> None:
        self.group = group
        self.timeout = timeout
        self.buckets: tuple[Bucket, ...] = ()
        self._lock = threading.RLock()
        self._issued = 0
        self._refusal: str | None = None
        self._waiting = False
        self._agreed = False
        self._failure: Exception | None = None
        self._texts: TensorFuture[Any] | None = None
        self._barrier: TensorFuture[Any] | None = None
        try:
            self.op = ReduceOp.of(op)
            plan = bucket_plan.plan(bucket_plan.read(parameters, self.op), bucket_nbytes)
            self.buckets = tuple(Bucket(self, index, members) for index, members in enumerate(plan))
        except (TypeError, ValueError, MemoryError, AiodistError) as error:
            group._backend.refuse("all_gather", f"AllreduceCallback: {type(error).__name__}: {error}")
            raise
        homes = [(parameter, bucket) for bucket in self.buckets for parameter in bucket._parameters]
        self._home = {parameter.name: bucket for parameter, bucket in sorted(homes, key=lambda home: home[0].position)}
        self._text = bucket_plan.describe(plan, self.op, bucket_nbytes)
        self._records: TensorFuture[Any] = group.all_gather(bucket_plan.record(self._text))

    def __repr__(self) -> str:
        return f"<AllreduceCallback {self.op.value} of {len(self._home)} gradients in {len(self.buckets)} buckets on {self.group.name}>"

    def __call__(self, name: str, gradient: npt.ArrayLike) -> Bucket:
        """Copy one gradient into its bucket and start every bucket that is now ready.

        Blocks for the copy only; the caller may change `gradient` afterwards. A call that raises refuses the rest of this step on all
        ranks; `wait` (which raises the same) or `reset` then starts over.

        Args:
            name: The parameter's name.
            gradient: Array of the parameter's shape and dtype (either byte order).

        Returns:
            The bucket that holds the gradient, to await if its result is wanted early.

        Raises:
            TypeError: the gradient has another dtype, or is no array.
            ValueError: the name is unknown, the shape is another one, it was given before in this step, or this step was refused.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._refusal is not None:
                raise ValueError(f"this step was refused already: {self._refusal}")
            try:
                bucket = self._home.get(name)
                if bucket is None:
                    raise ValueError(f"{name!r} is not among the {len(self._home)} parameters of this callback")
                bucket._pack(name, gradient)
            except (TypeError, ValueError) as error:
                self._refuse(str(error))
                raise
            self._flush()
        return bucket

    async def wait(self, *, missing: Literal["error", "zero"] = "error") -> dict[str, Array]:
        """Wait until every bucket is reduced, and start over for the next step.

        Cancelling gives up the wait, not the reductions: call it again, or `reset`.

        Args:
            missing: ``"error"`` refuses the step when gradients have not been given, naming them; ``"zero"`` contributes zeros for
                them, so that a parameter may be unused on some ranks or on all of them.

        Returns:
            The reduced gradients by name, in the order of the parameters. They are views of the buckets and hold until the next
            step's first gradient is given: copy what must last.

        Raises:
            ValueError: gradients are missing, or this step was refused on this rank.
            PeerRefusedError: a peer refused the step; the next one works.
            MismatchError: the ranks' plans differ; the text names the first difference, and the group is broken.
            CommunicationError: the group broke.
        """
        with self._lock:
            if self._waiting:
                raise RuntimeError("another wait() of this callback is not over")
            self._waiting = True
        try:
            await self._agree()
            self._complete(missing)
            error = ValueError(self._refusal) if self._refusal is not None else await self._outcome()
            gradients = {name: bucket._results[name] for name, bucket in self._home.items()}
            with self._lock:
                self._renew()
            if error is not None:
                raise error
            return gradients
        finally:
            self._waiting = False

    def reset(self) -> None:
        """Give up the step in progress and start over; without one, do nothing.

        Buckets that were not issued are refused, so the peers' `wait` of this step raises `PeerRefusedError`.

        Raises:
            RuntimeError: a `wait` is running.
        """
        with self._lock:
            if self._waiting:
                raise RuntimeError("reset() while wait() of this callback is not over")
            fresh = self._issued == 0 and all(len(bucket._missing) == len(bucket.names) for bucket in self.buckets)
            if not fresh and self._refusal is None:
                self._refuse("the step was given up by reset()")
            self._renew()

    async def _outcome(self) -> Exception | None:
        """Wait for every bucket; return the first error."""
        first: Exception | None = None
        for bucket in self.buckets:
            error = bucket._error
            if bucket._future is not None:
                try:
                    await bucket._future
                except Exception as caught:
                    error = caught
            first = first or error
        return first

    def _complete(self, missing: str) -> None:
        """Make every bucket of this step issued, or refused."""
        with self._lock:
            if self._refusal is not None:
                return
            absent = [(name, bucket) for name, bucket in self._home.items() if name in bucket._missing]
            if missing not in ("error", "zero"):
                self._refuse(f"missing must be 'error' or 'zero', not {missing!r}")
            elif absent and missing == "error":
                shown = ", ".join(repr(name) for name, _ in absent[:10])
                more = f" and {len(absent) - 10} more" if len(absent) > 10 else ""
                self._refuse(f"no gradient was given for {shown}{more}; wait(missing='zero') contributes zeros for them")
            else:
                for name, bucket in absent:
                    bucket._inputs[name][...] = 0
                    bucket._missing.discard(name)
                self._flush()

    def _flush(self) -> None:
        """Issue, in the agreed order, the buckets that are full."""
        if not self._agreed and not self._agreement_seen():
            return
        while self._issued < len(self.buckets) and not self.buckets[self._issued]._missing:
            self.buckets[self._issued]._issue()
            self._issued += 1

    def _refuse(self, reason: str) -> None:
        """Issue what is left of this step as refused calls."""
        self._refusal = reason
        for bucket in self.buckets[self._issued :]:
            self.group._backend.refuse("all_reduce", reason)
            bucket._fail(ValueError(reason))
        self._issued = len(self.buckets)

    def _renew(self) -> None:
        for bucket in self.buckets:
            bucket._renew()
        self._issued = 0
        self._refusal = None

    def _agreement_seen(self) -> bool:
        if self._records.done() and self._records.exception() is None:
            self._agreed = bucket_plan.matching(self._records.result())
        return self._agreed

    async def _agree(self) -> None:
        """Wait for the comparison of the plans.

        Raises:
            PeerRefusedError: a peer's arguments were wrong.
            MismatchError: the plans differ.
        """
        if self._agreed:
            return
        if self._failure is None:
            self._failure = await self._verdict()
        if self._failure is not None:
            raise self._failure
        with self._lock:
            self._agreed = True
            self._flush()

    async def _verdict(self) -> MismatchError | None:
        group, records = self.group, await self._records
        if bucket_plan.matching(records):
            return None
        with self._lock:
            if self._texts is None:
                self._texts = group.all_gather(bucket_plan.pad(self._text, records))
        said = bucket_plan.difference(bucket_plan.texts(await self._texts, records))
        message = f"{group.name}, rank {group.rank} of {group.size}: the ranks' AllreduceCallback plans differ: {said}"
        with self._lock:
            if self._barrier is None:
                self._barrier = group.barrier()
        with contextlib.suppress(AiodistError):  # a peer may be past it and have aborted: every rank has all texts by then
            await self._barrier
            group.abort(message)
        return MismatchError(message, group=group.name, rank=group.rank, ranks=group.ranks)


def _resolve(waiter: asyncio.Future[_Outcome], outcome: _Outcome) -> None:
    if not waiter.done():
        waiter.set_result(outcome)
