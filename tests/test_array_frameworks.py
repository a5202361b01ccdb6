"""What is special about torch, JAX and the element types of ml_dtypes; and that none of them is needed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
from conftest import RunRanks
from support import oracle
from support.array_kinds import framework, lacking
from support.checks import assert_usable, error_of, ramp
from support.oracle import BFLOAT16, Array, assert_same, raw_bytes
from support.ranks import run_local

import aiodist
from aiodist.ops.arrays import kind_of

pytestmark = pytest.mark.timeout(90)
needs_torch, needs_jax = lacking("torch"), lacking("jax")

EXTENDED: Final = [
    name
    for name in dir(ml_dtypes)
    if isinstance(getattr(ml_dtypes, name), type) and issubclass(getattr(ml_dtypes, name), np.generic) and name != "bfloat16"
]
FLOAT8: Final = [name for name in EXTENDED if name.startswith("float8")]
TORCH_FLOAT8: Final = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")


def patterns(dtype: Any, count: int, rank: int) -> Array:
    """Return elements of any dtype whose bytes run through all values; those of two ranks differ."""
    element = np.dtype(dtype)
    return (np.arange(count * element.itemsize) * 7 + 101 * rank).astype(np.uint8).view(element)


def same_bits(actual: Any, due: Array) -> bool:
    """Tell whether dtype, shape and every bit are those due; NaN too."""
    return bool(actual.dtype == due.dtype and actual.shape == due.shape and raw_bytes(actual) == raw_bytes(due))


async def _moves(group: aiodist.Group, dtype: Any) -> None:
    for count in (3, 70_000):
        parts = [patterns(dtype, count, rank) for rank in range(group.size)]
        assert same_bits(await group.broadcast(parts[1] if group.rank == 1 else None, 1), parts[1])
        assert same_bits(await group.all_gather(parts[group.rank]), np.concatenate(parts))


async def _does_not_reduce(group: aiodist.Group, dtype: Any) -> None:
    for call in (group.all_reduce, group.reduce_scatter):
        if group.rank == 1:
            error = await error_of(lambda call=call: call(patterns(dtype, 4, 1)))  # type: ignore[misc]
            assert isinstance(error, TypeError) and "moves but does not reduce" in str(error) and np.dtype(dtype).name in str(error)
        else:
            assert isinstance(await error_of(call(np.ones(4))), aiodist.PeerRefusedError)
    await assert_usable(group)


@pytest.mark.parametrize("name", ["bfloat16", *EXTENDED])
def test_extended_types_move(name: str, run_ranks: RunRanks) -> None:
    run_ranks(2, _moves, getattr(ml_dtypes, name))


@pytest.mark.parametrize("name", EXTENDED)
async def test_extended_types_but_bfloat16_do_not_reduce(name: str) -> None:
    await run_local(2, _does_not_reduce, getattr(ml_dtypes, name))


async def _void(group: aiodist.Group) -> None:
    """As wide as bfloat16 and of the same kind letter, but no number."""
    await _moves(group, "V2")
    x = patterns("V2", 4, group.rank)
    assert "moves but does not reduce" in str(await error_of(lambda: group.all_reduce(x)))
    await assert_usable(group)


def test_plain_void_moves_but_does_not_reduce(run_ranks: RunRanks) -> None:
    run_ranks(2, _void)


async def _bfloat16(group: aiodist.Group, name: str) -> None:
    """Rounded once: 257, 258 and 259 have no bfloat16, so that rounding each sum would stay at 256."""
    number = 256.0 if group.rank == 0 else 1.0
    if name == "torch":
        x = framework("torch").tensor([number, 1.0], dtype=framework("torch").bfloat16)
    elif name == "jax":
        x = framework("jax.numpy").asarray([number, 1.0], dtype="bfloat16")
    else:
        x = np.array([number, 1.0], BFLOAT16)
    for op, due in (("sum", [260, 4]), ("max", [256, 1]), ("mean", [65, 1])):
        result = await group.all_reduce(x, op)
        assert type(result) is type(x) and result.dtype == x.dtype
        assert result.tolist() == due
    for result, due in ((await group.broadcast(x), [256, 1]), (await group.all_gather(x), [256, 1, 1, 1, 1, 1, 1, 1])):
        assert type(result) is type(x) and result.dtype == x.dtype
        assert result.tolist() == due


@pytest.mark.parametrize("name", ["numpy", pytest.param("torch", marks=needs_torch), pytest.param("jax", marks=needs_jax)])
def test_bfloat16_of_each_framework_reduces(name: str, run_ranks: RunRanks) -> None:
    run_ranks(4, _bfloat16, name)


async def _torch_float8(group: aiodist.Group, name: str) -> None:
    torch = framework("torch")
    dtype = getattr(torch, name)
    parts = [torch.from_numpy(patterns("u1", 6, rank).copy()).view(dtype).reshape(2, 3) for rank in range(group.size)]
    out = torch.zeros(2, 3, dtype=dtype)
    assert await group.broadcast(parts[1] if group.rank == 1 else out, 1, out=out) is out
    joined = await group.all_gather(parts[group.rank].t(), axis=1)
    for result, due in ((out, parts[1]), (joined, torch.cat([part.view(torch.uint8).t() for part in parts], 1).view(dtype))):
        assert result.dtype == dtype and torch.equal(result.view(torch.uint8), due.view(torch.uint8))
    assert "moves but does not reduce" in str(await error_of(lambda: group.all_reduce(out)))


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_torch) for name in TORCH_FLOAT8])
def test_float8_tensors_move(name: str, run_ranks: RunRanks) -> None:
    run_ranks(2, _torch_float8, name)


async def _tensor_layouts(group: aiodist.Group) -> None:
    torch = framework("torch")
    big = torch.from_numpy(ramp((4, 6), group.rank))
    terms = [ramp((4, 6), rank) for rank in range(group.size)]
    for cut in ((slice(None, None, 2), slice(1, 4)), (2, 3), (slice(0, 0),)):
        result = await group.all_reduce(big[cut])
        assert_same(result.numpy(), np.asarray(sum(term[cut] for term in terms)))
    assert_same((await group.all_gather(big.t())).numpy(), np.concatenate([term.T for term in terms]))
    assert_same((await group.all_reduce(torch.tensor(1.5).expand(3))).numpy(), np.full(3, 3.0, "f4"))
    assert_same((await group.all_reduce(torch.tensor([3 + group.rank]), "mean")).numpy(), np.array([3.5]))
    assert await group.all_reduce(big[1:, ::2], out=big[1:, ::2]) is not None
    due = terms[group.rank].copy()
    due[1:, ::2] = sum(term[1:, ::2] for term in terms)
    assert_same(big.numpy(), due)


@needs_torch
def test_strided_tensors_go_by_their_logical_order(run_ranks: RunRanks) -> None:
    run_ranks(2, _tensor_layouts)


async def _conjugated(group: aiodist.Group) -> None:
    z = framework("torch").tensor([1 + 2j, 3 - 1j])
    assert (await group.all_reduce(z.conj())).tolist() == [2 - 4j, 6 + 2j]
    assert (await group.all_gather(z.conj().imag)).tolist() == [-2.0, 1.0, -2.0, 1.0]


@needs_torch
def test_lazily_conjugated_tensors_give_the_values_that_they_show(run_ranks: RunRanks) -> None:
    run_ranks(2, _conjugated)


async def _overwrite_saved(group: aiodist.Group) -> None:
    torch = framework("torch")
    leaf = torch.ones(3, requires_grad=True)
    saved = leaf * 2
    loss = (saved * saved).sum()
    await group.all_reduce(saved.detach(), out=saved.detach())
    assert saved.tolist() == [4.0, 4.0, 4.0]
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


@needs_torch
async def test_autograd_notices_a_result_written_over_what_it_needs() -> None:
    await run_local(2, _overwrite_saved)


async def _jax_means(group: aiodist.Group) -> None:
    x = framework("jax.numpy").asarray([2**24 + group.rank, 5], dtype="int32")
    assert_same(await group.all_reduce(x, "mean"), np.array([2**24 + 0.5, 5.0]))


@needs_jax
def test_jax_gets_the_mean_of_integers_unrounded(run_ranks: RunRanks) -> None:
    """float64, which JAX holds only where its 64-bit types are on; never rounded to float32 in silence."""
    run_ranks(2, _jax_means)
    jax = framework("jax")
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else framework("jax.experimental").enable_x64():
        wrapped = kind_of(jax.numpy.ones(2)).wrap(np.array([1.5, 2.5]))
    assert isinstance(wrapped, jax.Array) and wrapped.dtype == np.float64 and wrapped.tolist() == [1.5, 2.5]


async def _traced(group: aiodist.Group) -> None:
    jax = framework("jax")
    error = await error_of(lambda: jax.jit(group.all_reduce)(jax.numpy.ones(3)))
    assert isinstance(error, TypeError) and "x is traced" in str(error)
    await assert_usable(group)


@needs_jax
def test_a_collective_inside_jit_is_refused(run_ranks: RunRanks) -> None:
    run_ranks(2, _traced)


@pytest.mark.parametrize("dtype", ["f4", BFLOAT16])
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 2)])
@pytest.mark.parametrize("name", [pytest.param("torch", marks=needs_torch), pytest.param("jax", marks=needs_jax)])
def test_wrapping_keeps_shape_dtype_and_bits(name: str, shape: tuple[int, ...], dtype: Any) -> None:
    like = framework("torch").ones(1) if name == "torch" else framework("jax.numpy").ones(1)
    result = oracle.vector(np.dtype(dtype), int(np.prod(shape)), 1).reshape(shape).copy()
    wrapped = kind_of(like).wrap(result)
    assert type(wrapped) is type(like)
    back = kind_of(wrapped).view(wrapped, "x")
    assert_same(back, result)
    assert name == "jax" or not result.size or np.shares_memory(back, result)


WITHOUT: Final = """
import asyncio, sys
for name in ("ml_dtypes", "jax", "jaxlib", *{hidden}):
    sys.modules[name] = None
