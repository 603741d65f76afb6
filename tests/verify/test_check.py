"""``dt.verify.check``: what it says of modules, held against what happens on a node."""

from __future__ import annotations

import re
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from checkout import ROOT
from mesh_kit import connected
from printed import as_shown
from torch.testing._internal.common_modules import module_db

import disttensor as dt


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(1):
        yield


#: Every eighth of torch's own modules, by a hash of its name.
SOME = [info for info in module_db if zlib.crc32(info.name.encode()) % 8 == 1]


@pytest.mark.row("S13")
@pytest.mark.parametrize("info", SOME, ids=lambda info: info.name)
def test_of_torchs_modules_it_says_what_happens_on_a_node(info: Any) -> None:
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=False)
    for sample in inputs[:1]:
        if sample.forward_input is None:
            continue
        made, called = sample.constructor_input, sample.forward_input
        module = info.module_cls(*made.args, **made.kwargs)
        report = dt.verify.check(module, *called.args, **called.kwargs)
        there = torch.utils._pytree.tree_map(
            lambda v: v.to("node:0") if isinstance(v, torch.Tensor) else v, (called.args, called.kwargs)
        )
        try:
            module.to("node:0")(*there[0], **there[1])
            dt.synchronize()
            runs = True
        except (RuntimeError, TypeError, NotImplementedError):
            runs = False
        assert report.ok == runs, report


class Bad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.loose = torch.ones(4)


class Branches(Bad):
    def forward(self, x):
        y = self.inner(x)
        if y.sum() > 0:
            y = y * 2
        return y


class Items(Bad):
    def forward(self, x):
        return self.inner(x) * x.max().item() + x.min().item()


class Chooses(Bad):
    def forward(self, x):
        return self.inner(x)[x.sum(1) > 0].sum()


class Lists(Bad):
    def forward(self, x):
        return self.inner(x), x[0].tolist()


class Comes(Bad):
    def forward(self, x):
        return self.inner(x), x.cpu().numpy().sum()


class Loose(Bad):
    def forward(self, x):
        return self.inner(x) + self.loose


class Makes(Bad):
    def forward(self, x):
        return self.inner(x) * torch.arange(4.0)


class Numpy(Bad):
    def forward(self, x):
        return self.inner(x) + float(x.numpy().sum())


class Sparse(Bad):
    def forward(self, x):
        return torch.mm(x.to_sparse(), self.inner.weight)


class Hooked(Bad):
    def __init__(self) -> None:
        super().__init__()
        self.inner.register_forward_hook(lambda module, args, out: out * float(out.detach().numpy().mean()))

    def forward(self, x):
        return self.inner(x)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * float(grad.numpy().mean())


class InBackward(Bad):
    def forward(self, x):
        return _Backward.apply(self.inner(x))


BAD = [
    (Branches, "waits", "a tensor's value", "y.sum() > 0", 1),
    (Items, "waits", "a tensor's value", "x.max().item()", 2),
    (Chooses, "waits", "a shape that depends on the data", "x.sum(1) > 0", 1),
    (Lists, "waits", "a copy to the script", "tolist", 1),
    (Comes, "waits", "a copy to the script", "x.cpu()", 1),
    (Loose, "fails", r"a local tensor ((4,) torch.float32)", "self.loose", 1),
    (Makes, "fails", r"a local tensor ((4,) torch.float32)", "torch.arange", 1),
    (Numpy, "fails", "TypeError", "x.numpy()", 1),
    (Sparse, "fails", "layout torch.sparse_coo", "to_sparse", 1),
    (Hooked, "fails", "numpy", "out.detach().numpy()", 1),
    (InBackward, "fails", "TypeError", "grad.numpy()", 1),
]
LINES = Path(__file__).read_text().splitlines()


@pytest.mark.row("S13")
@pytest.mark.parametrize(("bad", "kind", "what", "line", "times"), BAD, ids=lambda v: getattr(v, "__name__", None))
def test_what_is_bad_is_found_at_its_line(bad: type[nn.Module], kind: str, what: str, line: str, times: int) -> None:
    report = dt.verify.check(bad(), torch.ones(2, 4))
    found = [each for each in report.findings if each.kind == kind]
    assert found, report
    assert what in found[0].what
    assert found[0].times == times
    at = int(found[0].line.partition("test_check.py:")[2].split()[0])
    assert line in LINES[at - 1], report
    assert found[0].line in str(report)
    assert report.ok == (kind != "fails")
    module = bad().to("node:0")
    try:
        out = module(torch.ones(2, 4, device="node:0"))
        out = out[0] if isinstance(out, tuple) else out
        out.sum().backward()
        dt.synchronize()
        runs = True
    except Exception:
        runs = False
    assert runs == report.ok


@pytest.mark.row("S13")
@pytest.mark.parametrize("training", [True, False])
def test_what_is_good_has_no_findings(training: bool) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(8 * 36, 5)
    ).train(training)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    report = dt.verify.check(model, torch.ones(4, 3, 8, 8))
    assert report.ok, report
    assert not report.of("waits"), report
    assert report.operators >= 6
    assert report.parameters == sum(v.nbytes for v in before.values())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), "the module is as it was"
    assert model[0].weight.grad is None
    assert dt.verify.check(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.ones(2, 3, 8)).ok


@pytest.mark.row("S13")
def test_more_parameters_than_memory() -> None:
    model = nn.Linear(1000, 1000, device="meta")
    report = dt.verify.check(model, torch.ones(1, 1000), memory=1 << 20)
    assert not report.ok
    assert "4,004,000 bytes of parameters; a node has 1,048,576" in str(report)
    assert dt.verify.check(model, torch.ones(1, 1000), memory=1 << 23).ok
    assert not dt.verify.check(nn.Linear(1 << 22, 1 << 22, device="meta"), torch.ones(1, 1 << 22, device="meta")).ok


LIBRARY = torch.library.Library("dtchecked", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: x * 2, "CPU")
LIBRARY.impl("twice", lambda x: torch.empty_like(x), "Meta")


def test_a_library_operator_is_named() -> None:
    report = dt.verify.check(lambda x: torch.ops.dtchecked.twice(x), torch.ones(3))
    assert not report.ok
    assert "dtchecked::twice" in report.findings[0].what
    assert "allow_ops=['dtchecked::*']" in report.findings[0].do


def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "CHECKING.md").read_text()
    program, shown = re.search(r"```python\n(.*?)```\s*prints\n\n((?: {4}[^\n]*\n)+)", page, re.DOTALL).groups()  # type: ignore[union-attr]
    exec(program, {"__name__": "page"})
    shown = textwrap.dedent(shown)
    assert as_shown(capsys.readouterr().out, shown) == shown


def test_mistakes_of_the_call_are_findings() -> None:
    report = dt.verify.check(nn.Linear(3, 4), torch.ones(2, 5))
    assert not report.ok
    assert "RuntimeError" in report.findings[0].what
