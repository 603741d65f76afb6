"""python examples/slurm/resume.py FOLDER        or, in a batch script: dtrun --launcher slurm -n 2 ...

Training that goes on from its last checkpoint in FOLDER, if there is one, with as many nodes as there are this time. A
Slurm job of it that is requeued, by Slurm when a host fails or by somebody, does so by itself, on fewer hosts too:
examples/slurm/resume.sbatch.
"""

import contextlib
import os
import sys
from itertools import chain, islice, repeat

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import disttensor as dt

STEPS, BATCH, SAVE_EVERY = 30, 96, 5
folder = sys.argv[1] if len(sys.argv) > 1 else "checkpoint"

with dt.init_master_worker():
    mesh = dt.mesh(dp=-1)  # all nodes that there are
    print(f"start {os.environ.get('SLURM_RESTART_COUNT', 0)} with {len(mesh)} nodes", flush=True)

    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
    model = dt.DataParallel(net.to(mesh.device), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = dt.data.distribute(data, mesh, batch_size=BATCH, shuffle=True)  # of all nodes together, however many

    state = {"model": model.module, "optim": optimizer, "loader": loader, "step": 0}
    with contextlib.suppress(FileNotFoundError):  # there is none at the first start
        dt.checkpoint.load(state, folder)

    for x, y in islice(chain.from_iterable(repeat(loader)), STEPS - state["step"]):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        mean = dt.all_reduce(loss.detach(), "avg", over="dp").item()
        print(f"step {state['step']}: loss {mean:.4f}", flush=True)
        if state["step"] % SAVE_EVERY == 0:
            dt.checkpoint.save(state, folder)
