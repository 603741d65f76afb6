"""The groups of parameters that ``fully_shard`` makes, without nodes: the other of two ranks has the same parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from disttensor.training.groups import Group, Part, group_of_part

#: The shape of the part that a rank has.
ROWS, COLUMNS = 3, 2


def made() -> tuple[Group, nn.Module]:
    """A group of one module, and that."""
    module = nn.Linear(COLUMNS, ROWS)
    cut: Any = SimpleNamespace(size=2 * ROWS, place=None, padding=None)
    parts = [Part(name, [(module, name)], p, cut) for name, p in module.named_parameters()]
    mesh: Any = SimpleNamespace(size=lambda over: 2)
    return Group(parts, mesh, "dp", (), None), module


def test_parameters_that_were_replaced_are_of_no_group() -> None:
    """Another parameter that gets the id of one would be taken for a part, and not be cut."""
    group, module = made()
    before = list(module.parameters())
    module.weight = nn.Parameter(torch.ones(ROWS, COLUMNS))
    group.adopt()
    assert [id(p) in group_of_part for p in (*module.parameters(), *before)] == [True, True, False, True]
