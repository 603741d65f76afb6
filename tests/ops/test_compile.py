"""``torch.compile`` of functions and models on nodes, by backends that run operators one by one, and by ours."""

from __future__ import annotations

import copy
import gc
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from differential import batch, leaves, net
from equal import same
from homes import HERE, Home
from telling import said
from torch.utils._pytree import tree_leaves
from variants import variants

import disttensor as dt
from disttensor import testing

pytestmark = [
    pytest.mark.usefixtures("clean", "compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # dynamo looks, with local tensors as well
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python"),  # what dynamo says of 3.13.0
]
NOT_ON_A_MESH = {"test_graph_breaks": "it asks for the one value of a sum that differs"}
backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture
def compiler() -> Iterator[None]:
    """Forgets what other tests compiled."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@backends
def test_training(backend: str, home: Home) -> None:
    results = []
    for where in (home, HERE):
        model, (x, y) = where.differ(net().to(where.device)), where.send(batch())
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for _ in range(4):
            opt.zero_grad()
            loss = F.cross_entropy(compiled(x), y)
            loss.backward()
            opt.step()
            losses.append(loss.detach())
        model.eval()
        results.append((losses, [p.detach() for p in model.parameters()], compiled(x).detach()))
    home.same(*results)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(x).square().sum()
    loss.backward()
    optimizer.step()
    return loss


OPTIMIZERS = [
    ("Adam", None), ("AdamW", False), ("RMSprop", None), ("NAdam", None), ("RAdam", False), ("ASGD", None),
    ("Adamax", None), ("Adadelta", None), ("Adagrad", True), ("Rprop", None), ("Adafactor", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "foreach"), variants(OPTIMIZERS))
def test_steps_of_optimizers(name: str, foreach: bool | None) -> None:
    """A whole training step, backward and the optimizer's in it, to the bits of the same one compiled locally. Nodes
    take all parameters at once where it is not said otherwise, as torch does for CUDA; Adafactor does so nowhere."""
    results = []
    kind = getattr(torch.optim, name)
    at_once = foreach is not False and hasattr(sys.modules[kind.__module__], "_default_to_fused_or_foreach")
    for device, choice in (("node:1", foreach), ("cpu", at_once)):
        torch.compiler.reset()
        torch.manual_seed(0)
        model, x = torch.nn.Linear(3, 2).to(device), torch.arange(12.0).view(4, 3).to(device)
        optimizer = kind(model.parameters(), lr=0.1, foreach=choice)
        compiled = torch.compile(partial(_step, model, optimizer), backend="eager")
        results.append(([compiled(x).detach() for _ in range(3)], [p.detach() for p in model.parameters()]))
    same(*results)


@backends
def test_functions(backend: str, home: Home) -> None:
    """In whole graphs: views and writes, factories, numbers, several outputs, a tensor of another dtype and shape."""

    def f(a: torch.Tensor, b: torch.Tensor, k: float) -> Any:
        c = a.clone()
        c[0] = 0
        c.t()[1].mul_(k)
        d = torch.arange(a.shape[1], device=a.device) + torch.zeros(a.shape[1], device=a.device)
        return c + d, (b @ c.t()).softmax(-1), a.to(torch.float64).sum(), {"b": b.view(-1)[2:5]}

    results = []
    for where in (home, HERE):
        compiled = torch.compile(f, backend=backend, fullgraph=True)
        x, w = where.send(leaves())
        x, w = x.detach(), w.detach()
        results.append([compiled(x, w, 2.0), compiled(x[:3], w[:2], 3.0), compiled(x[:2], w[:3], 4.0)])
    home.same(*results, strides=False)


LITERALS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda a: a + torch.tensor([1.0, 2.0, 3.0], device=a.device),
    "number": lambda a: a * torch.tensor(3.0, device=a.device) + torch.tensor(2.0),
    "empty": lambda a: torch.cat([torch.tensor([], device=a.device), a]),
    "as_tensor": lambda a: a + torch.as_tensor([1, 2, 3], device=a.device) + torch.tensor([4, 5, 6]).to(a.device),
    "new_tensor": lambda a: a + a.new_tensor([1.0, 2.0, 3.0]),
    "index": lambda a: a[torch.tensor([2, 0], device=a.device)] + a[[1, 2]],
    "written": lambda a: torch.tensor([1.0, 2.0, 3.0], device=a.device).add_(1) * a,
    "given back": lambda a: (a, torch.tensor([1.0, 2.0], device=a.device)),
    "item": lambda a: a * torch.tensor(2.0, device=a.device).item(),
}


if torch.__version__ < (2, 13):
    del LITERALS["new_tensor"]  # docs/COMPATIBILITY.md


@backends
@pytest.mark.parametrize("name", LITERALS)
def test_literals(backend: str, name: str, home: Home) -> None:
    """Made anew by each call, where they are named."""
    results = []
    for where in (home, HERE):
        compiled = torch.compile(LITERALS[name], backend=backend)
        x = where.send(torch.tensor([1.0, 2.0, 3.0]).requires_grad_())
        y = compiled(x)
        for t in tree_leaves(y):
            t.detach().mul_(2)  # what is written is no constant of the compiled function's
        z = compiled(x)
        sum(t.sum() for t in tree_leaves(z)).backward()
        results.append((y, z, x.grad))
    home.same(*results)


@backends
def test_graph_breaks(backend: str, home: Home) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        a = a * 2
        if a.sum().item() > 0:  # the compiler gives up here, and goes on behind it
            a = a.sin()
        return a[a > 0].sum() + len(a)

    results = []
    for where in (home, HERE):
        x, _ = where.send(leaves())
        y = torch.compile(f, backend=backend)(x)
        y.backward()
        results.append((y, x.grad))
    home.same(*results)


@backends
def test_writes_reach_the_callers_tensors(backend: str, home: Home) -> None:
    results = []
    for where in (home, HERE):
        x, w = (t.detach() for t in where.send(leaves()))
        compiled = torch.compile(lambda a, b: a.add_(b).t().mul_(2), backend=backend, fullgraph=True)
        view = compiled(x, w)
        view.add_(1)
        results.append((x, view))
    home.same(*results)


@backends
def test_autocast(backend: str, home: Home) -> None:
    results = []
    for where, kind in zip((home, HERE), ("node", "cpu"), strict=True):
        model, (x, _) = where.differ(net().to(where.device).eval()), where.send(batch())
        with torch.autocast(kind, dtype=torch.bfloat16):
            y = torch.compile(model, backend=backend, fullgraph=True)(x)
        y.float().sum().backward()
        results.append((y, model.head.weight.grad))
    home.same(*results)


@backends
def test_two_nodes(backend: str) -> None:
    x, w = (t.detach() for t in leaves())
    compiled = torch.compile(lambda a, b: (a * 2).to(b.device) + b, backend=backend)
    y = compiled(x.to("node:0"), w.to("node:1"))
    assert y.get_node() == 1
    same(y, x * 2 + w)
    z = compiled(x.to("node:1"), w.to("node:0"))  # other places are another graph
    assert z.get_node() == 0
    same(z, x * 2 + w)


@backends
def test_what_only_proxies_have(backend: str) -> None:
    x = torch.ones(3, device="node:1")
    assert torch.compile(lambda a: (a + 1) * a.get_node(), backend=backend)(x).tolist() == [2.0, 2.0, 2.0]
    assert torch.compile(lambda a: a + (a.device.index or 0) + a.numel(), backend=backend)(x).tolist() == [5.0] * 3


class Block(torch.nn.Module):
    """A layer of a transformer, over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.qkv = torch.nn.Linear(8, 24)
        self.out = torch.nn.Linear(8, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return self.out(F.dropout(x + y, 0.25, self.training)).mean(1)


def block() -> Block:
    torch.default_generator.manual_seed(5)
    return Block()


class Cells(torch.nn.Module):
    """Recurrent cells, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = torch.nn.LSTMCell(5, 4), torch.nn.GRUCell(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(len(x), 4, device=x.device)
        for _ in range(2):
            h, c = self.lstm(x, (h, c))
            h = self.gru(h, c)
        return h


def cells() -> Cells:
    torch.default_generator.manual_seed(5)
    return Cells()


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, torch.Tensor, torch.Tensor]]] = {
    "network": lambda: (net(), *batch()),
    "cells": lambda: (cells(), torch.linspace(-1, 1, 30).view(6, 5), torch.arange(6) % 4),
    "transformer": lambda: (block().eval(), torch.arange(24).view(4, 6) % 7, torch.arange(4)),
}


def _commands(log: testing.MessageLog, home: Home) -> list[list[str]]:
    """Returns what each of a home's nodes was sent, except frees."""
    return [[name for name in log[node].commands if name != "Free"] for node in home.nodes or (0,)]


@pytest.mark.parametrize("name", MODELS)
def test_by_default_a_step_is_one_command_each_way(name: str, home: Home) -> None:
    """To the bits of the same step compiled locally, of which AOT makes the same operators."""
    results = []
    for where, backend in zip((home, HERE), ("inductor", "aot_eager"), strict=True):
        made, x, y = MODELS[name]()
        model, (x, y) = where.differ(made.to(where.device)), where.send((x, y))
        compiled = torch.compile(
            lambda x, y, model=model: F.cross_entropy(model(x), y), backend=backend, fullgraph=True
        )
        losses = []
        for i in range(4):
            with testing.MessageLog() as forward:
                losses.append(compiled(x, y))
            with testing.MessageLog() as backward:
                losses[-1].backward()
            if i > 1 and where is home:
                assert {tuple(names) for names in _commands(forward, home)} == {("Replay",)}
                assert {tuple(names)[-1] for names in _commands(backward, home)} == {"Replay"}
                assert max(map(len, _commands(backward, home))) <= 2  # with that which makes the first gradient
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
        results.append(([loss.detach() for loss in losses], [t.detach() for t in model.state_dict().values()]))
    home.same(*results)


def test_random_numbers_and_modes_of_what_is_compiled() -> None:
    """Each call draws other ones, those that local torch draws; eval(), no_grad and autocast are other graphs."""
    results = []
    for device, backend in (("node:0", "inductor"), ("cpu", "aot_eager")):
        torch.compiler.reset()
        model, x = block().to(device), (torch.arange(24).view(4, 6) % 7).to(device)
        compiled = torch.compile(model, backend=backend)
        torch.manual_seed(3)
        found = [compiled(x).detach() for _ in range(4)]
        assert not torch.equal(found[2].cpu(), found[3].cpu())
        model.eval()
        found += [compiled(x).detach() for _ in range(3)]
        with torch.no_grad():
            found += [compiled(x) for _ in range(3)]
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            found += [compiled(x).detach() for _ in range(3)]
        results.append(found)
    same(*results)


def test_shapes_that_change(home: Home) -> None:
    results = []
    for where, backend in zip((home, HERE), ("inductor", "aot_eager"), strict=True):
        model, x = where.differ(block().to(where.device).eval()), where.send(torch.arange(36).view(6, 6) % 7)
        compiled = torch.compile(model, backend=backend, dynamic=True)
        found = []
        for n in (4, 6, 3) * 3:
            y = compiled(x[:n, : n - 1])
            y.square().sum().backward()
            found.append(y.detach())
        results.append((found, [p.grad for p in model.parameters()]))
    home.same(*results)


def _broken(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a = a * 2
    torch._dynamo.graph_break()
    return a.sin() + b


PROGRAMS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "writes": lambda a, b: a.add_(b).t().mul_(2),
    "views": lambda a, b: (a.clone().t()[1:], b.view(-1)[2:5], a),
    "a break": _broken,
    "a literal": lambda a, b: torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], device=a.device).add_(1) * a,
    "a literal that is given back": lambda a, b: (a + b, torch.tensor([1.0, 2.0], device=a.device)),
    "no operand": lambda a, b: torch.ones(2, 3, device=a.device) * 2,
    "sums": lambda a, b: _sums(a),
}


