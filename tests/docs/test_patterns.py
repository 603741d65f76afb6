"""The examples of examples/patterns print what their first lines say, whatever the data channel."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from printed import as_shown
from test_readme import ROOT, python

PATTERNS = sorted((ROOT / "examples" / "patterns").glob("*.py"))
#: Those that are run each time.


def told(path: Path) -> str:
    """The output that an example documents."""
    block = re.search(r'Prints\n\n((?: {4}.*\n)+)"""', path.read_text())
    assert block, path
    return textwrap.dedent(block[1])


@pytest.mark.row("P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8", "P9", "I31")
@pytest.mark.parametrize("path", PATTERNS, ids=lambda path: path.stem)
def test_prints_what_it_says(path: Path, tmp_path: Path) -> None:
    assert as_shown(python(str(path), cwd=tmp_path), told(path)) == told(path)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "tcp", "gloo"])
@pytest.mark.parametrize("path", PATTERNS, ids=lambda path: path.stem)
def test_with_every_channel(path: Path, backend: str, tmp_path: Path) -> None:
    assert as_shown(python(str(path), "--backend", backend, cwd=tmp_path), told(path)) == told(path)


def test_there_is_one_for_each_pattern() -> None:
    names = {path.stem for path in PATTERNS}
    assert names >= {"point_to_point", "broadcast", "scatter", "gather", "reduce", "all_reduce", "ring", "hierarchical"}
