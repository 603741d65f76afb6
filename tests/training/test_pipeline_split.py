"""Pipelines of modules that torch.export cuts in stages, against the module in one piece."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal import bits
from mesh_kit import connected
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipe_split
from variants import variants

import disttensor as dt
from disttensor.training import Pipeline

pytestmark = pytest.mark.usefixtures("settled")

NODES = 4
LETTERS, WIDTH, LENGTH = 11, 8, 5
BEGINNING, END = SplitPoint.BEGINNING, SplitPoint.END


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(NODES):
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # softmax sees none of a key
        self.register_buffer("scale", torch.full((WIDTH,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH)) * self.scale


class Language(nn.Module):
    """As programs of today have it: positions made in forward, a check of sizes, tied weights, a skip to the end."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.positions = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.full((WIDTH,), 0.25, dtype=torch.float64), persistent=False)
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)
        self.head.weight = self.letters.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        length = index.shape[1]
        assert length <= LENGTH
        first = x = self.letters(index) + self.positions(torch.arange(length, device=index.device)) + self.shift
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x + self.mix * first))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Dropout, batch norm, two inputs, and a tree as its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        h = self.norm(self.first(x)).relu()
        pipe_split()
        h = self.drop(self.second(h) + y)
        return {"out": self.last(h), "hidden": (h, y)}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def letters(rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(LETTERS, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def entropy(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


SPLITS: dict[str, dict[str, SplitPoint]] = {
    "before layers": {"layers.1": BEGINNING, "layers.3": BEGINNING},
    "after a layer": {"layers.0": END, "layers.1": END, "norm": BEGINNING},
    "twice at one point": {"layers.1": END, "layers.2": BEGINNING},
    "inside of a layer": {"layers.1.out": BEGINNING, "layers.2.norm": END},
    "before the first and behind the last": {"letters": BEGINNING, "layers.2": BEGINNING, "head": END},
    "nowhere": {},
}
STAGES = [3, 4, 2, 3, 2, 1]


@pytest.mark.parametrize(("split", "stages"), variants(zip(SPLITS, STAGES, strict=True)))
def test_a_traced_module_trains_as_the_module_in_one_piece(split: str, stages: int) -> None:
    local, model = seeded(Language), seeded(Language)
    x, y = letters(8)
    before = {name: module.forward for name, module in model.named_modules()}
    places = [f"node:{k}" for k in range(stages)]
    pipeline = Pipeline(model, places, microbatches=4, split_spec=SPLITS[split], example=x[:2])
    assert all(module.forward == before[name] for name, module in model.named_modules())
    assert list(pipeline.state_dict()) == list(local.state_dict())
    assert [name for name, _ in pipeline.named_parameters()] == [name for name, _ in local.named_parameters()]
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.02) for m in (pipeline, local))
    for step in range(10):
        ours.zero_grad()
        theirs.zero_grad()
        x, y = letters(8, step)
        loss = pipeline.step(x, y, entropy)
        wanted = entropy(local(x), y)
        wanted.backward()
        torch.testing.assert_close(loss.cpu(), wanted.detach(), rtol=1e-12, atol=1e-12)
        ours.step()
        theirs.step()
    for (name, got), value in zip(pipeline.state_dict().items(), local.state_dict().values(), strict=True):
        torch.testing.assert_close(
            got.cpu(), value, rtol=1e-11, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )
    torch.testing.assert_close(pipeline(x).cpu(), local(x).detach(), rtol=1e-11, atol=1e-11)


def pair(training: bool = True) -> tuple[Net, Pipeline]:
    local, model = seeded(Net), seeded(Net)
    local.train(training)
    model.train(training)
    x, y = inputs()
    pipeline = Pipeline(model, ["node:1", "node:3"], microbatches=3, split_spec={}, example=(x[:2], y[:2]))
    assert pipeline.training is model.training is training
    return local, pipeline  # type: ignore[return-value]


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    return torch.randn(6, 6, generator=random).double(), torch.randn(6, 8, generator=random).double()


def loss_of(got: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(got["out"], target) + got["hidden"][0].square().mean()


@pytest.mark.parametrize("training", [True, False])
def test_both_modes_are_traced(training: bool) -> None:
    """Dropout and batch norm are in the trace: which one is used, the mode says then."""
    local, pipeline = pair(training)
    x, y = inputs()
    target = torch.zeros(6, 3).double()
    for mode in (True, False, True):
        local.train(mode)
        pipeline.train(mode)
        local.zero_grad()
        pipeline.zero_grad()
        torch.manual_seed(7)
        loss = pipeline.step((x, y), target, loss_of)
        torch.manual_seed(7)
        wanted: Any = 0
        for rows in torch.arange(6).chunk(3):
            one = loss_of(local(x[rows], y[rows]), target[rows]) * (2 / 6)
            one.backward()
            wanted = wanted + one.detach()
        assert bits(loss.cpu()) == bits(wanted)
        for p, q in zip(pipeline.parameters(), local.parameters(), strict=True):
            assert bits(p.grad.cpu()) == bits(q.grad)  # type: ignore[union-attr, arg-type]
        for (name, b), (other, c) in zip(pipeline.named_buffers(), local.named_buffers(), strict=True):
            assert name == other
            assert bits(b.cpu()) == bits(c)
    local.eval()
    got = pipeline.eval()((x, y))
    assert got["hidden"][1].shape == (6, 8)
    torch.testing.assert_close(got["out"].cpu(), local(x, y)["out"].detach(), rtol=1e-12, atol=1e-12)


def test_a_checkpoint_is_loaded_and_saved() -> None:
    local, pipeline = pair()
    x, y = inputs()
    trained = copy.deepcopy(local)
    for _ in range(3):
        trained(x, y)
    with torch.no_grad():
        trained.last.weight.mul_(2)
    pipeline.load_state_dict(trained.state_dict())
    trained.eval()
    torch.testing.assert_close(pipeline.eval()((x, y))["out"].cpu(), trained(x, y)["out"].detach())
    local.load_state_dict(pipeline.state_dict())
    for got, wanted in zip(local.state_dict().values(), trained.state_dict().values(), strict=True):
        assert bits(got) == bits(wanted)


def test_on_slices_of_a_mesh() -> None:
    local, model = seeded(Language), seeded(Language)
    x, y = letters(8)
    m = dt.mesh(pp=2, dp=2)
    places = [m.slice(pp=k) for k in range(2)]
    pipeline = Pipeline(model, places, microbatches=2, split_spec={"layers.2": BEGINNING}, example=x[:2])
    loss = pipeline.step(x, y, entropy)
    wanted = entropy(local(x), y)
    wanted.backward()
    torch.testing.assert_close(loss.cpu(), wanted.detach(), rtol=1e-12, atol=1e-12)
    for p, q in zip(pipeline.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-12, atol=1e-12)  # type: ignore[union-attr]


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def made(**options: Any) -> Pipeline:
    given = {"split_spec": {"layers.2": BEGINNING}, "example": letters(2)[0], "microbatches": 2, **options}
    return Pipeline(seeded(Language), ["node:0", "node:1"], **given)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no example": (lambda: made(example=None), TypeError, "split_spec needs example"),
    "an unknown name": (lambda: made(split_spec={"layers.9": BEGINNING}), ValueError, "names 'layers.9', .*'layers.3'"),
    "no split point": (lambda: made(split_spec={"layers.2": "beginning"}), TypeError, "has to be a .*SplitPoint"),
    "a list": (lambda: made(split_spec=["layers.2"]), TypeError, "is a dict such as"),
    "other places": (lambda: made(split_spec={"layers.1": END, "norm": END}), ValueError, "3 stages and 2 places"),
    "stages": (
        lambda: Pipeline([nn.Linear(2, 2)], ["node:0"], microbatches=1, split_spec={}, example=torch.ones(1, 2)),
        TypeError,
        "cuts a module, not list",
    ),
    "moved already": (
        lambda: Pipeline(
            nn.Linear(2, 2).to("node:1"), ["node:0"], microbatches=1, split_spec={}, example=torch.ones(1, 2)
        ),
        ValueError,
        "'weight' is on node 1 cpu; a module is traced where it is local",
    ),
    "a branch": (
        lambda: Pipeline(Branches(), ["node:0"], microbatches=1, split_spec={}, example=torch.ones(1, 2)),
        RuntimeError,
        "torch.export can't trace Branches .*a list of modules needs no trace",
    ),
    "another size": (
        lambda: made().step(*letters(6), entropy),
        ValueError,
        r"micro-batch 0 of x has \(3, 5\) torch.int64, and the module was traced with \(2, 5\) torch.int64",
    ),
    "an uneven size": (lambda: made()(letters(3)[0]), ValueError, r"micro-batch 1 of x has \(1, 5\)"),
}


@pytest.mark.filterwarnings("ignore::Warning")  # torch.export's own, of what it can't trace
@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_sentences(case: str) -> None:
    call, kind, text = WRONG[case]
    with pytest.raises(kind, match=text):
        call()


def test_a_module_that_cannot_be_cut_stays_as_it_is() -> None:
    model = seeded(Language).eval()
    model.layers[1].train()  # type: ignore[index, operator, union-attr]
    with pytest.raises(ValueError, match="names 'layers"):
        Pipeline(model, ["node:0"], microbatches=1, split_spec={"norm": END, "layers.9": END}, example=letters(1)[0])
    Pipeline(model, ["node:0", "node:1"], microbatches=1, split_spec={"layers.2": END}, example=letters(1)[0])  # two
    assert [module.training for module in model.layers] == [False, True, False, False]  # type: ignore[union-attr]
    assert not model.training


def test_an_error_names_the_stage() -> None:
    x, y = letters(4)
    x = x.clone()
    x[3, 0] = LETTERS
    loss = made().step(x, y, entropy)
    with pytest.raises(IndexError) as raised:
        loss.item()
    assert any("in the forward pass of stage 0, micro-batch 1 of 2" in note for note in raised.value.__notes__)
