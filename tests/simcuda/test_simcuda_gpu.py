"""The tests of `make gpu` on simulated devices: those that can't run there are listed, with the reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from checkout import ROOT
from limits import HANG
from simcuda_kit import environment
from sources import below

pytestmark = [pytest.mark.simcuda, pytest.mark.cold]

#: By file, so that one that hangs names itself. All that is marked gpu is here, or in NOT.
RUN = {
    "tests/streams/test_streams_cuda.py": ["test_on_a_gpu"],
    "tests/channels/test_channel_cuda_ipc.py": ["test_between_two_nodes_on_one_device"],
    "tests/channels/test_channel_nccl.py": ["test_between_two_gpus"],
    "tests/graphs/test_engine_cuda.py": ["test_on_a_device", "test_a_training_step_on_a_device"],
    "tests/launch/test_binding.py": ["test_real_gpus"],
    "tests/launch/test_process_group_ends.py": ["test_nccl"],
}
NOT = {"test_elapsed_time_agrees_with_cuda": "40 products of matrices of 4096 by 4096 are minutes for a CPU"}

_MARKED = re.compile(r"^@pytest\.mark\.gpu\b.*\n(?:@.*\n)*def (\w+)", re.M)


def marked(text: str) -> list[str]:
    return _MARKED.findall(text)


def test_all_that_is_marked_gpu_is_run_or_listed() -> None:
    found = {file.name: names for file in below("tests") if (names := marked(file.text))}
    assert {name for names in found.values() for name in names} == {
        name for names in RUN.values() for name in names
    } | {*NOT}
    assert all(set(names) <= set(found[path]) for path, names in RUN.items())


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN)
def test_on_simulated_devices(path: str) -> None:
    env = {
        **os.environ,
        **environment(True, devices=2, delay_ms=1),
        # what GPUs a host has is asked of NVIDIA's management library, which is not simulated, unless this names them
        "CUDA_VISIBLE_DEVICES": "0,1",
        "DISTTENSOR_TESTS_COLD": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    done = subprocess.run(
        [*command, *(f"{path}::{name}" for name in RUN[path])],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RUN[path])} passed" in done.stdout, done.stdout
