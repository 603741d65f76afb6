"""docs/SECURITY.md: each promise names a test, and each test that is named exists."""

from __future__ import annotations

import ast
import re

from checkout import ROOT, TESTS
from sources import refuse, source

PAGE = (ROOT / "docs" / "SECURITY.md").read_text()
NAMED = re.compile(r"`([a-z_/]+\.py)::(test_\w+)`")


def missing(text: str) -> list[str]:
    """The tests that a text names and that are not there."""
    found = []
    for file, name in NAMED.findall(text):
        path = TESTS / file
        body = source(path).tree.body if path.exists() else []
        if name not in {node.name for node in body if isinstance(node, ast.FunctionDef)}:
            found.append(f"{file}::{name}")
    return found


def unproven(text: str) -> list[str]:
    """The beginnings of promises that name no test: of rows of the table, and of items of what is on."""
    whom, on = (text.split(f"\n## {title}\n")[1].split("\n## ")[0] for title in ("Against whom", "On without asking"))
    promises = [line for line in whom.splitlines() if line.startswith("| ")][1:] + re.split(r"(?m)^- ", on)[1:]
    return [promise[:40] for promise in promises if not NAMED.search(promise)]


def test_every_test_that_is_named_is_there() -> None:
    assert len(NAMED.findall(PAGE)) > 30
    refuse(missing(PAGE), "a test that is named is there")


def test_every_promise_names_a_test() -> None:
    refuse(unproven(PAGE), "a promise names a test")


def test_the_scans_find_what_is_not_there() -> None:
    named = "`docs/test_security_page.py::test_nothing`, `docs/test_no_page.py::test_it`"
    assert missing(named) == ["docs/test_security_page.py::test_nothing", "docs/test_no_page.py::test_it"]
    text = "\n## Against whom\n| who | x |\n|---|---|\n| root | all |\n## On without asking\n\n- Every lock.\n"
    assert unproven(text) == ["| root | all |", "Every lock.\n"]
