"""The layers: imports go down only, and in no circle; what is forbidden appears nowhere."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from checkout import ROOT

FRONT = [
    ROOT / "dtrun.py",
    *(
        p
        for p in sorted((ROOT / "disttensor").rglob("*.py"))
        if "runtime" not in p.relative_to(ROOT / "disttensor").parts
    ),
]
ENGINE = sorted((ROOT / "runtime").rglob("*.py"))
OTHERS = sorted(p for folder in ("tests", "tools", "examples") for p in (ROOT / folder).rglob("*.py"))

#: The folders of the engine, from the ground up. A line's folders know nothing of each other.
ENGINE_LAYERS = (
    ("process",),
    ("protocol",),
    ("host",),
    ("transport", "channel"),
    ("collective",),
    ("node", "master"),
    ("shared",),
    ("launch",),
    ("endpoints",),
    ("contracts",),
)

#: The folders of the front end, which stands on the engine.
FRONT_LAYERS = (
    ("errors", "torch_patches"),
    ("session",),
    ("proxy",),
    ("dispatch",),
    ("storage", "futures", "streams"),
    ("collectives",),
    ("meshes",),
    ("nn", "tasks", "channels", "graphs", "views"),
    ("training", "data"),
    ("checkpoint",),
    ("torch_backend",),
    ("verify",),
    ("startup",),
    ("cli", "testing"),
)

#: Folders within a folder: from the ground up as well. What lies beside them may use them, or be used by them.
WITHIN = {
    "disttensor.runtime.launch": (("output",), ("tree",), ("rendezvous",), ("starters",), ("torchrun_mode",)),
}


def module_of(path: Path) -> str:
    """The module's name: "disttensor.runtime.channel.base"."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "runtime":
        parts = ("disttensor", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in [*FRONT, *ENGINE]}


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path, package: str = "") -> Iterator[tuple[int, str]]:
    """(line, absolute name) of all that a file imports, in functions and for types too."""
    if not package and path in MODULES.values():
        package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for found in ast.walk(parse(path)):
        if isinstance(found, ast.Import):
            for alias in found.names:
                yield found.lineno, alias.name
        elif isinstance(found, ast.ImportFrom):
            base = found.module or ""
            if found.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - found.level + 1], *([found.module] if found.module else [])])
            for alias in found.names:
                yield found.lineno, f"{base}.{alias.name}"


