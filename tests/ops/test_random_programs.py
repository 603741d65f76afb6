"""Random programs on tensors that share memory: the same values, shapes and errors as here, and nothing is left.

On a mesh whose ranks have different values each rank does what is done here with its values. What a program learns of
its tensors, as bytes, numbers or shapes, all ranks have to have in common: where the local runs learn different things
the mesh raises RanksDiffer and has done nothing, and it raises that nowhere else.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Sequence

import pytest
import torch
from equal import at_rank, bits, same, send
from homes import RANKS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import disttensor as dt
from disttensor import testing

pytestmark = pytest.mark.usefixtures("clean")

index = st.integers(0, 7)
NAMES = (
    *("select", "slice", "stepped", "transpose", "unsqueeze", "squeeze", "flatten", "diagonal", "unfold"),
    *("mul_", "add_other_", "copy_", "fill_", "setitem", "mask", "exp", "matmul", "clone", "detach", "drop"),
    *("t_", "unsqueeze_", "squeeze_", "transpose_", "as_strided_", "resize_", "set_", "set_part", "set_storage"),
    *("set_data", "share_data", "swap", "deepcopy", "copy", "grad", "parameter", "held"),
)
#: What Python learns something by.
ASKING = ("there_and_back", "saved", "pickled", "item", "truth", "chosen")
STEPS = st.tuples(st.sampled_from((*NAMES, *ASKING * 3)), index, index, index)


Step = tuple[str, int, int, int]


def step(pool: list[torch.Tensor], learned: list[object], name: str, i: int, j: int, k: int) -> str | None:
    """Does one step of a program on a pool of tensors, and says if it ended with an error.

    What Python gets to know of values is appended to ``learned``.
    """
    x = pool[i % len(pool)]
    y = pool[j % len(pool)]
    d = j % x.dim() if x.dim() else 0
    try:
        match name:
            case "select":
                pool.append(x.select(d, k % max(x.shape[d], 1)) if x.dim() else x[None])
            case "slice":
                pool.append(x.narrow(d, 0, k % (x.shape[d] + 1)) if x.dim() else x.view(1))
            case "stepped":
                pool.append(x[k % 2 :: 2] if x.dim() else x.view(1))
            case "transpose":
                pool.append(x.transpose(d, k % x.dim()) if x.dim() else x.t())
            case "unsqueeze":
                pool.append(x.unsqueeze(d) if x.dim() < 5 else x)
            case "squeeze":
                pool.append(x.squeeze())
            case "flatten":
                pool.append(x.flatten())
            case "diagonal":
                pool.append(x.diagonal() if x.dim() > 1 else x)
            case "unfold":
                pool.append(x.unfold(d, 1 + k % 2, 1) if 0 < x.dim() < 5 else x)
            case "detach":
                pool.append(x.detach())
            case "clone":
                pool.append(x.clone())
            case "mul_":
                x.mul_(1 + k / 4)
            case "add_other_":
                x.add_(y, alpha=k / 8)
            case "copy_":
                x.copy_(y.clone())
            case "fill_":
                x.fill_(k)
            case "setitem":
                x[k % max(x.shape[0], 1)] = k if x.dim() else 0
            case "mask":
                x[x > k] = -1.5
            case "t_":
                x.t_()
            case "unsqueeze_":
                x.unsqueeze_(d) if x.dim() < 5 else x.zero_()
            case "set_data":
                x.data = y.detach() * 0.5
            case "share_data":
                x.data = y
            case "set_":
                x.set_(y)
            case "set_part":
                x.set_(y, 0, y.shape[:1], y.stride()[:1]) if y.dim() else x.set_()
            case "set_storage":
                x.set_(y.untyped_storage(), y.storage_offset(), (int(y.numel() > 0),), (2,))
            case "resize_":
                x.resize_(1 + j % 4, 1 + k % 4).fill_(k)
            case "as_strided_":
                x.as_strided_(x.shape[-1:], x.stride()[-1:]) if x.dim() else x.t_()
            case "squeeze_":
                x.squeeze_()
            case "transpose_":
                x.transpose_(d, k % x.dim()) if x.dim() else x.t_()
            case "swap":
                if x is not y:
                    a, b = x.detach(), y.detach()
                    torch.utils.swap_tensors(a, b)
                    pool.append(a)
            case "deepcopy":
                pool += copy.deepcopy([x, y] if k % 2 else [x, x[:1], y])
            case "copy":
                pool.append(copy.copy(x))
            case "there_and_back":
                where = x.device
                learned.append(bits(x.data.cpu()))
                x.data = x.data.cpu() if where.type == "node" else x.data.clone()
                x.mul_(2)
                x.data = x.data.to(where) if where.type == "node" else x.data.clone()
            case "saved":
                file = io.BytesIO()
                torch.save([x, y], file)
                learned.append(file.getvalue())
                file.seek(0)
                pool += torch.load(file, map_location=x.device)
            case "pickled":
                back = pickle.loads(pickle.dumps(x))
                pool.append(back.to(x.device, copy=True))
                learned += [z.cpu().untyped_storage().tolist() for z in (back, *getattr(back, "held", ()))]
            case "grad":
                w = x.detach().requires_grad_()
                (w * y).sum().backward()
                pool.append(w.grad.detach())
            case "parameter":
                layer = torch.nn.Module()
                layer.p, layer.q = torch.nn.Parameter(x), torch.nn.Parameter(y)
                layer.double().float()
                pool += [layer.p.detach(), copy.deepcopy(layer).q.data]
            case "held":
                x.held = [y.detach(), x.detach()]  # type: ignore[attr-defined]
            case "item":
                total = x.sum()
                pool.append(x + total.item())
                learned.append(bits(total.cpu()))
            case "truth":
                learned.append(bool((x > k).any()))
                if learned[-1]:
                    x.neg_()
            case "chosen":
                pool.append(x[x > k])
            case "drop":
                if len(pool) > 1:
                    pool.pop(i % len(pool))
            case "exp":
                pool.append((x / 8).sigmoid())
            case "matmul":
                pool.append(x @ y)
    except dt.errors.RanksDiffer:
        return "the ranks differ"
    except (RuntimeError, IndexError, AssertionError):
        return "error"
    return None


def start(rank: int = 0) -> list[torch.Tensor]:
    """Two that differ between ranks, and two that are the same; of the larger ones a mesh compares hashes."""
    long = torch.arange(1100.0)
    return [torch.arange(24.0).reshape(4, 6).roll(rank), long * (1 + rank), long - 7, torch.arange(6.0) - 2]


def shapes(pool: Sequence[torch.Tensor]) -> list[torch.Size]:
    return [x.shape for x in pool]


def used() -> list[testing.Usage]:
    """What there is on the nodes."""
    gc.collect()  # tracebacks of the errors that were caught
    dt.synchronize()
    return [testing.usage(node) for node in range(RANKS)]


def strides(x: torch.Tensor) -> list[int]:
    """Those that mean something; for dimensions of one element the meta device has a mind of its own."""
    return [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1 and x.numel()]


def check(program: list[Step], remote: list[torch.Tensor], pools: list[list[torch.Tensor]]) -> None:
    """Runs a program on ``remote``, and here on the pool of each of its ranks; one that is on a node has one."""
    for each in program:
        before = pools
        pools = copy.deepcopy(pools)
        learned: list[list[object]] = [[] for _ in pools]
        outcomes = [step(pool, known, *each) for pool, known in zip(pools, learned, strict=True)]
        told = [(known, shapes(pool)) for known, pool in zip(learned, pools, strict=True)]
        alike = all(of_rank == told[0] for of_rank in told)
        assert step(remote, [], *each) == (outcomes[0] if alike else "the ranks differ"), each
        if not alike:
            pools = before
        assert shapes(remote) == shapes(pools[0]), each
    for rank, pool in enumerate(pools):
        mine = [at_rank(x, rank) for x in remote] if len(pools) > 1 else remote
        same(mine, pool, strides=False, path=f"rank {rank}")
        assert [strides(x) for x in mine] == [strides(x) for x in pool]


def check_on_a_node(program: list[Step]) -> None:
    before = used()
    check(program, send(start(), "node:1"), [start()])  # type: ignore[arg-type]
    assert used() == before, "something is left on the node"


def check_on_a_mesh(program: list[Step]) -> None:
    before = used()
    pools = [start(rank) for rank in range(RANKS)]
    there = dt.mesh(rank=RANKS, device="cpu")
    check(program, [dt.meshes.from_shards(there, values) for values in zip(*pools, strict=True)], pools)
    assert used() == before, "something is left on a node"


ordinary = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@settings(ordinary, max_examples=16)
@given(st.lists(STEPS, max_size=25))
def test_random_programs(program: list[Step]) -> None:
    check_on_a_node(program)


@pytest.mark.timeout(600)  # a program that fails is made shorter for minutes
@settings(ordinary, max_examples=16)
@given(st.lists(STEPS, min_size=10, max_size=25))
def test_random_programs_on_a_mesh(program: list[Step]) -> None:
    check_on_a_mesh(program)


def test_what_a_pickled_tensor_holds_on_a_mesh() -> None:
    """A copy of a tensor that differs between ranks, which one that does not differ holds."""
    check_on_a_mesh([("held", 2, 0, 0), ("pickled", 2, 0, 0)])


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(ordinary, max_examples=300, derandomize=False, print_blob=True)
@given(st.lists(STEPS, max_size=40))
def test_many_random_programs(program: list[Step]) -> None:
    check_on_a_node(program)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(ordinary, max_examples=300, derandomize=False, print_blob=True)
@given(st.lists(STEPS, max_size=40))
def test_many_random_programs_on_a_mesh(program: list[Step]) -> None:
    check_on_a_mesh(program)
