"""Ends that meet actors whose handles have travelled: of a session, of a caller's node, of the actor's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from handles_kit import Client, Server, closed, later, say
from stream_kit import held, release

import disttensor as dt
from disttensor import testing


def test_actors_that_have_each_other_end_with_the_session(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with dt.init_master_worker(nodes=2, threads=1):
        actors = [dt.actor(Client, path=str(path), node=node) for node, path in enumerate(paths)]
        for one, other in (actors, reversed(actors)):
            one.keep({"server": other}).wait()
        del actors, one, other
        later()
        assert not any(path.exists() for path in paths)  # each keeps the other
    for path in paths:
        closed(path)


def test_nodes_that_are_threads(tmp_path: Path) -> None:
    path = tmp_path / "said"
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        server = dt.actor(Server, str(path), node=1)
        assert dt.run(say, server, "a function", 3, node=0) == [1, 2, 3]
        client = dt.actor(Client, {"server": server}, node=0)
        assert client.say("an actor", 2).result() == [4, 5]
        del server
        later()
        assert client.say("still", 1).result() == [6]
        assert not path.exists()
        client.keep(None).wait()
        closed(path)


def test_the_loss_of_the_actors_node_reaches_each_caller() -> None:
    with dt.init_master_worker(nodes=3, threads=1):
        server = dt.actor(Server, node=1)
        client = dt.actor(Client, {"server": server}, node=2)
        running = client.hold("never")
        dt.run(held, "never", node=1)
        queued = dt.submit(say, server, "queued", 3, node=0)
        testing.kill(1)
        for work in (running, queued):
            with pytest.raises(dt.NodeLost) as told:
                work.result()
            assert told.value.rank == 1
        with pytest.raises(dt.NodeLost):  # and who calls later
            client.say("late", 1).result()
        with pytest.raises(dt.NodeLost):
            dt.run(say, server, "late", 1, node=0)
        again = dt.actor(Server, node=0)
        client.keep({"server": again}).wait()
        assert client.say("again", 2).result() == [1, 2]


def test_the_loss_of_a_callers_node_lets_go_of_its_handles(tmp_path: Path) -> None:
    path = tmp_path / "said"
    with dt.init_master_worker(nodes=3, threads=1):
        client = dt.actor(Client, {"server": dt.actor(Server, str(path), node=1)}, node=2)
        other = dt.actor(Client, node=0)
        client.give(other).wait()
        holding = client.hold("a lost caller's")
        dt.run(held, "a lost caller's", node=1)
        testing.kill(2)
        with pytest.raises(dt.NodeLost):
            holding.result()
        dt.run(release, "a lost caller's", node=1)
        assert other.say("other", 2).result() == [1, 2]  # the actor goes on for others
        assert not path.exists()
        other.keep(None).wait()
        closed(path)


def test_an_error_that_nobody_asks_for_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    def call(server: Any) -> None:
        server.fail("dropped")
        server.say("after", 0).wait()

    with dt.init_master_worker(nodes=2, threads=1):
        dt.run(call, dt.actor(Server, node=1), node=0)
    said = "[node 0] disttensor: Server.fail() on node 1, whose result nobody has asked for: KeyError: 'dropped'"
    assert said in "".join(capfd.readouterr())
