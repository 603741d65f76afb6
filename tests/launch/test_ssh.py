"""Nodes by ssh: Debian's sshd on two hosts, which are namespaces of this machine. For root: `make ssh`."""

from __future__ import annotations

import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
from contract_kit import CONTRACT, UNDER_DTRUN, results
from host_kit import Hosts, hosts_by_ssh, signal_to
from launch_kit import CUT_OFF, DIGITS, ROOT, local_losses, losses
from limits import CONTRACT_HANG, HANG
from strangers import Job, besiege, written
from variants import variants

from disttensor.runtime.protocol.bundle import PROTOCOL, VERSION

pytestmark = [pytest.mark.ssh]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts_by_ssh(tmp_path_factory.mktemp("hosts")) as both:
        yield both


def write(hosts: Hosts, text: str) -> str:
    path = hosts.folder / "script.py"
    path.write_text(text)
    return str(path)


def succeed(hosts: Hosts, *command: str, **environment: str) -> str:
    """What a command on the left host prints."""
    done = hosts.run(*command, **environment)
    assert done.returncode == 0, done.stderr
    hosts.settle(10)
    return done.stdout


@pytest.fixture(scope="module")
def contract(hosts: Hosts) -> dict[str, str]:
    done = hosts.run("dtrun", "--hosts", "left:1,right:2", CONTRACT, *UNDER_DTRUN, timeout=CONTRACT_HANG)
    assert done.returncode == 0, done.stderr
    hosts.settle(10)
    return results(done.stdout)


@pytest.mark.row("M22")
@pytest.mark.parametrize("check", UNDER_DTRUN)
def test_contract(contract: dict[str, str], check: str) -> None:
    """``check_launcher``, on what dtrun has started."""
    assert contract[check] == ""


SESSION = """
import socket, torch, disttensor as dt
with dt.init_master_worker({arguments}threads=1):
    xs = [torch.full((3,), float(k), device=f"node:{{k}}") for k in range(4)]
    dt.all_reduce(xs)
    print([x.cpu().tolist() for x in xs])
    print(dt.run(socket.gethostname, node=[0, 1, 2, 3]))
    dt.run(print, "hello", node=3)
"""


def test_a_session(hosts: Hosts) -> None:
    lines = succeed(hosts, "python", write(hosts, SESSION.format(arguments='hosts="left:2,right:2", '))).splitlines()
    assert lines[:2] == [str([[6.0] * 3] * 4), "['left', 'left', 'right', 'right']"]
    assert "[node 3] hello" in lines


def test_an_interface_that_one_host_does_not_reach(hosts: Hosts) -> None:
    """Nodes there take the other one, for commands and for tensors."""
    hosts.run("ip", "address", "add", "10.79.0.1/32", "dev", "lo")
    program = SESSION.format(arguments='hosts="left:2,right:2", interface="10.79.0.1,10.78.0.1", ')
    lines = succeed(
        hosts, "python", write(hosts, program + "    print(torch.ones(1 << 20).to('node:3').cpu().sum())\n")
    )
    assert lines.splitlines()[:2] == [str([[6.0] * 3] * 4), "['left', 'left', 'right', 'right']"]
    assert "tensor(1048576.)" in lines


MESH = """
import sys
import torch
import disttensor as dt
from aftermath import probe

with dt.init_master_worker(hosts="left:2,right:2", threads=1):
    mesh = dt.mesh(host=2, rank=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).double().to(mesh.device)
    data = torch.randn(12, 8, dtype=torch.float64)
    x = dt.shard(data.view(2, 2, 3, 8), mesh, host=0, rank=1).view(3, 8)
    model(x).square().mean().backward()
    for p in model.parameters():
        dt.collectives.all_reduce_(p.grad, "avg", over=("host", "rank"))
    local = torch.nn.Linear(8, 4).double()
    local.load_state_dict(model.state_dict())
    local(data).square().mean().backward()
    for p, q in zip(model.parameters(), local.parameters()):
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-12, atol=1e-14)
    sums = dt.all_reduce(mesh.coordinate("host"), over="host")
    print(sums.item(), flush=True)
    sys.stdin.readline()
    try:
        while True:
            dt.all_reduce(sums.double(), over="rank").shards()[3].item()
    except dt.NodeLost as error:
        print(error.host, *error.__notes__, flush=True)
    for node in range(2):
        probe(node)
    row = dt.mesh(rank=2, nodes=[0, 1])
    print(dt.all_reduce(row.coordinate("rank"), over="rank").item(), [node["alive"] for node in dt.nodes()])
"""


