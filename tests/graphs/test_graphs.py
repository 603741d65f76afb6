"""Graphs: what is recorded runs at each replay as it would have run in eager."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from telling import said

import disttensor as dt
from disttensor import testing

pytestmark = pytest.mark.usefixtures("clean")


def seed(number: int) -> None:
    """In-process nodes share one generator: all have to be done with it before the next use."""
    torch.manual_seed(number)
    dt.synchronize()


def held() -> int:
    """Bytes on node 0."""
    gc.collect()  # what earlier tests left in cycles
    return torch.node.memory_allocated("node:0")  # type: ignore[attr-defined, no-any-return]


def recorded(step: Callable[[], Any]) -> tuple[dt.Graph, Any]:
    g = dt.Graph()
    with dt.graph(g):
        result = step()
    return g, result


def test_nothing_runs_while_recording_and_each_replay_is_one_command() -> None:
    x = torch.ones(3, device="node:0")

    def step() -> torch.Tensor:
        x.add_(1)
        return x * 2

    g, y = recorded(step)
    assert x.tolist() == [1, 1, 1]
    for i in range(3):
        with testing.MessageLog() as log:
            g.replay()
        assert (log[0].commands, log[1].commands) == (["Replay"], [])
        assert y.tolist() == [2.0 * (i + 2)] * 3
    assert x.tolist() == [4, 4, 4]


def test_a_graph_with_numbers_ends_with_its_last_name() -> None:
    """And so what it has on nodes, as a CUDA graph's memory: not when the collector finds it."""
    x = torch.ones(3, device="node:0")
    gc.disable()
    try:
        g = dt.Graph()
        with dt.graph(g):
            rate = g.number("rate", 0.5)
            y = x * rate
        g.replay(rate=2.0)
        assert y.tolist() == [2.0] * 3
        graph = weakref.ref(g)
        del g, y, rate
        assert graph() is None
    finally:
        gc.enable()


def test_a_training_step() -> None:
    seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 4))
    x, target = torch.randn(32, 8).to("node:1"), torch.randint(0, 4, (32,)).to("node:1")
    losses = []
    for graphed in (False, True):
        model = copy.deepcopy(net).to("node:1")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def step(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), target)
            loss.backward()
            optimizer.step()
            return loss

        seed(1)
        found = [step().item()]
        if graphed:
            g, loss = recorded(step)
        for _ in range(4):
            schedule.step()
            if graphed:
                g.replay()
            else:
                loss = step()
            found.append(loss.item())
        losses.append((found, [p.tolist() for p in model.parameters()], [p.grad.tolist() for p in model.parameters()]))
        assert {float(s["step"]) for s in optimizer.state.values()} == {5.0}
    assert losses[0] == losses[1]


def test_copies_between_nodes() -> None:
    a = torch.ones(4, device="node:0")
    b = torch.zeros(4, device="node:1")

    def step() -> torch.Tensor:
        b.add_((a * 2).to("node:1"))
        a.add_(b.sum().to("node:0"))
        return a + 1

    g, out = recorded(step)
    x, y = torch.ones(4), torch.zeros(4)
    for _ in range(3):
        with testing.MessageLog() as log:
            g.replay()
        assert log[0].commands == log[1].commands == ["Replay"]
        y.add_(x * 2)
        x.add_(y.sum())
        assert torch.equal(out.cpu(), x + 1)
        assert torch.equal(b.cpu(), y)


def test_an_output_that_others_see_gets_its_values_in_place() -> None:
    x = torch.zeros(2, 2, device="node:0")

    def step() -> torch.Tensor:
        x.add_(1)
        return x * 10

    g, out = recorded(step)
    g.replay()
    view = out[0]
    assert view.tolist() == [10, 10]
    g.replay()
    assert view.tolist() == [20, 20]
    assert out.tolist() == [[20, 20], [20, 20]]


def test_an_output_that_is_seen_through_a_view_only() -> None:
    x = torch.zeros(4, device="node:0")

    def step() -> torch.Tensor:
        x.add_(1)
        return x * 10

    g, out = recorded(step)
    g.replay()
    first = out[:2]
    parts = out.split(2)
    lazy = out[3:]
    del out
    for i in range(1, 4):
        if i > 1:
            g.replay()
        assert first.tolist() == parts[1].tolist() == [10.0 * i] * 2
        assert i < 3 or lazy.tolist() == [10.0 * i]
    del first, parts, lazy
    before = held()
    g.replay()
    assert held() == before


