"""Random programs on simulated GPUs for some seconds each: those of `make test`, which have no random numbers here, the
mesh fuzzer's, and chaos. DISTTENSOR_SIMCUDA_SECONDS says how many seconds, DISTTENSOR_FUZZ_SEEDS with which seed.

A failure tells seed and number of the program.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from checkout import ROOT
from fuzzing import SEEDS
from simcuda_kit import run_session

pytestmark = [pytest.mark.simcuda, pytest.mark.cold, pytest.mark.slow, pytest.mark.timeout(0)]

SECONDS = float(os.environ.get("DISTTENSOR_SIMCUDA_SECONDS", "20"))
#: This commit's first, unless the variable names one.
SEED = list(SEEDS.values())[len(SEEDS) // 2]

#: Has programs run until the time is over; the first that fails ends the script with what repeats it.
LOOP = """
import random, sys, time, warnings
sys.path[:0] = {paths!r}
warnings.filterwarnings("ignore", "Use of .* on expanded tensors is deprecated")
torch.set_num_threads(1)
LEFT_OUT = {left_out!r}
def programs(names, longest):
    number, until = 0, time.monotonic() + {seconds}
    while number < 3 or time.monotonic() < until:
        chance = random.Random(f"{seed} {{number}}")
        length = chance.randrange(2, longest)
        yield number, [(chance.choice(names), *(chance.randrange(8) for _ in range(3))) for _ in range(length)]
        number += 1
    print(number, "programs")
def each(check, names, longest):
    for number, program in programs([name for name in names if name not in LEFT_OUT], longest):
        try:
            check(program)
        except BaseException:
            print(f"program {{number}} of seed {seed}: {{program}}", file=sys.stderr)
            raise
"""
#: Steps that draw: a device's numbers are not the CPU's. And one whose index may be out of range: such a kernel ends
#: what its process has of GPUs.
LEFT_OUT = {"rand", "bernoulli_", "dropout", "normal", "seed", "checkpoint", "gather"}

#: By name: how many nodes, and the program.
PROGRAMS = {
    "on a node, against local torch": (
        3,
        """
import test_random_programs as t
each(t.check_on_a_node, t.NAMES + t.ASKING * 3, 30)
""",
    ),
    "on a mesh, against local torch": (
        3,
        """
import test_random_programs as t
def check(program):
    before, pools = t.used(), [t.start(rank) for rank in range(t.RANKS)]
    there = dt.mesh(rank=t.RANKS)
    t.check(program, [dt.meshes.from_shards(there, values) for values in zip(*pools, strict=True)], pools)
    del there
    assert t.used() == before, "something is left on a node"
each(check, t.NAMES + t.ASKING * 3, 25)
""",
    ),
    "recorded and replayed, against eager": (
        2,
        """
import test_random_graphs as t
each(t.check, t.NAMES, 20)
""",
    ),
    "the mesh fuzzer, against its twin": (
        6,
        """
from mesh_fuzzer import Chance, Differs, play, shorter
from mesh_twin import Twin
Twin.mistakes = False
for number, _ in programs(["-"], 3):
    program = Chance(f"{seed} {{number}}", draws=False).program()
    try:
        play(program)
    except Differs as error:
        found, why = shorter(program)
        sys.exit(f"program {{number}} of DISTTENSOR_FUZZ_SEEDS={seed}: {{error}}\\n\\n{{found.script()}}\\n# {{why}}")
""",
    ),
}


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_random_programs(name: str, backend: str) -> None:
    nodes, program = PROGRAMS[name]
    paths = [str(ROOT / "tests" / "ops"), str(ROOT / "tests" / "graphs")]
    source = (LOOP + program).format(paths=paths, seconds=SECONDS, seed=SEED, left_out=LEFT_OUT)
    said = run_session(source, nodes=nodes, backend=backend, devices=2, delay_ms=1, limit=SECONDS + 900)
    done = re.fullmatch(r"(\d+) programs\n", said)
    assert done, said
    print(f"{done[1]} programs of seed {SEED}")


def test_chaos() -> None:
    """Nodes with GPUs are stopped, killed and cut off, while the script computes and compares."""
    command = [sys.executable, str(ROOT / "tools" / "ci" / "chaos.py"), "--simcuda", "2", "--seed", str(SEED)]
    command += ["--seconds", str(3 * SECONDS)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3 * SECONDS + 900)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