def module_named(name: str) -> str | None:
    """The module of ours that an import names; None for others'."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


@cache
def used(module: str) -> tuple[tuple[int, str], ...]:
    """(line, module of ours) that a module imports."""
    found = ((line, module_named(name)) for line, name in imports(MODULES[module]))
    return tuple((line, there) for line, there in found if there and there != module)


def room(module: str) -> str:
    """The folder of a module, below disttensor or its engine: "runtime.node", "dispatch"; "" for what lies in none."""
    parts = module.split(".")
    depth = 3 if parts[:2] == ["disttensor", "runtime"] else 2
    if (ROOT / "disttensor").joinpath(*parts[1:depth]).is_dir():
        return ".".join(parts[1:depth])
    return ""


FLOORS = {
    **{f"runtime.{name}": floor for floor, names in enumerate(ENGINE_LAYERS) for name in names},
    **{name: floor + len(ENGINE_LAYERS) for floor, names in enumerate(FRONT_LAYERS) for name in names},
}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down(module: str) -> None:
    here = room(module)
    if here in ("", "runtime"):  # the packages' own faces, and programs
        assert module in {
            "disttensor",
            "dtrun",
            *(
                f"disttensor.{name}"
                for name in ("__main__", "doctor", "factories", "moved", "public", "run", "runtime")
            ),
        }, f"{module} lies in no folder"
        return
    assert here in FLOORS, f"{here} has no layer: name it in ENGINE_LAYERS or FRONT_LAYERS"
    for line, there in used(module):
        assert room(there), f"{module}:{line} imports {there}, which stands above all"
        assert FLOORS[room(there)] < FLOORS[here] or room(there) == here, f"{module}:{line} imports {there}"


@pytest.mark.parametrize("package", WITHIN)
def test_imports_go_down_within(package: str) -> None:
    floors = {name: floor for floor, names in enumerate(WITHIN[package]) for name in names}

    def part(module: str) -> str:
        return module.removeprefix(f"{package}.").partition(".")[0]

    for module in MODULES:
        if module.startswith(f"{package}."):
            for line, there in used(module):
                if there.startswith(f"{package}."):
                    above, below = part(module), part(there)
                    if above in floors and below in floors and above != below:
                        assert floors[below] < floors[above], f"{module}:{line} imports {there}"


def circles() -> list[list[str]]:
    """Modules that import each other, however far around."""
    reached: dict[str, set[str]] = {}
    direct = {module: {there for _, there in used(module)} for module in MODULES}
    for module in MODULES:
        seen: set[str] = set()
        todo = [module]
        while todo:
            todo.extend(direct[at] - seen if (at := todo.pop()) in direct else ())
            seen |= direct[at]
        reached[module] = seen
    tied = {
        frozenset(m for m in reached[module] if module in reached[m]) for module in MODULES if module in reached[module]
    }
    return sorted(sorted(circle) for circle in tied)


def test_no_circle() -> None:
    assert circles() == []


def test_every_layer_names_a_folder() -> None:
    for name in FLOORS:
        assert (ROOT / "disttensor" / name.replace(".", "/") / "__init__.py").exists(), name


@pytest.mark.parametrize("path", [*FRONT, *ENGINE, *OTHERS], ids=lambda p: str(p.relative_to(ROOT)))
def test_each_file_says_what_it_is_for(path: Path) -> None:
    assert path.stem != "utils"
    assert ast.get_docstring(parse(path))


def test_the_bare_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    sys.modules.pop("runtime", None)
    with pytest.raises(ImportError, match=r"disttensor\.runtime"):
        import runtime  # noqa: F401
    assert "runtime" not in sys.modules


def test_the_link_is_relative_and_committed() -> None:
    link = ROOT / "disttensor" / "runtime"
    assert link.is_symlink()
    assert str(link.readlink()) == "../runtime"


#: Where the one unpickling of the project is.
UNPICKLES = ("user_functions.py", "_FromMaster")
#: Where text that the project has written becomes code.
GENERATES = ("generated_code.py", "function", {"exec", "compile"})
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def dangerous(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, enclosing function or class, what) of everything that could run or unpickle what it is given."""

    def walk(tree: ast.AST, inside: str) -> Iterator[tuple[int, str, str]]:
        for node in ast.iter_child_nodes(tree):
            named = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            here = inside or (node.name if named else "")
            match node:
                case ast.Name(id=name) if name in FORBIDDEN_CALLS | FORBIDDEN_MODULES:
                    yield node.lineno, here, name
                case ast.Import(names=names):
                    for alias in names:
                        if alias.name.split(".")[0] in FORBIDDEN_MODULES:
                            yield node.lineno, here, f"import {alias.name}"
                case ast.ImportFrom(module=module) if module and module.split(".")[0] in FORBIDDEN_MODULES:
                    yield node.lineno, here, f"import {module}"
                case ast.Attribute(
                    attr="load" | "loads", value=ast.Name(id="torch" | "cloudpickle" | "pickle" as base)
                ):
                    yield node.lineno, here, f"{base}.{node.attr}"
                case ast.Attribute(attr="allow_pickle") | ast.keyword(arg="allow_pickle"):
                    yield getattr(node, "lineno", 0), here, "allow_pickle"
                case _:
                    pass
            yield from walk(node, here)

    yield from walk(parse(path), "")


@pytest.mark.fault(34)
@pytest.mark.parametrize("path", [*FRONT, *ENGINE], ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_run_or_unpickled(path: Path) -> None:
    for line, function, what in dangerous(path):
        if path.name == UNPICKLES[0]:
            assert function == UNPICKLES[1] or what == "import pickle", f"{path.name}:{line}: {what}"
        elif (path.name, function) != GENERATES[:2] or what not in GENERATES[2]:
            raise AssertionError(f"{path.name}:{line}: {what} in {function or 'the module'}")


def test_the_scan_finds_things() -> None:
    assert any(what == "pickle" for _, _, what in dangerous(ROOT / "runtime" / "node" / "user_functions.py"))


def test_cloudpickle_pickles_in_one_place() -> None:
    users = {module for module, path in MODULES.items() for _, name in imports(path) if name.startswith("cloudpickle")}
    assert users == {"disttensor.tasks.sending"}


def test_import_starts_nothing() -> None:
    """Importing the package neither registers the device nor opens anything."""
    for path in FRONT:
        for node in parse(path).body:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                name = ast.unparse(node.value.func)
                assert name not in {"register", "init_master_worker", "install"}, path
