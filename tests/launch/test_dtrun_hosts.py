"""dtrun with several hosts, which are all this one: agents that its root starts, and such that join it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    secret = tmp_path / "secrets" / "secret"
    path = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DISTTENSOR_SECRET_FILE": str(secret)}


def test_hosts(tmp_path: Path, environment: dict[str, str]) -> None:
    """A root beside the script, and agents on hosts, which are this one."""
    (tmp_path / "script.py").write_text("""
import os, torch, disttensor as dt
def place(rank):
    print("of", os.getppid())
dt.init_master_worker(timeout=50)
print("sum", (torch.ones(3, device="node:2") * 2).sum().item(), dt.node_count(), "DISTTENSOR_NODES" in os.environ)
dt.run(place, dt.Each([0, 1, 2]), node=range(3))
""")
    command = [sys.executable, "-m", "dtrun", "--launcher", "nearby", "--hosts", "a:2,b", "--log-dir=logs", "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "sum 6.0 3 False" in done.stdout.splitlines()
    servers = [(tmp_path / f"logs/{rank}/stdout.log").read_text() for rank in range(3)]
    assert servers[0] == servers[1] != servers[2]


COUNT = """
import torch, disttensor as dt
def agent():
    import os
    return os.getppid()
dt.init_master_worker()
servers = dt.run(agent, node=range(dt.node_count()))
print([servers.index(s) for s in servers], torch.ones(3, device="node:1").sum().item())
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [["--node-rank"], []], ids=["ranks", "no ranks"])
def test_one_command_on_every_host(tmp_path: Path, environment: dict[str, str], rank: list[str]) -> None:
    """As with torchrun. Without ranks the host with the address is the first; here both have it, so one is told."""
    (tmp_path / "script.py").write_text(COUNT)
    common = [sys.executable, "-m", "dtrun", "--nnodes=2", "-n2", "--master-addr=127.0.0.1"]
    common += ["--master-port", str(free_port())]
    how = {"cwd": tmp_path, "env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    second = subprocess.Popen([*common, "--node-rank", "1", "script.py"], **how)
    first = subprocess.Popen([*common, *(["--node-rank", "0"] if rank else []), "script.py"], **how)
    with first, second:
        try:
            out, err = first.communicate(timeout=50)
            assert (first.returncode, out) == (0, "[0, 0, 2, 2] 3.0\n")
            assert [line for line in err.splitlines() if "nodes share" not in line] == []
            assert second.communicate(timeout=20) == ("", "")
            assert second.returncode == 0
        finally:
            first.kill()
            second.kill()
