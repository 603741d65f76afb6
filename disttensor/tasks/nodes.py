"""``dt.nodes()``: the nodes of the session, each with what it runs on and as."""

from __future__ import annotations

from typing import Any, SupportsIndex, overload

from ..dispatch.call_site import here
from ..proxy.meta import new_ref
from ..runtime.master.failures import line_of
from ..runtime.master.node import Node
from ..runtime.master.route import waits
from ..runtime.process.tables import columns, html
from ..runtime.protocol.errors import DisttensorError
from ..session import current, replacing
from ..session.session import Session


class NodeInfo(dict[str, Any]):
    """A node as it was when ``dt.nodes()`` was called: a dict of its attributes, which ends and replaces the node too.

    Pickles and copies of it are plain dicts.
    """

    _job: str

    @property
    def rank(self) -> int:
        """The number of the node."""
        return int(self["rank"])

    @property
    def host(self) -> str:
        """The name of its host."""
        return str(self["host"])

    @property
    def pid(self) -> int:
        """The process on that host; the script's where nodes are threads of it."""
        return int(self["pid"])

    @property
    def devices(self) -> list[str]:
        """The names of its devices, "cpu" first."""
        found: list[str] = self["devices"]
        return found

    @property
    def alive(self) -> bool:
        """Returns whether it was not lost."""
        return bool(self["alive"])

    def kill(self) -> None:
        """Ends the node's process at once, by SIGKILL, whatever it is at and on whatever host it is: as ``dt.kill``.

        The launcher does it, on the other hosts by its processes there. (One of your own launchers that has no
        ``end_worker`` can't: the process ends when it sees that its connection is cut, which one that is stopped does
        not.) What the node held is lost, and the other nodes go on. Returns at once.

        Raises NodeLost for a node that is lost already; DisttensorError for a thread of the script
        (``launcher="inproc"``), whose process is the script, for a node of an earlier session, and without a session.
        """
        session = self._session()
        if session.shares_process:
            raise DisttensorError(
                f"node {self.rank} is a thread of the script (launcher='inproc'), and to kill its process would end "
                f"the script; dt.kill({self.rank}) ends the thread alone"
            )
        session.link.losses.kill(self.rank, f"killed by dt.nodes()[{self.rank}].kill(), at {line_of(here())}")
        self["alive"] = False

    def replace(self, timeout: float | None = 0.0) -> None:
        """Puts another process in the place of this node, which is lost, and waits until it is there: docs/RECOVERY.md.

            try:
                step()
            except dt.NodeLost as error:
                dt.nodes()[error.rank].replace()

        It *is* the node from then on: devices, meshes, streams, channels and graphs hold, and so do functions and
        objects that were sent there. Its tensors, its actors and results that were kept there are gone: reading one
        raises the NodeLost of then. New tensors there are as on any node.

        A process takes a place that was kept free (``init_master_worker(spares=1)``), one that has joined since, or
        that of the process that has ended. ``timeout`` counts seconds for a place, None: as long as it takes; then it
        has 60 s to start. After an error the node is lost as before, and the call may be made again.

        Raises DisttensorError for a node that is not lost, for a launcher that can't start a node later, and for a
        process of another kind (its devices, its memory); TimeoutError without a place; StartError when it does not
        start, or has another version of torch; GraphError while a graph is recorded.
        """
        waits("replace()")
        session = self._session()
        replacing.replace(session, self.rank, new_ref, timeout)
        self.update(_attributes(session.nodes[self.rank]))

    def _session(self) -> Session:
        """Returns the session that it is a node of. Raises DisttensorError where that was shut down."""
        session = current.session()
        if session.job != self._job:
            raise DisttensorError(
                f"{self} was a node of a session that was shut down; dt.nodes() has those of this session"
            )
        return session

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __repr__(self) -> str:
        lost = "" if self.alive else ", lost"
        return f"<node {self.rank} on {self.host}, pid {self.pid}, {', '.join(self.devices)}{lost}>"


class Nodes(list[NodeInfo]):
    """A list of nodes that prints as a table, in a notebook too. Pickles and copies of it are plain lists."""

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    @overload
    def __getitem__(self, at: SupportsIndex) -> NodeInfo: ...
    @overload
    def __getitem__(self, at: slice) -> Nodes: ...
    def __getitem__(self, at: SupportsIndex | slice) -> NodeInfo | Nodes:
        found = super().__getitem__(at)
        return Nodes(found) if isinstance(found, list) else found

    def __repr__(self) -> str:
        return columns([_HEADER, *map(_row, self)])

    def _repr_html_(self, title: str = "nodes") -> str:
        """Returns the table for a notebook."""
        return html(title, _HEADER, map(_row, self), heads=1)


_HEADER = ("node", "host", "pid", "devices", "alive")


def _row(node: NodeInfo) -> tuple[str, ...]:
    return str(node.rank), node.host, str(node.pid), ", ".join(node.devices), "yes" if node.alive else "lost"


def nodes() -> Nodes:
    """Returns the nodes, each with its ``rank``, ``host``, ``pid``, ``devices`` (a list of names), ``alive`` (a bool),
    ``kill()`` and ``replace()``.

    They print as a table. Each is a dict as well, ``dt.nodes()[1]["pid"]``, and so goes into JSON.

    Does not wait: a loss that was not noticed yet is not shown. Raises DisttensorError without a session.
    """
    return nodes_of(current.session())


def nodes_of(session: Session) -> Nodes:
    """Returns the nodes of a session that have said hello."""
    return Nodes(_info(session, node) for node in session.nodes if node.last_hello is not None)


def _info(session: Session, node: Node) -> NodeInfo:
    found = NodeInfo(_attributes(node))
    found._job = session.job
    return found


def _attributes(node: Node) -> dict[str, Any]:
    hello, alive = node.hello, node.lost is None
    return {"rank": node.rank, "host": hello.host, "pid": hello.pid, "devices": list(node.devices), "alive": alive}


__all__ = ["NodeInfo", "Nodes", "nodes"]
