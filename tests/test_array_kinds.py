"""Arrays of other kinds than numpy's: read in place, answered in kind, refused with a reason."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
import warnings
from array import array as typed_array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
from conftest import RunRanks
from support import oracle
from support.array_kinds import CASES, MADE, WRITABLE, Boxed, Labelled, Made, Spoken, framework, jax_array, lacking, tensor, unbox
from support.checks import assert_usable, error_of, ramp
from support.oracle import Array, assert_same
from support.ranks import run_local

import aiodist
from aiodist.ops.arrays import kind_of

pytestmark = pytest.mark.timeout(90)


def content(dtype: str, rank: int, count: int) -> Array:
    """Return what a rank gives; the ranks' first elements differ, whatever the dtype."""
    if dtype == "?":
        return np.asarray((np.arange(count) + rank) % 3 == 0)
    return (np.arange(count) * 7 % 25 + 40 * rank + 1).astype(dtype)


def check(kind: Made, result: Any, due: Array) -> None:
    """Fail unless a result is of its kind, holds what is due, and is the holder's own."""
    assert type(result) is kind.result(), f"{type(result).__name__} where {kind.result().__name__} is due"
    got = kind.read(result)
    assert_same(got.reshape(due.shape), due)


async def _answers(group: aiodist.Group, name: str, dtype: str) -> list[Any]:
    """Check what each call gives and return the results."""
    kind, kept = MADE[name], []
    for count in (4, 30_000):
        parts = [content(dtype, rank, count) for rank in range(group.size)]
        x = kind.make(parts[group.rank])
        total = oracle.all_reduced("sum", parts)
        kept += [await group.all_reduce(x), await group.all_gather(x), await group.broadcast(x, root=1), await group.reduce_scatter(x)]
        for result, due in zip(kept[-4:], (total, np.concatenate(parts), parts[1], np.split(total, 2)[group.rank]), strict=True):
            check(kind, result, due)
    return kept


async def _checked(group: aiodist.Group, name: str, dtype: str) -> None:
    await _answers(group, name, dtype)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_results_are_of_the_callers_kind(name: str, dtype: str, run_ranks: RunRanks) -> None:
    run_ranks(2, _checked, name, dtype)


@pytest.mark.parametrize(("name", "dtype"), CASES)
async def test_results_outlive_the_group_and_are_their_holders_own(name: str, dtype: str) -> None:
    kind = MADE[name]
    kept = await run_local(2, _answers, name, dtype)
    gc.collect()
    await run_local(2, _answers, name, dtype)  # memory that was wrongly given back would be used again here
    for rank, results in enumerate(kept):
        parts = [content(dtype, other, 30_000) for other in range(2)]
        total = oracle.all_reduced("sum", parts)
        for result, due in zip(results[4:], (total, np.concatenate(parts), parts[1], np.split(total, 2)[rank]), strict=True):
            check(kind, result, due)
            if kind.writable and issubclass(kind.result(), np.ndarray | memoryview | typed_array | bytearray):
                result[0] = result[1]
                assert np.ravel(kind.read(result))[0] == np.ravel(due)[1]


async def _into(group: aiodist.Group, name: str, dtype: str) -> None:
    kind = MADE[name]
    for count in (4, 30_000):
        parts = [content(dtype, rank, count) for rank in range(group.size)]
        total, part = oracle.all_reduced("sum", parts), parts[group.rank]
        x, out = kind.make(part), kind.make(np.zeros_like(part))
        plain = np.array(kind_of(x).view(x, "x"))
        for source, target in ((x, out), (x, np.zeros_like(plain)), (plain, kind.make(part)), (x, x)):
            assert await group.all_reduce(source, out=target) is target
            assert_same(kind.read(target).reshape(count), total)
        x, joined = kind.make(part), kind.make(np.zeros(2 * count, dtype))
        assert await group.broadcast(x if group.rank == 1 else None, 1, out=out) is out
        assert_same(kind.read(out).reshape(count), parts[1])
        assert await group.all_gather(x, out=joined) is joined
        assert_same(kind.read(joined).reshape(2 * count), np.concatenate(parts))
        assert_same(kind.read(x).reshape(count), part)


@pytest.mark.parametrize(("name", "dtype"), WRITABLE)
def test_any_writable_kind_takes_a_result(name: str, dtype: str, run_ranks: RunRanks) -> None:
    run_ranks(2, _into, name, dtype)


async def test_a_buffer_can_be_resized_once_the_call_is_done() -> None:
    async with aiodist.local_world(2) as groups:
        x, out = bytearray(b"\1\2"), typed_array("d", [0.0])
        futures = [groups[0].all_reduce(x), groups[0].all_reduce(typed_array("d", [1.0]), out=out)]
        buffers: tuple[Any, ...] = (x, out)
        for buffer in buffers:
            with pytest.raises(BufferError):
                buffer.extend(buffer)
        await asyncio.gather(*futures, groups[1].all_reduce(bytearray(b"\3\4")), groups[1].all_reduce(np.array([2.0])))
        del futures
        x.extend(b"\5")
        out.append(7.0)
        assert x == b"\1\2\5" and out.tolist() == [3.0, 7.0]


