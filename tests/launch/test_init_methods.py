"""Sessions whose nodes come by themselves: one script for all ranks, workers by hand, torchrun. Real processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from aftermath import within
from limits import HANG
from ports import free_port

import disttensor as dt


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("DISTTENSOR_SECRET", "DISTTENSOR_SECRET_FILE", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


#: Has a worker say that its torch is another one, whenever it is imported.
PATCH = """
import sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "disttensor.runtime.node.worker":
            import torch
            torch.__version__ = "1.2.3"
sys.meta_path.insert(0, Finder())
"""


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a program; what is left of it and of all that it has started is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(*command: str, **environment: str) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, [str(Path(dt.__file__).parent.parent), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, *command], stdout=pipe, stderr=pipe, text=True, cwd=tmp_path, env=env
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                child.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> str:
    """What it has printed, when it has ended well."""
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == 0, err
    return out


# ---- workers by hand -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_of_torchrun_finds_a_master_elsewhere(start: Start, tmp_path: Path) -> None:
    number = free_port()
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(number)]
    nodes = start(*torchrun, "-m", "disttensor.run", "worker")
    with dt.init_master_worker(init_method=f"torchrun://localhost:{number}", nodes=2, timeout=50):
        assert (torch.ones(2, device="node:0").to("node:1") * 2).tolist() == [2.0, 2.0]
    ended(nodes)


def test_torchrun_with_a_plain_script(start: Start, tmp_path: Path) -> None:
    """Two sessions, each with nodes of its own, would do everything twice."""
    (tmp_path / "plain.py").write_text("import disttensor as dt\ndt.init_master_worker()\nprint('a session')\n")
    torchrun = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "plain.py")
    out, err = torchrun.communicate(timeout=HANG)
    assert (torchrun.returncode, out) == (1, "")
    assert "ValueError: torchrun has started 2 processes of this script, and each would start nodes of its own" in err


#: Has dtrun start with so many descriptors at most.
FEW = """
import resource, sys, dtrun
resource.setrlimit(resource.RLIMIT_NOFILE, 2 * (int(sys.argv[1]),))
sys.exit(dtrun.main(sys.argv[2:]))
"""


@pytest.mark.fault(44)
@pytest.mark.parametrize(
    ("most", "said"), [(16, "an agent takes 21"), (64, "the fork server of 20 nodes takes 109")], ids=["agent", "nodes"]
)
def test_a_worker_with_few_descriptors_ends_at_once(start: Start, most: int, said: str) -> None:
    """Before it looks for its master, which it does for 20 s here."""
    url = f"tcp://localhost:{free_port()}"
    with within(5.0):
        worker = start("-c", FEW, str(most), "worker", "--init-method", url, "-n", "20", "--timeout", "20")
        out, err = worker.communicate(timeout=HANG)
    assert (worker.returncode, out) == (1, "")
    assert err.startswith(f"dtrun worker: error: Too many open files: {said} file descriptors at least; process ")
    assert err.endswith(f"raise that with `ulimit -n 4096` (the hard limit is {most})\n")
    assert err.count("\n") == 1


@pytest.mark.row("M23", "G2")
def test_a_node_that_does_not_come_is_named(start: Start) -> None:
    url = f"tcp://localhost:{free_port()}"
    worker = start("-m", "dtrun", "worker", "--init-method", url, "--rank", "0")
    while b"dt-worker" not in Path(f"/proc/{worker.pid}/comm").read_bytes():
        time.sleep(0.01)
    with pytest.raises(
        dt.errors.StartError, match=r"nodes \[0, 1\] of 2 have not answered within 4.0 s:\nnodes 0-1: .*1 on .* of 2"
    ):
        dt.init_master_worker(init_method=url, nodes=2, timeout=4.0)


@pytest.mark.row("M23")
def test_a_master_that_does_not_come(start: Start) -> None:
    number = free_port()
    worker = start(
        "-m", "dtrun", "worker", "--master-addr", "localhost", "--master-port", str(number), "--timeout", "1"
    )
    _, err = worker.communicate(timeout=HANG)
    assert worker.returncode == 1
    assert f"dtrun worker: error: the job cannot be joined: tcp://127.0.0.1:{number}: Connection refused" in err
    assert "the secret (" in err


def test_a_host_without_torch_is_named_with_what_it_said(start: Start, tmp_path: Path) -> None:
    url = f"tcp://localhost:{free_port()}"
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("import not_there")
    path = os.pathsep.join([str(tmp_path / "broken"), str(Path(dt.__file__).parent.parent)])
    worker = start("-m", "dtrun", "worker", "--init-method", url, PYTHONPATH=path)
    expected = rf"node 0 on {socket.gethostname()} did not start: .*No module named 'not_there'\nits last output:\n"
    with pytest.raises(dt.errors.StartError, match=expected):
        dt.init_master_worker(init_method=url, nodes=1)
    assert worker.wait(HANG) == 1


@pytest.mark.fault(39)
def test_another_version_of_torch_is_named(start: Start, tmp_path: Path) -> None:
    url = f"tcp://localhost:{free_port()}"
    (tmp_path / "sitecustomize.py").write_text(PATCH)
    path = os.pathsep.join([str(tmp_path), str(Path(dt.__file__).parent.parent)])
    start("-m", "dtrun", "worker", "--init-method", url, PYTHONPATH=path)
    mine = re.escape(torch.__version__)
    with pytest.raises(
        dt.errors.StartError, match=rf"node 0 on .* did not start: .* has torch 1.2.3, .* has torch {mine}: install one"
    ):
        dt.init_master_worker(init_method=url, nodes=1)


# ---- what is left ----------------------------------------------------------------------------------------------------


def family(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


@pytest.mark.parametrize("joined", [False, True])
def test_ctrl_c_ends_a_worker_that_was_started_by_hand(joined: bool, start: Start) -> None:
    url = f"tcp://localhost:{free_port()}"
    worker = start("-m", "dtrun", "worker", "--init-method", url)
    if not joined:
        while b"dt-worker" not in Path(f"/proc/{worker.pid}/comm").read_bytes():
            time.sleep(0.01)
        worker.send_signal(signal.SIGINT)
        assert worker.wait(HANG) == 130
        return
    with dt.init_master_worker(init_method=url, nodes=1):
        worker.send_signal(signal.SIGINT)
        assert worker.wait(HANG) == 75
        with pytest.raises(dt.NodeLost):
            torch.ones(1, device="node:0").item()


SWALLOWED = """
import signal, sys, time
from disttensor.runtime.launch.rendezvous import worker_cli
from disttensor.runtime.protocol.errors import BrokenError

