"""``disttensor.testing``: what its helpers break is broken, and nothing else; sessions of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from processes import alive_after

import disttensor as dt
from disttensor import testing
from disttensor.runtime.process.lifetime import process_stat

#: Seconds for what takes a moment; longer is a hang.
SOON = 20


def use(x: torch.Tensor) -> None:
    """Until it raises; the test's time limit ends it otherwise."""
    while True:
        x.sum().item()


def test_a_log_outlives_the_session() -> None:
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        x = torch.ones(4, device="node:1")
        with testing.MessageLog() as log:
            x.sum().item()
    assert log.replies == ["Answer"]
    with pytest.raises(IndexError, match="node 2 does not exist; there are 2 nodes"):
        log[2]


@pytest.fixture(params=["inproc", "local"])
def breakable(request: pytest.FixtureRequest) -> Iterator[str]:
    """A session of two nodes that the test may break."""
    with dt.init_master_worker(nodes=2, threads=1, launcher=request.param):
        yield request.param


def test_cutting_the_control_connection_loses_the_node(breakable: str) -> None:
    x, y = torch.ones(3, device="node:1"), torch.ones(3, device="node:0")
    pid = int(dt.nodes()[1]["pid"])
    dt.synchronize()
    testing.cut(1)
    with pytest.raises(dt.NodeLost) as caught:
        use(x)
    assert caught.value.rank == 1
    assert y.sum().item() == 3
    assert breakable == "inproc" or alive_after(SOON, [pid]) == []
    with pytest.raises(dt.NodeLost):
        testing.cut(1)


@pytest.mark.parametrize("backend", ["auto", "tcp"])
def test_cutting_the_data_connection_loses_copies_and_not_the_node(backend: str) -> None:
    launcher = "inproc" if backend == "auto" else "local"
    with dt.init_master_worker(backend, nodes=2, threads=1, launcher=launcher):
        local = torch.ones(1 << 14)  # more than comes with a reply
        x, y = local.to("node:1"), local.to("node:0")
        assert torch.equal(x.cpu(), local)
        assert torch.equal(y.cpu(), local)
        testing.cut(1, control=False, data=True)
        with pytest.raises(dt.errors.ChannelError, match=r"disttensor\.testing\.cut"):
            x.cpu()
        assert x[:3].cpu().tolist() == [1, 1, 1]  # a small one comes with the reply
        assert x.sum().item() == 1 << 14
        assert torch.equal(y.cpu(), local)
        assert y.to("node:1").sum().item() == 1 << 14  # the nodes still reach each other
        assert all(node["alive"] for node in dt.nodes())


def test_a_generator_draws_its_numbers_without_a_data_connection() -> None:
    """Its state once came by that: when it was lost, the node drew from another one, and nothing said so."""
    with dt.init_master_worker("tcp", nodes=2, threads=1):
        torch.ones(1 << 14, device="node:1").cpu()
        testing.cut(1, control=False, data=True)
        seeds = (7, 8)
        drawn = [
            torch.randn(16, generator=torch.Generator(device="node:1").manual_seed(s), device="node:1") for s in seeds
        ]
        for seed, there in zip(seeds, drawn, strict=True):
            here = torch.randn(16, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(there.to("node:0").cpu(), here)


def test_a_stopped_process_goes_on_when_it_is_resumed() -> None:
    with dt.init_master_worker(nodes=1, threads=1):
        x = torch.ones(3, device="node:0")
        dt.synchronize()
        testing.stop(0)
        pid = int(dt.nodes()[0]["pid"])
        states = {process_stat(f"{pid}/task/{thread}")[0] for thread in os.listdir(f"/proc/{pid}/task")}
        assert states <= set("TD")
        work = dt.fetch(x)
        with pytest.raises(TimeoutError):
            work.wait(0.05)
        testing.resume(0)
        assert work.result().tolist() == [1, 1, 1]
        testing.stop(0)
        testing.kill(0)
        assert alive_after(0, [pid]) == []
        with pytest.raises(dt.NodeLost, match="SIGKILL"):
            use(x)
        with pytest.raises(dt.NodeLost):
            testing.resume(0)
