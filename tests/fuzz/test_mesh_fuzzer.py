"""Random programs over nodes and overlapping meshes: views that are kept, writes through them, copies, collectives with
gradients and asynchronous ones, graphs replayed with writes in between, random numbers, errors on some ranks, streams,
threads. Each rank has to the bit what the twin has, which is plain local torch (tests/kit/mesh_twin.py).

A failure tells the program's seed and number, and a short script that does it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from fuzzing import EXAMPLES, SEEDS
from mesh_fuzzer import NODES, Chance, Differs, play, shorter
from mesh_kit import connect

import disttensor as dt
from disttensor import testing

#: Programs of each seed.
PROGRAMS = 20

# its session has many nodes, which a mutant's few seconds may not be enough for; `make fuzz` has no limit
# torch warns of writes into expanded tensors, which programs have, too
pytestmark = [
    pytest.mark.timeout(0 if EXAMPLES else 300),
    pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated"),
]


@pytest.fixture(scope="module", params=["local", pytest.param("inproc", marks=pytest.mark.slow)])
def session(request: pytest.FixtureRequest) -> Iterator[str]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with dt.init_master_worker(nodes=NODES, threads=1, launcher=request.param):
            if request.param == "local":
                connect(NODES)
            yield request.param
    finally:
        torch.set_num_threads(threads)


def held() -> list[testing.Usage]:
    gc.collect()
    dt.synchronize()
    return [testing.usage(node) for node in range(NODES)]


@pytest.mark.parametrize("name", SEEDS)
def test_programs_do_what_their_twins_do(session: str, name: str) -> None:
    """In-process nodes have one generator together, so there no program draws."""
    before = held()
    for number in range(EXAMPLES or PROGRAMS):
        program = Chance(f"{SEEDS[name]} {number}", draws=session == "local").program()
        try:
            play(program)
        except Differs as error:
            found, why = shorter(program)
            pytest.fail(
                f"program {number} of DISTTENSOR_FUZZ_SEEDS={SEEDS[name]}: {error}\n\n{found.script()}\n# {why}",
                pytrace=False,
            )
    assert held() == before, "something is left on a node"
