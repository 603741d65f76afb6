"""docs/ENVIRONMENT.md: every variable that the code reads is named, and no other."""

from __future__ import annotations

import re

from checkout import ROOT

PAGE = ROOT / "docs" / "ENVIRONMENT.md"
READ = {
    name
    for top in ("disttensor", "runtime")
    for path in (ROOT / top).rglob("*.py")
    for name in re.findall(r"\bDISTTENSOR_[A-Z_]+\b", path.read_text())
}
#: Of the tests' own.
TESTS = {"DISTTENSOR_FUZZ_EXAMPLES", "DISTTENSOR_FUZZ_SEEDS", "DISTTENSOR_TESTS_COLD"}


def test_every_variable_is_named_and_no_other() -> None:
    rows = re.findall(r"(?m)^\| `(DISTTENSOR_[A-Z_]+)` \|", PAGE.read_text())
    assert len(rows) == len(set(rows))
    assert set(rows) == READ | TESTS


def test_links_live() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text())
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
