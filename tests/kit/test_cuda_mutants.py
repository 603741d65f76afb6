"""The deletions of tools/ci/cuda_mutants.py: which there are, by its rule, and what is said of them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from checkout import ROOT

sys.path.insert(0, str(ROOT / "tools" / "ci"))

import cuda_mutants
from cuda_mutants import KEPT, SMALLEST, UNSEEN, Runs, Site, lines, replaced, sites, smallest

LANE = b"""
from .ticket import finish as end
from . import ticket

class Lane:
    def meet(self, \xc3\xa9vent):
        self.stream.wait_event(\xc3\xa9vent); self.stream.wait_event(\xc3\xa9vent)
        with torch.cuda.device(self.index), open("log"):
            event.wait()
            return (event.record(
                self.stream), 1)

    def end(self):
        end(None), ticket.finish(self), self.finish(), self.ticket.finish(), self.join_default()
        torch.cuda.device(self.index)
        with on(self), self.on():
            return ends(self)

def on(lane):
    finish(lane)

def finish(lane):
    finish(None)

def ends(lane):
    return lane.finish()
"""
#: A module whose function waits by a function of its own.
TICKET = b"""
def finish(ticket):
    _finish(ticket)

def _finish(ticket):
    ticket.event.synchronize()
"""


def tree(path: Path) -> list[Site]:
    """Returns the sites of the first of two modules."""
    (path / "runtime" / "node").mkdir(parents=True)
    (path / "runtime" / "node" / "lane.py").write_bytes(LANE)
    (path / "runtime" / "node" / "ticket.py").write_bytes(TICKET)
    return [site for site in sites(path) if site.file.endswith("lane.py")]


def test_the_rule(tmp_path: Path) -> None:
    """Each call by its name, however it is reached; the guards; and what calls those, by whatever name it is imported.
    Not what is only like one: methods and functions of that name that have nothing to do with CUDA."""
    assert [site.name.partition("::")[2] for site in tree(tmp_path)] == [
        "Lane.meet: self.stream.wait_event(\u00e9vent)",
        "Lane.meet: self.stream.wait_event(\u00e9vent) #2",
        "Lane.meet: torch.cuda.device(self.index)",
        "Lane.meet: event.record(self.stream)",
        "Lane.end: end(None)",
        "Lane.end: ticket.finish(self)",
        "Lane.end: self.join_default()",
    ]
    rest = [site.name.partition("::")[2] for site in sites(tmp_path) if site.file.endswith("ticket.py")]
    assert rest == ["finish: _finish(ticket)", "_finish: ticket.event.synchronize()"]


def test_what_stands_in_place_of_them(tmp_path: Path) -> None:
    """Only the sites are other code, also several of one line, and what goes over two."""
    found = tree(tmp_path)
    assert replaced(LANE, []) == LANE
    assert replaced(LANE, [(site, "{}") for site in found]) == LANE
    deleted = ast.unparse(ast.parse(replaced(LANE, [(site, "None") for site in found])))
    assert deleted.splitlines()[:18] == [
        "from .ticket import finish as end",
        "from . import ticket",
        "",
        "class Lane:",
        "",
        "    def meet(self, \u00e9vent):",
        "        None",
        "        None",
        "        with None, open('log'):",
        "            event.wait()",
        "            return (None, 1)",
        "",
        "    def end(self):",
        "        (None, None, self.finish(), self.ticket.finish(), None)",
        "        torch.cuda.device(self.index)",
        "        with on(self), self.on():",
        "            return ends(self)",
        "",
    ]


def test_the_products_sites() -> None:
    """All can be deleted, and watched; each reason for a deletion that nothing notices is one of theirs."""
    found = sites(ROOT)
    assert len(found) > 30
    assert len({site.name for site in found}) == len(found)
    assert KEPT.keys() <= {site.name for site in found}
    assert {smallest(site) for site in found} == set(SMALLEST.values()), "each has a test, and each test a site"
    for file in {site.file for site in found}:
        for code in ("None", cuda_mutants._SAYS % 7):
            compile(replaced((ROOT / file).read_bytes(), [(s, code) for s in found if s.file == file]), file, "exec")


READS = b"""
# torch.cuda is named here, and in "torch.cuda"
def of(stream: torch.cuda.Stream, \xc3\xa9: "\xc3\xa9" = torch.cuda.Event()) -> torch.cuda.Stream:
    here: torch.cuda.Stream = torch.cuda.current_stream(torch.cuda.current_device())
    with torch.cuda.device(0):
        return torch._C.cuda
    torch.backends.cuda, x.torch.cuda
    with torch.cuda.device(0):
        say(f"{torch.cuda!r} {torch.cuda}", f"torch.cuda")
