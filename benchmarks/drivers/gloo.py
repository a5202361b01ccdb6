"""Gloo through torch.distributed on loopback. Its all_reduce works in place only, which spares it a copy that the others make."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from benchmarks.cases import Case
from benchmarks.drivers.base import Array, Driver, Loop, SyncLoop

__all__ = ["GlooDriver"]


class GlooDriver(Driver):
    """A plain process that meets its peers through a file."""

    in_place: ClassVar[frozenset[str]] = frozenset({"broadcast", "all_reduce"})

    def __init__(self, rank: int, ranks: int, store: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._dist: Any = importlib.import_module("torch.distributed")
        self._torch.set_num_threads(1)
        self._dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
        self.rank, self.size = rank, ranks
        self.library = f"gloo in torch {self._torch.__version__}"

    def loop(self, case: Case, variant: str, x: Array, out: Array) -> Loop:
        return SyncLoop(self._call(case, x, out))

    def _call(self, case: Case, x: Array, out: Array) -> Callable[[], object]:
        dist = self._dist
        if case.collective == "barrier":
            return dist.barrier  # type: ignore[no-any-return]
        source, target = self._torch.from_numpy(x), self._torch.from_numpy(out)
        if case.collective == "broadcast":
            return partial(dist.broadcast, source, 0)
        if case.collective == "all_gather":
            return partial(dist.all_gather_into_tensor, target, source)
        op = getattr(dist.ReduceOp, case.op.upper())
        if case.collective == "all_reduce":
            return partial(dist.all_reduce, source, op)
        return partial(dist.reduce_scatter_tensor, target, source, op)

    def sync(self) -> None:
        self._dist.barrier()

    def close(self) -> None:
        self._dist.destroy_process_group()
