"""Proxies of a session that was shut down, beside those of the next one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from equal import same
from torch.nn import functional as F

import disttensor as dt
from disttensor.session import current

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
#: What works without the nodes, or fills tables of its own before it fails.
LOOKS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "views": lambda old, new: old.view(2, 2).t()[0],
    "metadata": lambda old, new: (old.shape, repr(old)),
    "split": lambda old, new: torch.split(old, 2),
    "in place": lambda old, new: old.mul_(3),
    "linear": lambda old, new: F.linear(old[None], old[None]),
    "linear of both": lambda old, new: F.linear(new[None], old[None]),
    "attention": lambda old, new: F.scaled_dot_product_attention(*[old.view(1, 1, 2, 2)] * 3),
    "attention of both": lambda old, new: F.scaled_dot_product_attention(
        *[t.view(1, 1, 2, 2) for t in (new, old, new)]
    ),
}


@pytest.fixture
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


@pytest.mark.parametrize("name", USES | LOOKS)
def test_a_stale_proxy_keeps_its_session_no_longer_than_itself(name: str) -> None:
    with dt.init_master_worker(nodes=2, launcher="inproc", simulate_cuda=2):
        old = torch.zeros(4, device="node:0")
        old.add_(1)
        ended = weakref.ref(current.session())
    with dt.init_master_worker(nodes=2, launcher="inproc", simulate_cuda=2):
        new = torch.zeros(4, device="node:0")
        for _ in range(2):  # the second one finds what the first one has put into tables
            try:
                (USES | LOOKS)[name](old, new)
            except dt.DisttensorError:
                assert name != "metadata"
        gc.collect()
        assert ended() is not None  # the proxy has it
        del old
        gc.collect()
        assert ended() is None, gc.get_referrers(ended())  # it had one by chance once, and what that was is not known


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_compiled_keeps_no_session() -> None:
    """Dynamo keeps it for good, in the globals of the module; the next session records anew."""
    compiled = torch.compile(lambda x: x + 1)
    for _ in range(2):
        with dt.init_master_worker(nodes=1, launcher="inproc"):
            for _ in range(3):
                assert compiled(torch.zeros(2, device="node:0")).tolist() == [1.0, 1.0]
            ended = weakref.ref(current.session())
        gc.collect()
        assert ended() is None, gc.get_referrers(ended())
