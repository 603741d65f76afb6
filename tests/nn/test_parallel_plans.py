"""dt.nn.parallelize: tensor parallel models out of plain ones, by torch's plans and the transformers library's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mesh_kit import connected
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

import disttensor as dt
from disttensor.nn import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, parallelize

pytestmark = pytest.mark.usefixtures("settled")

DOUBLE = torch.float64


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(4):
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Two blocks between a table and a head, which may be the table's weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 7, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def plain(tied: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(tied).double()


def grid() -> dt.meshes.Mesh:
    return dt.mesh(dp=2, tp=2)


PLANS: dict[str, dict[str, Any]] = {
    "words": {"layers.*.up": "column", "layers.*.down": "row", "table": "row", "head": "colwise_gather_output"},
    "torch's": {
        "layers.*.up": ColwiseParallel(),
        "layers.*.down": RowwiseParallel(),
        "table": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    },
    "whole between": {
        "layers.*.up": ColwiseParallel(output_layouts=Replicate()),
        "layers.1.down": RowwiseParallel(input_layouts=Replicate()),
        "layers.0.down": "rowwise_split_input",
    },
}


def trained(model: nn.Module, place: Callable[[Any], Any]) -> list[torch.Tensor]:
    """The losses of some steps."""
    x, y = (place(torch.randint(7, (4, 3), generator=torch.Generator().manual_seed(seed))) for seed in (1, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    return losses


def there(x: Any) -> Any:
    return x.to(grid().device)


def assert_as_plain(model: nn.Module, tied: bool = False) -> None:
    wanted = plain(tied)
    for found, loss in zip(trained(model, there), trained(wanted, lambda x: x), strict=True):
        torch.testing.assert_close(found.cpu(), loss, rtol=1e-12, atol=1e-12)
    state = model.state_dict()
    assert state.keys() == wanted.state_dict().keys()
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(state[name].cpu(), value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("place", [lambda x: x, there], ids=["local", "on the mesh"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_model_is_trained_as_the_plain_one(plan: dict[str, Any], place: Callable[[Any], Any]) -> None:
    model = parallelize(place(plain()), grid()["tp"], plan)
    assert_as_plain(model)


def test_layers_of_the_plan_are_parallel_and_others_as_they_were() -> None:
    model = plain()
    norm = model.layers[0].norm
    assert parallelize(model, grid(), PLANS["words"]) is model
    first: Any = model.layers[0]
    assert first.norm is norm
    assert norm.weight.device == grid().device
    assert (type(first.up), first.up.gather_output) == (ColumnParallelLinear, False)
    assert (type(first.down), first.down.input_is_parallel) == (RowParallelLinear, True)
    assert (type(model.table), type(model.head)) == (ParallelEmbedding, ColumnParallelLinear)


def test_one_style_is_for_the_module_itself() -> None:
    layer = parallelize(nn.Linear(3, 5), grid(), ColwiseParallel())
    assert isinstance(layer, ColumnParallelLinear)
    assert not layer.gather_output


def test_a_weight_that_layers_share_stays_one() -> None:
    model = parallelize(plain(tied=True), grid(), {"table": "row", "head": "colwise_rep"})
    assert model.head.weight is model.table.weight  # type: ignore[union-attr]
    assert_as_plain(model, tied=True)


def with_a_hook() -> Model:
    model = plain()
    model.head.register_forward_hook(lambda *_: None)
    return model


WRONG: dict[str, tuple[Callable[[], nn.Module], Any, type[Exception], str]] = {
    "a name": (
        plain,
        {"layers.*.upp": "row"},
        ValueError,
        r"no module is named 'layers.\*.upp'; there are 'table', 'la",
    ),
    "a word": (plain, {"head": "columns"}, TypeError, "'head' has 'columns'; a style is one of 'column'"),
    "another style": (plain, {"layers.0.norm": SequenceParallel()}, TypeError, "SequenceParallel.*parallelize_module"),
    "an input's": (plain, PrepareModuleInput(), TypeError, "PrepareModuleInput.*For others"),
    "another layout": (
        plain,
        {"head": ColwiseParallel(output_layouts=Shard(0))},
        TypeError,
        "ColwiseParallel.*layouts",
    ),
    "a cut input": (plain, {"head": ColwiseParallel(input_layouts=Shard(0))}, TypeError, "ColwiseParallel.*layouts"),
    "another layer": (
        plain,
        {"layers.0.norm": "row"},
        TypeError,
        "is of LayerNorm, and layers of nn.Linear and nn.Embedding are",
    ),
    "a table's columns": (plain, {"table": "column"}, TypeError, "is of Embedding, and layers of nn.Linear are"),
    "two styles": (plain, {"head": "row", "h*": "column"}, ValueError, r"two styles for 'head', the second by 'h\*'"),
    "one of two": (
        lambda: plain(tied=True),
        {"head": "column"},
        ValueError,
        "'table.weight' and 'head.weight' are one",
    ),
    "two ways": (lambda: plain(tied=True), {"head": "row", "table": "row"}, ValueError, "does not cut them alike"),
    "hooks": (with_a_hook, {"head": "column"}, ValueError, "'head' has hooks"),
    "no module": (lambda: 3, {"head": "column"}, TypeError, "takes a module, not 3"),  # type: ignore[dict-item, return-value]
}


@pytest.mark.parametrize(("make", "plan", "error", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_plan_changes_nothing(
    make: Callable[[], nn.Module], plan: Any, error: type[Exception], words: str
) -> None:
    model = make()
    before = copy.copy(model)
    with pytest.raises(error, match=f"dt.nn.parallelize.*{words}"):
        parallelize(model, grid(), plan)
    if isinstance(model, nn.Module):
        assert [*model.named_modules()][1:] == [*before.named_modules()][1:]
        assert all(p.device.type == "cpu" for p in model.parameters())


def test_a_plan_of_the_transformers_library() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed here")
    config = transformers.LlamaConfig(
        vocab_size=23, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    local = transformers.LlamaForCausalLM(config).double()
    model = copy.deepcopy(local)
    assert {"colwise", "rowwise"} <= {*model.tp_plan.values()}
    parallelize(model, grid(), model.tp_plan)
    x = torch.randint(23, (2, 8))
    for net, place in ((local, lambda it: it), (model, there)):
        net.losses = []
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            loss = net(input_ids=place(x), labels=place(x)).loss
            loss.backward()
            optimizer.step()
            net.losses.append(loss.detach().cpu())
    torch.testing.assert_close(model.losses, local.losses, rtol=1e-6, atol=1e-6)
    weight = model.state_dict()["model.layers.1.mlp.down_proj.weight"].cpu()
    torch.testing.assert_close(weight, local.model.layers[1].mlp.down_proj.weight.detach(), rtol=1e-10, atol=1e-10)