"""


def test_the_lines_that_name_torch_cuda(tmp_path: Path) -> None:
    """Each of them once, by the first place that runs: not annotations, texts and other names."""
    (tmp_path / "disttensor").mkdir()
    (tmp_path / "disttensor" / "a.py").write_bytes(READS)
    found = lines(tmp_path)
    assert [site.name.partition("::of: ")[2] for site in found] == [
        'def of(stream: torch.cuda.Stream, \u00e9: "\u00e9" = torch.cuda.Event()) -> torch.cuda.Stream:',
        "here: torch.cuda.Stream = torch.cuda.current_stream(torch.cuda.current_device())",
        "with torch.cuda.device(0):",
        "with torch.cuda.device(0): #2",
        'say(f"{torch.cuda!r} {torch.cuda}", f"torch.cuda")',
    ]
    marked = replaced(READS, [(site, "(1, {})[1]") for site in found]).decode()
    assert (marked.count("(1, torch.cuda)[1]."), marked.count("(1, ")) == (4, 5)
    assert 'say((1, f"{torch.cuda!r} {torch.cuda}")[1], f"torch.cuda")' in marked
    assert " = (1, torch.cuda)[1].current_stream(torch.cuda.current_device())" in marked
    assert "= (1, torch.cuda)[1].Event()) -> torch.cuda.Stream:" in marked


def test_the_products_lines() -> None:
    """All can be watched; each reason for which no test comes by is one of theirs, and they are few."""
    found = lines(ROOT)
    assert len(found) > 60
    assert len({site.name for site in found}) == len(found)
    assert UNSEEN.keys() <= {site.name for site in found}
    assert len(UNSEEN) < 0.05 * len(found)
    for file in {site.file for site in found}:
        says = [(site, cuda_mutants._SAYS % 7) for site in found if site.file == file]
        compile(replaced((ROOT / file).read_bytes(), says), file, "exec")


@pytest.mark.parametrize(
    ("greens", "verdict"), [([["a", "b"], ["a"]], "killed"), ([["a", "b"]] * 3, "SURVIVED"), ([[]], "killed")]
)
def test_a_verdict(greens: list[list[str]], verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run has another seed, the deletion is in the copy meanwhile, and is gone after it."""
    site = tree(tmp_path / "tree")[0]
    path, seeds = tmp_path / "tree" / site.file, []
    tests = Runs.__new__(Runs)
    monkeypatch.setattr(tests, "copy", type("Copied", (), {"path": tmp_path / "tree"}), raising=False)

    def run(names: Sequence[str], limit: float, **env: str) -> dict[str, float]:
        assert path.read_bytes().count(b"wait_event") == 1
        seeds.append(env["SIMCUDA_SEED"])
        return dict.fromkeys(greens[len(seeds) - 1], 1.0)

    monkeypatch.setattr(tests, "run", run)
    assert tests.judge(site, ["a", "b"], 3) == verdict
    assert seeds == ["1", "2", "3"][: len(greens)]
    assert path.read_bytes() == LANE
    assert tests.judge(site, [], 3) == "NO TEST"
