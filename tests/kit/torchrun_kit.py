"""What the ranks of a program under torchrun have: the ground truth of torch's own parallel programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from limits import HANG


def torchrun(program: str, path: Path, *arguments: object, ranks: int) -> list[Any]:
    """What ``program PATH ARGUMENTS`` has written to ``PATH.RANK`` on each rank, by gloo, with one compute thread."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, program, path, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(f"{path}.{rank}") for rank in range(ranks)]
