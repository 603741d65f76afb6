"""A Llama, and single layers, that torch's own parallel styles cut along a dim of (2, 2) ranks: as torchrun runs them,
and on a mesh.

``python parallel_twin.py FILE``, under torchrun with gloo, writes each rank's tensors to ``FILE.RANK``. It imports
torch only. The Llama's plan is torchtitan's, by its public description.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

RANKS = 4
VOCABULARY, WIDTH, HEADS, KEYS, HIDDEN, LAYERS = 24, 16, 4, 2, 40, 2
BATCH, LENGTH, STEPS = 2, 8, 3


class Attention(nn.Module):
    """Grouped queries and rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.width = WIDTH // HEADS
        self.wq = nn.Linear(WIDTH, HEADS * self.width, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, KEYS * self.width, bias=False) for _ in range(2))
        self.wo = nn.Linear(HEADS * self.width, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (each(x).view(batch, length, -1, self.width) for each in (self.wq, self.wk, self.wv))
        q, k = turned(q, *turns), turned(k, *turns)
        k, v = (each.repeat_interleave(HEADS // KEYS, 2) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        angles = torch.outer(torch.arange(LENGTH), 1e4 ** -torch.linspace(0, 1, WIDTH // HEADS // 2 + 1)[:-1])
        self.register_buffer("cos", angles.cos()[:, None])
        self.register_buffer("sin", angles.sin()[:, None])
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, 1e-5)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, (self.cos, self.sin))
        return self.output(self.norm(x))  # type: ignore[no-any-return]


def tensor_parallel(model: nn.Module, tp: DeviceMesh) -> None:
    """Cuts projections, and leaves the residual stream whole."""
    for block in model.layers:  # type: ignore[union-attr]
        parallelize_module(
            block,  # type: ignore[arg-type]
            tp,
            {
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(),
                "feed_forward.w3": ColwiseParallel(),
            },
        )


def sequence_parallel(model: nn.Module, tp: DeviceMesh, loss_parallel: bool = False) -> None:
    """Cuts the sequence between the projections, too, and the vocabulary."""
    parallelize_module(
        model,
        tp,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if loss_parallel else Replicate(),
                use_local_output=not loss_parallel,
            ),
        },
    )
    for block in model.layers:  # type: ignore[union-attr]
        parallelize_module(
            block,  # type: ignore[arg-type]
            tp,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w3": ColwiseParallel(),
            },
        )


def with_loss_parallel(model: nn.Module, tp: DeviceMesh) -> None:
    sequence_parallel(model, tp, loss_parallel=True)


#: The plans, and whether the loss is computed of logits that are cut.
PLANS: dict[str, tuple[Callable[[nn.Module, DeviceMesh], None], bool]] = {
    "tensor parallel": (tensor_parallel, False),
    "sequence parallel": (sequence_parallel, False),
    "loss parallel": (with_loss_parallel, True),
}


def new_model() -> Llama:
    torch.manual_seed(0)
    return Llama().double()


