"""What goes over the wire, counted: commands, messages and replies of everyday programs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest
import torch
from equal import same

import disttensor as dt
from disttensor import testing

pytestmark = pytest.mark.usefixtures("clean")


@pytest.fixture
def x() -> torch.Tensor:
    x = torch.randn(16, 16, device="node:1")
    for warm in (x + x, x * 0.5, x.relu(), x @ x, x.sum(), x.t().exp(), x[0].exp()):  # plans and templates exist
        del warm
    x.sum().item()
    return x


ONE_COMMAND: dict[str, Callable[[torch.Tensor], object]] = {
    "add": lambda x: x + x,
    "scalar": lambda x: x * 0.999,
    "relu": lambda x: x.relu(),
    "matmul": lambda x: x @ x,
    "sum": lambda x: x.sum(),
    "in place": lambda x: x.add_(1),
    "two outputs": lambda x: x.max(1),
    "linear": lambda x: torch.nn.functional.linear(x, x, x[0]),
    "softmax": lambda x: x.softmax(1),
    "factory": lambda x: torch.zeros(3, device=x.device),
    "like": lambda x: torch.ones_like(x),
    "cat": lambda x: torch.cat([x, x]),
    "unbind": lambda x: x.unbind(0),
    "split": lambda x: x.split(4),
    "randn": lambda x: torch.randn(3, 3, device=x.device),
}


@pytest.mark.row("M14")
@pytest.mark.parametrize("name", ONE_COMMAND)
def test_one_command_and_no_reply(name: str, x: torch.Tensor) -> None:
    program = ONE_COMMAND[name]
    kept = [program(x), program(x)]
    with testing.MessageLog() as log:
        kept.append(program(x))
    extra = {"linear": 1, "factory": 1, "randn": 1}.get(name, 0)  # a view; the memory
    assert len(log[1].commands) == 1 + extra, log[1].commands
    assert log.reports == 0
    del kept


NOTHING: dict[str, Callable[[torch.Tensor], object]] = {
    "row": lambda x: x[0],
    "t": lambda x: x.t(),
    "detach": lambda x: x.detach(),
    "view": lambda x: x.view(-1),
    "chain": lambda x: x[1:].t().unsqueeze(0),
    "empty": lambda x: torch.empty(3, device=x.device),
    "data": lambda x: x.data,
    "shape": lambda x: (x.shape, x.stride(), x.dtype, x.device, x.numel()),
    "place": lambda x: (x.get_node(), x.get_device(), x.storage_offset(), x.is_contiguous()),
    "requires_grad": lambda x: x.detach().requires_grad_(),
    "same place": lambda x: x.to(x.device),
    "contiguous": lambda x: x.contiguous(),
    "expand": lambda x: x[0].expand(3, 16),
    "permute": lambda x: x.permute(1, 0),
    "zero_grad": lambda x: torch.optim.SGD([x.detach().requires_grad_()], 0.1).zero_grad(),
}


def geometry(made: object) -> object:
    """What is known of a tensor beside its place; what is said of one, without places."""
    if isinstance(made, torch.Tensor):
        return made.shape, made.stride(), made.storage_offset(), made.dtype, made.is_contiguous(), made.requires_grad
    return tuple(part for part in made if not isinstance(part, torch.device)) if isinstance(made, tuple) else made


@pytest.mark.row("M3")
@pytest.mark.parametrize("name", NOTHING)
def test_nothing_is_sent(name: str, x: torch.Tensor) -> None:
    """And what is known without it is what a local tensor has."""
    kept = [NOTHING[name](x)]
    with testing.MessageLog() as log:
        kept.append(NOTHING[name](x))
        found = geometry(kept[-1])
    assert log.commands == []
    assert log.reports == 0
    assert found == ((1, 0, 0, True) if name == "place" else geometry(NOTHING[name](torch.empty(16, 16))))


def test_a_view_is_made_where_it_is_used(x: torch.Tensor) -> None:
    with testing.MessageLog() as log:
        row = x[0]
        assert log.commands == []
        y = row.exp()
        assert log[1].commands == ["Call aten::select.int", "Call aten::exp"]
        z = row.exp()
        assert log[1].commands[2:] == ["Call aten::exp"]
    del y, z


def test_a_loop_and_an_item_are_one_round_trip(x: torch.Tensor) -> None:
    with testing.MessageLog() as log:
        y = x
        for _ in range(100):
            y = y * 0.999 + x
        value = y.sum().item()
    assert log.reports == 1
    assert len(log.questions) == 1
    assert len([name for name in log[1].commands if name != "Free"]) <= 203
    assert log[1].commands.count("Free") <= log[1].messages + 203 // testing.limit("sweep")  # they ride along
    assert log[1].messages <= 20
    assert isinstance(value, float)


@pytest.mark.parametrize(
    ("elements", "command", "reports"), [(3, "Download", 1), (1 << 13, "Download", 1), (1 + (1 << 13), "Send", 0)]
)
def test_a_download_is_one_message(elements: int, command: str, reports: int) -> None:
    """Up to 32 KiB come with the reply, and what is more through the data channel, without one."""
    x = torch.ones(elements).to("node:1")
    x.cpu()  # the first one introduces the node and the script
    with testing.MessageLog() as log:
        local = x.cpu()
    assert log[1].messages == 1
    assert log[1].commands == [command]
    assert log.reports == reports
    assert torch.equal(local, torch.ones(elements))


@pytest.mark.parametrize(("size", "commands"), [(1, ["Run"]), (60_000, ["Run"]), (70_000, ["Piece", "Run"])])
def test_a_function_is_one_command(size: int, commands: list[str], x: torch.Tensor) -> None:
    """Its arguments travel with it, up to 64 KiB."""
    dt.submit(len, bytes(size), node=1).result()
    dt.synchronize()
    with testing.MessageLog() as log:
        assert dt.submit(len, bytes(size), node=1).result() == size
    assert log[1].commands == commands
    assert log.reports == 1


@pytest.mark.parametrize(("elements", "command"), [(3, "Upload"), (1 << 14, "Upload"), (1 + (1 << 14), "Recv")])
def test_an_upload_is_one_command(elements: int, command: str, x: torch.Tensor) -> None:
    """Up to 64 KiB come with it."""
    with testing.MessageLog() as log:
        y = torch.ones(elements).to("node:1")
    assert log[1].commands == [command]
    assert log.reports == 0
    same(y, torch.ones(elements))


def test_node_to_node_is_one_command_each(x: torch.Tensor) -> None:
    to = x.to("node:0")
    with testing.MessageLog() as log:
        y = x.to("node:0")
    assert (log[1].commands, log[0].commands) == (["Send"], ["Recv"])
    assert log[1].messages == 1
    assert log.reports == 0
    del y, to


@pytest.mark.fault(45)
def test_dropping_many_proxies_costs_few_messages() -> None:
    n = 40_000
    kept = [torch.zeros(1, device="node:1") for _ in range(n)]
    assert torch.node.memory_allocated("node:1") >= 4 * n
    with testing.MessageLog() as log:
        start = time.monotonic()
        kept.clear()
        dt.synchronize()
        # the thread that flushes may send a message each time that it looks; a busy machine takes longer
        looks = (time.monotonic() - start) / testing.limit("idle")
    assert log[1].messages <= n / 5000 + looks
    assert len(log[1].commands) <= n / 5000 + looks
    assert torch.node.memory_allocated("node:1") < 4 * n


def test_a_program_keeps_no_tensors(x: torch.Tensor) -> None:
    gc.collect()
    dt.synchronize()
    before = testing.usage(x)
    for _ in range(50):
        y = (x @ x).relu().t()[1:].sum()
        del y
    dt.synchronize()
    assert testing.usage(x) == before


@pytest.mark.fault(45)
def test_frees_follow_uses() -> None:
    """Tensors that are dropped at once after their last use are there for it."""
    local = torch.randn(8, 8)
    x = local.to("node:1")
    for _ in range(200):
        x = (x + 1) - 1
        local = (local + 1) - 1
    same(x, local)


def test_bytes_per_command(x: torch.Tensor) -> None:
    with testing.MessageLog() as log:
        for _ in range(300):
            y = x * 0.5
            z = y + x
            del y, z
        dt.synchronize()
    assert log[1].bytes_sent / len(log[1].commands) <= 20


@pytest.mark.row("M14")
def test_training_step_sends_no_reply_and_asks_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to("node:1")
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch, target = torch.randn(4, 8).to("node:1"), torch.randn(4, 1).to("node:1")

    def step() -> torch.Tensor:
        opt.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch), target)
        loss.backward()
        opt.step()
        return loss

    step()
    step()
    with testing.MessageLog() as log:
        for _ in range(5):
            loss = step()
        assert log.reports == 0
        assert log.questions == []
        first = len(log[1].commands)
        loss.item()
    assert log.reports == 1
    assert first / 5 < 60


ROUND_TRIPS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0, 0].item(),
    "bool": lambda x: bool((x > 0).any()),
    "nonzero": lambda x: x.nonzero(),
    "equal": lambda x: torch.equal(x, x),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
}


@pytest.mark.row("M8", "M9")
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_one_round_trip(name: str, x: torch.Tensor) -> None:
    local, kept = x.cpu(), [ROUND_TRIPS[name](x)]
    with testing.MessageLog() as log:
        kept.append(ROUND_TRIPS[name](x))
    assert len(log.questions) == log.reports == 1
    same(kept[-1], ROUND_TRIPS[name](local))


def test_mask_of_a_write_needs_no_round_trip(x: torch.Tensor) -> None:
    mask = x > 0
    x[mask] = 1.0
    with testing.MessageLog() as log:
        x[mask] = 2.0
    assert log.questions == []
    assert log.reports == 0


def test_printing_fetches_little() -> None:
    x = torch.zeros(1000, 1000, device="node:1")
    text = repr(x)
    assert "node:1" in text
    assert "..." in text
    dt.channels.reset_stats()
    repr(x)
    assert 0 < dt.channels.stats().received.bytes <= 400
