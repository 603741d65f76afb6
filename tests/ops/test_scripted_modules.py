"""TorchScript's modules, and modules that a profile sees, on their way to nodes and back."""

from __future__ import annotations

import copy
import io
import operator
import weakref
from collections.abc import Callable

import pytest
import torch
from equal import same
from torch import nn

import disttensor as dt

pytestmark = [
    pytest.mark.usefixtures("clean"),
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated"),  # a FutureWarning since torch 2.14
]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).tanh()  # type: ignore[no-any-return]


X = torch.arange(6.0).view(3, 2)


def loaded(module: torch.jit.ScriptModule, **options: str) -> torch.jit.ScriptModule:
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file, **options)  # type: ignore[no-any-return]


MAKE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "scripted": torch.jit.script,
    "traced": lambda module: torch.jit.trace(module, X),
    "loaded": lambda module: loaded(torch.jit.script(module)),
}


@pytest.fixture(params=MAKE)
def module(request: pytest.FixtureRequest) -> nn.Module:
    return MAKE[request.param](layers())


def layers() -> Layers:
    torch.manual_seed(0)
    return Layers().eval()


def tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def test_they_go_to_a_node_and_back(module: nn.Module) -> None:
    want, before = module(X), [t.detach().clone() for t in tensors(module)]
    assert module.to("node:1") is module
    assert {str(t.device) for t in tensors(module)} == {"node:1"}
    got = module(X.to("node:1"))
    same(got.detach(), want.detach())
    got.sum().backward()
    want.sum().backward()
    assert all(isinstance(p.grad, dt.DistributedTensor) for p in module.parameters())
    module.double()
    assert {t.dtype for t in module.parameters()} == {torch.float64}
    module.float().cpu()
    assert not any(isinstance(t, dt.DistributedTensor) for t in tensors(module))
    assert all(p.grad is not None and p.grad.device.type == "cpu" for p in module.parameters())
    assert all(map(torch.equal, tensors(module), before))
    assert torch.equal(module(X), want)


@pytest.mark.parametrize("kind", MAKE)
def test_they_train_on_a_node(kind: str) -> None:
    module, twin = MAKE[kind](layers()).train().to("node:1"), MAKE[kind](layers()).train()
    optimizer, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, twin))
    for _ in range(3):
        for each, its, x in ((module, optimizer, X.to("node:1")), (twin, theirs, X)):
            its.zero_grad()
            each(x).square().sum().backward()
            its.step()
    same([t.detach() for t in module.parameters()], [t.detach() for t in twin.parameters()])


def test_saved_from_a_node_it_loads_where_there_are_none(module: nn.Module) -> None:
    want = module(X).detach()
    module.to("node:1")
    here = loaded(module)  # type: ignore[arg-type]
    assert {t.device.type for t in tensors(here)} == {"cpu"}
    assert [t.requires_grad for t in here.parameters()] == [t.requires_grad for t in module.parameters()]
    assert torch.equal(here(X), want)
    same(module(X.to("node:1")).detach(), want)  # which is on the node still
    there = loaded(module, map_location="node:0")  # type: ignore[arg-type]
    assert {str(t.device) for t in tensors(there)} == {"node:0"}
    same(there(X.to("node:0")).detach(), want)


