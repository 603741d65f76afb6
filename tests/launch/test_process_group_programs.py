"""``dtrun --process-group``: ordinary programs of torch.distributed, as torchrun runs them; how they end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from checkout import ROOT
from limits import HANG
from variants import variants

TRAINING = """
import os, sys
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = (torch.randn(96, n)[rank::size] for n in (8, 1))
for step in range(4):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dist.all_reduce(total := loss.detach().clone())
    if rank == 0:
        print(f"step {step}: {total.item() / size!r}")
pair = dist.new_group([0, 2])  # by the same store
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # DDP keeps the group, and torch may abort while an interpreter with one ends (pytorch/pytorch#179291)
"""

#: A program without torch, which would take seconds to import.
TELLING = """
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS MARK CUDA_VISIBLE_DEVICES".split()
print(json.dumps([[os.environ.get(name) for name in names], sys.argv, sys.path[0], __name__]))
"""

WAITING = """
import os, signal, sys, time
print("ready", os.environ["RANK"])
if os.environ["RANK"] in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
while True:
    time.sleep(60)
"""

Dtrun = Callable[..., contextlib.AbstractContextManager[subprocess.Popen[str]]]


@pytest.fixture
def dtrun(tmp_path: Path) -> Dtrun:
    """Runs a text as `dtrun --process-group -n 3 program.py arguments`; nothing of it may be left in the end."""

    @contextlib.contextmanager
    def start(text: str, *arguments: str, options: tuple[str, ...] = ("-n", "3")) -> Iterator[subprocess.Popen[str]]:
        (tmp_path / "program.py").write_text(text)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        program = [] if "program" in options else [str(tmp_path / "program.py")]
        command = [sys.executable, "-m", "dtrun", "--process-group", *options, *program, *arguments]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    return start


def lines_of(out: str) -> list[str]:
    """Without who has said them."""
    return sorted(line.partition("] ")[2] if line.startswith("[node") else line for line in out.splitlines())


@pytest.mark.row("G15")
def test_the_same_as_under_torchrun(dtrun: Dtrun, tmp_path: Path) -> None:
    with dtrun(TRAINING) as process:
        out, err = process.communicate(timeout=HANG)
        assert process.returncode == 0, err
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    other = subprocess.run([*torchrun, tmp_path / "program.py"], capture_output=True, text=True, env=environment)
    assert len(lines_of(out)) == 4
    assert lines_of(out) == lines_of(other.stdout), other.stderr


@pytest.mark.row("G15")
@pytest.mark.parametrize("launcher", ["local", "nearby"])
def test_what_a_program_is_told(dtrun: Dtrun, launcher: str, tmp_path: Path) -> None:
    hosts = ("--launcher", "nearby", "--hosts", "a:2,b:1") if launcher == "nearby" else ("-n", "3")
    with dtrun(TELLING, "-x", "--help", options=(*hosts, "--env", "MARK=1")) as process:
        out, err = process.communicate(timeout=HANG)
        assert process.returncode == 0, err
    local = ["012", "333"] if launcher == "local" else ["010", "221"]
    argv, folder = [str(tmp_path / "program.py"), "-x", "--help"], str(tmp_path)
    for rank, line in enumerate(lines_of(out)):
        told, *rest = json.loads(line)
        mine, size = local[0][rank], local[1][rank]
        assert told[:7] == [str(rank), mine, "3", size, "127.0.0.1", "1", "1"] or launcher == "nearby"
        assert rest == [argv, folder, "__main__"]
    assert sorted(json.loads(line)[0][1] for line in lines_of(out)) == sorted(local[0])


@pytest.mark.row("G15")
def test_modules_and_other_programs(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text("import os, sys; print(os.environ['RANK'], sys.argv[1:])")
    for options in (("-n", "2", "-m"), ("-n", "2", "--no-python")):
        program = ["inner", "a"] if "-m" in options else [sys.executable, str(tmp_path / "inner.py"), "a"]
        command = [sys.executable, "-m", "dtrun", "--process-group", *options, *program]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=HANG)
        assert lines_of(found.stdout) == ["0 ['a']", "1 ['a']"], found.stderr


def test_gpus_are_the_programs_own_business(dtrun: Dtrun, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says torch.cuda.set_device(LOCAL_RANK), as under torchrun; unless it was told otherwise."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    for options, expected in ((("-n", "2"), ["4,5", "4,5"]), (("-n", "2", "--bind", "gpu"), ["4", "5"])):
        with dtrun(TELLING, options=options) as process:
            out = process.communicate(timeout=HANG)[0]
        assert [json.loads(line)[0][7] for line in lines_of(out)] == expected


# ---- ends ------------------------------------------------------------------------------------------------------------


FAILING = """
import os, sys, traceback, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(x := torch.ones(1))
if dist.get_rank() == 1:
    if "kill" in sys.argv:
        os.kill(os.getpid(), 9)
    try:
        raise ValueError("mine")
    except ValueError:
        traceback.print_exc()
        os._exit(1)  # as above
