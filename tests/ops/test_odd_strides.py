"""A tensor lies on its node as the script takes it to lie, by whichever way it came there.

Torch calls a tensor contiguous whatever the strides of its dimensions of one element, or of all if there is none; some
copies keep such strides, and others do not. So each way in which tensors are made, moved or handed out is tried with
tensors that lie oddly: what the node says of their shape, strides and offset has to be what the proxy says, and their
values have to be those of the same tensor here.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import first_calls
import pytest
import torch

import disttensor as dt
from disttensor.collectives import all_to_all, functional, permute_ranks
from disttensor.meshes import Mesh, from_shards

pytestmark = pytest.mark.usefixtures("nodes", "settled")

NODES = 3
Geometry = tuple[tuple[int, ...], tuple[int, ...], int]


def odd() -> Iterator[torch.Tensor]:
    yield torch.arange(4.0).expand(3, 4)
    yield torch.arange(12.0).view(3, 4)[:1]
    yield torch.arange(4.0).view(4, 1).t()
    yield torch.arange(3.0).unsqueeze(1).expand(3, 2)
    yield torch.arange(24.0).view(3, 8)[:, ::2]
    yield torch.arange(12.0).view(4, 3).t()
    yield torch.arange(4.0)[1:2].as_strided((1, 1), (7, 3))
    yield torch.arange(4.0)[::3][1:]
    yield torch.arange(9.0)[2:].as_strided((3, 1), (2, 5))
    yield torch.empty(3, 4)[:0]
    yield torch.empty(2, 0, 3).transpose(0, 2)
    yield torch.arange(4.0)[2]
    yield torch.arange(24.0).view(2, 3, 4).transpose(1, 2)[:, :1]
    yield torch.arange(24.0)[2:].as_strided((3, 2, 1), (1, 3, 11))


def by_chance(seed: int, count: int = 12) -> Iterator[torch.Tensor]:
    chance = random.Random(seed)
    for _ in range(count):
        t = torch.arange(24.0).view(*chance.choice([(2, 3, 4), (1, 24), (24, 1), (3, 1, 8), (3, 8), (24,)]))
        for _ in range(chance.randrange(1, 6)):
            d = chance.randrange(max(t.dim(), 1))
            match chance.randrange(6) if t.dim() else 0:
                case 0:
                    t = t.unsqueeze(chance.randrange(t.dim() + 1))
                case 1:
                    t = t.narrow(d, 0, chance.randrange(t.shape[d] + 1))
                case 2:
                    t = t.transpose(d, chance.randrange(t.dim()))
                case 3:
                    t = t.unsqueeze(d).expand(*t.shape[:d], chance.choice([1, 3]), *t.shape[d:])
                case 4:
                    t = t[(slice(None),) * d + (slice(None, None, 2),)]
                case 5 if t.shape[d]:
                    t = t.select(d, t.shape[d] - 1)
        yield t


def place(t: torch.Tensor, device: Any) -> Any:
    """Returns the same view of a copy of the tensor's memory."""
    memory = torch.empty(0).set_(t.untyped_storage()).to(device)
    return memory.as_strided(t.shape, t.stride(), t.storage_offset())


@dataclass
class Sources:
    """One tensor: here, on each node, and on the mesh of all."""

    here: torch.Tensor
    nodes: list[Any]
    mesh: Any

    @property
    def x(self) -> Any:
        return self.nodes[1]


def everything() -> Mesh:
    return dt.mesh(dp=NODES)


def turned() -> Mesh:
    return dt.mesh(dp=NODES, nodes=[2, 0, 1])


def group() -> Any:
    return dt.collectives.new_group(range(NODES))


def written(target: Any, source: Any) -> Any:
    dt.views.put(target, source)
    return target


def agreed(x: Any) -> Any:
    dt.meshes.agree_(x)
    return x


def through_a_channel(x: Any) -> Any:
    queue = dt.tasks.Channel()
    queue.put(x)
    return queue.get().to("node:1")


