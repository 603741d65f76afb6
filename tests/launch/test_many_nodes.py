"""Many nodes on one machine: each is a fork of a process that has imported torch once. (How long they take:
tools/bench/start.py --nodes 64.)"""

from __future__ import annotations

import pytest
import torch

import disttensor as dt


def test_64_nodes_start_and_answer() -> None:
    with dt.init_master_worker(nodes=64, threads=1):
        xs = [torch.full((2,), float(k), device=f"node:{k}") for k in range(64)]
        assert [x.sum().item() for x in xs] == [2.0 * k for k in range(64)]
        assert len({node["pid"] for node in dt.nodes()}) == 64


def test_indices_of_devices() -> None:
    """0 to 63 are nodes', whatever else there is; nodes from 64 on, meshes and other devices get others on demand."""
    with dt.init_master_worker(nodes=66, launcher="inproc"):
        late = torch.ones(2, device=dt.device(65))
        assert (late.device, late.sum().item()) == (torch.device("node:64"), 2)
        with pytest.raises(RuntimeError, match=r"node:0 to node:63 \(from 64 on.*node 65's device is disttensor"):
            torch.ones(2, device="node:65")
        whole = dt.mesh(dp=66)
        assert whole.device == torch.device("node:65")
        x = torch.ones(2, device=whole.device)
        assert dt.all_reduce(x, over="dp").tolist() == [66.0, 66.0]
        assert x.at(dp=63).device == torch.device("node:63")  # type: ignore[attr-defined]
        assert x.at(dp=64).device == torch.device("node:66") == dt.device(64)  # type: ignore[attr-defined]
        with dt.node(65):
            assert torch.ones(1, device="node").device == torch.ones(1).to("node").device == late.device
        made = [dt.mesh(**{f"d{i}": 66}) for i in range(61)]
        with pytest.raises(dt.DisttensorError, match=r"all 128 slots .* none is left for a mesh") as raised:
            dt.mesh(more=66)
        assert "node 65 cpu; the mesh (dp=66) of nodes 0 to 65 cpu; node 64 cpu; the mesh (d0=66)" in str(raised.value)
        made[7].close()
        assert dt.mesh(again=66).device == made[7].device
