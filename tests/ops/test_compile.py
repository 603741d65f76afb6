"""``torch.compile`` of functions and models on nodes, by the backends that run operators one by one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from differential import batch, leaves, net
from equal import same
from homes import HERE, Home
from torch.utils._pytree import tree_leaves
from variants import variants

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


@pytest.mark.filterwarnings("ignore:torch.compile. inductor makes")
def test_by_default_nodes_compute_operator_by_operator(monkeypatch: pytest.MonkeyPatch, home: Home) -> None:
    import torch._inductor.compile_fx

    monkeypatch.delattr(torch._inductor.compile_fx, "compile_fx")
    results = []
    for where, backend in zip((home, HERE), ("inductor", "eager"), strict=True):
        model, (x, y) = where.differ(net().to(where.device)), where.send(batch())
        loss = F.cross_entropy(torch.compile(model, backend=backend)(x), y)
        loss.backward()
        made = torch.compile(lambda k: torch.ones(3, device=k.device) * 2, backend=backend)(x)
        results.append((loss.detach(), [p.grad for p in model.parameters()], made))
    home.same(*results)


def test_the_default_backend_says_what_it_does() -> None:
    x = torch.ones(3, device="node:1")
    with pytest.warns(UserWarning, match=r"backend='eager' does so without this warning"):
        assert torch.compile(lambda a: a + 1)(x).tolist() == [2.0] * 3
    with pytest.warns(UserWarning, match="can't for a node"):
        assert torch.compile(lambda: torch.ones(3, device="node:1") * 2)().tolist() == [2.0] * 3


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
