"""Schedules of pipelines: each stage's order of forward and backward micro-batches, and when the script issues them.

A node does its commands in order, so the order of a stage is the order in which its commands are issued. Those of
different stages are issued in turns, a tick at a time: in a tick each stage has its next action issued, if that needs
nothing of the same tick. So a stage's commands leave about when it can begin them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

#: The time of a backward pass, where that of a forward pass is 1.
BACKWARD_TIME = 2


class Action(NamedTuple):
    """A forward or a backward pass of one micro-batch through one stage."""

    stage: int
    backward: bool
    microbatch: int

    def __str__(self) -> str:
        """Returns it as torch.distributed.pipelining writes it: "1F3", "1B3"."""
        return f"{self.stage}{'B' if self.backward else 'F'}{self.microbatch}"


def gpipe(stages: int, microbatches: int) -> list[list[Action]]:
    """Returns each stage's order: all forward passes, then all backward passes."""
    return [
        [Action(stage, backward, i) for backward in (False, True) for i in range(microbatches)]
        for stage in range(stages)
    ]


def one_forward_one_backward(stages: int, microbatches: int) -> list[list[Action]]:
    """Returns each stage's order: as many forward passes as stages come after it, then one forward and one backward in
    turns, then the backward passes that are left. So stage k has ``stages - k`` micro-batches under way at most."""
    orders = []
    for stage in range(stages):
        ahead = min(microbatches, stages - 1 - stage)
        order = [Action(stage, False, i) for i in range(ahead)]
        for i in range(microbatches - ahead):
            order += [Action(stage, False, ahead + i), Action(stage, True, i)]
        orders.append(order + [Action(stage, True, i) for i in range(microbatches - ahead, microbatches)])
    return orders


#: The schedules by name.
SCHEDULES = {"1f1b": one_forward_one_backward, "gpipe": gpipe}


def forward_only(stages: int, microbatches: int) -> list[list[Action]]:
    """Returns each stage's order in an evaluation."""
    return [[Action(stage, False, i) for i in range(microbatches)] for stage in range(stages)]


def needed(action: Action, stages: int) -> Action | None:
    """Returns the action of another stage that has to come before one; None for a first stage's forward pass, and for a
    last stage's backward pass."""
    stage = action.stage + (1 if action.backward else -1)
    return action._replace(stage=stage) if 0 <= stage < stages else None


def in_ticks(orders: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Returns the actions of all stages in the order in which they are issued, a tick at a time."""
    left = [list(reversed(order)) for order in orders]
    done: set[Action | None] = {None}
    ticks = []
    while any(left):
        tick = [order.pop() for order in left if order and needed(order[-1], len(orders)) in done]
        done.update(tick)
        ticks.append(tick)
    return ticks


def expected_shares(ticks: Sequence[Sequence[Action]], places: Sequence[Any]) -> list[float]:
    """Returns for each stage the part of a step for which its place works, if a backward pass takes twice as long as a
    forward pass, all stages take the same time, and nothing else takes any.

    ``places``: those of the stages; a place that has several does one action at a time.
    """
    ends: dict[Action, int] = {}
    free: dict[Any, int] = dict.fromkeys(places, 0)
    worked: dict[Any, int] = dict.fromkeys(places, 0)
    for tick in ticks:
        for action in tick:
            place = places[action.stage]
            before = needed(action, len(places))
            took = BACKWARD_TIME if action.backward else 1
            ends[action] = free[place] = max(free[place], ends[before] if before is not None else 0) + took
            worked[place] += took
    whole = max(free.values())
    return [worked[place] / whole for place in places]
