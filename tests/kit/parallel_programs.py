"""Training with torch's tensor parallel styles: programs that torchrun's ranks and one script run as they stand.

Each takes a (2, 2) DeviceMesh with the dims dp and tp and a device, trains for three steps in float64, and gives the
losses and all weights, whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

WORDS, WIDTH, LENGTH, BATCH = 16, 8, 4, 4


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 2)).transpose(1, 2) for each in (self.q, self.k, self.v))
        found = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.o(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm_2, self.feed = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.feed(self.norm_2(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(WORDS, WIDTH), Block()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.norm(self.block(self.words(words))))  # type: ignore[no-any-return]


FEED: dict[str, Any] = {"block.feed.up": ColwiseParallel(), "block.feed.down": RowwiseParallel()}
ATTENTION: dict[str, Any] = {f"block.attention.{name}": ColwiseParallel() for name in "qkv"} | {
    "block.attention.o": RowwiseParallel()
}
EMBEDDING: dict[str, Any] = {"words": RowwiseParallel(input_layouts=Replicate())}
OUT: dict[str, Any] = {"out": ColwiseParallel(output_layouts=Replicate())}
#: Between its blocks each rank has a part of the sequence.
SEQUENCE: dict[str, Any] = {
    "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "block.norm": SequenceParallel(), "block.norm_2": SequenceParallel(), "norm": SequenceParallel(),
    "block.attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    **ATTENTION, "block.attention.o": RowwiseParallel(output_layouts=Shard(1)),
    "block.feed": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "block.feed.up": ColwiseParallel(), "block.feed.down": RowwiseParallel(output_layouts=Shard(1)),
    "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}  # fmt: skip
LOSS: dict[str, Any] = {**SEQUENCE, "out": ColwiseParallel(input_layouts=Shard(1), use_local_output=False)}
OUTPUT: dict[str, Any] = {
    "block": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
    "norm": SequenceParallel(), "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}  # fmt: skip


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def train(plan: dict[str, Any], mesh: Any, device: torch.device, in_parts: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    model = Model().double()
    words, wanted = torch.randint(WORDS, (2, 3, BATCH, LENGTH))
    model = parallelize_module(model.to(device), mesh["tp"], plan)
    # not by Adam, which makes a step of what rounding leaves of a gradient of zero, such as that of the keys' bias
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for x, y in zip(words.to(device), wanted.to(device), strict=True):
        logits = model(x).flatten(0, 1)
        if in_parts:
            with loss_parallel():
                loss = F.cross_entropy(logits, y.flatten())
                loss.backward()
        else:
            loss = F.cross_entropy(logits, y.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [whole(x).detach() for x in [*losses, *model.parameters()]]


PROGRAMS: dict[str, Callable[[Any, torch.device], list[Tensor]]] = {
    "columns and rows": lambda mesh, device: train(FEED, mesh, device),
    "attention": lambda mesh, device: train(FEED | ATTENTION, mesh, device),
    "embedding": lambda mesh, device: train(EMBEDDING | OUT, mesh, device),
    "sequence parallel": lambda mesh, device: train(SEQUENCE, mesh, device),
    "loss parallel": lambda mesh, device: train(LOSS, mesh, device, in_parts=True),
    "an output in parts": lambda mesh, device: train(OUTPUT, mesh, device),
}
