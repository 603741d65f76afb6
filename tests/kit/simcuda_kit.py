"""Programs on simulated CUDA devices (tools/simcuda), each a process of its own, in which the runtime is preloaded."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from textwrap import dedent

from checkout import ROOT
from limits import HANG

TOOLS = ROOT / "tools" / "simcuda"


@cache
def libraries() -> str:
    """Returns what is preloaded for the torch of this Python, which has to be a CUDA build: the runtime, and NCCL."""
    built = subprocess.run(
        [sys.executable, str(TOOLS / "build.py"), "--python", sys.executable],
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert built.returncode == 0, built.stderr
    return built.stdout.strip()


def environment(kernels: bool, **settings: object) -> dict[str, str]:
    """Returns what a process's environment adds for it to have such devices.

    Args:
        kernels: whether torch's operators are replaced where it imports torch.
        settings: ``devices=2`` is SIMCUDA_DEVICES.
    """
    said = {"SIMCUDA_SEED": os.environ["SIMCUDA_SEED"]} if "SIMCUDA_SEED" in os.environ else {}
    said |= {f"SIMCUDA_{name.upper()}": str(value) for name, value in settings.items()}
    said["LD_PRELOAD"] = libraries()
    paths = [str(ROOT), str(ROOT / "tests" / "kit")]
    if kernels:
        said["SIMCUDA_KERNELS"] = "1"
        paths.insert(0, str(TOOLS / "site"))
    said["PYTHONPATH"] = os.pathsep.join(paths)
    return said


def start(program: str, kernels: bool = False, visible: str | None = None, **settings: object) -> subprocess.Popen[str]:
    """Starts a program on simulated devices. Its source may be indented."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SIMCUDA_", "CUDA_VISIBLE"))}
    env |= environment(kernels, **settings)
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", dedent(program)], env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def _said(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Returns what a program prints until its end. One that hangs is killed, or nothing would ever end this one."""
    try:
        return process.communicate(timeout=HANG)
    finally:
        process.kill()


def run(program: str, kernels: bool = False, visible: str | None = None, **settings: object) -> str:
    """Runs a program on simulated devices and returns what it prints. AssertionError where it fails."""
    with start(program, kernels, visible, **settings) as process:
        out, err = _said(process)
    assert process.returncode == 0, f"exit code {process.returncode}\n{out}{err}"
    return out


def dies(program: str, kernels: bool = False, **settings: object) -> str:
    """Runs a program that a signal has to end, and returns what it says on its standard error."""
    with start(program, kernels, **settings) as process:
        out, err = _said(process)
    assert process.returncode < 0, f"exit code {process.returncode}\n{out}{err}"
    return err


#: A script whose nodes have the devices: only what is started while the session is made has the environment.
_BEGIN = """
import os
os.environ.update({env!r})
import torch, disttensor as dt
session = dt.init_master_worker(nodes={nodes}, backend={backend!r}, verify={verify})
for name in {env!r}:
    del os.environ[name]
assert not torch.cuda.is_available()
"""


def run_session(
    program: str,
    nodes: int = 2,
    backend: str = "shm",
    visible: str | None = None,
    verify: float = 0.0,
    limit: float = HANG,
    **settings: object,
) -> str:
    """Runs a script whose nodes have simulated devices, and which has none itself, and returns what it prints.

    ``limit``: seconds after which it hangs.
    """
    env = environment(True, **settings) | {"OMP_NUM_THREADS": "1"}
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    return run_script(
        _BEGIN.format(env=env, nodes=nodes, backend=backend, verify=verify) + dedent(program) + "\ndt.shutdown()\n",
        limit,
    )


def run_script(source: str, limit: float = HANG) -> str:
    """Runs a script that has no devices itself, and returns what it prints. AssertionError where it fails."""
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "kit")])}
    done = subprocess.run([sys.executable, "-c", source], env=own, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout
