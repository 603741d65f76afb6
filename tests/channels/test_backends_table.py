"""What a program can ask before it chooses: backends and their table, hosts, devices, groups by default."""

from __future__ import annotations

import socket

import pytest
import torch

import disttensor as dt

CUDA = torch.cuda.is_available()


@pytest.mark.row("G1", "T6", "T21")
@pytest.mark.parametrize("op", dt.channels.COLLECTIVES)
def test_without_a_session_it_is_about_this_machine(op: str) -> None:
    """What torch.distributed says of gloo and nccl; mpi needs an mpiexec that has started the processes."""
    table = dt.channels.available()
    assert bool(table[op, "cpu", "gloo"]) == torch.distributed.is_gloo_available()
    assert bool(table[op, "cuda", "gloo"]) == (torch.distributed.is_gloo_available() and CUDA)
    assert table[op, "cpu", "nccl"].state == ("not implemented" if CUDA else "unavailable")
    assert CUDA or table[op, "cuda", "nccl"] == ("unavailable", "no CUDA device")
    assert CUDA or table[op, "cuda", "tcp"] == ("unavailable", "this machine has no CUDA device")
    for device in ("cpu", "cuda"):
        assert table[op, device, "mpi"].state == "unavailable"
        assert "mpi" in table[op, device, "mpi"].why
    assert table[op, "cpu", "tcp"]
    with pytest.raises(KeyError):
        table[op, "tpu", "tcp"]


@pytest.mark.row("T6", "T30")
def test_hosts_devices_and_default_levels(nodes: object) -> None:
    """The module's nodes have two simulated CUDA devices each, and are on one host."""
    for told in dt.nodes():
        assert (told["host"], told["devices"]) == (socket.gethostname(), ["cpu", "cuda:0", "cuda:1"])
    levels = dt.collectives.new_group(name="all").levels()
    assert list(levels) == ["host", "cuda"]
    assert {key: group.nodes for key, group in levels["host"].items()} == {socket.gethostname(): (0, 1, 2)}
    assert {key: group.nodes for key, group in levels["cuda"].items()} == {(socket.gethostname(), True): (0, 1, 2)}
    xs = [torch.full((3,), float(k), device=f"node:{k}") for k in range(3)]
    dt.all_reduce(xs, group=levels["host"])
    assert [x.tolist() for x in xs] == [[3.0] * 3] * 3
