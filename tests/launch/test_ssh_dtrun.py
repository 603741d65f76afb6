"""dtrun --hosts and --hostfile with real sshd on two hosts: options, and modules that are on the first host only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from host_kit import Hosts, hosts_by_ssh
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
