"""Any MPI through mpi4py: blocking calls on preallocated buffers, the form with the least Python in it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.cases import ROOT, Case
from benchmarks.drivers.base import Array, Driver, Loop, SyncLoop, in_turn
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
        if case.many:  # MPI has no such call, so a program makes one an array
            return SyncLoop(in_turn([self._call(case, *pair) for pair in zip(case.arrays(x), case.arrays(out), strict=True)]))
        return SyncLoop(self._call(case, x, out))

    def _call(self, case: Case, x: Array, out: Array) -> Callable[[], object]:
        comm = self._comm
        if case.collective == "barrier":
            return comm.Barrier  # type: ignore[no-any-return]
        kind = self._mpi.Datatype.fromcode(x.dtype.char)
        given, got = [x, kind], [out, kind]
        at_root, peer = self.rank == ROOT, self.rank ^ 1
        op = getattr(self._mpi, case.op.upper()) if case.op else None
        match case.single:
            case "all_reduce":
                return partial(comm.Allreduce, given, got, op)
            case "reduce":
                return partial(comm.Reduce, given, got if at_root else None, op, ROOT)
            case "reduce_scatter":
                return partial(comm.Reduce_scatter_block, given, got, op)
            case "broadcast":
                return partial(comm.Bcast, given, ROOT)
            case "all_gather":
                return partial(comm.Allgather, given, got)
            case "gather":
                return partial(comm.Gather, given, got if at_root else None, ROOT)
            case "scatter":
                return partial(comm.Scatter, given if at_root else None, got, ROOT)
            case "all_to_all":
                return partial(comm.Alltoall, given, got)
            case "send_recv":
                calls = [partial(comm.Send, given, peer, 0), partial(comm.Recv, got, peer, 0)]
                return in_turn(calls if at_root else calls[::-1])
            case "exchange":
                return partial(comm.Sendrecv, given, peer, 0, got, peer, 0)
        raise NotImplementedError(f"no {case.collective} in MPI")

    def sync(self) -> None:
        self._comm.Barrier()

    def close(self) -> None:
        self._mpi.Finalize()
