"""Nodes that Ray places, on a real cluster of two raylets: `make ray`."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from checkout import ROOT
from contract_kit import CONTRACT, UNDER_DTRUN, results
from launch_kit import DIGITS, local_losses, losses
from limits import CONTRACT_HANG, HANG
from ray_kit import CPUS, ENVIRONMENT, cluster
from strangers import Job, besiege, check_told, written
from variants import variants

pytestmark = [pytest.mark.ray]

#: Names the processes of one run: they inherit it, but for those that Ray starts.
MARK = "DISTTENSOR_TEST_RUN"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cluster(tmp_path_factory.mktemp("ray")) as found:
        yield found


class Runs:
    """Scripts, in a folder of their own, and what is left of them."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.environment = {**ENVIRONMENT, "RAY_ADDRESS": address, MARK: uuid.uuid4().hex}

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=self.folder,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *command: str, timeout: float = HANG, **environment: str) -> subprocess.CompletedProcess[str]:
        with self.start(*command, **environment) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def script(self, text: str) -> str:
        (self.folder / "script.py").write_text(text)
        return "script.py"

    def pids(self) -> list[int]:
        """What runs of these runs. Nodes are known by the folder that they work in."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # it has ended
                if process.environ().get(MARK) == self.environment[MARK] or process.cwd() == str(self.folder):
                    found.append(process.pid)
        return found

    def left(self) -> list[str]:
        """Their command lines."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(psutil.Error, OSError):
                found.append(" ".join(psutil.Process(pid).cmdline()))
        return found

    def settle(self, within: float = HANG) -> None:
        deadline = time.monotonic() + within
        while left := self.left():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


@pytest.fixture
def runs(tmp_path: Path, address: str) -> Iterator[Runs]:
    found = Runs(tmp_path, address)
    yield found
    found.settle()


