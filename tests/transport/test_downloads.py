"""Small downloads: the elements of a tensor come with the reply to a question, as a value does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from equal import same
from limits import HANG

import disttensor as dt
from disttensor import testing
from disttensor.runtime.channel.payload import DTYPES
from disttensor.runtime.node.state import NodeState
from disttensor.runtime.process.observing import MessageSent, WaitEnded
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.dtypes import IDS
from disttensor.session import current
from disttensor.session.transfers import NOTED

LOCAL = torch.arange(1.0, 25.0).reshape(2, 3, 4)
#: A tensor on a place, and the same one here.
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in order": lambda x: x,
    "a part": lambda x: x[:, 1:],
    "transposed": lambda x: x.transpose(0, 2),
    "each second": lambda x: x[..., ::2],
    "one element": lambda x: x[0, 0, 0],
    "none": lambda x: x[:0],
    "expanded": lambda x: x[:1].expand(5, 3, 4),
    "a lazy conjugate": lambda x: (x * (1 + 2j)).conj(),
    "a lazy negative": lambda x: (x * (1 + 2j)).conj().imag,
    "computed": lambda x: x.sum(0),
}
#: Ways by which a tensor comes, and the same with a local one.
WAYS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any]]] = {
    "cpu": (lambda x: x.cpu(), torch.clone),
    "to": (lambda x: x.to("cpu"), torch.clone),
    "to, by name": (lambda x: x.to(device=torch.device("cpu")), torch.clone),
    "to, at once": (lambda x: x.to("cpu", non_blocking=True), torch.clone),
    "to another dtype": (lambda x: x.to("cpu", torch.complex128), lambda x: x.to(torch.complex128)),
    "in another format": (lambda x: x.cpu(memory_format=torch.contiguous_format), torch.Tensor.contiguous),
    "numpy": (lambda x: torch.from_numpy(x.numpy(force=True)), torch.clone),
    "tolist": (lambda x: torch.tensor(x.tolist()).reshape(x.shape), torch.Tensor.contiguous),
    "copy_": (lambda x: torch.empty(x.shape, dtype=x.dtype).copy_(x), torch.Tensor.contiguous),
}


GATE = threading.Event()


def pass_gate() -> None:
    assert GATE.wait(HANG)


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=2, launcher="inproc", simulate_cuda=1):
        dt.fetch(torch.ones(1, device="node:0")).add_done_callback(lambda work: None)  # starts the callbacks' thread
        yield


@pytest.mark.parametrize("place", ["node:0", "cuda", "mesh"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_comes(session: None, kind: str, place: str) -> None:
    devices: dict[str, Any] = {"cuda": dt.device(1, "cuda:0"), "mesh": dt.mesh(dp=2).device}
    device = devices.get(place, place)
    remote, local = KINDS[kind](LOCAL.to(device)), KINDS[kind](LOCAL)
    with testing.MessageLog() as log:
        for way, (come, twin) in WAYS.items():
            got, wanted = come(remote), twin(local.resolve_conj().resolve_neg())
            assert torch.equal(got, wanted), way
            assert got.dtype == wanted.dtype, way
            assert not got.numel() or got.stride() == wanted.stride(), way
    assert "Send" not in log.commands


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_dtypes(session: None, dtype: torch.dtype) -> None:
    local = torch.tensor([0, 0, 1, 0] * 8, dtype=torch.uint8).view(dtype)
    with testing.MessageLog() as log:
        got = local.to("node:1").cpu()
    assert log.replies == ["Downloaded"]
    assert got.dtype == dtype
    assert got.view(torch.uint8).tolist() == local.view(torch.uint8).tolist()
    assert not got._is_view()


@pytest.mark.parametrize("place", ["node:0", "cuda"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_fetched(session: None, kind: str, place: str) -> None:
    device: Any = dt.device(1, "cuda:0") if place == "cuda" else place
    remote, local = KINDS[kind](LOCAL.to(device)), KINDS[kind](LOCAL).resolve_conj().resolve_neg().clone()
    with testing.MessageLog() as log, torch.inference_mode():
        work = dt.fetch(remote)
        got = work.result()
        assert work.result() is got
    assert torch.equal(got, local)
    assert got.dtype == local.dtype
    assert not got.numel() or got.stride() == local.stride()
    assert (got._is_view(), got.requires_grad, got.is_inference()) == (False, False, False)
    assert "Send" not in log.commands
    assert log.replies.count("Downloaded") == 1


def test_fetches_before_any_wait_leave_together(session: None) -> None:
    """Where their node is busy; the first ones leave at once, as it may not be."""
    xs = [torch.full((3,), float(i), device="node:1") for i in range(40)]
    dt.synchronize()
    GATE.clear()
    with testing.MessageLog() as log:
        busy = dt.submit(pass_gate, node=1)
        works = [dt.fetch(x) for x in xs]
        before = log[1].messages
        GATE.set()
        assert [work.result().tolist() for work in reversed(works)] == [[i] * 3 for i in range(39, -1, -1)]
    busy.result()
    assert log[1].commands.count("Download") == 40
    assert before < 16


def test_a_fetch_ends_though_nobody_waits(session: None) -> None:
    ended, x = threading.Event(), torch.ones(3, device="node:1")
    dt.fetch(x).add_done_callback(lambda work: ended.set())
    assert ended.wait(HANG)
    work = dt.fetch(x)
    while not work.is_completed():
        threading.Event().wait(0.001)
    assert work.result().tolist() == [1.0] * 3


def test_observers_are_told_whose_answer_a_wait_was_for(session: None) -> None:
    seam, waits, sent = current.session().link.seam, list[WaitEnded](), list[MessageSent]()
    x = torch.ones(3, device="node:1")
    dt.synchronize()
    with seam.waited.heard_by(waits.append), seam.sent.heard_by(sent.append):
        dt.fetch(x).wait()
    commands = [command for it in sent for command in codec.decode_batch(it.message).commands]
    (question,) = [command for command in commands if type(command) is c.Download]
    assert {it.request for it in waits} == {question.request}


def test_a_fetch_of_what_arrives_holds_nothing(session: None) -> None:
    """Of a tensor that another node has yet to send: the node goes on, and who writes it then waits."""
    x, y = torch.ones(3, device="node:0"), torch.ones(3, device="node:1")
    dt.synchronize()
    GATE.clear()
    busy = dt.submit(pass_gate, node=0)
    moved, failed = (x + 1).to("node:1"), x[torch.tensor([5], device="node:0")].to("node:1")
    works = [dt.fetch(moved), dt.fetch(failed)]
    assert (y + 1).sum().item() == 6
    assert not any(work.is_completed() for work in works)
    moved.add_(1)
    GATE.set()
    assert works[0].result().tolist() == [2.0] * 3
    assert moved.cpu().tolist() == [3.0] * 3
    with pytest.raises(IndexError, match="out of bounds"):
        works[1].wait()
    busy.result()


def test_what_has_come_is_a_tensor_of_its_own(session: None) -> None:
    """Not a view, which inference mode would not detach, nor on memory that cannot grow."""
    x = torch.ones(2, 2, device="node:0")
    for got in (x.cpu(), x.to(torch.complex32).cpu()):
        assert (got._is_view(), got.requires_grad, got.is_inference()) == (False, False, False)
        got.resize_(100)
        with torch.inference_mode():
            got.detach_()
    with torch.inference_mode():
        assert x.cpu().is_inference()
    x.cpu().zero_()
    same(x, torch.ones(2, 2))


@pytest.mark.parametrize("come", [torch.Tensor.cpu, lambda x: x.to("cpu")], ids=["cpu", "to"])
def test_a_gradient_goes_back(session: None, come: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(3, device="node:0", requires_grad=True)
    (come(x) * 2).sum().backward()
    same(x.grad, torch.full((3,), 2.0))
    with torch.no_grad():
        assert not come(x).requires_grad


def test_modes_see_it(session: None) -> None:
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    x = torch.ones(3, device="node:0")
    with Mode():
        x.cpu()
        x.to("cpu")
    assert [function for function in seen if function in (torch.Tensor.cpu, torch.Tensor.to)] == [
        torch.Tensor.cpu,
        torch.Tensor.to,
    ]


def test_the_error_of_what_has_failed(session: None) -> None:
    x = torch.ones(3, device="node:0")
    failed = x[torch.tensor([5], device="node:0")] + 1
    ways: list[Callable[[], Any]] = [failed.cpu, failed.tolist, dt.fetch(failed).wait, dt.fetch(failed).result]
    for way in (*ways, lambda: failed.to("cpu"), lambda: torch.empty(1).copy_(failed)):
        with pytest.raises(IndexError, match="out of bounds"):
            way()
    assert x.cpu().tolist() == [1.0] * 3


def test_the_ranks_of_a_mesh_have_to_agree(session: None) -> None:
    mesh = dt.mesh(dp=2)
    x = dt.meshes.from_shards(mesh, [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])])
    with pytest.raises(dt.errors.RanksDiffer, match=r"\[1.0, 2.0\] at .*, \[1.0, 3.0\] at "):
        x.cpu()


def test_nothing_comes_while_a_graph_is_recorded(session: None) -> None:
    x = torch.ones(3, device="node:0")
    for read in (x.cpu, x[1:].cpu, lambda: dt.fetch(x)):
        with pytest.raises(dt.errors.GraphError, match="a copy to the master has to wait"), dt.graph(dt.Graph()):
            read()
    assert x[1:].cpu().tolist() == [1.0, 1.0]


def test_both_ends_count_them(session: None) -> None:
    x = torch.ones(3, device="node:0")
    dt.channels.reset_stats()
    x.cpu()
    dt.fetch(x).wait()
    torch.ones(1 << 13).to(dt.mesh(dp=2).device)[:1].cpu()
    rows = {
        (row.at, row.peer): (row.sent.calls, row.sent.bytes, row.received.calls, row.received.bytes)
        for row in dt.channels.stats()
        if row.channel == "commands"
    }
    assert rows == {
        ("master", "node:0"): (1, 1 << 15, 3, 28),
        ("master", "node:1"): (1, 1 << 15, 1, 4),
        ("node:0", "master"): (3, 28, 1, 1 << 15),
        ("node:1", "master"): (1, 4, 1, 1 << 15),
    }


def test_uploads_that_nobody_has_asked_for_are_counted(session: None) -> None:
    """They are noted, and counted a few hundred at a time: what is noted stays little."""
    x, transfers = torch.ones(2), current.session().transfers
    dt.channels.reset_stats()
    for _ in range(2 * NOTED + 3):
        x.to("node:0")
    assert len(transfers._issued) < NOTED
    sent = [row.sent for row in dt.channels.stats() if (row.channel, row.at) == ("commands", "master")]
    assert [(each.calls, each.bytes) for each in sent] == [(2 * NOTED + 3, 8 * (2 * NOTED + 3))]


#: What a node may say in place of three ones.
LIES = {
    "fewer bytes": c.Downloaded(0, (3,), IDS[torch.float32], bytes(8)),
    "another shape": c.Downloaded(0, (1, 3), IDS[torch.float32], bytes(12)),
    "another dtype": c.Downloaded(0, (3,), IDS[torch.int32], bytes(12)),
    "no dtype": c.Downloaded(0, (3,), 1 << 40, bytes(12)),
}


@pytest.mark.parametrize("lie", LIES)
def test_another_tensor_is_refused(monkeypatch: pytest.MonkeyPatch, session: None, lie: str) -> None:
    said, honest = LIES[lie], NodeState.effect

    def effect(self: NodeState, command: c.Command, tensor: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        if not isinstance(command, c.Download):
            return honest(self, command, tensor)
        self.emit(c.Downloaded(command.request, said.shape, said.dtype, said.data))
        return []

    x = torch.ones(3, device="node:1")
    with monkeypatch.context() as patched:
        patched.setattr(NodeState, "effect", effect)
        for way in (x.cpu, dt.fetch(x).wait, dt.fetch(x).result):
            with pytest.raises(dt.DisttensorError, match=rf"^node 1 .* has sent {len(said.data)} bytes of dtype"):
                way()
    assert x.cpu().tolist() == [1.0] * 3
