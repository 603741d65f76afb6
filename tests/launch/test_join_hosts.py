"""Nodes that join from another host: by names, addresses, interfaces and files; and a network that is cut."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator

import pytest
from host_kit import Hosts, signal_to, two_hosts, why_not
from launch_kit import CUT_OFF, DIGITS, local_losses, losses
from limits import HANG
from variants import variants

pytestmark = [pytest.mark.netns]

SESSION = """
import socket, sys, torch
import disttensor as dt
with dt.init_master_worker(**eval(sys.argv[1])):
    xs = [torch.full((3,), float(k + 1), device=f"node:{k}") for k in range(dt.session.node_count())]
    dt.all_reduce(xs)
    print([x.cpu().tolist() for x in xs])
    print([node["host"] for node in dt.nodes()])
    dt.run(print, "hello", node=1)
"""

#: What it prints with node 0 on the left host and node 1 on the right one.
PRINTED = [str([[3.0] * 3] * 2), "['left', 'right']", "[node 1] hello"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if why := why_not():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("hosts")
    with two_hosts(folder) as pids:
        both = Hosts(folder, pids)
        both.environment["HOME"] = str(folder)  # a user whose home both hosts have
        for host, address in (("left", "fd00::1"), ("right", "fd00::2")):
            both.run("ip", "address", "add", f"{address}/64", "dev", "eth0", "nodad", host=host)
        yield both


def script(hosts: Hosts, text: str = SESSION) -> str:
    path = hosts.folder / "script.py"
    path.write_text(text)
    return str(path)


@contextlib.contextmanager
def running(hosts: Hosts, *commands: tuple[str, ...]) -> Iterator[list[subprocess.Popen[str]]]:
    """(host, argument of python's, ...) of each. When it is over nothing of them may be left."""
    with contextlib.ExitStack() as stack:
        started = []
        for host, *command in commands:
            started.append(stack.enter_context(hosts.start("python", *command, host=host)))
            stack.callback(signal_to, started[-1], signal.SIGKILL)
        yield started
        hosts.settle(20)


def printed(*processes: subprocess.Popen[str]) -> list[str]:
    """What the first has printed; all have ended well."""
    results = [(process.communicate(timeout=HANG), process.returncode) for process in processes]
    assert [code for _, code in results] == [0] * len(processes), results
    return results[0][0][0].splitlines()


@pytest.mark.row("M23", "G4")
@pytest.mark.parametrize("host", variants(["[fd00::1]", "left"]))
def test_one_script_on_both_hosts(hosts: Hosts, host: str) -> None:
    def of(rank: int) -> str:
        return repr({"init_method": f"tcp://{host}:29500", "rank": rank, "world_size": 3})

    path = script(hosts)
    with running(hosts, ("left", path, of(0)), ("left", path, of(1)), ("right", path, of(2))) as processes:
        assert printed(*processes) == PRINTED


@pytest.mark.row("M23", "G14")
@pytest.mark.parametrize("interface", variants(["eth0", "10.78.0.1", "fd00::1,lo"]))
def test_a_connection_file_and_an_interface(hosts: Hosts, interface: str) -> None:
    job = str(hosts.folder / "job")
    master = ("left", script(hosts), repr({"init_method": f"file://{job}", "nodes": 2, "interface": interface}))
    worker = ("-m", "dtrun", "worker", "--connection-file", job, "--rank")
    with running(hosts, master, ("left", *worker, "0"), ("right", *worker, "1")) as processes:
        assert printed(*processes) == PRINTED


def test_a_master_that_only_its_own_host_reaches(hosts: Hosts) -> None:
    job = hosts.folder / "job"
    master = ("left", script(hosts), repr({"init_method": f"file://{job}", "nodes": 1}))
    with running(hosts, master) as processes:
        hosts.wait_until(job.exists, 60, "there is no connection file")
        worker = ("python", "-m", "dtrun", "worker", "--connection-file", str(job), "--timeout", "2")
        done = hosts.run(*worker, host="right")
        assert done.returncode == 1
        assert "127.0.0.1" in done.stderr
        assert "on host left" in done.stderr
        assert "listens to its own host only: give it --interface for others" in done.stderr
        signal_to(processes[0], signal.SIGTERM)
    job.unlink(missing_ok=True)


def test_torchrun_on_both_hosts(hosts: Hosts) -> None:
    def run(host: str, rank: int) -> tuple[str, ...]:
        where = ("--nnodes", "2", "--node-rank", str(rank), "--master-addr", "left", "--master-port", "29500")
        of = (script(hosts), repr({"init_method": "env://"}))
        return host, "-m", "torch.distributed.run", "--nproc-per-node", str(2 - rank), *where, *of

    with running(hosts, run("left", 0), run("right", 1)) as processes:
        assert sorted(printed(*processes)) == sorted(PRINTED)


PROGRAM = """
import os, socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(x := torch.ones(1))
print(os.environ["RANK"], os.environ["LOCAL_RANK"], socket.gethostname(), x.item())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_program_of_a_process_group(hosts: Hosts) -> None:
    def run(host: str, *further: str) -> tuple[str, ...]:
        where = ("--nnodes", "2", "--master-addr", "left", "--master-port", "29500", *further)
        return host, "-m", "dtrun", "--process-group", *where, "-n", "2", script(hosts, PROGRAM)

    with running(hosts, run("left", "--trusted-network"), run("right")) as processes:
        lines = sorted(line.partition("] ")[2] for line in printed(*processes))
    assert lines == ["0 0 left 4.0", "1 1 left 4.0", "2 0 right 4.0", "3 1 right 4.0"]


CUT = CUT_OFF.format('init_method="tcp://left:29500", nodes=2, silence=(2, 4, 8)')


def test_a_network_that_is_cut(hosts: Hosts) -> None:
    worker = ("-m", "dtrun", "worker", "--master-addr", "left", "--master-port", "29500", "--rank")
    with (
        running(hosts, ("left", *worker, "0"), ("right", *worker, "1")),
        hosts.start("python", script(hosts, CUT), stdin=subprocess.PIPE) as master,
    ):
        assert master.stdout is not None
        assert master.stdout.readline() == "ready\n", master.communicate()[1]
        hosts.run("ip", "link", "set", "eth0", "down", host="right")
        try:
            out, err = master.communicate("go\n", timeout=HANG)
            assert (out, err) == ("3.0\nlost 1 right\n", "")
            hosts.settle(30)
        finally:
            hosts.run("ip", "link", "set", "eth0", "up", host="right")


@pytest.mark.slow
def test_digits_by_dtrun_on_both_hosts(hosts: Hosts) -> None:
    def dtrun(rank: int) -> tuple[str, ...]:
        where = ("--node-rank", str(rank), "--master-addr", "left", "--master-port", "29500")
        return ("left", "right")[rank], "-m", "dtrun", "--nnodes", "2", "-n", "2", *where, str(DIGITS)

    with running(hosts, dtrun(0), dtrun(1)) as processes:
        assert losses("\n".join(printed(*processes))) == pytest.approx(local_losses(), abs=2e-4)


SERVING = """
import disttensor as dt, time
dt.init_master_worker(threads=1)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_killed(hosts: Hosts, victim: int) -> None:
    """dtrun on the first host ends all; on the second one its nodes, and the script hears of it when it asks."""

    def dtrun(rank: int) -> tuple[str, ...]:
        where = ("--node-rank", str(rank), "--master-addr", "left", "--master-port", "29500")
        return ("left", "right")[rank], "-m", "dtrun", "--nnodes", "2", "-n", "1", *where, script(hosts, SERVING)

    with running(hosts, dtrun(0), dtrun(1)) as processes:
        out = processes[0].stdout
        assert out is not None
        assert out.readline() == "ready\n", processes[0].communicate()[1]
        signal_to(processes[victim], signal.SIGKILL)
        if victim == 0:
            hosts.settle(10)
        else:
            hosts.wait_until(lambda: not hosts.processes("right"), 10, "not all have ended on the right host")
            assert hosts.processes("left")
            signal_to(processes[0], signal.SIGTERM)
