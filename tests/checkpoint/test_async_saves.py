"""async_save has the values of its moment, whatever writes to the tensors before they are read, and holds up nobody.

The nodes' reading waits for a tensor that comes late, so all that is written here comes before it. Ground
truth is a save that waits, at the same moment, and torch reads both.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mesh_kit import connect
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import disttensor as dt
from disttensor.checkpoint import async_save, save

pytestmark = [pytest.mark.usefixtures("settled"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

NODES = 2


@pytest.fixture(scope="module", params=["local", "inproc"])
def session(request: pytest.FixtureRequest) -> Iterator[str]:
    """Nodes that are processes, and nodes that are threads."""
    with dt.init_master_worker(nodes=NODES + 1, launcher=request.param, threads=1):
        connect(NODES + 1)
        yield request.param


def stand(began: str, on: str) -> None:
    """Stands still until it may go on."""
    with open(began, "w"):
        pass
    with open(on) as opened:
        opened.read()


class Standing:
    """Node 2 stands still until ``go_on``, and then sends what the other nodes are to save, too."""

    def __init__(self, folder: Path) -> None:
        began, self._on = folder / "began", folder / "on"
        os.mkfifo(began)
        os.mkfifo(self._on)
        self._thread = threading.Thread(target=dt.run, args=(stand, str(began), str(self._on)), kwargs={"node": 2})
        self._thread.start()
        with open(began):
            pass

    def save(self, state: dict[str, Any], path: Path) -> dt.futures.Work:
        """Begins a save that reads nothing before ``go_on``."""
        late = torch.ones(4, device="node:2")
        return async_save({**state, "late": [late.to(f"node:{node}") for node in range(NODES)]}, path)

    def go_on(self) -> None:
        with open(self._on, "w"):
            pass
        self._thread.join()


Write = Callable[[], object]  #: writes what is saved; returns what it keeps alive


def values(node: int = 0, start: float = 1.0) -> torch.Tensor:
    return torch.arange(start, start + 24).to(f"node:{node}")


def in_place() -> tuple[Any, Write]:
    x = values()
    return x, lambda: x.add_(1).sum().item()


def through_a_view() -> tuple[Any, Write]:
    x = values()
    return x, lambda: x.view(4, 6)[1:3].t().zero_()


def under_a_view() -> tuple[Any, Write]:
    base = values()
    return {"view": base[3:9], "rows": base.view(4, 6)[:, 2]}, base.zero_


def shared_twice() -> tuple[Any, Write]:
    x = values()
    return {"a": x, "b": x, "c": x.view(2, 12)}, x.neg_


def foreach() -> tuple[Any, Write]:
    xs = [values(), values(start=5.0), values(1)]
    return xs, lambda: [torch._foreach_mul_(xs[:2], 2.0), torch._foreach_mul_(xs[2:], 2.0)]


def into_out() -> tuple[Any, Write]:
    x, a = values(), values(start=3.0)
    return x, lambda: torch.add(a, a, out=x)


def from_another_node() -> tuple[Any, Write]:
    x, y = values(), values(1, 7.0)
    return x, lambda: x.copy_(y.to("node:0"))


def sent_meanwhile() -> tuple[Any, Write]:
    x = values()
    return x, lambda: (y := x.to("node:1"), x.zero_(), y.add_(1).cpu())


def at_indices() -> tuple[Any, Write]:
    x, at = values(), torch.tensor([3, 5]).to("node:0")

    def write() -> None:
        x[at] = 0
        x[7] = -1

    return x, write


def drawn() -> tuple[Any, Write]:
    x = values()
    return x, x.normal_


def optimizers() -> tuple[Any, Write]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).to("node:0")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = values().view(4, 6)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    return {"model": model, "optimizer": optimizer}, lambda: [step() for _ in range(3)]


def statistics() -> tuple[Any, Write]:
    norm = nn.BatchNorm1d(6).to("node:1")
    x = values(1).view(4, 6)
    return {"norm": norm}, lambda: [norm(x) for _ in range(2)]


def replays() -> tuple[Any, Write]:
    x, made = values(), dt.graph(g := dt.Graph())
    with made:
        y = x.mul_(3) + 1
        x.view(4, 6)[0].copy_(y[:6])
    g.replay()  # the first time call by call
    return x, lambda: [g.replay(), g.replay()]


def what_replays_make() -> tuple[Any, Write]:
    x = values()
    with dt.graph(g := dt.Graph()):
        y = x.add(1)
    g.replay()
    return {"y": y, "view": y[3:]}, lambda: [x.zero_(), g.replay()]


def collectives() -> tuple[Any, Write]:
    xs = [values(0), values(1, 4.0)]
    return xs, lambda: dt.all_reduce(xs)


def collectives_beside() -> tuple[Any, Write]:
    xs = [values(0), values(1, 4.0)]
    return xs, lambda: dt.all_reduce(xs, async_op=True).wait()


def functions() -> tuple[Any, Write]:
    x = values()
    return x, lambda: dt.run(torch.Tensor.zero_, x, node=0)


def keep(x: torch.Tensor) -> None:
    torch.kept_by_test = x  # type: ignore[attr-defined]


def write_kept() -> None:
    torch.kept_by_test.zero_()  # type: ignore[attr-defined]
    del torch.kept_by_test  # type: ignore[attr-defined]


def functions_that_keep() -> tuple[Any, Write]:
    x = values()
    dt.run(keep, x, node=0)
    return x, lambda: dt.run(write_kept, node=0)


def other_streams() -> tuple[Any, Write]:
    x, side = values(), dt.Stream(0)

    def write() -> None:
        with dt.stream(side):
            x.zero_()
        side.synchronize()

    return x, write


def freed() -> tuple[Any, Write]:
    xs = [values()]
    state = {"x": xs[0]}

    def write() -> object:
        xs.clear()
        state.clear()
        return [torch.zeros(24, device="node:0") for _ in range(50)]

    return state, write


def other_data() -> tuple[Any, Write]:
    p = nn.Parameter(values())
    fresh = values(start=9.0)

    def write() -> None:
        p.data = fresh
        fresh.zero_()

    return p, write


def resized() -> tuple[Any, Write]:
    x = values()
    return x, lambda: x.resize_(2).zero_()


def on_a_mesh() -> tuple[Any, Write]:
    mesh = dt.mesh(dp=NODES, nodes=[0, 1])
    torch.manual_seed(0)
    model = dt.DataParallel(nn.Linear(6, 4).to(mesh.device), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.arange(48.0).view(8, 6).to(mesh.device)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    return {"model": model, "optimizer": optimizer}, lambda: [step(), step()]


CASES = [
    in_place, through_a_view, under_a_view, shared_twice, foreach, into_out, from_another_node, sent_meanwhile,
    at_indices, drawn, optimizers, statistics, replays, what_replays_make, collectives, collectives_beside, functions,
    functions_that_keep, other_streams, freed, other_data, resized, on_a_mesh,
]  # fmt: skip


def read(path: Path) -> dict[str, Any]:
    """All of a checkpoint, by torch alone."""
    dcp_to_torch_save(path, path.with_suffix(".pt"))
    found: dict[str, Any] = {}

    def walk(name: str, value: Any) -> None:
        pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in pairs:
            walk(f"{name}.{key}", inner)
        if not isinstance(value, (dict, list)):
            found[name] = value

    walk("", torch.load(path.with_suffix(".pt"), weights_only=False))
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_is_written_before_it_is_read(case: Callable[[], Any], session: str, tmp_path: Path) -> None:
    """The checkpoint has what was there, and the writing is done while nothing of it has been read."""
    state, write = case()
    state = state if isinstance(state, dict) else {"state": state}
    save(state, tmp_path / "then")
    standing = Standing(tmp_path)
    try:
        work = standing.save(state, tmp_path / "c")
        made = write()
        for node in range(NODES):  # all of it is done
            assert torch.ones(1, device=f"node:{node}").item() == 1
        assert not work.is_completed()
    finally:
        standing.go_on()
    assert work.wait()
    found, expected = read(tmp_path / "c"), read(tmp_path / "then")
    assert found.keys() == {*expected, *(f".late.{node}" for node in range(NODES))}
    for name, value in expected.items():
        both = isinstance(value, torch.Tensor)
        assert torch.equal(found[name], value) if both else found[name] == value, name
    del made
