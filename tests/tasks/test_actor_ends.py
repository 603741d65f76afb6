"""Ends that meet actors: of a session, of a node, of a program that is interrupted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from stream_kit import held, hold

import disttensor as dt


class Ledger:
    """Lines that are added to."""

    def __init__(self, start: float) -> None:
        self.lines = [start]

    def add(self, value: float) -> list[float]:
        self.lines.append(value)
        return list(self.lines)

    def fail(self) -> None:
        raise ValueError("so it is")

    def wait(self, name: str) -> bool:
        return hold(name)


class Holder:
    """Writes down its calls, and its end."""

    def __init__(self, path: str) -> None:
        self.path = path

    def note(self, text: str) -> None:
        with open(self.path, "a") as file:
            file.write(text + "\n")

    def close(self) -> None:
        self.note("close")


def test_the_end_of_the_session_ends_actors(tmp_path: Path) -> None:
    path = tmp_path / "said"
    with dt.init_master_worker(nodes=1, threads=1):
        actor = dt.actor(Holder, str(path), node=0)
        works = [actor.note(str(i)) for i in range(3)]
        dropped = actor.note("3")
        del dropped
    assert path.read_text().split()[:5] == ["0", "1", "2", "3", "close"]
    assert [work.result() for work in works] == [None] * 3
    with pytest.raises(dt.DisttensorError):
        actor.note("4")


def test_an_error_that_nobody_asked_for_is_told_at_the_sessions_end() -> None:
    with pytest.raises(ValueError, match="so it is"), dt.init_master_worker(nodes=1, threads=1):
        dt.actor(Ledger, 0.0, node=0).fail()


def test_the_loss_of_the_node_ends_all_works_and_names_the_actor() -> None:
    with dt.init_master_worker(nodes=2, threads=1):
        lost, other = dt.actor(Ledger, 0.0, node=1), dt.actor(Ledger, 0.0, node=0)
        running, queued = lost.wait("never"), lost.add(1.0)
        dt.run(held, "never", node=1)
        os.kill(int(dt.nodes()[1]["pid"]), signal.SIGKILL)
        for attempt in (running.result, queued.result, lambda: lost.add(2.0), lambda: dt.actor(Ledger, 0.0, node=1)):
            with pytest.raises(dt.NodeLost) as told_:
                attempt()
            assert told_.value.rank == 1
        for work in (running, queued):
            assert "the actor Ledger" in "".join(getattr(work.exception(), "__notes__", ()))
        assert other.add(1.0).result() == [0.0, 1.0]
        again = dt.actor(Ledger, 5.0, node=0)
        assert again.add(1.0).result() == [5.0, 1.0]
