"""Which tests are marked with what, read from their files' text: pages list the tests behind their rows so.

``@pytest.mark.NAME(1, 2)`` on a function, a method or a class counts. One within ``parametrize`` is of one variant, and
is not looked for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sources import Source, below

#: Marks of suites of their own, all of which CI runs; what is slow it does not, nor what needs a GPU.
SUITES = ("netns", "ssh", "slurm", "mpi", "ray")
NOT_IN_CI = ("slow", "gpu")


@dataclass(frozen=True)
class Proof:
    """A test, the rows that it is marked with, and its other marks, its class's and file's among them."""

    name: str
    rows: tuple[Any, ...]
    marks: frozenset[str]

    @property
    def in_ci(self) -> bool:
        return self.marks.isdisjoint(NOT_IN_CI)

    def __str__(self) -> str:
        suite = next((mark for mark in SUITES if mark in self.marks), "" if self.in_ci else "slow")
        return f"`{self.name}`" + (f" ({suite})" if suite else "")


def _marks(node: ast.AST) -> Iterator[tuple[str, list[ast.expr]]]:
    """(name, arguments) of the marks in an expression: `pytest.mark.slow`, `pytest.mark.fault(3)`."""
    called = {call.func: call.args for call in ast.walk(node) if isinstance(call, ast.Call)}
    for found in ast.walk(node):
        match found:
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="pytest"), attr="mark"), attr=name):
                yield name, called.get(found, [])


def _own(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> list[tuple[str, list[ast.expr]]]:
    return [m for d in node.decorator_list if "parametrize" not in ast.unparse(d)[:40] for m in _marks(d)]


def proofs(mark: str, file: Source) -> Iterator[Proof]:
    """The tests of a file that are marked so with rows."""
    body = file.tree.body
    ours = [n.value for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark"]
    everybodys = [m for value in ours for m in _marks(value)]

    def within(nodes: list[ast.stmt], prefix: str, above: list[tuple[str, list[ast.expr]]]) -> Iterator[Proof]:
        for node in nodes:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                yield from within(node.body, f"{prefix}::{node.name}", above + _own(node))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                said = above + _own(node)
                rows = tuple(ast.literal_eval(row) for kind, args in said if kind == mark for row in args)
                if rows:
                    yield Proof(f"{prefix}::{node.name}", rows, frozenset(kind for kind, _ in said))

    yield from within(body, file.name.removeprefix("tests/"), everybodys)


@cache
def marked(mark: str) -> list[Proof]:
    """All tests that are marked so, in the order of their files."""
    return [proof for file in _tests() if f".mark.{mark}" in file.text for proof in proofs(mark, file)]


def _tests() -> list[Source]:
    return [file for file in below("tests") if file.path.name.startswith("test_")]


def unseen(mark: str, but: Path) -> list[str]:
    """Files with marks that the scan does not see: without a row, or in a place where it does not look."""
    return [
        file.name
        for file in _tests()
        if file.path != but
        and file.text.count(f".mark.{mark}(") + file.text.count(f".mark.{mark}\n") != _decorators(mark, file)
    ]


def _decorators(mark: str, file: Source) -> int:
    """The marks of a file that stand where they count, and name something."""
    if f".mark.{mark}" not in file.text:
        return 0
    count = 0
    tests = {ast.FunctionDef: "test", ast.AsyncFunctionDef: "test", ast.ClassDef: "Test"}
    for node in file.nodes(*tests):
        if node.name.startswith(tests[type(node)]):
            count += sum(kind == mark and bool(args) for kind, args in _own(node))
    for node in file.nodes(ast.Assign):
        if ast.unparse(node.targets[0]) == "pytestmark":
            count += sum(kind == mark and bool(args) for kind, args in _marks(node.value))
    return count
