"""The groups of parameters that ``fully_shard`` makes, and their states, without nodes: the other of two ranks has the
same parts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from disttensor.training import groups
from disttensor.training.groups import CHANGES, ParameterGroup, ShardedParameter, ShardedState, group_of_part

#: The shape of the part that a rank has.
ROWS, COLUMNS = 3, 2

SHARDED, GATHERING, GATHERED, GATHERED_STALE, UNSHARDED, UNSHARDED_STALE = ShardedState


class Made:
    """A group of one module, and that."""

    def __init__(self) -> None:
        self.module = nn.Linear(COLUMNS, ROWS)
        cut: Any = SimpleNamespace(size=2 * ROWS, place=None, padding=None)
        parts = [ShardedParameter(name, [(self.module, name)], p, cut) for name, p in self.module.named_parameters()]
        mesh: Any = SimpleNamespace(size=lambda over: 2)
        self.group = ParameterGroup(parts, mesh, "dp", (), None)

    @torch.no_grad()
    def write(self) -> None:
        for part in self.group.parts:
            part.parameter += 1

    def write_and_begin(self) -> None:
        self.write()
        self.group.begin_all_gather(beside=True)

    def replace(self) -> None:
        """As a load with assign=True does, which reshards first."""
        self.group.reshard()
        self.module.weight = nn.Parameter(torch.rand(ROWS, COLUMNS))
        self.group.reset_sharded_params()

    def fail(self) -> None:
        """A node is lost while the group is gathered."""
        with patch.object(ParameterGroup, "_joined", side_effect=ConnectionError), suppress(ConnectionError):
            self.group.ready()

    def hold(self) -> None:
        self.group.held = not self.group.held

    def check(self) -> None:
        """What is there is what the state says."""
        group, state = self.group, self.group.sharded_state
        assert (group.values is None) == (state in (SHARDED, GATHERING))
        assert (group._coming is None) == (state in (SHARDED, GATHERED, UNSHARDED))
        assert group.is_whole == (state in (UNSHARDED, UNSHARDED_STALE))
        for part in group.parts:
            assert (getattr(self.module, part.name) is part.parameter) == (not group.is_whole)


#: What may happen to a group, and the states that it changes by that; others stay.
EVENTS: dict[str, tuple[Callable[[Made], object], dict[ShardedState, ShardedState]]] = {
    "begin": (lambda it: it.group.begin_all_gather(beside=True), {SHARDED: GATHERING}),
    "ready": (
        lambda it: it.group.ready(),
        {SHARDED: GATHERED, GATHERING: GATHERED, GATHERED_STALE: GATHERED, UNSHARDED_STALE: UNSHARDED},
    ),
    "unshard": (lambda it: it.group.unshard(), dict.fromkeys(ShardedState, UNSHARDED)),
    "reshard": (lambda it: it.group.reshard(), dict.fromkeys(ShardedState, SHARDED)),
    "forget": (
        lambda it: it.group.discard_unused_gather(),
        {GATHERING: SHARDED, GATHERED_STALE: GATHERED, UNSHARDED_STALE: UNSHARDED},
    ),
    "take": (
        lambda it: it.group.accumulate_unsharded_grads([torch.ones(2 * ROWS, COLUMNS), None]),
        dict.fromkeys(ShardedState, SHARDED),
    ),
    "drop": (lambda it: it.group.reset_after_failure(), dict.fromkeys(ShardedState, SHARDED)),
    "write": (Made.write, {}),
    "write and begin": (
        Made.write_and_begin,
        {SHARDED: GATHERING, GATHERED: GATHERED_STALE, UNSHARDED: UNSHARDED_STALE},
    ),
    "replace": (Made.replace, dict.fromkeys(ShardedState, SHARDED)),
    "fail": (Made.fail, dict.fromkeys((GATHERING, GATHERED_STALE, UNSHARDED_STALE), SHARDED)),
}
#: The events that lead to each state.
WAYS: dict[ShardedState, tuple[str, ...]] = {
    SHARDED: (),
    GATHERING: ("begin",),
    GATHERED: ("ready",),
    GATHERED_STALE: ("ready", "write and begin"),
    UNSHARDED: ("unshard",),
    UNSHARDED_STALE: ("unshard", "write and begin"),
}


@pytest.fixture(autouse=True)
def gathered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "gather_parts", lambda x, over, beside: ([x.clone(), x.clone()], None))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[ShardedState, ShardedState]]]:
    """The changes of all groups."""
    found, change = set(), ParameterGroup._change

    def noted(group: ParameterGroup, to: ShardedState) -> None:
        before = group.sharded_state
        change(group, to)
        if to is not before:
            found.add((before, to))

    monkeypatch.setattr(ParameterGroup, "_change", noted)
    return found  # type: ignore[return-value]


def right_in_the_end(made: Made) -> None:
    """Whatever has happened, the modules have parts afterwards, and then the whole parameters of now."""
    made.group.reshard()
    made.check()
    made.group.unshard()
    made.check()
    for part in made.group.parts:
        assert torch.equal(getattr(made.module, part.name), torch.cat([part.parameter, part.parameter]))


def test_each_state_changes_by_each_event_as_is_written_down(seen: set[tuple[ShardedState, ShardedState]]) -> None:
    for state, way in WAYS.items():
        for name, (event, changes) in EVENTS.items():
            made = Made()
            for step in way:
                EVENTS[step][0](made)
            assert made.group.sharded_state is state
            made.check()
            event(made)
            assert made.group.sharded_state is changes.get(state, state), f"{name} of {state.name}"
            made.check()
    assert seen == {(before, after) for before in CHANGES for after in CHANGES[before]}, "each that is legal happens"


def test_all_sequences_of_three_events() -> None:
    for names in product(EVENTS, repeat=3):
        made = Made()
        for name in names:
            EVENTS[name][0](made)
            made.check()
        right_in_the_end(made)


@pytest.mark.parametrize("seed", range(5))
def test_a_hundred_events(seed: int) -> None:
    """Of a group that the user holds now and then."""
    made, chance = Made(), random.Random(seed)
    events = [*(event for event, _ in EVENTS.values()), Made.hold]
    for _ in range(100):
        chance.choice(events)(made)
        made.check()
    right_in_the_end(made)


def test_another_change_is_refused() -> None:
    group = Made().group
    with pytest.raises(AssertionError, match="a group that is sharded can't become unsharded"):
        group._change(UNSHARDED)
    assert group.sharded_state is SHARDED
    assert set(CHANGES) == set(ShardedState)


def test_modules_that_have_parts_keep_them() -> None:
    """Others may have come in the place of the group's."""
    made = Made()
    loaded = made.module.weight = nn.Parameter(torch.rand(ROWS, COLUMNS))
    made.group.reshard()
    made.group.reset_sharded_params()
    assert made.module.weight is loaded
    right_in_the_end(made)


def test_what_is_held_is_not_forgotten() -> None:
    made = Made()
    made.group.held = True
    made.group.begin_all_gather(beside=True)
    made.group.discard_unused_gather()
    assert made.group.sharded_state is GATHERING


def test_parameters_that_were_replaced_are_of_no_group() -> None:
    """Another parameter that gets the id of one would be taken for a part, and not be cut."""
    made = Made()
    before = list(made.module.parameters())
    made.module.weight = nn.Parameter(torch.ones(ROWS, COLUMNS))
    made.group.reset_sharded_params()
    assert [id(p) in group_of_part for p in (*made.module.parameters(), *before)] == [True, True, False, True]
