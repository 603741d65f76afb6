"""The names of torch.cuda: torch.node has each, or a reason why not, which it tells."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from sources import refuse

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
    refuse(without, "torch.node has a name of torch.cuda's, or a reason why not")


def test_no_reason_is_for_what_is_there() -> None:
    refuse((name for name in MISSING if hasattr(node, name)), "a reason is for what is not there")


@pytest.mark.row("S4")
def test_the_reason_is_told() -> None:
    refuse((name for name in MISSING if not tells(name)), "what torch.node lacks is told with its reason")
    named = ((name, other) for name, reason in MISSING.items() for other in re.findall(r"torch\.node\.(\w+)", reason))
    refuse((f"{name}: {other}" for name, other in named if not hasattr(node, other)), "a reason names what there is")


def tells(name: str) -> bool:
    try:
        getattr(node, name)
    except AttributeError as error:
        return str(error).startswith(f"module 'torch.node' has no attribute '{name}': ") and MISSING[name] in str(error)
    return False


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
