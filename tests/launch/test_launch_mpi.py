"""Nodes that mpiexec has started, with MPICH and with Open MPI: what scripts see of it, and how everything ends."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from contract_kit import CONTRACT, results
from limits import HANG
from mpi_kit import KINDS, Mpi, dedented
from strangers import Job, besiege, children, written

pytestmark = [pytest.mark.mpi]

#: Processes that mpiexec is made of.
STARTERS = {"mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "mpirun", "prterun", "prted", "orted"}

#: The beginning of most scripts here.
HEAD = """
import os, signal, subprocess, sys, time
import torch
import disttensor as dt
"""


@pytest.fixture(params=KINDS)
def mpi(request: pytest.FixtureRequest, tmp_path: Path) -> Mpi:
    return Mpi(request.param, tmp_path)


@pytest.mark.row("M22")
def test_a_script(mpi: Mpi) -> None:
    text = """
    print("arguments", sys.argv[1:], __name__, os.path.basename(__file__))
    with dt.init_master_worker():
        n = dt.session.node_count()
        xs = [torch.full((3,), float(k + 1), device=f"node:{k}") for k in range(n)]
        dt.all_reduce(xs)
        print([x.cpu().tolist() for x in xs], xs[0].to("node:1").sum().item())
        print(len({dt.run(os.getpid, node=k) for k in range(n)} | {os.getpid()}), "processes")
        def speak(words):
            print(words)
            os.system("echo and a child")
        dt.run(speak, "good morning", node=1)
        dt.run(torch.set_default_dtype, torch.float64, node=0)
        torch.backends.cudnn.deterministic = True
        print("deterministic", dt.run(lambda: torch.backends.cudnn.deterministic, node=0))
        first = torch.randn(2, device="node:0").cpu()
        def sleeper():
            subprocess.Popen(["sleep", "100"])
        sleeper()
        dt.run(sleeper, node=1)
    try:
        dt.init_master_worker(nodes=3)
    except ValueError as e:
        print(e)
    torch.backends.cudnn.deterministic = False
    with dt.init_master_worker(nodes=1):
        print("again", dt.session.node_count(), torch.equal(first.float(), torch.randn(2, device="node:0").cpu()))
        print("deterministic", dt.run(lambda: torch.backends.cudnn.deterministic, node=0))
    """
    done = mpi.run(HEAD + dedented(text), "-x", "1", options=("--backend", "tcp"))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    ours = [line for line in lines if not line.startswith("[node ")]
    assert ours == [
        "arguments ['-x', '1'] __main__ script.py",
        "[[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]] 9.0",
        "3 processes",
        "deterministic True",
        "nodes=3: mpiexec has started 2 beside the master (it needs -n 4)",
        "again 1 True",
        "deterministic False",
    ]
    assert sorted(set(lines) - set(ours)) == ["[node 1] and a child", "[node 1] good morning"]


def test_contract(mpi: Mpi) -> None:
    """Of ``check_launcher`` what there is without processes that a launcher starts, and ends one by one."""
    done = mpi.run(Path(CONTRACT).read_text(), "real_worker")
    assert done.returncode == 0, done.stderr
    assert results(done.stdout) == {"real_worker": ""}


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("sys.exit(7)", 7, ""),
        ("print(1)", 0, "never called disttensor.init_master_worker(): its nodes were started in vain"),
        ("dt.init_master_worker()\n1 / 0", 1, "in <module>\n    1 / 0\n    ~~^~~\nZeroDivisionError"),
        (
            "dt.init_master_worker()\nx = torch.arange(3, device='node:1')[torch.tensor([7]).to('node:1')]",
            1,
            "nothing in the script asked for its result",
        ),
    ],
)
def test_exit_codes(mpi: Mpi, body: str, code: int, says: str) -> None:
    done = mpi.run(HEAD + body)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "runpy" not in done.stderr


def test_a_node_that_does_not_end(mpi: Mpi) -> None:
    body = """
dt.init_master_worker(nodes=1)
ones = torch.ones(2, device="node:0")
def spin(mark):
    open(mark, "x").close()
    while True:
        pass
import threading
threading.Thread(target=lambda: dt.run(spin, "spins"), daemon=True).start()
while not os.path.exists("spins"):
    time.sleep(0.01)
"""
    mpi.run(HEAD + body)  # its exit code is mpiexec's affair, as that ends the node


def test_a_function_is_interrupted(mpi: Mpi) -> None:
    """By the side channel, whose secret key each node makes for itself, too."""
    body = """
import signal, threading
dt.init_master_worker()
pid = dt.run(os.getpid, node=1)
def spin(mark):
    open(mark, "x").close()
    while True:
        pass
def interrupt():
    while not os.path.exists("spins"):
        time.sleep(0.01)
    dt.tasks.interrupt(1)
thread = threading.Thread(target=interrupt)
thread.start()
try:
    dt.run(spin, "spins", node=1)
except dt.errors.CancelledError as e:
    print(e)