async def _foreign_means(group: aiodist.Group) -> None:
    """float64 where the caller's type can hold that, else an ndarray."""
    x = bytes([3 + group.rank, 8])
    due = np.array([3.5, 8.0])
    for given in (x, bytearray(x), typed_array("B", x)):
        assert_same(await group.all_reduce(given, op="mean"), due)
    result = await group.all_reduce(memoryview(x), op="mean")
    assert type(result) is memoryview and result.format == "d" and result.tolist() == due.tolist()


def test_what_a_type_can_not_hold_stays_an_ndarray(run_ranks: RunRanks) -> None:
    run_ranks(2, _foreign_means)


async def _kinds_meet(group: aiodist.Group) -> None:
    """One rank's kind is no matter to the others."""
    part = ramp((6,), group.rank)
    makers: list[Callable[[Array], Any]] = [lambda a: a, lambda a: a.data, lambda a: typed_array("d", a), Spoken]
    result = await group.all_reduce(makers[group.rank](part))
    assert type(result) is (np.ndarray, memoryview, typed_array, Spoken)[group.rank]
    assert_same(unbox(result), sum(ramp((6,), rank) for rank in range(group.size)))
    flat = await group.broadcast([ramp((2, 3), 0), None, ramp((2, 3), 9).data, None][group.rank])
    assert_same(np.asarray(flat), ramp((2, 3), 0))
    assert type(flat) is (memoryview if group.rank == 2 else np.ndarray)


def test_each_rank_gets_its_own_kind(run_ranks: RunRanks) -> None:
    run_ranks(4, _kinds_meet)


def _masked(mask: Any = (0, 1, 0)) -> Any:
    return np.ma.array([1.0, 2.0, 3.0], mask=mask)


def _masked_record() -> Any:
    x: Any = np.ma.array(np.zeros(3, "i4,f4"))
    x["f1"][1] = np.ma.masked
    return x


def _frozen() -> Array:
    x = np.ones(3)
    x.flags.writeable = False
    return x


def _released() -> memoryview:
    view = memoryview(bytearray(24))
    view.release()
    return view


def _closed() -> mmap.mmap:
    memory = mmap.mmap(-1, 24)
    memory.close()
    return memory


def _parameter() -> Any:
    return framework("torch").ones(3, dtype=framework("torch").float64, requires_grad=True)