def test_a_dropped_output_is_not_kept() -> None:
    x = torch.zeros(1 << 16, device="node:0")
    g, (first, second) = recorded(lambda: (x + 1, x + 2))
    g.replay()
    before = held()
    del first
    g.replay()
    assert held() == before - (4 << 16)
    assert second[0].item() == 2
    del g, second
    assert held() == before - (8 << 16)


def test_what_a_graph_uses_stays_as_long_as_it_does() -> None:
    before = held()
    x = torch.ones(1 << 16, device="node:0")
    g = dt.Graph()
    with dt.graph(g):
        out = x.view(-1, 2).sum()
    del x
    g.replay()
    assert out.item() == 1 << 16
    del out
    g.reset()
    assert held() == before


def test_a_declared_number() -> None:
    x = torch.ones(2, device="node:0")
    g = dt.Graph()
    with dt.graph(g):
        rate = g.number("rate", 0.5)
        y = x * (1 - rate) + rate
        z = torch.add(x, x, alpha=-rate)
    for rate in (0.5, 0.1, 0.0, -3.0):
        g.replay(rate=rate)
        local = torch.ones(2)
        assert torch.equal(y.cpu(), local * (1 - rate) + rate)
        assert torch.equal(z.cpu(), torch.add(local, local, alpha=-rate))
    with pytest.raises(dt.errors.GraphError, match="no number 'other'; declared are: rate"):
        g.replay(other=1.0)


def test_a_number_that_reaches_nothing_is_said() -> None:
    x = torch.ones(2, device="node:0")
    g = dt.Graph()
    with pytest.warns(UserWarning, match="the number 'k' reached no recorded operation"), dt.graph(g):
        _ = x * math.sqrt(g.number("k", 4.0))


def test_many_commands_go_in_parts() -> None:
    x = torch.zeros(2, device="node:0")
    g = dt.Graph()
    with testing.MessageLog() as log, testing.limits(part=20), dt.graph(g):
        step = g.number("step", 1.0)
        for i in range(100):
            x.add_(i * step)
    assert log[0].commands.count("GraphPart") > 10
    g.replay(step=2.0)
    assert x.tolist() == [2.0 * 4950] * 2


def test_a_branch_on_a_number_is_refused_when_it_would_go_the_other_way() -> None:
    x = torch.ones(2, device="node:0")
    g = dt.Graph()
    with dt.graph(g):
        k = g.number("k", 1.0)
        y = x + k if k > 0 else x - k
    g.replay(k=2.0)
    assert y.tolist() == [3, 3]
    with pytest.raises(dt.errors.GraphError, match=r"another way at .*test_graphs\.py"):
        g.replay(k=-2.0)


@pytest.mark.parametrize(
    "wait", [lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: x.nonzero(), lambda x: dt.run(len, x)]
)
def test_what_would_have_to_wait_is_refused_at_its_line(wait: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(2, device="node:0")
    with pytest.raises(dt.errors.GraphError, match="while a graph is recorded"), dt.graph(dt.Graph()):
        wait(x)
    assert (x + 1).tolist() == [2, 2]


def test_a_failure_names_the_line_that_recorded_it_and_the_one_that_replayed() -> None:
    x = torch.zeros(2, dtype=torch.int64, device="node:0")
    table = torch.ones(3, 2, device="node:0")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        bad = table[x]  # recorded here
        return bad + 1, table * 2

    g, (bad, good) = recorded(step)
    g.replay()
    assert bad.tolist() == [[2, 2], [2, 2]]
    x.fill_(7)
    g.replay()
    with pytest.raises(IndexError) as caught:
        bad.cpu()
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "# recorded here" in text)
    assert f"test_graphs.py:{line} in" in said(caught.value)
    assert "replayed: " in said(caught.value)
    assert good.tolist() == [[2, 2]] * 3
    x.fill_(1)
    g.replay()
    assert bad.tolist() == [[2, 2], [2, 2]]


