"""Proxies of a session that was shut down, beside those of the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from equal import same

import disttensor as dt

USES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "alone": lambda old, new: old + 1,
    "beside a new one": lambda old, new: new + old,
    "before a new one": lambda old, new: torch.cat([old, new]),
    "fetch": lambda old, new: old.cpu(),
    "view": lambda old, new: old[0].item(),
    "to its node": lambda old, new: old.to("node:0", copy=True),
    "to the other node": lambda old, new: old.to("node:1"),
    "to a device of its node": lambda old, new: old.to(dt.device(0, "cuda:1")),
    "copy from it": lambda old, new: new.copy_(old),
    "copy into it": lambda old, new: old.copy_(new),
    "upload into it": lambda old, new: old.copy_(torch.ones(4)),
    "assign": lambda old, new: new.__setitem__(slice(2), old[:2]),
    "argument": lambda old, new: dt.run(torch.sum, old, node=0),
    "argument on the other node": lambda old, new: dt.run(torch.sum, old, node=1),
    "closure": lambda old, new: dt.run(lambda: old + 1, node=0),
}


@pytest.fixture(scope="module")
def tensors() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One of an ended session, one of the session that is."""
    with dt.init_master_worker(nodes=2, launcher="inproc", simulate_cuda=2):
        old = torch.zeros(4, device="node:0")
        old.add_(1)
    with dt.init_master_worker(nodes=2, launcher="inproc", simulate_cuda=2):
        new = torch.zeros(4, device="node:0")
        new.add_(2)
        yield old, new


@pytest.mark.parametrize("name", USES)
def test_a_stale_proxy_says_so(tensors: tuple[torch.Tensor, torch.Tensor], name: str) -> None:
    old, new = tensors
    with pytest.raises(dt.DisttensorError, match="shut down"):
        USES[name](old, new)
    dt.synchronize()  # nothing has failed on a node
    same(new, torch.full((4,), 2.0))
