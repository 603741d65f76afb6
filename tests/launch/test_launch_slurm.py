"""Nodes that Slurm has started, on a real one (slurm_kit.py): `make slurm`."""

from __future__ import annotations

import re
import shlex
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from contract_kit import CONTRACT, UNDER_DTRUN, results
from host_kit import ROOT, signal_to
from launch_kit import local_losses, losses
from limits import CONTRACT_HANG, HANG
from sklearn.datasets import load_digits
from slurm_kit import Slurm, cluster, why_not
from strangers import Job, besiege, written
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from variants import variants

pytestmark = [pytest.mark.slurm]

#: The two ways: tasks of one srun, of which the first is the master, and a master that has srun start its nodes.
STEP = ["srun", "-N2", "-n4", "--overcommit", "dtrun"]
ALLOCATION = ["salloc", "-N2", "-n3", "--overcommit", "dtrun", "--launcher", "slurm"]
WAYS = pytest.mark.parametrize("way", [STEP, ALLOCATION], ids=["srun dtrun", "dtrun --launcher slurm"])

HEAD = """
import os, sys, time
import torch
import disttensor as dt
"""

FOREVER = """
dt.init_master_worker()
x = torch.ones(1000, device="node:0")
print("busy", os.getpid(), dt.run(os.getpid, node=2), dt.nodes()[2]["host"], flush=True)
while True:
    x = (x + 1).to("node:2").to("node:0")
    x.sum().item()
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if missing := why_not():
        pytest.skip(f"no Slurm here: {missing}")
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_left(slurm: Slurm) -> Iterator[None]:
    """Fails a test that leaves a job, a process on one of the hosts, or a connection file."""
    yield
    slurm.settle()
    assert connection_files(slurm) == []


def connection_files(slurm: Slurm) -> list[Path]:
    return list((slurm.folder / ".config" / "disttensor").glob("*"))


def script(slurm: Slurm, text: str) -> str:
    (slurm.folder / "script.py").write_text(text)
    return "script.py"


def test_the_kit(slurm: Slurm) -> None:
    """What the other tests rely on: tasks on one host and on two, batch jobs, their exit codes and their ends."""
    assert slurm.run("srun", "-n", "4", "--overcommit", "hostname").stdout.split() == ["left"] * 4
    assert sorted(slurm.run("srun", "-N", "2", "hostname").stdout.split()) == ["left", "right"]
    assert slurm.batch("--output=batch.txt", "--wrap=hostname; exit 3")[1] == 3
    assert (slurm.folder / "batch.txt").read_text() == "left\n"
    submitted = slurm.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=srun sleep 1000")
    slurm.wait_until(lambda: slurm.jobs() == [submitted.stdout.strip()], 20, "other jobs are there")  # which complete
    assert slurm.run("scancel", submitted.stdout.strip()).returncode == 0


def test_strangers_at_every_port(slurm: Slurm) -> None:
    """Those of the session and its tunnel are ours; srun's are for its tasks, and strangers there have it hang."""
    path, fifo = written(slurm.folder)
    with slurm.start(*STEP, str(path), str(fifo)) as process, Job(process, fifo) as job:
        pids = [pid for host in ("left", "right") for pid in slurm.pids(host)]
        theirs = besiege(job, pids, slurm.folder / "marker", spared=True)
        assert {Path(f"/proc/{port.pid}/comm").read_text().strip() for port in theirs} <= {"srun", "slurmstepd"}
        job.probe()
        job.end()
        process.communicate(timeout=HANG)


#: Of the tasks of a step there are none to be had anew, for a master to be killed.
OF_A_STEP = [name for name in UNDER_DTRUN if name != "master_killed"]


def contract(slurm: Slurm, way: list[str], checks: list[str]) -> dict[str, str]:
    done = slurm.run(*way, CONTRACT, *checks, timeout=CONTRACT_HANG)
    assert done.returncode == 0, done.stderr
    return results(done.stdout)


@pytest.fixture(scope="module")
def of_a_step(slurm: Slurm) -> dict[str, str]:
    return contract(slurm, STEP, OF_A_STEP)


@pytest.fixture(scope="module")
def of_an_allocation(slurm: Slurm) -> dict[str, str]:
    return contract(slurm, ALLOCATION, UNDER_DTRUN)


@pytest.mark.row("M22")
@pytest.mark.parametrize("check", OF_A_STEP)
def test_contract_of_a_step(of_a_step: dict[str, str], check: str) -> None:
    """``check_launcher``, on the tasks that srun has started."""
    assert of_a_step[check] == ""


@pytest.mark.slow
@pytest.mark.parametrize("check", UNDER_DTRUN)
def test_contract_of_an_allocation(of_an_allocation: dict[str, str], check: str) -> None:
    """The same, on what dtrun has had srun start."""
    assert of_an_allocation[check] == ""