def through_a_file(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    return torch.load(io.BytesIO(file.getvalue()), map_location="node:1")


def gradient(f: Callable[[Any], Any]) -> Callable[[Sources], Any]:
    def found(s: Sources) -> Any:
        w = s.x.detach().requires_grad_()
        (f(w) * 2).sum().backward()
        return w.grad

    return found


def graphed(s: Sources) -> Any:
    """A result that the function keeps as well: replays copy it."""
    kept = {}
    lie = (s.here.shape, s.here.stride(), s.here.storage_offset())

    @dt.graphed
    def step(memory: Any) -> Any:
        kept["whole"] = memory * 1
        return kept["whole"].as_strided(*lie)

    memory = torch.empty(0).set_(s.here.untyped_storage()).to("node:1")
    return [step(memory) for _ in range(3)][2]


#: what gives the same values
SAME: dict[str, Callable[[Sources], Any]] = {
    "to another node": lambda s: s.x.to("node:2"),
    "and back": lambda s: s.x.to("node:2").to("node:1"),
    "to another device": lambda s: s.x.to(dt.device(1, "cuda:0")),
    "to another node's device": lambda s: s.x.to(dt.device(2, "cuda:1")),
    "to a mesh": lambda s: s.x.to(everything().device),
    "from a node's device to a mesh": lambda s: s.x.to(dt.device(1, "cuda:0")).to(everything().device),
    "replicate": lambda s: dt.meshes.replicate(s.x, everything()),
    "from_shards": lambda s: from_shards(everything(), s.nodes),
    "from_shards of one node's": lambda s: from_shards(everything(), [s.x] * NODES),
    "from_shards of local ones": lambda s: from_shards(everything(), [s.here] * NODES),
    "to another mesh": lambda s: s.mesh.to(turned().device),
    "at, to a node": lambda s: s.mesh.at(dp=2).to("node:0"),
    "upload": lambda s: s.here.to("node:1"),
    "download": lambda s: s.mesh.cpu().to("node:1"),
    "dist_send": lambda s: s.x.dist_send(2),
    "clone": lambda s: s.x.clone(),
    "contiguous": lambda s: s.mesh.contiguous(),
    "another dtype and back": lambda s: s.x.double().float(),
    "deepcopy": lambda s: copy.deepcopy(s.x),
    "empty_like": lambda s: torch.empty_like(s.x).copy_(s.x),
    "copy_ from another node": lambda s: torch.empty_like(s.x, device="node:2").copy_(s.x),
    "copy_ of a local one": lambda s: torch.empty(s.here.shape, device="node:2").copy_(s.here),
    "put": lambda s: written(torch.empty(s.here.shape, device="node:2"), s.x),
    "get": lambda s: dt.views.get(s.x).to("node:1"),
    "a file": lambda s: through_a_file(s.x),
    "a channel": lambda s: through_a_channel(s.x),
    "run": lambda s: dt.run(lambda t: t, s.x, node=1),
    "run, a view": lambda s: dt.run(lambda t: t[None], s.x, node=1)[0],
    "run on a mesh": lambda s: from_shards(everything(), dt.run(lambda t: t, s.mesh, node=everything())),
    "submit": lambda s: dt.submit(lambda t: t, s.x, node=1).result(),
    "a graphed result": graphed,
    "all_reduce": lambda s: dt.all_reduce(s.mesh, "max", over="dp"),
    "all_reduce, asynchronously": lambda s: dt.all_reduce(s.mesh, "max", over="dp", async_op=True).result(),
    "broadcast": lambda s: dt.broadcast(s.mesh, over="dp", src=1),
    "permute_ranks": lambda s: permute_ranks(s.mesh, over="dp", by=1),
    "agree_": lambda s: agreed(s.mesh.clone()),
    "all_reduce of a list": lambda s: functional.all_reduce(s.nodes, "max")[1],
    "reduce of a list": lambda s: functional.reduce(s.nodes, 1, "max"),
    "broadcast to a list": lambda s: functional.broadcast(s.x, group())[2],
    "all_gather of a list": lambda s: functional.all_gather(s.nodes)[0][1],
    "all_gather, its own": lambda s: functional.all_gather(s.nodes)[0][0],
    "gather": lambda s: functional.gather(s.nodes, 1)[2],
    "scatter": lambda s: functional.scatter([s.x] * NODES, group())[2],
    "scatter, its own": lambda s: functional.scatter([s.x] * NODES, group())[1],
    "reduce_scatter of lists": lambda s: functional.reduce_scatter([[x] * NODES for x in s.nodes], "max")[2],
    "all_to_all of lists": lambda s: functional.all_to_all([[x] * NODES for x in s.nodes])[2][0],
    "all_to_all, its own": lambda s: functional.all_to_all([[x] * NODES for x in s.nodes])[2][2],
    "a function's reduction": lambda s: dt.all_reduce(s.nodes, torch.maximum).values[1],
    "broadcast_object": lambda s: dt.collectives.broadcast_object({"x": s.x})[2]["x"],
    "gather_object": lambda s: dt.collectives.gather_object([{"x": x} for x in s.nodes], 1)[2]["x"],
}
#: gradients of copies, of which each element is 2, or the sum of three of these
GRADIENTS = {
    "to another node": (gradient(lambda w: w.to("node:2")), 2),
    "replicate": (gradient(lambda w: dt.meshes.replicate(w, everything())), 6),
    "from_shards": (gradient(lambda w: from_shards(everything(), [w, w.to("node:0"), w.to("node:2")])), 6),
    "all_gather": (gradient(lambda w: functional.all_gather([w, w.to("node:0")])[0][0]), 2),
}


def geometry(t: torch.Tensor) -> Geometry:
    return tuple(t.shape), t.stride(), int(t.storage_offset())


def there(tensors: list[torch.Tensor]) -> list[Geometry]:
    return [(tuple(t.shape), t.stride(), int(t.storage_offset())) for t in tensors]


def check(made: list[tuple[Any, list[torch.Tensor]]]) -> None:
    """Compares tensors with what their nodes say of them, and with the values that they have to have on each."""
    parts: list[tuple[Any, torch.Tensor]] = []
    for x, expected in made:
        shards = x.shards() if x.device in (everything().device, turned().device) else [x]
        parts += zip(shards, expected * len(shards) if len(expected) == 1 else expected, strict=True)
    for node in range(NODES):
        mine = [(x, wanted) for x, wanted in parts if x.get_node() == node]
        for (x, wanted), told in zip(mine, dt.run(there, [x for x, _ in mine], node=node), strict=True):
            assert geometry(x) == told, wanted
            assert torch.equal(x.detach().cpu(), wanted)


@pytest.fixture(scope="module", params=[None, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 5))])
def sources(nodes: object, request: pytest.FixtureRequest) -> list[Sources]:
    """The listed tensors, or those of a seed."""
    tensors = odd() if request.param is None else by_chance(request.param)
    device = everything().device
    return [Sources(t, [place(t, f"node:{k}") for k in range(NODES)], place(t, device)) for t in tensors]


