"""python examples/ipc/benchmark_all_reduce.py [--nodes 4] [--sizes 4K 1M 16M] [--iterations 20] [--backend tcp]

torch-ipc's benchmark of all_reduce: over all devices of all nodes, each result of each iteration compared with the sum
that it has to be. In iteration i of n device k begins with (i / n) ** k everywhere. The time is from the call until all
nodes have the sum, the median of the iterations; the bandwidth is what each device sends and receives in this time,
2 (d - 1) / d of the size with d devices. A sum that is wrong by more than 1e-6 of it ends the program. On two cores it
has printed

    4 devices, on 4 nodes of 1 host, 20 iterations
    4K   error 1.0e-07   1.58 ms   0.00 GB/s
    1M   error 8.4e-08   3.88 ms   0.41 GB/s
    16M  error 1.0e-07  17.46 ms   1.44 GB/s

tools/bench/collectives.py compares all collectives with gloo's and MPI's.
"""

import argparse
import statistics
import time

import torch

import disttensor as dt

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int)
parser.add_argument("--sizes", nargs="+", default=["4K", "1M", "16M"])
parser.add_argument("--iterations", type=int, default=20)
parser.add_argument("--backend", default="auto")
options = parser.parse_args()


def compared(xs, expected):
    """The greatest error, of all entries on all devices, as a part of what they should be."""
    errors = [dt.fetch((x - expected).abs().max() / expected) for x in xs]
    return torch.stack([error.result() for error in errors]).max().item()  # a NaN is the greatest


with dt.init_master_worker(options.backend, nodes=options.nodes):
    places = []
    for node in dt.nodes():
        gpus = [name for name in node["devices"] if name != "cpu"]
        places += [dt.device(node["rank"], name) for name in gpus or ["cpu"]]
    hosts = len({node["host"] for node in dt.nodes()})
    print(f"{len(places)} devices, on {len(dt.nodes())} nodes of {hosts} host{'s'[: hosts - 1]},", end=" ")
    print(f"{options.iterations} iterations")
    for size in options.sizes:
        nbytes = int(size.rstrip("KM")) << {"K": 10, "M": 20}.get(size[-1], 0)
        xs = [torch.empty(nbytes // 4, device=place) for place in places]
        times, error = [], 0.0
        for i in range(1, options.iterations + 1):
            part = i / options.iterations
            for k, x in enumerate(xs, 1):
                x.fill_(part**k)
            dt.synchronize()
            start = time.perf_counter()
            dt.all_reduce(xs)
            dt.synchronize()
            times.append(time.perf_counter() - start)
            found = compared(xs, sum(part**k for k in range(1, len(xs) + 1)))
            if not found < 1e-6:
                raise SystemExit(f"iteration {i}: an error of {found:.1e} in the sum of {size}")
            error = max(error, found)
        seconds = statistics.median(times)
        rate = 2 * (len(xs) - 1) / len(xs) * nbytes / seconds / 1e9
        print(f"{size:4} error {error:.1e} {seconds * 1e3:6.2f} ms {rate:6.2f} GB/s")