def _sums(a: torch.Tensor) -> list[torch.Tensor]:
    """Of which each is viewed without the dims that it goes over, or not quite."""
    row = a.sum(0, keepdim=True)
    return [
        *(row.view(a.shape[1]), row * 2, a.sum(1, keepdim=True).view(a.shape[0])),
        *(a.sum([-1, 0], keepdim=True).view(()), a.sum([], keepdim=True).reshape(())),
        *(a.sum(-1, keepdim=True).view(1, a.shape[0]), a.sum(1).view(a.shape[0], 1)),
        *(a.sum(0, keepdim=True, dtype=torch.float64).view(a.shape[1]), a.sum().sum(0, keepdim=True).view(())),
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_recorded_is_what_is_run(name: str, home: Home) -> None:
    """What callers write into the results is not in those of the next call."""
    results = []
    for where, backend in zip((home, HERE), ("inductor", "aot_eager"), strict=True):
        compiled = torch.compile(PROGRAMS[name], backend=backend)
        for _ in range(3):
            x, w = (t.detach() for t in where.send(leaves()))
            found = compiled(x, w)
            results.append((x, [t.mul_(2) for t in tree_leaves(found)]))
    home.same(results[:3], results[3:])


FALLBACKS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], str]] = {
    "a wait": (lambda a, k: a * (a.sum().cpu() + 1).to(a.device), "a copy to the master"),
    "an argument": (lambda a, k: a * torch.stack([k, k]).sum().sin().to(a.device), "an argument is a tensor"),
    "a written one": (lambda a, k: a * k.clone().add_(1).to(a.device) + k.mul_(2), "an argument is a tensor"),
    "a result": (lambda a, k: a.sum().cpu() + 1, "a result is a tensor of the script's"),
    "random numbers": (lambda a, k: a + torch.rand(3).to(a.device), "draws random numbers in the script"),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_what_cannot_be_recorded_is_said_once(name: str) -> None:
    f, reason = FALLBACKS[name]
    compiled = torch.compile(f)
    x = torch.arange(3.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in (2.0, 3.0, 4.0):
            torch.manual_seed(1)
            y = compiled(x.to("node:0"), torch.tensor(k))
            torch.manual_seed(1)
            assert torch.equal(y.cpu(), f(x, torch.tensor(k)))
    (warned,) = caught
    assert reason in str(warned.message)


def _scaled(x: torch.Tensor, k: float, n: int, c: torch.Tensor) -> Any:
    """Uses numbers as operands, among themselves, in what is saved for the backward, and as a factor's dtype says."""
    y = (x * k).sin() * (k * n + 1) / c
    return y, (x.detach() > k).long() * c


def test_numbers_that_change(home: Home) -> None:
    """A float argument is a tensor of the script's for dynamo, once it has changed, as 0-dim tensors are anyway. It
    travels as an operand's value does, and what is recorded takes it."""
    results = []
    for where, backend in zip((home, HERE), ("inductor", "aot_eager"), strict=True):
        x = where.send(torch.arange(6.0).view(2, 3).requires_grad_())
        compiled, found = torch.compile(_scaled, backend=backend, fullgraph=True), []
        for i in range(6):
            with testing.MessageLog() as forward:
                y, z = compiled(x, 0.1 + i, 3, torch.tensor(2.0 + i, dtype=torch.float64))
            with testing.MessageLog() as backward:
                (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
            found += [y.detach(), z, gradient]
            if i > 4 and where is home:
                (names,) = {tuple(names) for names in _commands(forward, home)}
                assert names == ("Call aten::scalar_tensor",) * 2 + ("Replay",)
                assert {tuple(names)[-1] for names in _commands(backward, home)} == {"Replay"}
        results.append(found)
    home.same(*results)


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * 2  # type: ignore[no-any-return]


def _data_parallel(make: Callable[[], Any], step: Callable[..., Any]) -> Any:
    mesh = dt.mesh(dp=3, device="cpu")
    return partial(step, dt.DataParallel(make().to(mesh.device), mesh), mesh)


def _fully_sharded(make: Callable[[], Any], step: Callable[..., Any]) -> Any:
    mesh = dt.mesh(dp=3, device="cpu")
    return partial(step, dt.fully_shard(make().to(mesh.device), mesh), mesh)


def _pipeline(make: Callable[[], Any], step: Callable[..., Any]) -> Any:
    return partial(step, dt.training.Pipeline([make(), make()], ["node:0", "node:1"], microbatches=2), None)


@pytest.mark.parametrize("wrapped", [_data_parallel, _fully_sharded, _pipeline])
def test_modules_that_are_trained_on_many_nodes(wrapped: Callable[..., Any]) -> None:
    """They have the bits that they have uncompiled, and use recordings."""
    torch.manual_seed(1)
    first, batches = Layers(), [(torch.randn(6, 6), torch.randn(6, 6)) for _ in range(4)]

    def step(model: Any, mesh: Any, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        if mesh is None:
            loss = model.step(x, y, F.mse_loss)
        else:
            loss = F.mse_loss(model(dt.shard(x, mesh, dp=0)), dt.shard(y, mesh, dp=0))
            loss.backward()
        for p in model.parameters():
            with torch.no_grad():
                p -= 0.1 * p.grad
            p.grad = None
        return [loss.detach()] if mesh is None else loss.detach().shards()

    found = []
    for make in (lambda: copy.deepcopy(first), lambda: torch.compile(copy.deepcopy(first))):
        train = wrapped(make, step)
        with testing.MessageLog() as log:
            found.append([loss.cpu() for x, y in batches for loss in train(x, y)])
        assert ("Replay" in log[0].commands) == (len(found) == 2)
    assert all(map(torch.equal, *found))


def test_gradients_that_are_one_tensor_and_then_two() -> None:
    x = torch.ones(3, device="node:0", requires_grad=True)
    compiled = torch.compile(lambda a: (a * 2, a * 3))
    for k in (1.0, 1.0, 10.0):
        first = torch.ones(3, device="node:0")
        second = first if k == 1 else first * k
        torch.autograd.backward(compiled(x), (first, second))
    assert x.grad.tolist() == [5.0 + 5.0 + 32.0] * 3  # type: ignore[union-attr]


def test_what_aot_refuses_runs_by_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.backends.common as common

    def refuse(*args: Any, **options: Any) -> Any:
        raise NotImplementedError("no such thing")

    monkeypatch.setattr(common, "aot_module_simplified", refuse)
    compiled = torch.compile(lambda a: a * 2)
    with pytest.warns(UserWarning, match=r"by operator \(1 of them\).* AOT autograd refuses it: no such thing"):
        assert compiled(torch.ones(2, device="node:0")).tolist() == [2.0, 2.0]
    assert compiled(torch.ones(2, device="node:0")).tolist() == [2.0, 2.0]


def test_a_failure_names_the_line_of_the_call_and_that_of_the_operator() -> None:
    def f(table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        bad = table[x]  # computed here
        return bad * 2

    lines = Path(__file__).read_text().splitlines()
    call, operator = (next(i for i, text in enumerate(lines, 1) if f"# {word} here" in text) for word in WORDS)
    compiled = torch.compile(f)
    table, x = torch.ones(3, 2, device="node:0"), torch.ones(2, dtype=torch.int64, device="node:0")
    for place, wrong in (("issued", x + 6), ("", x), ("recorded", x + 6)):
        result = compiled(table, wrong)  # called here
        if not place:
            assert result.tolist() == [[2, 2]] * 2
            continue
        with pytest.raises(IndexError) as caught:
            result.cpu()
        assert re.search(rf"{place}: .*test_compile.py:{operator} in f$", said(caught.value), re.MULTILINE)
    assert re.search(rf"replayed: .*test_compile.py:{call} in test_a_failure", said(caught.value))


WORDS = ("called", "computed")


def test_the_engine_is_an_option() -> None:
    """Another one is another graph, and one that does not exist is said where it is named."""
    x = torch.ones(3, device="node:0")

    def f(a: torch.Tensor) -> torch.Tensor:
        return a * 2

    before = {id(graph) for graph in _graphs()}
    for options in ({"engine": "cudagraph"}, {}, {"engine": "cudagraph"}):
        compiled = torch.compile(f, options=options)
        for _ in range(3):
            assert compiled(x).tolist() == [2.0] * 3
    engines = [graph.engines() for graph in _graphs() if id(graph) not in before]
    assert sorted(bool(reason) for found in engines for [(_, reason)] in found.values()) == [False, True]
    with pytest.raises(ValueError, match="engine 'fast' is not known; the engines are interpreter"):
        torch.compile(f, options={"engine": "fast"})


def _graphs() -> list[dt.Graph]:
    return [each for each in gc.get_objects() if type(each) is dt.Graph and each.id]


def test_local_functions_go_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx

    seen = []

    def compile_fx(model: Any, inputs: Any, **kwargs: Any) -> Any:
        seen.append(len(inputs))
        return model.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    assert torch.compile(lambda a: a + 1)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert seen == [1]


LOCALLY = "assert torch.compile(lambda a: a + 1, backend='eager')(torch.ones(2)).tolist() == [2, 2]"
START = "dt.init_master_worker(nodes=1)"
#: What a program has done before it compiles for a node.
BEFORE = {
    "compiled, then imported disttensor": f"import torch\n{LOCALLY}\nimport disttensor as dt\n{START}",
    "compiled, then started": f"import torch, disttensor as dt\n{LOCALLY}\n{START}",
    "started anew": f"import torch, disttensor as dt\n{START}\n{LOCALLY}\ndt.shutdown()\n{LOCALLY}\n{START}",
    "started": f"import torch, disttensor as dt\n{START}\ntorch.compiler.reset()",
}
COMPILES = """
def f(a):
    a = a * 2
    if a.sum().item() > 0:
        a = a.sin()
    return a.cos()
x = torch.ones(2)
assert torch.equal(torch.compile(f, backend="eager")(x.to("node:0")).cpu(), f(x))
assert torch.compile(lambda a: a + 1, backend="eager", fullgraph=True)(x.to("node:0")).tolist() == [2, 2]
"""


@pytest.mark.parametrize("before", BEFORE)
def test_whatever_a_program_did_before(before: str, script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = script(BEFORE[before] + COMPILES)
    assert done.returncode == 0, done.stderr


UNTOUCHED = """
import torch, disttensor as dt
from torch._dynamo.variables import builder
seen = lambda: (torch._TorchCompileInductorWrapper.__call__, builder.infer_subclass_type)
before = seen()
dt.init_master_worker(nodes=1)
model = torch.nn.Linear(2, 2).to("node:0")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(3, 2, device="node:0")).sum().backward()
optimizer.step()
print(seen() == before, dt.DistributedTensor in builder.VariableBuilder._type_dispatch())
torch.compile(model, backend="eager")
print(seen() == before, dt.DistributedTensor in builder.VariableBuilder._type_dispatch())
"""


def test_a_program_that_compiles_nothing_has_torchs_own_compiler(
    script: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = script(UNTOUCHED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False", "False", "True"]
