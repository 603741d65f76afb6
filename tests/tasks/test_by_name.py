"""Functions that name torch's own objects, some of which torch has in the place of modules: nodes find them by name."""

from __future__ import annotations

import pkgutil
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import disttensor as dt

OPS = ("aten.relu", "aten.add", "aten.mm", "prims.abs", "higher_order.cond", "higher_order.while_loop")


@pytest.fixture(scope="module")
def nodes() -> Iterator[None]:
    """A node that is a process, which finds nothing of the script's."""
    with dt.init_master_worker(nodes=1, launcher="local"):
        torch.ones(1 << 14).to("node:0").cpu()  # connects the data channel, which stays
        yield


def objects() -> dict[str, Any]:
    """Torch's objects by their dotted names: those in the place of modules, namespaces of operators and some of these,
    classes that C++ has made, and one value of each enum."""
    found: dict[str, Any] = {
        name: module
        for name, module in sys.modules.items()
        if name.startswith("torch.") and isinstance(module, ModuleType) and type(module) is not ModuleType
    }
    found |= {f"torch:ops.{name}": getattr(torch.ops, name) for name in ("aten", "prims", "higher_order", "mylib")}
    found["torch:classes.mine"] = torch.classes.mine
    found |= {f"torch:ops.{name}": getattr(getattr(torch.ops, name.split(".")[0]), name.split(".")[1]) for name in OPS}
    for name in OPS[:3]:
        packet = found[f"torch:ops.{name}"]
        found |= {f"torch:ops.{name}.{each}": getattr(packet, each) for each in packet.overloads()}
    for module in (torch, torch.nn.functional, torch.nn.attention, torch.backends.cuda):
        for key, value in vars(module).items():
            if isinstance(value, type) and type(value) is not type and not key.startswith("_"):
                found[f"{module.__name__}:{key}"] = value
    return {name: value for name, value in found.items() if not re.search(r"\b_|\bnode\b|\bDistributed", name)}


def found_there(objects: dict[str, Any]) -> list[str]:
    """The names under which the node has other objects."""
    return [name for name, value in objects.items() if pkgutil.resolve_name(name) is not value]


def test_they_arrive_as_what_the_node_has_under_their_names(nodes: None) -> None:
    found = objects()
    assert {"torch.ops", "torch.classes", "torch.backends.cudnn", "torch:ops.aten.add.Tensor"} <= found.keys()
    assert "torch.nn.attention:SDPBackend" in found
    assert len(found) > 40
    assert dt.run(found_there, found) == []


def test_functions_name_them(nodes: None) -> None:
    """By an attribute of torch's, which cloudpickle takes for a module that the function needs."""
    odd = [name for name in objects() if re.fullmatch(r"torch(\.\w+)+", name)]
    functions = [eval(f"lambda: {name}.__name__", {"torch": torch}) for name in odd]
    assert dt.run(lambda all: [each() for each in all], functions) == [each() for each in functions]
    x, relu, aten = torch.tensor([-1.0, 2.0]), torch.ops.aten.relu.default, torch.ops.aten
    assert dt.run(lambda x: torch.ops.aten.relu(x), x.to("node:0")).tolist() == [0.0, 2.0]
    assert dt.run(lambda x: relu(x) + aten.neg(x), x.to("node:0")).tolist() == [1.0, 0.0]

    def attention() -> bool:
        from torch.nn.attention import sdpa_kernel

        with sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.backends.cuda.flash_sdp_enabled()

    assert not dt.run(attention)


def test_what_a_node_lacks_is_an_error(nodes: None) -> None:
    library = torch.library.Library("disttensor_by_name", "DEF")
    library.define("only_here(Tensor x) -> Tensor")
    op = torch.ops.disttensor_by_name.only_here
    with pytest.raises(AttributeError, match="only_here"):
        dt.run(lambda x: op(x), torch.ones(1))
