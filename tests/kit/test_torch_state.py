"""The guard against tests that leave torch changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_state


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: torch.set_default_dtype(torch.float64), "default_dtype: torch.float64 in place of torch.float32"),
        (lambda: torch.set_grad_enabled(False), "grad_enabled: False in place of True"),
        (lambda: torch.backends.cuda.enable_flash_sdp(False), "sdp_use_flash: False in place of True"),
    ],
    ids=["dtype", "mode", "switch"],
)
def test_what_is_left_is_told_and_put_back(change: Callable[[], None], said: str) -> None:
    before = torch_state.now()
    change()
    with pytest.raises(pytest.fail.Exception, match=f"this test leaves torch changed: {said}$"):
        torch_state.check(before, "this test")
    assert torch_state.now() == before
    torch_state.check(before, "this test")
