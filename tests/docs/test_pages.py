"""Programs of docs/ print what stands below them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from checkout import ROOT
from printed import as_shown
from test_readme import SHOWN, python

#: Pages on which each program prints something.
WHOLE = ["ENDPOINTS", "LOCKS", "QUEUES", "RESULTS", "SHARED_DICTS", "TASKS"]
#: Pages that have other snippets beside.
PARTLY = [
    "ACTORS", "ASYNCHRONOUS", "CHANNELS", "CHECKPOINTS", "DATA", "DATA_PARALLEL", "GRAPHS", "MESHES", "PIPELINE",
    "RECOVERY", "SHARDED", "STREAMS", "TENSOR_PARALLEL", "TORCH_PARALLEL", "TRANSFERS", "VERIFYING",
]  # fmt: skip
TEXTS = {page: (ROOT / "docs" / f"{page}.md").read_text() for page in (*WHOLE, *PARTLY)}


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        pytest.param(*found, id=f"{page}-{i}" if i else page)
        for page, text in TEXTS.items()
        for i, found in enumerate(SHOWN.findall(text))
    ],
)
def test_a_program(program: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    shown = textwrap.dedent(shown)
    assert as_shown(python("program.py", cwd=tmp_path), shown) == shown


@pytest.mark.parametrize("page", TEXTS)
def test_a_page_shows_what_it_prints(page: str) -> None:
    shown, programs = SHOWN.findall(TEXTS[page]), re.findall("```python\n", TEXTS[page])
    assert shown
    assert page not in WHOLE or len(shown) == len(programs)
