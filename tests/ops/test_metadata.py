"""Proxies' metadata are what the node's tensors have, whatever the operands' strides; some meta kernels are wrong."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from operator_database import NODE, strides, true_to_node

pytestmark = pytest.mark.usefixtures("clean")

OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "mul": torch.mul,
    "div": torch.div,
    "atan2": torch.atan2,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
    "gelu": lambda x, y: torch.ops.aten.gelu_backward(x, y),
    "threshold": lambda x, y: torch.ops.aten.threshold_backward(x, y, 0),
    "copy": lambda x, y: (x + y).clone(),
}


def operand(draw: random.Random, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Contiguous, permuted, expanded or with steps."""
    kind = draw.choice(("contiguous", "permuted", "expanded", "steps"))
    if kind == "permuted":
        order = draw.sample(range(len(shape)), len(shape))
        return torch.randn([shape[i] for i in order], dtype=dtype).permute([order.index(i) for i in range(len(shape))])
    if kind == "expanded":
        return torch.randn([draw.choice((1, n)) for n in shape], dtype=dtype).expand(shape)
    if kind == "steps":
        return torch.randn([2 * n for n in shape], dtype=dtype)[tuple(slice(None, None, 2) for _ in shape)]
    return torch.randn(shape, dtype=dtype)


def there(x: torch.Tensor) -> torch.Tensor:
    """On the node with these very strides."""
    base = torch.as_strided(x, (x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).to(NODE)
    return torch.as_strided(base, x.shape, x.stride(), x.storage_offset())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPERATORS)
def test_elementwise(name: str, dtype: torch.dtype) -> None:
    draw = random.Random(name)
    for _ in range(60):
        shape = [draw.choice((1, 2, 3, 4)) for _ in range(draw.choice((2, 3, 4)))]
        x, y = operand(draw, shape, dtype), operand(draw, shape, dtype)
        got, expected = OPERATORS[name](there(x), there(y)), OPERATORS[name](x, y)
        true_to_node(got)
        assert strides(got) == strides(expected)
