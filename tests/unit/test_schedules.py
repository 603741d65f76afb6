"""Orders of pipelines' stages against those of torch.distributed.pipelining, and the order in which they are issued."""

from __future__ import annotations

import pytest
from torch_schedules import torchs_order

from disttensor.training.pipeline.schedules import (
    SCHEDULES,
    Action,
    expected_shares,
    forward_only,
    in_ticks,
    needed,
)

SIZES = [(1, 1), (1, 4), (2, 2), (2, 7), (3, 3), (4, 4), (4, 8), (5, 9)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_a_stages_order_is_torchs(name: str, stages: int, microbatches: int) -> None:
    ours = SCHEDULES[name](stages, microbatches)
    for stage, order in enumerate(ours):
        assert [str(action) for action in order] == torchs_order(name, stage, stages, microbatches)


@pytest.mark.parametrize("name", [*SCHEDULES, "forward"])
@pytest.mark.parametrize(("stages", "microbatches"), [*SIZES, (4, 1), (4, 2), (6, 3)])
def test_what_is_issued_needs_only_what_was_issued_before(name: str, stages: int, microbatches: int) -> None:
    orders = {**SCHEDULES, "forward": forward_only}[name](stages, microbatches)
    done: set[Action] = set()
    issued: list[list[Action]] = [[] for _ in range(stages)]
    for tick in in_ticks(orders):
        assert tick
        for action in tick:
            before = needed(action, stages)
            assert before is None or before in done
            issued[action.stage].append(action)
        done |= set(tick)
    assert issued == orders


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_no_stage_has_more_under_way_than_one_forward_one_backward_allows(stages: int, microbatches: int) -> None:
    for stage, order in enumerate(SCHEDULES["1f1b"](stages, microbatches)):
        under_way = peak = 0
        for action in order:
            under_way += -1 if action.backward else 1
            peak = max(peak, under_way)
        assert peak == min(stages - stage, microbatches)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_the_expected_share_is_the_formulas(name: str, stages: int, microbatches: int) -> None:
    ticks = in_ticks(SCHEDULES[name](stages, microbatches))
    wanted = microbatches / (microbatches + stages - 1)
    assert expected_shares(ticks, range(stages)) == pytest.approx([wanted] * stages)


def test_a_place_with_several_stages_does_one_action_at_a_time() -> None:
    ticks = in_ticks(SCHEDULES["gpipe"](2, 3))
    assert expected_shares(ticks, ["a", "a"]) == [1.0, 1.0]
