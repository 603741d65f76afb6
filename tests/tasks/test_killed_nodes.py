"""``dt.nodes()[k].kill()``: the process of that node ends, whatever it is at, and nothing else does."""

from __future__ import annotations

import os
import select
import signal
from typing import Any

import pytest
from limits import HANG

import disttensor as dt


@pytest.mark.parametrize(
    "how", [{"nodes": 2}, {"launcher": "nearby", "hosts": "a:1,b:1"}], ids=["of this host", "of an agent's"]
)
def test_kill_ends_the_process_whatever_it_is_at(how: dict[str, Any]) -> None:
    with dt.init_master_worker(**how, threads=1):
        node, other = dt.nodes()[1], dt.nodes()[0]
        ended = os.pidfd_open(node.pid)
        try:
            signal.pidfd_send_signal(ended, signal.SIGSTOP)  # it could not end by itself
            node.kill()
            assert select.select([ended], [], [], HANG)[0] == [ended]
        finally:
            os.close(ended)
        assert (node.alive, node["alive"], other.alive) == (False, False, True)
        assert [each.alive for each in dt.nodes()] == [True, False]
        assert repr(node).endswith(", lost>")
        with pytest.raises(
            dt.NodeLost, match=r"node 1 .*killed by dt\.nodes\(\)\[1\]\.kill\(\), at .*test_killed_nodes\.py:\d+"
        ):
            dt.run(os.getpid, node=1)
        with pytest.raises(dt.NodeLost):
            node.kill()
        assert dt.run(os.getpid, node=0) == other.pid


def test_a_node_of_an_earlier_session_is_left_alone() -> None:
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        old = dt.nodes()[0]
    with pytest.raises(dt.DisttensorError, match="there is no session"):
        old.kill()
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        with pytest.raises(dt.DisttensorError, match=r"<node 0 on .*> was a node of a session that was shut down"):
            old.kill()
        assert dt.nodes()[0].alive
