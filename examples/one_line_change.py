"""python examples/one_line_change.py

An ordinary training script, run twice: on the local CPU, and with only the device string changed. With one thread per
side and the generators seeded after the model is in place the losses are the same to the last bit.
"""

import torch
import torch.nn as nn

import disttensor as dt


def train(device: str) -> list[float]:
    """Nothing in here knows of disttensor."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(320, 2))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    torch.manual_seed(1)  # the generators of master and nodes are separate: seed them together, now
    data = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(30):
        x = torch.randn(64, 10, 32, generator=data)
        y = (x[:, 0].sum(1) > x[:, 1].sum(1)).long()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


torch.set_num_threads(1)
local = train("cpu")

with dt.init_master_worker(nodes=1, threads=1):
    remote = train("node:0")

for step in (0, 9, 19, 29):
    print(f"step {step:2}: cpu {local[step]:.6f}   node:0 {remote[step]:.6f}")
print("all 30 losses identical:", local == remote)
