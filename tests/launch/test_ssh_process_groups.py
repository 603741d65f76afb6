"""torch.distributed on two hosts that are reached by ssh: functions on nodes, and programs without a master."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from host_kit import Hosts, hosts_by_ssh

pytestmark = [pytest.mark.ssh]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts_by_ssh(tmp_path_factory.mktemp("hosts")) as both:
        yield both


FUNCTION = """
import socket, torch, torch.distributed as dist
import disttensor as dt
def total(fail=-1):
    dist.all_reduce(x := torch.ones(1))
    if dist.get_rank() == fail:
        raise ValueError("a mistake")
    dist.all_reduce(x)
    return socket.gethostname(), x.item()
dt.init_master_worker()
print(dt.run(total, node=[0, 1, 2], distributed=True))
for rank in range(3):
    try:
        dt.run(total, rank, node=[0, 1, 2], distributed=True)
    except ValueError as e:
        print(e.__notes__[-1])
print(dt.run(total, node=[2, 0], distributed=True))
dt.shutdown()
"""


def test_a_function(hosts: Hosts) -> None:
    (hosts.folder / "function.py").write_text(FUNCTION)
    command = ["dtrun", "--hosts", "left:1,right:2", "function.py"]
    done = hosts.run(*command)
    assert "--trusted-network" in done.stderr  # gloo authenticates nobody
    done = hosts.run(*command[:1], "--trusted-network", *command[1:])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "[('left', 9.0), ('right', 9.0), ('right', 9.0)]",
        *["and 2 other nodes broke off, as ranks wait for each other"] * 3,
        "[('right', 4.0), ('left', 4.0)]",
    ]
    hosts.settle(10)


PROGRAM = """
import os, socket, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(x := torch.ones(1))
if os.environ["RANK"] in sys.argv:
    dist.destroy_process_group()  # or torch may abort while the interpreter ends
    sys.exit("no luck")
print(os.environ["RANK"], os.environ["LOCAL_RANK"], socket.gethostname(), x.item(), flush=True)
if len(sys.argv) > 1:
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_program(hosts: Hosts) -> None:
    (hosts.folder / "program.py").write_text(PROGRAM)
    command = ["dtrun", "--process-group", "--hosts", "left:1,right:2", "program.py"]
    done = hosts.run(*command)
    assert (done.returncode, done.stdout) == (1, "")
    assert "--trusted-network" in done.stderr
    done = hosts.run(*command[:-1], "--trusted-network", command[-1])
    assert done.returncode == 0, done.stderr
    said = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    assert said == ["0 0 left 3.0", "1 0 right 3.0", "2 1 right 3.0"]
    done = hosts.run(*command[:-1], "--trusted-network", command[-1], "1")
    assert done.returncode == 1, done.stderr
    assert "dtrun: error: node 1 on right failed first: exit code 1\nits last output:\n" in done.stderr
    assert done.stderr.endswith("  no luck\n")
    hosts.settle(10)
