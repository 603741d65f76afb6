"""python tools/bench/start.py [--nodes 4] [--repeats 5]

`import disttensor`, `init_master_worker(nodes=4)` and an answer of each node, in a fresh process that has imported
torch, against `import torch` in the same process.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

PROGRAM = """
import time
start = time.perf_counter()
import torch
imported = time.perf_counter()
import disttensor as dt
dt.init_master_worker(nodes={nodes})
copies = [torch.full((4,), float(k)).to(f"node:{{k}}") for k in range({nodes})]
assert [c.sum().item() for c in copies] == [4.0 * k for k in range({nodes})]
started = time.perf_counter()
dt.shutdown()
print(imported - start, started - imported, time.perf_counter() - started)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = []
    for _ in range(options.repeats):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(nodes=options.nodes)], capture_output=True, text=True, check=True
        )
        rows.append([float(t) for t in done.stdout.split()])
    imports, inits, ends = (statistics.median(column) for column in zip(*rows, strict=True))
    ratio = statistics.median(row[1] / row[0] for row in rows)
    print(f"import torch {imports:.2f} s; {options.nodes} nodes start and answer {inits:.2f} s; shutdown {ends:.2f} s")
    print(f"start of {options.nodes} nodes over import torch: {ratio:.2f}x")


if __name__ == "__main__":
    main()
