"""python tools/bench/all.py

Runs every benchmark of this folder, one after the other, each in a process of its own. About three minutes.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch

HERE = Path(__file__).parent

if __name__ == "__main__":
    cores = len(os.sched_getaffinity(0))
    python = platform.python_version()
    print(f"{date.today()}, {platform.machine()}, {cores} cores, Python {python}, torch {torch.__version__}")
    failed = []
    for name in ("dispatch", "fetch", "step", "launch", "graph", "node_copy", "overlap", "start"):
        print(f"\n--- {name}", flush=True)
        if subprocess.run([sys.executable, str(HERE / f"{name}.py")]).returncode:
            failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
