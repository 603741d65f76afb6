"""tests/flaked.txt names tests that exist, and `make flaked` runs these."""

from __future__ import annotations

import re

import flaked
import pytest
from checkout import ROOT, TESTS
from sources import refuse, source


def stands(line: str) -> bool:
    """Whether a line names a test that is there, a date and a reason."""
    found = re.fullmatch(r"(tests/[\w/]+\.py)(?:::(?:\w+::)?(\w+)(?:\[\S+\])?)? \d{4}-\d\d-\d\d \S.*", line)
    if not found or not (ROOT / found[1]).exists():
        return False
    return found[2] is None or f"def {found[2]}(" in source(ROOT / found[1]).text


def test_it_exists_and_has_a_date_and_a_reason() -> None:
    lines = [line for line in (TESTS / "flaked.txt").read_text().splitlines() if line and not line.startswith("#")]
    refuse((line for line in lines if not stands(line)), "a line is a test that is there, a date and a reason")


@pytest.mark.parametrize(
    ("test", "name", "named"),
    [
        ("tests/a.py::test_b", "tests/a.py::test_b", True),
        ("tests/a.py::test_b[3-100]", "tests/a.py::test_b", True),
        ("tests/a.py::test_b[x-3-100]", "tests/a.py::test_b", True),
        ("tests/a.py::test_b[x-3-100]", "tests/a.py::test_b[x]", True),
        ("tests/a.py::test_b[x-y]", "tests/a.py::test_b[x-*]", True),
        ("tests/a.py::test_b[1-3-100]", "tests/a.py", True),
        ("tests/a.py::test_bc[3-100]", "tests/a.py::test_b", False),
        ("tests/a.py::test_b[y-3-100]", "tests/a.py::test_b[x]", False),
        ("tests/a.py::test_b[3-100]", "tests/a.py::test_b[x]", False),
        ("tests/ab.py::test_b", "tests/a.py", False),
    ],
)
def test_what_a_name_stands_for(test: str, name: str, named: bool) -> None:
    assert flaked.is_named(test, name) is named