class Dying:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def tunnel(*_):
    Dying()
    time.sleep(60)
    raise BrokenError("it was not interrupted")

worker_cli.TunnelClient = tunnel
sys.exit(worker_cli.main(["--init-method", "tcp://localhost:31999"]))
"""


def test_ctrl_c_ends_a_worker_also_where_python_swallows_it(start: Start) -> None:
    """In a finalizer; callbacks of weak references, of which each import has some, are the same to Python."""
    worker = start("-c", SWALLOWED)
    _, err = worker.communicate(timeout=HANG)
    assert (worker.returncode, err) == (130, "")


@pytest.mark.fault(40)
@pytest.mark.cold
def test_no_secret_can_be_seen(start: Start, tmp_path: Path) -> None:
    from disttensor.runtime.launch.rendezvous.rendezvous import find_rendezvous

    url = f"tcp://localhost:{free_port()}"
    worker = start("-m", "dtrun", "worker", "--init-method", url)
    with dt.init_master_worker(init_method=url, nodes=1):
        secret = (tmp_path / ".config/disttensor/secret").read_text().strip()
        found = find_rendezvous(url).invitation(0)
        looked = set()
        for process in [*family(worker.pid), *psutil.Process().children(recursive=True)]:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # those of others may end meanwhile
                seen = "".join(Path(f"/proc/{process.pid}/{what}").read_text() for what in ("cmdline", "environ"))
                looked.add(process.pid)
                assert secret not in seen
                assert found.secret_key not in seen
        assert {process.pid for process in family(worker.pid)} <= looked
    worker.wait(HANG)


# ---- more nodes later ------------------------------------------------------------------------------------------------


@pytest.mark.row("M23")
def test_nodes_join_while_the_session_runs(start: Start) -> None:
    url = f"tcp://localhost:{free_port()}"

    def worker() -> subprocess.Popen[str]:
        return start("-m", "dtrun", "worker", "--init-method", url)

    first = worker()
    with dt.init_master_worker(init_method=url, nodes=(1, 3)):
        x = torch.arange(3.0, device="node:0")
        assert dt.wait_for_nodes() == 1
        with pytest.raises(TimeoutError, match=r"1 of 2 nodes are there after 0.1 s"):
            dt.wait_for_nodes(2, 0.1)
        with pytest.raises(ValueError, match="4 nodes: this session can have 3"):
            dt.wait_for_nodes(4)
        second = worker()
        assert dt.wait_for_nodes(2, 50) == 2
        assert dt.session.node_count() == 2
        assert (x.to("node:1") * 2).tolist() == [0.0, 2.0, 4.0]
        y = torch.ones(3, device="node:1")
        dt.all_reduce([x, y])
        assert x.tolist() == y.tolist() == [1.0, 2.0, 3.0]
        third = worker()
        assert dt.wait_for_nodes(3, 50) == 3
        assert (y.to("node:2") + torch.ones(3, device="node:2")).tolist() == [2.0, 3.0, 4.0]
        processes = family(second.pid)[1:]
        second.kill()
        assert psutil.wait_procs(processes, HANG)[1] == []
        with pytest.raises(dt.NodeLost):
            y.sum().item()
        assert dt.wait_for_nodes() == 2
    assert (first.wait(HANG), third.wait(HANG)) == (0, 0)


def test_one_that_joins_takes_a_lost_nodes_place(start: Start, tmp_path: Path) -> None:
    """If it has the same torch: of which another one is named. A host that is gone has no place any more."""
    url = f"tcp://localhost:{free_port()}"
    patched = tmp_path / "patched"
    patched.mkdir()
    (patched / "sitecustomize.py").write_text(PATCH)

    def worker(**environment: str) -> subprocess.Popen[str]:
        return start("-m", "dtrun", "worker", "--init-method", url, **environment)

    first = worker()
    with dt.init_master_worker(init_method=url, nodes=1, spares=1):
        x, node = torch.arange(3.0, device="node:0"), dt.nodes()[0]
        assert dt.wait_for_nodes() == 1
        processes = family(first.pid)[1:]
        first.kill()
        assert psutil.wait_procs(processes, HANG)[1] == []
        with pytest.raises(dt.NodeLost):
            x.sum().item()
        with pytest.raises(TimeoutError, match="node 0 can't be replaced: no host has a free place"):
            node.replace()
        second = worker(PYTHONPATH=os.pathsep.join([str(patched), *sys.path]))
        with pytest.raises(dt.errors.StartError, match=r"has torch 1\.2\.3, and .*, has torch "):
            node.replace(timeout=HANG)
        second.kill()
        third = worker()
        assert not dt.nodes()[0].alive
        node.replace(timeout=HANG)
        assert psutil.Process(node.pid) in family(third.pid)
        assert (torch.arange(3.0, device="node:0") * 2).tolist() == [0.0, 2.0, 4.0]
        with pytest.raises(dt.NodeLost):
            x.sum().item()
    assert third.wait(HANG) == 0


def test_a_host_that_does_not_answer() -> None:
    ssh = "sh -c 'case \"$*\" in *-G*) exit 1;; esac; exec sleep 600' ssh"  # -G asks for the user's settings
    with pytest.raises(
        dt.errors.StartError, match=r"ssh has not connected yet; is it up, .* `ssh 192.0.2.1 true` has to end"
    ):
        dt.init_master_worker(hosts="192.0.2.1:1", timeout=2, interface="127.0.0.1", launcher_options={"ssh": ssh})
