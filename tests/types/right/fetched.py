"""Tensors on their way to the script, and writes into tensors on nodes."""

from __future__ import annotations

from typing import assert_type

import torch

import disttensor as dt
from disttensor.futures import Work


def main() -> None:
    x = torch.arange(4.0, device="node:1")
    work = dt.fetch(x)
    assert_type(work, Work[torch.Tensor])
    assert_type(work.result(), torch.Tensor)
    both = [dt.fetch(x), dt.fetch(x + 1)]
    for done in dt.futures.as_completed(both, timeout=60):
        assert_type(done.result(), torch.Tensor)
    assert_type(dt.views.put(x[:2], torch.ones(2), async_op=True).result(), torch.Tensor)
    dt.views.accumulate(x[2:], torch.ones(2), "max")
    assert_type(dt.views.get(x[:2]), torch.Tensor)
