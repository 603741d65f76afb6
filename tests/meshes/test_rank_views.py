"""Views at numbers of ranks (``x.narrow(0, 2 * coordinate, 2)``): on each rank what its own number gives, in one
command for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from opcodes import opcodes, without_a_collector

import disttensor as dt
from disttensor.errors import DisttensorError, RanksDiffer
from disttensor.testing import MessageLog

#: Each rank's coordinate along dp.
AT = (0, 0, 1, 1)


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=4, launcher="inproc"):
        yield


@pytest.fixture
def s() -> Iterator[Any]:
    """The coordinate along dp, as torch's DeviceMesh gives it."""
    yield grid().torch.get_local_rank("dp")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def grid() -> dt.meshes.Mesh:
    return dt.mesh(dp=2, tp=2)


def whole() -> torch.Tensor:
    return torch.arange(24.0).view(6, 4)


def written(x: torch.Tensor, s: Any, view: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A tensor of which a view at a number is written, and a view of that."""
    made = x * 1
    view(made).mul_(5)
    return made


VIEWS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "narrow": lambda x, s: x.narrow(0, 3 * s, 3),
    "narrow of columns": lambda x, s: x.narrow(1, 2 * s, 2),
    "torch.narrow": lambda x, s: torch.narrow(x, -1, s, 2),
    "slice": lambda x, s: x[s : s + 2],
    "slice from the end": lambda x, s: x[s - 4 : s - 2],
    "slice with a step": lambda x, s: x[s : s + 4 : 2],
    "empty slice": lambda x, s: x[s:s],
    "columns": lambda x, s: x[:, s : s + 2],
    "select": lambda x, s: x.select(1, s),
    "select from the end": lambda x, s: x.select(0, -1 - s),
    "a view of it": lambda x, s: x[:, s : s + 2].t()[0],
    "of a view": lambda x, s: x[2:].narrow(0, 2 * s, 2).contiguous().view(-1),
    "of such a view": lambda x, s: x.narrow(0, 2 * s, 4).narrow(1, s, 2),
    "its parts": lambda x, s: torch.stack(x.narrow(0, 2 * s, 4).split(2)),
    "its conjugate": lambda x, s: torch.view_as_real(torch.complex(x, x).narrow(0, s, 2).conj().resolve_conj()),
    "computed with": lambda x, s: (x.narrow(0, s, 3) @ x.narrow(0, 2 * s, 4).t()).softmax(0),
    "written": lambda x, s: written(x, s, lambda y: y.narrow(0, 3 * s, 3)),
    "a view of it written": lambda x, s: written(x, s, lambda y: y.narrow(0, 3 * s, 3)[1:].t()),
    "select written": lambda x, s: written(x, s, lambda y: y.select(1, s)),
    "two of them": lambda x, s: written(x, s, lambda y: y.narrow(0, 2 * s, 2).add_(y.narrow(0, 2 * s + 2, 1))),
    "read and written": lambda x, s: written(x, s, lambda y: y.narrow(0, s, 2).add_(y.narrow(0, 4, 2))),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_it_is_each_ranks(s: Any, view: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
    there = whole().to(grid().device).requires_grad_()
    found = view(there, s)
    weights = torch.arange(1.0, found.numel() + 1).view(found.shape)
    (found * weights.to(grid().device)).sum().backward()
    for rank, at in enumerate(AT):
        local = whole().requires_grad_()
        wanted = view(local, at)
        (wanted * weights).sum().backward()
        torch.testing.assert_close(found.shards()[rank].detach().cpu(), wanted.detach(), rtol=1e-6, atol=0)
        torch.testing.assert_close(there.grad.shards()[rank].cpu(), local.grad, rtol=1e-6, atol=1e-12)  # type: ignore[union-attr]
    assert found.stride() == wanted.stride()


def test_it_is_the_same_memory(s: Any) -> None:
    x = whole().to(grid().device)
    part = x.narrow(0, 3 * s, 3)
    x.add_(1)
    part[0].zero_()
    x[s] = 7.0
    for rank, at in enumerate(AT):
        local = whole()
        view = local.narrow(0, 3 * at, 3)
        local.add_(1)
        view[0].zero_()
        local[at] = 7.0
        assert torch.equal(x.shards()[rank].cpu(), local)
        assert torch.equal(part.shards()[rank].cpu(), view)


def test_it_is_one_command(s: Any) -> None:
    x = whole().to(grid().device)
    x.narrow(0, 3 * s, 3)  # sends the table of numbers
    with MessageLog() as log:
        x.narrow(0, 3 * s, 3)
    assert [[each for each in log[k].commands if each != "Free"] for k in range(4)] == [
        ["Call aten::narrow.Tensor"]
    ] * 4
    torch.distributed.destroy_process_group()
    counts = []
    for size in (2, 4):
        m = dt.mesh(dp=size, nodes=list(range(size)))
        number, y = m.torch.get_local_rank("dp"), torch.zeros(8, device=m.device)
        with without_a_collector():
            counts.append(min([opcodes(y.narrow, 0, number, 2) for _ in range(5)]))
        torch.distributed.destroy_process_group()
    assert counts[0] == counts[1]


def test_in_a_graph(s: Any) -> None:
    x = whole().to(grid().device)
    graph = dt.Graph()
    with dt.graph(graph):
        kept = x.narrow(1, 3 * s, 1) * 2
    for _ in range(2):
        x.add_(1)
        graph.replay()
        for rank, at in enumerate(AT):
            assert torch.equal(kept.shards()[rank].cpu(), x.shards()[rank].cpu().narrow(1, 3 * at, 1) * 2)


def test_in_inference_mode(s: Any) -> None:
    x = whole().to(grid().device)
    with torch.inference_mode():
        found = [x.narrow(0, 3 * s, 3), (x * 2).select(1, s)]
        assert not found[0].is_inference()
        wanted = [[whole().narrow(0, 3 * at, 3), (whole() * 2).select(1, at)] for at in AT]
        for rank, of_rank in enumerate(wanted):
            assert all(torch.equal(each.shards()[rank].cpu(), y) for each, y in zip(found, of_rank, strict=True))


REFUSED: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "parts of several sizes": lambda x, s: x[:, s:],
    "all of rank 0's": lambda x, s: x[:, s : s + 4],
    "a length": lambda x, s: x.narrow(0, 0, s + 1),
    "split": lambda x, s: x.split(s + 1),
    "chunk": lambda x, s: x.chunk(s + 1),
    "view": lambda x, s: x.view(s + 1, -1),
    "reshape": lambda x, s: x.reshape(s + 1, -1),
    "expand": lambda x, s: x.expand(s + 1, 6, 4),
    "roll": lambda x, s: x.roll(s, 0),
    "repeat": lambda x, s: x.repeat(s + 1, 1),
    "new_zeros": lambda x, s: x.new_zeros((s + 1, 2)),
    "full": lambda x, s: torch.full((2,), s, device=x.device),
    "unsqueeze": lambda x, s: x.unsqueeze(s),
    "permute": lambda x, s: x.permute(s, 1 - s),
    "unfold": lambda x, s: x.unfold(0, s + 1, 1),
    "diagonal": lambda x, s: torch.diagonal(x, s),
    "as_strided": lambda x, s: x.as_strided((2,), (1,), s),
    "slice_scatter": lambda x, s: x.slice_scatter(x[:2], 0, s, s + 2),
    "clamp": lambda x, s: x.clamp(min=s),
    "sum": lambda x, s: x.sum(s),
    "pad": lambda x, s: torch.constant_pad_nd(x, (s, 1 - s)),
    "of a shard": lambda x, s: x.at(dp=0, tp=0).narrow(0, s, 2),
    "the offset of one rank": lambda x, s: x.as_strided((2,), (1,), x.narrow(0, s, 2).storage_offset()),
}


#: Those whose numbers stand in the key of a call by themselves: once such calls are known, torch's error of a hash.
HASHED = {"slice_scatter"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_such_view_is_refused(s: Any, name: str) -> None:
    x, errors = whole().to(grid().device), (RanksDiffer, TypeError) if name in HASHED else RanksDiffer
    for number in (1, s, 0, s):  # what is known of calls with ordinary numbers changes nothing
        with pytest.raises(errors) if number is s else contextlib.suppress(Exception):
            REFUSED[name](x, number)


def test_an_index_that_some_rank_does_not_have(s: Any) -> None:
    with pytest.raises(IndexError, match=r"index 6 out of range for a dimension of size 6, at dp=1, tp=0"):
        whole().to(grid().device).select(0, 6 * s)


def test_parts_of_several_sizes_are_told_what_to_write(s: Any) -> None:
    with pytest.raises(RanksDiffer, match=r"parts of 3, 4 of 4 entries, .* torch.nn.functional.pad\(x, ...\)"):
        whole().to(grid().device)[:, s:]


def test_a_number_of_another_meshs_ranks(s: Any) -> None:
    other = dt.mesh(a=2, nodes=[1, 3])
    with pytest.raises(
        DisttensorError, match=r"a number of the ranks of the mesh \(dp=2, tp=2\).* is on the mesh \(a=2\)"
    ):
        whole().to(other.device).narrow(0, s, 2)


def test_a_view_that_a_collective_writes_is_not_read_through_another(s: Any) -> None:
    x = whole().to(grid().device)
    part = x.narrow(0, 3 * s, 3)
    work = dt.collectives.all_reduce_(x[:3], over="tp", async_op=True)
    with pytest.raises(RuntimeError, match="wait"):
        part.mul_(2)
    work.wait()
    assert torch.equal(part.shards()[0].cpu(), 2 * whole()[:3])
