"""Tests of behaviour keep to what users have: public names of disttensor, and ``disttensor.testing``.

So they survive a change of what lies inside. Tests of something internal may import it: they are listed, with why.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import ROOT

import disttensor as dt

#: Where tests of behaviour lie.
FOLDERS = ("ops", "autograd", "graphs", "streams", "collectives", "faults", "docs", "launch")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / "tests" / folder).glob("*.py"))]

#: What users import: documented modules. Their own private names are private all the same.
PUBLIC = {
    "disttensor",
    "dtrun",
    "disttensor.testing",
    "disttensor.channels",
    "disttensor.functional",
    "disttensor.runtime.channel",
}

#: Private names that are torch's, on tensors.
TORCHS = {"_base", "_grad", "_is_view", "_version"}

#: Files that reach inside, and why: each tests something internal. One that needs its entry no more has to leave.
INTERNAL: dict[str, str] = {}


def reaches(text: str) -> Iterator[tuple[int, str]]:
    """(line, what) of all that a program, or one that it has as text, uses of disttensor and a user does not."""
    tree = ast.parse(text)
    ours, foreign = set[str](), {"self", "cls"}  #: names of our modules, and of what is others'
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                (ours if _is_ours(alias.name) else foreign).add(alias.asname or alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom) and not _is_ours(node.module or ""):
            foreign.update(alias.asname or alias.name for alias in node.names)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names if _private_module(alias.name))
            case ast.ImportFrom(module=str(module), names=names) if _is_ours(module):
                for alias in names:
                    if _private_name(module, alias.name):
                        yield node.lineno, f"{module}.{alias.name}"
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in ours:
                if _private_name("disttensor", attribute):
                    yield node.lineno, f"{name}.{attribute}"
            case ast.Attribute(attr=attribute) if _is_private(attribute) and attribute not in TORCHS:
                if _root(node) not in foreign:
                    yield node.lineno, ast.unparse(node)
            case ast.Constant(value=str(inner)) if "disttensor" in inner:
                yield from ((node.lineno, what) for what in _in_text(inner))


def _in_text(text: str) -> Iterator[str]:
    if text.startswith("disttensor.") and text.replace(".", "").replace("_", "").isalnum():
        # a name, such as monkeypatch.setattr takes
        module, _, name = text.rpartition(".")
        if name and _private_module(text) and _private_name(module, name):
            yield text
    elif "import disttensor" in text or "from disttensor" in text:
        try:
            yield from (what for _, what in reaches(textwrap.dedent(text)))
        except SyntaxError:  # a sentence, or a part of a program
            return


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in ("disttensor", "dtrun")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _private_module(name: str) -> bool:
    return _is_ours(name) and name not in PUBLIC


def _private_name(module: str, name: str) -> bool:
    """Whether ``from module import name`` takes what users don't have."""
    if _private_module(module) or _is_private(name):
        return True
    if module != "disttensor" or name in dt.__all__ or f"disttensor.{name}" in PUBLIC:
        return False
    return hasattr(dt, name) and not name.startswith("__")


def _root(node: ast.expr) -> str:
    """The name that an expression begins with."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "tests"))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_behaviour_is_tested_by_public_names(path: Path) -> None:
    found = [f"{name_of(path)}:{line}: {what}" for line, what in reaches(path.read_text())]
    if name_of(path) in INTERNAL:
        assert found, f"{name_of(path)} reaches inside no more: take it from the list"
    else:
        assert not found, "a test of behaviour uses public names and disttensor.testing"
