"""The Python files of this checkout, each read and parsed once for a whole process: what scans of the sources walk.

A scan is a test for each rule. It goes through ``product()`` or ``below("tests")``, asks each file for the ``nodes`` of
the kinds that the rule is about, and has ``refuse`` tell all offences at once.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

import pytest
from checkout import ROOT

#: The front end's link to the engine, whose files are those of ``runtime``.
LINK = ROOT / "disttensor" / "runtime"

Node = TypeVar("Node", bound=ast.AST)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Source:
    """A Python file: its text, its syntax tree, and the nodes of this by their kinds.

    ``name`` is its path below the checkout. With a ``text`` it is an example of such a file, and need not be there.
    """

    def __init__(self, name: str, text: str | None = None) -> None:
        self.name = name
        self.path = ROOT / name
        if text is not None:
            self.text = text

    def __repr__(self) -> str:
        return f"Source({self.name!r})"

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        with _kept():
            return ast.parse(self.text, self.name)

    @cached_property
    def _by_kind(self) -> dict[type[ast.AST], list[ast.AST]]:
        found: dict[type[ast.AST], list[ast.AST]] = {}
        with _kept():
            for node in ast.walk(self.tree):
                found.setdefault(type(node), []).append(node)
        return found

    def nodes(self, *kinds: type[Node]) -> Iterator[Node]:
        """The nodes of these kinds: one kind after the other, and of each what lies further out before what it has."""
        for kind in kinds:
            yield from self._by_kind.get(kind, ())  # type: ignore[misc]

    @property
    def module(self) -> str:
        """The module's name as it is imported: "disttensor.runtime.channel.base"."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        if parts[0] == "runtime":
            parts = ("disttensor", *parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def around(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[str, ...]:
        """The names of the functions and classes that a node stands in, the outermost first; decorators are inside."""
        named = self.nodes(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        holding = [each for each in named if each is not node and _first_line(each) <= node.lineno <= _last_line(each)]
        return tuple(each.name for each in sorted(holding, key=lambda each: (_first_line(each), each.col_offset)))

    def at(self, node: ast.expr | ast.stmt | int) -> str:
        """Where a node or a line stands, as editors open it: "runtime/node/state.py:7"."""
        return f"{self.name}:{node if isinstance(node, int) else node.lineno}"


def _first_line(node: Definition) -> int:
    return min(each.lineno for each in (node, *node.decorator_list))


def _last_line(node: Definition) -> int:
    return node.end_lineno or node.lineno


@contextmanager
def _kept() -> Iterator[None]:
    """Has the garbage collector leave alone what is made within, for good: else it looks at a million nodes a time.

    It leaves alone all else that is there, too: a test with a session, its own or its module's, asks for texts only.
    """
    ran = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if ran:
            gc.enable()


@cache
def source(path: Path) -> Source:
    """The file at a path."""
    return Source(path.relative_to(ROOT).as_posix())


@cache
def below(*folders: str) -> tuple[Source, ...]:
    """All Python files below these folders of the checkout, in the order of their paths; those of the engine once."""
    return tuple(
        source(path) for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if LINK not in path.parents
    )


@cache
def product() -> tuple[Source, ...]:
    """What users install: the front end, the engine, dtrun."""
    return (source(ROOT / "dtrun.py"), *below("disttensor", "runtime"))


def refuse(offences: Iterable[str], rule: str) -> None:
    """Fails the test where something offends against a rule, and tells the rule and every offence."""
    if found := list(offences):
        told = "\n".join(f"  {each}" for each in found)
        pytest.fail(f"{rule}\n{told}", pytrace=False)


def agree(there: Iterable[str], listed: Iterable[str], rule: str) -> None:
    """Fails the test where a list is not of what is there, and tells all that only one of the two has."""
    found, named = set(there), set(listed)
    unlisted = [f"{each}: is not listed" for each in sorted(found - named)]
    refuse([*unlisted, *(f"{each}: is listed, and not there" for each in sorted(named - found))], rule)
