"""``scaled_dot_product_attention`` over all its forms: a node's is the local one to the bit, forward and backward."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from equal import outcome, same, send
from torch.nn.functional import scaled_dot_product_attention
from variants import variants

import disttensor as dt

pytestmark = pytest.mark.usefixtures("nodes")

BATCH, HEADS, LONG, WIDE = 2, 4, 12, 8

#: The mask's shape is (query length, key length) or broadcasts to (batch, heads, query length, key length).
MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "causal": lambda: {"is_causal": True},
    "boolean": lambda: {"attn_mask": torch.ones(LONG, LONG, dtype=torch.bool).tril()},
    "padding": lambda: {"attn_mask": (torch.arange(LONG) < torch.tensor([[LONG], [5]]))[:, None, None, :]},
    "boolean heads": lambda: {"attn_mask": torch.rand(BATCH, HEADS, LONG, LONG) > 0.3},
    "float": lambda: {"attn_mask": torch.randn(LONG, LONG)},
    "float padding": lambda: {
        "attn_mask": torch.zeros(BATCH, 1, 1, LONG).masked_fill(torch.arange(LONG) > 6, -torch.inf)
    },
    "learned": lambda: {"attn_mask": torch.randn(LONG, LONG, requires_grad=True)},
    "empty rows": lambda: {"attn_mask": torch.arange(LONG)[:, None] > torch.arange(LONG)},
}
#: Shapes of query, key and value, and further arguments.
FORMS: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "plain": ([(BATCH, HEADS, LONG, WIDE)] * 3, {}),
    "other width": ([(BATCH, HEADS, LONG, 5)] * 3, {}),
    "other value width": ([(BATCH, HEADS, LONG, WIDE)] * 2 + [(BATCH, HEADS, LONG, 6)], {}),
    "grouped": ([(BATCH, HEADS, LONG, WIDE)] + [(BATCH, 2, LONG, WIDE)] * 2, {"enable_gqa": True}),
    "one key head": ([(BATCH, HEADS, LONG, WIDE)] + [(BATCH, 1, LONG, WIDE)] * 2, {}),
    "one value head": ([(BATCH, HEADS, LONG, WIDE)] * 2 + [(BATCH, 1, LONG, WIDE)], {}),
    "three dimensions": ([(HEADS, LONG, WIDE)] * 3, {}),
    "two dimensions": ([(LONG, WIDE)] * 3, {}),
    "scaled": ([(BATCH, HEADS, LONG, WIDE)] * 3, {"scale": 0.3}),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
DEVICES = {"cpu": lambda: "node:1", "simulated": lambda: dt.device(1, "cuda:1")}
CASES = itertools.product(FORMS, MASKS, (0.0, 0.1), ("eval", "train"), DTYPES, DEVICES)


def arguments_of(form: str, mask: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What goes with query, key and value; the mask fits their shapes and dtype."""
    shapes, more = FORMS[form]
    arguments = MASKS[mask]() | more
    if (given := arguments.get("attn_mask")) is not None:
        while given.dim() > len(shapes[0]):
            given = given[-1]
        if given.is_floating_point():
            given = given.detach().to(dtype).requires_grad_(given.requires_grad)
        arguments["attn_mask"] = given
    return arguments


def seed(number: int) -> None:
    """Nodes in this process share its generator: they are to set it now, and not in the middle."""
    torch.manual_seed(number)
    dt.synchronize()


