"""docs/dev/first-hour.md: each row says who takes it, and each test that it names is there and has what it names."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from checkout import ROOT

PAGE = ROOT / "docs" / "dev" / "first-hour.md"
#: The number of rows of each table.
ROWS = {"Findings": 18, "Mistakes that got no answer, or a wrong one": 11, "Mistakes that got half of an answer": 19}
ISSUES = ("Defects", "First hour", "House", "Seeing", "Site", "Torch's programs")


def tables(text: str) -> dict[str, list[list[str]]]:
    """The cells of each row, by the heading above the table."""
    found: dict[str, list[list[str]]] = {}
    for section in text.split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        rows = [[cell.strip() for cell in row[1:-1].split(" | ")] for row in body.splitlines() if row[:1] == "|"]
        found[heading] = rows[2:]
    return found


def named(cell: str) -> list[str]:
    return re.findall(r"`(tests/[^`]+)`", cell)


@cache
def cases_of(path: Path) -> dict[str, str]:
    """The source of each test of a file; "" is the whole file's."""
    text = path.read_text()
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {"": text} | {f.name: "\n".join([*map(ast.unparse, f.decorator_list)]) for f in functions}


def missing(test: str, root: Path = ROOT) -> bool:
    """Whether there is no such test: no such file, function, or name of a case in it."""
    file, _, rest = test.partition("::")
    name, _, case = rest.removesuffix("]").partition("[")
    if not (root / file).is_file():
        return True
    tests = cases_of(root / file)
    return name not in tests or bool(case and ("parametrize" not in tests[name] or f'"{case}": (' not in tests[""]))


def test_every_row_is_there_with_its_issue() -> None:
    found = tables(PAGE.read_text())
    assert {heading: len(rows) for heading, rows in found.items()} == ROWS
    assert [row[0] for row in found["Findings"]] == [str(k) for k in range(1, 19)]
    for rows in found.values():
        for *what, issue, shown in rows:
            assert all(what), what
            assert issue.startswith(ISSUES), what
            if issue.startswith(("First hour", "Defects")):
                assert named(shown) or "words stay: " in shown, what


def test_each_test_is_there() -> None:
    text = PAGE.read_text()
    assert len(named(text)) > 45
    assert [test for test in named(text) if missing(test)] == []


@pytest.mark.parametrize(
    ("test", "gone"),
    [
        ("a.py::test_one", False), ("a.py::test_one[first]", False), ("a.py", False), ("b.py", True),
        ("a.py::test_two[first]", True), ("a.py::test_one[second]", True), ("a.py::test_three", True),
    ],
)  # fmt: skip
def test_what_is_gone_is_found(test: str, gone: bool, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        'CASES = {"first": (1, 2)}\n@pytest.mark.parametrize("name", CASES)\ndef test_one(name): pass\n'
        "def test_two(): pass\n"
    )
    assert missing(test, tmp_path) is gone
