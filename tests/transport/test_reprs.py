"""The main objects say what they are and what is under way, in one line, as a transcript shows them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import disttensor as dt
from disttensor.runtime.host.launch_spec import LaunchSpec
from disttensor.runtime.launch.tree.agent import Agent
from disttensor.runtime.launch.tree.root import Root
from disttensor.runtime.launch.tree.server import Server
from disttensor.runtime.master.node import Node
from disttensor.runtime.node.store import Store
from disttensor.runtime.process.own_time import Unheard
from disttensor.session import current
from disttensor.testing import cut


@pytest.fixture
def session() -> Any:
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        yield current.session()


def test_a_session(session: Any) -> None:
    x = torch.ones(3).to("node:1")
    dt.synchronize()
    link = r"<Link nodes=2 queued=0 inflight=\d+ waiting=0>"
    assert re.fullmatch(rf"<Session \w+ nodes=2 {link}>", repr(session))
    assert (x * 2).shape == (3,)
    assert re.fullmatch(r"<Link nodes=2 queued=\d+ inflight=\d+ waiting=0>", repr(session.link))
    assert re.fullmatch(r"<Outbox node=1 queued=\d+ inflight=\d+ dead=\d+>", repr(session.link.nodes[1].outbox))
    assert re.fullmatch(r"<Handle \d+ <\(3,\) torch.float32 at node 1 cpu>>", repr(x._h))
    assert repr(x.view(3, 1)._h).startswith("<Lazy not made yet ")
    assert re.fullmatch(
        rf"<Node 1 \S+:{session.nodes[1].hello.pid} gpu=0 queued=\d+ inflight=\d+>", repr(session.nodes[1])
    )
    assert repr(Node(2)) == "<Node 2 not there yet>"


def test_a_session_that_has_lost_a_node(session: Any) -> None:
    cut(1)
    with pytest.raises(dt.NodeLost):
        dt.synchronize()
    assert " nodes=2 lost=[1] <Link " in repr(session)
    assert re.fullmatch(r"<Node 1 \S+:\d+ lost>", repr(session.nodes[1]))


def test_a_store() -> None:
    store = Store()
    store.entries[7] = torch.ones(2)
    assert repr(store) == "<Store entries=1 arriving=0 leaving=0>"


def test_what_starts_nodes() -> None:
    """Without what they open when they are made."""
    root, server, agent = (kind.__new__(kind) for kind in (Root, Server, Agent))
    root.spec, root._branches, root._asked, root._ending = LaunchSpec("ssh"), [], 2, None
    assert repr(root) == "<Root ssh branches=[] asked=2>"
    server._nodes, server._deadline = {1: None, 0: None}, 5.0
    assert repr(server) == "<Server nodes=[0, 1] stopping>"
    agent._ending, agent._ready, agent._paused, agent._unheard = None, True, False, Unheard()
    assert repr(agent) == "<Agent ready heard 0.0 s ago>"
