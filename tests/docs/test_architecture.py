"""ARCHITECTURE.md and docs/dev/: every folder is named, every file that they name is there; invariants stand at the
code that keeps them. Every link of every page lives."""

from __future__ import annotations

import re
from pathlib import Path

from checkout import ROOT
from sources import below, refuse

PAGES = [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs" / "dev").glob("*.md"))]
LINKING = [
    *(ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "README.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
#: How many invariants there are.
INVARIANTS = 11
FOLDERS = sorted(
    file.path.parent.relative_to(ROOT).as_posix()
    for file in below("disttensor", "runtime")
    if file.path.name == "__init__.py" and file.path.parent.parent != ROOT
)
FILES = {
    path.relative_to(ROOT).as_posix()
    for top in ("disttensor", "runtime", "tests", "tools", "docs", "examples")
    for path in (ROOT / top).rglob("*")
    if path.is_file()
} | {path.name for path in ROOT.glob("*.py")}
#: Files that are planned, and said to be.
PLANNED = {"runtime/node/side_channel.py"}


def missing(text: str) -> list[str]:
    """The files that a page names between backquotes or in a walk, and that are not there. What programs have printed
    (between fences) may name the programs themselves."""
    parts = text.split("\n```")
    prose, printed = "\n".join(parts[::2]), "\n".join(parts[1::2])
    named = set(re.findall(r"(?<![\w/.-])((?:[a-z_]+/)*[a-z_]+\.py)\b", prose)) - PLANNED
    named |= set(re.findall(r"(?<![\w/.-])((?:[a-z_]+/)+[a-z_]+\.py)\b", printed))
    return sorted(name for name in named if not any(path == name or path.endswith("/" + name) for path in FILES))


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_what_is_named_is_there() -> None:
    gone = (f"{named(path)}: {name}" for path in PAGES for name in missing(path.read_text()))
    refuse(gone, "a page names files that are there")


def test_the_scan_finds_what_is_not_there() -> None:
    assert missing("see `dispatch/nothing.py` and outbox.py") == ["dispatch/nothing.py"]
    assert missing("such as\n```\nmine.py, runtime/nothing.py\n```\nand nothing.py") == [
        "nothing.py",
        "runtime/nothing.py",
    ]


def test_every_folder_is_named() -> None:
    tree = (ROOT / "ARCHITECTURE.md").read_text()
    unnamed = (folder for folder in FOLDERS if f"{Path(folder).name}/" not in tree)
    refuse(unnamed, "ARCHITECTURE.md names each folder")


def dead_links(path: Path, text: str) -> list[str]:
    """The relative links of a page at ``path`` that lead nowhere."""
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    return [link for link in links if "://" not in link and not (path.parent / link).exists()]


def test_links_live() -> None:
    dead = (f"{named(path)}: {link}" for path in LINKING for link in dead_links(path, path.read_text()))
    refuse(dead, "a link leads somewhere")


def test_the_scan_finds_a_dead_link() -> None:
    text = "[a](docs/dev/wire.md#threads), [b](docs/dev/wires.md), [c](https://example.org/nothing)"
    assert dead_links(ROOT / "README.md", text) == ["docs/dev/wires.md"]


def unlinked(text: str) -> list[str]:
    """The pages of docs/dev/ to which a text has no link."""
    links = set(re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text))
    return [path.name for path in PAGES[1:] if f"docs/dev/{path.name}" not in links]


def test_every_page_is_linked() -> None:
    refuse(unlinked((ROOT / "ARCHITECTURE.md").read_text()), "ARCHITECTURE.md links each page of docs/dev")
    assert "wire.md" in unlinked("docs/dev/wire.md is named, [this](docs/dev/node.md) is linked")


# ---- invariants ------------------------------------------------------------------------------------------------------


def invariants(page: str) -> dict[int, list[str]]:
    """Number of each invariant of the page -> the files that it links."""
    section = page.split("\n## Invariants\n")[1].split("\n## ")[0]
    items = re.split(r"(?m)^(\d+)\. ", section)[1:]
    return {int(n): re.findall(r"\]\(([^)]+\.py)\)", text) for n, text in zip(items[::2], items[1::2], strict=True)}


def marked() -> dict[int, set[str]]:
    """Number of each invariant -> the files of the product with a line ``#: Invariant N``."""
    found: dict[int, set[str]] = {}
    for file in below("disttensor", "runtime"):
        for number in re.findall(r"(?m)^ *#: Invariant (\d+)\b", file.text):
            found.setdefault(int(number), set()).add(file.name)
    return found


def test_every_invariant_stands_at_the_code_that_keeps_it() -> None:
    page = invariants((ROOT / "ARCHITECTURE.md").read_text())
    assert list(page) == list(range(1, INVARIANTS + 1))
    linked = {(number, link) for number, links in page.items() for link in links}
    there = {(number, name) for number, names in marked().items() for name in names}
    refuse(
        (f"{number}: {name}" for number, name in sorted(linked - there)), "a linked file has a line `#: Invariant N`"
    )
    refuse((f"{number}: {name}" for number, name in sorted(there - linked)), "ARCHITECTURE.md links what keeps it")