def test_a_graph_outlives_the_templates_of_its_time() -> None:
    """A replay that fails needs them: it goes on call by call."""
    x = torch.zeros(2, dtype=torch.int64, device="node:0")
    table = torch.ones(3, 2, device="node:0")
    g, rows = recorded(lambda: table[x] * 2)
    with testing.limits(templates=8):
        for n in range(1, 60):
            torch.zeros(n, device="node:0")
    x.fill_(7)
    g.replay()
    with pytest.raises(IndexError):
        rows.cpu()
    x.fill_(1)
    g.replay()
    assert rows.tolist() == [[2, 2], [2, 2]]


def test_an_output_is_not_there_before_the_first_replay() -> None:
    x = torch.ones(2, device="node:0")
    g, y = recorded(lambda: x + 1)
    with pytest.raises(dt.DisttensorError, match="has not been replayed yet"):
        (y * 2).cpu()
    g.replay()
    assert y.tolist() == [2, 2]


def test_a_tensor_sent_in_the_block_is_a_constant_even_if_the_program_writes_it() -> None:
    def step() -> torch.Tensor:
        a = torch.tensor([1.0, 2.0]).to("node:0")
        b = torch.tensor([3.0, 4.0]).to("node:0")
        a.view(-1).add_(1)
        return a + b

    g, out = recorded(step)
    for _ in range(3):
        g.replay()
        assert out.tolist() == [5, 7]


@pytest.mark.parametrize("kept", [lambda sent: sent, lambda sent: sent[1:], lambda sent: sent.view(2, 1).t()])
@pytest.mark.parametrize("place", ["node", "mesh"])
def test_a_tensor_sent_in_the_block_is_as_it_was_sent_though_the_script_has_written_it(
    place: str, kept: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """The script holds the tensor, or a view of it: in eager each step has a new one."""
    device = torch.device("node:0") if place == "node" else dt.mesh(dp=2, nodes=[0, 1]).device

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        sent = torch.tensor([1.0, 2.0]).to(device)
        return kept(sent), sent * 10

    step()
    g, (mine, result) = recorded(step)
    for _ in range(3):
        g.replay()
        assert mine.flatten().tolist() == kept(torch.tensor([1.0, 2.0])).flatten().tolist()
        assert result.tolist() == [10, 20]
        mine.add_(5)

    graphed = dt.graphed(step)
    earlier: list[torch.Tensor] = []
    for call in range(4):
        mine, result = graphed()
        earlier.append(mine.add_(call))
        assert result.tolist() == [10, 20]
    for call, mine in enumerate(earlier):
        assert mine.flatten().tolist() == (kept(torch.tensor([1.0, 2.0])) + call).flatten().tolist()


def test_a_copy_that_the_block_drops_unused_can_be_waited_for() -> None:
    x = torch.ones(3, device="node:0")

    def step() -> None:
        x.to("node:1")

    step()
    g, _ = recorded(step)
    for _ in range(3):
        g.replay()
        dt.synchronize()


def test_a_block_that_fails_records_nothing() -> None:
    x = torch.ones(2, device="node:0")
    g = dt.Graph()
    with pytest.raises(IndexError, match="out of bounds"), dt.graph(g):
        x.add_(1)[2]
    with pytest.raises(dt.errors.GraphError, match="empty"):
        g.replay()
    assert x.tolist() == [1, 1]
    with dt.graph(g):
        x.add_(1)
    g.replay()
    assert x.tolist() == [2, 2]
    with pytest.raises(dt.errors.GraphError, match="has a recording"), dt.graph(g):
        pass


def test_what_a_graph_uploads_and_a_collective_writes_is_new_in_each_replay() -> None:
    g = dt.Graph()
    with dt.graph(g):
        xs = [torch.ones(2).to(f"node:{k}") for k in range(2)]
        dt.all_reduce(xs)
        nobodys = [torch.ones(2).to(f"node:{k}") for k in range(2)]
        dt.all_reduce(nobodys)
        sums = [x + 1 for x in nobodys]
        del nobodys  # what somebody holds is new in each replay, whoever writes it
    for _ in range(3):
        g.replay()
        assert [x.tolist() for x in xs] == [[2.0, 2.0], [2.0, 2.0]]
        assert [x.tolist() for x in sums] == [[3.0, 3.0], [3.0, 3.0]]
