"""Asynchronous strategies over real nodes, against twins that know torch and the events only: the same bits."""

from __future__ import annotations

import ast
import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import async_twins
import pytest
import torch
import torch.nn.functional as F
from equal import bits
from stream_kit import thread
from torch import nn
from variants import variants

import disttensor as dt
from disttensor.training import EASGD, Downpour, History, LocalSGD, ParameterServer, Schedule, Strategy, drive

pytestmark = pytest.mark.usefixtures("settled")

NODES = 3
RATE = 0.1


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with dt.init_master_worker(nodes=NODES, threads=1):
        for source in range(NODES):
            for target in range(NODES):
                torch.ones(1 << 14, device=f"node:{source}").to(f"node:{target}").cpu()
        yield
    torch.set_num_threads(threads)


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def batch(i: int, t: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * i + t)
    return torch.randn(8, 5, generator=generator, dtype=dtype), torch.randint(0, 3, (8,), generator=generator)


def loss_of(module: nn.Module, i: int, t: int, device: Any) -> torch.Tensor:
    x, y = batch(i, t, next(module.parameters()).dtype)
    return F.cross_entropy(module(x.to(device)), y.to(device))


def step(worker: Any, t: int) -> torch.Tensor:
    loss = loss_of(worker.module, worker.index, t, worker.device)
    loss.backward()
    return loss


def gradient(i: int, t: int, x: list[torch.Tensor]) -> list[torch.Tensor]:
    here = net(x[0].dtype)
    with torch.no_grad():
        for p, value in zip(here.parameters(), x, strict=True):
            p.copy_(value)
    loss_of(here, i, t, "cpu").backward()
    return [p.grad for p in here.parameters()]  # type: ignore[misc]


def on_nodes(module: nn.Module, nodes: range | list[int] = range(NODES)) -> list[nn.Module]:
    return [copy.deepcopy(module).to(f"node:{k}") for k in nodes]


def values(module: nn.Module) -> list[torch.Tensor]:
    return [p.detach().cpu() for p in module.parameters()]


def same_bits(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return [bits(x) for x in found] == [bits(x) for x in wanted]


def served(make: Callable[[ParameterServer], Strategy]) -> Callable[[], tuple[Strategy, Any]]:
    def both() -> tuple[Strategy, Any]:
        server = ParameterServer(net())
        return make(server), server

    return both


ORDERS = {"as they come": {}, "drawn": {"seed": 7}, "bounded": {"max_staleness": 1}}

CASES: dict[str, tuple[Callable[[], tuple[Strategy, Any]], Callable[..., Any]]] = {
    "downpour": (
        served(lambda s: Downpour(s, Schedule(1, 3, 1), send_every=2, local=RATE)),
        lambda e, first: async_twins.downpour(e, first, gradient, RATE),
    ),
    "easgd": (
        served(lambda s: EASGD(s, Schedule(every=2, prefetch=1), local=RATE)),
        lambda e, first: async_twins.easgd(e, first, gradient, RATE, 0.9 / NODES),
    ),
    "eamsgd": (
        served(lambda s: EASGD(s, Schedule(every=2), alpha=0.2, momentum=0.9, local=RATE)),
        lambda e, first: async_twins.easgd(e, first, gradient, RATE, 0.2, 0.9),
    ),
    "easgd together": (
        lambda: (EASGD(None, Schedule(every=2), local=RATE), None),
        lambda e, first: async_twins.easgd_together(e, first, gradient, RATE, 0.9 / NODES),
    ),
    "eamsgd together": (
        lambda: (EASGD(None, Schedule(every=3), alpha=0.2, momentum=0.5, local=RATE), None),
        lambda e, first: async_twins.easgd_together(e, first, gradient, RATE, 0.2, 0.5),
    ),
    "local SGD": (
        lambda: (LocalSGD(Schedule(delay=1, every=4), local=RATE), None),
        lambda e, first: async_twins.local_sgd(e, first, gradient, RATE),
    ),
    "DiLoCo": (
        lambda: (
            LocalSGD(
                Schedule(every=3), local=RATE, outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)
            ),
            None,
        ),
        lambda e, first: async_twins.local_sgd(e, first, gradient, RATE, 0.7, 0.9),
    ),
}


