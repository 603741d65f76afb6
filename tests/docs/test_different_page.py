"""docs/DIFFERENT.md: what it says happens does, and what it says to write instead works."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from checkout import ROOT
from equal import same

import disttensor as dt

pytestmark = pytest.mark.usefixtures("clean")

PAGE = (ROOT / "docs/DIFFERENT.md").read_text()


def test_classes() -> None:
    class Mine(torch.Tensor):
        pass

    x, p = torch.ones(3, device="node:1"), nn.Linear(2, 2).to("node:1").weight
    assert type(x) is not torch.Tensor and isinstance(x, torch.Tensor)  # noqa: PT018
    assert type(p) is not nn.Parameter and isinstance(p, nn.Parameter)  # noqa: PT018
    with pytest.raises(RuntimeError, match="subclass"):
        x.as_subclass(Mine)
    same(torch.ones(3).as_subclass(Mine).as_subclass(torch.Tensor).to("node:1"), torch.ones(3))


def test_memory() -> None:
    x = torch.ones(3, device="node:1")
    with pytest.raises(TypeError, match=r"x\.cpu\(\)\.numpy\(\)"):
        x.numpy()
    assert np.array_equal(x.cpu().numpy(), np.ones(3))
    assert dt.run(lambda t: type(t) is torch.Tensor, x, node=1)


LAYOUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: torch.eye(3).to_sparse_csr().to(x.device),
    "nested": lambda x: torch.nested.nested_tensor([x.cpu(), x.cpu()[:1]]).to(x.device),
    "sent quantized": lambda x: torch.quantize_per_tensor(x.cpu(), 0.1, 0, torch.qint8).to(x.device, torch.float64),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore:.*", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    with pytest.raises(
        NotImplementedError, match=r"only strided ones can, and gradients of embeddings: write x\.\w+\([\d.]*\)$"
    ):
        LAYOUTS[name](torch.ones(2, 2, device="node:1"))
    same(torch.eye(3).to_sparse().to_dense().to("node:1"), torch.eye(3))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # what torch says once, of local ones too
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_sparse_gradients(optimizer: Any) -> None:
    results = []
    start = nn.Embedding(6, 3)
    for where in ("node:1", "cpu"):
        table = nn.Embedding(6, 3, sparse=True, _weight=start.weight.detach().clone()).to(where)
        opt = optimizer(table.parameters(), lr=0.1)
        for rows in ([1, 2, 1], [0, 2, 5]):
            opt.zero_grad()
            table(torch.tensor(rows, device=where)).pow(2).sum().backward()
            opt.step()
        results.append(table.weight.detach())
    assert torch.allclose(results[0].cpu(), results[1], rtol=1e-6, atol=0)


def test_attention() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="only supported on"):
        flex_attention(*[q.to("node:1")] * 3)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    remote = F.scaled_dot_product_attention(*[q.to("node:1")] * 3, attn_mask=mask.to("node:1"))
    assert torch.allclose(remote.cpu(), F.scaled_dot_product_attention(q, q, q, attn_mask=mask), atol=1e-6)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_hooks_between_layers_of_an_encoder() -> None:
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    for nested in (True, False):
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
        seen = []
        encoder.layers[0].register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output))
        remote = copy.deepcopy(encoder).to("node:1")
        with torch.no_grad():
            expected = encoder(x, src_key_padding_mask=padding)
            if nested:
                with pytest.raises(RuntimeError, match="NestedTensorImpl"):
                    remote(x.to("node:1"), src_key_padding_mask=padding.to("node:1")).cpu()
                continue
            same(remote(x.to("node:1"), src_key_padding_mask=padding.to("node:1")), expected)
            same(seen[1], seen[0])


def test_whole_models() -> None:
    model = nn.Linear(3, 2).to("node:1")
    file = io.BytesIO()
    torch.save(model, file)
    for where, expected in (({}, "cpu"), ({"map_location": "node:1"}, "node"), ({"map_location": "cpu"}, "cpu")):
        file.seek(0)
        loaded = torch.load(file, weights_only=False, **where)
        assert loaded.weight.device.type == expected
        assert torch.equal(loaded.weight.cpu(), model.weight.cpu())
    again = pickle.loads(pickle.dumps(model))
    assert again.weight.device.type == "cpu"
    assert again.to("node:1").weight.get_node() == 1
    assert copy.deepcopy(model).weight.get_node() == 1


def test_accelerators() -> None:
    if not torch.cuda.is_available():
        assert torch.accelerator.current_accelerator() == torch.device("node")
        assert torch.accelerator.memory_allocated(1) == torch.node.memory_allocated("node:1")
        assert isinstance(torch.Event(), torch.node.Event)
        assert isinstance(torch.Stream(), torch.node.Stream)
    assert not isinstance(torch._C.Event("node:1"), torch.node.Event)  # as one that was imported by name before
    assert isinstance(torch.Event("node:1"), torch.node.Event)
    before = torch.node.memory_allocated("node:1")
    x = torch.ones(2, device=torch.device("node:1"))
    assert torch.node.memory_allocated("node:1") == before + 8 == before + x.nbytes


def test_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed here")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "node:1")
    accelerator = accelerate.Accelerator()
    data = torch.utils.data.DataLoader(torch.arange(12.0).view(4, 3), batch_size=2)
    model = nn.Linear(3, 2)
    start = copy.deepcopy(model)
    model, opt, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    local = torch.optim.SGD(start.parameters(), lr=0.1)
    for x, y in zip(batches, data, strict=True):
        for net, batch, backward, step in (
            (model, x, accelerator.backward, opt),
            (start, y, torch.Tensor.backward, local),
        ):
            step.zero_grad()
            backward(net(batch).pow(2).mean())
            step.step()
    assert model.weight.get_node() == 1
    assert torch.allclose(model.weight.cpu(), start.weight, rtol=1e-5)


def test_the_page_names_what_is_tested_here() -> None:
    names = ["allow_ops", "SparseAdam", "flex_attention", "map_location", "ACCELERATE_TORCH_DEVICE", "as_subclass"]
    assert [name for name in names if name not in PAGE] == []
    assert [link for link in re.findall(r"\]\(([^)#:]+)\)", PAGE) if not (ROOT / "docs" / link).exists()] == []
