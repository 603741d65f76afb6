"""Which GPUs, cores and threads nodes get: by numbers, and set on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import HANG

import disttensor as dt
from disttensor.runtime.host import affinity
from disttensor.runtime.host.affinity import HostResources, block, plan
from disttensor.runtime.protocol.bundle import Bundle

Script = Callable[..., subprocess.CompletedProcess[str]]

#: Two sockets with four cores each, and four GPUs.
LARGE = HostResources(("0", "1", "2", "3"), ((0, 2, 4, 6), (1, 3, 5, 7)))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What the host has is looked up anew."""
    affinity.this_host.cache_clear()
    yield
    affinity.this_host.cache_clear()


def test_blocks_divide_everything() -> None:
    for n in range(12):
        for size in range(1, 12):
            blocks = [block(range(n), place, size) for place in range(size)]
            if n >= size:
                assert [x for part in blocks for x in part] == list(range(n))
                assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
            else:
                assert [len(part) for part in blocks] == [min(n, 1)] * size
                assert {x for part in blocks for x in part} == set(range(n))
                assert blocks == sorted(blocks)


@pytest.mark.row("T5")
@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, ["0123"]),
        (2, ["01", "23"]),
        (3, ["0", "1", "23"]),
        (4, ["0", "1", "2", "3"]),
        (6, ["0", "0", "1", "2", "2", "3"]),
        (8, ["0", "0", "1", "1", "2", "2", "3", "3"]),
    ],
)
def test_gpus_by_local_rank(size: int, expected: list[str]) -> None:
    for kind in ("", "gpu", "core", "numa"):
        found = [plan(kind, place, size, LARGE) for place in range(size)]
        assert ["".join(one.gpus or ()) for one in found] == expected
        assert all(("share 4 GPUs" in one.said) == (size > 4) for one in found)


def test_gpus_that_are_left_alone() -> None:
    assert plan("none", 1, 2, LARGE).gpus is None
    assert plan("gpu", 1, 2, HostResources()).gpus is None
    assert plan("none", 1, 8, LARGE).said == ""


def test_cores() -> None:
    assert [plan("core", place, 2, LARGE).cores for place in range(2)] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert [plan("core", place, 4, LARGE).cores for place in range(4)] == [(0, 2), (4, 6), (1, 3), (5, 7)]
    assert [plan("core", place, 4, LARGE).threads for place in range(4)] == [2] * 4
    assert plan("gpu", 1, 2, LARGE).cores == ()


def test_sockets() -> None:
    both = (LARGE.domains[0], LARGE.domains[1])
    assert [plan("numa", place, 4, LARGE).cores for place in range(4)] == [both[0], both[0], both[1], both[1]]
    assert [plan("numa", place, 3, LARGE).threads for place in range(3)] == [2, 2, 2]
    one = plan("numa", 0, 1, LARGE)
    assert (sorted(one.cores), one.threads) == (list(range(8)), 8)


@pytest.mark.parametrize(("size", "threads"), [(1, 8), (2, 4), (3, 2), (8, 1), (20, 1)])
def test_threads_are_the_hosts_cores_divided(size: int, threads: int) -> None:
    assert plan("gpu", 0, size, LARGE).threads == threads
    assert plan("gpu", 0, size, LARGE, threads=3).threads == 3


def test_a_containers_limit_counts() -> None:
    small = HostResources((), LARGE.domains, cpus=2)
    assert [plan("gpu", 0, size, small).threads for size in (1, 2, 4)] == [2, 1, 1]
    assert plan("core", 0, 2, small).threads == 1
    assert plan("gpu", 0, 4, small).said == "4 nodes share 2 cores"


def test_what_is_shared_is_said_in_one_line() -> None:
    host = HostResources(("0",), ((0, 1),))
    assert plan("gpu", 0, 3, host).said == "3 nodes share 1 GPU, and 3 nodes share 2 cores"
    assert plan("gpu", 0, 1, host).said == ""


