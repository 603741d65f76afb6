"""What torchrun's ranks have of cases of DTensor's operators."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkout import KIT
from limits import HANG

#: What starts the ranks; without it the program does by itself, by the same launcher, and imports torch once.
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


def torchruns(cases: Sequence[Any], folder: Path, *command: str) -> list[list[Any]]:
    """What each of torchrun's ranks has, case by case."""
    torch.save(cases, folder / "cases", pickle_protocol=5)
    program = [
        sys.executable,
        *command,
        str(KIT / "dtensor_program.py"),
        str(folder / "cases"),
        str(folder / "answers"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=HANG * 20)
    assert done.returncode == 0, done.stderr[-5000:]
    ranks = [torch.load(folder / f"answers.{rank}", weights_only=False) for rank in range(4)]
    return [list(answers) for answers in zip(*ranks, strict=True)]
