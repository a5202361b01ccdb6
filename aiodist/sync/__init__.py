"""Blocking wrappers in the shape of ``megengine.distributed``: ``import aiodist.sync as dist``.

The modules have the names of the original: `functional`, `group`, `helper`, `launcher`, `server`, `util`. What differs is in
``docs/migrating.md``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aiodist.sync import functional, group, helper, util
from aiodist.sync.group import (
    WORLD,
    Group,
    destroy_process_group,
    get_backend,
    get_client,
    get_mm_server_addr,
    get_py_server_addr,
    get_rank,
    get_world_size,
    group_barrier,
    init_process_group,
    is_distributed,
    new_group,
)
from aiodist.sync.helper import bcast_list_, make_allreduce_cb, synchronized
from aiodist.sync.launcher import launcher
from aiodist.sync.util import get_free_ports

if TYPE_CHECKING:
    from aiodist.sync import server
    from aiodist.sync.server import Client, Server

__all__ = [
    "WORLD",
    "Client",
    "Group",
    "Server",
    "bcast_list_",
    "destroy_process_group",
    "functional",
    "get_backend",
    "get_client",
    "get_free_ports",
    "get_mm_server_addr",
    "get_py_server_addr",
    "get_rank",
    "get_world_size",
    "group",
    "group_barrier",
    "helper",
    "init_process_group",
    "is_distributed",
    "launcher",
    "make_allreduce_cb",
    "new_group",
    "server",
    "synchronized",
    "util",
]


def __getattr__(name: str) -> Any:
    # Not before it is asked for: ``python -m aiodist.sync.server`` wants to find it unloaded.
    if name not in ("Client", "Server", "server"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    server = importlib.import_module(f"{__name__}.server")
    return server if name == "server" else getattr(server, name)