@pytest.mark.fault(23)
def test_a_mesh_of_two_hosts_loses_one(hosts: Hosts) -> None:
    with hosts.start("python", write(hosts, MESH), stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n", process.communicate()[1]
        assert hosts.run("pkill", "-9", "-f", "python.* dtrun agent", host="right").returncode == 0
        hosts.await_nodes_end("right")
        out, err = process.communicate("go\n", timeout=HANG)
        lost, rest = out.splitlines()
        assert lost.startswith("right "), err
        assert re.search(r"it was host=1, rank=\d of the mesh \(host=2, rank=2\) of nodes 0, 1, 2 and 3 cpu", lost)
        assert rest == "1 [True, True, False, False]"
    hosts.settle(10)


@pytest.mark.row("M22")
def test_digits(hosts: Hosts) -> None:
    out = succeed(hosts, "python", "-m", "dtrun", "--hosts", "left:2,right:2", str(DIGITS))
    assert losses(out) == pytest.approx(local_losses(), abs=2e-4)


def test_strangers_at_every_port(hosts: Hosts) -> None:
    """On both hosts: the script's, the nodes', and whatever else the way by ssh may have opened."""
    script, fifo = written(hosts.folder)
    with (
        hosts.start("dtrun", "--hosts", "left:1,right:1", str(script), str(fifo)) as process,
        Job(process, fifo) as job,
    ):
        pids = [pid for host in ("left", "right") for pid in hosts.pids(host)]
        assert besiege(job, pids, hosts.folder / "marker") == []
        job.end()
    hosts.settle(10)


# ---- what fails ------------------------------------------------------------------------------------------------------

FAILING = """
import disttensor as dt
try:
    dt.init_master_worker(hosts={hosts!r}, threads=1, launcher_options={options!r})
except dt.errors.StartError as error:
    print(error)
"""


def fail(hosts: Hosts, names: str, **options: str) -> list[str]:
    """The lines of the error with these hosts; there is one, and afterwards no process."""
    done = hosts.run("python", write(hosts, FAILING.format(hosts=names, options=options)))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr.replace("[right] Traceback", "")
    hosts.settle(5)
    return done.stdout.splitlines()


ENDED = "did not start: ssh ended (exit code {}) before an agent was there; {}"


def test_unknown_host(hosts: Hosts) -> None:
    lines = fail(hosts, "left:4,right:3,nowhere")
    assert lines[0] == "node 7 on nowhere " + ENDED.format(255, "its name is not known here")
    assert "Could not resolve hostname nowhere" in lines[-1]


def test_wrong_python(hosts: Hosts) -> None:
    lines = fail(hosts, "right:2", python="/no/such/python")
    assert lines == [
        "node 0 on right did not start: right has no /no/such/python, and left, where the job was started, has Python "
        f"{platform.python_version()}: dtrun --python names the Python there"
    ]


@pytest.mark.slow
def test_no_key_that_leads_there(hosts: Hosts) -> None:
    lines = fail(hosts, "nobody@right", ssh_options="-o PreferredAuthentications=none")
    assert lines[0].startswith(
        "node 0 on nobody@right " + ENDED.format(255, "a key that needs no password has to lead")
    )
    assert "Permission denied" in lines[-1]


def python_of(hosts: Hosts, **files: str) -> str:
    """A python that finds these modules first on the right host, and greets."""
    folder = hosts.folder / "modules"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    python = folder / "python"
    there = f"[ $(hostname) = right ] && export PYTHONPATH={folder}:$PYTHONPATH"
    python.write_text(f'#!/bin/sh\necho Welcome\n{there}\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    return str(python)


@pytest.mark.fault(42)
def test_one_of_eight_cannot_import(hosts: Hosts) -> None:
    """Where all others have started."""
    lines = fail(hosts, "left:7,right:1", python=python_of(hosts, torch="import not_there"))
    assert lines[0] == (
        "node 7 on right did not start: no node can be started there: importing what they need failed: "
        "ModuleNotFoundError: No module named 'not_there'"
    )
    assert lines[1:3] == ["its last output:", "  Traceback (most recent call last):"]
    assert lines[-1] == "  ModuleNotFoundError: No module named 'not_there'"


@pytest.mark.slow
def test_another_version(hosts: Hosts) -> None:
    patch = "import disttensor.runtime.protocol.bundle as b\nb.PROTOCOL, b.VERSION = 99, '9.9'\n"
    lines = fail(hosts, "left:1,right:1", python=python_of(hosts, sitecustomize=patch))
    assert lines[0] == (
        "node 1 on right did not start: right has disttensor 9.9 (protocol 99), and left, where the job was started, "
        f"has disttensor {VERSION} (protocol {PROTOCOL}): install one version on both"
    )


@pytest.mark.slow
def test_a_shell_that_greets(hosts: Hosts) -> None:
    arguments = f'hosts="left:2,right:2", launcher_options={{"python": {python_of(hosts)!r}}}, '
    out = succeed(hosts, "python", write(hosts, SESSION.format(arguments=arguments)))
    assert out.splitlines()[0] == str([[6.0] * 3] * 4)
    assert "Welcome" not in out


# ---- who dies when ---------------------------------------------------------------------------------------------------

SERVING = """
import disttensor as dt, sys, time
dt.init_master_worker(hosts="left:2,right:2", threads=1)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.fault(16, 43)
def test_dtrun_killed(hosts: Hosts) -> None:
    with hosts.start("dtrun", "--hosts", "left:2,right:2", write(hosts, SERVING)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        signal_to(process, signal.SIGKILL)
        hosts.settle(10)


CUT = CUT_OFF.format('hosts="left:1,right:1", threads=1, silence=(2, 4, 8)')


@pytest.mark.fault(23)
def test_network_cut(hosts: Hosts) -> None:
    """Nothing arrives any more, and nobody is told: the left host goes on, and nothing stays on the right one."""
    with hosts.start("python", write(hosts, CUT), stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        hosts.run("ip", "link", "set", "eth0", "down", host="right")
        try:
            out, err = process.communicate("go\n", timeout=HANG)
            assert out == "3.0\nlost 1 right\n"
            # of ssh itself, if it has noticed before the script ended
            assert err in ("", "[right] Timeout, server right not responding.\n")
            hosts.settle(30)
        finally:
            hosts.run("ip", "link", "set", "eth0", "up", host="right")


LATE = """
import pathlib, sys, time
import torch
import disttensor as dt
from aftermath import Clock, probe

def late():
    pathlib.Path({late!r}).touch()

with dt.init_master_worker(hosts="left:1,right:1", threads=1, silence=(2, 4, 8)):
    for node in range(2):
        probe(node)
    print("ready", flush=True)
    sys.stdin.readline()
    clock = Clock()
    time.sleep({pause})
    try:
        dt.run(late, node=1)
    except dt.NodeLost as error:
        print(error.host, flush=True)
    clock.check(4 + 1.5, "the loss")  # and the time between two looks
    sys.stdin.readline()
    probe(0)
    print([node["alive"] for node in dt.nodes()], flush=True)
"""

#: How the link is cut, and is whole again: commands on the right host. Replies alone are lost as they go to no station.
CUTS = {
    "both ways": ("ip link set eth0 down", "ip link set eth0 up"),
    "replies": (
        "ip neigh replace 10.78.0.1 lladdr 02:00:00:00:00:99 dev eth0 nud permanent",
        "ip neigh del 10.78.0.1 dev eth0",
    ),
}


@pytest.mark.fault(6, 23, 26)
@pytest.mark.parametrize("how", CUTS)
def test_commands_that_come_late_are_not_run(how: str, hosts: Hosts) -> None:
    """The node pauses before it is lost. The link heals, what is under way arrives, and the node ends without it."""
    late, (cut, heal) = hosts.folder / "late", CUTS[how]
    text = LATE.format(late=str(late), pause=2.5 if how == "both ways" else 0)
    with hosts.start("python", write(hosts, text), stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        hosts.run(*cut.split(), host="right")
        try:
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "right\n", process.communicate()[1]
        finally:
            hosts.run(*heal.split(), host="right")
        hosts.await_nodes_end("right")
        out, err = process.communicate("healed\n", timeout=HANG)
        assert (out, process.returncode) == ("[True, False]\n", 0), err
        hosts.settle(30)
    # without the replies, what is told is run until the host is given up
    ran = late.exists()
    late.unlink(missing_ok=True)
    assert ran == (how == "replies")


@pytest.mark.parametrize(
    ("where", "victim", "seen"),
    variants(
        [
            ("left", "entry.py root ", "lost 0 left\nlost 1 right\n"),
            ("right", "python.* dtrun agent", "3.0\nlost 1 right\n"),
            ("left", "ssh .* -- right ", "3.0\nlost 1 right\n"),
        ]
    ),
    ids=["root", "agent", "ssh"],
)
def test_the_way_to_a_host_ends(hosts: Hosts, where: str, victim: str, seen: str) -> None:
    with hosts.start("python", write(hosts, CUT), stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        assert hosts.run("pkill", "-9", "-f", victim, host=where).returncode == 0
        for host in re.findall(r"lost \d (\w+)", seen):
            hosts.await_nodes_end(host)  # until then they may answer
        assert process.communicate("go\n", timeout=HANG) == (seen, "")
    hosts.settle(10)


# ---- docs/SSH.md -----------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "SSH.md").read_text()


@pytest.mark.parametrize(
    ("command", "shown"),
    re.findall(r"^    \$ (dtrun .*)\n((?:    .*\n)+)", PAGE, re.MULTILINE),
    ids=lambda text: text[:40],
)
def test_the_page(hosts: Hosts, command: str, shown: str) -> None:
    (hosts.folder / "where.py").write_text(textwrap.dedent(PAGE.split("# where.py\n")[1].split("\nTwo nodes")[0]))
    done = hosts.run(*shlex.split(command))
    out = done.stdout + done.stderr.replace("disttensor.runtime.protocol.errors.", "")
    # which it is depends on whether there is a name server
    out = out.replace("Temporary failure in name resolution", "Name or service not known")
    assert textwrap.dedent(shown) in out
    hosts.settle(10)
