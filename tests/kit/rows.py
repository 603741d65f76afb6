"""The page docs/dev/ROWS.md is made of the marks ``@pytest.mark.row("T4")``, of the table of what each row is
(tests/docs/rows.txt), and of the lines ``Row: T4`` of mutants.

After a change of any of them, `PYTHONPATH=tests/kit python tests/kit/rows.py` writes the page anew.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mutations
from checkout import ROOT, TESTS
from marks import Proof, marked

PAGE = ROOT / "docs" / "dev" / "ROWS.md"
TABLE = TESTS / "docs" / "rows.txt"
#: How many rows each ancestor has.
COUNTS = {"M": 26, "T": 58, "I": 39, "P": 11, "G": 17}
EVERY = [f"{letter}{number}" for letter, count in COUNTS.items() for number in range(1, count + 1)]
#: What the ancestors' pages say beyond these: such rows are those that the table has, in order, some of them in parts.
BEYOND = re.compile(r"S(\d+)([b-z]?)")

HEAD = """\
# Rows

What the ancestors of disttensor had, row by row, and what shows that it works here: PyTorch's THD master-worker mode
(M), TorchMPI (T), torch-ipc (I), distributed-training-patterns (P) and torch.distributed 1.0 (G); and what their pages
and PyTorch's issue 241 say beyond the rows of any of them (S).

`PYTHONPATH=tests/kit python tests/kit/rows.py` writes this page: of the tests that are marked
`@pytest.mark.row("T4")`, of what each row is (tests/docs/rows.txt) and of the
[mutants](../../tests/mutants/README.md), each of which breaks what a row promises and has to turn one of its tests red.
One at least breaks the function that users call, and not the engine below it. What an ancestor had and a row leaves out
stands under "dropped, because".
Tests with a word in brackets run in that engine's suite ([tests.md](tests.md)), the others in `make test`.
"""


@dataclass(frozen=True)
class Row:
    """A row: what it is, what was dropped of it and why, and what is still missing.

    Behind what was dropped stand the page that tells users, and words of its that do: (SLURM.md: "tasks share a GPU").
    """

    id: str
    what: str
    dropped: str = ""
    missing: str = ""

    @property
    def told(self) -> tuple[str, str]:
        """The page of docs/ that says what was dropped, and words of it; empty where nothing says so."""
        found = re.search(r' \((\w+\.md): "(.+)"\)$', self.dropped)
        return (found[1], found[2]) if found else ("", "")

    @property
    def why(self) -> str:
        """What was dropped and why, with a link to the page that tells users."""
        page, _ = self.told
        return self.dropped[: self.dropped.rindex(" (")] + f" ([{page}](../{page}))" if page else self.dropped


def table() -> list[Row]:
    return [Row(*line.split(" | ")) for line in TABLE.read_text().splitlines()]


def said_beyond(rows: list[Row]) -> list[str]:
    """The rows of what the ancestors' pages say beyond the rows of any of them."""
    return [row.id for row in rows if BEYOND.fullmatch(row.id)]


@dataclass(frozen=True)
class Mutant:
    """A mutant's name, the rows that it breaks, and the tests that it turns red, without their variants."""

    name: str
    rows: tuple[str, ...]
    red: frozenset[str]


def mutants() -> list[Mutant]:
    """Those that name rows."""
    return [
        Mutant(name, mutant.rows, frozenset(test.removeprefix("tests/").partition("[")[0] for test in mutant.red))
        for name, mutant in _files().items()
        if mutant.rows
    ]


@cache
def _files() -> dict[str, mutations.Mutant]:
    return {mutant.name: mutant for mutant in mutations.read_all(ROOT)}


# ---- where mutants are -----------------------------------------------------------------------------------------------

#: Files of which every line is what users call, or what they run: the front end, examples and benchmarks.
OUTSIDE = ("disttensor/", "dtrun.py", "examples/", "tools/bench/")


def public_lines() -> dict[str, list[range]]:
    """The lines of the engine's functions and classes, and of the classes that these stem from, that users have."""
    themes = re.findall(r"(?m)^### `dt\.(\w+)`", (ROOT / "docs" / "dev" / "NAMES.md").read_text())
    found: dict[str, list[range]] = {}
    for theme in ["", *(f".{theme}" for theme in themes), ".runtime.channel"]:
        module = importlib.import_module(f"disttensor{theme}")
        for name in getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]:
            given = inspect.unwrap(getattr(module, name))
            for each in given.__mro__ if isinstance(given, type) else [given]:
                if not getattr(each, "__module__", "").startswith("disttensor.runtime") or inspect.ismodule(each):
                    continue
                try:
                    lines, first = inspect.getsourcelines(each)
                except (OSError, TypeError):  # plain data
                    continue
                file = Path(inspect.getsourcefile(each) or "").resolve().relative_to(ROOT).as_posix()
                found.setdefault(file, []).append(range(first, first + len(lines)))
    return found


def seen_from_outside(mutant: str, public: dict[str, list[range]], product: mutations.Product) -> bool:
    """Whether a mutant changes a function that users call, or a file of its theme."""
    edits = _files()[mutant].edits
    return any(edit.file.startswith(OUTSIDE) for edit in edits) or any(
        line in lines for edit in edits for line in product.find(edit).lines for lines in public.get(edit.file, ())
    )


def inside(broken_by: list[Mutant]) -> set[str]:
    """The rows all of whose mutants are in the engine, below what users call."""
    public, product = public_lines(), mutations.Product(ROOT)
    outside = {row for mutant in broken_by if seen_from_outside(mutant.name, public, product) for row in mutant.rows}
    return {row for mutant in broken_by for row in mutant.rows} - outside


# ---- the page --------------------------------------------------------------------------------------------------------


def unbroken(rows: list[Row], proofs: list[Proof], broken_by: list[Mutant]) -> list[str]:
    """The rows that work, as far as their tests can tell, and that no mutant breaks."""
    shown = {row for proof in proofs for row in proof.rows} - {row for mutant in broken_by for row in mutant.rows}
    return [row.id for row in rows if row.id in shown and not row.missing]


def page(rows: list[Row], proofs: list[Proof], broken_by: list[Mutant]) -> str:
    """The page's text."""
    tests = {row.id: [str(proof) for proof in proofs if row.id in proof.rows] for row in rows}
    names = {row.id: [mutant.name for mutant in broken_by if row.id in mutant.rows] for row in rows}
    working = [row for row in rows if tests[row.id] and not row.missing]
    text = HEAD + "\n## Working\n\n| row | what | dropped, because | shown by | broken by |\n|---|---|---|---|---|\n"
    for row in working:
        cells = [row.id, row.what, row.why, ", ".join(tests[row.id]), ", ".join(names[row.id])]
        text += f"| {' | '.join(cells)} |\n"
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