import numpy as np, aiodist

async def main():
    async with aiodist.local_world(2) as groups:
        both = lambda call: asyncio.gather(*map(call, groups))
        for result in await both(lambda g: g.all_reduce(np.full(3, g.rank + 1, np.float32))):
            assert result.dtype == np.float32 and result.tolist() == [3, 3, 3]
        for result in await both(lambda g: g.broadcast(memoryview(b"ab") if g.rank == 0 else None)):
            assert bytes(result) == b"ab"
        assert (await both(lambda g: g.all_reduce(b"\\1\\2")))[0] == b"\\2\\4"
{more}
asyncio.run(main())
assert not any(sys.modules.get(name) for name in ("ml_dtypes", "jax", "jaxlib", *{hidden}))
"""
BFLOAT_TENSOR: Final = """
        import torch
        try:
            groups[0].all_reduce(torch.ones(3, dtype=torch.bfloat16))
        except TypeError as error:
            assert "x holds bfloat16" in str(error) and "pip install ml_dtypes" in str(error), error
        else:
            raise AssertionError("nothing was raised")
"""


@pytest.mark.parametrize(("hidden", "more"), [(("torch",), ""), pytest.param((), BFLOAT_TENSOR, marks=needs_torch)])
def test_neither_ml_dtypes_nor_a_framework_is_needed(hidden: tuple[str, ...], more: str) -> None:
    script = WITHOUT.format(hidden=hidden, more=more)
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
