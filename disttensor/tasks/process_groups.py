"""``dt.run(fn, node=..., distributed=True)``: nodes as ranks of torch.distributed, whose groups stay between calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from msgspec.structs import replace
from torch.distributed.device_mesh import DeviceMesh

from ..runtime.master.failures import Site
from ..runtime.node.process_groups import seen
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import DisttensorError
from ..runtime.protocol.rank_lists import rank_list
from ..session.session import Session
from .targets import Targets

#: The data channel whose connections are the ranks' rendezvous; gloo's own connections carry their messages.
_CHANNEL = "gloo"


class SessionWorlds:
    """The process groups of one session. A node is in one process group at a time."""

    def __init__(self) -> None:
        self._of: dict[int, c.World] = {}  #: by node
        self._numbers = count(1)
        self._lock = threading.Lock()

    @contextmanager
    def turn(self, session: Session, targets: Targets, site: Site | None) -> Iterator[c.World]:
        """Yields the process group of these nodes, in the order of its ranks: that of the last call, if it still
        exists, whatever the dims by which it is a mesh now.

        The caller issues the group's commands inside of the block, so groups that overlap take turns in one order on
        all of their nodes. A node that came back to a group that another one has replaced there would wait for ranks
        that never left it.

        Raises DisttensorError for nodes that are threads, ValueError where gloo must not be used between the hosts.
        """
        if session.shares_process:
            raise DisttensorError(
                "distributed=True runs a function with torch.distributed, which has one process group per process, and "
                "the nodes of launcher='inproc' are threads of one; node= alone runs it without"
            )
        channel = session.router.open(_CHANNEL, site)
        with self._lock:
            nodes = targets.nodes
            world = self._of.get(nodes[0])
            ranks = rank_list(nodes)
            if world is None or world.ranks != ranks or any(self._of.get(node) is not world for node in nodes):
                session.router.introduce_all(channel, nodes)
                world = c.World(next(self._numbers), ranks, channel, _backend(session, nodes))
                self._of.update(dict.fromkeys(nodes, world))
            yield replace(world, mesh=targets.mesh)

    def returned(self, rank: int) -> None:
        """Forgets the process groups of a node in whose place another worker is."""
        world = self._of.get(rank)
        if world is not None:
            self.discard_world(world)

    def discard_world(self, world: c.World) -> None:
        """Has a process group not be used again, as it may be gone on some of its nodes."""
        with self._lock:
            for node in [node for node, its in self._of.items() if its.number == world.number]:
                del self._of[node]


def device_mesh() -> DeviceMesh:
    """Returns torch's DeviceMesh of the mesh on which a function runs, by ``dt.run(..., node=mesh, distributed=True)``.

        >>> def total(x):
        ...     dist.all_reduce(x, group=dt.tasks.device_mesh().get_group("dp"))
        ...     return x
        >>> mesh = dt.mesh(dp=2, tp=2)
        >>> x = dt.meshes.from_shards(mesh, list(torch.tensor([1., 10., 100., 1000.])))
        >>> dt.run(total, x, node=mesh, distributed=True)
        [tensor(101., device='node:0'), tensor(1010., device='node:1'), tensor(101., device='node:2'),
         tensor(1010., device='node:3')]

    It has the dims of the mesh that was given, by their names: ``device_mesh()["dp"]``, ``.get_group("tp")``,
    ``.get_local_rank("dp")``; its ranks are those of the default process group. ``DTensor``, ``fully_shard(mesh=...)``
    and ``DistributedDataParallel(process_group=...)`` take it. All ranks have made its groups before the function
    begins: so this does not wait, and need not be called on all of them. It is the same object in the next call with
    the same mesh, as long as the process group stays.

    Raises DisttensorError outside of such a function.
    """
    found = seen()
    if found is None:
        raise DisttensorError(
            "device_mesh() is for functions that run on the nodes of a mesh: mesh = dt.mesh(dp=2, tp=2); "
            "dt.run(function, node=mesh, distributed=True)"
        )
    return found


def worlds_of(session: Session) -> SessionWorlds:
    return session.part(SessionWorlds)


def _backend(session: Session, nodes: tuple[int, ...]) -> str:
    """Returns torch.distributed's backend: gloo; for CUDA tensors NCCL, where every node's cuda:0 is a GPU of its
    own."""
    hellos = [session.nodes[node].hello for node in nodes]
    gpus = {(hello.host, hello.gpus[0]) for hello in hellos if hello.gpus}
    alone = len(gpus) == len(nodes) and not session.router.unusable("nccl")
    return "cpu:gloo,cuda:nccl" if alone else "gloo"
