"""A pipeline that loses a node in the middle of a step."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from aftermath import probe, within
from equal import bits
from torch import nn

import disttensor as dt
from disttensor.training import Pipeline


@pytest.mark.parametrize("victim", [1])
def test_a_node_that_is_lost_in_a_step_is_named_and_the_others_go_on(victim: int) -> None:
    with dt.init_master_worker(nodes=4, threads=1):
        torch.manual_seed(0)
        stages = [nn.Linear(4, 4) for _ in range(3)]
        weights = [{name: value.clone() for name, value in stage.state_dict().items()} for stage in stages]
        pipeline = Pipeline(stages, ["node:0", "node:1", "node:2"], microbatches=4)
        x = torch.randn(8, 4)
        wanted = pipeline.step(x, x, F.mse_loss).cpu()
        calls = 0

        def end(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                dt.kill(victim)

        stages[victim].register_forward_hook(end)
        with within(1.0), pytest.raises(dt.NodeLost, match=f"node {victim} "):
            pipeline.step(x, x, F.mse_loss).item()
        with pytest.raises(dt.NodeLost, match=f"node {victim} "):
            pipeline(x)
        for rank in (0, 2):  # what was to come from the lost node
            with contextlib.suppress(dt.NodeLost):
                dt.synchronize(rank)
        for rank in (0, 2, 3):
            probe(rank)
        # the same stages, from a checkpoint, on the nodes that are there
        again = [nn.Linear(4, 4) for _ in range(3)]
        for stage, values in zip(again, weights, strict=True):
            stage.load_state_dict(values)
        second = Pipeline(again, ["node:0", "node:3", "node:2"], microbatches=4)
        assert bits(second.step(x, x, F.mse_loss).cpu()) == bits(wanted)
