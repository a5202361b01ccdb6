"""Any MPI through mpi4py: blocking calls on preallocated buffers, the form with the least Python in it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.cases import Case
from benchmarks.drivers.base import Array, Driver, Loop, SyncLoop
from benchmarks.launchers import THREAD_LEVEL

__all__ = ["MpiDriver"]


class MpiDriver(Driver):
    """A rank started by an MPI's own mpiexec."""

    def __init__(self) -> None:
        rc: Any = importlib.import_module("mpi4py").rc
        rc.thread_level = os.environ.get(THREAD_LEVEL, "single")
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._comm = self._mpi.COMM_WORLD
        self.rank = self._comm.rank
        self.size = self._comm.size
        first_line = self._mpi.Get_library_version().strip("\0\n ").splitlines()[0]
        self.library = " ".join(first_line.split(",")[0].split())

    def loop(self, case: Case, variant: str, x: Array, out: Array) -> Loop:
        return SyncLoop(self._call(case, x, out))

    def _call(self, case: Case, x: Array, out: Array) -> Callable[[], object]:
        comm = self._comm
        if case.collective == "barrier":
            return comm.Barrier  # type: ignore[no-any-return]
        kind = self._mpi.Datatype.fromcode(x.dtype.char)
        if case.collective == "broadcast":
            return partial(comm.Bcast, [x, kind], 0)
        if case.collective == "all_gather":
            return partial(comm.Allgather, [x, kind], [out, kind])
        op = getattr(self._mpi, case.op.upper())
        method = comm.Allreduce if case.collective == "all_reduce" else comm.Reduce_scatter_block
        return partial(method, [x, kind], [out, kind], op)

    def sync(self) -> None:
        self._comm.Barrier()

    def close(self) -> None:
        self._mpi.Finalize()
