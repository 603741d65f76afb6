"""python examples/ipc/map.py

torch-ipc's example of map: three files, each read by a function on a node of its own, all at once. What is read stays
there until somebody needs it. The error of a function is raised here, when its turn comes. Prints

    tensor([[0., 1.]], device='node:0')
    tensor([[0., 1.],
            [2., 3.]], device='node:1')
    FileNotFoundError: f9.pt
    on node 2 their sum is tensor([2., 5.], device='node:2')
"""

import tempfile
from pathlib import Path

import torch

import disttensor as dt


def load(folder, name, node):
    assert dt.tasks.here().node == node  # a process of its own, which has run nothing of this script but this function
    return torch.load(Path(folder) / name)


with tempfile.TemporaryDirectory() as folder, dt.init_master_worker(nodes=3):
    torch.save(torch.arange(2.0).view(1, 2), Path(folder) / "f1.pt")
    torch.save(torch.arange(4.0).view(2, 2), Path(folder) / "f2.pt")
    loaded = dt.map(load, [folder] * 3, ["f1.pt", "f2.pt", "f9.pt"], range(3))
    first, second = next(loaded), next(loaded)
    print(first, second, sep="\n")
    try:
        next(loaded)
    except FileNotFoundError as error:
        print(f"FileNotFoundError: {Path(error.filename).name}")
    rows = torch.cat([x.to("node:2") for x in (first, second)])  # from node to node
    print("on node 2 their sum is", rows.sum(0))
