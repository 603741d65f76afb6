"""python tools/bench/large_model.py [--gib 8] [--nodes 4] [--folder /tmp]

A model that no node holds as a whole: it is made on the meta device and sharded, the nodes read its weights from
safetensors files, and a batch goes through it. Prints how many bytes of tensors passed through the script, and how much
memory the script and each node had at most, by the kernel. The files, which this writes first and removes, take as much
of the disk as the model.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.nn as nn
from safetensors.torch import save_file

import disttensor as dt

#: Features of a layer, whose weight has 64 MiB.
WIDTH = 4096


def peak(pid: int | str = "self") -> int:
    """The most memory that a process has had, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def passed() -> int:
    """The bytes of tensors that have left the script, or come to it."""
    return sum(row.sent.bytes + row.received.bytes for row in dt.channels.stats() if row.at == "master")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    depth = round(options.gib * 2**30 / (4 * WIDTH * WIDTH))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for i in range(depth):
            save_file({f"{i}.weight": torch.full((WIDTH, WIDTH), 1 / WIDTH)}, f"{folder}/{i}.safetensors")
        with dt.init_master_worker(nodes=options.nodes, threads=1):
            run(dt.mesh(dp=options.nodes), depth, folder)


def run(mesh: dt.meshes.Mesh, depth: int, folder: str) -> None:
    begin = time.perf_counter()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))
    for layer in model:
        dt.fully_shard(layer, mesh)
    dt.fully_shard(model, mesh).to_empty(device=mesh.device)
    dt.channels.reset_stats()
    dt.training.load_safetensors(model, folder)
    dt.synchronize()
    gib = sum(p.numel() for p in model.parameters()) * 4 * len(mesh) / 2**30
    print(f"{gib:.2f} GiB of parameters over {len(mesh)} nodes, loaded in {time.perf_counter() - begin:.0f} s")
    print(f"through the script: {passed()} bytes")
    begin = time.perf_counter()
    with torch.no_grad():
        out = model(dt.shard(torch.ones(len(mesh), WIDTH), mesh, dp=0))
    right = dt.all_reduce((out - 1).abs().max(), "max", over="dp").item() < 1e-3  # each layer takes the mean
    print(f"a batch in {time.perf_counter() - begin:.0f} s, right: {right}; through the script: {passed()} bytes")
    print(f"the script had {peak() / 2**30:.2f} GiB at most")
    nodes = [peak(pid) / 2**30 for pid in dt.run(os.getpid, node=list(mesh.nodes))]
    print(f"the nodes had {', '.join(f'{one:.2f}' for one in nodes)} GiB at most")


if __name__ == "__main__":
    main()
