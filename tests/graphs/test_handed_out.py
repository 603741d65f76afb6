"""What a replay hands out: however its memory came about, and however it is kept, it has the values of the last replay.

Each way in which a graph makes a tensor (computed, received, by a collective, over a function's) is tried with each
way in which a program keeps it (itself, views, on a node in a function), on nodes and meshes. What it reads is written
between replays; the expected values are computed here, on local tensors.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import disttensor as dt
from disttensor.collectives import all_reduce_, functional, permute_ranks, send, sendreceive
from disttensor.meshes import Mesh, from_shards

pytestmark = pytest.mark.usefixtures("nodes", "settled")

NODES = 3
Values = list[torch.Tensor]  #: one for each node, or rank


def everything() -> Mesh:
    return dt.mesh(dp=NODES)


def turned() -> Mesh:
    return dt.mesh(dp=NODES, nodes=[2, 0, 1])


@dataclass
class Sources:
    """What graphs read: the same values as one tensor on each node, as one on a mesh, and here."""

    here: Values
    nodes: list[Any]
    mesh: Any
    target: Any  #: on node 2, to be written
    made: Any  #: the same, made by a function

    @classmethod
    def new(cls) -> Sources:
        here = [torch.arange(12.0).view(3, 4) * (k + 1) for k in range(NODES)]
        nodes = [t.to(f"node:{k}") for k, t in enumerate(here)]
        made = dt.run(torch.zeros, 3, 4, node=2)
        return cls(here, nodes, from_shards(everything(), here), torch.zeros(3, 4, device="node:2"), made)

    def write(self) -> None:
        for t in (*self.here, *self.nodes, self.mesh):
            t.add_(1)


def _all_reduced(tensors: list[Any]) -> Any:
    copies = [t * 1 for t in tensors]
    dt.all_reduce(copies)
    return copies[2]


def _around(tensors: list[Any]) -> Any:
    copies = [t * 1 for t in tensors]
    sendreceive(copies)
    return copies[0]


def _sent(s: Sources) -> Any:
    target = torch.empty(3, 4, device="node:2")
    send(s.nodes[1], target)
    return target


#: how a graph makes a tensor, and its values here: of the node that it is on, or of all ranks
WAYS: dict[str, tuple[Callable[[Sources], Any], Callable[[Values], Values]]] = {
    "computed": (lambda s: s.nodes[1] * 2, lambda v: [v[1] * 2]),
    "received": (lambda s: s.nodes[1].to("node:2"), lambda v: [v[1]]),
    "received and cast": (lambda s: s.nodes[1].to("node:2", torch.float64), lambda v: [v[1].double()]),
    "passed on": (lambda s: s.nodes[1].to("node:2").to("node:0"), lambda v: [v[1]]),
    "received over": (lambda s: s.target.copy_(s.nodes[1]), lambda v: [v[1]]),
    "received over nothing": (lambda s: torch.empty(3, 4, device="node:2").copy_(s.nodes[1]), lambda v: [v[1]]),
    "sent": (_sent, lambda v: [v[1]]),
    "received over a function's": (lambda s: s.made.copy_(s.nodes[1]), lambda v: [v[1]]),
    "on a mesh": (lambda s: s.nodes[1].to(everything().device), lambda v: [v[1]] * 3),
    "replicated": (lambda s: dt.meshes.replicate(s.nodes[1], everything()), lambda v: [v[1]] * 3),
    "sharded": (lambda s: dt.shard(s.nodes[1], everything(), dp=0), lambda v: list(v[1].split(1))),
    "of shards": (lambda s: from_shards(everything(), s.nodes), lambda v: v),
    "on another mesh": (lambda s: s.mesh.to(turned().device), lambda v: v),
    "a shard": (lambda s: (s.mesh * 2).at(dp=2), lambda v: [v[2] * 2]),
    "a shard elsewhere": (lambda s: s.mesh.at(dp=2).to("node:0"), lambda v: [v[2]]),
    "all_reduce": (lambda s: dt.all_reduce(s.mesh, over="dp"), lambda v: [sum(v)] * 3),  # type: ignore[list-item]
    "all_reduce_": (lambda s: all_reduce_(s.mesh * 1, over="dp"), lambda v: [sum(v)] * 3),  # type: ignore[list-item]
    "all_gather": (lambda s: dt.all_gather(s.mesh, over="dp"), lambda v: [torch.cat(v)] * 3),
    "reduce_scatter": (lambda s: dt.collectives.reduce_scatter(s.mesh, over="dp"), lambda v: list(sum(v).split(1))),  # type: ignore[attr-defined]
    "broadcast": (lambda s: dt.broadcast(s.mesh, over="dp", src=1), lambda v: [v[1]] * 3),
    "permute_ranks": (lambda s: permute_ranks(s.mesh, over="dp", by=1), lambda v: [v[2], v[0], v[1]]),
    "all_reduce of a list": (lambda s: _all_reduced(s.nodes), lambda v: [sum(v)]),  # type: ignore[list-item]
    "all_gather of a list": (lambda s: functional.all_gather(s.nodes)[2][1], lambda v: [v[1]]),
    "around the ring": (lambda s: _around(s.nodes), lambda v: [v[2]]),
}
#: how a program keeps it
KEEPS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda t: t,
    "a row": lambda t: t[0],
    "turned": lambda t: t.t(),
    "flat": lambda t: t.view(-1),
    "a part of a part": lambda t: t[:, 1:].t()[:2],
    "one of many": lambda t: t.unbind(1)[-1],
    "wider": lambda t: t[:1].expand(2, -1),
    "as bytes": lambda t: t.view(torch.uint8),
    "detached": lambda t: t.detach(),
}


def values(x: Any) -> Values:
    return [t.cpu() for t in x.shards()] if x.device in (everything().device, turned().device) else [x.cpu()]


def same(kept: Any, expected: Values, what: object) -> None:
    for got, wanted in zip(values(kept), expected, strict=True):
        assert torch.equal(got, wanted), what


#: when a program takes what it keeps, in turns; and, if later, whether it holds the whole, too
MOMENTS = ("in the block", "afterwards", "afterwards, alone")


@pytest.mark.parametrize("shift", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2))])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_kept_has_the_values_of_the_last_replay(way: str, shift: int) -> None:
    make, here = WAYS[way]
    s = Sources.new()
    for keep in KEEPS.values():
        keep(make(s))  # first calls ask
    for i, (name, keep) in enumerate(KEEPS.items()):
        moment = MOMENTS[(i + shift) % 3]
        g = dt.Graph()
        with dt.graph(g):
            base = make(s)
            kept = keep(base)
            if moment == "in the block":
                del base
        for k in range(3):
            g.replay()
            if k == 0 and moment != "in the block":
                kept = keep(base)
                if moment == "afterwards, alone":
                    base = None
            same(kept, [keep(v) for v in here(s.here)], (name, moment, k))
            s.write()


@pytest.mark.parametrize("way", ["received", "computed"])
def test_a_view_that_a_stream_has_still_to_make_has_the_values_of_the_last_replay(way: str) -> None:
    """Whether it is there already is a matter of chance."""
    x, stream = torch.arange(24.0, device="node:1" if way == "received" else "node:2"), dt.Stream(node=2)
    expected = torch.arange(24.0)
    for k in range(60):
        g = dt.Graph()
        with dt.graph(g):
            view = (x.to("node:2") if way == "received" else x * 1).view(4, 6)
        g.replay()
        x.add_(1)
        expected.add_(1)
        with dt.stream(stream):
            view * 0.5
        g.replay()
        assert torch.equal(view.cpu(), expected.view(4, 6)), k


@pytest.mark.parametrize("way", ["computed", "received", "on a mesh", "all_reduce"])
@pytest.mark.parametrize("keep", KEEPS)
def test_a_view_of_a_view_that_is_handed_out(keep: str, way: str) -> None:
    """The memory of the one that the graph has made gets the new values, however it lies in it."""
    make, here = WAYS[way]
    s, g = Sources.new(), dt.Graph()
    with dt.graph(g):
        out = KEEPS[keep](make(s))
        out.clone()  # which makes it there
    g.replay()
    seen = out[None]
    for k in range(3):
        s.write()
        g.replay()
        same(seen, [KEEPS[keep](v)[None] for v in here(s.here)], k)


def test_a_copy_that_fails_leaves_no_values_of_another_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a node has no memory for it."""
    x, g = torch.arange(4.0, device="node:1"), dt.Graph()
    with dt.graph(g):
        y = x * 3
    g.replay()
    seen = y[1:]
    x.add_(1)
    g.replay()
    assert seen.tolist() == [6, 9, 12]
    with monkeypatch.context() as patched:

        def lacking(*tensors: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no memory is left")

        patched.setattr(torch.Tensor, "copy_", lacking)
        x.add_(1)
        g.replay()
        for lost in (seen, y, y * 2):
            with pytest.raises(RuntimeError, match="no memory is left"):
                lost.cpu()
    g.replay()
    assert seen.tolist() == [9, 12, 15]
    assert y.tolist() == [6, 9, 12, 15]


def stand(on: str) -> None:
    """Stands still until it may go on."""
    with open(on) as opened:
        opened.read()


@pytest.mark.parametrize("freed", [False, True], ids=["kept", "freed"])
@pytest.mark.parametrize("way", ["received", "computed"])
def test_a_replay_waits_for_no_view_that_a_stream_makes_later(way: str, freed: bool, tmp_path: Path) -> None:
    """The view shows the new values, and the node goes on while its stream stands still."""
    x, stream = torch.arange(24.0, device="node:1" if way == "received" else "node:2"), dt.Stream(node=2)
    g = dt.Graph()
    with torch.inference_mode(), dt.graph(g):  # else the view has its base, which is never freed before it then
        y = x.to("node:2") if way == "received" else x * 1
    g.replay()
    y.sum().item()  # it has arrived
    os.mkfifo(on := tmp_path / "on")
    standing = dt.submit(stand, str(on), node=0)
    try:
        stream.wait_stream(dt.streams.default_stream(0))
        with torch.inference_mode(), dt.stream(stream):
            view = y.view(4, 6)
            view * 0.5
        if freed:
            del y
        for _ in range(2):
            x.add_(1)
            g.replay()
            assert torch.ones(1, device="node:2").item() == 1  # the replay is over
    finally:
        on.write_text("")
    standing.result()
    assert torch.equal(view.cpu(), torch.arange(24.0).view(4, 6) + 2)


@pytest.mark.parametrize("way", ["received", "on a mesh", "all_reduce", "computed"])
def test_what_is_returned_and_kept_is_two_tensors(way: str) -> None:
    """What a graphed function returns is its caller's own: neither a write into what the function has kept, nor a later
    call, changes it."""
    make, here = WAYS[way]
    s = Sources.new()
    stash: dict[str, Any] = {}

    @dt.graphed
    def step(x: Any) -> Any:
        stash["kept"] = make(s)
        return stash["kept"]

    x = s.nodes[0]
    step(x), step(x)
    view = stash["kept"][0]
    for k in range(3):
        result = step(x)
        expected = [v.clone() for v in here(s.here)]
        stash["kept"].mul_(3)
        same(result, expected, k)
        same(view, [3 * v[0] for v in expected], k)
        s.write()
        step(x)
        same(result, expected, k)


@pytest.mark.parametrize("streams", [False, True])
def test_what_a_function_keeps(streams: bool) -> None:
    """A tensor that a function was given and keeps on its node, or returns, sees what replays make of it."""
    s = Sources.new()
    stream = dt.Stream(node=2) if streams else None

    def keep(t: torch.Tensor) -> torch.Tensor:
        import builtins

        builtins.kept_by_a_test = t  # type: ignore[attr-defined]
        return t

    def look() -> torch.Tensor:
        import builtins

        return builtins.kept_by_a_test.clone()  # type: ignore[attr-defined, no-any-return]

    def forget() -> None:
        import builtins

        del builtins.kept_by_a_test  # type: ignore[attr-defined]

    for way in ("computed on it", "received"):
        s.nodes[2] * 2
        g = dt.Graph()
        with dt.graph(g):
            out = s.nodes[2] * 2 if way == "computed on it" else s.nodes[1].to("node:2")
        g.replay()
        returned = dt.run(keep, out, node=2)
        for k in range(3):
            s.write()
            g.replay()
            expected = [s.here[2] * 2 if way == "computed on it" else s.here[1]]
            same(dt.run(look, node=2), expected, (way, k))
            same(returned, expected, (way, k))
            same(out, expected, (way, k))
        dt.run(forget, node=2)
    del stream


def test_what_an_asynchronous_collective_has_written_is_seen() -> None:
    """Between replays an asynchronous collective writes a graph's output, of which a view is kept."""
    s = Sources.new()
    m = everything()
    g = dt.Graph()
    with dt.graph(g):
        out = s.mesh * 2
    g.replay()
    view = out[0]
    for k in range(3):
        s.write()
        g.replay()
        same(view, [v[0] * 2 for v in s.here], k)
        all_reduce_(out, over="dp", async_op=True).wait()
        same(view, [sum(s.here)[0] * 2] * NODES, k)  # type: ignore[index]
    work = all_reduce_(out, over="dp", async_op=True)
    s.write()
    g.replay()
    work.wait()
    same(view, [v[0] * 2 for v in s.here], "behind one")
    assert m.device == out.device


def test_a_view_of_what_a_replay_could_not_make_fails_until_one_makes_it() -> None:
    """It fails as the output does; it never shows what an earlier replay has made."""
    s = Sources.new()
    at = torch.zeros(3, dtype=torch.int64, device="node:1")
    s.nodes[1][at].to("node:2")
    g = dt.Graph()
    with dt.graph(g):
        there = s.nodes[1][at]
        sent = there.to("node:2")
    g.replay()
    views = [there[0], sent[0], sent.t()]
    del sent
    for k in range(3):
        for kept, expected in zip(views, [s.here[1][0], s.here[1][0], s.here[1][[0, 0, 0]].t()], strict=True):
            same(kept, [expected], k)
        at.add_(9)
        g.replay()
        for kept in (*views, there):
            with pytest.raises(IndexError, match="out of bounds"):
                kept.cpu()
        at.zero_()
        s.write()
        g.replay()


def test_nothing_is_left_of_views_that_are_dropped() -> None:
    s = Sources.new()

    def held() -> list[int]:
        gc.collect()
        dt.synchronize()
        return [torch.node.memory_allocated(f"node:{rank}") for rank in range(NODES)]  # type: ignore[attr-defined]

    before = held()
    g = dt.Graph()
    with dt.graph(g):
        out = s.nodes[1].to(everything().device)
    g.replay()
    view = out[0]
    g.replay()
    same(view, [s.here[1][0]] * NODES, "kept")
    del out, view
    g.replay()
    del g
    assert held() == before
