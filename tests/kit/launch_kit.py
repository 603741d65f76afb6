"""What the tests of every way of launching share: the digits' losses, and the search for secrets where all can read.

launched = run(digits by some launcher);  assert losses(launched.stdout) == local_losses()
`python launch_kit.py FILE` says where on this host the secrets in FILE can be read by others
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

from checkout import ROOT
from limits import HANG

#: The same digits by every launcher: data parallel on four nodes.
DIGITS = ROOT / "examples" / "data_parallel.py"

#: The beginning of a script of which the secrets that it makes are to be written into the file KEYS, one a line.
SPY = """
import os, zmq
def _spy(make=zmq.curve_keypair):
    pair = make()
    with open(os.environ["KEYS"], "ab") as file:
        file.write(pair[1] + b"\\n")
    return pair
zmq.curve_keypair = _spy
"""

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


def in_sight(secrets: list[bytes]) -> list[str]:
    """The files of /proc that hold one of them and can be read by any user, or by this one without any doing."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                text = (process / name).read_bytes()
            except OSError:  # it has ended
                continue
            if any(secret in text for secret in secrets):
                found.append(f"{process}/{name}")
    return found


if __name__ == "__main__":
    keys = Path(sys.argv[1]).read_bytes().split()
    assert keys, "no secret was made"
    print(*in_sight(keys), sep="\n", end="")
