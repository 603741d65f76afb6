"""The short forms of `make chaos` and `make soak`: with a fixed seed, and one of this commit's hash."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from checkout import ROOT
from fuzzing import SEEDS
from limits import HANG

#: The first fixed seed, and the first that is the commit's.
TWO = [seed for name in ("seed", "commit-seed") for seed in [s for n, s in SEEDS.items() if n.startswith(name)][:1]]


def run(tool: str, seed: int, *options: str) -> str:
    """What a tool prints; its failure names the seed."""
    command = [sys.executable, str(ROOT / "tools/ci" / tool), "--seed", str(seed), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, stdin=subprocess.DEVNULL, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def count(text: str, what: str) -> int:
    found = re.search(rf"^ *(\d+)  {what}$", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1])


@pytest.mark.parametrize("seed", TWO)
def test_faults_by_chance_change_no_bit(seed: int) -> None:
    text = run("chaos.py", seed, "--seconds", "10", "--every", "1")
    assert count(text, "faults") > 0
    assert count(text, "comparisons") > 0


@pytest.mark.parametrize("seed", TWO)
def test_nothing_grows(seed: int) -> None:
    text = run("soak.py", seed, "--seconds", "10")
    assert "no node lost" in text
