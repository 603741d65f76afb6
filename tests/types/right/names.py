"""The names of the first level: modules, classes and functions, those of torch's names among them."""

from __future__ import annotations

from types import ModuleType
from typing import assert_type

import torch

import disttensor as dt


def main() -> None:
    modules: list[ModuleType] = [
        *(
            dt.channels,
            dt.checkpoint,
            dt.collectives,
            dt.data,
            dt.errors,
            dt.factories,
            dt.futures,
            dt.graphs,
            dt.meshes,
        ),
        *(dt.nn, dt.session, dt.streams, dt.tasks, dt.testing, dt.training, dt.verify, dt.views),
    ]
    assert len(modules) == 17
    assert_type(dt.__version__, str)
    assert_type(dt.session.is_initialized(), bool)
    assert_type(dt.device(1), torch.device)
    assert_type(dt.Stream("node:1"), dt.streams.Stream)
    assert_type(dt.Event(), dt.streams.Event)
    assert_type(dt.session.current_node(), int)
    dt.channels.select("all_reduce", algorithm="ring")
    dt.channels.reset()
    with dt.node(1):
        assert_type(dt.factories.zeros(2, 3), dt.DistributedTensor)
    try:
        dt.run(int, "x", node=1)
    except (ValueError, dt.NodeLost, dt.errors.RemoteError) as error:
        assert_type(error, ValueError | dt.NodeLost | dt.errors.RemoteError)
    dt.synchronize()