class Tied(nn.Module):
    """One parameter by three names, two of them in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.first.again = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) + x @ self.first.again


def trained(model: Tied, optimizer: torch.optim.Optimizer, device: str, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(X.to(device)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("with_gradients", [True, False])
def test_optimizers_and_ties_follow_while_a_profile_records_shapes(with_gradients: bool) -> None:
    """To a node and back, in the middle of training, and whether gradients are there or not."""
    torch.manual_seed(0)
    twin = Tied()
    wanted = torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True):
        model = copy.deepcopy(twin)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
        mine = {"all": list(model.parameters())}
        model.first.weight.tag = "mine"
        for device in ("cpu", "node:1", "cpu", "node:0"):
            if not with_gradients:
                optimizer.zero_grad()
            model.to(device)
            optimizer.load_state_dict(optimizer.state_dict())  # its states go to where the parameters are
            assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in mine["all"]]
            assert {str(p.device) for p in model.parameters()} == {device}
            assert model.first.weight is model.second.weight is model.first.again
            assert model.first.weight.tag == "mine"
            assert all(map(operator.is_, optimizer.param_groups[0]["params"], model.parameters()))
            assert all(map(operator.is_, mine["all"], model.parameters()))
            trained(model, optimizer, device, 2)
            trained(twin, wanted, "cpu", 2)
            assert {id(p) for p in optimizer.state} == {id(p) for p in model.parameters()}
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p.detach().cpu(), q.detach())


def test_a_profile_that_has_seen_gradients_only() -> None:
    module = nn.Linear(2, 2)
    module(X).sum().backward()
    wanted = [p.grad.clone() for p in module.parameters()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True):
        for p in module.parameters():
            p.grad.mul_(2)
        module.to("node:1")
    assert {str(p.grad.device) for p in module.parameters()} == {"node:1"}
    same([p.grad for p in module.parameters()], [grad * 2 for grad in wanted])


HELD: dict[str, Callable[[nn.Parameter], object]] = {
    "a tuple": lambda p: (p, "mine"),
    "a hook": lambda p: p.register_hook(lambda g: g),
    "a hook of accumulation": lambda p: p.register_post_accumulate_grad_hook(lambda p: None),
    "a weak reference": weakref.ref,
}


@pytest.mark.parametrize("held", HELD)
def test_what_can_not_follow_is_an_error(held: str) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True):
        module = nn.Linear(2, 2)
        keeps = HELD[held](module.weight)
        with pytest.raises(RuntimeError, match="weakrefs") as caught:
            module.to("node:1")
        assert "record_shapes=True" in "".join(caught.value.__notes__)
        assert module.weight.device.type == "cpu"
    assert keeps is not None


def test_modules_made_while_a_profile_records_shapes() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True):
        alone = Layers()
        want = [t.detach().clone() for t in tensors(alone)]
        alone.to("node:1")
        assert {str(t.device) for t in tensors(alone)} == {"node:1"}
        same([t.detach() for t in tensors(alone)], want)
        alone.half().float().cpu()
    late = nn.Linear(2, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True):
        want = late(X)
    late.to("node:1")  # a profile that has ended refers to it, too
    same(late(X.to("node:1")).detach(), want.detach())


NESTED: dict[str, Callable[[torch.Tensor, str], object]] = {
    "of tensors": lambda x, device: torch.nested.nested_tensor([x.to(device), x.to(device)]),
    "jagged of tensors": lambda x, device: torch.nested.nested_tensor([x.to(device)], layout=torch.jagged),
    "on a node": lambda x, device: torch.nested.nested_tensor([x, x], device=device),
    "as": lambda x, device: torch.nested.as_nested_tensor([x.to(device), x.to(device)]),
    "as jagged": lambda x, device: torch.nested.as_nested_tensor([x.to(device)], layout=torch.jagged),
    "as, of one": lambda x, device: torch.nested.as_nested_tensor(x.to(device), layout=torch.jagged),
    "to a node": lambda x, device: torch.nested.nested_tensor([x, x]).to(device),
    "jagged to a node": lambda x, device: torch.nested.nested_tensor([x, x], layout=torch.jagged).to(device),
    "of parts": lambda x, device: torch.nested.nested_tensor_from_jagged(
        x.to(device), torch.tensor([0, 1, 3]).to(device)
    ),
    "of local offsets": lambda x, device: torch.nested.nested_tensor_from_jagged(x.to(device), torch.tensor([0, 1, 3])),
    "of a mask": lambda x, device: torch.nested.masked_select(x.to(device), (x > 1).to(device)),
    "narrowed": lambda x, device: torch.nested.narrow(
        x.to(device), 1, torch.tensor([0, 1, 0]), torch.tensor([1, 1, 2]), layout=torch.jagged
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", NESTED)
def test_nested_tensors_are_refused(name: str) -> None:
    NESTED[name](X, "cpu")
    with pytest.raises(NotImplementedError, match="a tensor of layout nested can't be on a node"):
        NESTED[name](X, "node:1")
