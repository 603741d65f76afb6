"""docs/SEEING.md shows what its programs print, except figures, as these differ from run to run."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from checkout import ROOT
from test_readme import python

PAGE = (ROOT / "docs" / "SEEING.md").read_text()
#: The program, and what it prints, which has empty lines.
SHOWN = re.compile(r"```python\n(.*?)```\s*prints\n\n((?:    [^\n]*\n|\n(?=    ))+)", re.DOTALL)
#: What each of the page's programs is about.
PROGRAMS = ("status", "profile", "check_finite", "whence")
#: The host on which the page's output was printed.
HOST = "vm"
#: The folder in which its programs have run.
FOLDER = "/tmp/demo"


def without_figures(text: str) -> str:
    """A text in which each figure is one word, and the columns have no widths."""
    text = re.sub(r"(step\(\)) [\d.]+ s", r"\1", text)  # said once it has taken a second
    text = re.sub(r"\d[\d,]*(\.\d+)?( (bytes|[KMG]iB)|%)?|(?<= )-(?= )", "N", text)  # "-" is not known yet
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


@pytest.mark.parametrize(("program", "shown"), SHOWN.findall(PAGE), ids=PROGRAMS)
def test_a_program_prints_what_the_page_shows(program: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program)
    printed = python("train.py", cwd=tmp_path).replace(str(tmp_path), FOLDER)
    printed = re.sub(rf"\b{re.escape(socket.gethostname())}\b", HOST, printed)
    assert without_figures(printed) == without_figures(shown)
