"""Histories of asynchronous training replayed on local tensors, and what becomes of buffers: the bits of the run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import async_twins
import pytest
import torch
import torch.nn.functional as F
from equal import bits
from torch import nn

import disttensor as dt
from disttensor.training import EASGD, Downpour, History, LocalSGD, ParameterServer, Schedule, Strategy, drive

NODES = 3
RATE = 0.1


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=NODES, launcher="inproc"):
        yield


with torch.random.fork_rng():
    torch.manual_seed(0)
    FIRST = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def net() -> nn.Module:
    """A network with statistics: of each batch, and how many there were."""
    return copy.deepcopy(FIRST)


def loss_of(module: nn.Module, i: int, t: int, device: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * i + t)
    x, y = torch.randn(8, 5, generator=generator) * (i + 1), torch.randint(0, 3, (8,), generator=generator)
    return F.cross_entropy(module(x.to(device)), y.to(device))


def step(worker: Any, t: int) -> torch.Tensor:
    loss = loss_of(worker.module, worker.index, t, worker.device)
    loss.backward()
    return loss


def on_nodes() -> list[nn.Module]:
    return [net().to(f"node:{k}") for k in range(NODES)]


def here() -> list[nn.Module]:
    return [net() for _ in range(NODES)]


def state(module: nn.Module) -> list[bytes]:
    return [bits(x.cpu()) for x in module.state_dict().values()]


def values(module: nn.Module) -> list[bytes]:
    return [bits(p.detach().cpu()) for p in module.parameters()]


class Apart(EASGD):
    """Workers that begin at values of their own."""

    def start(self, worker: Any) -> Iterator[Any]:
        yield from super().start(worker)
        for x in worker.values():
            x.add_(worker.index + 1)


def nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9, nesterov=True)


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "alone": lambda: Strategy(Schedule(), nesterov),
    "Downpour of changes": lambda: Downpour(
        ParameterServer(net()), Schedule(1, 3, 2), send_every=2, local=nesterov, buffers="mean"
    ),
    "EASGD": lambda: EASGD(ParameterServer(net()), Schedule(every=3), local=nesterov),
    "apart": lambda: Apart(None, Schedule(every=1), local=RATE, buffers="mean"),
    "DiLoCo": lambda: LocalSGD(Schedule(every=2), local=nesterov, outer=nesterov, buffers="mean"),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_replay_has_the_bits_of_the_run(name: str) -> None:
    strategy, workers, local = STRATEGIES[name](), on_nodes(), here()
    history = drive(workers, step, strategy, steps=7)
    again = history.replay(local, step)
    assert again == history
    assert [state(module) for module in local] == [state(module) for module in workers]
    assert state(local[0]) != state(net())
    assert history.replay(here(), step) == history  # any number of times


def test_each_drive_begins_anew() -> None:
    """What a worker had not pushed, its momentum and the centres are not those of the run before."""
    for strategy in (
        Downpour(ParameterServer(net()), Schedule(every=2), send_every=3, local=RATE),
        EASGD(ParameterServer(net()), Schedule(every=2), momentum=0.9, local=RATE),
    ):
        drive(on_nodes(), step, strategy, steps=4)
        shared = net()
        strategy.server.pull(into=shared)
        workers, local = on_nodes(), here()
        history = drive(workers, step, strategy, steps=4)
        history.replay(local, step, server=shared)
        assert [state(module) for module in local] == [state(module) for module in workers]
        assert values(shared) == [bits(x) for x in strategy.server.pull().values()]


# ---- buffers ---------------------------------------------------------------------------------------------------------


def buffers(module: nn.Module) -> list[torch.Tensor]:
    return [buffer.cpu() for buffer in module.buffers()]


@pytest.mark.parametrize("kind", ["own", "mean"])
def test_buffers_of_workers_that_meet(kind: Any) -> None:
    workers, twins = on_nodes(), here()
    history = drive(workers, step, LocalSGD(Schedule(every=3), local=RATE, buffers=kind), steps=7)
    async_twins.local_sgd_of_modules(
        history.events, twins, lambda i, t, module: loss_of(module, i, t, "cpu").backward(), RATE
    )
    assert [state(module) for module in workers] == [state(module) for module in twins]
    assert [event.kind for event in history.events if event.worker < 0] == {
        "own": ["meet", "meet"],
        "mean": ["meet", "buffers", "meet", "buffers", "buffers"],
    }[kind]
    means = {bits(buffers(module)[0]) for module in workers}
    assert len(means) == (1 if kind == "mean" else NODES)
    assert [buffers(module)[2].item() for module in workers] == [7] * NODES


@pytest.mark.parametrize("make", [Downpour, EASGD])
def test_buffers_of_workers_with_a_server(make: Any) -> None:
    """The mean at the end only: until then each has its own."""
    found = {}
    for kind in ("own", "mean"):
        workers = on_nodes()
        strategy = make(ParameterServer(net()), Schedule(every=2), local=RATE, buffers=kind)
        history = drive(workers, step, strategy, steps=5, seed=3)
        found[kind] = [buffers(module) for module in workers]
        assert [event.kind for event in history.events if event.worker < 0] == ["buffers"] * (kind == "mean")
    mean = (found["own"][0][0] + found["own"][1][0] + found["own"][2][0]) / NODES
    assert all(bits(mine[0]) == bits(mean) for mine in found["mean"])
    assert len({bits(mine[0]) for mine in found["own"]}) == NODES


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_what_another_pushes_is_told() -> None:
    server = ParameterServer(net())

    def pushing(worker: Any, t: int) -> torch.Tensor:
        if t == 2 and worker.index == 0:
            server.push(net())
        return step(worker, t)

    history = drive(on_nodes(), pushing, Downpour(server, Schedule(every=1), local=RATE), steps=4)
    told = r"replay: event \d+ is TrainingEvent\(.*comes to TrainingEvent\(.*did nothing else push"
    with pytest.raises(ValueError, match=told):
        history.replay(here(), step)


def test_other_values_have_other_bits() -> None:
    history = drive(on_nodes(), step, LocalSGD(Schedule(every=2), local=RATE), steps=4)
    other = here()
    with torch.no_grad():
        next(other[0].parameters()).view(-1)[0] += 1e-6
    assert history.replay(other, step).losses != history.losses


def test_mistakes() -> None:
    history = drive(on_nodes(), step, LocalSGD(Schedule(every=2), local=RATE), steps=2)
    for modules, server, kind, text in (
        (here()[1:], None, ValueError, "2 modules, and there were 3 workers"),
        (on_nodes(), None, TypeError, "'0.weight' of module 0 is on node:0; a replay is local"),
        (here(), net(), ValueError, "LocalSGD has no server, and no centre"),
    ):
        with pytest.raises(kind, match=text):
            history.replay(modules, step, server=server)
    with pytest.raises(ValueError, match="no strategy; drive returns"):
        History().replay([], step)
    with pytest.raises(ValueError, match="buffers is 'own' or 'mean', not 'average'"):
        LocalSGD(buffers="average")  # type: ignore[arg-type]
    served = drive(on_nodes(), step, EASGD(ParameterServer(net()), local=RATE), steps=2)
    with pytest.raises(ValueError, match="worker 0: 6 tensors, and the server has 1"):
        served.replay(here(), step, server={"weight": torch.ones(2)})