@pytest.mark.row("I15")
@pytest.mark.slow
@WAYS
def test_a_script(slurm: Slurm, way: list[str]) -> None:
    text = """
    dt.init_master_worker()
    print([(node["host"], node["alive"]) for node in dt.nodes()])
    dt.run(print, "good morning", node=2)
    print([dt.run(os.getenv, "SLURM_PROCID", node=k) for k in range(3)])
    sys.exit(7)
    """
    done = slurm.run(*way, script(slurm, HEAD + textwrap.dedent(text)), timeout=HANG)
    step = way is STEP
    assert done.returncode == 7, done.stderr
    hosts = ["left", "right" if step else "left", "right"]
    assert sorted(done.stdout.splitlines()) == sorted(
        [
            str([(host, True) for host in hosts]),
            "[node 2] good morning",
            str([str(rank + step) for rank in range(3)]),
        ]
    )


@pytest.mark.slow
def test_a_session_after_another(slurm: Slurm) -> None:
    """Outside of an allocation srun asks for one. A node takes what its task has been given, and no part of that."""
    text = """
    for nodes, gpus in (1, "--gpus-per-task=2"), (2, "--gpus-per-task=1"), (2, "--gpus-per-node=1"):
        options = {"srun": f"--nodes=1 {gpus}"}
        with dt.init_master_worker(launcher="slurm", nodes=nodes, launcher_options=options):
            print([dt.run(os.getenv, "CUDA_VISIBLE_DEVICES", node=k) for k in range(nodes)])
    """
    done = slurm.run("python", script(slurm, HEAD + textwrap.dedent(text)), timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['0,1']", "['0', '1']", "['0', '0']"]
    assert done.stderr.count("share 1 GPU") == 1, done.stderr


def test_srun_waits_for_resources(slurm: Slurm) -> None:
    """A start that takes too long says what it waits for."""
    job = slurm.run("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1000")
    way = ["dtrun", "--launcher", "slurm", "-n", "2", "--launcher-option", "srun=--exclusive"]
    done = slurm.run(*way, script(slurm, HEAD + "dt.init_master_worker(timeout=1)"), timeout=HANG)
    slurm.run("scancel", job.stdout.strip())
    assert done.returncode == 1
    assert "nodes [0, 1] of 2 have not answered within 1 s" in done.stderr
    assert "queued and waiting for resources" in done.stderr


def test_process_group(slurm: Slurm) -> None:
    """A script of torch.distributed on all tasks, each with the GPU that Slurm has given it."""
    text = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(x)
    print(x.item(), dist.get_world_size(), os.environ["LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"])
    dist.destroy_process_group()
    """
    (slurm.folder / "train.py").write_text(textwrap.dedent(text))
    command = re.findall(r"^    (dtrun .* train\.py)$", PAGE, re.MULTILINE)[0].split()
    done = slurm.run("salloc", "-N2", "-n4", "--gpus-per-task=1", *command, timeout=HANG)
    assert done.returncode == 0, done.stderr
    said = {line.partition("] ")[2] for line in done.stdout.splitlines()}
    assert said == {"10.0 4 0 0", "10.0 4 0 1"}, done.stdout


def test_init_method(slurm: Slurm) -> None:
    """Without dtrun: every task runs the script, and all but the first are nodes from this call on."""
    text = """
    dt.init_master_worker(init_method="slurm://")
    print("master of", dt.session.node_count(), torch.arange(3, device="node:2").sum().item())
    """
    done = slurm.run(
        "srun", "-N2", "-n4", "--overcommit", "python", script(slurm, HEAD + textwrap.dedent(text)), timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "master of 3 3\n"


def test_a_plain_script(slurm: Slurm) -> None:
    """One for each task would start nodes of its own; a batch script of the same allocation is the only one."""
    text = HEAD + "with dt.init_master_worker(nodes=1):\n    print('one session')\n"
    done = slurm.run("srun", "-N2", "-n4", "--overcommit", "python", script(slurm, text), timeout=HANG)
    assert (done.returncode, done.stdout) == (1, "")
    assert "ValueError: srun has started 4 processes of this script" in done.stderr
    (slurm.folder / "plain.sbatch").write_text(f"#!/bin/sh\npython {script(slurm, text)}\n")
    job, code = slurm.batch("-n4", "--overcommit", "--output=plain-%j.txt", "plain.sbatch")
    said = (slurm.folder / f"plain-{job}.txt").read_text()
    assert (code, said) == (0, "one session\n"), said


PAGE = (ROOT / "docs" / "SLURM.md").read_text()


COMMANDS = re.findall(r"^    ((?:srun|dtrun) .* script\.py)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", variants(COMMANDS))
def test_commands_of_the_page(slurm: Slurm, command: str) -> None:
    """What docs/SLURM.md says to type; dtrun is typed below salloc."""
    below = [] if command.startswith("srun") else ["salloc", "-N", "2", "-n", "4", "--gpus-per-task=1"]
    script(slurm, HEAD + "with dt.init_master_worker():\n    print(dt.session.node_count(), 'nodes')")
    done = slurm.run(*below, *shlex.split(command), timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "4 nodes\n"


@pytest.mark.row("M22", "I32")
@pytest.mark.parametrize("name", variants(["digits", "allreduce"]))
def test_batch_scripts(slurm: Slurm, name: str) -> None:
    """The examples, as they are, by one way and the other. The digits' losses are those of local nodes."""
    link = slurm.folder / "examples"
    if not link.exists():
        link.symlink_to(ROOT / "examples")
    job, code = slurm.batch("--overcommit", f"examples/slurm/{name}.sbatch")
    said = (slurm.folder / f"{name}-{job}.txt").read_text()
    assert code == 0, said
    if name == "digits":
        assert losses(said) == local_losses()
    else:
        assert said.splitlines() == [
            "left: nodes 0, 1",
            "right: nodes 2, 3",
            "on the last node:" + 3 * " [10.0, 10.0, 10.0, 10.0]",
        ]


@pytest.mark.row("S1b")
@pytest.mark.timeout(300)
def test_a_requeued_job_goes_on_with_fewer_nodes(slurm: Slurm) -> None:
    """The example, until a host fails: Slurm ends and requeues the job, which begins anew on the other host alone. Its
    losses are those of one process without a break, and steps after the last checkpoint are done again."""
    text = (ROOT / "examples" / "slurm" / "resume.py").read_text()
    stands = "\n        'SLURM_RESTART_COUNT' in os.environ or state['step'] < 13 or __import__('time').sleep(1000)"
    (slurm.folder / "resume.py").write_text(text.replace('.4f}", flush=True)', '.4f}", flush=True)' + stands))
    batch = (ROOT / "examples" / "slurm" / "resume.sbatch").read_text()
    (slurm.folder / "resume.sbatch").write_text(batch.replace("examples/slurm/resume.py", "resume.py"))
    job = slurm.run("sbatch", "--parsable", "resume.sbatch").stdout.strip()
    output = slurm.folder / f"resume-{job}.txt"
    try:
        slurm.wait_until(lambda: output.exists() and "step 13:" in output.read_text(), HANG, "no step 13")
        for state in ("DRAIN", "DOWN"):  # what is down alone comes back by itself
            slurm.run("scontrol", "update", "NodeName=right", f"State={state}", "Reason=fails")
        # a requeued job waits for two minutes, unless somebody says else
        slurm.wait_until(lambda: "JobState=PENDING" in shown(slurm, job), HANG, "the job was not requeued")
        slurm.wait_until(lambda: not slurm.processes("left"), HANG, "something of the first start is left")
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        slurm.wait_until(lambda: job not in slurm.jobs(), HANG, "the job has not ended")
    finally:
        slurm.run("scancel", job)
        slurm.run("scontrol", "update", "NodeName=right", "State=RESUME")
    said = output.read_text()
    assert "ExitCode=0:0" in shown(slurm, job), said
    assert re.findall(r"start (\d) with (\d) nodes", said) == [("0", "4"), ("1", "2")]
    steps = [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", said)]
    assert [step for step, _ in steps] == [*range(1, 14), *range(11, 31)]
    expected = digits_losses()
    assert [loss for _, loss in steps] == pytest.approx([expected[step - 1] for step, _ in steps], abs=2e-4)


def shown(slurm: Slurm, job: str) -> str:
    return slurm.run("scontrol", "show", "job", job).stdout


def digits_losses() -> list[float]:
    """The losses of examples/slurm/resume.py in one process, by torch alone."""
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(data, 1, 0, seed=0)
    losses: list[float] = []
    while len(losses) < 30:
        for x, y in DataLoader(data, 96, sampler=sampler, drop_last=True):
            loss = torch.nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        sampler.set_epoch(sampler.epoch + 1)
    return losses[:30]


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_one_of_eight_does_not_start(slurm: Slurm) -> None:
    """One error, which names it and its host and has its last lines; the others are ended."""
    python = slurm.folder / "bin" / "python-of-task-5-is-broken"
    python.write_text(
        '#!/bin/sh\n[ "$SLURM_PROCID" = 5 ] && { echo "no such module: torch" >&2; exit 3; }\nexec python "$@"\n'
    )
    python.chmod(0o755)
    way = ["salloc", "-N2", "-n8", "--overcommit", "dtrun", "--launcher", "slurm", "--python", str(python)]
    done = slurm.run(*way, script(slurm, HEAD + "dt.init_master_worker()"), timeout=HANG)
    assert done.returncode == 1
    assert re.search(r"node 5 on right has ended before it joined \(Exited with exit code 3\)", done.stderr)
    assert "no such module: torch" in done.stderr
    assert done.stderr.count("has ended before it joined") == 1


def test_a_script_that_ends_at_once(slurm: Slurm) -> None:
    """The other tasks are told, and do not wait for a master that never comes."""
    done = slurm.run("srun", "-N2", "-n4", "--overcommit", "dtrun", script(slurm, "1 +"), timeout=HANG)
    assert done.returncode == 1
    assert "SyntaxError" in done.stderr
    assert "connection file" not in done.stderr, "they have not waited until their time was over"


def test_a_script_without_a_session(slurm: Slurm) -> None:
    """The other tasks have come, and have nothing to complain of."""
    text = "import sys, time\ntime.sleep(4)\nsys.exit(int(sys.argv[1]))"  # or they would be told before they come
    for code in (0, 3):
        way = ("srun", "-N2", "-n3", "--overcommit", "dtrun", script(slurm, text), str(code))
        assert slurm.run(*way, timeout=HANG).returncode == code


def test_srun_itself_fails(slurm: Slurm) -> None:
    way = ["salloc", "-n2", "dtrun", "--launcher", "slurm", "--launcher-option", "srun=--nodelist=nowhere"]
    done = slurm.run(*way, script(slurm, HEAD + "dt.init_master_worker()"), timeout=HANG)
    assert done.returncode == 1
    assert "srun ended (exit code 1) before all had joined" in done.stderr
    assert "configuration is not available" in done.stderr, "what srun itself says"


@WAYS
def test_the_launcher_is_killed(slurm: Slurm, way: list[str]) -> None:
    """srun, or the dtrun below salloc: nothing is left 10 s later."""
    with slurm.start(*way, script(slurm, HEAD + FOREVER)) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("busy"), process.communicate()[1]
        assert connection_files(slurm) == []
        if way is ALLOCATION:
            slurm.run("pkill", "-KILL", "-f", "python[^ ]* -m dtrun")  # inside of the host
        else:
            signal_to(process, signal.SIGKILL)
        slurm.settle(10)
        process.communicate(timeout=HANG)
    assert process.returncode != 0 or way is ALLOCATION, "salloc has an opinion of its own"


@pytest.mark.parametrize("way", variants([STEP, ALLOCATION]))
def test_scancel(slurm: Slurm, way: list[str]) -> None:
    with slurm.start(*way, script(slurm, HEAD + FOREVER)) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("busy"), process.communicate()[1]
        slurm.run("scancel", *slurm.jobs())
        slurm.settle(10)
        process.communicate(timeout=HANG)


def test_what_slurm_has_to_say(slurm: Slurm) -> None:
    """As of a task that it has ended itself, for the memory that it took."""
    text = """
    dt.init_master_worker()
    step = dt.run(os.getenv, "SLURM_JOB_ID", node=1) + "." + dt.run(os.getenv, "SLURM_STEP_ID", node=1)
    os.system(f"scancel --signal=KILL {step}")
    try:
        torch.ones(3, device="node:1").sum().item()
        time.sleep(60)
    except dt.NodeLost as error:
        print(str(error).splitlines()[0])
    """
    way = ["salloc", "-N2", "-n2", "dtrun", "--launcher", "slurm"]
    done = slurm.run(*way, script(slurm, HEAD + textwrap.dedent(text)), timeout=HANG)
    assert re.search(r"^\[srun\] srun: error: right: task 1: Killed$", done.stderr, re.MULTILINE), done.stderr
    assert done.stdout.startswith("node 1 (host right, pid ")


@pytest.mark.slow
def test_a_program_of_torch_distributed_on_every_task(slurm: Slurm) -> None:
    text = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(x := torch.ones(1))
    print(os.uname().nodename, *map(os.environ.get, ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK")), x.item(), flush=True)
    dist.destroy_process_group()
    """
    for way in (STEP, [*ALLOCATION[:-3], "dtrun", "--launcher", "slurm"]):
        name = script(slurm, HEAD + textwrap.dedent(text))
        done = slurm.run(*way, "--process-group", "--trusted-network", name)
        assert done.returncode == 0, done.stderr
        places = sorted(line.split()[2:5] for line in done.stdout.splitlines())
        right = [["right", "0", "2"], ["right", "1", "2"]] if way is STEP else [["right", "0", "1"]]
        assert places == [["left", "0", "2"], ["left", "1", "2"], *right]
        assert done.stdout.count(f" {len(places)}.0\n") == len(places)
