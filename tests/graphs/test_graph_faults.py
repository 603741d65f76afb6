"""Graphs when nodes or sessions end, and when Ctrl-C arrives."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import disttensor as dt


def test_a_lost_node_ends_its_graphs_only() -> None:
    with dt.init_master_worker(nodes=2, threads=1):
        a, b = torch.ones(2, device="node:0"), torch.ones(2, device="node:1")
        both, one = dt.Graph(), dt.Graph()
        with dt.graph(both):
            crossed = b + a.to("node:1")
        with dt.graph(one):
            a.add_(1)
        both.replay()
        assert crossed.tolist() == [2, 2]
        os.kill(dt.nodes()[1]["pid"], signal.SIGKILL)

        def until_it_is_noticed() -> None:
            while True:
                both.replay()
                crossed.tolist()

        with pytest.raises(dt.NodeLost):
            until_it_is_noticed()
        with pytest.raises(dt.NodeLost):
            both.replay()
        before = a.tolist()
        one.replay()
        assert a.tolist() == [x + 1 for x in before]


def test_a_graph_of_a_session_that_was_shut_down() -> None:
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        x = torch.ones(2, device="node:0")
        g = dt.Graph()
        with dt.graph(g):
            x.add_(1)
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        with pytest.raises(dt.DisttensorError, match="shut down"):
            g.replay()
        g.reset()
        y = torch.ones(2, device="node:0")
        with dt.graph(g):
            y.add_(1)
        g.replay()
        assert y.tolist() == [2, 2]


def test_ctrl_c_in_a_recording_leaves_everything_usable() -> None:
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        w = torch.ones(2, device="node:0", requires_grad=True)
        optimizer = torch.optim.Adam([w], lr=0.1)

        def step(interrupted: bool = False) -> None:
            optimizer.zero_grad()
            loss = (w * w).sum()
            if interrupted:
                os.kill(os.getpid(), signal.SIGINT)
            loss.backward()
            optimizer.step()

        step()
        g = dt.Graph()
        with pytest.raises(KeyboardInterrupt), dt.graph(g):
            step(interrupted=True)
        with dt.graph(g):
            step()
        local = torch.ones(2, requires_grad=True)
        reference = torch.optim.Adam([local], lr=0.1)
        for i in range(3):
            if i:
                g.replay()
            reference.zero_grad()
            (local * local).sum().backward()
            reference.step()
            assert torch.equal(w.detach().cpu(), local)
