"""What the tests of every way of launching share: the digits' losses, and a script that is cut off from a node.

launched = run(digits by some launcher);  assert losses(launched.stdout) == local_losses()
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys

from checkout import ROOT
from limits import HANG

#: The same digits by every launcher: data parallel on four nodes.
DIGITS = ROOT / "examples" / "data_parallel.py"

#: A script that has two nodes, and after a line of input says which of them it can reach.
CUT_OFF = """
import disttensor as dt, sys, torch
dt.init_master_worker({})
xs = [torch.ones(3, device=f"node:{{k}}") for k in range(2)]
dt.synchronize()
print("ready", flush=True)
sys.stdin.readline()
for x in xs:
    try:
        print(x.sum().item())
    except dt.NodeLost as error:
        print("lost", error.rank, error.host)
dt.shutdown()
"""


def losses(out: str) -> list[float]:
    """Of each epoch, from what the digits have printed. They have to be those of one process, as the example says."""
    assert "same losses: True" in out, out
    return [float(loss) for loss in re.findall(r"^epoch \d+: loss ([\d.]+),", out, re.MULTILINE)]


@functools.cache
def local_losses() -> list[float]:
    """Those by dtrun's own nodes on this machine."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "dtrun", "-n", "4", str(DIGITS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG)
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)
