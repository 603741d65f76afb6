"""The memory of nodes: what torch.node says of it, beside what local torch's allocator says of the same programs; and
how much more it may be, however far the script runs ahead."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from local_peak import local_peak
from mesh_kit import connected

import disttensor as dt
from disttensor import testing
from disttensor.testing import MessageLog

node: Any = torch.node  # type: ignore[attr-defined]
MIB = 1 << 20
#: Bytes of 0-dim tensors and the like, which local torch has for a shorter time, or not at all.
SMALL = 4096


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with connected(2):
        yield


def loop(device: Any) -> object:
    """Temporaries, of which there are three at a time."""
    big = torch.ones(MIB // 4, device=device)
    x = torch.zeros(MIB // 4, device=device)
    for _ in range(200):
        x = x + big
    return x


def dropped(device: Any) -> object:
    """Many tensors that die together, and one of the size of all: they are small, and it is not."""
    many = [torch.ones(MIB // 16, device=device) for _ in range(40)]
    many.clear()
    return torch.ones(10 * MIB // 4, device=device)


def lists(device: Any) -> object:
    """Operators that make many tensors at once, each of them small."""
    many = [torch.ones(MIB // 16, device=device) for _ in range(20)]
    for _ in range(20):
        many = list(torch._foreach_add(many, 1))
    return many


def train(device: Any) -> object:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randn(512, 512).to(device)
    for _ in range(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model, optimizer


PROGRAMS: list[Callable[[Any], object]] = [loop, dropped, lists, train]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_takes_the_memory_that_it_takes_locally(program: Callable[[Any], object]) -> None:
    """At its peak, on a node and on each node of a mesh; the script is far ahead of them."""
    local = local_peak(lambda: program("cpu"))
    mesh = dt.mesh(dp=2)
    for device, ranks in (("node:1", [1]), (mesh.device, [0, 1])):
        gc.collect()  # of a program before: freed in the middle, it would be missing from the peak
        dt.synchronize()
        before = [node.memory_allocated(rank) for rank in ranks]
        node.reset_peak_memory_stats(device)
        kept = program(device)
        peaks = [node.max_memory_allocated(rank) - held for rank, held in zip(ranks, before, strict=True)]
        del kept
        assert all(abs(peak - local) <= SMALL for peak in peaks), (device, peaks, local)
        dt.synchronize()
        assert [node.memory_allocated(rank) for rank in ranks] == before


def test_a_mesh_and_its_nodes_free_for_one_another() -> None:
    """What is dead in one queue is freed before much is made by another one of the same nodes."""
    mesh = dt.mesh(dp=2)
    dt.synchronize()
    before = node.memory_allocated(1)
    node.reset_peak_memory_stats(1)
    for _ in range(40):
        x = torch.ones(MIB // 4, device=mesh.device)
        del x
        y = torch.ones(MIB // 4, device="node:1")
        del y
    assert node.max_memory_allocated(1) - before == MIB


def test_small_tensors_hold_no_more_than_the_limit() -> None:
    """Below 512 KiB nothing is freed before its turn: by the end of a message, 64 MiB hold what was dropped."""
    dt.synchronize()
    before = node.memory_allocated(0)
    node.reset_peak_memory_stats(0)
    x = torch.ones((512 << 10) // 4 - 1, device="node:0")
    for _ in range(600):
        x = x + 1
    assert node.max_memory_allocated(0) - before <= (64 << 20) + 2 * x.nbytes


def test_a_sender_keeps_no_more_than_the_limit_for_a_receiver_that_is_behind(tmp_path: Path) -> None:
    limit, size, count = int(testing.limit("leaving")), 16 * MIB, 22
    assert count * size > limit + 2 * size
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    x = torch.ones(size // 4, device="node:0")
    dt.synchronize()
    before = node.memory_allocated(0)
    node.reset_peak_memory_stats(0)
    behind = threading.Thread(target=lambda: dt.run(fifo.read_text, node=1))
    behind.start()
    try:
        for i in range(count):
            last = (x * i).to("node:1")
        # a node that keeps all is soon done with this; one that waits, as it has to, cannot tell that it does
        with contextlib.suppress(TimeoutError):
            dt.fetch(x[:1] + 1).result(timeout=1.0)
    finally:
        fifo.write_text("go on")
        behind.join()
    assert last[0].item() == count - 1
    assert node.max_memory_allocated(0) - before <= limit + size


# ---- what torch.node says ------------------------------------------------------------------------------------------


def test_memory_is_counted_as_the_tensors_have_it() -> None:
    dt.synchronize()
    before = node.memory_allocated("node:1")
    node.reset_peak_memory_stats("node:1")
    x = torch.zeros(MIB // 4, device="node:1")
    view = x[1:]
    view.add_(1)
    assert node.memory_allocated(1) - before == MIB
    del x
    assert node.memory_allocated(1) - before == MIB  # a view keeps all
    x = view.clone()
    del view
    x.resize_(MIB // 2)
    assert node.memory_allocated(1) - before == 2 * MIB
    y = torch.ones(MIB // 4).to("node:1")
    dt.synchronize()
    stats = node.memory_stats(1)
    assert stats["allocated_bytes.all.current"] - before == 3 * MIB
    assert stats["allocated_bytes.all.peak"] - before == 3 * MIB
    del x, y
    assert node.memory_allocated(1) == before
    assert node.max_memory_allocated(1) - before == 3 * MIB
    node.reset_peak_memory_stats(1)
    assert node.max_memory_allocated(1) == before
    stats = node.memory_stats(1)
    assert stats["allocated_bytes.all.allocated"] - stats["allocated_bytes.all.freed"] == before
    node.reset_accumulated_memory_stats(1)
    assert node.memory_stats(1)["allocated_bytes.all.allocated"] == 0
    assert node.memory_stats_as_nested_dict(1)["allocated_bytes"]["all"]["current"] == before


def test_a_storage_gives_its_memory_back_and_takes_it_again() -> None:
    mesh = dt.mesh(dp=2)
    for device, ranks in (("node:1", [1]), (mesh.device, [0, 1])):
        dt.synchronize()
        before = [node.memory_allocated(rank) for rank in ranks]

        def held(what: Callable[[int], int], ranks: list[int] = ranks, before: list[int] = before) -> set[int]:
            return {what(rank) - had for rank, had in zip(ranks, before, strict=True)}

        node.reset_peak_memory_stats(device)
        x = torch.ones(MIB // 4, device=device)
        part = x[1:]
        part.sum()
        storage = x.untyped_storage().resize_(0)
        y = torch.ones(MIB // 4, device=device)
        assert held(node.memory_allocated) == {MIB}
        assert max(held(node.max_memory_allocated)) <= MIB + SMALL
        storage.resize_(MIB)
        part.fill_(2)
        assert held(node.memory_allocated) == {2 * MIB}
        assert max(held(node.max_memory_allocated)) <= 2 * MIB + SMALL
        del x, part, storage, y
        dt.synchronize()
        assert held(node.memory_allocated) == {0}


def test_a_graph_holds_what_its_outputs_hold() -> None:
    x = torch.ones(MIB // 4, device="node:0")
    g = dt.Graph()
    with dt.graph(g):
        y = x * 2 + 1
    g.replay()
    dt.synchronize()
    held = node.memory_allocated(0)
    node.reset_peak_memory_stats(0)
    for _ in range(5):
        g.replay()
        z = y + 1
    assert z[0].item() == 4
    assert held <= node.memory_allocated(0) <= held + MIB
    assert held + MIB <= node.max_memory_allocated(0) <= held + 2 * MIB
    del y, z


def test_what_has_failed_is_not_counted() -> None:
    dt.synchronize()
    before = node.memory_allocated(1)
    node.reset_peak_memory_stats(1)
    x = torch.ones(MIB // 4, device="node:1")
    index = torch.full((MIB // 8,), MIB, device="node:1")
    bad = x[index]
    with pytest.raises(IndexError):
        bad.sum().item()
    del x, index, bad
    assert node.memory_allocated(1) == before
    assert node.memory_stats(1)["allocated_bytes.all.current"] == before


def test_memory_of_the_process_and_of_the_host() -> None:
    free, total = node.mem_get_info("node:1")
    assert 0 < free < total
    kept = [torch.ones(8 * MIB // 4, device="node:1") for _ in range(16)]
    held = node.memory_reserved(1)
    assert held > 128 * MIB
    assert node.max_memory_reserved(1) >= held - MIB  # the kernel's two figures are not of one moment
    kept.clear()
    node.empty_cache(1)
    assert node.memory_reserved(1) < held - 64 * MIB
    assert node.max_memory_reserved(1) >= held - MIB
    node.reset_peak_memory_stats(1)
    assert node.max_memory_reserved(1) < held - MIB
    assert node.memory_stats(1)["num_ooms"] == 0


def test_a_mesh_has_no_number() -> None:
    mesh = dt.mesh(dp=2)
    numbers = (
        node.memory_allocated,
        node.max_memory_allocated,
        node.memory_reserved,
        node.memory_stats,
        node.mem_get_info,
    )
    for ask in numbers:
        with pytest.raises(dt.DisttensorError, match=rf"\[torch\.node\.{ask.__name__}\(rank\) for rank in \[0, 1\]\]"):
            ask(mesh.device)
    node.reset_peak_memory_stats(mesh.device)
    node.reset_accumulated_memory_stats(mesh.device)
    node.empty_cache(mesh.device)
    said = node.memory_summary(mesh.device)
    assert re.findall(r"^node (\d) cpu", said, re.M) == ["0", "1"]
    with pytest.raises(ValueError, match="node 7 does not exist"):
        node.memory_allocated(7)


# ---- where memory is -------------------------------------------------------------------------------------------------


def several(device: Any) -> list[torch.Tensor]:
    return [torch.ones(MIB // 4, device=device) for _ in range(3)]


def doubled() -> torch.Tensor:
    return torch.ones(2 * MIB // 4).to("node:1") * 2


def layer() -> torch.nn.Module:
    return torch.nn.Linear(1024, 1024).to("node:1")


def line_of(function: Callable[..., object]) -> str:
    return f"{__file__}:{function.__code__.co_firstlineno + 1} in {function.__name__}"


#: A comprehension is a function of its own before Python 3.12 (PEP 709).
COMPREHENSION = ".<locals>.<listcomp>" if sys.version_info < (3, 12) else ""


def test_the_largest_tensors_are_named_by_the_lines_that_made_them() -> None:
    x = several("node:1")
    y = doubled()
    y.sum()
    small = torch.ones(10, device="node:1")
    model = layer()
    said = [line.strip() for line in node.memory_summary("node:1").splitlines()]
    assert f"3.00 MiB  {line_of(several)}{COMPREHENSION}: 3 tensors, the largest float32 (262144,)" in said
    assert f"2.00 MiB  {line_of(doubled)}: float32 (524288,)" in said
    assert f"4.00 MiB  {line_of(layer)}: 2 tensors, the largest float32 (1024, 1024)" in said
    assert "by the lines" not in node.memory_summary("node:1", abbreviated=True)
    assert len(said) <= 5 + 10
    del x, y, small, model


def test_a_large_tensor_is_pickled_and_copied_without_its_line() -> None:
    x = torch.ones(MIB // 4, device="node:0")
    assert torch.equal(pickle.loads(pickle.dumps(x)), x.cpu())
    assert torch.equal(copy.deepcopy(x).cpu(), x.cpu())


def test_frees_of_small_tensors_come_no_earlier() -> None:
    """A large tensor has what is dead freed before it; a small one costs no command more than before."""
    x = torch.ones(100, device="node:0")
    x = x + 1
    dt.synchronize()
    with MessageLog() as log:
        for _ in range(64):
            x = x + 1
        dt.synchronize()
    assert log[0].commands.count("Free") <= 8


def test_the_peak_of_what_a_process_has_in_memory() -> None:
    def peak_from_now_on() -> int:
        node.empty_cache("node:1")  # malloc keeps what is freed, and the kernel counts that
        node.reset_peak_memory_stats("node:1")
        return node.max_memory_reserved("node:1")

    before = peak_from_now_on()
    dt.run(exec, "block = bytearray(64 << 20); block[::4096] = bytes(len(block[::4096])); del block", {}, node=1)
    assert node.max_memory_reserved("node:1") >= before + 60 * MIB
    assert peak_from_now_on() < before + 30 * MIB
