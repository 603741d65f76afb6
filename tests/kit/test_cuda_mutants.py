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
from cuda_mutants import KEPT, Runs, Site, replaced, sites

LANE = b"""
class Lane:
    def meet(self, \xc3\xa9vent):
        self.stream.wait_event(\xc3\xa9vent); self.stream.wait_event(\xc3\xa9vent)
        with torch.cuda.device(self.index), open("log"):
            event.wait()
            return (event.record(
                self.stream), 1)

def finish(device):
    finish(None)
"""


def tree(path: Path) -> list[Site]:
    (path / "runtime" / "node").mkdir(parents=True)
    (path / "runtime" / "node" / "lane.py").write_bytes(LANE)
    return sites(path)


def test_the_rule(tmp_path: Path) -> None:
    """Each call by its name, however it is reached, and the guards; not what is only like one."""
    assert [site.name.partition("::")[2] for site in tree(tmp_path)] == [
        "Lane.meet: self.stream.wait_event(\u00e9vent)",
        "Lane.meet: self.stream.wait_event(\u00e9vent) #2",
        "Lane.meet: torch.cuda.device(self.index)",
        "Lane.meet: event.record(self.stream)",
        "finish: finish(None)",
    ]


def test_what_stands_in_place_of_them(tmp_path: Path) -> None:
    """Only the sites are other code, also several of one line, and what goes over two."""
    found = tree(tmp_path)
    assert replaced(LANE, []) == LANE
    assert replaced(LANE, [(site, "{}") for site in found]) == LANE
    deleted = ast.unparse(ast.parse(replaced(LANE, [(site, "None") for site in found])))
    assert deleted.splitlines() == [
        "class Lane:",
        "",
        "    def meet(self, \u00e9vent):",
        "        None",
        "        None",
        "        with None, open('log'):",
        "            event.wait()",
        "            return (None, 1)",
        "",
        "def finish(device):",
        "    None",
    ]


def test_the_products_sites() -> None:
    """All can be deleted, and watched; each reason for a deletion that nothing notices is one of theirs."""
    found = sites(ROOT)
    assert len(found) > 30
    assert len({site.name for site in found}) == len(found)
    assert KEPT.keys() <= {site.name for site in found}
    for file in {site.file for site in found}:
        for code in ("None", cuda_mutants._SAYS % 7):
            compile(replaced((ROOT / file).read_bytes(), [(s, code) for s in found if s.file == file]), file, "exec")


@pytest.mark.parametrize(
    ("greens", "verdict"), [([["a", "b"], ["a"]], "killed"), ([["a", "b"]] * 3, "SURVIVED"), ([[]], "killed")]
)
def test_a_verdict(greens: list[list[str]], verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run has another seed, the deletion is in the copy meanwhile, and is gone after it."""
    site = tree(tmp_path / "tree")[0]
    path, seeds = tmp_path / "tree" / site.file, []
    tests = Runs.__new__(Runs)
    monkeypatch.setattr(tests, "copy", type("Copied", (), {"path": tmp_path / "tree"}), raising=False)

    def run(names: Sequence[str], limit: float, stop: bool = False, **env: str) -> dict[str, float]:
        assert path.read_bytes().count(b"wait_event") == 1
        seeds.append(env["SIMCUDA_SEED"])
        return dict.fromkeys(greens[len(seeds) - 1], 1.0)

    monkeypatch.setattr(tests, "run", run)
    assert tests.judge(site, ["a", "b"], 3) == verdict
    assert seeds == ["1", "2", "3"][: len(greens)]
    assert path.read_bytes() == LANE
    assert tests.judge(site, [], 3) == "NO TEST"
