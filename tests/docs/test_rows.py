"""docs/ROWS.md names tests and examples that exist, and every row once; tests of rows that no other file shows."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from checkout import ROOT
from equal import same
from processes import alive_after
from variants import variants

import disttensor as dt

ROWS = (ROOT / "docs" / "ROWS.md").read_text()
#: How many rows each ancestor has.
COUNTS = {"M": 26, "T": 58, "I": 39, "P": 11, "G": 17}

Script = Callable[..., subprocess.CompletedProcess[str]]


# ---- the document ----------------------------------------------------------------------------------------------------


@cache
def names_of(file: str) -> frozenset[str]:
    """The test functions of a file, those of classes as Class::test."""
    names = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{f.name}" for f in node.body if isinstance(f, ast.FunctionDef)}
    return frozenset(names)


def test_everything_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", ROWS)
    assert len(named) > 40
    missing = [f"{file}::{name}" for file, name in named if not (ROOT / file).exists() or name not in names_of(file)]
    assert missing == []
    programs = re.findall(r"`((?:examples|tools)/[\w/]+\.py)`", ROWS)
    assert programs
    assert [p for p in programs if not (ROOT / p).exists()] == []


def test_every_row_of_the_tables_shows_something() -> None:
    for line in re.findall(r"^\| [MTIPG]\d.*$", ROWS, re.MULTILINE):
        assert re.search(r"`(tests|examples|tools)/", line), line


def test_every_row_is_there_once() -> None:
    found = re.findall(r"^\| ([MTIPG]\d+) \|", ROWS, re.MULTILINE)
    listed = ROWS.split("## Not yet")[1]
    for letter, first, last in re.findall(r"\b([MTIPG])(\d+)(?:-[MTIPG](\d+))?\b", listed):
        found += [f"{letter}{i}" for i in range(int(first), int(last or first) + 1)]
    assert sorted(found) == sorted(f"{k}{i}" for k, n in COUNTS.items() for i in range(1, n + 1))


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_start_and_stop() -> None:
    for n in (1, 3, 2):
        with dt.init_master_worker(nodes=n, launcher="inproc"):
            assert dt.is_initialized()
            assert dt.session.node_count() == torch.node.device_count() == len(dt.nodes()) == n
            assert (torch.ones(2, device=f"node:{n - 1}") + 1).tolist() == [2, 2]
        assert not dt.is_initialized()
    dt.shutdown()  # nothing to do
    with pytest.raises(dt.DisttensorError, match="init_master_worker"):
        dt.factories.zeros(1)


def test_elements_and_storages() -> None:
    local = torch.arange(12.0).view(3, 4)
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        remote = local.to("node:1")
        for x in (local, remote):
            x[1, 2] = -5
            x.t()[0, 2] += 0.5
            x.view(-1)[11] = x[0, 3]
        same(remote, local)
        assert remote[1, 2].item() == -5
        assert float(remote[2, 0]) == 8.5
        assert remote.tolist() == local.tolist()
        for x in (local, remote):
            assert x[1:].untyped_storage().nbytes() == 48
            assert x.untyped_storage().device == x.device


def test_a_dict_from_node_to_node() -> None:
    def make() -> dict[str, object]:
        return {"a": 7, "b": 3.14, "c": [1, {"x": torch.arange(3)}], 5: ("t", None, True)}

    def look(d: dict[object, object]) -> tuple[object, ...]:
        x = d["c"][1].pop("x")
        return type(x) is torch.Tensor, x * 2, d

    with dt.init_master_worker(nodes=2, launcher="inproc"):
        d = dt.run(make, node=0)
        same(d["c"][1]["x"], torch.arange(3))
        assert d["c"][1]["x"].get_node() == 0
        local, doubled, rest = dt.run(look, d, node=1)
        assert local
        assert doubled.get_node() == 1
        same(doubled, torch.arange(3) * 2)
        assert rest == {"a": 7, "b": 3.14, "c": [1, {}], 5: ("t", None, True)}


def test_processes_and_locks_on_a_node(script: Script) -> None:
    done = script("""
import fcntl, os, subprocess, threading
import disttensor as dt

def program():
    said = subprocess.run(["cat"], input="a b", capture_output=True, text=True).stdout
    code = subprocess.run(["sh", "-c", "exit 7"]).returncode
    sleeper = subprocess.Popen(["sleep", "100"])
    sleeper.terminate()
    child = os.fork()
    if child == 0:
        os._exit(3)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open("lock", "w") as mine, open("lock", "w") as theirs:
        fcntl.flock(mine, fcntl.LOCK_EX)
        try:
            fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            status += 100
        fcntl.flock(mine, fcntl.LOCK_UN)
        fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return said, code, sleeper.wait(), status, os.getpid(), threading.get_native_id()

with dt.init_master_worker(nodes=1):
    *results, pid, thread = dt.run(program)
    print(results, pid == thread == dt.nodes()[0]["pid"] != os.getpid())
""")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "['a b', 7, -15, 103] True\n"


def test_nodes_do_not_run_the_script(script: Script) -> None:
    """There is no `if __name__ == "__main__"`, and none is needed."""
    done = script("""
import os, sys
import disttensor as dt
print("the script, in", os.getpid())
dt.init_master_worker(nodes=2)
def seen():
    script = os.path.join(os.getcwd(), "program.py")
    return [m for m in sys.modules.values() if getattr(m, "__file__", "") == script] == []
print(dt.run(seen, node=0), dt.run(seen, node=1))
""")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"the script, in \d+\nTrue True\n", done.stdout)


ENDS = [("os.kill(os.getpid(), signal.SIGINT)", -2), ("1 / 0", 1)]


@pytest.mark.parametrize(("end", "code"), variants(ENDS))
def test_nodes_end_with_the_script(script: Script, end: str, code: int) -> None:
    done = script(f"""
import os, signal, torch
import disttensor as dt
dt.init_master_worker(nodes=2)
x = torch.ones(300, 300, device="node:1")
print(*[n["pid"] for n in dt.nodes()], flush=True)
for _ in range(500):
    x = x @ x / 300
{end}
x.sum().item()
""")
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert alive_after(3, pids) == []
    assert done.returncode == code, done.stderr


CHANNEL = """
from disttensor.runtime.channel import get_channel

class Mine(get_channel("tcp")):
    name = "mine"

    def isend(self, tensor, peer, transfer):
        print("my channel carries", tensor.numel(), "to", peer, flush=True)
        return super().isend(tensor, peer, transfer)
"""
SENDING = """
import torch
import disttensor as dt
with dt.init_master_worker("mine", nodes=2):
    x = torch.arange(5).to("node:0").to("node:1")
    print(x.sum().item())
"""
CARRIED = ["10", "[node 0] my channel carries 5 to 1", "my channel carries 5 to 0"]


@pytest.mark.slow
def test_a_channel_of_an_installed_package(script: Script, tmp_path: Path) -> None:
    (tmp_path / "my_channel.py").write_text(CHANNEL)
    info = tmp_path / "my_channel-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-channel\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[disttensor.channels]\nmine = my_channel:Mine\n")
    done = script(SENDING)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == CARRIED


def test_a_channel_that_the_script_registers(script: Script, tmp_path: Path) -> None:
    (tmp_path / "my_channel.py").write_text(CHANNEL)
    registers = "from my_channel import Mine\nimport disttensor as dt\ndt.channels.register_channel('mine', Mine)\n"
    done = script(registers + SENDING)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == CARRIED
