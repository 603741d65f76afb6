"""Every data channel: what it promises, the sums that the ancestors' tests expect of collectives over it, and a process
that dies in the middle of a transfer. Which channels there are stands in ``channel_kit``."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress

import pytest
import torch
from channel_kit import BETWEEN_PROCESSES, CHANNELS, ranked
from collective_kit import Ranks
from limits import HANG
from processes import alive_after
from telling import said

import disttensor as dt
from disttensor.runtime import collective as C
from disttensor.runtime.channel.registry import _BUILTIN
from disttensor.runtime.collective import ReduceOp, Way
from disttensor.runtime.contracts.data_channel import check_data_channel

PEERS = (2, 3, 4, 8)
SIZES = (0, 1, 1021, 2**8, 2**13, 2**16, 2**18)
#: All of the ancestors' sizes, in elements of float32.
ALL_SIZES = (0, 1, 1021, *(2**k for k in range(8, 24)))


#: Not among them: what is "shm" under another name; what moves nothing; what needs a GPU, or mpiexec, and has tests of
#: its own.
APART = {"auto", "null", "nccl", "mpi"}


def test_no_channel_is_left_out():
    assert set(_BUILTIN) - APART == set(CHANNELS) - APART, "every channel stands in channel_kit"


@pytest.mark.row("M25", "I8", "G1")
@pytest.mark.parametrize("name", [*CHANNELS, "auto"])
def test_conformance(name):
    check_data_channel(lambda n: ranked(name, range(-1, n - 1)), PEERS)


@pytest.mark.parametrize("name", ["tcp encrypted", "tcp checked", "auto encrypted", "auto checked"])
def test_conformance_of_what_is_protected(name):
    check_data_channel(lambda n: ranked(name, range(-1, n - 1)), PEERS[:1])


def sums(ranks, sizes):
    """As TorchMPI tests its collectives: everybody gives its number."""
    n = ranks.size

    def call(wire, size):
        me, mine = wire.me, torch.full((size,), float(wire.me))
        total, from_last, shifted = torch.empty(size), mine.clone(), mine.clone()
        C.all_reduce(wire, mine, total)
        assert (total == n * (n - 1) / 2).all()
        again = mine.clone()
        C.reduce(wire, again, again if me == n - 1 else None, n - 1)
        assert (again == (n * (n - 1) / 2 if me == n - 1 else me)).all()
        C.broadcast(wire, from_last, n - 1)
        assert (from_last == n - 1).all()
        C.sendreceive(wire, shifted, shifted, (me + 1) % n, (me - 1) % n)
        assert (shifted == (me - 1) % n).all()
        rows = torch.empty(n, size)
        C.all_gather(wire, mine, list(rows))
        assert (rows == torch.arange(n)[:, None]).all()

    for size in sizes:
        ranks.results(lambda wire, size=size: call(wire, size))


@pytest.mark.parametrize("n", PEERS)
@pytest.mark.parametrize("name", CHANNELS)
def test_the_ancestors_sums(name, n):
    ranks = Ranks(name, n)
    sums(ranks, SIZES)
    ranks.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("n", PEERS)
@pytest.mark.parametrize("name", CHANNELS)
def test_the_ancestors_sums_of_all_sizes(name, n):
    ranks = Ranks(name, n)
    sums(ranks, ALL_SIZES)
    ranks.close()


@pytest.mark.row("I11")
@pytest.mark.parametrize("name", CHANNELS)
def test_the_trees_of_torch_ipc(name):
    """8 nodes, numbered from 1: their sum is 36, and ten elements of it 360, whatever the tree."""
    ranks = Ranks(name, 8)

    def call(wire):
        x = torch.full((10,), wire.me + 1.0)
        for base in (2, 4, 8):
            out = torch.empty(10)
            C.all_reduce(wire, x, out, ReduceOp.SUM, Way("tree", base))
            assert out[0] == 36
            assert out.sum() == 360

    ranks.results(call)
    ranks.close()


@pytest.mark.parametrize("backend", BETWEEN_PROCESSES)
def test_a_node_that_dies_in_a_transfer(backend):
    """The destination is poisoned, the error names both, and the receiver goes on."""
    dt.init_master_worker(nodes=2, backend=backend, threads=1)
    source, target = (node["pid"] for node in dt.nodes())
    small = torch.ones(1 << 16, device="node:0").to("node:1")  # the pair is connected
    x = torch.ones(16 << 20, device="node:0")
    y = (small + 1).sum()
    dt.synchronize()
    os.kill(target, signal.SIGSTOP)  # takes nothing more than the kernel does for it
    arriving = x.to("node:1")
    assert (x[:1] + 1).item() == 2  # node 0 has begun to send
    os.kill(source, signal.SIGKILL)
    assert not alive_after(HANG, [source])  # what it has announced could be mapped until then
    os.kill(target, signal.SIGCONT)
    with pytest.raises(dt.DisttensorError) as caught:
        arriving.sum().item()
    told = said(caught.value)
    assert "node 0" in str(caught.value) or "rank 0" in str(caught.value)
    assert re.search("(node|rank) 1", told)
    assert y.item() == 2 << 16
    assert (torch.arange(5, device="node:1") + 1).tolist() == [1, 2, 3, 4, 5]
    with suppress(dt.DisttensorError):
        dt.synchronize()
    with suppress(dt.NodeLost):
        dt.shutdown()