def new_batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def training(
    model: nn.Module, tp: DeviceMesh, plan: str
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """A model that is cut, its optimizer, and its step, which returns the loss: each rank's part."""
    parallelize, of_parts = PLANS[plan]
    parallelize(model, tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with loss_parallel() if of_parts else nullcontext():
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return own(loss)

    return model, optimizer, step


def trained(
    model: nn.Module, tp: DeviceMesh, plan: str, place: Callable[[Any], Any]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The losses, and the weights afterwards: each rank's parts."""
    model, _, step = training(model, tp, plan)
    x, y = map(place, new_batch())
    losses = [step(x, y) for _ in range(STEPS)]
    return losses, {name: own(parameter) for name, parameter in model.named_parameters()}


class Sum(nn.Module):
    """A module of two inputs and two results."""

    def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + y, x.sin()


def linear() -> nn.Module:
    return nn.Linear(8, 12)


#: Modules, and the style that cuts each.
STYLES: dict[str, tuple[Callable[[], nn.Module], ParallelStyle]] = {
    "columns": (linear, ColwiseParallel()),
    "columns of a cut input": (linear, ColwiseParallel(input_layouts=Shard(0))),
    "columns, put together": (linear, ColwiseParallel(output_layouts=Replicate())),
    "columns, cut in another dim": (linear, ColwiseParallel(output_layouts=Shard(0))),
    "rows": (linear, RowwiseParallel(input_layouts=Replicate())),
    "rows of a cut input": (linear, RowwiseParallel(input_layouts=Shard(0))),
    "rows, cut in another dim": (linear, RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))),
    "an embedding's columns": (lambda: nn.Embedding(6, 8), ColwiseParallel(output_layouts=Replicate())),
    "an embedding's rows": (lambda: nn.Embedding(6, 8), RowwiseParallel(input_layouts=Replicate())),
    "the sequence": (lambda: nn.LayerNorm(8), SequenceParallel(sequence_dim=0)),
    "the sequence of a local output": (
        lambda: nn.RMSNorm(8), SequenceParallel(sequence_dim=0, use_local_output=True),
    ),
    "inputs": (
        Sum,
        PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(0), input_kwarg_layouts={"y": Replicate()},
            desired_input_kwarg_layouts={"y": Shard(0)}, use_local_output=True,
        ),
    ),
    "outputs": (
        Sum,
        PrepareModuleOutput(
            output_layouts=(Replicate(), Shard(0)), desired_output_layouts=(Shard(1), Replicate()),
        ),
    ),
    "inputs and outputs": (
        lambda: nn.Tanh(),
        PrepareModuleInputOutput(
            input_layouts=Replicate(), desired_input_layouts=Shard(0), output_layouts=Shard(0),
            desired_output_layouts=Replicate(), use_local_input=True,
        ),
    ),
}  # fmt: skip


def styled(name: str, tp: DeviceMesh, place: Callable[[Any], Any]) -> list[torch.Tensor]:
    """The results of a cut module, and the gradients: each rank's parts."""
    make, style = STYLES[name]
    torch.manual_seed(0)
    module = parallelize_module(place(make().double()), tp, style)
    parameters = list(module.parameters())
    if isinstance(module, nn.Embedding):
        given = [place(torch.tensor([[0, 5, 2, 3], [1, 1, 4, 0]]))]
    else:
        given = [place(torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)).requires_grad_()]
    found = module(*given, **({"y": given[0] * 2} if isinstance(module, Sum) else {}))
    results = [own(y, detached=False) for y in (found if isinstance(found, tuple) else (found,))]
    sum((y * torch.arange(y.numel(), device=y.device).view(y.shape)).sum() for y in results).backward()  # type: ignore[union-attr]
    grads = [x.grad for x in (*given, *parameters) if x.requires_grad]
    return [own(x) for x in (*results, *grads) if x is not None]


def own(x: torch.Tensor, detached: bool = True) -> torch.Tensor:
    """A rank's part."""
    local = x.to_local() if isinstance(x, DTensor) else x
    if not detached:
        return local
    return (local.wait() if isinstance(local, AsyncCollectiveTensor) else local).detach()


def resumed(folder: str, tp: DeviceMesh, plan: str) -> list[torch.Tensor]:
    """The losses of a job that goes on from a checkpoint, and writes another one behind it, by torch alone."""
    model, optimizer, step = training(new_model(), tp, plan)
    there, states = get_state_dict(model, optimizer)
    state = {"model": there, "optim": states}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])  # type: ignore[arg-type]
    x, y = new_batch()
    losses = [step(x, y) for _ in range(STEPS)]
    there, states = get_state_dict(model, optimizer)
    dcp.save({"model": there, "optim": states}, checkpoint_id=f"{folder}.behind")
    return losses


def main(path: str, folder: str = "", plan: str = "") -> None:
    tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    if folder:
        torch.save(resumed(folder, tp, plan), f"{path}.{dist.get_rank()}")
        dist.barrier()
        return
    found: dict[str, Any] = {plan: trained(new_model(), tp, plan, lambda x: x) for plan in PLANS}
    found |= {name: styled(name, tp, lambda x: x) for name in STYLES}
    torch.save(found, f"{path}.{dist.get_rank()}")
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # torch may abort while an interpreter with a process group ends (pytorch/pytorch#179291)
