"""The page docs/dev/ROWS.md is made of the marks ``@pytest.mark.row("T4")``, of the table of what each row is
(tests/docs/rows.txt), and of the lines ``Row: T4`` of mutants.

After a change of any of them, `PYTHONPATH=tests/kit python tests/kit/rows.py` writes the page anew.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from checkout import ROOT, TESTS
from marks import Proof, marked

PAGE = ROOT / "docs" / "dev" / "ROWS.md"
TABLE = TESTS / "docs" / "rows.txt"
#: How many rows each ancestor has.
COUNTS = {"M": 26, "T": 58, "I": 39, "P": 11, "G": 17}
EVERY = [f"{letter}{number}" for letter, count in COUNTS.items() for number in range(1, count + 1)]

HEAD = """\
# Rows

What the ancestors of disttensor had, row by row, and what shows that it works here: PyTorch's THD master-worker mode
(M), TorchMPI (T), torch-ipc (I), distributed-training-patterns (P) and torch.distributed 1.0 (G).

`PYTHONPATH=tests/kit python tests/kit/rows.py` writes this page: of the tests that are marked
`@pytest.mark.row("T4")`, of what each row is (tests/docs/rows.txt) and of the
[mutants](../../tests/mutants/README.md), each of which breaks what a row promises and has to turn one of its tests red.
Tests with a word in brackets run in that engine's suite ([tests.md](tests.md)), the others in `make test`.
"""


@dataclass(frozen=True)
class Row:
    """A row: what it is, and what is missing of it."""

    id: str
    what: str
    missing: str = ""


def table() -> list[Row]:
    return [Row(*line.split(" | ")) for line in TABLE.read_text().splitlines()]


@dataclass(frozen=True)
class Mutant:
    """A patch, the rows that it breaks, and the tests that it turns red, without their variants."""

    name: str
    rows: tuple[str, ...]
    red: frozenset[str]


def mutants() -> list[Mutant]:
    """Those that name rows."""
    found = []
    for path in sorted((TESTS / "mutants").glob("*.patch")):
        head = path.read_text().partition("diff --git ")[0]
        rows = tuple(row for line in re.findall(r"(?m)^Row: (.*)$", head) for row in line.split())
        red = frozenset(re.findall(r"(?m)^Red: tests/([^[\s]+)", head))
        if rows:
            found.append(Mutant(path.stem, rows, red))
    return found


def unbroken(rows: list[Row], proofs: list[Proof], broken_by: list[Mutant]) -> list[str]:
    """The rows that work, as far as their tests can tell, and that no mutant breaks."""
    shown = {row for proof in proofs for row in proof.rows} - {row for mutant in broken_by for row in mutant.rows}
    return [row.id for row in rows if row.id in shown and not row.missing]


def page(rows: list[Row], proofs: list[Proof], broken_by: list[Mutant]) -> str:
    """The page's text."""
    tests = {row.id: [str(proof) for proof in proofs if row.id in proof.rows] for row in rows}
    names = {row.id: [mutant.name for mutant in broken_by if row.id in mutant.rows] for row in rows}
    working = [row for row in rows if tests[row.id] and not row.missing]
    text = HEAD + "\n## Working\n\n| row | what | shown by | broken by |\n|---|---|---|---|\n"
    for row in working:
        text += f"| {row.id} | {row.what} | {', '.join(tests[row.id])} | {', '.join(names[row.id])} |\n"
    if partly := [row for row in rows if tests[row.id] and row.missing]:
        text += "\n## Partly\n\n| row | what works | shown by | what is missing |\n|---|---|---|---|\n"
        for row in partly:
            text += f"| {row.id} | {row.what} | {', '.join(tests[row.id])} | {row.missing} |\n"
    if not_yet := [row for row in rows if not tests[row.id]]:
        text += "\n## Not yet\n\n| row | what |\n|---|---|\n"
        for row in not_yet:
            text += f"| {row.id} | {row.what} |\n"
    if bare := unbroken(rows, proofs, broken_by):
        text += "\n## No mutant yet\n\nNothing shows that the tests of these rows notice when it does nothing:\n"
        text += " ".join(bare) + "\n"
    return text


def current() -> str:
    """The page as it should be."""
    return page(table(), marked("row"), mutants())


if __name__ == "__main__":
    PAGE.write_text(current())
