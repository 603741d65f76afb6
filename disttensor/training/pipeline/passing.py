"""One pass of a batch through the stages: activations and gradients go from place to place, and autograd is cut there.

    stage 0            stage 1                        stage 2
    F: out  --.to-->   Cut --> out          --.to-->  Cut --> out --> loss
    B: backward(out, g) <--.to-- g of Cut             g of Cut <-- loss.backward()

Each stage's graph begins behind a ``_Cut`` and ends at its output, so that a backward pass through one stage can be
issued when its turn comes, behind other micro-batches' forward passes. What a micro-batch keeps alive on a stage is
dropped with its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ...meshes import varying
from ...session.places import MeshPlace, Place
from .microbatches import Loss, to_place
from .schedules import Action


@dataclass
class Stage:
    """A part of a pipeline's module, and where it runs."""

    index: int
    module: torch.nn.Module
    place: Place
    over: tuple[str, ...]  #: the dims of its mesh along which ranks have rows of their own
    borrowed: list[tuple[str, torch.nn.Parameter]] = field(default_factory=list)  #: those that live at another stage
    traced: bool = False  #: whether it takes and returns flat lists of values
    output: TreeSpec | None = None  #: the tree that a traced last stage returns
    #: those of a traced module, by name: which module has it, as what. It has them for both of its modes
    buffers: list[tuple[str, torch.nn.Module, str]] = field(default_factory=list)

    def __call__(self, value: Any, lent: dict[str, torch.Tensor]) -> Any:
        args = tuple(value) if self.traced else (value,)
        # random numbers vary along dims, which a node has none of
        with varying(*self.over) if isinstance(self.place, MeshPlace) and self.over else nullcontext():
            output = torch.func.functional_call(self.module, lent, args) if lent else self.module(*args)
        return output if self.output is None else tree_unflatten(list(output), self.output)


