"""docs/dev/faults.md: each of its rows has a test that CI runs, and lists all tests that are marked with its number.

After a change of marks, `PYTHONPATH=tests/kit python tests/docs/test_faults_page.py` writes the lists anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from checkout import ROOT
from marks import Proof, marked, proofs, unseen
from sources import Source, refuse

PAGE = ROOT / "docs" / "dev" / "faults.md"
#: Where the list begins, which is made of marks.
LIST = "the others in `make test`.\n\n"


def every() -> list[Proof]:
    return marked("fault")


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
    refuse(map(str, unproven(every(), rows(PAGE.read_text()))), "CI runs a test of each row")


def test_each_mark_is_of_a_row() -> None:
    numbers = rows(PAGE.read_text())
    refuse((str(proof) for proof in every() if not set(proof.rows) <= set(numbers)), "a mark is of a row")


def test_the_list_is_that_of_the_marks() -> None:
    text = PAGE.read_text()
    said = text.partition(LIST)[2]
    assert said == listed(every(), rows(text)), "PYTHONPATH=tests/kit python tests/docs/test_faults_page.py"


def test_each_mark_is_seen() -> None:
    """One without a number, or in a place where the scan does not look, would count for nothing."""
    refuse(unseen("fault", Path(__file__)), "a mark stands where the scan looks, with a number")


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
@pytest.mark.fault(4)
class TestD:
    @pytest.mark.fault(5)
    def test_e(self): ...
"""


def test_the_scan_finds_marks_and_what_lacks_them() -> None:
    found = list(proofs("fault", Source("tests/x.py", EXAMPLE)))
    assert [(p.name, p.rows, p.in_ci) for p in found] == [
        ("x.py::test_a", (1, 2), True),
        ("x.py::test_b", (3,), False),
        ("x.py::TestD::test_e", (4, 5), True),
    ]
    assert listed(found, [1, 3]) == "- 1: `x.py::test_a` (ssh)\n- 3: `x.py::test_b` (ssh)\n"
    assert unproven(found, [1, 2, 3, 6]) == [3, 6]


if __name__ == "__main__":
    before = PAGE.read_text().partition(LIST)[0]
    PAGE.write_text(before + LIST + listed(every(), rows(before)))
