"""Defects that a review found, each kept from coming back."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("nodes")


def test_a_sparse_tensor_is_refused_and_nobody_waits() -> None:
    x = torch.eye(3, device="node:1")
    with pytest.raises(NotImplementedError, match="sparse"):
        x.to_sparse().cpu()
    assert (x + 1).sum().item() == 12


def test_a_local_tensor_is_not_written_in_vain() -> None:
    local = torch.tensor(0.0)
    with pytest.raises(RuntimeError, match="cpu"):
        local += torch.ones((), device="node:1")


def test_numbers_that_do_not_fit() -> None:
    x = torch.ones(2, device="node:1")
    assert (x + 1).sum().item() == 4
    with pytest.raises((OverflowError, RuntimeError)):
        x + 2**70
    assert (x + 2).sum().item() == 6
