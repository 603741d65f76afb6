"""Nodes by ssh: Debian's sshd on two hosts, which are namespaces of this machine. For root: `make ssh`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from host_kit import Hosts, ssh, two_hosts

pytestmark = pytest.mark.ssh


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    with two_hosts(folder) as pids:
        both = Hosts(folder, pids)
        with ssh(both) as client:
            both.environment["DISTTENSOR_SSH"] = str(client)
            yield both


def script(hosts: Hosts, text: str, **environment: str) -> str:
    """Runs a script on the left host; gives its stdout."""
    path = hosts.folder / "script.py"
    path.write_text(text)
    done = hosts.run("python", str(path), **environment)
    assert done.returncode == 0, done.stderr
    hosts.settle(10)
    return done.stdout


def test_a_session(hosts: Hosts) -> None:
    out = script(
        hosts,
        """
import socket, torch, disttensor as dt
with dt.init_master_worker(hosts="left:2,right:2", threads=1):
    xs = [torch.full((3,), float(k), device=f"node:{k}") for k in range(4)]
    dt.all_reduce(xs)
    print([x.cpu().tolist() for x in xs])
    print(dt.run(socket.gethostname, node=[0, 1, 2, 3]))
    dt.run(print, "hello", node=3)
    dt.synchronize()
""",
    )
    assert out.splitlines()[:2] == [
        "[[6.0, 6.0, 6.0], [6.0, 6.0, 6.0], [6.0, 6.0, 6.0], [6.0, 6.0, 6.0]]",
        "['left', 'left', 'right', 'right']",
    ]
