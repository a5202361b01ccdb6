"""Blocking wrappers in the shape of ``megengine.distributed``: ``import aiodist.sync as dist``.

The modules have the names of the original: `functional`, `group`, `helper`, `launcher`, `server`, `util`. What differs is in
``docs/migrating.md``.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from aiodist.sync import functional, group, helper
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
    "synchronized",
]

_LATER: Final = {"Client": "server", "Server": "server", "get_free_ports": "util", "launcher": "launcher"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    return value
