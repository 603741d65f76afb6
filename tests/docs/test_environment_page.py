"""docs/ENVIRONMENT.md: every variable that the code reads is named, and no other."""

from __future__ import annotations

import re

from checkout import ROOT
from sources import agree, below, refuse

PAGE = ROOT / "docs" / "ENVIRONMENT.md"
VARIABLE = re.compile(r"\bDISTTENSOR_[A-Z_]+\b")
#: Of the tests' own.
TESTS = {"DISTTENSOR_FUZZ_EXAMPLES", "DISTTENSOR_FUZZ_SEEDS", "DISTTENSOR_TESTS_COLD", "DISTTENSOR_TESTS_QUICK"}


def test_every_variable_is_named_and_no_other() -> None:
    rows = re.findall(r"(?m)^\| `(DISTTENSOR_[A-Z_]+)` \|", PAGE.read_text())
    read = TESTS | {name for file in below("disttensor", "runtime") for name in VARIABLE.findall(file.text)}
    refuse(sorted({name for name in rows if rows.count(name) > 1}), "a variable has one row")
    agree(read, rows, "ENVIRONMENT.md has a row for each variable that the code reads")


def test_links_live() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text())
    refuse((link for link in links if not (PAGE.parent / link).exists()), "a link leads somewhere")