def _quantized() -> Any:
    torch = framework("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to drop them
        return torch._empty_affine_quantized([3], scale=0.5, zero_point=0, dtype=torch.qint8)


def _deleted() -> Any:
    x = framework("jax.numpy").ones(3)
    x.delete()
    return x


TORCH, JAX = lacking("torch"), lacking("jax")
UNREADABLE: Final = [
    pytest.param(_masked, ("masked", "x.filled()"), id="masked"),
    pytest.param(_masked_record, ("masked",), id="masked field"),
    pytest.param(lambda: np.ma.masked, ("masked",), id="the masked constant"),
    pytest.param(lambda: Boxed(np.ones(3), (2, 1)), ("x is on a device", "CUDA", "number 1"), id="CUDA"),
    pytest.param(lambda: Boxed(np.ones(3), (77, 0)), ("x is on a device", "77"), id="unknown device"),
    pytest.param(lambda: SimpleNamespace(__cuda_array_interface__={}), ("x is on a CUDA device",), id="CUDA interface"),
    pytest.param(lambda: Boxed(np.ones(3, ml_dtypes.bfloat16)), ("x can not be read",), id="DLPack that numpy can not read"),
    pytest.param(_released, ("x can not be read", "released"), id="released memoryview"),
    pytest.param(_closed, ("x can not be read", "closed"), id="closed mmap"),
    pytest.param(lambda: (ctypes.c_void_p * 3)(), ("x can not be read",), id="pointers"),
    pytest.param(lambda: (ctypes.py_object * 2)(), ("x holds Python objects",), id="objects"),
    pytest.param(_parameter, ("x requires grad", "x.detach()"), id="leaf", marks=TORCH),
    pytest.param(lambda: _parameter() * 2, ("x requires grad", "x.detach()"), id="not a leaf", marks=TORCH),
    pytest.param(lambda: framework("torch").ones(3).to_sparse(), ("sparse", "x.to_dense()"), id="sparse", marks=TORCH),
    pytest.param(lambda: framework("torch").ones(3, device="meta"), ("x is on device meta",), id="meta", marks=TORCH),
    pytest.param(_quantized, ("x is quantized", "qint8"), id="quantized", marks=TORCH),
    pytest.param(_deleted, ("x can not be read", "deleted"), id="deleted", marks=JAX),
    pytest.param(lambda: framework("jax").random.key(1), ("x can not be read", "key"), id="random key", marks=JAX),
]


async def _refused(group: Any, wrong: Any, words: tuple[str, ...], collective: str, right: Any, x: Any, **arguments: Any) -> None:
    """One rank's wrong call is its own error and its peer's; the group goes on."""
    if group.rank == 1:
        error = await error_of(lambda: getattr(group, collective)(x, **arguments))
        assert isinstance(error, wrong)
        assert all(word in str(error) for word in words), str(error)
    else:
        error = await error_of(getattr(group, collective)(right))
        assert isinstance(error, aiodist.PeerRefusedError) and words[0] in str(error)
    await assert_usable(group)


@pytest.mark.parametrize(("make", "words"), UNREADABLE)
async def test_what_can_not_be_read_is_refused_with_the_reason(make: Callable[[], Any], words: tuple[str, ...]) -> None:
    for collective in ("all_reduce", "all_gather"):
        await run_local(2, lambda group, name=collective: _refused(group, TypeError, words, name, np.ones(3), make()))


UNWRITABLE: Final = [
    pytest.param(lambda: [0.0] * 3, TypeError, ("out must be", "list"), id="list"),
    pytest.param(lambda: np.float64(1), TypeError, ("out must be", "float64"), id="scalar"),
    pytest.param(_frozen, ValueError, ("out is read-only",), id="read-only"),
    pytest.param(lambda: bytes(24), ValueError, ("out is read-only",), id="bytes"),
    pytest.param(lambda: _frozen().data, ValueError, ("out is read-only",), id="read-only memoryview"),
    pytest.param(lambda: Boxed(_frozen()), ValueError, ("out is read-only",), id="read-only DLPack"),
    pytest.param(lambda: Boxed(np.ones(3), (2, 0)), TypeError, ("out is on a device", "CUDA"), id="CUDA"),
    pytest.param(_masked, TypeError, ("out has masked elements",), id="masked"),
    pytest.param(lambda: typed_array("f", [0.0] * 3), TypeError, ("out has dtype float32",), id="other type"),
    pytest.param(lambda: typed_array("d", [0.0] * 4), ValueError, ("out has shape (4,)",), id="other length"),
    pytest.param(_parameter, TypeError, ("out requires grad", "out.detach()"), id="leaf", marks=TORCH),
    pytest.param(lambda: framework("torch")._neg_view(tensor(np.ones(3))), ValueError, ("out shows",), id="negated", marks=TORCH),
    pytest.param(lambda: framework("torch").zeros(1).double().expand(3), ValueError, ("out repeats",), id="expanded", marks=TORCH),
    pytest.param(lambda: jax_array(np.ones(3)), TypeError, ("out can not be a JAX array",), id="jax", marks=JAX),
]


@pytest.mark.parametrize(("make", "error", "words"), UNWRITABLE)
async def test_what_can_not_take_a_result_is_refused(make: Callable[[], Any], error: type[Exception], words: tuple[str, ...]) -> None:
    await run_local(2, lambda group: _refused(group, error, words, "all_reduce", np.ones(3), np.ones(3), out=make()))


async def _overlapping(group: aiodist.Group) -> None:
    memory = np.zeros(9)
    view = memory.data
    await _refused(group, ValueError, ("out overlaps x in part",), "all_reduce", np.ones(6), view[:6], out=view[3:])
    assert not memory.any()


def test_overlap_is_seen_through_other_kinds(run_ranks: RunRanks) -> None:
    run_ranks(2, _overlapping)


async def _unmasked(group: aiodist.Group) -> None:
    x = _masked(mask=False)
    for result in (await group.all_reduce(x), await group.all_reduce(_masked(mask=[0, 0, 0]))):
        assert_same(result, np.array([2.0, 4.0, 6.0]))
        assert type(result) is np.ndarray
    assert await group.all_reduce(x, out=x) is x
    assert x.tolist() == [2.0, 4.0, 6.0]


def test_a_mask_that_hides_nothing_is_no_matter(run_ranks: RunRanks) -> None:
    run_ranks(2, _unmasked)


@pytest.mark.parametrize(
    "make",
    [
        np.asarray,
        lambda a: a.view(Labelled),
        lambda a: a.data,
        Boxed,
        lambda a: typed_array("d", a),
        pytest.param(lambda a: framework("torch").from_numpy(a), marks=TORCH),
        pytest.param(lambda a: framework("torch").from_numpy(a).bfloat16().t(), marks=TORCH),
        pytest.param(lambda a: framework("jax.numpy").asarray(a), marks=JAX),
    ],
)
def test_reading_copies_nothing(make: Callable[[Array], Any]) -> None:
    x = make(np.arange(6.0))
    first, second = (kind_of(x).view(x, "x") for _ in range(2))
    assert np.shares_memory(first, second)
    if type(x) is np.ndarray:
        assert first is x
