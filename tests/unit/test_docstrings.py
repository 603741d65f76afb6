"""Docstrings: how their first sentences begin, and that no exported name is without one. Nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from checkout import ROOT
from sources import LINK, Source, below, product, refuse, source

#: Beginnings without a subject and a verb: the first sentence says what the thing is or does.
BEGINNINGS = (
    *("See above", "Of ", "What ", "Whether ", "Where ", "Which ", "Who ", "Those ", "As ", "The same", "It ", "They "),
)

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def bad_beginnings(file: Source) -> Iterator[str]:
    """Yields the docstrings of a file that begin so: its own, and those of classes and functions, nested ones too."""
    for node in file.nodes(ast.Module, *DEFINITIONS):
        text = (ast.get_docstring(node, clean=False) or "").lstrip()
        if text.startswith(BEGINNINGS):
            yield f"{file.at(node.body[0])}: {text.splitlines()[0]}"


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
    for node in source(path).tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return origin(file_of(path, node.level, node.module), alias.name)
    return path, name


#: The files whose imports are the public names: the first level, and the themes.
FACES = [
    ROOT / "disttensor" / "public.py",
    ROOT / "disttensor" / "factories.py",
    *(
        file.path
        for file in below("disttensor")
        if file.name.count("/") == 2 and file.name.endswith("/__init__.py") and "__all__" in file.text
    ),
]


@cache
def exported() -> dict[Path, set[str]]:
    """The public names by the files that define them."""
    found: dict[Path, set[str]] = {}
    for face in FACES:
        for node in source(face).tree.body:
            if isinstance(node, ast.ImportFrom) and node.level and node.module:
                for alias in node.names:
                    if alias.asname == alias.name or (alias.asname is None and f'"{alias.name}"' in source(face).text):
                        path, name = origin(file_of(face, node.level, node.module), alias.name)
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


def undocumented(file: Source, names: set[str]) -> Iterator[str]:
    for node in file.tree.body:
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
                yield f"{file.at(one)}: {name}"


# ---- the tests -------------------------------------------------------------------------------------------------------


def test_a_docstring_begins_with_what_the_thing_is_or_does() -> None:
    found = (each for file in product() for each in bad_beginnings(file))
    refuse(found, "a docstring's first sentence has a subject and a verb")


def test_what_is_exported_has_a_docstring() -> None:
    found = (each for path, names in sorted(exported().items()) for each in undocumented(source(path), names))
    refuse(found, "what users have says what it is or does")


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
    file = Source("broken.py", BROKEN)
    assert list(bad_beginnings(file)) == ["broken.py:2: Whether it is broken.", "broken.py:17: See above."]
    assert list(undocumented(file, {"Shown"})) == ["broken.py:7: Shown.does"]
