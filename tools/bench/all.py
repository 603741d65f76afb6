"""python tools/bench/all.py

Runs every benchmark of this folder, one after the other, each in a process of its own. About four minutes: those over
sizes take few of them; by themselves they take all, and draw plots.
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
#: What is run, with its arguments.
BENCHMARKS = (
    *("dispatch", "fetch", "step", "launch", "graph", "compiled", "node_copy", "overlap", "start"),
    "data --repeats 9 --pings 1000",
    "bandwidth --sizes 64K 64M --rounds 5",
    "collectives --ranks 2 --sizes 4K 64M --rounds 5",
)

if __name__ == "__main__":
    cores = len(os.sched_getaffinity(0))
    python = platform.python_version()
    print(f"{date.today()}, {platform.machine()}, {cores} cores, Python {python}, torch {torch.__version__}")
    failed = []
    for benchmark in BENCHMARKS:
        print(f"\n--- {benchmark}", flush=True)
        name, *arguments = benchmark.split()
        if subprocess.run([sys.executable, str(HERE / f"{name}.py"), *arguments]).returncode:
            failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
