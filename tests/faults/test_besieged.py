"""Strangers by the thousand: the job has its cores for itself, but for a tenth of one beside what libzmq and the kernel
take for so many connections, whoever listens. With real nodes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from aftermath import aftermath
from crowd import A_SECOND, CROWD, WORDS, Bare, Crowd, bare, crowd, room_for_a_crowd
from strangers import ports
from variants import variants

import disttensor as dt

#: The most seconds of CPU time for the strangers of a second, beside what they cost whoever listens: a tenth of a core.
MOST = 0.1
#: A crowd may come so many times until one was as cheap. What else runs on the machine takes the caches, and half of a
#: core that has two threads: it makes the same work cost more, and never less.
TIMES = 15


def used(pid: int) -> float:
    """The seconds of CPU time that all threads of a process have had."""
    return time.clock_gettime((~pid << 3) | 2)  # the kernel's number for the clock of a process


def is_for_tensors(port: int) -> bool:
    """Whether it is a data channel's: that says 32 bytes and waits, ZeroMQ 10."""
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        return len(stranger.recv(64)) == 32


@dataclass
class Besiegers:
    """The strangers, and who else listens."""

    crowd: Crowd
    bare: Bare

    def cost(self, pid: int, port: int, kind: str) -> float:
        """The seconds of CPU time that a process takes for the strangers of a second."""
        before = used(pid)
        self.crowd.visit(port, kind)
        return (used(pid) - before) / CROWD * A_SECOND


@pytest.fixture(scope="module")
def besiegers() -> Iterator[Besiegers]:
    """They, and a session with a node that has answered."""
    with room_for_a_crowd(), crowd() as strangers, bare() as other, dt.init_master_worker("tcp", nodes=1, threads=1):
        torch.ones(1 << 20).to("node:0").cpu()
        yield Besiegers(strangers, other)


@pytest.mark.fault(33)
@pytest.mark.parametrize(("who", "kind"), variants([(who, kind) for who in ("the script", "a node") for kind in WORDS]))
def test_a_thousand_strangers_a_second_cost_a_tenth_of_a_core(who: str, kind: str, besiegers: Besiegers) -> None:
    """At each port of the script and of a node: of all their threads, and from coming to being hung up on."""
    pid = os.getpid() if who == "the script" else int(dt.nodes()[0]["pid"])
    found = [port.number for port in ports([pid])]
    assert len(found) == {"the script": 3, "a node": 2}[who], found
    of_tensors = [port for port in found if is_for_tensors(port)]
    assert len(of_tensors) == {"the script": 1, "a node": 2}[who], found
    for port in found:
        same = besiegers.bare.socket if port in of_tensors else besiegers.bare.router
        at_least, costs = list[float](), list[float]()
        with aftermath(0):
            while not costs or (min(costs) - min(at_least) >= MOST and len(costs) < TIMES):
                at_least.append(besiegers.cost(besiegers.bare.pid, same, kind))
                costs.append(besiegers.cost(pid, port, kind))
        said = f"{costs} seconds of CPU time for a crowd, and {at_least} of who only listens"
        assert min(costs) - min(at_least) < MOST, f"port {port} of {who}: {said}"
