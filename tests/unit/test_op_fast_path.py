"""Torch's generated bindings choose an operator by what they are given: always the one that they stand for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from disttensor.runtime.node.op_fast_path import FUNCTIONS, METHODS, NETWORKS, fast_path
from disttensor.runtime.protocol.allow_list import AllowList

x = torch.rand(3, 3) + 0.5
i = torch.tensor([[0, 1, 2]])
v = torch.rand(3)

NUMBERS = [(x, x), (x, v), (x, 2), (x, 0.5), (x, True), (x, torch.tensor(2.0)), (x.int(), 3)]
TERNARY = [(x, x, x), ((x, x, x), {"value": 2}), ((x, x, x), {"value": -0.5})]
#: positional arguments, or (positional, keyword) ones, in the forms that the schema allows
CALLS: dict[str, list[Any]] = {
    "aten::view": [(x, [9]), (x, [-1, 3]), (torch.tensor(1.0), [])],
    "aten::transpose.int": [(x, 0, 1), (x, -1, 0)],
    "aten::permute": [(x, [1, 0])],
    "aten::expand": [(x, [2, 3, 3]), ((x, [2, -1, 3]), {"implicit": False})],
    "aten::unsqueeze": [(x, 0), (x, -1)],
    "aten::squeeze.dim": [(x, 0), (x, -1)],
    "aten::select.int": [(x, 0, 1), (x, -1, -1)],
    "aten::clone": [(x,), ((x,), {"memory_format": torch.contiguous_format}), ((x,), {"memory_format": None})],
    "aten::copy_": [(x, x), (x, v, True), (x, torch.tensor(1))],
    "aten::add.Tensor": [*NUMBERS, ((x, x), {"alpha": 2}), ((x, 1), {"alpha": 0.5})],
    "aten::sub.Tensor": [*NUMBERS[:4], ((x, x), {"alpha": 2})],
    "aten::mul.Tensor": [*NUMBERS, (x, 1j)],
    "aten::div.Tensor": NUMBERS,
    "aten::add_.Tensor": [*NUMBERS, ((x, x), {"alpha": 2})],
    "aten::sub_.Tensor": [*NUMBERS[:4], ((x, x), {"alpha": 2})],
    "aten::mul_.Tensor": NUMBERS,
    "aten::div_.Tensor": NUMBERS[:-1],
    "aten::addcmul_": TERNARY,
    "aten::addcdiv_": TERNARY,
    "aten::bernoulli_.float": [(x,), (x, 0.5), (x, 1), ((x, 0.5), {"generator": None})],
    "aten::sum": [(x,), ((x,), {"dtype": torch.float64}), ((x,), {"dtype": None})],
    "aten::sum.dim_IntList": [(x, [0]), (x, [0, 1], True), (x, None), ((x, [0]), {"dtype": torch.float64})],
    "aten::mean": [(x,), ((x,), {"dtype": torch.float64})],
    "aten::mean.dim": [(x, [0]), (x, [0, 1], True), (x, None, True), ((x, [0]), {"dtype": None})],
    "aten::mm": [(x, x)],
    "aten::bmm": [(x[None], x[None])],
    "aten::addmm": [(v, x, x), ((v, x, x), {"beta": 0.5, "alpha": 2})],
    "aten::maximum": [(x, x)],
    "aten::minimum": [(x, x)],
    "aten::gather": [(x, 0, i), ((x, 1, i), {"sparse_grad": True})],
    "aten::masked_fill.Scalar": [(x, x > 1, 0), (x, x > 1, -float("inf")), (x, x > 1, True)],
    "aten::lerp_.Scalar": [(x, x, 0.5), (x, x, 1)],
    "aten::native_layer_norm": [(x, [3], v, v, 1e-5), (x, [3], None, None, 1e-5)],
    "aten::cat": [([x, x],), ([x, x], 1)],
    "aten::stack": [([x, x],), ([x], -1)],
    "aten::where.self": [(x > 1, x, v)],
    "aten::as_strided": [(x, [2], [1]), (x, [2, 2], [3, 1], 1), (x, [2, 2], [3, 1], None)],
    "aten::baddbmm": [(x[None], x[None], x[None]), ((x[None],) * 3, {"beta": 0.5, "alpha": 2})],
    "aten::ones_like": [(x,), ((x,), {"memory_format": torch.preserve_format, "pin_memory": False, "dtype": None})],
    "aten::_softmax": [(x, 1, False), (x, -1, False)],
    "aten::_log_softmax": [(x, 1, False), (x, -1, False)],
    "aten::_softmax_backward_data": [(x, x, 1, torch.float32)],
    "aten::_log_softmax_backward_data": [(x, x, 1, torch.float32)],
    "aten::embedding": [(x, i), (x, i, -1, False, False), (x, i, 0, True, True)],
    "aten::_foreach_mul_.Scalar": [([x, v], 0.5), ([x], 2), ([x], True)],
    "aten::_foreach_add_.Scalar": [([x, v], 0.5), ([x], 2)],
    "aten::_foreach_add_.List": [([x, v], [x, v]), (([x], [x]), {"alpha": -0.5}), (([x], [v]), {"alpha": 2})],
    "aten::_foreach_lerp_.Scalar": [([x], [x], 0.5), ([x], [x], 1)],
    "aten::_foreach_addcmul_.Scalar": [([x], [x], [x]), ([x], [x], [x], 0.5), ([x], [x], [x], 2)],
    "aten::_foreach_addcdiv_.ScalarList": [([x, v], [x, v], [x, v], [0.5, 2.0]), ([x], [x], [x], [-1])],
    "aten::_foreach_sqrt": [([x, v],)],
    "aten::_foreach_div_.ScalarList": [([x, v], [0.5, 2.0]), ([x], [3])],
    "aten::linear": [(x, x), (x, x, None), (x, x, v), (x[None], x, v)],
    "aten::gelu": [(x,), ((x,), {"approximate": "tanh"})],
}


class Seen(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", sorted(METHODS | FUNCTIONS | NETWORKS))
def test_a_binding_runs_its_operator(name: str) -> None:
    op = AllowList().resolve(name)
    assert fast_path(op) is not op._op
    for call in CALLS.get(name, [(x.clone(),)]):
        args, kwargs = call if len(call) == 2 and isinstance(call[1], dict) else (call, {})
        given, twins = copy.deepcopy(args), copy.deepcopy(args)
        torch.manual_seed(0)
        with torch.no_grad(), Seen() as theirs:
            expected = op._op(*given, **kwargs)
        torch.manual_seed(0)
        with torch.no_grad(), Seen() as ours:
            got = fast_path(op)(*twins, **kwargs)
        if expected is None:  # a binding gives the list that it has written
            got = None
        for one, other in zip(tree_leaves((twins, got)), tree_leaves((given, expected)), strict=True):
            assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other
        assert ours.names == theirs.names, (args, kwargs)
        assert ours.names[0] == name or name == "aten::linear"  # which torch takes apart before it says so
