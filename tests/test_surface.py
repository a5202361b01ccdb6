"""What the package says it offers is what it offers."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import pickle
import tomllib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import aiodist
from aiodist import _core

ROOT = Path(aiodist.errors.__file__).parent
PATHS = sorted(ROOT.rglob("*.py"))
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_public(name: str) -> bool:
    return not name.startswith("_")


def defined(tree: ast.Module) -> set[str]:
    """Return the public names that a module binds by itself; type variables are not meant for others."""
    names = set()
    for node in tree.body:
        if isinstance(node, Definition):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            maker = node.value.func if isinstance(node.value, ast.Call) else None
            variable = isinstance(maker, ast.Name) and maker.id in ("TypeVar", "TypeVarTuple")
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name) and not variable}
    return {name for name in names if is_public(name)}


def undocumented(node: ast.Module | Definition, where: str) -> Iterator[str]:
    """Yield the public definitions without a docstring in a module or class, and the node itself if it has none."""
    if not ast.get_docstring(node):
        yield where
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, Definition) and is_public(child.name):
                yield from undocumented(child, f"{where}.{child.name}")


@pytest.mark.parametrize("path", PATHS, ids=name_of)
def test_all_lists_what_a_module_defines(path: Path) -> None:
    """No name without an underscore is left out, none is promised that does not exist, and nothing is said twice."""
    module = importlib.import_module(name_of(path))
    listed = getattr(module, "__all__", [])
    assert len(listed) == len(set(listed))
    assert defined(ast.parse(path.read_text(encoding="utf-8"))) <= set(listed)
    assert [name for name in listed if not hasattr(module, name)] == []


@pytest.mark.parametrize("path", PATHS, ids=name_of)
def test_everything_public_has_a_docstring(path: Path) -> None:
    """Modules, classes, functions, methods and properties."""
    assert list(undocumented(ast.parse(path.read_text(encoding="utf-8")), name_of(path))) == []


def test_the_top_level_names() -> None:
    """`aiodist.__all__` is sorted (constants, classes, functions) and holds every name at the top that is no module."""
    bound = {name for name, value in vars(aiodist).items() if is_public(name) and not isinstance(value, ModuleType)}
    assert set(aiodist.__all__) == bound
    assert set(aiodist.errors.__all__) <= bound
    order = sorted(aiodist.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert list(aiodist.__all__) == order


def test_the_version() -> None:
    """The package and the project say the same."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert aiodist.__version__ == project["version"]


# --- The stub of the compiled module -------------------------------------------------------------------------------------------------

STUB = ast.parse((ROOT / "_core.pyi").read_text(encoding="utf-8"))
STUBBED = {node.name: node for node in STUB.body if isinstance(node, Definition)}
CLASSES = {name: node for name, node in STUBBED.items() if isinstance(node, ast.ClassDef)}


def members(node: ast.ClassDef) -> dict[str, Definition]:
    return {child.name: child for child in node.body if isinstance(child, Definition)}


def parameters(node: ast.AST) -> list[inspect.Parameter]:
    """Return the parameters that a stub's function says, without annotations and self."""
    assert isinstance(node, ast.FunctionDef)
    plain = ast.parse(f"def {node.name}(): ...").body[0]
    assert isinstance(plain, ast.FunctionDef)
    plain.args = node.args
    for argument in (*plain.args.posonlyargs, *plain.args.args, *plain.args.kwonlyargs):
        argument.annotation = None
    scope: dict[str, Callable[..., Any]] = {}
    exec(compile(ast.Module([plain], []), "<stub>", "exec"), scope)
    return without_self(inspect.signature(scope[node.name]))


def without_self(signature: inspect.Signature) -> list[inspect.Parameter]:
    return [parameter for name, parameter in signature.parameters.items() if name != "self"]


def compiled_parameters(function: Any) -> list[inspect.Parameter] | None:
    """Return the parameters that a compiled function says, None where it says nothing."""
    if overloads := getattr(function, "__nb_signature__", None):
        assert len(overloads) == 1
        return parameters(ast.parse(f"{overloads[0][0]}: ...").body[0])
    try:
        return without_self(inspect.signature(function))
    except (TypeError, ValueError):
        return None


def test_the_stub_has_the_names_of_the_compiled_module() -> None:
    """Functions and classes; what the stub assigns are its own abbreviations."""
    assert STUBBED.keys() == {name for name in vars(_core) if not name.startswith("__")}


@pytest.mark.parametrize("name", CLASSES)
def test_the_stub_has_the_members_of_a_compiled_class(name: str) -> None:
    """Methods and properties; of the special methods those that the stub promises."""
    stubbed, compiled = members(CLASSES[name]), vars(getattr(_core, name))
    assert {member for member in stubbed if not member.startswith("__")} == {member for member in compiled if not member.startswith("__")}
    assert [member for member in stubbed if not hasattr(getattr(_core, name), member)] == []
    for member, node in stubbed.items():
        is_property = any(isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in node.decorator_list)
        assert is_property != callable(getattr(getattr(_core, name), member)), member


def test_the_stub_has_the_signatures_of_the_compiled_module() -> None:
    """Parameter names, kinds and defaults, of every function that tells them."""
    compared = set()
    pairs: dict[str, tuple[Definition, Any]] = {name: (node, getattr(_core, name)) for name, node in STUBBED.items()}
    for name, cls in CLASSES.items():
        methods = {member: node for member, node in members(cls).items() if is_public(member)}
        pairs |= {f"{name}.{member}": (node, getattr(getattr(_core, name), member)) for member, node in methods.items()}
    for name, (node, function) in pairs.items():
        if isinstance(node, ast.FunctionDef) and callable(function) and (told := compiled_parameters(function)) is not None:
            compared.add(name)
            assert parameters(node) == told, name
    assert {"reserve", "TensorFuture.result", "TensorFuture.add_done_callback"} <= compared


def test_everything_public_in_the_compiled_module_has_a_docstring() -> None:
    """As in the modules that are written in Python."""
    objects = {name: value for name, value in vars(_core).items() if is_public(name)}
    for name in CLASSES:
        objects |= {f"{name}.{member}": value for member, value in vars(getattr(_core, name)).items() if is_public(member)}
    assert [name for name, value in objects.items() if not value.__doc__] == []


def test_collectives_are_copied_and_pickled_by_name() -> None:
    """As the functions that they stand for; and weak methods can be made of them."""
    method = aiodist.Group.all_reduce
    assert copy.deepcopy(method) is copy.copy(method) is pickle.loads(pickle.dumps(method)) is weakref.ref(method)() is method
