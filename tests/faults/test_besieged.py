"""Strangers by the thousand: the job has its cores for itself, but for a tenth of one. With real nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
from aftermath import aftermath
from crowd import A_SECOND, CROWD, WORDS, Crowd, crowd, room_for_a_crowd
from strangers import ports
from variants import variants

import disttensor as dt

#: The most seconds of CPU time for the strangers of a second: a tenth of a core.
MOST = 0.1
#: A crowd may come so many times until one was as cheap. What else runs on the machine takes the caches, and half of a
#: core that has two threads: it makes the same work cost more, and never less.
TIMES = 5


def used(pid: int) -> float:
    """The seconds of CPU time that all threads of a process have had."""
    return time.clock_gettime((~pid << 3) | 2)  # the kernel's number for the clock of a process


@pytest.fixture(scope="module")
def besiegers() -> Iterator[Crowd]:
    """They, and a session with a node that has answered."""
    with room_for_a_crowd(), crowd() as strangers, dt.init_master_worker("tcp", nodes=1, threads=1):
        torch.ones(1 << 20).to("node:0").cpu()
        yield strangers


@pytest.mark.fault(33)
@pytest.mark.parametrize(("who", "kind"), variants([(who, kind) for who in ("the script", "a node") for kind in WORDS]))
def test_a_thousand_strangers_a_second_cost_a_tenth_of_a_core(who: str, kind: str, besiegers: Crowd) -> None:
    """At each port of the script and of a node: of all their threads, and from coming to being hung up on."""
    pid = os.getpid() if who == "the script" else int(dt.nodes()[0]["pid"])
    found = [port.number for port in ports([pid])]
    assert len(found) == {"the script": 3, "a node": 2}[who], found
    for port in found:
        costs = list[float]()
        with aftermath(0):
            while not costs or (min(costs) >= MOST and len(costs) < TIMES):
                before = used(pid)
                besiegers.visit(port, kind)
                costs.append((used(pid) - before) / CROWD * A_SECOND)
        assert min(costs) < MOST, f"port {port} of {who}: {costs} seconds of CPU time for a crowd"
