"""What a proxy is: its handle stays in step with its tensor, it dies once, it prints, and torch's own tools take it.

On a node, and on a mesh whose ranks have different values.
"""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import cloudpickle
import pytest
import torch
from equal import same
from homes import Home
from limits import HANG

import disttensor as dt
from disttensor import testing

pytestmark = pytest.mark.usefixtures("clean")


#: Of which test it can't be true, and why.
NOT_ON_A_MESH = {
    "test_the_text_of_a_number": "it asks for one number of ranks that have different ones",
    "test_assert_close_to_what_is_here": "it asks for one value of ranks that have different ones",
    "test_fork_rng_and_seeds": "nodes that are threads draw from one generator, and so each rank something else",
}


def live(home: Home) -> list[int]:
    """The tensors on the home's nodes."""
    dt.synchronize()
    return [testing.usage(node).tensors for node in home.nodes]


def test_type(home: Home) -> None:
    x = torch.ones(2, device=home.device)
    assert type(x) is dt.DistributedTensor
    assert isinstance(x, torch.Tensor)
    assert x.device == home.device
    assert x.device.type == "node"
    assert x.layout is torch.strided
    assert not x.is_cuda
    assert not x.is_sparse
    assert not x.is_meta
    assert not x.is_quantized
    assert not x.is_cpu
    assert type(torch.nn.Parameter(x)) in (torch.nn.Parameter, dt.DistributedTensor)
    assert isinstance(torch.nn.Parameter(x), torch.nn.Parameter)


def test_it_is_made_by_operations_only() -> None:
    with pytest.raises(TypeError, match="factories"):
        dt.DistributedTensor(2, 3)


@pytest.mark.row("M13")
def test_a_handle_is_freed_once_with_its_last_proxy(home: Home) -> None:
    gc.collect()
    before = live(home)
    x = home.send(torch.ones(4))
    shared = [x.detach(), x.data, x.view_as(x), torch.nn.Parameter(x)]
    assert live(home) == [n + 1 for n in before]
    del x
    shared.pop()
    assert live(home) == [n + 1 for n in before]
    home.same(shared[0] + 1, torch.full((4,), 2.0))
    shared.clear()
    assert live(home) == before


def test_a_cycle_is_collected(home: Home) -> None:
    gc.collect()
    before = live(home)
    x = home.send(torch.ones(4))
    x.me = x  # type: ignore[attr-defined]
    del x
    gc.collect()
    assert live(home) == before


def test_graphs_do_not_keep_tensors(home: Home) -> None:
    keep = home.send(torch.ones(3, requires_grad=True))
    gc.collect()
    before = live(home)
    for _ in range(5):
        (keep.exp() * keep).sum().backward()
        keep.grad = None
    assert live(home) == before


def test_attributes_and_weak_references(home: Home) -> None:
    x = home.send(torch.ones(2))
    x.note = "mine"  # type: ignore[attr-defined]
    assert x.note == "mine"  # type: ignore[attr-defined]
    reference = weakref.ref(x)
    assert reference() is x
    del x
    assert reference() is None
    y = home.send(torch.ones(2))
    assert {y: 1}[y] == 1
    assert hash(y) == id(y)


def test_many_proxies_of_one_tensor(home: Home) -> None:
    x = home.send(torch.zeros(3))
    gc.collect()
    before = live(home)
    proxies = [x.detach() for _ in range(1000)]
    for p in proxies[:10]:
        p.add_(1)
    home.same(x, torch.full((3,), 10.0))
    assert live(home) == before


def test_dying_while_a_lock_is_held(home: Home) -> None:
    """Finalizers take no lock: the collector can run them anywhere."""
    x = home.send(torch.ones(3))
    dying, held = [x, *(x.detach() for _ in range(3))], list[bool]()
    del x

    def die() -> None:
        thread = threading.Thread(target=dying.clear)
        thread.start()
        thread.join(HANG)
        held.append(thread.is_alive())

    with testing.at("pack", die):  # whoever makes a message holds the lock
        dt.synchronize()
    assert not any(held)
    assert held
    assert not dying


def test_reference_counts(home: Home) -> None:
    x = home.send(torch.ones(3))
    before = sys.getrefcount(x)
    for _ in range(50):
        x.add_(1)
        x + x
        x[0]
        home.seen(x).cpu()
    assert sys.getrefcount(x) == before


# ---- printing --------------------------------------------------------------------------------------------------------

