"""Collective communication for asyncio: ``await group.all_reduce(x)`` on numpy arrays.

    async with aiodist.init() as world:
        total = await world.all_reduce(x)

Every collective starts at once and returns a `TensorFuture`. Importing has no effect but the import.
"""

import importlib.util

if importlib.util.find_spec("aiodist._core") is None:
    # This is the folder of a checkout, found first because Python was started there, and the compiled module is in the installed
    # package: take all modules from that one, rather than some from here and some from there.
    import pkgutil

    __path__ = pkgutil.extend_path(__path__, __name__)[1:] or __path__

from aiodist import errors as errors
from aiodist import ops as ops
from aiodist._core import TensorFuture
from aiodist.buckets import AllreduceCallback, Bucket
from aiodist.errors import (
    AiodistError,
    CollectiveTimeoutError,
    CommunicationError,
    GroupClosedError,
    MismatchError,
    NotInitializedError,
    NotReadyError,
    PeerLostError,
    PeerRefusedError,
    RankFailedError,
    RendezvousError,
    TransportError,
)
from aiodist.group import Group
from aiodist.pending import PendingGroup
from aiodist.registry import WORLD
from aiodist.types import ReduceOp
from aiodist.world import init, local_world

__version__ = "0.1.0"

__all__ = [
    "WORLD",
    "AiodistError",
    "AllreduceCallback",
    "Bucket",
    "CollectiveTimeoutError",
    "CommunicationError",
    "Group",
    "GroupClosedError",
    "MismatchError",
    "NotInitializedError",
    "NotReadyError",
    "PeerLostError",
    "PeerRefusedError",
    "PendingGroup",
    "RankFailedError",
    "ReduceOp",
    "RendezvousError",
    "TensorFuture",
    "TransportError",
    "init",
    "local_world",
]
