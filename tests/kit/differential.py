"""What differential tests run on a node and here: programs of operators; leaves, a network and a batch for gradients.

A line of a list of programs is a program: statements between ";", and last the expression whose value is compared. The
names in it are the operands below; `dev` is the device under test. To test another operator, add a line to a list.

On a mesh the operands have other values on each rank, and each rank has to have what there is here for its values.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equal import at_rank, bits, same, send
from homes import RANKS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from variants import chosen

import disttensor as dt
from disttensor.meshes import Mesh, from_shards

inf, nan = math.inf, math.nan

CPU = torch.device("cpu")

# ---- operators -------------------------------------------------------------------------------------------------------


@functools.cache
def operands(rank: int = 0) -> dict[str, torch.Tensor]:
    """All operands, with the values of a rank."""
    g = torch.Generator().manual_seed(1 + rank)

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=dtype)

    def randint(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g, dtype=dtype)

    half = randn(4, 4)
    return {
        "x": randn(4, 5),
        "y": randn(4, 5),
        "p": randn(4, 5).abs() + 0.1,  # positive
        "u": torch.rand(4, 5, generator=g) * 1.8 - 0.9,  # inside (-1, 1)
        "v": randn(5),
        "w": randn(5, 6),
        "b": randn(2, 4, 5),  # batches
        "c": randn(2, 5, 3),
        "m": randn(4, 4),
        "spd": half @ half.T + 4 * torch.eye(4),
        "d": randn(4, 5, dtype=torch.float64),
        "h": randn(4, 5).bfloat16(),
        "f": randn(4, 5).half(),
        "z": randn(4, 5, dtype=torch.complex64),
        "zm": randn(4, 4, dtype=torch.complex128),
        "i": randint(-9, 9, 4, 5),
        "j": randint(1, 9, 4, 5, dtype=torch.int32),
        "k": randint(0, 255, 4, 5, dtype=torch.uint8),
        "s": randn(()),  # 0-dim
        "n": torch.tensor(3),
        "t": randint(0, 2, 4, 5).bool(),
        "o": randint(0, 2, 4, 5).bool(),
        "rows": torch.tensor([2, 0, 3]),
        "cols": torch.tensor([1, 4, 1]),
        "at": randint(0, 4, 4, 5),  # for gather, scatter
        "odd": torch.tensor([0.0, -0.0, inf, -inf, nan, 1.0, -1.5]),
        "flat": randint(0, 5, 12).float(),
        "big": randn(3, 40),
        "img": randn(2, 3, 8, 8),
        "seq": randn(2, 3, 10),
        "vol": randn(1, 2, 4, 4, 4),
        "k1": randn(4, 3, 3),
        "k2": randn(4, 3, 3, 3),
        "k3": randn(3, 2, 2, 2, 2),
        "tk2": randn(3, 4, 3, 3),
        "bias": randn(4),
        "three": randn(3),
        "var": randn(3).abs() + 0.5,
        "tokens": randint(0, 7, 3, 4),
        "table": randn(7, 5),
        "logits": randn(6, 5),
        "label": randint(0, 5, 6),
        "q": randn(2, 2, 6, 8),
        "kk": randn(2, 2, 6, 8),
        "vv": randn(2, 2, 6, 8),
        "empty": torch.empty(0, 3),
    }


def inputs(program: str, rank: int = 0) -> dict[str, torch.Tensor]:
    """Fresh ones of the operands that a program names."""
    names = set(re.findall(r"\w+", program))
    return {k: v.clone() for k, v in operands(rank).items() if k in names or (k == "big" and "mha" in names)}


def lines(*blocks: str) -> list[str]:
    return [line for block in blocks for line in block.strip().splitlines()]


def cases(*blocks: str) -> list[str]:
    """The programs of some lists, each once."""
    return list(dict.fromkeys(lines(*blocks)))


def evaluate(program: str, device: torch.device, values: dict[str, torch.Tensor]) -> object:
    """The value of the last expression, with ``values`` as names."""
    g = torch.Generator().manual_seed(7)

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(device)

    def cell(gates: int) -> tuple[torch.Tensor, ...]:
        return weights(gates, 5), weights(gates, 2), weights(gates), weights(gates)

    def mha() -> tuple[object, ...]:
        source = values["big"][:, :24].reshape(3, 2, 12)
        return (
            *(source, source, source, 12, 3, weights(36, 12), weights(36), None, None, False, 0.0),
            *(weights(12, 12), weights(12)),
        )

    names = {
        "torch": torch,
        "np": np,
        "F": F,
        "inf": inf,
        "nan": nan,
        "dev": device,
        "cell": cell,
        "mha": mha,
        **values,
    }
    *statements, expression = program.split("; ")
    for statement in statements:
        exec(statement, names)
    return eval(expression, names)


#: A node's CPU, and a simulated CUDA device.
DEVICES = ("cpu", "cuda:1")
on_devices = pytest.mark.parametrize("name", DEVICES)


def on_places(*blocks: str, devices: Iterable[str] = DEVICES) -> pytest.MarkDecorator:
    """Parametrizes a test by the programs of some lists and where `as_local` tries them: on devices of a node, and on a
    mesh. `make test` has every fourth program on a mesh, by a hash."""
    programs = cases(*blocks)
    return pytest.mark.parametrize(
        ("program", "name"),
        [
            *((program, name) for name in devices for program in programs),
            *(pytest.param(p, "mesh", marks=[] if chosen(p) else pytest.mark.slow) for p in programs),
        ],
    )


#: Context managers in which a program is evaluated here, and there.
Modes = tuple[Callable[[], AbstractContextManager[Any]], Callable[[], AbstractContextManager[Any]]]
PLAIN: Modes = (nullcontext, nullcontext)


def as_local(program: str, name: str, strides: bool = True, modes: Modes = PLAIN) -> None:
    """Asserts that a program gives on node 1, or on each rank of a mesh, what it gives here, and leaves its operands
    the same. ``strides``: whether results have the same ones."""
    if name == "mesh":
        mesh = dt.mesh(rank=RANKS, device="cpu")
        if not as_on_each_rank(program, mesh, range(RANKS), strides, modes):
            assert as_on_each_rank(program, mesh, [0] * RANKS, strides, modes)
        return
    device = dt.device(1, name)
    remote, theirs = send(inputs(program), device), inputs(program)
    with modes[0]():
        expected = evaluate(program, CPU, theirs)
    with modes[1]():
        got = evaluate(program, device, remote)
    same(got, expected, strides)
    assert {x.device for x in tree_leaves(got) if isinstance(x, dt.DistributedTensor)} <= {device}
    for key, value in theirs.items():
        same(remote[key], value, path=key)


def as_on_each_rank(program: str, mesh: Mesh, values: Iterable[int], strides: bool, modes: Modes) -> bool:
    """Asserts that each rank of a mesh, with operands of these ``values``, has what there is here for them; False where
    the mesh has raised RanksDiffer, because what Python learns of the operands is not the same for all."""
    theirs = [inputs(program, rank) for rank in values]
    remote = {key: from_shards(mesh, [each[key] for each in theirs]) for key in theirs[0]}
    with modes[0]():
        expected = [evaluate(program, CPU, each) for each in theirs]
    try:
        with modes[1]():
            got = evaluate(program, mesh.device, remote)
    except dt.errors.RanksDiffer:
        with modes[0]():
            learned = [Learned.of(program, inputs(program, rank)) for rank in values]
        assert any(each != learned[0] for each in learned), "RanksDiffer where Python learns the same of all ranks"
        return False
    for rank, (result, operands_after) in enumerate(zip(expected, theirs, strict=True)):
        same(at_rank(got, rank), result, strides, f"rank {rank}: result")
        same(at_rank(remote, rank), operands_after, path=f"rank {rank}: operands")
    return True


class Learned(TorchDispatchMode):
    """Keeps what Python gets to know of local tensors: shapes, what is no tensor, and what a program brings here."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[object] = []
        self._functions = _Functions(self)

    @classmethod
    def of(cls, program: str, values: dict[str, torch.Tensor]) -> list[object]:
        with cls() as learned:
            evaluate(program, CPU, values)
        return learned.all

    def __enter__(self) -> Learned:
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def note(self, function: Any, result: Any) -> Any:
        brought = getattr(function, "__name__", "") in {"cpu", "to", "tensor", "new_tensor"}
        for value in tree_leaves(result):
            tensor = isinstance(value, torch.Tensor)
            self.all.append((value.shape, bits(value) if brought else None) if tensor else repr(value))
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.note(func, func(*args, **(kwargs or {})))


class _Functions(TorchFunctionMode):
    def __init__(self, learned: Learned) -> None:
        self._learned = learned

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._learned.note(func, func(*args, **(kwargs or {})))


# ---- gradients -------------------------------------------------------------------------------------------------------


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    """Two leaves, the same ones each time."""
    g = torch.Generator().manual_seed(2)
    return torch.randn(4, 5, generator=g).requires_grad_(), torch.randn(4, 5, generator=g).requires_grad_()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(4)
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
        self.head = torch.nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.head(self.layers(x.flatten(1)))


class Tied(torch.nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.out = torch.nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(i))


def net() -> Net:
    torch.default_generator.manual_seed(5)
    return Net()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(6)
    return torch.randn(6, 1, 8, 8, generator=g), torch.randint(0, 5, (6,), generator=g)
