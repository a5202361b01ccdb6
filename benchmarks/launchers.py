"""How the ranks of each library are started: command lines and settings, each library at its best on one host."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["MPIS", "PEERS", "THREAD_LEVEL", "Launch", "plan_launch"]

MPIS: Final = ("mpich", "openmpi", "impi")
PEERS: Final = (*MPIS, "gloo", "copy")
"""What aiodist can be measured beside: libraries, and the machine's own copying."""

THREAD_LEVEL: Final = "BENCHMARKS_MPI_THREAD_LEVEL"
"""Variable that tells an MPI rank its thread level."""

_HERE: Final = Path(__file__).resolve().parent
_RANK_PROGRAM: Final = str(_HERE / "rank.py")

# Shared memory as the only transport. mpich finds it by itself and binds no rank; Open MPI and Intel MPI keep the pinning they choose.
_SETTINGS: Final[dict[str, dict[str, str]]] = {
    "aiodist": {},
    "mpich": {},
    "openmpi": {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    "impi": {"I_MPI_FABRICS": "shm"},
    # glibc takes some virtual machines' third-level cache for one of hundreds of MiB, and then stores all copies through the caches.
    "copy": {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x400000"},
    "gloo": {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
}


@dataclass(frozen=True, slots=True)
class Launch:
    """Processes to start for one library: one launcher, or each rank by itself."""

    commands: tuple[tuple[str, ...], ...]
    settings: dict[str, str]


def plan_launch(peer: str, ranks: int, socket: str, store: str, envs: Path | None = None, thread_level: str = "single") -> Launch:
    """Return how to start `ranks` ranks of `peer`.

    Args:
        peer: ``aiodist`` or one of `PEERS`.
        ranks: how many.
        socket: path at which the controller listens.
        store: path of a file that does not exist yet, for gloo.
        envs: folder of the peers' environments; default ``benchmarks/peers/envs``.
        thread_level: for MPI: ``single``, its fastest, or ``multiple``, mpi4py's default and what a program with threads needs.

    Raises:
        FileNotFoundError: the peer's environment was not made.
    """
    arguments = ("--peer", peer, "--socket", socket, "--ranks", str(ranks))
    settings = dict(_SETTINGS[peer])
    if peer in ("aiodist", "copy"):
        return Launch(((sys.executable, "-m", "aiodist", "run", "-n", str(ranks), _RANK_PROGRAM, *arguments),), settings)
    bin_ = (envs or _HERE / "peers" / "envs") / peer / "bin"
    python = str(bin_ / "python")
    if not Path(python).exists():
        raise FileNotFoundError(f"no environment at {bin_.parent}; make it with benchmarks/peers/setup.sh {peer}")
    program = (python, _RANK_PROGRAM, *arguments)
    if peer == "gloo":
        return Launch(tuple((*program, "--rank", str(rank), "--store", store) for rank in range(ranks)), settings)
    settings[THREAD_LEVEL] = thread_level
    mpiexec: tuple[str, ...] = (str(bin_ / "mpiexec"), "-n", str(ranks))
    cores = len(os.sched_getaffinity(0))
    if peer == "impi":
        settings["I_MPI_ROOT"] = str(bin_.parent)
        if ranks > cores:
            settings["I_MPI_THREAD_YIELD"] = "2"
    if peer == "openmpi" and ranks > cores:
        mpiexec += ("--map-by", ":OVERSUBSCRIBE")
    return Launch(((*mpiexec, *program),), settings)
