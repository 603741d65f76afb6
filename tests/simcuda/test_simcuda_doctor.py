"""``python -m disttensor.doctor --gpu`` on simulated devices: its rows, and what it says of devices that fail."""

from __future__ import annotations

import json

import pytest
from limits import HANG
from simcuda_kit import TOOLS, run, start

from disttensor.cli import gpu_trial
from disttensor.cli.doctor import NONE, OK, WRONG, CheckRow

pytestmark = [pytest.mark.simcuda, pytest.mark.cold]

DOCTOR = "import sys\nfrom disttensor.doctor import main\nsys.exit(main(['--gpu', '--json', '--patience', '20']))"

#: The rows of what tools/simcuda lacks.
NOT_SIMULATED = set() if (TOOLS / "nccl").is_dir() else {"NCCL of one", "NCCL of nodes"}


def rows(count: int) -> dict[str, CheckRow]:
    with start(DOCTOR, kernels=True, visible=",".join(map(str, range(count))), devices=count, delay_ms=1) as process:
        out, err = process.communicate(timeout=HANG)
    told = json.loads(out)
    found = {row["name"]: CheckRow(**row) for row in told["rows"]}
    wrong = {name: row for name, row in found.items() if row.state == WRONG}
    assert wrong.keys() <= NOT_SIMULATED, (wrong, err)
    assert (process.returncode, told["well"]) == (bool(wrong), not wrong)
    assert [*found] == ["versions", "environment", *(step.name for step, _ in gpu_trial.STEPS)]
    assert f"simcuda device {count - 1} " in found["GPUs"].found
    assert "these devices are simulated (tools/simcuda), so that nothing below tells of a GPU" in found["GPUs"].found
    return found


def test_two_devices():
    found = rows(2)
    # how fast anything is says nothing here
    assert {row.state for name, row in found.items() if name not in {"speed", *NOT_SIMULATED}} == {OK}, found
    assert found["nodes"].found.startswith("2 nodes on 2 GPUs started")
    assert all(f"{name} " in found["numbers"].found for name in gpu_trial.TOLERANCES)
    assert "(from cuda:0 to cuda:1)" in found["speed"].found.replace("pinned memory; ", "(")


@pytest.mark.slow
def test_one_device():
    found = rows(1)
    none = {name for name, row in found.items() if row.state == NONE}
    assert none - {"speed"} == {"peer access", "NCCL of nodes"}
    assert found["nodes"].found.startswith("2 nodes on 1 GPU started")


@pytest.mark.slow
def test_what_is_wrong_is_found():
    """Each of torch.cuda's rows, with a torch that is broken in its place."""
    run(
        """
import torch
from disttensor.cli import gpu_trial as g

def finds(step, words, broken, name, value):
    right = getattr(broken, name)
    setattr(broken, name, value(right))
    try:
        said = step()
    except (ArithmeticError, g.Nothing) as error:
        said = f"{type(error).__name__}: {getattr(error, 'found', error)}"
    finally:
        setattr(broken, name, right)
    assert words in said, said

g.gpus(), g.streams(), g.graphs(), g.peers()
off = lambda right: lambda a, b: right(a, b) * (1.001 if a.is_cuda and a.dtype != torch.bfloat16 else 1)
finds(g.numbers, "in matmul, which may be 1e-05", torch, "matmul", off)
nan = lambda right: lambda self, dim: right(self, dim) * (float("nan") if self.device.index == 1 else 1)
finds(g.numbers, "cuda:1 has an error of nan in softmax", torch.Tensor, "softmax", nan)
never = lambda right: lambda self, *rest: None
finds(g.streams, "a stream that waits for an event reads what was there before", torch.cuda.Stream, "wait_event", never)
late = lambda right: lambda self: torch.cuda.synchronize() or right(self)
finds(g.streams, "Nothing: cuda:0: a stream has waited", torch.cuda.Stream, "synchronize", late)
finds(g.graphs, "a replay has computed something else", torch.cuda.CUDAGraph, "replay", never)
lost = lambda right: lambda self, to: right(self, to) * (0 if to == "cuda:1" else 1)
finds(g.peers, "what comes to cuda:1 is not what cuda:0 has sent", torch.Tensor, "to", lost)
""",
        kernels=True,
        devices=2,
        visible="0,1",
    )


@pytest.mark.slow
def test_the_row_of_the_devices_that_nodes_would_have():
    """In the doctor's other rows; NVIDIA's driver files, which say what GPUs a host has, are not simulated."""
    out = run(
        """
import torch
from disttensor.cli import self_test
print(self_test.devices(torch))
torch.cuda.is_available = lambda: False
print(self_test.devices(torch))
""",
        visible="0,1",
        devices=2,
        memory="2G",
    )
    right, wrong = out.splitlines()
    assert f"state='{OK}'" in right
    assert "cuda:0 simcuda device 0 (2.0 GiB), cuda:1 simcuda device 1 (2.0 GiB)" in right
    assert f"state='{WRONG}'" in wrong
    assert "2 GPUs, of which torch sees none" in wrong


@pytest.mark.slow
def test_devices_that_refuse_each_other():
    out = run(
        "from disttensor.cli import gpu_trial as g\nprint(g.outcome(*g.STEPS[4])[0])", True, "0,1", devices=2, peers=0
    )
    assert f"state='{NONE}'" in out
    assert "cuda:0 and cuda:1, cuda:1 and cuda:0 have no access to each other" in out


@pytest.mark.slow
def test_an_error_that_sticks_is_a_row_and_the_rest_is_tried():
    """A device that fails at its 400th task, in each process anew."""
    with start(DOCTOR, kernels=True, visible="0", devices=1, delay_ms=0, fail_task=400) as process:
        out, err = process.communicate(timeout=2 * HANG)
    assert process.returncode == 1, err
    found = {row["name"]: CheckRow(**row) for row in json.loads(out)["rows"]}
    assert [*found][2:] == [step.name for step, _ in gpu_trial.STEPS]
    wrong = [row for row in found.values() if row.state == WRONG]
    assert wrong
    assert all(row.do for row in wrong)
