"""Nodes that mpiexec has started on two hosts, reached by a real sshd (host_kit.py), with MPICH and with Open MPI."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_kit import Hosts, signal_to, ssh, two_hosts, why_not
from limits import HANG
from mpi_kit import ENVIRONMENTS, KINDS
from variants import variants

pytestmark = [pytest.mark.mpi]

HOSTFILES = {"mpich": "left:2\nright:2\n", "openmpi": "left slots=2\nright slots=2\n"}

#: Three nodes: rank 0 and node 0 are on the left, nodes 1 and 2 on the right.
HEAD = """
import os, time
import torch
import disttensor as dt

dt.init_master_worker()
"""

FOREVER = """
x = torch.ones(1000, device="node:0")
print("busy", flush=True)
while True:
    x = (x + 1).to("node:2").to("node:0")
    x.sum().item()
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hosts, Path]]:
    if missing := why_not("sshd", "ssh"):
        pytest.skip(f"no two hosts here: {missing}")
    folder = tmp_path_factory.mktemp("hosts")
    with two_hosts(folder) as pids:
        hosts = Hosts(folder, pids)
        hosts.environment |= {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "UCX_TLS": "tcp",  # MPICH's takes two hosts of one kernel for one
            "FORWARDED": "yes",
        }
        with ssh(hosts) as client:
            yield hosts, client


@pytest.fixture(params=KINDS)
def command(hosts: tuple[Hosts, Path], request: pytest.FixtureRequest) -> list[str]:
    """`mpiexec --hostfile ... dtrun`, to which options of dtrun's and the script are added."""
    kind, folder, client = request.param, hosts[0].folder, str(hosts[1])
    bin_ = ENVIRONMENTS / kind / "bin"
    if not (bin_ / "mpiexec").exists():
        pytest.skip(f"{bin_} has no mpiexec: `make mpi` makes it")
    (folder / "hostfile").write_text(HOSTFILES[kind])
    if kind == "mpich":
        options = ["-launcher-exec", client, "-f", "hostfile"]
    else:
        options = ["--mca", "plm_rsh_agent", client, "--hostfile", "hostfile", "-x", "PYTHONPATH", "-x", "FORWARDED"]
    return [str(bin_ / "mpiexec"), *options, "-n", "4", str(bin_ / "python"), "-m", "dtrun"]


@pytest.fixture(autouse=True)
def nothing_left(hosts: tuple[Hosts, Path]) -> Iterator[None]:
    yield
    hosts[0].settle()


def start(hosts: Hosts, command: list[str], text: str, *options: str) -> subprocess.Popen[str]:
    (hosts.folder / "script.py").write_text(HEAD + text)
    return hosts.start(*command, *options, "script.py")


@pytest.mark.row("P11")
def test_a_script(hosts: tuple[Hosts, Path], command: list[str]) -> None:
    text = """
    print([(node["host"], node["alive"]) for node in dt.nodes()])
    print(dt.run(os.getcwd, node=2) == os.getcwd(), dt.run(os.getenv, "FORWARDED", node=2))
    xs = [torch.full((100_000,), float(k + 1), device=f"node:{k}") for k in range(3)]
    dt.all_reduce(xs)
    dt.all_reduce(xs[1:], algorithm="ring")
    print([x.to("node:1").mean().item() for x in xs], xs[2].cpu().mean().item())
    dt.run(print, "good morning", node=2)
    dt.shutdown()
    with dt.init_master_worker("mpi", trusted_network=True):
        x = torch.ones(1_000_000, device="node:1").to("node:0").to("node:2")
        print("again", x.sum().item())
    """
    with start(hosts[0], command, "\n".join(line.removeprefix("    ") for line in text.splitlines())) as process:
        out, err = process.communicate(timeout=HANG)
    assert process.returncode == 0, err
    assert err == ""
    assert sorted(out.splitlines()) == sorted(
        [
            "[('left', True), ('right', True), ('right', True)]",
            "True yes",
            "[6.0, 12.0, 12.0] 12.0",
            "[node 2] good morning",
            "again 1000000.0",
        ]
    )


@pytest.mark.parametrize("victim", variants(["far node", "mpiexec"]))
def test_one_is_killed(hosts: tuple[Hosts, Path], command: list[str], victim: str) -> None:
    with start(hosts[0], command, "print(dt.run(os.getpid, node=2), flush=True)\n" + FOREVER) as process:
        assert process.stdout is not None
        pid = process.stdout.readline().strip()
        assert process.stdout.readline() == "busy\n", process.communicate()[1]
        if victim == "mpiexec":
            signal_to(process, signal.SIGKILL)
        else:
            hosts[0].run("kill", "-KILL", pid, host="right")
        process.communicate(timeout=HANG)
    assert process.returncode != 0
