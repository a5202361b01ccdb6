"""`aiodist.sync`: every name of the original is there, and what the collectives and groups do on 1, 2 and 3 ranks."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import socket
from typing import Any

import numpy as np
import pytest
from support.oracle import assert_same
from support.ranks import Pools

import aiodist
import aiodist.sync as dist
from aiodist import NotInitializedError, PeerRefusedError
from aiodist.errors import MismatchError
from aiodist.sync import functional

pytestmark = pytest.mark.timeout(60)

COLLECTIVE = "inp, group, device"
CALLS = {
    **dict.fromkeys(("connect", "get_mm_server_port"), ""),
    **dict.fromkeys(("check_is_grad", "check_remote_tracer", "user_get", "user_pop"), ", key"),
    "set_is_grad": ", key, is_grad",
    "set_remote_tracer": ", key, tracer_set",
    "group_barrier": ", key, size",
    "user_set": ", key, val",
    "bcast_val": ", val, key, size",
}
# Parameters as the reference spells them; what comes behind them is ours and has a default.
FUNCTIONS = {
    "functional": {
        **dict.fromkeys(("all_gather", "all_reduce_max", "all_reduce_min", "all_reduce_sum", "all_to_all", "broadcast"), COLLECTIVE),
        **dict.fromkeys(("gather", "reduce_scatter_sum", "reduce_sum", "scatter"), COLLECTIVE),
        "remote_recv": "src_rank, shape, dtype, device, inp",
        "remote_send": "inp, dest_rank",
    },
    "group": {
        "Group": "proc_ranks",
        "Group.check": "self, proc_ranks",
        "Group.reset": "self, proc_ranks",
        "StaticData": "",
        **dict.fromkeys(("get_backend", "get_client", "get_mm_server_addr", "get_py_server_addr", "get_rank", "get_world_size"), ""),
        "group_barrier": "group",
        "init_process_group": "master_ip, port, world_size, rank, device, backend",
        "is_distributed": "",
        "new_group": "proc_ranks",
    },
    "helper": {
        "AllreduceCallback": "reduce_method, group",
        "make_allreduce_cb": "reduce_method, group",
        "TensorFuture": "ack",
        **dict.fromkeys((f"TensorFuture.{name}" for name in ("device", "dtype", "numpy", "shape")), "self"),
        "apply": "",
        "bcast_list_": "inps, group",
        "get_device_count_by_fork": "device_type",
        "get_offsets": "shapes",
        "pack_allreduce_split": "pack_list, shapes, group, reduce_method",
        "param_pack_concat": "inps, offsets, offsets_val",
        "param_pack_split": "inp, offsets, shapes",
        "synchronized": "func",
    },
    "launcher": {"launcher": "func, n_gpus, world_size, rank_start, master_ip, port, device_type, backend"},
    "server": {
        "Server": "port",
        "Client": "master_ip, port",
        "Methods": "mm_server_port",
        **{f"{kind}.{name}": f"self{parameters}" for kind in ("Client", "Methods") for name, parameters in CALLS.items()},
        "ThreadXMLRPCServer": "addr, requestHandler, logRequests, allow_none, encoding, bind_and_activate, use_builtin_types",
        "main": "port, verbose",
    },
    "util": {"get_free_ports": "num"},
}
STATIC = {"backend", "client", "device", "master_ip", "mm_server_port", "next_stream", "proc_rank", "py_server_port", "server"}
STATIC |= {"world_size"}
# What the original has at the top.
TOP = {"WORLD", "bcast_list_", "functional", "group", "helper", "make_allreduce_cb", "synchronized", *FUNCTIONS["group"]}
TOP |= {"Client", "Server", "get_free_ports", "launcher", "server", "util"}
TOP -= {"Group.check", "Group.reset", "StaticData"}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in FUNCTIONS.items() for name in names])
def test_a_name_of_the_original_is_there(module: str, name: str) -> None:
    """With its parameters, in their order, and a docstring."""
    value: Any = importlib.import_module(f"aiodist.sync.{module}")
    for part in name.split("."):
        value = getattr(value, part)
    assert inspect.getdoc(value)
    parameters = list(inspect.signature(value).parameters.values())
    due = [part for part in FUNCTIONS[module][name].split(", ") if part]
    assert [parameter.name for parameter in parameters[: len(due)]] == due
    if name != "apply":
        assert all(parameter.default is not parameter.empty for parameter in parameters[len(due) :])


def test_what_is_no_function() -> None:
    """Fields, properties, defaults, and the names at the top."""
    assert {name for name, value in vars(dist.group.StaticData).items() if value is None and name[0] != "_"} == STATIC
    for name in ("comp_node", "key", "rank", "size"):
        assert inspect.getdoc(getattr(dist.Group, name))
    assert [name for name in TOP if not hasattr(dist, name)] == []
    assert set(dist.__all__) >= TOP
    for function in FUNCTIONS["functional"]:
        parameters = inspect.signature(getattr(functional, function)).parameters
        assert [parameters[name].default for name in ("group", "device") if name in parameters and "remote" not in function] in (
            [],
            [dist.WORLD, ""],
        )
    assert inspect.signature(dist.init_process_group).parameters["backend"].default == "nccl"
    assert inspect.signature(dist.launcher).parameters["backend"].default == "auto"
    with pytest.raises(AttributeError):
        _ = dist.nothing


async def _collectives(world: aiodist.Group) -> dict[str, Any]:
    """Call all of them, blocking this loop, on the world that async code opened."""
    x = np.arange(6, dtype=np.float32).reshape(6, 1) + 10 * world.rank
    results = {name: getattr(functional, name)(x) for name in FUNCTIONS["functional"] if "remote" not in name}
    assert_same(functional.all_reduce_sum(x, dist.WORLD, "cpu0"), functional.all_reduce_sum(x, world))
    assert_same(functional.all_reduce_sum(x, aiodist.WORLD), functional.all_reduce_sum(x))
    peer = (world.rank + 1) % world.size
    assert functional.remote_send(x, peer) is x
    results["remote_recv"] = functional.remote_recv((world.rank - 1) % world.size, (6, 1), np.float32)
    results["places"] = (dist.get_rank(), dist.get_world_size(), dist.WORLD.rank, dist.WORLD.size, dist.WORLD.key, dist.is_distributed())
    return results


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_collectives(pools: Pools, size: int) -> None:
    """Against numpy, on the ranks of a world of processes."""
    xs = [np.arange(6, dtype=np.float32).reshape(6, 1) + 10 * rank for rank in range(size)]
    shares = [np.split(x, size) for x in xs]
    total, joined = np.sum(xs, axis=0, dtype=np.float32), np.concatenate(xs)
    for rank, results in enumerate(pools.get(size).run(_collectives)):
        assert_same(results["all_gather"], joined)
        assert_same(results["all_reduce_max"], xs[-1])
        assert_same(results["all_reduce_min"], xs[0])
        assert_same(results["all_reduce_sum"], total)
        assert_same(results["all_to_all"], np.concatenate([share[rank] for share in shares]))
        assert_same(results["broadcast"], xs[0])
        assert_same(results["reduce_scatter_sum"], np.split(total, size)[rank])
        assert_same(results["scatter"], shares[0][rank])
        assert_same(results["remote_recv"], xs[rank - 1])
        for name, due in (("gather", joined), ("reduce_sum", total)):
            assert_same(results[name], due) if rank == 0 else pytest.fail(name) if results[name] is not None else None
        assert results["places"] == (rank, size, rank, size, ",".join(map(str, range(size))), True)


async def _refused(world: aiodist.Group) -> None:
    """What one rank gets wrong the others hear at once, and the world goes on."""
    x = np.ones(2, np.float32)
    error: type[Exception] = ValueError if world.rank == 1 else PeerRefusedError
    with pytest.raises(error, match="gpu7"):
        functional.all_reduce_sum(x, device="gpu7" if world.rank == 1 else "")
    if world.rank == 1:
        with pytest.raises(TypeError, match="no member"):
            functional.all_gather(x, None)  # type: ignore[arg-type]
    functional.remote_send(x, 1 - world.rank)
    with pytest.raises(MismatchError, match=r"float32 \(3,\)") as caught:
        functional.remote_recv(1 - world.rank, (3,), np.float32)
    assert caught.value.ranks == (1 - world.rank,)
    functional.remote_send(x.astype(">f4"), 1 - world.rank)
    with pytest.raises(ValueError, match="gpu"):
        functional.remote_recv(1 - world.rank, (3,), np.float32, "gpu0")
    wrong: list[Any] = [5, None, (2.0,), ("2",), (-2,), "2"]
    for shape in wrong:
        with pytest.raises((TypeError, ValueError), match="shape must"):
            functional.remote_recv(1 - world.rank, shape, np.float32)
    for dtype in ("no type", None, object):
        with pytest.raises(TypeError, match="type"):
            functional.remote_recv(1 - world.rank, (2,), dtype)
    assert_same(functional.remote_recv(1 - world.rank, (2,), ">f4"), x)  # none of them took the message
    assert_same(functional.all_reduce_sum(x), x * 2)


def test_what_is_wrong_raises(pools: Pools) -> None:
    """On both ranks, and leaves the world usable."""
    pools.get(2).run(_refused)


def test_blocking_where_the_peers_live() -> None:
    """Ranks of one loop can not block; those of a local world may from threads of their own."""
    x = np.ones(2)

    async def ranks() -> None:
        async with aiodist.local_world(3) as groups:
            results = await asyncio.gather(*(asyncio.to_thread(functional.all_gather, x + group.rank, group) for group in groups))
            assert_same(results[0], results[2])
        async with aiodist.local_world(2) as groups:
            with pytest.raises(RuntimeError, match="await"):
                functional.all_reduce_sum(x, groups[0])

    asyncio.run(ranks())


def test_without_a_world() -> None:
    """What needs one says so; a script for one process sees itself as rank 0 of 1."""
    assert not dist.is_distributed()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    group = dist.Group([])
    assert group.proc_ranks == dist.WORLD.proc_ranks == []
    needing: list[Any] = [dist.get_backend, dist.get_client, dist.get_py_server_addr, dist.get_mm_server_addr, dist.group_barrier]
    needing += [lambda: dist.new_group([0]), lambda: dist.Group([0]), lambda: dist.WORLD.size, lambda: group.key, lambda: group.async_group]
    needing += [lambda: functional.all_reduce_sum(np.ones(1)), lambda: functional.remote_send(np.ones(1), 0), dist.destroy_process_group]
    needing += [lambda: group.reset([0]), lambda: dist.WORLD.comp_node, lambda: functional.remote_recv(0, (1,), np.int8)]
    for function in needing:
        with pytest.raises(NotInitializedError) as caught:
            function()
        assert isinstance(caught.value, RuntimeError)


GOOD: dict[str, Any] = {"master_ip": "127.0.0.1", "port": 2345, "world_size": 2, "rank": 0, "device": 0, "backend": "auto"}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"master_ip": 1}, TypeError, "master_ip"),
        ({"master_ip": ""}, ValueError, "master_ip"),
        ({"port": "80"}, TypeError, "port"),
        ({"port": 0}, ValueError, "port"),
        ({"port": 70000}, ValueError, "port"),
        ({"world_size": 2.0}, TypeError, "world_size"),
        ({"world_size": 0}, ValueError, "world_size"),
        ({"rank": True}, TypeError, "rank"),
        ({"rank": 2}, ValueError, "rank"),
        ({"rank": -1}, ValueError, "rank"),
        ({"device": "gpu0"}, TypeError, "device"),
        ({"device": -1}, ValueError, "device"),
        ({"backend": None}, TypeError, "backend"),
        ({"backend": "mpi"}, ValueError, "backend 'mpi'"),
        ({"device_type": "tpu"}, ValueError, "device_type"),
        ({"backend": "ucx"}, ValueError, "backend 'ucx' is not built yet: use 'auto' or 'shm'"),
        ({"backend": "nccl", "device_type": "cpu"}, ValueError, "backend='auto' or 'shm'"),
        ({"device_type": "gpu"}, ValueError, "device_type 'gpu' needs CUDA, which is not built yet"),
    ],
)
def test_a_wrong_argument_of_init(change: dict[str, Any], error: type[Exception], text: str) -> None:
    """Nothing was opened."""
    with pytest.raises(error, match=text):
        dist.init_process_group(**{**GOOD, **change})
    assert not dist.is_distributed()


def test_the_backend_of_the_original() -> None:
    """Is the default, and its error says what is so and what works."""
    lack = "" if dist.helper.get_device_count_by_fork("gpu") else ", and this machine has no GPU that works"
    text = f"backend 'nccl' needs CUDA, which is not built yet{lack}: .*backend='auto' or 'shm' .*'ucx'"
    with pytest.raises(ValueError, match=text):
        dist.init_process_group("127.0.0.1", 2345, 2, 0, 0)
    assert not dist.is_distributed()


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def _life(_: None, port: int, size: int) -> None:
    """Open the world from within a running loop, use it by blocking and async calls, close it, and open another one."""
    rank = int(os.environ["AIODIST_RANK"])
    for _turn in range(2):
        dist.init_process_group("127.0.0.1", port, size, rank, device=rank, backend="auto")
        with pytest.raises(RuntimeError, match="destroy_process_group"):
            dist.init_process_group("127.0.0.1", port, size, rank, device=rank, backend="auto")
        _look(port, rank, size)
        if size == 3:
            await _make_groups(rank)
        ones = np.ones(2)
        assert_same(functional.all_reduce_sum(ones), ones * size)
        assert_same(await aiodist.ops.all_reduce(ones), ones * size)
        assert_same(await dist.WORLD.async_group.all_reduce(ones), ones * size)
        assert_same(await asyncio.to_thread(functional.all_reduce_sum, ones), ones * size)
        dist.group_barrier()
        dist.destroy_process_group()
        assert not dist.is_distributed()


def _look(port: int, rank: int, size: int) -> None:
    world = dist.WORLD
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, size, "auto")
    assert dist.get_py_server_addr() == dist.get_mm_server_addr() == ("127.0.0.1", port)
    assert (world.rank, world.size, world.comp_node, world.key) == (rank, size, f"cpu{rank}:1", ",".join(map(str, range(size))))
    world.reset(list(range(size)))
    with pytest.raises(ValueError):
        world.reset([rank]) if size > 1 else world.check([1])
    with pytest.raises(ValueError, match=f"rank {size} "):
        dist.new_group([0, size])


async def _make_groups(rank: int) -> None:
    """Three pairs, which their members make in orders that no one-after-the-other could satisfy."""
    orders = ([(2, 0), (0, 1)], [(0, 1), (1, 2)], [(1, 2), (2, 0)])[rank]
    made = [dist.Group(ranks) if number else dist.new_group(ranks) for number, ranks in enumerate(orders)]
    for stream, (ranks, group) in enumerate(zip(orders, made, strict=True), start=2):
        assert group is not None
        assert (group.key, group.rank, group.size) == (f"{ranks[0]},{ranks[1]}", ranks.index(rank), 2)
        assert group.comp_node == f"cpu{rank}:{stream}"
    for group in sorted((group for group in made if group is not None), key=lambda group: sorted(group.proc_ranks)):
        got = functional.all_gather(np.array([rank]), group)
        assert_same(got, np.array(group.proc_ranks))
        assert_same(await group.async_group.all_gather(np.array([rank])), got)
        dist.group_barrier(group)
    outsider = next(ranks for ranks in ((0, 1), (1, 2), (2, 0)) if rank not in ranks)
    assert dist.new_group(outsider) is None
    with pytest.raises(ValueError, match="not among"):
        dist.Group(outsider)
    with pytest.raises(TypeError):
        dist.Group(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 3])
def test_the_life_of_a_process_group(pools: Pools, size: int) -> None:
    """Rank 0 serves; a second world is formed on the same port."""
    pool = pools.get(size)
    pool.start(_life, free_port(), size, world=False)
    outcomes = pool.finish()
    assert [outcome.answer and (outcome.answer.error, outcome.answer.trace) for outcome in outcomes] == [(None, "")] * size
