"""The nodes of a session, as objects and as dictionaries."""

from __future__ import annotations

import json
from typing import assert_type

import disttensor as dt
from disttensor.tasks import NodeInfo, Nodes


def busy(nodes: Nodes) -> list[NodeInfo]:
    return [node for node in nodes if node.alive]


def main() -> None:
    nodes = dt.nodes()
    assert_type(nodes, Nodes)
    assert_type(nodes[0], NodeInfo)
    assert_type(nodes[:1], Nodes)
    assert_type(nodes[0].rank, int)
    assert_type(nodes[0].host, str)
    assert_type(nodes[0].pid, int)
    assert_type(nodes[0].devices, list[str])
    assert_type(nodes[0].alive, bool)
    assert_type(json.dumps([node["pid"] for node in busy(nodes)]), str)
    assert_type(dt.session.node_count(), int)
    assert_type(dt.tasks.here().node, int | None)