class _Cut(torch.autograd.Function):
    """Tensors from another stage, as what a stage begins with. Their gradients end here, and wait to be taken.

    They are no leaves, so that a stage may write them in place as it could in the unsplit module.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, gap: _Gap) -> tuple[torch.Tensor, ...]:
        ctx.gap = gap
        ctx.set_materialize_grads(False)
        tensors, gap.tensors = gap.tensors, ()
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None]:
        ctx.gap.grads = grads
        return None, None


@dataclass
class _Gap:
    """The tensors that cross from one stage to the next, of one micro-batch."""

    tensors: Sequence[torch.Tensor] = ()
    grads: Sequence[torch.Tensor | None] = ()


@dataclass
class _Left:
    """The output of a stage for a micro-batch, until the next stage takes it; and the ends of its autograd graph, until
    its backward pass."""

    output: Any = None
    edges: list[tuple[GradientEdge, torch.device]] = field(default_factory=list)


class Pass:
    """One step, or one evaluation (without targets)."""

    def __init__(
        self,
        stages: Sequence[Stage],
        parts: Sequence[Any],
        loss: Loss | None = None,
        targets: Sequence[Any] = (),
        shares: Sequence[float] = (),
    ) -> None:
        self._stages, self._parts, self._loss, self._targets, self._shares = stages, parts, loss, targets, shares
        self._left: dict[tuple[int, int], _Left] = {}
        self._gaps: dict[tuple[int, int], _Gap] = {}  #: by the stage behind it, and the micro-batch
        self._losses: dict[int, torch.Tensor] = {}
        self._lent: dict[tuple[int, Place], torch.Tensor] = {}  #: copies of parameters that live elsewhere
        self.total: torch.Tensor | None = None  #: the loss so far
        self.outputs: list[Any] = []

    def run(self, ticks: Sequence[Sequence[Action]]) -> None:
        """Issues all actions."""
        for tick in ticks:
            came = []
            for action in tick:  # first, so that a node sends what it has made before it goes on
                with self._naming_action(action):
                    came.append(self._move_input(action))
            for action, value in zip(tick, came, strict=True):
                with self._naming_action(action):
                    self._back(action, value) if action.backward else self._forward(action, value)

    @contextmanager
    def _naming_action(self, action: Action) -> Iterator[None]:
        """Has an error say in which stage, and of which micro-batch, it was: one raised here, and one on a node."""
        place = self._stages[action.stage].place
        what = "backward" if action.backward else "forward"
        words = f"the {what} pass of stage {action.stage}, micro-batch {action.microbatch} of {len(self._parts)}"
        link = place.session.link
        link.set_notes(place.ranks, words)
        try:
            yield
        except Exception as e:
            e.add_note(f"  in {words}, on {place}")
            raise
        finally:
            link.set_notes(place.ranks, "")

    def _move_input(self, action: Action) -> Any:
        """Moves what an action needs of another stage to its place."""
        stage, _, i = action
        place = self._stages[stage].place
        if action.backward:
            return self._gradients(stage, i)
        if stage == 0:
            return to_place(self._parts[i], place)
        left = self._left[stage - 1, i]
        output, left.output = left.output, None
        return self._cross(output, stage, i)

    def _cross(self, output: Any, stage: int, i: int) -> Any:
        """Returns the output of the stage before on this one's place, cut from its autograd graph."""
        place = self._stages[stage].place
        leaves, spec = tree_flatten(output)
        moved: dict[int, torch.Tensor] = {}
        crossing: list[int] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in moved:
                there = leaf.detach().to(place.device)
                moved[id(leaf)] = there.clone() if leaf.device == place.device else there
                if leaf.requires_grad:
                    crossing.append(id(leaf))
        if crossing:
            gap = self._gaps[stage, i] = _Gap([moved[each] for each in crossing])
            anchor = torch.empty(0, device="cpu", requires_grad=True)
            moved.update(zip(crossing, _Cut.apply(anchor, gap), strict=True))  # type: ignore[no-untyped-call]
        return tree_unflatten([moved.get(id(leaf), leaf) for leaf in leaves], spec)

    def _gradients(self, stage: int, i: int) -> list[torch.Tensor | None]:
        """Returns the gradients of a stage's outputs, at their places."""
        gap = self._gaps.pop((stage + 1, i), None)
        if gap is None:
            return []
        edges = self._left[stage, i].edges
        return [
            None if grad is None else grad.to(device)
            for grad, (_, device) in zip(gap.grads or [None] * len(edges), edges, strict=True)
        ]

    def _forward(self, action: Action, value: Any) -> None:
        index, _, i = action
        stage = self._stages[index]
        output = stage(value, self._lend(stage))
        if index < len(self._stages) - 1:
            crossing = {id(x): x for x in tree_flatten(output)[0] if isinstance(x, torch.Tensor) and x.requires_grad}
            self._left[index, i] = _Left(output, [(get_gradient_edge(x), x.device) for x in crossing.values()])
        elif self._loss is None:
            self.outputs.append(output)
        else:
            self._losses[i] = self._weighted(output, i, stage.place)

    def _weighted(self, output: Any, i: int, place: Place) -> torch.Tensor:
        """Returns the loss of a micro-batch times its share of the batch."""
        assert self._loss is not None
        loss = self._loss(output, to_place(self._targets[i], place))
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"Pipeline: loss_fn returned {type(loss).__name__}, and has to return a tensor")
        if loss.numel() != 1:
            raise ValueError(
                f"Pipeline: loss_fn returned a tensor of shape {tuple(loss.shape)}, and has to return the mean loss of "
                "a micro-batch (reduction='mean')"
            )
        if len(self._shares) > 1:
            loss = loss * self._shares[i]
        value = loss.detach()
        self.total = value if self.total is None else self.total + value
        return loss

    def _back(self, action: Action, grads: list[torch.Tensor | None]) -> None:
        index, _, i = action
        with torch.autocast("node", enabled=False):  # around step(), where a program has its backward pass outside
            if index == len(self._stages) - 1:
                self._losses.pop(i).backward()
                return
            edges = self._left.pop((index, i)).edges
            there = [(edge, grad) for (edge, _), grad in zip(edges, grads, strict=bool(grads)) if grad is not None]
            if there:
                torch.autograd.backward([edge for edge, _ in there], [grad for _, grad in there])

    def _lend(self, stage: Stage) -> dict[str, torch.Tensor]:
        """Returns copies of the parameters that live at another stage, of this pass; and buffers of a traced module."""
        lent = {name: self._copy(parameter, stage.place) for name, parameter in stage.borrowed}
        for name, owner, key in stage.buffers:
            buffer = owner._buffers[key]
            if buffer is not None:
                lent[name] = buffer if buffer.device == stage.place.device else self._copy(buffer, stage.place)
        return lent

    def _copy(self, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        key = (id(tensor), place)
        if key not in self._lent:
            copy = tensor.detach().to(place.device)
            self._lent[key] = copy.requires_grad_(tensor.requires_grad and torch.is_grad_enabled())
        return self._lent[key]

    @torch.no_grad()
    def give_back(self) -> None:
        """Adds the gradients of lent parameters to those of the parameters themselves."""
        parameters = {id(p): p for stage in self._stages for _, p in stage.borrowed}
        for (which, _), copy in self._lent.items():
            if copy.grad is None:
                continue
            parameter = parameters[which]
            grad = copy.grad.to(parameter.device)
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad += grad
