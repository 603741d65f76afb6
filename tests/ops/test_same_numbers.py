"""Fifty steps on a real node are bit-identical to local CPU with one thread: layers, optimizers, autocast."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from equal import outcome

STEPS = 50
VOCABULARY = 11

pytestmark = pytest.mark.usefixtures("processes")


class Recurrent(nn.Module):
    """Words to a class, by way of a recurrent layer with dropout."""

    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        self.layer = kind(8, 12, num_layers=2, dropout=0.2, batch_first=True, **options)
        self.head = nn.Linear(24 if options.get("bidirectional") else 12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.layer(self.words(x))
        return self.head(out[:, -1])


class Cells(nn.Module):
    """The same by cells, unrolled."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        self.first, self.second = nn.LSTMCell(8, 12), nn.GRUCell(12, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, hidden = None, None
        for word in self.words(x).unbind(1):
            state = self.first(word, state)
            hidden = self.second(state[0], hidden)
        return self.head(hidden)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        self.layer = nn.LSTM(8, 12, bidirectional=True)
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.arange(len(x)) % x.shape[1] + 1
        packed = nn.utils.rnn.pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return self.head(out.sum(1))


class Decoder(nn.Module):
    """A decoder that predicts each word from those before it, by scaled dot product attention."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(7, 16)
        layer = nn.TransformerDecoderLayer(16, 4, 32, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        h = self.words(x) + self.places(torch.arange(n, device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(n, device=x.device)
        return self.head(self.layers(h, h.detach(), tgt_mask=mask, tgt_is_causal=True).mean(1))


class Attention(nn.Module):
    """Attention called as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x)
        q, k, v = (t.view(*x.shape, 2, 8).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(F.rms_norm(h, (16,)).mean(1))


class Pictures(nn.Module):
    """Words as pictures of their own, with whole channels dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.Sequential(
            *(nn.Conv2d(7, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout2d(0.3)),
            *(nn.Conv2d(8, 8, 3, groups=2), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.FeatureAlphaDropout(0.1)),
            *(nn.ConvTranspose2d(8, 4, 2), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 5)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.words(x).view(len(x), 7, 4, 4))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(VOCABULARY, 8, mode=mode) for mode in ("sum", "mean", "max"))
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat, starts = x.reshape(-1), torch.arange(0, x.numel(), x.shape[1], device=x.device)
        first, second, third = self.bags
        return self.head(torch.cat([first(x), second(flat, starts), third(x)], 1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Flatten(), nn.Linear(56, 16), nn.Tanh(), nn.Linear(16, 5))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "LSTM, both ways": lambda: Recurrent(nn.LSTM, bidirectional=True),
    "GRU": lambda: Recurrent(nn.GRU),
    "RNN": lambda: Recurrent(nn.RNN),
    "cells": Cells,
    "packed": Packed,
    "decoder": Decoder,
    "attention": Attention,
    "dropout2d": Pictures,
    "embedding bag": Bags,
}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def losses(
    make: Callable[[], nn.Module],
    device: str,
    optimizer_of: Callable[[Any], torch.optim.Optimizer] = adam,
    amp: bool = False,
    steps: int = STEPS,
) -> list[float]:
    """The losses of fifty steps. Seeded again when the model is in place: the nodes' generators are their own."""
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = optimizer_of(model.parameters())
    torch.manual_seed(1)
    data = torch.Generator().manual_seed(5)
    kind = torch.device(device).type
    region = torch.autocast(kind, torch.bfloat16) if amp else contextlib.nullcontext()
    out = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with region:
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(steps):
        x = torch.randint(0, VOCABULARY, (6, 7), generator=data).to(device)
        y = torch.randint(0, 5, (6,), generator=data).to(device)
        out.append(optimizer.step(closure).detach())
    return [loss.item() for loss in out]


@pytest.mark.parametrize("name", MODELS)
def test_layers(name: str) -> None:
    expected = losses(MODELS[name], "cpu")
    assert losses(MODELS[name], "node:1") == expected
    assert expected[-1] != expected[0]


@pytest.mark.parametrize("name", [*MODELS])
def test_autocast(name: str) -> None:
    # torch's own LSTM raises under autocast where the CPU has no AVX-512
    expected = outcome(lambda: losses(MODELS[name], "cpu", amp=True))
    assert outcome(lambda: losses(MODELS[name], "node:1", amp=True)) == expected
    assert expected != losses(MODELS[name], "cpu")


O = torch.optim  # noqa: E741
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adadelta": lambda p: O.Adadelta(p, lr=0.5, weight_decay=1e-3),
    "Adafactor": lambda p: O.Adafactor(p),
    "Adagrad": lambda p: O.Adagrad(p, lr=1e-2, lr_decay=1e-3, weight_decay=1e-3),
    "Adam": lambda p: O.Adam(p, lr=1e-2, amsgrad=True, weight_decay=1e-3),
    "AdamW": lambda p: O.AdamW(p, lr=1e-2),
    "Adamax": lambda p: O.Adamax(p, lr=1e-2),
    "ASGD": lambda p: O.ASGD(p, lr=1e-2, t0=20),
    "LBFGS": lambda p: O.LBFGS(p, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
    "NAdam": lambda p: O.NAdam(p, lr=1e-2, decoupled_weight_decay=True, weight_decay=1e-3),
    "RAdam": lambda p: O.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: O.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "Rprop": lambda p: O.Rprop(p, lr=1e-3),
    "SGD": lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
}
#: The ways of an optimizer to go over its parameters, where it has them.
WAYS = ("foreach", "fused", "maximize", "differentiable")


def ways() -> Iterator[tuple[str, str]]:
    for name in OPTIMIZERS:
        taken = inspect.signature(getattr(O, name)).parameters
        yield from ((name, way) for way in WAYS if way in taken)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    expected = losses(mlp, "cpu", OPTIMIZERS[name])
    assert losses(mlp, "node:1", OPTIMIZERS[name]) == expected
    assert expected[-1] != expected[0]


@pytest.mark.parametrize(("name", "way"), list(ways()))
def test_ways_of_optimizers(name: str, way: str) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return getattr(O, name)(parameters, **{way: True})

    try:
        expected = losses(mlp, "cpu", make, steps=10)
    except (RuntimeError, AssertionError) as e:  # what local CPU refuses
        with pytest.raises(type(e)):
            losses(mlp, "node:1", make, steps=10)
    else:
        assert losses(mlp, "node:1", make, steps=10) == expected


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "NAdam"])
def test_capturable(name: str) -> None:
    """Refused on the CPU, and taken on nodes: near to what it is without."""
    plain = losses(mlp, "cpu", getattr(O, name), steps=10)
    got = losses(mlp, "node:1", lambda p: getattr(O, name)(p, capturable=True), steps=10)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(plain), rtol=1e-5, atol=1e-6)


def test_every_optimizer_is_here() -> None:
    known = {name for name, value in vars(O).items() if inspect.isclass(value) and issubclass(value, O.Optimizer)}
    assert known - {"Optimizer", "SparseAdam", "Muon"} == set(OPTIMIZERS)


def test_muon() -> None:
    """For matrices only, so beside another."""

    def make(device: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False)).to(device)
        optimizer = O.Muon(model.parameters(), lr=1e-2)
        data = torch.Generator().manual_seed(5)
        out = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(6, 8, generator=data).to(device)).square().mean()
            loss.backward()
            optimizer.step()
            out.append(loss.detach())
        return [loss.item() for loss in out]

    assert make("node:1") == make("cpu")
