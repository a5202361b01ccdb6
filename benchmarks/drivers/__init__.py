"""One driver a library: how a rank enters its world, gets buffers and makes the calls. Each imports its own library alone."""

from __future__ import annotations

from benchmarks.drivers.base import Driver, Loop

__all__ = ["Driver", "Loop", "load"]


def load(peer: str, *, rank: int | None, ranks: int, store: str) -> Driver:
    """Return the driver of `peer`, its world formed.

    Args:
        peer: ``aiodist``, ``copy``, ``gloo``, or an MPI.
        rank: this process's rank where no launcher says it.
        ranks: size of the world.
        store: file through which ranks find each other, for gloo.
    """
    if peer == "aiodist":
        from benchmarks.drivers.own import AiodistDriver

        return AiodistDriver()
    if peer == "copy":
        from benchmarks.drivers.copying import CopyingDriver

        return CopyingDriver()
    if peer == "gloo":
        from benchmarks.drivers.gloo import GlooDriver

        if rank is None:
            raise ValueError("gloo needs a rank")
        return GlooDriver(rank, ranks, store)
    from benchmarks.drivers.mpi import MpiDriver

    return MpiDriver()