@pytest.mark.row("T45", "T46", "T47", "I39")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", CASES)
def test_the_twin_has_the_same_bits(case: str, order: str) -> None:
    make, twin = CASES[case]
    strategy, server = make()
    workers = on_nodes(net())
    history = drive(workers, step, strategy, steps=12, **ORDERS[order])  # type: ignore[arg-type]
    centre, x = twin(history.events, values(net()))
    for i, worker in enumerate(workers):
        assert same_bits(values(worker), x[i]), f"worker {i}"
    if server is not None:
        assert same_bits(list(server.pull().values()), centre)
        assert server.version == sum(event.kind == "push" for event in history.events) > 0
    elif isinstance(strategy, EASGD):
        assert all(same_bits([c.cpu() for c in found], centre) for found in strategy.centres.values())
    assert not same_bits(values(workers[0]), values(net()))
    assert history.steps == [12] * NODES
    assert [len(found) for found in history.losses] == [12] * NODES

    local, shared = [net() for _ in range(NODES)], net()
    again = history.replay(local, step, server=shared if centre is not None else None)
    assert (again.events, again.losses, again.steps) == (history.events, history.losses, history.steps)
    assert all(same_bits(values(module), x[i]) for i, module in enumerate(local))
    assert centre is None or same_bits(values(shared), centre)


def test_twins_know_torch_only() -> None:
    tree = ast.parse(Path(async_twins.__file__).read_text())
    found = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert found == ["from __future__ import annotations", "import torch"]


def test_an_order_that_is_drawn_comes_again() -> None:
    def run(seed: int) -> tuple[list[Any], list[bytes]]:
        server, workers = ParameterServer(net()), on_nodes(net())
        history = drive(workers, step, Downpour(server, Schedule(every=2), local=RATE), steps=8, seed=seed)
        return history.events, [bits(x) for x in server.pull().values()]

    assert run(1) == run(1) != run(2)


@pytest.mark.row("T46")
def test_one_worker_that_takes_at_each_step_is_sgd_to_the_bit() -> None:
    server, here = ParameterServer(net(), nodes=[2, 0]), net()
    history = drive(on_nodes(net(), [1]), step, Downpour(server, Schedule(every=1), local=RATE), steps=20)
    optimizer = torch.optim.SGD(here.parameters(), lr=RATE)
    losses = []
    for t in range(1, 21):
        optimizer.zero_grad()
        loss = loss_of(here, 0, t, "cpu")
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert history.losses == [losses]
    assert same_bits(list(server.pull().values()), values(here))
    assert set(history.staleness()) == {0}


@pytest.mark.row("T45")
def test_what_is_prefetched_was_asked_for_before() -> None:
    server = ParameterServer(net())
    history = drive(on_nodes(net()), step, Downpour(server, Schedule(2, 5, 3), local=RATE), steps=13, seed=1)
    for i in range(NODES):
        mine = [event for event in history.events if event.worker == i and event.step]
        assert [event.step for event in mine if event.kind == "pull"] == [4, 9]
        assert [event.step for event in mine if event.kind == "take"] == [7, 12]
        for kind in ("pull", "take"):  # at the beginning of the step
            for event in mine:
                if event.kind == kind:
                    steps = [e.step for e in mine[: mine.index(event)] if e.kind == "step"]
                    assert steps[-1] == event.step - 1


# ---- EASGD's laws ----------------------------------------------------------------------------------------------------


class Apart(EASGD):
    """Workers that begin at values of their own."""

    def start(self, worker: Any) -> Iterator[Any]:
        yield from super().start(worker)
        for x in worker.values():
            x.add_(worker.index + 1)