@pytest.fixture(scope="module")
def contract(address: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    runs = Runs(tmp_path_factory.mktemp("contract"), address)
    done = runs.run("-m", "dtrun", "--launcher", "ray", "-n", "3", CONTRACT, *UNDER_DTRUN, timeout=CONTRACT_HANG)
    assert done.returncode == 0, done.stderr
    runs.settle()
    return results(done.stdout)


@pytest.mark.parametrize("check", UNDER_DTRUN)
def test_contract(contract: dict[str, str], check: str) -> None:
    """``check_launcher``, on what dtrun has had Ray start."""
    assert contract[check] == ""


@pytest.mark.row("M22")
def test_digits(runs: Runs) -> None:
    done = runs.run("-m", "dtrun", "--launcher", "ray", "-n", "4", str(DIGITS))
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == local_losses()


def test_both_hosts(runs: Runs) -> None:
    """From a script that is a driver of Ray's itself; modules beside it, two sessions, and a Ray that stays usable."""
    (runs.folder / "helper.py").write_text("import os\ndef server():\n    return os.getppid()\n")
    script = runs.script(f"""
import os, ray, time, torch, helper, disttensor as dt
ray.init(address=os.environ.pop("RAY_ADDRESS"), log_to_driver=False)
for nodes in {CPUS + 2}, 2:
    with dt.init_master_worker(nodes=nodes, launcher="ray", threads=1):
        xs = [torch.full((3,), float(k), device=f"node:{{k}}") for k in range(nodes)]
        dt.all_reduce(xs)
        servers = dt.run(helper.server, node=range(nodes))
        print(xs[-1].cpu().tolist(), [servers.index(s) for s in servers], dt.run(os.cpu_count, node=0) > 0)
        end = time.monotonic() + 20  # a group of before is removed in Ray's own time
        while (room := ray.available_resources().get("CPU")) != {2 * CPUS} - nodes and time.monotonic() < end:
            time.sleep(0.1)
        print(room)
print(ray.get(ray.remote(lambda: 7).remote()))
""")
    done = runs.run(script)
    assert done.returncode == 0, done.stderr
    first, room, second, more_room, answer = done.stdout.splitlines()
    assert first == f"{[15.0] * 3} [0, 0, 0, 0, 4, 4] True"
    assert (float(room), second, float(more_room), answer) == (2.0, f"{[1.0] * 3} [0, 0] True", 6.0, "7")


PROGRAM = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(x := torch.ones(1))
print(os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], x.item())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_program_of_a_process_group(runs: Runs) -> None:
    """More nodes than one host has room for."""
    count = CPUS + 1
    script = runs.script(PROGRAM)
    done = runs.run(
        "-m", "dtrun", "--process-group", "--launcher", "ray", "-n", str(count), "--trusted-network", script
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    places = [(rank, CPUS) for rank in range(CPUS)] + [(0, 1)]
    assert lines == [f"{rank} {local} {size} {count}.0" for rank, (local, size) in enumerate(places)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("nodes=1, launcher_options={'address': '127.0.0.1:1'}", "no Ray cluster answers at 127.0.0.1:1: Connection"),
        ("nodes=1, launcher_options={'python': '/nowhere'}", "node 0 on HOST did not start: its agent"),
        pytest.param(
            "nodes=9, timeout=6, launcher_options={'num_gpus': 2}",
            "Ray has no room for 9 x {'CPU': 1.0, 'GPU': 2.0} (PACK) yet; now there is {'CPU': 8.0}",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_mistakes(runs: Runs, options: str, says: str) -> None:
    done = runs.run("-c", f"import disttensor as dt; dt.init_master_worker(launcher='ray', {options})")
    assert done.returncode == 1
    assert says.replace("HOST", os.uname().nodename) in done.stderr


def test_one_host_cannot(tmp_path: Path) -> None:
    """Nodes on one of the hosts don't start: one error that names them and says why, and no process is left."""
    broken = tmp_path / "broken"
    (broken / "disttensor").mkdir(parents=True)
    (broken / "disttensor" / "__init__.py").write_text("")
    (broken / "dtrun.py").write_text("import nothing_of_the_kind\n")
    (tmp_path / "run").mkdir()
    with cluster(tmp_path, f"PYTHONPATH={broken}") as found:
        runs = Runs(tmp_path / "run", found)
        start = "import disttensor as dt; dt.init_master_worker(nodes=8, launcher='ray')"
        done = runs.run("-c", start)
        runs.settle()
    assert done.returncode == 1
    host = os.uname().nodename
    assert done.stderr.rstrip().endswith(f" on {host} did not start: its agent has ended (exit code 1)"), done.stderr
    assert "\nits last output:\n" in done.stderr
    assert "No module named 'nothing_of_the_kind'" in done.stderr


@pytest.mark.slow
def test_gpus(tmp_path: Path) -> None:
    """Each node sees those that Ray has given it; by default one, where there are enough."""
    (tmp_path / "run").mkdir()
    with cluster(tmp_path, gpus=2) as found:
        runs = Runs(tmp_path / "run", found)
        script = runs.script("""
import os, disttensor as dt
for nodes, options in (4, {}), (2, {"num_gpus": 2}):
    with dt.init_master_worker(nodes=nodes, launcher="ray", launcher_options=options):
        print(sorted(dt.run(lambda: os.environ.get("CUDA_VISIBLE_DEVICES", "none"), node=range(nodes))))
""")
        done = runs.run(script)
        runs.settle()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['0', '0', '1', '1']", "['0,1', '0,1']"]


BUSY = """
import time, torch, disttensor as dt
with dt.init_master_worker(nodes=4, launcher="ray"):
    x = torch.ones(3, device="node:3").sum().item()
    print("ready", flush=True)
    dt.run(time.sleep, 100, node=range(4))
    dt.synchronize()
"""


def test_nothing_is_left_when_dtrun_is_killed(runs: Runs) -> None:
    with runs.start("-m", "dtrun", "--launcher", "ray", "-n", "4", runs.script(BUSY)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert len(runs.left()) > 4
        process.kill()
        assert process.wait(HANG) != 0
        runs.settle(10)


@pytest.mark.cold  # it finds processes by their command lines
def test_strangers_at_every_port(tmp_path: Path) -> None:
    """Those of the session are ours; Ray's library listens in the driver. (A cluster of its own: Ray keeps spare
    processes for jobs that last.)"""
    script, fifo = written(tmp_path)
    command = "-m", "dtrun", "--launcher", "ray", "-n", "2", str(script), str(fifo)
    with cluster(tmp_path) as address:
        runs = Runs(tmp_path, address)
        with runs.start(*command) as process, Job(process, fifo) as job:
            theirs = besiege(job, runs.pids(), tmp_path / "marker")
            assert theirs
            for port in theirs:
                assert port.pid not in job.pids
                assert re.search(r"ray_driver\.py|^ray::", " ".join(psutil.Process(port.pid).cmdline())), port
            job.probe()
            job.end()
            errors = process.communicate(timeout=HANG)[1]
            assert process.returncode == 0, errors
            check_told(job, errors)


def test_an_actor_that_is_killed(runs: Runs) -> None:
    """Its host's nodes end with it, the others go on."""
    script = runs.script("""
import os, signal, psutil, torch, disttensor as dt
def actor():
    return next(p.pid for p in psutil.Process().parents() if "ray::NodeActor" in p.cmdline()[0])
with dt.init_master_worker(nodes=6, launcher="ray", threads=1):
    x = torch.ones(3, device="node:0")
    os.kill(dt.run(actor, node=4), signal.SIGKILL)
    for rank in 4, 5:
        try:
            while True: torch.ones(3, device=f"node:{rank}").sum().item()
        except dt.NodeLost as e:
            print(str(e).split("(")[0])
    print(x.sum().item(), flush=True)
    os._exit(0)
""")
    done = runs.run(script)
    assert (done.returncode, done.stdout) == (0, "node 4 \nnode 5 \n3.0\n"), done.stderr


PAGE = (ROOT / "docs" / "RAY.md").read_text()
COMMANDS = re.findall(r"^    \$ (dtrun .*)\n    (.*)\n", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("command", "shown"), variants(COMMANDS), ids=[command for command, _ in COMMANDS])
def test_the_page(runs: Runs, command: str, shown: str) -> None:
    """docs/RAY.md: its commands print what stands below them."""
    program = re.search(r"^    # train.py\n((?:    .*\n|\n)+)", PAGE, re.MULTILINE)
    assert program is not None
    (runs.folder / "train.py").write_text(textwrap.dedent(program[1]))
    done = runs.run("-m", *command.split())
    assert shown in (done.stdout + done.stderr).splitlines()
