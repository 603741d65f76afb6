"""The layers: imports go down only; what is forbidden appears nowhere; files stay small."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import ROOT

FRONT = [ROOT / "dtrun.py", *sorted((ROOT / "disttensor").glob("*.py"))]
ENGINE = sorted((ROOT / "runtime").rglob("*.py"))
OTHERS = sorted(p for folder in ("tests", "tools", "examples") for p in (ROOT / folder).rglob("*.py"))

#: Layers of the engine, by module or package; an interface stands lower than what implements it.
LAYERS = {
    "argument": 0,
    "command": 0,
    "conformance": 0,
    "dtypes": 0,
    "errors": 0,
    "garbage": 0,
    "generated": 0,
    "bundle": 0,
    "addresses": 0,
    "interfaces": 0,
    "keys": 0,
    "spelling": 0,
    "channel_names": 0,
    "mpi": 1,
    "slurm": 1,
    "abilities": 1,
    "binding": 1,
    "codec": 1,
    "ops": 1,
    "transport": 2,
    "channel": 2,
    "launch.base": 2,
    "launch.output": 0,
    "launch.plan": 0,
    "store": 3,
    "geometry": 3,
    "streams": 3,
    "randomness": 3,
    "cuda": 3,
    "collective": 3,
    "bindings": 4,
    "caller": 4,
    "template": 4,
    "functions": 4,
    "process_groups": 4,
    "executor": 4,
    "joint": 4,
    "dealer": 4,
    "events": 4,
    "lanes": 4,
    "outbox": 4,
    "program": 4,
    "interpreter": 4,
    "graphs": 4,
    "engines": 4,
    "route": 4,
    "failure": 4,
    "interrupts": 4,
    "ahead": 5,
    "worker": 5,
    "link": 5,
    "request": 5,
    "launch": 6,
}

#: What the front end may use of the engine: everything below the launchers, and those by name when a session starts.
FRONT_LAYER = 7


def name_of(path: Path) -> str:
    """The module's name inside of runtime/: "channel.base"."""
    parts = path.relative_to(ROOT / "runtime").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> int | None:
    """The layer of a module of the engine; None for the package itself."""
    while module:
        if module in LAYERS:
            return LAYERS[module]
        module = module.rpartition(".")[0]
    return None


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path, package: str) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of all that a file imports, in functions too. ``package``: what a "." in it means."""
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


def package_of(path: Path) -> str:
    inside = path.relative_to(ROOT / "runtime").parent.parts
    return ".".join(("disttensor", "runtime", *inside))


def module_named(name: str) -> str | None:
    """The engine's module that an import names, inside of runtime/; None for other packages."""
    if not name.startswith("disttensor.runtime"):
        return None
    rest = name[len("disttensor.runtime") :].lstrip(".")
    while rest and not ((ROOT / "runtime" / rest.replace(".", "/")).with_suffix(".py").exists()):
        if (ROOT / "runtime" / rest.replace(".", "/") / "__init__.py").exists():
            break
        rest = rest.rpartition(".")[0]
    return rest


@pytest.mark.parametrize("path", ENGINE, ids=name_of)
def test_imports_go_down(path: Path) -> None:
    here = name_of(path)
    layer = layer_of(here)
    if not here:
        assert not list(imports(path, "disttensor.runtime"))
        return
    assert layer is not None, f"runtime/{here} has no layer: name it in LAYERS"
    for line, name in imports(path, package_of(path)):
        assert not name.startswith("runtime"), f"{path.name}:{line}: the engine's import name is disttensor.runtime"
        target = module_named(name)
        if target is None:
            assert name.split(".")[0] != "disttensor", f"runtime/{here}:{line} imports {name} of the front end"
            continue
        there = layer_of(target)
        if there is None:
            assert target == "", f"runtime/{target} has no layer"
            continue
        assert there <= layer, f"runtime/{here} (L{layer}), line {line}, imports {target} (L{there})"


def test_transports_and_channels_know_nothing_of_each_other() -> None:
    for path in ENGINE:
        here = name_of(path)
        for package, other in (("transport", "channel"), ("channel", "transport")):
            if here.startswith(f"{package}."):
                named = [module_named(n) or "" for _, n in imports(path, package_of(path))]
                assert not [n for n in named if n.startswith(other)], path


def test_the_front_end_uses_launchers_by_name_or_interface_only() -> None:
    allowed = {"launch.base", "launch.registry", "launch", "launch.plan", "launch.hosts", "launch.check"}
    starts = {"init.py", "launching.py", "job.py", "run.py"}
    for path in FRONT:
        for line, name in imports(path, "disttensor"):
            target = module_named(name)
            if target and target.startswith("launch") and path.name not in starts:
                assert target in allowed, f"{path.name}:{line}"


def test_every_layer_names_something() -> None:
    for name in LAYERS:
        path = ROOT / "runtime" / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or path.is_dir(), name


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


@pytest.mark.parametrize("path", [*FRONT, *ENGINE, *OTHERS], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_small(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 500
    assert path.stem != "utils"
    assert ast.get_docstring(parse(path)) or path.name == "__init__.py", "a module says what it is for"


#: Where the one unpickling of the project is.
UNPICKLES = ("functions.py", "_FromMaster")
#: Where text that the project has written becomes code.
GENERATES = ("generated.py", "function", {"exec", "compile"})
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


@pytest.mark.parametrize("path", [*FRONT, *ENGINE], ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_run_or_unpickled(path: Path) -> None:
    for line, function, what in dangerous(path):
        if path.name == UNPICKLES[0]:
            assert function == UNPICKLES[1] or what == "import pickle", f"{path.name}:{line}: {what}"
        elif (path.name, function) != GENERATES[:2] or what not in GENERATES[2]:
            raise AssertionError(f"{path.name}:{line}: {what} in {function or 'the module'}")


def test_the_scan_finds_things() -> None:
    assert any(what == "pickle" for _, _, what in dangerous(ROOT / "runtime" / "functions.py"))


def test_cloudpickle_pickles_in_one_place() -> None:
    users = {p.name for p in [*FRONT, *ENGINE] for _, name in imports(p, "x") if name.startswith("cloudpickle")}
    assert users <= {"remote.py"}


def test_import_starts_nothing() -> None:
    """Importing the package neither registers the device nor opens anything."""
    for path in FRONT:
        for node in parse(path).body:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                name = ast.unparse(node.value.func)
                assert name not in {"register", "init_master_worker", "install"}, path
