"""The first operation of a program that gives NaN or infinity, found by local torch alone: imports only torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FiniteTwin(TorchDispatchMode):
    """Notes the first operation of a ``with`` block whose result is not finite: its name, the shape of the result, and
    how many NaN and infinities that has."""

    def __init__(self, infinities: bool = True) -> None:
        super().__init__()
        self.first: tuple[str, tuple[int, ...], int, int] | None = None
        self._infinities = infinities

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
                wrong = ~torch.isfinite(tensor) if self._infinities else torch.isnan(tensor)
                if self.first is None and wrong.any():
                    nan, inf = int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())
                    self.first = func.name(), tuple(tensor.shape), nan, inf
        return result
