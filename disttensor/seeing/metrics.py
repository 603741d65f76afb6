"""The figures of a job for Prometheus: a collector for prometheus_client, which reads them when it is asked.

session --> status()                      what each node has and is at
        --> connections, outboxes, ...    what only counts up --> samples --> families of prometheus_client
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..runtime.channel.counted import count
from ..runtime.master.connection import Life
from ..runtime.master.node import Node
from ..session import current
from ..session.session import Session
from .reading import status
from .status import NodeStatus

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.registry import Collector

#: The command that installs prometheus_client.
INSTALL = "pip install 'disttensor[metrics]'"
#: The labels of a node's figures. ``place`` are its coordinates in the largest mesh that has it, such as "dp=3".
NODE = ("node", "host", "place")
GPU = (*NODE, "device")
LINE = ("line",)
COUNTER, GAUGE = "counter", "gauge"


class Family(NamedTuple):
    """The name of a metric, without "disttensor_" and "_total", and what it says."""

    name: str
    kind: str
    says: str
    labels: tuple[str, ...] = ()


FAMILIES = (
    Family(
        "session_running", GAUGE, "1 while the script has a session, else 0: without a session this is the only figure."
    ),
    Family("nodes", GAUGE, "Nodes of the session, with those that are lost."),
    Family("script_commands", COUNTER, "Commands that the script has issued."),
    Family("script_cpu_seconds", COUNTER, "Time for which the script's process has run on cores."),
    Family("script_resident_bytes", GAUGE, "Memory of the script's process."),
    Family("script_upload_bytes", GAUGE, "Copies of tensors for nodes that have not left the script yet."),
    Family("script_fetches", GAUGE, "Fetches of the script that have not arrived yet."),
    Family("script_waiting_threads", GAUGE, "Threads of the script that wait for a node now."),
    Family("script_waits", COUNTER, "Waits of the script for nodes that have ended."),
    Family("script_wait_seconds", COUNTER, "Time of the script's waits for nodes that have ended."),
    Family("script_line_waits", COUNTER, "Waits of those lines of the script that have waited longest.", LINE),
    Family("script_line_wait_seconds", COUNTER, "Time of the waits of those lines that have waited longest.", LINE),
    Family("script_sent_bytes", COUNTER, "Tensors that the script has sent to a node.", NODE),
    Family("script_received_bytes", COUNTER, "Tensors that the script has received from a node.", NODE),
    Family("transfers_under_way", GAUGE, "Transfers of tensors that are under way between any two processes."),
    Family("node_up", GAUGE, "1 while a node is there; 0 until it has started, and while it is lost.", NODE),
    Family("node_losses", COUNTER, "Losses of a node; another worker may have come in its place.", NODE),
    Family("node_commands", COUNTER, "Commands that a node is known to have done.", NODE),
    Family("node_behind", GAUGE, "Commands that were issued to a node and are not known to be done.", NODE),
    Family("node_oldest_seconds", GAUGE, "Time since the oldest command was sent that a node is behind.", NODE),
    Family("node_busy_seconds", COUNTER, "Time in which a node waited neither for commands nor for others.", NODE),
    Family("node_cpu_seconds", COUNTER, "Time for which a node's process has run on cores.", NODE),
    Family("node_sent_bytes", COUNTER, "Tensors that a node has sent to others by channels that reach hosts.", NODE),
    Family("node_tensors", GAUGE, "Tensors that a node has.", NODE),
    Family("node_held_bytes", GAUGE, "Memory of a node's tensors, counted once where they share it.", NODE),
    Family("node_held_peak_bytes", GAUGE, "The most memory that a node's tensors had, where that is counted.", NODE),
    Family("node_resident_bytes", GAUGE, "Memory of a node's process.", NODE),
    Family("node_resident_peak_bytes", GAUGE, "The most memory that a node's process had.", NODE),
    Family("node_age_seconds", GAUGE, "Time since a node was seen, of when its figures are.", NODE),
    Family("node_slow_ratio", GAUGE, "By which part a node is slower than the others of its mesh, or 0.", NODE),
    Family("gpu_used_bytes", GAUGE, "Memory of a node's GPU that is used, by whatever process.", GPU),
    Family("gpu_memory_bytes", GAUGE, "Memory of a node's GPU.", GPU),
    Family("gpu_busy_ratio", GAUGE, "Share of the time in which a node's GPU ran something; needs pynvml.", GPU),
)

#: The name of a family, the values of its labels, and its figure.
Sample = tuple[str, tuple[str, ...], float]


def collector() -> Collector:
    """Returns a collector for a registry of prometheus_client's, which has the figures of the session that there is
    when the registry is asked.

        >>> import prometheus_client
        >>> registry = prometheus_client.CollectorRegistry()
        >>> registry.register(dt.seeing.collector())
        >>> registry.get_sample_value("disttensor_nodes")
        2.0

    It may be made before the session, and registered for as long as the process lives. It answers in any thread, and
    waits half a second at most for nodes. Raises ImportError without prometheus_client.
    """
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise ImportError(f"dt.seeing.collector() needs prometheus_client: {INSTALL}") from None
    return _JobCollector()


class _JobCollector:
    """The collector. A registry asks ``describe`` for the names, so that registering reads nothing."""

    def __repr__(self) -> str:
        return "<disttensor.seeing.collector()>"

    def describe(self) -> Iterable[Metric]:
        """Returns all families, without figures."""
        return _families([])

    def collect(self) -> Iterable[Metric]:
        """Returns all families, with the figures of now."""
        session = current.current()
        samples: list[Sample] = []
        if session is not None:
            try:
                samples = list(_samples(session))
            except Exception:
                if current.current() is session:
                    raise
                session = None  # it has ended meanwhile
        return _families([("session_running", (), float(session is not None)), *samples])


def _families(samples: Iterable[Sample]) -> list[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    made: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for it in FAMILIES:
        kind = CounterMetricFamily if it.kind == COUNTER else GaugeMetricFamily
        made[it.name] = kind(f"disttensor_{it.name}", it.says, labels=it.labels)
    for name, labels, figure in samples:
        made[name].add_metric(labels, float(figure))
    return list(made.values())


# ---- figures ---------------------------------------------------------------------------------------------------------


def _samples(session: Session) -> Iterator[Sample]:
    it = status()
    script = it.script
    yield "nodes", (), len(it.nodes)
    yield "script_commands", (), script.commands
    yield "script_cpu_seconds", (), time.process_time()
    yield "script_resident_bytes", (), script.rss
    yield "script_upload_bytes", (), script.uploads
    yield "script_fetches", (), script.fetches
    yield "script_waiting_threads", (), len(script.waits)
    waits, seconds = session.waits.in_all()
    yield "script_waits", (), waits
    yield "script_wait_seconds", (), seconds
    lines: dict[str, tuple[int, float]] = {}  # two files of one name may have the same line
    for line in it.lines:
        waits, seconds = lines.get(line.line, (0, 0.0))
        lines[line.line] = waits + line.waits, seconds + line.seconds
    for name, (waits, seconds) in lines.items():
        yield "script_line_waits", (name,), waits
        yield "script_line_wait_seconds", (name,), seconds
    yield "transfers_under_way", (), sum(each.under_way for each in it.transfers)
    places = _places(session)
    slow = {each.node: each.behind for each in it.slow}
    traffic = _traffic(session)
    for row in it.nodes:
        labels = str(row.rank), row.host, places.get(row.rank, "")
        for name, figure in _of_node(session.nodes[row.rank], row):
            if figure is not None:
                yield name, labels, figure
        yield "node_slow_ratio", labels, slow.get(row.rank, 0.0)
        if row.rank in traffic:
            sent, received = traffic[row.rank]
            yield "script_sent_bytes", labels, sent
            yield "script_received_bytes", labels, received
        for gpu in row.gpus:
            yield "gpu_used_bytes", (*labels, gpu.device), gpu.used
            yield "gpu_memory_bytes", (*labels, gpu.device), gpu.total
            if gpu.busy is not None:
                yield "gpu_busy_ratio", (*labels, gpu.device), gpu.busy


def _of_node(node: Node, row: NodeStatus) -> Iterator[tuple[str, float | None]]:
    """Yields the figures of a node; None where one isn't known."""
    at, seen = node.connection, node.connection.seen
    yield "node_up", float(node.life is Life.THERE)
    yield "node_losses", at.number + (node.life is Life.LOST)
    yield "node_commands", node.outbox.done
    yield "node_behind", row.behind
    yield "node_oldest_seconds", row.oldest
    yield "node_busy_seconds", at.busy if seen is None else seen.use.tally.worked
    yield "node_cpu_seconds", None if seen is None else seen.cpu
    yield "node_sent_bytes", None if seen is None else seen.use.tally.sent
    yield "node_tensors", row.tensors
    yield "node_held_bytes", row.bytes
    yield "node_held_peak_bytes", row.peak
    yield "node_resident_bytes", row.rss
    yield "node_resident_peak_bytes", row.peak_rss
    yield "node_age_seconds", row.age


def _places(session: Session) -> dict[int, str]:
    """Returns the coordinates of nodes, each in the largest mesh that has it."""
    found: dict[int, str] = {}
    for place in sorted(session.places.meshes, key=lambda place: len(place.ranks)):
        found.update((rank, place.where(i)) for i, rank in enumerate(place.ranks))
    return found


def _traffic(session: Session) -> dict[int, tuple[int, int]]:
    """Returns the bytes that the script has sent to each node, and received from it."""
    found: dict[int, tuple[int, int]] = {}
    for _, _, peer, sent, received in (
        *count(list(session.router.data.values())),
        *session.transfers.rows_by_command(),
    ):
        before = found.get(peer, (0, 0))
        found[peer] = before[0] + sent[1], before[1] + received[1]
    return found