@pytest.mark.row("T47", "T55", "I39")
@pytest.mark.parametrize("form", ["server", "together"])
def test_the_laws_of_elastic_averaging(form: str) -> None:
    """With a rate of 0: c + sum x stays, and c - mean x becomes 1 - (n + 1) a of what it was, at each exchange."""
    first = values(net(torch.float64))
    alpha, found = 0.6 / NODES, []
    for steps in range(4):
        server = ParameterServer(net(torch.float64)) if form == "server" else None
        strategy = Apart(server, Schedule(every=1), beta=0.6, local=0.0)
        workers = on_nodes(net(torch.float64))
        drive(workers, step, strategy, steps=steps, max_staleness=0)
        centre = list(server.pull().values()) if server is not None else [c.cpu() for c in strategy.centres[0]]
        found.append((centre, [values(worker) for worker in workers]))
    total = [c + sum(x[k] for x in found[0][1]) for k, c in enumerate(first)]
    for turn, (centre, xs) in enumerate(found):
        for k, c in enumerate(centre):
            torch.testing.assert_close(c + sum(x[k] for x in xs), total[k], rtol=1e-12, atol=1e-12)
            gap = c - sum(x[k] for x in xs) / NODES
            wanted = torch.full_like(gap, -2.0) * (1 - (NODES + 1) * alpha) ** turn
            torch.testing.assert_close(gap, wanted, rtol=1e-10, atol=1e-10)
            assert turn == 0 or (c - first[k]).abs().min() > 0.5  # the centre moves


