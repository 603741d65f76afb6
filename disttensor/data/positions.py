"""The place of a loop over a dataset: an epoch, and a position in the order of its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset

from ..errors.argument_checks import whole_number
from ..runtime.node.samples import SamplePlan
from .ranks import Ranks


class Positions:
    """A dataset whose batches go to ranks. Loops over it are told apart by epoch and position.

    An IterableDataset has no positions: to go on in the middle, a loop reads what comes before, and drops it.
    """

    ending: Mapping[str, Any] = {"position": 0}

    def __init__(self, dataset: Any, ranks: Ranks, depth: int, plan: SamplePlan, options: dict[str, Any]) -> None:
        self.dataset, self.ranks, self.depth, self.options = dataset, ranks, depth, options
        self._plan = plan
        self.size: int | None = None if isinstance(dataset, IterableDataset) else len(dataset)
        self.beginning: Mapping[str, Any] = {
            "position": 0, "size": self.size, "shuffle": plan.shuffle, "seed": plan.seed
        }  # fmt: skip

    def __len__(self) -> int:
        if self.size is None:
            raise TypeError(f"a loader of an IterableDataset ({type(self.dataset).__name__}) has no length")
        return -(-self._plan.end_position(self.size) // self._plan.batch)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state of another order of samples."""
        whole_number("position", state["position"])
        for name in ("size", "shuffle", "seed"):
            if state[name] != self.beginning[name]:
                raise ValueError(
                    f"load_state_dict: the state is one with {name}={state[name]}, and this loader has "
                    f"{name}={self.beginning[name]}: its samples come in another order"
                )

    def planned(self, state: Mapping[str, Any]) -> tuple[SamplePlan, int]:
        """Returns the plan of a loop that begins at a state; and how many batches it reads and drops first."""
        epoch, position = state["epoch"], state["position"]
        if self.size is None:
            return replace(self._plan, epoch=epoch), position // self._plan.batch
        return replace(self._plan, epoch=epoch, start=position), 0

    def after(self, position: int) -> int:
        """Returns the position behind the batch that begins at one."""
        behind = position + self._plan.batch
        return behind if self.size is None else min(behind, self.size)
