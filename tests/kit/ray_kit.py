"""A Ray cluster of two raylets on this machine, for the tests: `python ray_kit.py` runs it until its stdin ends.

It prints the cluster's address. Variables for the second raylet, which is a host of its own as Ray sees it, are
arguments: NAME=VALUE.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from checkout import KIT, ROOT
from leaks import unmarked
from limits import HANG

CPUS = 4  #: of each raylet

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("DISTTENSOR_", "RAY_"))},
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(KIT))),
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


@contextlib.contextmanager
def cluster(folder: Path, *second: str, gpus: int = 0) -> Iterator[str]:
    """The address of a cluster that lives as long as the block. ``gpus``: what each raylet is told to have."""
    command = [sys.executable, __file__, str(gpus), *second]
    with (
        open(folder / "ray.log", "w") as log,
        subprocess.Popen(
            command, env=unmarked(ENVIRONMENT), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            address = process.stdout.readline().strip() if process.stdout is not None else ""
            assert address, (folder / "ray.log").read_text()
            yield address
        finally:
            if process.stdin is not None:
                process.stdin.close()
            process.wait(HANG)


def main(gpus: str, *second: str) -> None:
    from ray.cluster_utils import Cluster

    each = {"num_cpus": CPUS, "num_gpus": int(gpus)}
    whole = Cluster(initialize_head=True, head_node_args={**each, "include_dashboard": False})
    os.environ.update(dict(text.partition("=")[::2] for text in second))
    whole.add_node(**each)
    whole.wait_for_nodes()
    print(whole.address, flush=True)
    sys.stdin.read()
    whole.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