@pytest.mark.parametrize("way", SAME)
def test_what_is_made_lies_as_the_script_takes_it_to(way: str, sources: list[Sources]) -> None:
    check([(SAME[way](s), [s.here]) for s in sources])


@pytest.mark.parametrize("way", GRADIENTS)
def test_gradients(way: str, sources: list[Sources]) -> None:
    make, value = GRADIENTS[way]
    check([(make(s), [torch.full(s.here.shape, float(value))]) for s in sources])


def test_what_is_cut(sources: list[Sources]) -> None:
    made: list[tuple[Any, list[torch.Tensor]]] = []
    for s in sources:
        for d in range(s.here.dim()):
            if s.here.shape[d] and s.here.shape[d] % NODES == 0:
                cut = list(s.here.chunk(NODES, d))
                for source in (s.here, s.x, s.nodes[0]):
                    made.append((shards := dt.shard(source, everything(), dp=d), cut))
                made.append((dt.all_gather(shards, over="dp", dim=d), [s.here]))
                made.append((dt.collectives.reduce_scatter(s.mesh, "max", over="dp", dim=d), cut))
                turned = [torch.cat([part] * NODES, d) for part in cut]
                made.append((all_to_all(s.mesh, over="dp", split=d, cat=d), turned))
    assert len(made) >= 12
    check(made)


#: What torch's meta kernels lay otherwise than its kernels do, or have no word for.
CALLS: list[Callable[[Any], Any]] = [
    torch.relu,
    lambda t: t * 2,
    lambda t: t.clamp(min=1),
    lambda t: torch.maximum(t, t.contiguous()),
    lambda t: torch.empty_like(t).fill_(3),
    lambda t: torch.nn.functional.layer_norm(t.unsqueeze(-1), (1,)),
]


def test_first_calls_in_graphs(sources: list[Sources]) -> None:
    """Nothing runs while a graph is recorded: the nodes are asked beside it what calls of operands that lie so make."""
    made: list[tuple[Any, list[torch.Tensor]]] = []
    for s in sources:
        gpu = s.x.to(dt.device(1, "cuda:0"))
        for x, stream in ((s.x, None), (s.x, dt.Stream(1)), (s.mesh, None), (gpu, None)):
            first_calls.forget()
            g = dt.Graph()
            with dt.stream(stream), dt.graph(g):
                results = [call(x) for call in CALLS]
            g.replay()
            made += [(result, [call(s.here)]) for result, call in zip(results, CALLS, strict=True)]
    check(made)


class Gives:
    """A collate_fn that gives one tensor, whatever the samples are."""

    def __init__(self, numbers: int, *lie: tuple[int, ...]) -> None:
        self._numbers, self._lie = numbers, lie

    def __call__(self, samples: list[int]) -> torch.Tensor:  # made here: a tensor that is sent lies as it arrives
        return torch.arange(float(self._numbers)).as_strided(*self._lie)


def test_batches_that_nodes_read() -> None:
    made = []
    for gives in (Gives(4, (1, 4), (1, 1)), Gives(1, (1, 1), (7, 3)), Gives(4, (3, 4), (0, 1))):
        batches = dt.data.distribute([0] * NODES, everything(), batch_size=NODES, at="node", collate_fn=gives)
        made += [(batch, [gives([])]) for batch in batches]
    assert len(made) == 3
    check(made)


def test_checkpoints(tmp_path: Path, sources: list[Sources]) -> None:
    for k, s in enumerate(sources[2:11:2]):
        target = {"node": s.x * 0, "mesh": s.mesh * 0}
        dt.checkpoint.save({"node": s.x, "mesh": s.mesh}, tmp_path / str(k))
        dt.checkpoint.load(target, tmp_path / str(k))
        check([(x, [s.here]) for x in target.values()])
