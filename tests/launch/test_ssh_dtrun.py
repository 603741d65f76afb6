"""dtrun --hosts and --hostfile with real sshd on two hosts: options, and modules that are on the first host only."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from host_kit import PATH, Hosts, hosts_by_ssh
from limits import HANG
from variants import variants

pytestmark = [pytest.mark.ssh]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts_by_ssh(tmp_path_factory.mktemp("hosts")) as both:
        yield both


def dtrun(hosts: Hosts, *arguments: str) -> str:
    done = hosts.run("dtrun", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    hosts.settle(10)
    return done.stdout


WHERE = """
import socket, disttensor as dt
dt.init_master_worker()
print(dt.run(socket.gethostname, node=range(dt.session.node_count())))
dt.shutdown()
"""


def test_check(hosts: Hosts) -> None:
    lines = dtrun(hosts, "--check", "--hosts", "left,right").splitlines()
    assert [line.split()[0] for line in lines] == ["host", "left", "right"]
    assert [line.split()[-1] for line in lines[1:]] == ["ok", "ok"], lines
    done = hosts.run("dtrun", "--check", "--hosts", "left,nobody.invalid")
    assert done.returncode == 1
    assert "nobody.invalid" in done.stdout.splitlines()[2]
    assert "its name is not known here" in done.stdout


@pytest.mark.row("T58")
def test_hosts(hosts: Hosts) -> None:
    (hosts.folder / "where.py").write_text(WHERE)
    assert dtrun(hosts, "--hosts", "right,left:1", "-n", "2", "where.py") == "['right', 'right', 'left']\n"
    (hosts.folder / "hostfile").write_text("left slots=1  # this one\n10.78.0.2:2\n")
    out = dtrun(hosts, "--hostfile", "hostfile", "--launcher", "ssh", "--ssh-options=-4 -o LogLevel=ERROR", "where.py")
    assert out == "['left', 'right', 'right']\n"


USE = """
import socket, disttensor as dt, helper.tools
def ask():
    return f"{socket.gethostname()} {helper.tools.answer()}"
dt.init_master_worker()
print(dt.run(ask, node=range(2)), dt.run(helper.tools.answer, node=1))
try:
    dt.run(helper.tools.fail, node=1)
    dt.synchronize()
except ValueError as e:
    print(*e.__notes__)
dt.shutdown()
"""


@pytest.mark.parametrize("there", variants(["something else", "nothing"]))
def test_modules_beside_the_script(hosts: Hosts, there: str) -> None:
    """A module's functions go by name, so the module has to be found on a host whose disk has another one, or none."""
    project = hosts.folder / there / "project"
    (project / "helper").mkdir(parents=True)
    (project / "train.py").write_text(USE)
    (project / "helper" / "tools.py").write_text("def answer(): return 42\ndef fail(): raise ValueError(answer())\n")
    hosts.run("mount", "-t", "tmpfs", "none", str(project), host="right")
    if there == "something else":
        other = project / "helper/tools.py"
        hosts.run("sh", "-c", f"mkdir '{other.parent}' && echo 'def answer(): return 41' > '{other}'", host="right")
    out = dtrun(hosts, "--hosts", "left,right", str(project / "train.py"))
    assert "['left 42', 'right 42'] 42\n" in out
    assert f'File "{project}/helper/tools.py", line 2, in fail\n    def fail(): raise ValueError(answer())' in out
    assert "ValueError: 42" in out


SLEEPS = """
import sys, threading, disttensor as dt
def nap():
    print("asleep", flush=True)
    threading.Event().wait()
with dt.init_master_worker():
    work = dt.submit(nap, node=1)
    sys.stdin.read()
    work.cancel()
"""


def test_a_job_is_seen_on_the_host_of_its_nodes(hosts: Hosts) -> None:
    """Both hosts have one /tmp, so that each sees the other one's socket as well; numbers of processes are its own."""
    (hosts.folder / "sleeps.py").write_text(SLEEPS)
    with hosts.start("dtrun", "--hosts", "left,right", "sleeps.py", stdin=subprocess.PIPE) as job:
        assert job.stdout is not None
        while "[node 1] asleep" not in (line := job.stdout.readline()):
            assert line, job.communicate()
        shown = hosts.run("dtrun", "ps", host="right").stdout
        row = re.search(r"(?m)^(\d+) +sleeps\.py +1 +right +[\d:]+  its script runs on left, pid (\d+)$", shown)
        assert row, shown
        agent, script = row.groups()
        status = hosts.run("dtrun", "status", agent, host="right").stdout
        assert status.startswith(f"its script, sleeps.py, runs on left: `dtrun status {script}` there has more\n")
        assert re.search(r"(?m)^1 +running a function", status), status
        assert " in nap\n" in hosts.run("dtrun", "stack", agent, host="right").stdout
        assert hosts.run("dtrun", "logs", agent, host="right").stdout == "[node 1] asleep\n"
        assert job.communicate(timeout=HANG) == ("", "")
        assert job.returncode == 0
    hosts.settle(10)
    assert agent not in hosts.run("dtrun", "ps", host="right").stdout


def test_check_of_hosts_with_ipv6(hosts: Hosts) -> None:
    """By names that have addresses of IPv6 only; and of both kinds, where a host has no route by one of them."""
    keys = hosts.folder / "ssh"
    with contextlib.ExitStack() as daemons:
        for number, host in enumerate(("left", "right"), 1):
            address, device = f"fd78::{number}", ["dev", "eth0", "nodad"]
            assert hosts.run("ip", "address", "add", f"{address}/64", *device, host=host).returncode == 0
            with open(hosts.folder / "hosts", "a") as names:
                print(f"{address} {host}6\n{address} {host}46\n10.78.0.{number} {host}46", file=names)
            with open(keys / "known_hosts", "a") as known:
                print(f"{host}6,{host}46,{address} {(keys / 'host.pub').read_text()}", end="", file=known)
            config = keys / f"sshd6-{host}"
            config.write_text((keys / f"sshd-{host}").read_text().replace(f"10.78.0.{number}", f"[{address}]"))
            daemons.enter_context(
                hosts.daemon(host, shutil.which("sshd", path=PATH) or "sshd", "-D", "-f", str(config))
            )

            def answers(host: str = host) -> bool:
                return hosts.run(str(keys / "client"), f"{host}6", "hostname").stdout == f"{host}\n"

            hosts.wait_until(answers, HANG, f"sshd on {host} does not answer")
        for names in ("left6,right6", "right6", "left46,right46"):
            lines = dtrun(hosts, "--check", "--hosts", names).splitlines()
            assert [line.split()[-1] for line in lines[1:]] == ["ok"] * len(names.split(",")), lines
        (hosts.folder / "where6.py").write_text(WHERE)
        assert dtrun(hosts, "--hosts", "left6,right6", "where6.py") == "['left', 'right']\n"  # as a job has it
        for host in ("left", "right"):
            assert hosts.run("ip", "-6", "address", "flush", "dev", "eth0", host=host).returncode == 0
        lines = dtrun(hosts, "--check", "--hosts", "left46,right46").splitlines()
        assert [line.split()[-1] for line in lines[1:]] == ["ok", "ok"], lines
