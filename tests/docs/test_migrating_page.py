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
from printed import as_shown
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
    for name, text in (("theirs", theirs), ("ours", ours)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "program.py").write_text(text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "program.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        torchrun, cwd=tmp_path / "theirs", env=env, capture_output=True, text=True, timeout=HANG, check=False
    )  # gloo's threads may abort a rank that has ended: its exit code says nothing about what was computed
    shown = textwrap.dedent(printed)
    assert as_shown(done.stdout, shown) == shown, done.stderr
    assert python("program.py", cwd=tmp_path / "ours") == done.stdout
    saved = [torch.load(tmp_path / name / "model.pt") for name in ("theirs", "ours") if "torch.save" in theirs]
    if saved:
        assert list(saved[0]) == list(saved[1])
        assert all(torch.equal(saved[0][key], saved[1][key]) for key in saved[0])


@pytest.mark.parametrize(("program", "shown"), PROGRAMS, ids=["horovod", "torchmpi", "torch-ipc", "ray"])
def test_a_program_of_ours(program: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    shown = textwrap.dedent(shown)
    assert as_shown(python("program.py", cwd=tmp_path), shown) == shown


def test_its_names_and_links_are_there() -> None:
    names = {name.rstrip(".") for name in re.findall(r"\bdt\.([a-zA-Z_.]+)", PAGE)}
    assert len(names) > 40
    for name in names:
        reduce(getattr, name.split("."), dt)
    for name in re.findall(r"\bfunctional\.(\w+)", PAGE):
        getattr(dt.collectives.functional, name)
    links = re.findall(r"\]\(([^)#:]+)", PAGE)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def lines_of_ours() -> list[str]:
    """The calls in the tables' second columns, but for those that begin or end sessions and nodes."""
    rows = re.findall(r"^\| .* \| (.*) \|$", PAGE, re.MULTILINE)
    found = [line for row in rows for line in re.findall(r"`([^`]+)`", row)]
    calls = [
        line for line in found if re.match(r"(\w+ = )?(\[|next\()?(dt|group|functional|work|x|levels)\b.*[)\]]", line)
    ]
    return [line for line in calls if not re.match(r"dt\.(init_|shutdown|kill)", line)]


class Trainer:
    def __init__(self, start: int = 0) -> None:
        self.start = start

    def train(self, step: int) -> int:
        return self.start + step


def test_the_lines_of_the_tables_run() -> None:
    """With what their names stand for."""
    lines = lines_of_ours()
    assert len(lines) > 60
    with dt.init_master_worker(nodes=8, launcher="inproc"):
        mesh, group = dt.mesh(dp=8), dt.collectives.new_group()
        xs = [torch.full((2,), float(k), device=f"node:{k}") for k in range(8)]
        work = dt.submit(divmod, 7, 2, node=1)
        trainers = [dt.actor(Trainer, node=k) for k in range(2)]
        names = {
            "dt": dt, "torch": torch, "functional": dt.collectives.functional, "mesh": mesh, "group": group, "node": 3,
            "levels": group.levels(rack=lambda k: k // 4), "key": lambda k: k % 2, "work": work, "a": work, "b": work,
            "works": [work], "ops": [dt.collectives.P2POp(dt.collectives.isend, xs[0], 1),
                                     dt.collectives.P2POp(dt.collectives.irecv, xs[1], 0)],
            "data": torch.utils.data.TensorDataset(torch.ones(64, 2)), "n": 2, "items": [1, 2], "values": xs,
            "args": (1,), "obj": [1], "has_batch": [1] * 7 + [0], "steps": [1] * 7 + [2], "tau": 2, "alpha": 0.1,
            "Counter": Trainer, "Trainer": Trainer, "trainers": trainers,
            "f": lambda *a: a[0], "g": lambda *a: a[0], "fn": lambda *a: a[0],
        }  # fmt: skip
        for line in lines:
            net = torch.nn.Linear(2, 2).to(mesh.device)
            net(torch.ones(8, 2, device=mesh.device)).sum().backward()
            x = torch.ones(2, device=mesh.device if "at(" in line or "node=mesh" in line else "node:0")
            here = {"x": x, "xs": [t.clone() for t in xs], "outs": [t.new_empty(0) for t in xs]}
            exec(line, names | here | {"net": net, "model": net, "block": net})
        dt.synchronize()
