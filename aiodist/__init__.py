"""Collective communication for asyncio: ``await group.all_reduce(x)`` on numpy arrays.

    async with aiodist.init() as world:
        total = await world.all_reduce(x)
"""

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
    RendezvousError,
    TransportError,
)
from aiodist.group import Group
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
    "ReduceOp",
    "RendezvousError",
    "TensorFuture",
    "TransportError",
    "init",
    "local_world",
]