@pytest.mark.row("T47", "I39")
def test_in_lock_step_the_server_gives_what_meeting_gives() -> None:
    server = ParameterServer(net(torch.float64))
    one, other = on_nodes(net(torch.float64)), on_nodes(net(torch.float64))
    drive(one, step, EASGD(server, Schedule(every=2), local=RATE), steps=9, max_staleness=0)
    together = EASGD(None, Schedule(every=2), local=RATE)
    drive(other, step, together, steps=9)
    for mine, theirs in zip(one, other, strict=True):
        for x, y in zip(values(mine), values(theirs), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    for x, c in zip(server.pull().values(), together.centres[0], strict=True):
        torch.testing.assert_close(x, c.cpu(), rtol=1e-12, atol=1e-12)


# ---- unequal speeds --------------------------------------------------------------------------------------------------


def ahead(history: History) -> int:
    """The most steps by which a worker has begun one ahead of the slowest."""
    done, most = [0] * len(history.steps), 0
    for event in history.events:
        if event.kind == "step":
            most = max(most, event.step - 1 - min(done))
            done[event.worker] = event.step
    return most


def test_staleness_is_bounded() -> None:
    def run(bound: int | None) -> int:
        strategy = Downpour(ParameterServer(net()), Schedule(every=2), local=RATE)
        return ahead(drive(on_nodes(net()), step, strategy, steps=15, seed=4, max_staleness=bound))

    assert run(None) > 2
    assert [run(0), run(2)] == [0, 2]


def hold(here: str, go: str) -> None:
    for path in (here, go):
        open(path, "rb").close()


def test_fast_workers_do_not_wait_for_a_slow_one(tmp_path: Path) -> None:
    """One node is busy until the others have begun their last steps: in lock step that would not end."""
    here, go = str(tmp_path / "here"), str(tmp_path / "go")
    os.mkfifo(here)
    os.mkfifo(go)
    holder: list[Any] = []
    last: set[int] = set()

    def unequal(worker: Any, t: int) -> torch.Tensor:
        if worker.index == 1 and t == 2:
            holder.append(thread(lambda: dt.run(hold, here, go, node=1)))
            open(here, "wb").close()
        loss = step(worker, t)
        if t == 12 and worker.index != 1:
            last.add(worker.index)
            if last == {0, 2}:
                open(go, "wb").close()
        return loss

    server, workers = ParameterServer(net(), nodes=[0, 2]), on_nodes(net())
    history = drive(workers, unequal, Downpour(server, Schedule(every=2, prefetch=1), local=RATE), steps=12)
    holder[0].join()
    assert history.steps == [12] * NODES
    assert max(history.staleness()) > 10
    centre, x = async_twins.downpour(history.events, values(net()), gradient, RATE)
    assert same_bits(list(server.pull().values()), centre)
    assert all(same_bits(values(worker), x[i]) for i, worker in enumerate(workers))


def test_it_ends_after_so_many_seconds() -> None:
    """With as many steps as there was time for: on a busy machine the first may begin late."""
    for seconds in (0.05, 1, 20):
        history = drive(on_nodes(net()), step, LocalSGD(Schedule(every=3), local=RATE), seconds=seconds)
        if min(history.steps) >= 1:
            return
    pytest.fail(f"{history.steps} steps in 20 s")


@pytest.mark.row("T54")
def test_a_local_optimizer_pushes_what_it_has_changed() -> None:
    server, here = ParameterServer(net()), net()
    make: Any = lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9, nesterov=True)  # noqa: E731
    drive(on_nodes(net(), [1]), step, Downpour(server, Schedule(every=3), send_every=2, local=make), steps=12)
    optimizer = make(here.parameters())
    for t in range(1, 13):
        optimizer.zero_grad()
        loss_of(here, 0, t, "cpu").backward()
        optimizer.step()
    for x, y in zip(server.pull().values(), values(here), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_an_error_of_a_step_is_raised() -> None:
    def wrong(worker: Any, t: int) -> torch.Tensor:
        if t < 3 or worker.index != 1:
            return step(worker, t)
        return F.embedding(torch.tensor([7], device=worker.device), torch.zeros(3, 1, device=worker.device)).sum()

    server = ParameterServer(net())
    with pytest.raises(IndexError):
        drive(on_nodes(net()), wrong, Downpour(server, local=RATE), steps=5)
    assert all(x.isfinite().all() for x in server.pull().values())


MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no end": (lambda: drive(on_nodes(net()), step, LocalSGD()), TypeError, "how long"),
    "no workers": (lambda: drive([], step, LocalSGD(), steps=1), ValueError, "no workers"),
    "local": (lambda: drive([net()], step, LocalSGD(), steps=1), TypeError, "'0.weight' of worker 0 is on cpu"),
    "no strategy": (lambda: drive(on_nodes(net()), step, "sgd", steps=1), TypeError, "not str"),  # type: ignore[arg-type]
    "staleness": (lambda: drive([], step, LocalSGD(), steps=1, max_staleness=-1), ValueError, "not -1"),
    "every": (lambda: LocalSGD(Schedule(every=0)), ValueError, "every is 1 or more steps, not 0"),
    "prefetch": (lambda: Downpour(None, Schedule(0, 2, 2), local=1.0), ValueError, "fewer than every=2"),  # type: ignore[arg-type]
    "momentum": (lambda: EASGD(None, momentum=0.9), ValueError, "local is a learning rate"),
    "together": (lambda: EASGD(None, Schedule(0, 2, 1)), ValueError, "prefetch is for a server"),
    "a server": (lambda: Downpour(None, local=1.0), TypeError, "server is a ParameterServer"),  # type: ignore[arg-type]
    "a rate": (lambda: LocalSGD(local="fast"), TypeError, "not 'fast'"),  # type: ignore[arg-type]
    "another": (
        lambda: drive(on_nodes(nn.Linear(2, 2)), step, Downpour(ParameterServer(net()), local=1.0), steps=1),
        ValueError,
        "worker 0: 2 tensors, and the server has 4",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str) -> None:
    do, kind, text = MISTAKES[mistake]
    with pytest.raises(kind, match=text):
        do()


@pytest.mark.row("T46", "T47")
@pytest.mark.parametrize("name", variants(["Downpour", "EASGD", "DiLoCo"]))
def test_digits(name: str) -> None:
    """Beside the bits: a network learns, at least 95 % of digits that it has not seen."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1440], order[1440:]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def learn(worker: Any, t: int) -> torch.Tensor:
        part = train[worker.index :: NODES].roll(-48 * t)[:48]
        loss = F.cross_entropy(worker.module(images[part].to(worker.device)), labels[part].to(worker.device))
        loss.backward()
        return loss

    sgd: Any = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
    outer: Any = lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.5, nesterov=True)  # noqa: E731
    workers, server = on_nodes(model), ParameterServer(model)
    strategy: Strategy = {
        "Downpour": lambda: Downpour(server, Schedule(every=2), send_every=1, local=0.3),
        "EASGD": lambda: EASGD(server, Schedule(every=4), momentum=0.9, local=0.3),
        "DiLoCo": lambda: LocalSGD(Schedule(every=10), local=sgd, outer=outer),
    }[name]()
    drive(workers, learn, strategy, steps=150, seed=0)
    if name == "DiLoCo":
        model.load_state_dict({key: value.cpu() for key, value in workers[0].state_dict().items()})
    else:
        server.pull(into=model)
    with torch.no_grad():
        right = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
    assert right >= 0.95
