"""A tensor that is on its way to a node, and that nothing there uses yet, holds up nothing there: real nodes.

Otherwise asynchronous training, written as a plain loop, would be in lock step with its slowest node.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import HANG
from mesh_kit import connected
from stream_kit import thread

import disttensor as dt

pytestmark = pytest.mark.usefixtures("settled")


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(3):
        yield


def hold(here: str, go: str) -> None:
    """Runs on a node until the script has opened both."""
    for path in (here, go):
        open(path, "rb").close()


@contextmanager
def held(folder: Path, node: int) -> Iterator[None]:
    """Has a node run a function until the end."""
    here, go = str(folder / f"here-{node}"), str(folder / f"go-{node}")
    os.mkfifo(here)
    os.mkfifo(go)
    holder = thread(lambda: dt.run(hold, here, go, node=node))
    open(here, "wb").close()
    try:
        yield
    finally:
        open(go, "wb").close()
        holder.join()


@contextmanager
def behind(folder: Path) -> Iterator[Any]:
    """Gives a tensor of node 1 that is behind a function there, which ends at the end and not before."""
    x = torch.ones(1000, device="node:1")
    with held(folder, 1):
        late = x * 2
        yield late
    assert late.sum().item() == 2000


def free(what: Callable[[], object]) -> Any:
    """Returns what a function returns, which another thread runs, or fails if that does not end."""
    found: list[Any] = []
    asking = thread(lambda: found.append(what()))
    asking.join(HANG / 4)
    if asking.is_alive():
        pytest.fail("held up by a receive that nothing has used")
    assert found, "it raised"
    return found[0]


def reduced(x: torch.Tensor, y: torch.Tensor) -> float:
    dt.all_reduce([x, y])
    return float(x.sum().item())


def raised(x: torch.Tensor) -> float:
    x.add_(1)
    return float(x.sum().item())


def event() -> float:
    dt.Event().record(dt.streams.default_stream(0))
    return float(torch.full((2,), 5.0, device="node:0").sum().item())


ONES = {k: torch.ones(10) for k in range(3)}

DOES: dict[str, tuple[Callable[[dict[int, Any]], Any], Any]] = {
    "an operation": (lambda x: (x[0] + 1).sum().item(), 20.0),
    "a write": (lambda x: raised(x[0]), 20.0),
    "an upload": (lambda x: torch.arange(4.0).to("node:0").sum().item(), 6.0),
    "a fetch": (lambda x: dt.fetch(x[0]).result().sum().item(), 10.0),
    "a send": (lambda x: x[0].to("node:2").sum().item(), 10.0),
    "a receive": (lambda x: x[2].to("node:0").sum().item(), 10.0),
    "a function": (lambda x: dt.run(abs, -1, node=0), 1),
    "a collective": (lambda x: reduced(x[0], x[2]), 20.0),
    "an event": (lambda x: event(), 10.0),
    "a question about memory": (lambda x: torch.node.memory_allocated("node:0") > 0, True),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("streams", ["no-streams", "streams", "streams-at-work"])  # in this order
@pytest.mark.parametrize("relay", ["to a node", "to the script", "to a mesh"])
def test_what_is_passed_on_holds_nothing(tmp_path: Path, relay: str, streams: str) -> None:
    side = dt.Stream(node=0) if streams != "no-streams" else None
    x: Any = ONES[0].to("node:0")
    mesh = dt.mesh(dp=2, nodes=[0, 2])
    with behind(tmp_path) as late:
        with held(tmp_path, 0) if streams == "streams-at-work" else nullcontext():  # the default stream has a queue
            passed = late.to("node:0") if relay != "to a mesh" else late.to(mesh.device)
            if relay == "to a node":
                passed = passed.to("node:2")
            elif relay == "to the script":
                passed = dt.fetch(passed)
        if relay == "to the script":  # transfers between two are in order
            assert free(lambda: x.to("node:2").sum().item()) == 10
        else:
            assert free(lambda: raised(x)) == 20
    assert (passed.result() if relay == "to the script" else passed).sum().item() == 2000
    del side


@pytest.mark.parametrize("streams", [False, True], ids=["no-streams", "streams"])
@pytest.mark.parametrize("what", DOES)
def test_an_unused_receive_holds_nothing(tmp_path: Path, what: str, streams: bool) -> None:
    side = dt.Stream(node=0) if streams else None
    x: dict[int, Any] = {k: ones.to(f"node:{k}") for k, ones in ONES.items()}
    do, wanted = DOES[what]
    with behind(tmp_path) as late:
        arriving = late.to("node:0")
        assert free(lambda: do(x)) == wanted
    assert arriving.sum().item() == 2000
    del side


def test_answers_about_memory_leave_by_themselves(tmp_path: Path) -> None:
    """With streams the answer may be there when the node has nothing else to do, and no other thread sends it."""
    side, asked = dt.Stream(node=0), []
    with behind(tmp_path) as late:
        with dt.stream(side):
            arriving = late.to("node:0")
        asking = thread(lambda: asked.append(torch.node.memory_allocated("node:0")))  # type: ignore[attr-defined]
    asking.join(HANG)
    assert asked
    del arriving
