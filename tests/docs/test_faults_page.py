"""docs/dev/faults.md: each of its rows has a test that CI runs, and lists all tests that are marked with its number.

After a change of marks, `PYTHONPATH=tests/kit python tests/docs/test_faults_page.py` writes the lists anew.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from checkout import ROOT, TESTS

PAGE = ROOT / "docs" / "dev" / "faults.md"
#: Where the list begins, which is made of marks.
LIST = "the others in `make test`.\n\n"
#: Marks of suites of their own, all of which CI runs; what is slow it does not, nor what needs a GPU.
SUITES = ("netns", "ssh", "slurm", "mpi", "ray")
NOT_IN_CI = ("slow", "gpu")


@dataclass(frozen=True)
class Proof:
    """A test, the rows that it is marked with, and its other marks, its file's among them."""

    name: str
    rows: tuple[int, ...]
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


def proofs(name: str, text: str) -> Iterator[Proof]:
    """The tests of a file that are marked with rows."""
    body = ast.parse(text).body
    ours = [n.value for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark"]
    everybodys = {mark for value in ours for mark, _ in _marks(value)}
    for function in body:
        if isinstance(function, ast.FunctionDef):
            # a mark within parametrize is of one variant
            own = [
                mark for d in function.decorator_list if "parametrize" not in ast.unparse(d)[:40] for mark in _marks(d)
            ]
            rows = tuple(ast.literal_eval(row) for mark, args in own if mark == "fault" for row in args)
            if rows:
                yield Proof(f"{name}::{function.name}", rows, frozenset({mark for mark, _ in own} | everybodys))


def every() -> list[Proof]:
    files = sorted(path for path in TESTS.rglob("test_*.py") if ".mark.fault" in path.read_text())
    return [proof for path in files for proof in proofs(path.relative_to(TESTS).as_posix(), path.read_text())]


def rows(text: str) -> list[int]:
    """The numbers of the table's rows."""
    return [int(number) for number in re.findall(r"(?m)^\| (\d+) \| \S.* \| \S.* \|.*\|$", text)]


def listed(found: list[Proof], numbers: list[int]) -> str:
    """The list of the page."""
    lines = []
    for number in numbers:
        tests = ", ".join(str(proof) for proof in found if number in proof.rows)
        lines.append(f"- {number}: {tests}")
    return "\n".join(lines) + "\n"


def unproven(found: list[Proof], numbers: list[int]) -> list[int]:
    """The rows without any test that CI runs."""
    return [number for number in numbers if not any(number in p.rows and p.in_ci for p in found)]


def test_the_table_has_every_row_once() -> None:
    assert rows(PAGE.read_text()) == list(range(1, 49))


def test_each_row_has_a_test_that_ci_runs() -> None:
    assert unproven(every(), rows(PAGE.read_text())) == []


def test_each_mark_is_of_a_row() -> None:
    numbers = rows(PAGE.read_text())
    assert [str(proof) for proof in every() if not set(proof.rows) <= set(numbers)] == []


def test_the_list_is_that_of_the_marks() -> None:
    text = PAGE.read_text()
    said = text.partition(LIST)[2]
    assert said == listed(every(), rows(text)), "PYTHONPATH=tests/kit python tests/docs/test_faults_page.py"


def test_each_mark_is_seen() -> None:
    """One without a number, or in a place where the scan does not look, would count for nothing."""
    for path in set(TESTS.rglob("test_*.py")) - {Path(__file__)}:
        text = path.read_text()
        assert text.count("mark.fault") == sum(1 for _ in proofs(path.name, text)), path


EXAMPLE = """
import pytest
pytestmark = [pytest.mark.ssh]
@pytest.mark.fault(1, 2)
@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.slow)])
def test_a(): ...
@pytest.mark.slow
@pytest.mark.fault(3)
def test_b(): ...
def test_c(): ...
"""


def test_the_scan_finds_marks_and_what_lacks_them() -> None:
    found = list(proofs("x.py", EXAMPLE))
    assert [(p.name, p.rows, p.in_ci) for p in found] == [("x.py::test_a", (1, 2), True), ("x.py::test_b", (3,), False)]
    assert listed(found, [1, 3]) == "- 1: `x.py::test_a` (ssh)\n- 3: `x.py::test_b` (ssh)\n"
    assert unproven(found, [1, 2, 3, 4]) == [3, 4]


if __name__ == "__main__":
    before = PAGE.read_text().partition(LIST)[0]
    PAGE.write_text(before + LIST + listed(every(), rows(before)))
