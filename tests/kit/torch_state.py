"""What torch keeps for a process: a test that leaves something of it changed breaks those that run after it.

The test that does so fails by name, and what it changed is put back, so that the others say what they find themselves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from disttensor.runtime.process import torch_switches


def now() -> dict[str, Any]:
    """The switches of this process's torch, the default dtype, and the modes of this thread."""
    return {
        **torch_switches.present(),
        "default_dtype": torch.get_default_dtype(),
        "grad_enabled": torch.is_grad_enabled(),
        "inference_mode": torch.is_inference_mode_enabled(),
    }


def check(before: dict[str, Any], name: str) -> None:
    """Fails where something is not as it was ``before``, and puts it back."""
    after = now()
    other = {key: value for key, value in before.items() if key in after and after[key] != value}
    if not other:
        return
    torch.set_default_dtype(before["default_dtype"])
    torch.set_grad_enabled(before["grad_enabled"])
    torch_switches.put((key, value) for key, value in other.items() if key in torch_switches.SWITCHES)
    left = ", ".join(f"{key}: {after[key]} in place of {value}" for key, value in other.items())
    pytest.fail(f"{name} leaves torch changed: {left}", pytrace=False)