thread.join()
print(dt.run(os.getpid, node=1) == pid)
"""
    done = mpi.run(HEAD + body)
    assert (done.returncode, done.stdout) == (0, "spin() was cancelled\nTrue\n"), done.stderr


def waiting(body: str) -> str:
    """A script with a session, which tells the pids of nodes and master."""
    start = """
dt.init_master_worker()
x = torch.ones(1000, device="node:0")
print(*[dt.run(os.getpid, node=k) for k in range(2)], os.getpid(), flush=True)
"""
    return HEAD + start + body


FOREVER = """
while True:
    x = (x + 1).to("node:1").to("node:0")
    x.sum().item()
"""


def pids_of(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return [int(pid) for pid in line.split()]


@pytest.mark.parametrize("victim", [0, 2], ids=["node", "master"])
def test_one_is_killed(mpi: Mpi, victim: int) -> None:
    with mpi.start(waiting(FOREVER)) as process:
        os.kill(pids_of(process)[victim], signal.SIGKILL)
        process.communicate(timeout=HANG)
    assert process.returncode != 0


def test_mpiexec_is_killed(mpi: Mpi) -> None:
    with mpi.start(waiting(FOREVER)) as process:
        pids_of(process)
        process.kill()
        process.communicate(timeout=HANG)


def test_ctrl_c(mpi: Mpi) -> None:
    """The terminal sends it to the whole group of processes. Before that, a look at what others can see."""
    spy = """
from disttensor.runtime.launch.starters.mpi import mpi_processes
bundles = []
mpi_processes().order = lambda rank, data, order=mpi_processes().order: (bundles.append(data), order(rank, data))
"""
    tell = "print(dt.startup.start.current.session().router._secret.hex(), *bundles, flush=True)"
    with mpi.start(
        waiting(tell + FOREVER).replace("dt.init_master_worker()", spy + "dt.init_master_worker()")
    ) as process:
        pids_of(process)
        assert process.stdout is not None
        secret, _, bundles = process.stdout.readline().partition(" ")
        assert len(secret) == 64
        assert bundles.count('"secret_key":""') == 2
        assert bundles.count('"side_secret_key":""') == 2
        assert secret not in bundles
        for child in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            assert secret not in " ".join(child.cmdline()) + str(child.environ())
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=HANG)
    assert process.returncode != 0


def test_strangers_at_every_port(mpi: Mpi) -> None:
    """Those of the session are ours; mpiexec, its helpers and MPI's library in each process listen as they like."""
    script, fifo = written(mpi.folder)
    with mpi.start(script.read_text(), str(fifo)) as process, Job(process, fifo) as job:
        theirs = besiege(job, children(process.pid), mpi.folder / "marker")
        ranks = [port for port in theirs if port.pid in job.pids]
        assert ranks, theirs  # MPI's library in each of them; the rest is mpiexec's, and its helpers'
        assert {psutil.Process(port.pid).name() for port in theirs if port not in ranks} <= STARTERS
        job.probe()
        job.end()
        process.communicate(timeout=HANG)


def test_a_plain_script(mpi: Mpi) -> None:
    """Each process would start nodes of its own."""
    (mpi.folder / "x.py").write_text("import disttensor as dt\ndt.init_master_worker(nodes=1)\n")
    done = subprocess.run(
        [*mpi.mpiexec, "-n", "2", mpi.bin / "python", "x.py"],
        cwd=mpi.folder, env=mpi.environment, capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    assert done.returncode != 0
    assert "ValueError: mpiexec has started 2 processes of this script" in done.stderr


def test_without_mpiexec(mpi: Mpi) -> None:
    mpi.mpiexec, arguments = [], ["-m", "dtrun", "--launcher", "mpi", "x.py"]
    (mpi.folder / "x.py").write_text("")
    done = subprocess.run(
        [mpi.bin / "python", *arguments], cwd=mpi.folder, env=mpi.environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == (
        "dtrun: error: this needs MPI processes: start the script by `mpiexec -n 5 dtrun script.py`\n"
    )


def test_one_process_is_not_enough(mpi: Mpi) -> None:
    done = mpi.run("", n=1, options=("--launcher", "mpi"))
    assert done.returncode == 1
    assert "mpiexec has to start at least 2 processes, the master and a node" in done.stderr


def test_the_mpiexec_of_another_mpi(tmp_path: Path) -> None:
    mpich, other = (Mpi(kind, tmp_path) for kind in ("mpich", "openmpi"))
    mpich.bin = other.bin
    done = mpich.run("")
    assert done.returncode == 1
    assert "mpiexec has started 3 processes, of which mpi4py sees 1: its library (Open MPI" in done.stderr
    assert done.stderr.count("dtrun: error") == 1


def test_without_mpi4py(mpi: Mpi) -> None:
    (mpi.folder / "mpi4py.py").write_text("raise ImportError('not here')")
    mpi.environment["PYTHONPATH"] = f"{mpi.folder}{os.pathsep}{mpi.environment['PYTHONPATH']}"
    done = mpi.run("")
    assert done.returncode == 1
    assert done.stderr.startswith(
        "dtrun: error: MPI needs mpi4py and an MPI library (pip install mpi4py mpich): not here"
    )
