"""Docstrings: how their first sentences begin, and that no exported name is without one. Nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from checkout import ROOT

#: Beginnings without a subject and a verb: the first sentence says what the thing is or does.
BEGINNINGS = (
    *("See above", "Of ", "What ", "Whether ", "Where ", "Which ", "Who ", "Those ", "As ", "The same", "It ", "They "),
)

LINK = ROOT / "disttensor" / "runtime"
FILES = [
    path
    for folder in ("disttensor", "runtime")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if LINK not in path.parents
]

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def documented(tree: ast.Module) -> Iterator[ast.Module | Definition]:
    """All modules, classes and functions of a file, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, *DEFINITIONS)):
            yield node


def bad_beginnings(tree: ast.Module) -> list[str]:
    found = []
    for node in documented(tree):
        text = ast.get_docstring(node) or ""
        if text.startswith(BEGINNINGS):
            found.append(f"line {node.body[0].lineno}: {text.splitlines()[0]}")
    return found


# ---- exported names --------------------------------------------------------------------------------------------------


def file_of(base: Path, level: int, module: str | None) -> Path:
    """The file that ``from ..module import`` names in the file ``base``."""
    folder = base.parent
    for _ in range(level - 1):
        folder = folder.parent
    for part in (module or "").split("."):
        folder = ROOT / "runtime" if folder / part == LINK else folder / part if part else folder
    return folder.with_suffix(".py") if folder.with_suffix(".py").exists() else folder / "__init__.py"


def origin(path: Path, name: str) -> tuple[Path, str]:
    """The file that defines a name, and its name there: packages import names from their modules."""
    for node in tree_of(path).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return origin(file_of(path, node.level, node.module), alias.name)
    return path, name


#: The files whose imports are the public names: the first level, and the themes.
SOURCES = [
    ROOT / "disttensor" / "public.py",
    ROOT / "disttensor" / "factories.py",
    *(path for path in sorted((ROOT / "disttensor").glob("*/__init__.py")) if "__all__" in path.read_text()),
]


@cache
def exported() -> dict[Path, set[str]]:
    """The public names by the files that define them."""
    found: dict[Path, set[str]] = {}
    for source in SOURCES:
        for node in tree_of(source).body:
            if isinstance(node, ast.ImportFrom) and node.level and node.module:
                for alias in node.names:
                    if alias.asname == alias.name or (alias.asname is None and f'"{alias.name}"' in source.read_text()):
                        path, name = origin(file_of(source, node.level, node.module), alias.name)
                        found.setdefault(path, set()).add(name)
    return found


def is_trivial(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a body does nothing, or only returns an attribute, a name or a constant."""
    if len(function.body) != 1:
        return False
    only = function.body[0]
    value = only.value if isinstance(only, (ast.Expr, ast.Return)) else None
    return isinstance(only, ast.Pass) or isinstance(value, (ast.Attribute, ast.Constant, ast.Name))


def speaks_for_another(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is a property's setter or an overload: the docstring is the getter's, or the implementation's."""
    names = {
        name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "") for name in function.decorator_list
    }
    return bool(names & {"setter", "deleter", "overload"})


def undocumented(tree: ast.Module, names: set[str]) -> list[str]:
    found = []
    for node in tree.body:
        if not isinstance(node, DEFINITIONS) or node.name not in names:
            continue
        methods = node.body if isinstance(node, ast.ClassDef) else []
        candidates: list[tuple[str, Definition]] = [(node.name, node)]
        candidates += [
            (f"{node.name}.{one.name}", one)
            for one in methods
            if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) and not one.name.startswith("_")
        ]
        for name, one in candidates:
            plain = not isinstance(one, ast.ClassDef) and (is_trivial(one) or speaks_for_another(one))
            if not plain and not ast.get_docstring(one):
                found.append(f"line {one.lineno}: {name}")
    return found


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_docstring_begins_with_what_the_thing_is_or_does(path: Path) -> None:
    assert bad_beginnings(tree_of(path)) == []


@pytest.mark.parametrize("path", sorted(exported()), ids=name_of)
def test_what_is_exported_has_a_docstring(path: Path) -> None:
    assert undocumented(tree_of(path), exported()[path]) == []


def test_exported_names_are_found_where_they_are_defined() -> None:
    """Through packages and the link, or the test above would look at nothing."""
    assert "ReduceOp" in exported()[ROOT / "runtime" / "collective" / "reduction.py"]
    assert "register_channel" in exported()[ROOT / "runtime" / "channel" / "registry.py"]
    assert "NodeLost" in exported()[ROOT / "runtime" / "protocol" / "errors.py"]


BROKEN = '''
"""Whether it is broken."""

class Shown:
    """A class."""

    def does(self, x):
        return x + 1

    def value(self):
        return self._value

    def _hidden(self, x):
        return x + 1

def hidden():
    """
    See above.
    """
'''


def test_broken_docstrings_are_found() -> None:
    tree = ast.parse(BROKEN)
    assert bad_beginnings(tree) == ["line 2: Whether it is broken.", "line 17: See above."]
    assert undocumented(tree, {"Shown"}) == ["line 7: Shown.does"]
