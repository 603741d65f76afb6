"""A data channel of another distribution, which disttensor finds by its entry point: `outside`, as if installed."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import disttensor as dt
from disttensor.runtime.channel import ChannelContext, PeerInfo, get_channel
from disttensor.runtime.channel.registry import channel_names

OUTSIDE = Path(__file__).parent / "outside"

TRAINING = """
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F
import disttensor as dt

def train(devices):
    '''The losses of a model of which every device has a copy and trains with a part of each batch.'''
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.LayerNorm(300), nn.Linear(300, 5)) for _ in devices]
    for model, device in zip(models, devices):
        model.load_state_dict(models[0].state_dict())
        model.to(device)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    data = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(20):
        x = torch.randn(64, 20, generator=data)
        y = x[:, :5].argmax(1)
        for model, device, part, target in zip(models, devices, x.chunk(2), y.chunk(2)):
            model.zero_grad()
            loss = F.cross_entropy(model(part.to(device)), target.to(device))
            loss.backward()
            losses.append(loss.detach())
        for grads in zip(*([p.grad for p in model.parameters()] for model in models)):
            if devices[0] == "cpu":
                total = grads[0] + grads[1]
                for grad in grads:
                    grad.copy_(total)
            else:
                dt.all_reduce(grads)
        for optimizer in optimizers:
            optimizer.step()
    return [loss.item() for loss in losses], models[1].state_dict()

torch.set_num_threads(1)
local, expected = train(["cpu", "cpu"])
with dt.init_master_worker("folder", nodes=2, threads=1):
    there = dt.run(lambda: [name for name in sys.modules if name == "folder_channel"], node=1)
    remote, state = train(["node:0", "node:1"])
    same = all(torch.equal(state[name].cpu(), expected[name]) for name in expected)
print(there, local == remote, same, local[0] > 2 * local[-1])
"""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The distribution is on the path of this process and of those that it starts."""
    monkeypatch.syspath_prepend(OUTSIDE)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delitem(sys.modules, "folder_channel", raising=False)


def test_it_is_found_and_does_what_a_channel_has_to(installed: None, tmp_path: Path) -> None:
    assert "folder" in channel_names()
    cls = get_channel("folder")
    assert cls is import_module("folder_channel").FolderChannel
    jobs = itertools.count()

    def make(n: int) -> list[Any]:
        job = f"outside-{next(jobs)}"
        channels = [cls(ChannelContext(rank, job, "127.0.0.1")) for rank in range(-1, n - 1)]
        for channel in channels:
            channel.connect({rank: PeerInfo(rank, c.address(), bytes(32)) for rank, c in enumerate(channels, -1)})
        return channels

    dt.channels.check_data_channel(make)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.row("M21")
def test_it_carries_a_training_script(script: Callable[..., Any], tmp_path: Path) -> None:
    """With the losses of local PyTorch, and the same parameters after it, to the bit."""
    path = os.pathsep.join(filter(None, [str(OUTSIDE), os.environ.get("PYTHONPATH")]))
    done = script(TRAINING, PYTHONPATH=path, TMPDIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "['folder_channel'] True True True\n"
    assert not list(tmp_path.glob("folder-channel-*"))