PRINTED = {
    "floats": lambda: torch.tensor([[1.5, -2.0], [0.25, 3e6]]),
    "ints": lambda: torch.arange(6).reshape(2, 3),
    "bools": lambda: torch.tensor([True, False]),
    "scalar": lambda: torch.tensor(2.5),
    "int32": lambda: torch.tensor([1], dtype=torch.int32),
    "bfloat16": lambda: torch.tensor([1.5], dtype=torch.bfloat16),
    "complex": lambda: torch.tensor([1 + 2j, -0.5j]),
    "empty": lambda: torch.empty(0),
    "empty matrix": lambda: torch.empty(0, 3),
    "nan": lambda: torch.tensor([float("nan"), float("inf"), 1.0]),
    "large": lambda: torch.arange(10_000.0),
    "large matrix": lambda: torch.arange(250_000.0).reshape(500, 500),
    "deep": lambda: torch.arange(8000.0).reshape(20, 20, 20),
    "needs grad": lambda: torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("name", PRINTED)
def test_repr_is_torchs_own(name: str, home: Home) -> None:
    local = PRINTED[name]()
    remote = home.seen(home.send(local))
    where = f"device='{remote.device}'"
    text = "".join(repr(remote).replace(f"{where}, ", "").replace(f", {where}", "").split())
    assert text == "".join(repr(local).split())
    assert where in repr(remote)
    assert str(remote) == repr(remote)


def test_repr_of_a_result_and_a_parameter(home: Home) -> None:
    w = torch.nn.Parameter(torch.ones(2, device=home.device))
    assert repr(w).startswith("Parameter containing:\ntensor([1., 1.]")
    assert "grad_fn=<MulBackward0>" in repr(w * 2)
    assert f"{w.detach()}" == repr(w.detach())


def test_the_text_of_a_number(home: Home) -> None:
    x = home.send(torch.tensor(2.5))
    assert f"{x:.2f}" == "2.50"


def test_print_options(home: Home) -> None:
    x = home.seen(home.send(torch.tensor([1 / 3])))
    torch.set_printoptions(precision=2)
    try:
        assert "0.33," in repr(x) or "0.33]" in repr(x)
    finally:
        torch.set_printoptions(profile="default")


# ---- torch's own tools -----------------------------------------------------------------------------------------------


def test_swap_tensors(home: Home) -> None:
    a, b = torch.zeros(2, device="node:0"), home.send(torch.ones(3))
    torch.utils.swap_tensors(a, b)
    home.same(a, torch.ones(3))
    same(b, torch.zeros(2))
    assert (a.device, b.device) == (home.device, torch.device("node:0"))
    home.same(a + 1, torch.full((3,), 2.0))


def test_pytree_and_vector_tools(home: Home) -> None:
    ps = [torch.nn.Parameter(home.send(torch.randn(2, 3))), torch.nn.Parameter(home.send(torch.randn(4)))]
    flat = torch.nn.utils.parameters_to_vector(ps)
    assert flat.shape == (10,)
    torch.nn.utils.vector_to_parameters(flat * 2, ps)
    home.same(torch.nn.utils.parameters_to_vector(ps).detach(), (home.seen(flat) * 2).detach().cpu())


def test_iteration_of_a_data_loader(home: Home) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10))
    total = torch.zeros((), device=home.device)
    for x, _ in torch.utils.data.DataLoader(data, batch_size=4):
        total += home.send(x).sum()
    assert home.seen(total).item() == 45


def test_assert_close(home: Home) -> None:
    x = home.send(torch.randn(3))
    torch.testing.assert_close(x, x + 1e-9)


def test_assert_close_to_what_is_here(home: Home) -> None:
    x = torch.randn(3)
    torch.testing.assert_close(home.send(x), x, check_device=False)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(home.send(x), home.send(x) + 1)


def test_fork_rng_and_seeds(home: Home) -> None:
    x = torch.rand(3, device=home.device)
    dt.synchronize()  # in-process nodes share this process's generator: drawn before it is seeded
    torch.manual_seed(3)
    dt.synchronize()
    a = torch.rand(3, device=home.device).cpu()
    torch.manual_seed(3)
    dt.synchronize()
    assert torch.equal(torch.rand(3, device=home.device).cpu(), a)
    assert not torch.equal(x.cpu(), a)


def test_dispatch_and_function_modes_see_operations(home: Home) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = home.send(torch.ones(3))
    x + x
    for mode, name in ((Functions(), "add"), (Operators(), "aten.add.Tensor")):
        seen.clear()
        with mode:
            y = x + x
        assert seen == [name]
        home.same(y, torch.full((3,), 2.0))


def test_libraries_for_several_kinds_of_arrays_take_torchs_functions() -> None:
    """As opt_einsum and autoray do: the package's name that a class tells is where they look for functions."""

    def do(name: str, *args: Any) -> Any:
        return getattr(importlib.import_module(type(args[0]).__module__.split(".")[0]), name)(*args)

    x = torch.arange(4.0).view(2, 2)
    for remote in (x.to("node:1"), torch.nn.Parameter(x.to("node:1"))):
        same(do("matmul", remote, remote).detach(), x @ x)
        same(do("tensordot", remote, remote, 1).detach(), torch.tensordot(x, x, 1))


def test_the_class_is_pickled_by_its_name(script: Callable[..., CompletedProcess[str]]) -> None:
    """So a process that has no session finds it."""
    kind = dt.DistributedTensor
    assert dt.run(lambda: kind.__name__, node=1) == kind.__name__
    for dumped in (pickle.dumps(kind), cloudpickle.dumps(kind)):
        assert pickle.loads(dumped) is kind
        found = script(f"import pickle; print(pickle.loads({dumped!r}).__qualname__)")
        assert found.stdout == "DistributedTensor\n", found.stderr
    assert copy.deepcopy(kind) is kind
    rows = torch.nn.Embedding(3, 2, sparse=True, device="node:1")
    rows(torch.tensor([1]).to("node:1")).sum().backward()
    assert pickle.loads(pickle.dumps(type(rows.weight.grad))) is type(rows.weight.grad) is not kind
    assert pickle.loads(pickle.dumps(torch.Tensor)) is torch.Tensor
