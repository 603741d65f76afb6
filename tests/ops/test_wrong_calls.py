"""Wrong calls that local torch refuses without a look at the data: refused at their line, their operands unharmed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal import same

import disttensor as dt
from disttensor import testing

NODE = "node:0"

pytestmark = pytest.mark.usefixtures("clean")


class Operands:
    """Tensors of a device."""

    def __init__(self, device: str) -> None:
        self.x = torch.arange(12.0).view(3, 4).to(device)
        self.y = torch.arange(6.0).to(device)
        self.z = torch.ones(3, dtype=torch.complex64).to(device)
        self.i = torch.arange(3, dtype=torch.int32).to(device)
        self.k = torch.ones(3, 4, dtype=torch.uint8).to(device)
        self.at = torch.tensor([0, 1]).to(device)
        self.wide = torch.ones(300, 700).to(device)


CALLS: dict[str, Callable[[Operands], Any]] = {
    "and": lambda o: o.x & o.x,
    "and, large": lambda o: o.wide & o.wide,
    "and, in place": lambda o: o.x.__iand__(o.x),
    "greater": lambda o: o.z > o.z,
    "labels": lambda o: F.cross_entropy(o.x, o.i),
    "complex": lambda o: torch.complex(o.x, o.x.double()),
    "mask": lambda o: o.x.masked_scatter_(o.i.view(3, 1), o.x),
    "fill": lambda o: o.x.uniform_(3, -1),
    "fill, after a right one": lambda o: (o.x.clone().normal_(0, 1), o.x.normal_(0, -1)),
    "bernoulli": lambda o: o.x.bernoulli_(1.5),
    "write of too many": lambda o: o.y.__setitem__([0, 1], o.x[0, :3]),
    "write of too many, by a tensor": lambda o: o.y.index_put_((o.at,), o.x[0, :3]),
    "shape in place": lambda o: o.x.add_(o.y),
    "dtype in place": lambda o: o.i.add_(1.5),
    "shifted copy": lambda o: o.y[1:].copy_(o.y[:-1]),
    "shifted sum": lambda o: o.y[1:].add_(o.y[:-1]),
    "shifted copy, large": lambda o: o.wide.view(-1)[1:].copy_(o.wide.view(-1)[:-1]),
    "a part of itself": lambda o: o.y.mul_(o.y[2]),
    "itself by an index": lambda o: o.y.index_add_(0, o.y.long(), o.y),
    "shifted out": lambda o: torch.exp(o.y[:-1], out=o.y[1:]),
    "list": lambda o: torch._foreach_add_([o.i], [o.z]),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_refused_at_its_line_and_harms_nothing(name: str) -> None:
    here, there = Operands("cpu"), Operands(NODE)
    with pytest.raises((RuntimeError, NotImplementedError)) as expected:
        CALLS[name](here)
    first, *_ = str(expected.value).split(" [")[0].split(", but found")
    for _ in range(2):  # the second one has whatever the first one has left in tables
        with pytest.raises(type(expected.value), match=re.escape(first)):
            CALLS[name](there)
    dt.synchronize()  # nothing is left to tell
    same(list(vars(there).values()), list(vars(here).values()))


RIGHT: dict[str, Callable[[Operands], Any]] = {
    "halves": lambda o: o.y[:3].copy_(o.y[3:]),
    "columns": lambda o: o.x[:, 0].add_(o.x[:, 1]),
    "itself": lambda o: o.y.add_(o.y),
    "a copy of itself": lambda o: o.y[1:].copy_(o.y[1:]),
    "another's part": lambda o: o.y[1:].copy_(o.x.view(-1)[:5]),
    "a division": lambda o: o.at // torch.ones_like(o.at),
    "bits": lambda o: (o.x > 3) << o.at[0],
    "power": lambda o: (o.x > 3) ** True,
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_done(name: str) -> None:
    here, there = Operands("cpu"), Operands(NODE)
    for _ in range(2):
        same(RIGHT[name](there), RIGHT[name](here))
    same(list(vars(there).values()), list(vars(here).values()))


def test_what_only_the_data_decide_is_told_later() -> None:
    x = torch.zeros(3, device=NODE)
    x.index_fill_(0, torch.tensor([5], device=NODE), 1.0)
    with pytest.raises(IndexError, match="out of"):
        dt.synchronize()
    with pytest.raises(IndexError):
        x.sum().item()


def questions(call: Callable[[], Any]) -> int:
    with testing.MessageLog() as log:
        call()
    return sum(name.startswith("Ask") for name in log.commands)


def test_a_right_call_asks_nothing() -> None:
    """A trial's zeros, and sizes that do not go together in it, are no reason to wait."""
    i = torch.ones(4, dtype=torch.int64, device=NODE)
    wide = torch.ones(1, 4, 60, 60, device=NODE)
    assert questions(lambda: (i // i, i % i, F.pixel_shuffle(wide, 2), F.avg_pool2d(wide, 7), wide.flatten() + 1)) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_an_asked_call_should_have_written_stays(stream: bool) -> None:
    """With streams as without: only an error that comes later leaves nothing to compute with."""
    o = Operands(NODE)
    with dt.stream(dt.Stream(0) if stream else None):
        with pytest.raises(NotImplementedError, match="not implemented"):
            o.x.__ior__(o.x)
        o.x += 1
    assert o.x.sum().item() == 78
