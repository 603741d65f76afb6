"""``dt.nodes()``: what it says, that it is a list of dicts as before, and its tables."""

from __future__ import annotations

import copy
import html.parser
import json
import os
import pickle
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.formatters import DisplayFormatter

import disttensor as dt

KEYS = ["rank", "host", "pid", "devices", "alive"]


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    with dt.init_master_worker(nodes=4, launcher="inproc", simulate_cuda=1) as session:
        yield session


def plain() -> list[dict[str, Any]]:
    """What ``dt.nodes()`` returned before its nodes were objects."""
    devices = ["cpu", "cuda:0"]
    return [
        {"rank": k, "host": socket.gethostname(), "pid": os.getpid(), "devices": devices, "alive": True}
        for k in range(4)
    ]


def test_a_node_says_what_it_is(session: Any) -> None:
    node = dt.nodes()[1]
    assert (node.rank, node.host, node.pid) == (1, socket.gethostname(), os.getpid())
    assert (node.devices, node.alive) == (["cpu", "cuda:0"], True)
    assert repr(node) == f"<node 1 on {socket.gethostname()}, pid {os.getpid()}, cpu, cuda:0>"


def test_the_nodes_are_a_list_of_dicts_as_before(session: Any) -> None:
    nodes = dt.nodes()
    assert nodes == plain()
    assert plain() == nodes
    assert isinstance(nodes, list)
    assert all(isinstance(node, dict) and list(node) == list(node.keys()) == KEYS for node in nodes)
    assert [node["rank"] for node in nodes] == [0, 1, 2, 3]
    assert nodes[1].get("pid") == os.getpid()
    assert {**nodes[1]} == dict(nodes[1].items()) == plain()[1]
    assert json.dumps(nodes) == json.dumps(plain())
    assert nodes[:2] + nodes[2:] == plain()
    assert nodes != plain()[:3]
    assert nodes[1] | {"rank": 7} == {**plain()[1], "rank": 7}
    with pytest.raises(KeyError):
        nodes[1]["name"]
    nodes[1]["alive"] = False  # what is the caller's changes nothing else
    assert dt.nodes()[1]["alive"] is dt.nodes()[1].alive is True


@pytest.mark.parametrize("how", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, copy.copy])
def test_what_leaves_the_script_is_plain(session: Any, how: Any) -> None:
    came = how(dt.nodes())
    assert came == plain()
    assert type(came) is list
    assert type(how(dt.nodes()[1])) is dict


def test_a_function_on_a_node_takes_them_and_gives_them_back(session: Any) -> None:
    nodes = dt.nodes()
    assert dt.run(lambda those: (those, type(those).__name__, type(those[0]).__name__), nodes, node=1) == (
        plain(),
        "list",
        "dict",
    )


# ---- tables ----------------------------------------------------------------------------------------------------------


class Cells(html.parser.HTMLParser):
    """The texts of a table's cells, line by line; its caption is a line, too."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.lines: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag in ("tr", "caption"):
            self.lines.append([])
        if tag in ("th", "td", "caption"):
            self.lines[-1].append("")

    def handle_data(self, data: str) -> None:
        self.lines[-1][-1] += data


def shown(value: object) -> Cells:
    """What a notebook shows of a value: IPython's own choice of the forms that it has."""
    formats, _ = DisplayFormatter().format(value)
    cells = Cells(formats["text/html"])
    assert formats["text/plain"] == repr(value)
    assert cells.tags == {"table", "caption", "tr", "th", "td"}  # what a value says is no tag
    return cells


def test_they_print_as_a_table(session: Any) -> None:
    host, pid = socket.gethostname(), os.getpid()
    nodes = dt.nodes()[:2]
    nodes[1]["alive"] = False
    lines = [re.split(r"  +", line) for line in repr(nodes).splitlines()]
    wanted = [
        ["node", "host", "pid", "devices", "alive"],
        ["0", host, str(pid), "cpu, cuda:0", "yes"],
        ["1", host, str(pid), "cpu, cuda:0", "lost"],
    ]
    assert lines == wanted
    assert shown(nodes).lines == [["nodes"], *wanted]


def test_a_session_shows_its_nodes(session: Any) -> None:
    lines = shown(session).lines
    assert lines[0] == ["disttensor session, 4 nodes"]
    assert [line[0] for line in lines[1:]] == ["node", "0", "1", "2", "3"]


def test_nothing_in_a_table_is_taken_for_html(session: Any) -> None:
    nodes = dt.nodes()[:1]
    nodes[0]["host"] = name = "<script>alert('&amp;')</script>"
    assert shown(nodes).lines[2][1] == name


def test_a_mesh_shows_who_is_where(session: Any) -> None:
    line = dt.mesh(dp=4, nodes=[3, 1, 0, 2])
    assert shown(line).lines == [
        [repr(line)],
        ["dp=0", "dp=1", "dp=2", "dp=3"],
        ["node 3", "node 1", "node 0", "node 2"],
    ]
    grid = dt.mesh(dp=2, tp=2)
    assert shown(grid).lines == [
        [repr(grid)],
        ["", "tp=0", "tp=1"],
        ["dp=0", "node 0", "node 1"],
        ["dp=1", "node 2", "node 3"],
    ]
    cube = dt.mesh(pp=2, dp=2, tp=1)
    assert [line[0] for line in shown(cube).lines[2:]] == ["pp=0, dp=0", "pp=0, dp=1", "pp=1, dp=0", "pp=1, dp=1"]
    some = cube["pp", "dp"]  # which are all of the nodes
    assert shown(some).lines == [[repr(some)], *shown(cube).lines[1:]]
    strange = dt.mesh(**{"<b>": 4})
    assert shown(strange).lines[1][0] == "<b>=0"


# ---- kill ------------------------------------------------------------------------------------------------------------


def test_a_thread_of_the_script_is_not_killed(session: Any) -> None:
    with pytest.raises(
        dt.DisttensorError, match=r"node 2 is a thread of the script .*'inproc'.*dt\.kill\(2\) ends the thread alone"
    ):
        dt.nodes()[2].kill()
    assert dt.nodes()[2].alive
