"""Gloo through torch.distributed on loopback. It reduces in place only, which spares it a copy that the others make."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from benchmarks.cases import ROOT, Case
from benchmarks.drivers.base import Array, Driver, Loop, SyncLoop, in_turn

__all__ = ["GlooDriver"]


class GlooDriver(Driver):
    """A plain process that meets its peers through a file."""

    in_place: ClassVar[frozenset[str]] = frozenset({"broadcast", "all_reduce", "reduce"})

    def __init__(self, rank: int, ranks: int, store: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._dist: Any = importlib.import_module("torch.distributed")
        self._torch.set_num_threads(1)
        self._dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
        self.rank, self.size = rank, ranks
        self.library = f"gloo in torch {self._torch.__version__}"

    def loop(self, case: Case, variant: str, x: Array, out: Array) -> Loop:
        if case.many:  # gloo has no such call, so a program makes one an array
            return SyncLoop(in_turn([self._call(case, *pair) for pair in zip(case.arrays(x), case.arrays(out), strict=True)]))
        return SyncLoop(self._call(case, x, out))

    def _call(self, case: Case, x: Array, out: Array) -> Callable[[], object]:
        dist = self._dist
        if case.collective == "barrier":
            return dist.barrier  # type: ignore[no-any-return]
        given, got = self._torch.from_numpy(x), self._torch.from_numpy(out)
        at_root, peer = self.rank == ROOT, self.rank ^ 1
        op = getattr(dist.ReduceOp, case.op.upper()) if case.op else None
        match case.single:
            case "all_reduce":
                return partial(dist.all_reduce, given, op)
            case "reduce":
                return partial(dist.reduce, given, ROOT, op)
            case "reduce_scatter":
                return partial(dist.reduce_scatter_tensor, got, given, op)
            case "broadcast":
                return partial(dist.broadcast, given, ROOT)
            case "all_gather":
                return partial(dist.all_gather_into_tensor, got, given)
            case "gather":
                return partial(dist.gather, given, list(got.chunk(self.size)) if at_root else None, ROOT)
            case "scatter":
                return partial(dist.scatter, got, list(given.chunk(self.size)) if at_root else None, ROOT)
            case "all_to_all":
                return partial(dist.all_to_all_single, got, given)
            case "send_recv":
                calls = [partial(dist.send, given, peer), partial(dist.recv, got, peer)]
                return in_turn(calls if at_root else calls[::-1])
            case "exchange":
                return self._exchange(given, got, peer)
        raise NotImplementedError(f"no {case.collective} in gloo")

    def _exchange(self, given: Any, got: Any, peer: int) -> Callable[[], object]:
        dist = self._dist

        def run() -> None:
            sent = dist.isend(given, peer)
            dist.recv(got, peer)
            sent.wait()

        return run

    def sync(self) -> None:
        self._dist.barrier()

    def close(self) -> None:
        self._dist.destroy_process_group()
