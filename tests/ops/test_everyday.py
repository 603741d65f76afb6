"""Lines that programs are full of, each on a node as on the local CPU. To try another, add a line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from differential import as_local, leaves, on_places
from homes import HERE, Home

import disttensor as dt

pytestmark = pytest.mark.usefixtures("clean")

NUMBERS = """
f"{x.sum():.4f} {s:10.2e}|{n}|{n:5d}|{s}|{s:>10}"
"%.3f %d" % (s, n)
x.tolist(), s.tolist(), t.tolist(), z.tolist(), h.tolist()
float(s), int(n), bool(s), complex(s), float(x[0, 0]), int(rows[1]), s.item(), n.item()
abs(s), -n, +n, n << 1, n >> 1, 3 % n, 2**s, 2 / s, 2 - s, n // 2, ~n, n & 1, n | 4, n ^ 2
s > 0.0 and True, not s, s if s > 0 else -s, s == 0.5, bool(n == 3), n in (1, 2, 3), {3: "a"}[n.item()]
list(range(n)), [1, 2, 3, 4][n], "ab" * n, list(range(10))[n:], (n, 2) == (3, 2)
max(v), min(v), sum(v), sorted(v), max(s, n), list(reversed(v)), sum(x), any(v > 0), all(v > 0)
v[0] in v, 100.0 in v, bool((x == x).all()), x.eq(y).any().item(), x.equal(x), x.allclose(y)
torch.tensor([s, n]).tolist(), torch.tensor([[s, 1.0], [2.0, n]]).tolist(), torch.tensor([s, n]).device.type
torch.tensor([s, n], device=dev), torch.tensor([int(n), 2], device=dev), x.new_tensor([s, n])
torch.Tensor([s, n]).tolist()
torch.as_tensor([s, n]).tolist(), torch.FloatTensor([s, n]).tolist(), torch.as_tensor(x), torch.asarray(x)
torch.Size([n, 2]), torch.zeros(tuple(rows.tolist()), device=dev), torch.Size(rows.tolist())
torch.zeros(2, n, device=dev)
"""
TENSORS = """
len(x), [r.sum().item() for r in x], list(v), [i for i, _ in enumerate(x)], list(zip(v, rows)), dict(enumerate(v))
a, *b = x; (a, b)
x.shape, x.size(0), x.ndim, x.numel(), x.nelement(), x.element_size(), x.nbytes, x.itemsize, x.stride(), x.dim()
x.is_leaf, x.is_floating_point(), x.is_complex(), x.is_contiguous(), x.is_signed(), x.is_conj(), x.is_pinned()
x.dim_order()
torch.is_tensor(x), isinstance(x, torch.Tensor), torch.numel(x), torch.is_nonzero(s), torch.result_type(x, n)
x.is_same_size(y)
x[t], x[t.cpu()], x[rows], x[rows.cpu()], x[[0, 2]], x[1], x[-1], x[..., 0], x[None], x[:, 1:3], x[::2], x[1, 2]
x[rows, cols]
x[n], x[n.cpu()], x[int(n)], v[n:], v[:n], x[x > 0], x[(x > 0) & (x < 1)], x[~t], x[:, v > 0], x[rows][:, cols]
x[[True, False, True, False]]
x[t] = 0; x
x[t.cpu()] = 1.0; x
x[0] = v; x[:, 1] = 5; x[rows] += 1; x
x[0, 0] = s; x[1] = 3; x[t] = x[t] * 2; x
x[...] = 0; x[-1, -1] = 1; x[rows.cpu()] = 2; x[:, v > 0] = v[v > 0]; x
x.data[0] = 3; x
x += 1; x -= s; x *= 2; x /= 3; x **= 2; x //= 1; x
x.add_(1).mul_(2).clamp_(min=0).sqrt_()
x.new_zeros(3), x.new_full((2,), 3), x.double(), x.long(), x.to(torch.half), x.bfloat16(), x.type_as(n)
x.type(torch.float64)
x.cpu().tolist(), x.to("cpu").tolist(), x.to(device="cpu", dtype=torch.float64).tolist(), x.to(v), x.float() is x
x.to(x.device) is x
torch.stack([r for r in x]), torch.stack([x] * 200), torch.cat([x] * 50), torch.stack([x, y], -1)
torch.vstack([x, v]), torch.hstack([v, v])
torch.where(x > 0, x, 0.0), torch.where(x > 0, 1, 0), torch.where(t), torch.nonzero(t), t.nonzero(as_tuple=True)
torch.argwhere(t)
x.topk(2), x.sort(), x.max(1), x.min(0), x.median(), x.unique(), x.mode(), torch.unique(tokens, return_counts=True)
x.max(1).indices
x.split(2), x.chunk(3), x.unbind(), torch.meshgrid(v, v, indexing="ij"), torch.broadcast_tensors(x, v)
torch.cartesian_prod(v, v)
torch.arange(n, device=dev), torch.full((2,), s.item(), device=dev), torch.linspace(0, 1, 5, device=dev)
torch.zeros_like(x)
x.T, x.mT, z.H, z.real, z.imag, z.conj(), z.abs(), x.detach(), x.clone(), x.contiguous(), x.data
F.one_hot(rows), F.pad(x, (1, 1)), F.normalize(x), F.cosine_similarity(x, y), F.interpolate(img, scale_factor=2)
F.unfold(img, 2)
F.interpolate(img, size=(5, 5), mode="bilinear"), F.pixel_shuffle(torch.cat([img] * 4, 1)[:, :4], 2)
torch.einsum("ij,kj->ik", x, y)
torch.nn.utils.rnn.pad_sequence([v, v[:3]], batch_first=True)
torch.nn.utils.rnn.unpad_sequence(b, torch.tensor([3, 2]), True)
torch.nn.utils.rnn.pack_sequence([v[:, None], v[:3, None]]).data
torch.nn.utils.rnn.pack_sequence([v, v[:3]]).batch_sizes.tolist()
p = torch.nn.utils.rnn.pack_padded_sequence(b, [4, 2], True); torch.nn.utils.rnn.pad_packed_sequence(p, True)[0]
"""
GRADIENTS = """
g = x.requires_grad_(); torch.autograd.grad((g * g).sum(), g)
torch.autograd.functional.jacobian(torch.sin, v), torch.autograd.functional.hessian(lambda a: (a**3).sum(), v)
torch.autograd.functional.vjp(torch.sin, v, v), torch.autograd.functional.jvp(torch.sin, v, v)
torch.autograd.functional.hvp(lambda a: (a**3).sum(), v, v)
torch.autograd.functional.vhp(lambda a: (a**3).sum(), v, v)
torch.autograd.gradcheck(torch.sin, v.double().requires_grad_())
torch.autograd.gradgradcheck(torch.sin, v.double().requires_grad_())
"""


@on_places(NUMBERS, TENSORS, GRADIENTS)
def test_as_local(program: str, name: str) -> None:
    as_local(program, name)


def test_numpy() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    r = x.to("node:1")
    assert np.array_equal(np.asarray(r.cpu()), x.numpy())
    assert np.array_equal(r.numpy(force=True), x.numpy())
    assert np.float64(r[1, 2]) == 5.0
    for wrong in (r.numpy, lambda: np.asarray(r), lambda: np.array([r[0, 0], 1.0])):
        with pytest.raises(TypeError, match=r"use x\.cpu\(\)\.numpy\(\)"):
            wrong()


NUMPY = """
a = np.array(2.0); x + a, x - a, x * a, x / a, p**a, x // a, x % a, x == a, rows + a, rows * a, rows / a, rows**a
a = np.array(2.0); a / p, a / rows, a == x
a = np.array(3); x + a, x / a, rows + a, rows / a, rows & a, rows | a, rows << a, rows // a, rows % a
a = np.array(True); x + a, x - a, rows - a, rows & a
a = np.array(1j); x + a, x * a, rows - a
a = np.array(2, np.float16); x + a, x * a, rows + a
x += np.array(1.0); x
i = np.int64(2); i * x[0, 0], np.float32(2) * x, np.float64(2) - x, np.float64(2) / p, i**rows, np.float64(0) < x
np.bool_(True) + x, np.bool_(True) * rows, x * np.float32(3), np.float64(0.5) == x, rows % np.int64(2)
torch.where(x > 0, x, np.float64(1)), x.new_tensor(np.array(2.0))
torch.as_tensor(np.array(2), device=dev)
"""


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
@on_places(NUMPY)
def test_numbers_of_numpy(program: str, name: str) -> None:
    as_local(program, name)


@pytest.mark.parametrize("wrong", [np.exp, np.add.reduce, lambda x: x + np.ones(3), lambda x: np.ones(3) * x])
def test_arrays_of_numpy(wrong: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(TypeError, match=r"use x\.cpu\(\)\.numpy\(\)"):
        wrong(torch.ones(3, device="node:1"))


def test_copies(home: Home) -> None:
    for where in (home, HERE):
        x = torch.nn.Parameter(where.send(torch.ones(3)))
        y = copy.copy(x)
        assert y.requires_grad
        assert copy.deepcopy(x).is_leaf
        assert hash(x) == hash(x) != hash(y)
        assert {x: 1}[x] == 1
        with torch.no_grad():
            y[0] = 5
        assert where.seen(x[0]) == 5


def test_packed_sequences(home: Home) -> None:
    results = []
    for where in (home, HERE):
        torch.default_generator.manual_seed(1)
        rnn = torch.nn.RNN(3, 4, batch_first=True, bidirectional=True)
        where.differ(rnn.to(where.device))
        x = where.send(torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(2)).requires_grad_())
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([2, 5, 3]), True, enforce_sorted=False)
        out, last = rnn(packed)
        padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        (padded.sum() + last.square().sum()).backward()
        results.append((padded, last, lengths.tolist(), x.grad, rnn.weight_hh_l0.grad))
    home.same(*results)


def test_grad_modes(home: Home) -> None:
    results = []
    for where in (home, HERE):
        x, _ = where.send(leaves())
        out = []
        for mode in (torch.no_grad(), torch.enable_grad(), torch.set_grad_enabled(False), torch.inference_mode()):
            with mode:
                y = x * 2
            out.append((y, y.is_inference()))
        with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="returned nan values"):
            (x - x).sqrt().mul(0).sum().backward()
        results.append(out)
    home.same(*results)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_collate(kind: type, home: Home) -> None:
    batch = [{"a": home.send(torch.ones(2) * i), "b": i} for i in range(3)]
    items = batch if kind is dict else [kind(d.values()) for d in batch]
    made = torch.utils.data.default_collate(items)
    a, b = made.values() if kind is dict else made
    assert isinstance(a, dt.DistributedTensor)
    home.same(a, torch.arange(3.0)[:, None].expand(3, 2), strides=False)
    assert b.tolist() == [0, 1, 2]
