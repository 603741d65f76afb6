"""The models of tools/bench/compiled.py, written with torch alone: what a local step of them takes lies between 0.1 and
20 ms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Made:
    """A model, a batch, and what the batch's results should be."""

    model: nn.Module
    batch: tuple[torch.Tensor, ...]
    labels: torch.Tensor


def classes(n: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, n, shape)


def layers(*sizes: int) -> nn.Sequential:
    parts = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


def small_mlp() -> Made:
    return Made(layers(16, 32, 32, 10), (torch.randn(8, 16),), classes(10, 8))


def mlp() -> Made:
    return Made(layers(64, *[256] * 10, 10), (torch.randn(32, 64),), classes(10, 32))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(y)))


def resnet() -> Made:
    blocks = [Residual(16) for _ in range(4)]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )
    return Made(model, (torch.randn(4, 3, 16, 16),), classes(10, 4))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, width = x.shape
        q, k, v = self.into(x).view(b, n, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, n, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.attention = Attention(width, heads, causal)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class Vit(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.blocks = nn.Sequential(*[Block(width, 4, False) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])  # type: ignore[no-any-return]


def vit() -> Made:
    return Made(Vit(64, 4), (torch.randn(4, 3, 32, 32),), classes(10, 4))


def encoder() -> Made:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    stack = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(100, 64), stack, nn.Flatten(), nn.Linear(64 * 16, 10))
    return Made(model, (classes(100, 4, 16),), classes(10, 4))


class Gpt(nn.Module):
    def __init__(self, words: int, width: int, depth: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        self.blocks = nn.Sequential(*[Block(width, 4, True) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(y))).flatten(0, 1)  # type: ignore[no-any-return]


def gpt() -> Made:
    return Made(Gpt(200, 64, 6), (classes(200, 4, 32),), classes(200, 4 * 32))


class Lstm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(width, width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(x.shape[1:], device=x.device)
        for each in x.unbind():
            h, c = self.cell(each, (h, c))
        return self.head(h)  # type: ignore[no-any-return]


def lstm() -> Made:
    return Made(Lstm(64), (torch.randn(16, 8, 64),), classes(10, 8))


def convolutions(a: int, b: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU(), nn.Conv2d(b, b, 3, padding=1), nn.SiLU()
    )


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([convolutions(3, 8), convolutions(8, 16), convolutions(16, 32)])
        self.up = nn.ModuleList([convolutions(48, 16), convolutions(24, 8)])
        self.head = nn.Conv2d(8, 10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        for part in self.down:
            x = part(x if not seen else F.max_pool2d(x, 2))
            seen.append(x)
        for part, beside in zip(self.up, (seen[1], seen[0]), strict=True):
            x = part(torch.cat([F.interpolate(x, scale_factor=2.0), beside], 1))
        return self.head(x)  # type: ignore[no-any-return]


def unet() -> Made:
    return Made(Unet(), (torch.randn(2, 3, 16, 16),), classes(10, 2, 16, 16))


class Experts(nn.Module):
    """A mixture: each expert computes all tokens, which the gates weigh."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(layers(width, 2 * width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate(x).softmax(-1)
        found = torch.stack([expert(x) for expert in self.experts], -1)
        return x + (found * gates.unsqueeze(-2)).sum(-1)  # type: ignore[no-any-return]


def experts() -> Made:
    return Made(
        nn.Sequential(Experts(64, 4), Experts(64, 4), nn.Linear(64, 10)), (torch.randn(32, 64),), classes(10, 32)
    )


class Dlrm(nn.Module):
    def __init__(self, tables: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(200, width) for _ in range(tables))
        self.bottom = layers(13, 64, 64, width)
        pairs = torch.tril_indices(tables + 1, tables + 1, -1)
        self.rows: torch.Tensor
        self.columns: torch.Tensor
        self.register_buffer("rows", pairs[0])
        self.register_buffer("columns", pairs[1])
        self.top = layers(width + pairs.shape[1], 64, 64, 2)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        parts = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        pairs = (parts @ parts.transpose(1, 2))[:, self.rows, self.columns]
        return self.top(torch.cat([x, pairs], 1))  # type: ignore[no-any-return]


def dlrm() -> Made:
    return Made(Dlrm(26, 16), (torch.randn(64, 13), classes(200, 64, 26)), classes(2, 64))


MODELS: dict[str, Callable[[], Made]] = {
    make.__name__: make for make in (small_mlp, mlp, resnet, vit, encoder, gpt, lstm, unet, experts, dlrm)
}
