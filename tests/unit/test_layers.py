"""The layers: imports go down only, and in no circle; what is forbidden appears nowhere."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache

import pytest
from checkout import ROOT
from sources import Source, agree, below, product, refuse, source

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
    ("training", "data", "seeing"),
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


MODULES = {file.module: file for file in product()}

#: Modules that lie in no folder: the packages' own faces, and programs.
ABOVE = {
    "disttensor",
    "dtrun",
    *(f"disttensor.{name}" for name in ("__main__", "doctor", "factories", "moved", "public", "run", "runtime")),
}


def imports(file: Source) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of all that a file imports, in functions and for types too."""
    package = file.module if file.path.name == "__init__.py" else file.module.rpartition(".")[0]
    for found in file.nodes(ast.Import):
        for alias in found.names:
            yield found.lineno, alias.name
    for found in file.nodes(ast.ImportFrom):
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


def upward(file: Source) -> Iterator[str]:
    """The imports of a file that do not go down, and what is wrong with its own place."""
    here = room(file.module)
    if here in ("", "runtime"):
        if file.module not in ABOVE:
            yield f"{file.name} lies in no folder"
        return
    if here not in FLOORS:
        yield f"{file.name}: {here} has no layer: name it in ENGINE_LAYERS or FRONT_LAYERS"
        return
    for line, there in used(file.module):
        if not room(there):
            yield f"{file.at(line)} imports {there}, which stands above all"
        elif room(there) not in FLOORS or not (FLOORS[room(there)] < FLOORS[here] or room(there) == here):
            yield f"{file.at(line)} imports {there}"


def test_imports_go_down() -> None:
    refuse((each for file in product() for each in upward(file)), "imports go down")


def upward_within(package: str) -> Iterator[str]:
    floors = {name: floor for floor, names in enumerate(WITHIN[package]) for name in names}

    def part(module: str) -> str:
        return module.removeprefix(f"{package}.").partition(".")[0]

    for module, file in MODULES.items():
        if module.startswith(f"{package}."):
            for line, there in used(module):
                if there.startswith(f"{package}."):
                    above, under = part(module), part(there)
                    if above in floors and under in floors and above != under and floors[under] >= floors[above]:
                        yield f"{file.at(line)} imports {there}"


def test_imports_go_down_within() -> None:
    refuse((each for package in WITHIN for each in upward_within(package)), "imports go down within a folder")


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
    refuse((", ".join(circle) for circle in circles()), "modules do not import each other, however far around")


def test_every_layer_names_a_folder() -> None:
    gone = [name for name in FLOORS if not (ROOT / "disttensor" / name.replace(".", "/") / "__init__.py").exists()]
    refuse(gone, "a layer names folders that are there")


def test_each_file_says_what_it_is_for() -> None:
    silent = (
        file.name
        for file in (*product(), *below("tests", "tools", "examples"))
        if file.path.stem == "utils" or not ast.get_docstring(file.tree, clean=False)
    )
    refuse(silent, "a file has a docstring, and another name than utils")


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


def dangerous(file: Source) -> Iterator[tuple[int, str, str]]:
    """(line, enclosing function or class, what) of everything that could run or unpickle what it is given."""

    for node in file.nodes(ast.Name, ast.Import, ast.ImportFrom, ast.Attribute, ast.keyword):
        match node:
            case ast.Name(id=name) if name in FORBIDDEN_CALLS | FORBIDDEN_MODULES:
                found = [name]
            case ast.Import(names=names):
                found = [f"import {a.name}" for a in names if a.name.split(".")[0] in FORBIDDEN_MODULES]
            case ast.ImportFrom(module=module) if module and module.split(".")[0] in FORBIDDEN_MODULES:
                found = [f"import {module}"]
            case ast.Attribute(attr="load" | "loads", value=ast.Name(id="torch" | "cloudpickle" | "pickle" as base)):
                found = [f"{base}.{node.attr}"]
            case ast.Attribute(attr="allow_pickle") | ast.keyword(arg="allow_pickle"):
                found = ["allow_pickle"]
            case _:
                continue
        for what in found:
            yield node.lineno, next(iter(file.around(node)), ""), what


def opened(file: Source) -> Iterator[str]:
    """What a file runs or unpickles without being the place for it."""
    for line, function, what in dangerous(file):
        if file.path.name == UNPICKLES[0]:
            allowed = function == UNPICKLES[1] or what == "import pickle"
        else:
            allowed = (file.path.name, function) == GENERATES[:2] and what in GENERATES[2]
        if not allowed:
            yield f"{file.at(line)}: {what} in {function or 'the module'}"


@pytest.mark.fault(34)
def test_nothing_is_run_or_unpickled() -> None:
    refuse((each for file in product() for each in opened(file)), "nothing runs or unpickles what it is given")


def test_the_scan_finds_things() -> None:
    assert any(what == "pickle" for _, _, what in dangerous(source(ROOT / "runtime" / "node" / "user_functions.py")))


def test_cloudpickle_pickles_in_one_place() -> None:
    users = {file.name for file in product() for _, name in imports(file) if name.startswith("cloudpickle")}
    agree(users, {"disttensor/tasks/sending.py"}, "cloudpickle is imported in one place")


#: What importing the package must not call.
STARTS = {"register", "init_master_worker", "install"}


def test_import_starts_nothing() -> None:
    called = (
        (file, node, ast.unparse(node.value.func))
        for file in (source(ROOT / "dtrun.py"), *below("disttensor"))
        for node in file.tree.body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )
    starts = (f"{file.at(node)}: {what}" for file, node, what in called if what in STARTS)
    refuse(starts, "an import registers nothing and opens nothing")
