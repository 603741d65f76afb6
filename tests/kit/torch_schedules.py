"""The order in which torch.distributed.pipelining does the passes of a stage, recorded from its own loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

THEIRS: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def torchs_order(name: str, stage: int, stages: int, microbatches: int) -> list[str]:
    """A stage's order, as "0F1" and "0B1".

    The loop itself is run, with a stage that computes nothing: the tables that torch keeps of its schedules, for
    drawing them, count the last stage's forward passes from 1 in torch 2.13.
    """
    found: list[str] = []
    nothing: Any = lambda *args, **kwargs: []  # noqa: E731
    stub = SimpleNamespace(
        stage_index=stage,
        get_fwd_recv_ops=nothing,
        get_fwd_send_ops=nothing,
        get_bwd_recv_ops=nothing,
        get_bwd_send_ops=nothing,
        perform_reduce_grad=nothing,
        forward_one_chunk=lambda i, *args, **kwargs: found.append(f"{stage}F{i}"),
        backward_one_chunk=lambda i, **kwargs: found.append(f"{stage}B{i}"),
    )
    schedule = SimpleNamespace(
        _stage=stub,
        _num_stages=stages,
        _n_microbatches=microbatches,
        _check_inputs=lambda args, kwargs, *rest: ([()] * microbatches, [{}] * microbatches),
        _initialize_stage=nothing,
        _maybe_compute_loss=nothing,
        _maybe_get_loss=nothing,
        _update_losses=nothing,
        scale_grads=False,
    )
    THEIRS[name]._step_microbatches(schedule)
    return found