dist.all_reduce(x)
"""


FAILURES = [("raise", 1, "exit code 1"), ("kill", 137, "killed by SIGKILL")]


@pytest.mark.row("G15")
@pytest.mark.parametrize(("how", "code", "said"), variants(FAILURES))
def test_the_first_failure_ends_all(dtrun: Dtrun, how: str, code: int, said: str) -> None:
    with dtrun(FAILING, how) as process:
        _, err = process.communicate(timeout=HANG)
    assert process.returncode == code, err
    assert f"dtrun: error: node 1 on {socket.gethostname()} failed first: {said}" in err
    if how == "raise":
        assert err.splitlines()[-1].endswith("ValueError: mine")


def test_one_that_ends_while_others_never_would(dtrun: Dtrun) -> None:
    with dtrun(f"import os, sys\nif os.environ['RANK'] == '2': sys.exit(3)\n{WAITING}", "0", "1") as process:
        _, err = process.communicate(timeout=HANG)
    assert process.returncode == 3
    assert f"dtrun: error: node 2 on {socket.gethostname()} failed first: exit code 3" in err


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    assert process.stdout is not None
    for _ in range(3):
        assert "ready" in process.stdout.readline()
    found = psutil.Process(process.pid).children(recursive=True)
    assert len(found) >= 5, found  # three nodes, their server, the store's host
    return found


@pytest.mark.cold  # by whose command line it is found
def test_the_stores_host_is_ended(dtrun: Dtrun) -> None:
    with dtrun(WAITING) as process:
        others = family(process)
        (host,) = [one for one in others if any("store_host" in word for word in one.cmdline())]
        host.kill()
        _, err = process.communicate(timeout=HANG)
        assert process.returncode == 1
        assert "torch's store is gone" in err
        assert not psutil.wait_procs(others, timeout=HANG)[1]


@pytest.mark.parametrize("number", variants([signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
def test_dtrun_is_ended(dtrun: Dtrun, number: signal.Signals) -> None:
    """One node ignores what it can."""
    with dtrun(WAITING, "1") as process:
        others = family(process)
        process.send_signal(number)
        assert process.wait(HANG) == (-number if number == signal.SIGKILL else 128 + number)
        assert not psutil.wait_procs(others, timeout=HANG)[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--backend", "tcp"), "--backend is for nodes with a master"),
        (("--encrypt",), "--encrypt: torch.distributed cannot encrypt what ranks send each other (gloo, NCCL)"),
        (("DISTTENSOR_ENCRYPT=1",), "DISTTENSOR_ENCRYPT: torch.distributed cannot encrypt"),
        (("--checksum",), "--checksum: torch.distributed cannot compare checksums of what ranks send each other"),
        (("--launcher", "mpi"), "under mpiexec"),
        (("--no-python", "program", "no-such-program"), "there is no program"),
    ],
)
def test_mistakes(dtrun: Dtrun, options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "=" in options[0]:
        monkeypatch.setenv(*options[0].split("="))
        options = ()
    with dtrun("", options=options) as process:
        _, err = process.communicate(timeout=HANG)
    assert process.returncode == 2
    assert message in err
