"""tests/flaked.txt names tests that exist."""

from __future__ import annotations

import re

import pytest
from checkout import ROOT, TESTS

LINES = [line for line in (TESTS / "flaked.txt").read_text().splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split()[0])
def test_it_exists_and_has_a_date_and_a_reason(line: str) -> None:
    found = re.fullmatch(r"(tests/[\w/]+\.py)(?:::(\w+)(?:\[\S+\])?)? \d{4}-\d\d-\d\d \S.*", line)
    assert found, line
    path, function = found.groups()
    assert function is None or f"def {function}(" in (ROOT / path).read_text()
