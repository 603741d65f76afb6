"""The module ``torch.node`` before anything has used it: functions that go to nodes may take it along."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import cloudpickle
import pytest
import torch

import disttensor  # noqa: F401 - names torch.node
from disttensor.torch_backend import device_module, naming


def double_of(place: Any) -> Any:
    return torch.add(place.node, place.node)


@pytest.fixture
def unused(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``torch.node`` as an import of disttensor leaves it."""
    module = naming._Later("torch.node")
    monkeypatch.setitem(sys.modules, "torch.node", module)
    monkeypatch.setattr(torch, "node", module)
    return module


@pytest.mark.usefixtures("unused")
def test_a_function_with_an_attribute_node_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """cloudpickle takes along those modules of a package whose names occur in the function."""
    monkeypatch.setattr(double_of, "__module__", "__main__")  # by value, as the functions of a script
    sent = pickle.loads(cloudpickle.dumps(double_of))
    assert sent(type("Place", (), {"node": 3})).item() == 6


def test_it_stands_for_the_module_there_too(unused: Any) -> None:
    there = pickle.loads(cloudpickle.dumps(unused))
    assert type(there) is naming._Later
    assert there.device_count is device_module.device_count
