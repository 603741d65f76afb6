"""A mesh as the current device, as libraries that know a kind of device only take it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import disttensor as dt

pytestmark = pytest.mark.usefixtures("nodes", "settled")

#: what names the mesh, and what makes it the current device
TARGETS: dict[str, Callable[[Any], Any]] = {
    "the mesh": lambda m: dt.node(m),
    "its device": lambda m: dt.node(m.device),
    "a text": lambda m: dt.node(str(m.device)),
    "an index": lambda m: dt.node(m.device.index),
    "torch.node.device": lambda m: torch.node.device(m.device),  # type: ignore[attr-defined]
    "torch.node.device of an index": lambda m: torch.node.device(m.device.index),  # type: ignore[attr-defined]
}


@pytest.fixture
def mesh() -> Iterator[Any]:
    before = torch.node.current_device()  # type: ignore[attr-defined]
    yield dt.mesh(dp=3)
    torch.node.set_device(before)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", TARGETS)
def test_factories_make_their_tensors_on_all(name: str, mesh: Any) -> None:
    with TARGETS[name](mesh):
        assert torch.node.current_device() == mesh.device.index  # type: ignore[attr-defined]
        made = [
            torch.ones(2, device="node"),
            torch.ones(2).to("node"),
            torch.nn.Linear(2, 2, device="node").weight,
            dt.factories.zeros(3),
        ]
        assert {x.device for x in made} == {mesh.device}
        with dt.node(1):
            assert torch.ones(2, device="node").device == torch.device("node:1")
        assert torch.empty(2, device="node").device == mesh.device
    assert torch.ones(2, device="node").device == torch.device("node:0")


def test_set_device(mesh: Any) -> None:
    torch.node.set_device(mesh.device)  # type: ignore[attr-defined]
    assert torch.ones(2, device="node").device == mesh.device
    index = torch.node.current_device()  # type: ignore[attr-defined]
    torch.node.set_device(2)  # type: ignore[attr-defined]
    assert torch.ones(2, device="node").device == torch.device("node:2")
    torch.node.set_device(index)  # type: ignore[attr-defined]
    assert torch.ones(2, device="node").device == mesh.device
    torch.node.synchronize(mesh.device)  # type: ignore[attr-defined]
    step = dt.graphed(lambda x: x + torch.ones(2, device="node"))
    assert [step(torch.zeros(2, device="node")).at(dp=1).tolist() for _ in range(3)] == [[1, 1]] * 3


ONE_NODE: dict[str, Callable[[], Any]] = {
    "run": lambda: dt.run(len, [1]),
    "current_node": lambda: dt.session.current_node(),
    "a stream": lambda: dt.Stream(),
    "dist_send": lambda: torch.ones(2).dist_send(),  # type: ignore[attr-defined]
    "dist_send of a node's": lambda: torch.ones(2, device="node:1").dist_send(),  # type: ignore[attr-defined]
    "seeding one": lambda: torch.node.manual_seed(1),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("name", ONE_NODE)
def test_what_is_for_one_node_says_so(name: str, mesh: Any) -> None:
    with (
        dt.node(mesh),
        pytest.raises(dt.DisttensorError, match=r"for one node, and the current device is the mesh .*dp=3"),
    ):
        ONE_NODE[name]()


def test_an_index_that_nothing_has(mesh: Any) -> None:
    with pytest.raises(ValueError, match="node 99 does not exist, and no mesh has the index 99 either: "):
        torch.node.set_device(99)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="node 5 does not exist; there are 3 nodes"):
        dt.node(5)
    with pytest.raises(TypeError):
        dt.node(torch.ones(2, device=mesh.device))  # type: ignore[arg-type]
    assert torch.node.current_device() == 0  # type: ignore[attr-defined]


def test_a_mesh_that_is_closed_while_it_is_current() -> None:
    closing = dt.mesh(closing=2, nodes=[2, 0])
    with dt.node(closing):
        closing.close()
        with pytest.raises(RuntimeError, match=r"is closed: it was the mesh \(closing=2\)"):
            torch.ones(2, device="node")
