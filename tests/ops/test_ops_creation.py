"""Operators that make tensors, against local PyTorch: factories, and random numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from differential import as_local, evaluate, inputs, lines, on_places
from equal import same, send
from homes import Home

import disttensor as dt

pytestmark = pytest.mark.usefixtures("clean")

FACTORIES = """
torch.empty_like(x).shape
torch.zeros_like(x)
torch.zeros_like(x.t())
torch.ones_like(x, dtype=torch.int64)
torch.full_like(x, 2.5)
torch.full_like(i, 3)
x.new_zeros(2, 3)
x.new_ones((2,), dtype=torch.bool)
x.new_full((2, 2), 1.5)
x.new_tensor([1.0, 2.0])
x.new_empty(2, 3).fill_(1)
i.new_tensor([[1, 2]])
torch.zeros(2, 3, device=dev)
torch.ones(3, dtype=torch.int32, device=dev)
torch.full((2, 2), 7, device=dev)
torch.full((2, 2), True, device=dev)
torch.full((2,), -0.0, device=dev)
torch.full((2,), nan, device=dev)
torch.full((2,), 1 + 2j, device=dev)
torch.arange(5, device=dev)
torch.arange(5.0, device=dev)
torch.arange(1, 9, 2, device=dev)
torch.arange(0, 1, 0.1, device=dev)
torch.arange(3, 0, -1, device=dev)
torch.linspace(0, 1, 5, device=dev)
torch.logspace(0, 1, 5, device=dev)
torch.eye(3, device=dev)
torch.eye(3, 4, device=dev)
torch.tensor([[1, 2], [3, 4]], device=dev)
torch.tensor(2.5, device=dev)
torch.tensor([], device=dev)
torch.tensor([1 + 2j], device=dev)
torch.tensor(x.tolist(), device=dev)
torch.as_tensor([1.5, 2], device=dev)
torch.scalar_tensor(4, device=dev)
torch.tril_indices(3, 4, device=dev)
torch.triu_indices(3, 4, device=dev)
torch.hann_window(6, device=dev)
torch.kaiser_window(6, device=dev)
torch.kaiser_window(6, False, device=dev)
torch.kaiser_window(6, periodic=False, beta=8.0, dtype=torch.float64, device=dev)
torch.bartlett_window(6, device=dev)
torch.complex(torch.ones(2, device=dev), torch.zeros(2, device=dev))
torch.empty_strided((2, 3), (1, 2), device=dev).zero_()
torch.empty(2, 3, 4, 4, memory_format=torch.channels_last, device=dev).zero_()
torch.vander(v)
torch.zeros((), device=dev)
torch.zeros(0, 3, device=dev)
torch.arange(0, device=dev)
"""


@on_places(FACTORIES)
def test_as_local(program: str, name: str) -> None:
    as_local(program, name)


# ---- random numbers --------------------------------------------------------------------------------------------------

RANDOM = """
torch.randn(4, 5, device=dev)
torch.rand(4, 5, device=dev)
torch.randint(3, 9, (4, 5), device=dev)
torch.randperm(9, device=dev)
torch.randn_like(x)
torch.rand_like(x)
torch.randint_like(x, 4)
torch.bernoulli(torch.full_like(x, 0.4))
x.bernoulli_(0.3); x
x.uniform_(-1, 1); x
x.normal_(2, 0.5); x
x.exponential_(); x
x.geometric_(0.4); x
x.cauchy_(); x
x.log_normal_(); x
x.random_(); x
x.random_(5); x
torch.normal(x, p)
torch.normal(0.0, p)
torch.normal(1.0, 2.0, (3, 4), device=dev)
torch.poisson(p)
torch.multinomial(p, 3)
torch.multinomial(p, 7, replacement=True)
F.dropout(x, 0.4)
F.dropout(x.t(), 0.4)
F.alpha_dropout(x, 0.3)
F.dropout2d(img, 0.5)
F.feature_alpha_dropout(img, 0.5)
F.gumbel_softmax(x)
F.rrelu(x, training=True)
torch.nn.init.kaiming_uniform_(x); x
torch.nn.init.xavier_normal_(x); x
torch.nn.init.orthogonal_(x); x
torch.nn.init.trunc_normal_(x); x
F.scaled_dot_product_attention(q, kk, vv, dropout_p=0.5)
"""


@pytest.mark.row("M6", "M10")
@pytest.mark.parametrize("program", lines(RANDOM))
def test_draws_of_a_seeded_node_are_those_of_local_cpu(program: str) -> None:
    device = dt.device(1, "cpu")
    remote, theirs = send(inputs(program), device), inputs(program)
    torch.manual_seed(11)
    dt.synchronize()  # here all nodes and the master draw from one generator
    got = evaluate(program, device, remote)
    dt.synchronize()
    torch.manual_seed(11)
    dt.synchronize()
    same(got, evaluate(program, torch.device("cpu"), theirs))


def test_random_statistics() -> None:
    n = 20_000
    for device in ("node:0", "node:1", dt.device(1, "cpu")):
        normal = torch.randn(n, device=device)
        assert abs(normal.mean().item()) < 0.05
        assert abs(normal.std().item() - 1) < 0.05
        uniform = torch.rand(n, device=device)
        assert 0 <= uniform.min().item() < 0.01
        assert 0.99 < uniform.max().item() < 1
        assert abs(torch.full((n,), 0.3, device=device).bernoulli().mean().item() - 0.3) < 0.03
        kept = F.dropout(torch.ones(n, device=device), 0.25)
        assert abs((kept == 0).float().mean().item() - 0.25) < 0.03
        assert torch.equal(kept[kept != 0].cpu().unique(), torch.tensor([1 / 0.75]))
        assert torch.randperm(n, device=device).sort()[0].equal(torch.arange(n, device=device))


def test_two_draws_differ() -> None:
    assert not torch.equal(torch.rand(9, device="node:1"), torch.rand(9, device="node:1"))


def test_a_local_generator_is_refused() -> None:
    with pytest.raises((NotImplementedError, TypeError), match=r"[gG]enerator"):
        torch.rand(3, device="node:1", generator=torch.Generator())


@pytest.mark.row("M10")
def test_generator_state_round_trip() -> None:
    state = torch.node.get_rng_state("node:1")
    first = torch.rand(5, device="node:1").cpu()
    torch.node.set_rng_state(state, "node:1")
    assert torch.equal(torch.rand(5, device="node:1").cpu(), first)


def test_empty_tensors_are_filled_while_that_is_asked_for(home: Home) -> None:
    """By the switch as it is where they are made, though a node makes them at their first use otherwise."""
    torch.use_deterministic_algorithms(True)
    try:
        got, want = ([torch.empty(3, device=d), torch.empty_strided((2, 2), (1, 2), device=d, dtype=torch.int64)]
                     for d in (home.device, "cpu"))  # fmt: skip
    finally:
        torch.use_deterministic_algorithms(False)
    home.same(got, want)
