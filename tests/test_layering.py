"""Modules import downward only, and importing aiodist has no effect."""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiodist.errors

ROOT = Path(aiodist.errors.__file__).parent
# From the top down. A unit is what a module's first name below aiodist says, but for those of UNITS.
ROWS = (
    ("aiodist", "__main__", "adapters", "sync", "buckets", "launch", "cli", "demo", "bench", "testing"),
    ("world",),
    ("group",),
    ("ops",),
    ("backends",),
    ("devices",),
    ("_core", "registry"),
    ("errors", "types", "config", "bucket_plan", "store"),
)
UNITS = {
    **dict.fromkeys(("launch_guard", "launch_output", "launch_process", "launch_supervisor"), "launch"),
    **dict.fromkeys(("collectives", "membership", "naming", "pending", "tuning", "profile"), "group"),
    **dict.fromkeys(("hosts", "local", "local_store", "progress"), "world"),
}
ROW_OF = {unit: number for number, row in enumerate(ROWS) for unit in row}
BOTTOM = len(ROWS) - 1
# A side tower over the bottom row.
RENDEZVOUS_USERS = {"rendezvous", "world", "launch", "cli", "sync", "demo"}
# Packages that are loaded in one place only.
CONFINED = {
    "aiohttp": ("aiodist.rendezvous",),
    "click": ("aiodist.cli",),
    "cupy": ("aiodist.devices.cuda", "aiodist.backends.nccl"),
    "matplotlib": ("aiodist.demo",),
    "sklearn": ("aiodist.demo",),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
KNOWN = MODULES.keys() | {"aiodist._core"}


def imports(source: str) -> Iterator[str]:
    """Yield what a module imports, wherever in it, by full name; of aiodist always the module that is meant."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            module = node.module or ""
            names = {f"{module}.{alias.name}" for alias in node.names}
            yield from names & KNOWN
            if names - KNOWN:
                yield module


def unit_of(module: str) -> str:
    first = module.split(".")[1] if "." in module else module
    return UNITS.get(first, first)


def fault(module: str, imported: str) -> str | None:
    """Return why `module` may not import `imported`, None if it may."""
    for package, places in CONFINED.items():
        if imported.split(".")[0] == package and not module.startswith(places):
            return f"{package} is imported in {' and '.join(places)} only"
    if imported.split(".")[0] != "aiodist":
        return None
    user, used = unit_of(module), unit_of(imported)
    if used == "rendezvous":
        return None if user in RENDEZVOUS_USERS else f"only {sorted(RENDEZVOUS_USERS)} import rendezvous"
    if used not in ROW_OF:
        return f"{used} has no row"
    if user == "rendezvous":
        return None if ROW_OF[used] == BOTTOM else "rendezvous stands on the bottom row"
    return None if ROW_OF[user] <= ROW_OF[used] else f"{used} lies above {user}"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_downward_only(module: str) -> None:
    """DESIGN section 3, for imports at the top, inside functions and for type checking alike."""
    assert unit_of(module) in {*ROW_OF, "rendezvous"}, f"give {module} a row in this file"
    faults = {name: text for name in imports(MODULES[module].read_text(encoding="utf-8")) if (text := fault(module, name))}
    assert not faults


def test_no_two_modules_import_each_other() -> None:
    """Not even inside functions."""
    graph = {module: set(imports(path.read_text(encoding="utf-8"))) & KNOWN - {module} for module, path in MODULES.items()}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("aiodist.ops.checks", "from aiodist.world import init"),
        ("aiodist.ops.checks", "from aiodist import group"),
        ("aiodist.ops.checks", "import aiodist"),
        ("aiodist.group", "def later():\n    from aiodist.rendezvous.client import RendezvousClient"),
        ("aiodist.rendezvous.server", "from aiodist._core import TensorFuture"),
        ("aiodist.errors", "from aiodist.registry import WORLD"),
        ("aiodist.launch_guard", "from aiodist.nowhere import thing"),
        ("aiodist.world", "import aiohttp.web"),
        ("aiodist.group", "from cupy import ndarray"),
    ],
)
def test_an_upward_import_is_noticed(module: str, statement: str) -> None:
    """The rule above is not empty."""
    assert [text for name in imports(statement) if (text := fault(module, name))]


def test_importing_aiodist_has_no_effect() -> None:
    """No thread, no descriptor, no change of the environment, and nothing heavy loaded."""
    code = """
import json, os, sys
import asyncio, numpy  # numpy's linear algebra starts threads of its own
def state():
    return {"threads": len(os.listdir("/proc/self/task")), "fds": len(os.listdir("/proc/self/fd")), "environ": dict(os.environ)}
before, modules = state(), set(sys.modules)
import aiodist
print(json.dumps([before, state(), sorted({name.split(".")[0] for name in set(sys.modules) - modules})]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    before, after, loaded = json.loads(done.stdout)
    assert after == before
    heavy = {"aiohttp", "click", "cupy", "matplotlib", "msgspec", "prometheus_client", "rich", "sklearn", "torch", "uvloop"}
    assert not heavy & set(loaded)
