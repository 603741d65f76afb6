"""docs/MIGRATING.md: programs of ours, and those for torchrun, print what stands below them; its names are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from functools import reduce
from pathlib import Path

import pytest
import torch
from checkout import ROOT
from limits import HANG
from test_readme import SHOWN, python

import disttensor as dt

PAGE = (ROOT / "docs" / "MIGRATING.md").read_text()
#: (theirs, ours, printed), of those for torch.distributed.
PAIRS = re.findall(
    r"--nproc-per-node (\d) theirs.py`:\n\n```python\n(.*?)```.*?```python\n(.*?)```\n\n"
    r"Both print\n\n((?:    [^\n]*\n)+)",
    PAGE,
    re.DOTALL,
)
PROGRAMS = SHOWN.findall(PAGE.partition("\n## Horovod\n")[2])


@pytest.mark.parametrize(("ranks", "theirs", "ours", "printed"), PAIRS, ids=["ddp", "collectives"])
def test_a_pair(ranks: str, theirs: str, ours: str, printed: str, tmp_path: Path) -> None:
    """torchrun and ours print the same, and what they save has the same bits."""
    saved = []
    for name, text in (("theirs", theirs), ("ours", ours)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "program.py").write_text(text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "program.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        torchrun, cwd=tmp_path / "theirs", env=env, capture_output=True, text=True, timeout=HANG, check=False
    )  # gloo's threads may abort a rank that has ended: its exit code says nothing about what was computed
    assert done.stdout == textwrap.dedent(printed), done.stderr
    assert python("program.py", cwd=tmp_path / "ours") == textwrap.dedent(printed)
    saved = [torch.load(tmp_path / name / "model.pt") for name in ("theirs", "ours") if "torch.save" in theirs]
    if saved:
        assert list(saved[0]) == list(saved[1])
        assert all(torch.equal(saved[0][key], saved[1][key]) for key in saved[0])


@pytest.mark.parametrize(("program", "shown"), PROGRAMS, ids=["horovod", "torchmpi", "torch-ipc", "ray"])
def test_a_program_of_ours(program: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    assert python("program.py", cwd=tmp_path) == textwrap.dedent(shown)


def test_its_names_and_links_are_there() -> None:
    names = {name.rstrip(".") for name in re.findall(r"\bdt\.([a-zA-Z_.]+)", PAGE)}
    assert len(names) > 40
    for name in names:
        reduce(getattr, name.split("."), dt)
    for name in re.findall(r"\bfunctional\.(\w+)", PAGE):
        getattr(dt.collectives.functional, name)
    links = re.findall(r"\]\(([^)#:]+)", PAGE)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
