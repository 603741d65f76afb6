"""The names of torch.cuda: torch.node has each, or a reason why not, which it tells."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

import disttensor  # noqa: F401 - names torch.node
from disttensor.torch_backend.cuda_names import MISSING

node: Any = torch.node  # type: ignore[attr-defined]


def names() -> list[str]:
    """What torch.cuda itself has: not its submodules, and not what it has imported from elsewhere."""
    found = []
    for name in dir(torch.cuda):
        value = getattr(torch.cuda, name)
        imported = not getattr(value, "__module__", "torch").startswith("torch")
        if not name.startswith("_") and not inspect.ismodule(value) and not imported:
            found.append(name)
    return found


#: What it has imported and what has no module by which that could be told.
IMPORTED = {"Any", "Device", "Optional", "TYPE_CHECKING", "classproperty", "traceback"}


@pytest.mark.row("S4")
def test_each_name_is_there_or_has_a_reason() -> None:
    without = [name for name in names() if not hasattr(node, name) and name not in MISSING and name not in IMPORTED]
    assert without == []


def test_no_reason_is_for_what_is_there() -> None:
    assert [name for name in MISSING if hasattr(node, name)] == []


@pytest.mark.row("S4")
@pytest.mark.parametrize("name", MISSING)
def test_the_reason_is_told(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'torch.node' has no attribute '{name}': ") as told:
        getattr(node, name)
    assert MISSING[name] in str(told.value)
    for written in re.findall(r"torch\.node\.(\w+)", MISSING[name]):
        assert hasattr(node, written), written


@pytest.mark.row("S4")
def test_signatures_take_what_torch_cuda_takes() -> None:
    """Functions of both have torch.cuda's parameters, with defaults where it has some."""
    for name in names():
        ours = getattr(node, name, None)
        theirs = getattr(torch.cuda, name)
        if not inspect.isfunction(ours) or not inspect.isfunction(theirs):
            continue
        given, wanted = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
        assert set(wanted) <= set(given), name
        for like in wanted.values():
            assert like.default is like.empty or given[like.name].default is not like.empty, f"{name}: {like}"