def test_what_was_divided_already_is_not_divided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Slurm, for each of its tasks: what a node sees is all its own."""
    monkeypatch.setenv(affinity.OWN, "cores")
    assert (affinity.this_host().own_gpus, affinity.this_host().own_cores) == (False, True)
    one = plan("gpu", 2, 4, HostResources(("2",), ((4, 5),), own_gpus=True, own_cores=True))
    assert (one.gpus, one.threads, one.said) == (("2",), 2, "")
    one = plan("core", 1, 2, HostResources(("0", "1"), ((4, 5),), own_cores=True))
    assert (one.gpus, one.cores, one.threads) == (("1",), (4, 5), 2)
    one = plan("gpu", 1, 2, HostResources(("3",), ((0, 1),), own_gpus=True))
    assert (one.gpus, one.threads) == (("3",), 1)


def test_an_unknown_kind() -> None:
    with pytest.raises(ValueError, match=r"bind.'socket' is unknown"):
        plan("socket", 0, 1, LARGE)
    with pytest.raises(ValueError, match=r"bind.'socket' is unknown"):
        dt.init_master_worker(nodes=2, bind="socket")


@pytest.mark.parametrize(
    ("told", "expected"),
    [("", ()), ("2,0", ("2", "0")), ("GPU-a, GPU-b", ("GPU-a", "GPU-b")), ("1,-1,3", ("1",)), ("-1", ())],
)
def test_gpus_that_the_environment_names(monkeypatch: pytest.MonkeyPatch, told: str, expected: tuple[str, ...]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    assert affinity.gpus() == expected


def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no such variable now, nor afterwards (of one that is not there monkeypatch remembers nothing)."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


def test_gpus_are_bound_before_anything_asks_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "_uuids", lambda: ("GPU-a", "GPU-b", "GPU-c"))
    unset(monkeypatch)
    monkeypatch.setenv("MARK", "")
    for _ in range(2):  # a process of mpiexec's has one session after the other
        bound = affinity.apply(Bundle("job", 5, "", local_rank=1, local_size=2, env={"MARK": "set"}))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-c"
        assert (bound.gpus, bound.said) == (("GPU-b", "GPU-c"), "")
    assert os.environ["MARK"] == "set"
    assert affinity.gpus() == ("GPU-b", "GPU-c")


def test_only_the_first_of_a_host_says_what_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "_uuids", lambda: ("GPU-a",))
    for place in range(2):
        unset(monkeypatch)
        said = affinity.apply(Bundle("job", 7, "", local_rank=place, local_size=2)).said
        assert said.startswith(f"{os.uname().nodename}: 2 nodes share 1 GPU") == (place == 0)


def test_variables_to_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "a=b")
    monkeypatch.delenv("NOWHERE", raising=False)
    assert affinity.forwarded(["HERE", "X=1", "Y="]) == {"HERE": "a=b", "X": "1", "Y": ""}
    with pytest.raises(ValueError, match="--env NOWHERE: it is not set here; --env NOWHERE=VALUE"):
        affinity.forwarded(["NOWHERE"])


def state() -> dict[str, Any]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"gpus": visible, "cores": os.sched_getaffinity(0), "threads": torch.get_num_threads(), "x": os.getenv("X")}


@pytest.mark.row("T5", "T58")
def test_nodes_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")  # they need not exist
    cores = sorted(os.sched_getaffinity(0))
    with dt.init_master_worker(nodes=2, bind="core", env={"X": "y"}):
        nodes = dt.run(state, node=[0, 1])
    assert [node["gpus"] for node in nodes] == ["4,5", "6,7"]
    assert [node["x"] for node in nodes] == ["y", "y"]
    if len(cores) > 1:
        assert nodes[0]["cores"].isdisjoint(nodes[1]["cores"])
        assert nodes[0]["cores"] | nodes[1]["cores"] == set(cores)
        assert sum(node["threads"] for node in nodes) <= len(cores)


def test_nodes_that_are_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("DISTTENSOR_BIND", "none")
    with dt.init_master_worker(nodes=1, threads=3):
        assert dt.run(state) == {"gpus": "4,5", "cores": os.sched_getaffinity(0), "threads": 3, "x": os.getenv("X")}


SHARED = """
import os
import disttensor as dt
with dt.init_master_worker(nodes=3):
    print(dt.run(os.getenv, "CUDA_VISIBLE_DEVICES", node=range(3)))
"""


@pytest.mark.row("T5")
def test_sharing_is_said_once_for_a_host(script: Script) -> None:
    """Three nodes on two GPUs: two have one of them both."""
    found = script(SHARED, CUDA_VISIBLE_DEVICES="6,7")
    assert found.returncode == 0, found.stderr
    assert found.stdout == "['6', '6', '7']\n"
    lines = [line for line in found.stderr.splitlines() if "share" in line]
    assert len(lines) == 1
    assert "[node 0]" in lines[0]
    assert "3 nodes share 2 GPUs" in lines[0]


@pytest.mark.row("T5")
@pytest.mark.gpu
def test_real_gpus() -> None:
    count = torch.cuda.device_count()
    assert len(affinity.gpus()) == count
    with dt.init_master_worker(nodes=count):
        assert [node["devices"] for node in dt.nodes()] == [["cpu", "cuda:0"]] * count
        uuids = dt.run(lambda: str(torch.cuda.get_device_properties(0).uuid), node=range(count))
        assert len(set(uuids)) == count


OPTIONS = """
import os
import disttensor as dt
with dt.init_master_worker():
    names = "FIRST", "SECOND", "CUDA_VISIBLE_DEVICES"
    print(dt.run(lambda: tuple(map(os.environ.get, names)), node=[0, 1]))
print("SECOND" in os.environ)
"""


@pytest.mark.row("T58")
def test_dtruns_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--env is for the nodes, and is there before they import anything."""
    (tmp_path / "program.py").write_text(OPTIONS)
    monkeypatch.setenv("FIRST", "one")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    command = [sys.executable, "-m", "dtrun", "-n2", "--bind", "none", "--env", "FIRST", "--env=SECOND=x=y"]
    found = subprocess.run([*command, str(tmp_path / "program.py")], capture_output=True, text=True, timeout=HANG)
    assert found.stdout.splitlines() == [str([("one", "x=y", "4,5")] * 2), "False"], found.stderr


def test_a_variable_that_is_not_set(tmp_path: Path) -> None:
    (tmp_path / "program.py").touch()
    command = [sys.executable, "-m", "dtrun", "--env", "NOWHERE_AT_ALL", str(tmp_path / "program.py")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert found.returncode == 2
    assert "--env NOWHERE_AT_ALL: it is not set here" in found.stderr
