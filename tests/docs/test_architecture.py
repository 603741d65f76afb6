"""ARCHITECTURE.md and docs/dev/: every folder is named, every file that they name is there, every link lives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from checkout import ROOT

PAGES = [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs" / "dev").glob("*.md"))]
FOLDERS = sorted(
    path.parent.relative_to(ROOT).as_posix()
    for top in ("disttensor", "runtime")
    for path in (ROOT / top).rglob("__init__.py")
    if path.parent != ROOT / top and "disttensor/runtime" not in path.as_posix()
)
FILES = {
    path.relative_to(ROOT).as_posix()
    for top in ("disttensor", "runtime", "tests", "tools", "docs")
    for path in (ROOT / top).rglob("*")
    if path.is_file()
}
#: Files that are planned, and said to be.
PLANNED = {"runtime/node/side_channel.py"}


def missing(text: str) -> list[str]:
    """The files that a page names between backquotes or in a walk, and that are not there."""
    named = set(re.findall(r"(?<![\w/.-])((?:[a-z_]+/)*[a-z_]+\.py)\b", text)) - PLANNED
    return sorted(name for name in named if not any(path == name or path.endswith("/" + name) for path in FILES))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_what_is_named_is_there(path: Path) -> None:
    assert missing(path.read_text()) == []


def test_the_scan_finds_what_is_not_there() -> None:
    assert missing("see `dispatch/nothing.py` and outbox.py") == ["dispatch/nothing.py"]


def test_every_folder_is_named() -> None:
    tree = (ROOT / "ARCHITECTURE.md").read_text()
    assert [folder for folder in FOLDERS if f"{Path(folder).name}/" not in tree] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_live(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text())
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


def test_every_page_is_linked() -> None:
    tree = (ROOT / "ARCHITECTURE.md").read_text()
    assert [path.name for path in PAGES[1:] if f"docs/dev/{path.name}" not in tree] == []
