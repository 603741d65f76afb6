"""What nodes of several hosts print comes out at the root, as that of local nodes does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from output_kit import unfolded
from test_launch import collect, lines_of
from test_root import Tree, asked, tree

from disttensor.runtime.launch import Exited
from disttensor.runtime.launch.output import Output

__all__ = ["tree"]

LINES = [f"{i:06} " + "x" * 40 for i in range(40_000)]


def test_nodes_of_several_hosts_in_one_line(tree: Tree, capfd: pytest.CaptureFixture[str]) -> None:
    launcher = tree(2, 1, 1)
    launcher.start(asked(*["serve"] * 4))
    out, err = lines_of(capfd, 8)
    assert out == [f"[node {rank}] serving" for rank in range(4)]
    assert err == [f"[node {rank}] as well" for rank in range(4)]


def test_a_flood_arrives_whole(tree: Tree, capfd: pytest.CaptureFixture[str]) -> None:
    """More than may be on its way at a time, so nodes have to wait, and to go on."""
    launcher = tree(1, 1)
    launcher.start(asked("flood", "flood"))
    ends = [e for e in collect(launcher, 4, 30) if isinstance(e, Exited)]
    assert {e.tail for e in ends} == {tuple(LINES[-20:])}
    launcher.stop(0)
    lines = unfolded(capfd.readouterr().out.splitlines())
    for rank in (0, 1):
        prefix = f"[node {rank}] "
        assert [line.removeprefix(prefix) for line in lines if line.startswith(prefix)] == LINES


def test_log_files_are_where_the_master_is(tree: Tree, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    launcher = tree(1, 1)
    launcher.show(Output(log_dir=str(tmp_path), redirects="1:3"))
    launcher.start(asked("three", "three"))
    collect(launcher, 4)
    launcher.stop(0)
    assert capfd.readouterr().out.splitlines()[-1] == "[node 0] unfinished"
    assert sorted(os.path.relpath(path, tmp_path) for path in tmp_path.rglob("*.log")) == [
        "1/stderr.log", "1/stdout.log",
    ]  # fmt: skip
    assert (tmp_path / "1/stdout.log").read_text().endswith("line 29\nunfinished")


def test_log_directory_that_cannot_be_made(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    launcher = tree(1, 1)
    launcher.show(Output(log_dir=str(tmp_path / "file" / "logs")))
    launcher.start(asked("serve", "serve"))
    ends = collect(launcher, 2)
    assert all(isinstance(e, Exited) and "its log files cannot be made: [Errno 20]" in e.cause for e in ends)
    assert [(e.rank, e.host) for e in ends] == [(0, "a"), (1, "b")]