def attend(
    operands: list[torch.Tensor], arguments: dict[str, Any], dropout: float, train: bool
) -> list[torch.Tensor | None]:
    seed(0)
    with torch.set_grad_enabled(train):
        out = scaled_dot_product_attention(*operands, dropout_p=dropout, **arguments)
    if train:
        out.sin().sum().backward()
    leaves = [*operands, *(t for t in arguments.values() if isinstance(t, torch.Tensor))]
    return [out, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(("form", "mask", "dropout", "mode", "dtype", "where"), variants(CASES))
def test_the_same_as_here(form: str, mask: str, dropout: float, mode: str, dtype: str, where: str) -> None:
    seed(1)
    shapes, train = FORMS[form][0], mode == "train"
    here = [torch.randn(shape, dtype=DTYPES[dtype], requires_grad=train) for shape in shapes]
    arguments = arguments_of(form, mask, DTYPES[dtype])
    there, arguments_there = send((here, arguments), DEVICES[where]())  # type: ignore[misc]
    local = outcome(lambda: attend(here, arguments, dropout, train))
    remote = outcome(lambda: attend(there, arguments_there, dropout, train))
    same(remote, local)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mask", ["causal", "boolean", "padding", "boolean heads", "float padding", "empty rows"])
@pytest.mark.parametrize("form", FORMS)
def test_only_who_may_see_a_key_is_changed_by_it(form: str, mask: str, dropout: float) -> None:
    """The last one."""
    seed(1)
    shapes, arguments = FORMS[form][0], arguments_of(form, mask)
    q, k, v = (torch.randn(shape, device="node:1") for shape in shapes)
    step = (torch.arange(LONG, device="node:1") == LONG - 1)[:, None] * 5.0
    on_node = {name: x.to("node:1") if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    seen = []
    for shift in (0, step):
        seed(0)
        seen.append(scaled_dot_product_attention(q, k + shift, v + shift, dropout_p=dropout, **on_node).cpu())
    given = arguments.get("attn_mask", torch.ones(LONG, LONG, dtype=torch.bool).tril())
    may_see = (given if given.dtype == torch.bool else given == 0).expand(*seen[0].shape[:-1], LONG)[..., -1]
    assert not may_see.all()
    assert torch.equal((seen[0] != seen[1]).any(-1), may_see)


# ---- torch's fast path for inference ---------------------------------------------------------------------------------

LENGTHS = torch.tensor([5, 3, 1])
PADDED = torch.arange(6) >= LENGTHS[:, None]  # no sequence is as long as the batch
LEFT = PADDED.flip(1)  # which the fast path doesn't know
CAUSAL = nn.Transformer.generate_square_subsequent_mask(6)


def encoder(layers: int = 2, **options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(16), **options)


def batch() -> torch.Tensor:
    return torch.linspace(-2, 2, 3 * 6 * 16).sin().reshape(3, 6, 16)


INFERENCE: dict[str, Callable[[nn.ModuleDict, torch.Tensor, Any], Any]] = {
    "padded": lambda m, x, on: m["encoder"](x, src_key_padding_mask=on(PADDED)),
    "padded as floats": lambda m, x, on: m["encoder"](x, src_key_padding_mask=on(PADDED).float().mul(-1e9)),
    "padded to the left": lambda m, x, on: m["encoder"](x, src_key_padding_mask=on(LEFT)),
    "not checked": lambda m, x, on: m["unchecked"](x, src_key_padding_mask=on(PADDED)),
    "not nested": lambda m, x, on: m["dense"](x, src_key_padding_mask=on(PADDED)),
    "causal": lambda m, x, on: m["encoder"](x, on(CAUSAL), is_causal=True),
    "causal and padded": lambda m, x, on: m["encoder"](x, on(CAUSAL), src_key_padding_mask=on(PADDED.float())),
    "a layer": lambda m, x, on: m["encoder"].layers[0](x, src_key_padding_mask=on(PADDED)),
    "attention": lambda m, x, on: m["attention"](x, x, x),
    "attention, all heads": lambda m, x, on: m["attention"](x, x, x, average_attn_weights=False),
    "attention, no weights": lambda m, x, on: m["attention"](x, x, x, need_weights=False),
    "attention, padded": lambda m, x, on: m["attention"](x, x, x, on(PADDED), need_weights=False),
    "transformer": lambda m, x, on: m["transformer"](x, x / 2, src_key_padding_mask=on(PADDED)),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", INFERENCE)
def test_inference(name: str, mode: Callable[[], Any]) -> None:
    torch.default_generator.manual_seed(1)
    parts = {
        "encoder": encoder(),
        "unchecked": encoder(mask_check=False),
        "dense": encoder(enable_nested_tensor=False),
        "attention": nn.MultiheadAttention(16, 4, batch_first=True),
        "transformer": nn.Transformer(16, 4, 1, 1, 32, batch_first=True),
    }
    modules = nn.ModuleDict(parts).eval()
    there, where = copy.deepcopy(modules).to(dt.device(1, "cpu")), dt.device(1, "cpu")
    with mode():
        remote = INFERENCE[name](there, batch().to(where), lambda x: x.to(where))
        same(remote, INFERENCE[name](modules, batch(), lambda x: x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_nested_on_a_node_stays_there() -> None:
    where = dt.device(1, "cpu")
    nested = torch._nested_tensor_from_mask(batch().to(where), PADDED.logical_not().to(where))
    with pytest.raises(RuntimeError, match="needs its output_size"):
        nested.to_padded_tensor(0.0)
    with pytest.raises(TypeError, match="a nested tensor cannot travel as one"):
        nested.cpu()
    with torch.no_grad():
        assert torch.equal(nested.to_padded_tensor(0.0, (3, 6, 16)).cpu(), batch() * ~PADDED[..., None])
