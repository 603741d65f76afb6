"""What TorchMPI's start was told: with or without CUDA, and which communicators there are."""

from __future__ import annotations

import pytest
import torch

import disttensor as dt


@pytest.mark.row("T1")
@pytest.mark.parametrize("gpus", [0, 2])
def test_with_and_without_cuda_and_with_communicators(gpus: int) -> None:
    """Keys are those of TorchMPI's own test: a rank's key is its rank modulo 2, which is cartesian, or 3, a tree."""
    with dt.init_master_worker(nodes=4, launcher="inproc", simulate_cuda=gpus):
        assert [node["devices"] for node in dt.nodes()] == [["cpu", *[f"cuda:{i}" for i in range(gpus)]]] * 4
        xs = [torch.full((2,), float(10**k), device=f"node:{k}") for k in range(4)]
        assert [x.get_device() for x in xs] == [0 if gpus else -1] * 4
        assert torch.ones(1, device=dt.device(1, "cpu")).get_device() == -1
        for div, inner in ((2, [(0, 2), (1, 3)]), (3, [(0, 3), (1,), (2,)])):
            split = dt.collectives.new_group(name="global").levels(key=lambda k, div=div: k % div)["key"]  # type: ignore[misc]
            assert [group.nodes for group in split.values()] == inner
            assert split.leaders.nodes == tuple(range(div))
            for group in split.values():
                assert [group.rank(node) for node in group] == [node // div for node in group]
            ys = [x.clone() for x in xs]
            for group in split.values():  # within a communicator
                dt.all_reduce([ys[k] for k in group], group=group)
            assert [y[0].item() for y in ys] == [sum(10**j for j in range(4) if j % div == k % div) for k in range(4)]
            ys = [x.clone() for x in xs]
            dt.all_reduce(ys, group=split)  # over both levels
            assert [y.tolist() for y in ys] == [[1111.0, 1111.0]] * 4
        default = dt.collectives.new_group().levels()["cuda"]
        assert [group.nodes for group in default.values()] == [(0, 1, 2, 3)]
        assert [key[1] for key in default] == [bool(gpus)]
