"""Groups of parameters of which each rank has a part: gathered by one collective before they are used, freed after it,
their gradients reduced by one.

What a module computes with are results of an autograd function of the parts (`_Unshard`). Its backward is called when
the gradients of all of the group are there. Autograd would keep the whole parameters from the forward pass to then; so
what it saves of them is only which they are (`Saving`), and they are gathered again when it asks.

The states of a group (`ShardedState`), and the methods that change them:

                       the modules have   the whole parameters
    SHARDED            the parts          are not there
    GATHERING          the parts          are on their way
    GATHERED           the parts          are there, as for what autograd has saved
    GATHERED_STALE     the parts          of before are there, and those of now on their way
    UNSHARDED          whole ones         are there
    UNSHARDED_STALE    whole ones         of before are there, and those of now on their way

    begin_all_gather        SHARDED -> GATHERING, and where a part was written since: GATHERED -> GATHERED_STALE,
                            UNSHARDED -> UNSHARDED_STALE
    ready                   begins where it has to; then GATHERING, GATHERED_STALE -> GATHERED,
                            UNSHARDED_STALE -> UNSHARDED
    unshard                 is ready; then GATHERED -> UNSHARDED
    discard_unused_gather   what was begun: GATHERING -> SHARDED, GATHERED_STALE -> GATHERED,
                            UNSHARDED_STALE -> UNSHARDED
    reshard                 all -> SHARDED, also by ``accumulate_unsharded_grads`` and ``reset_after_failure``, and
                            where gathering fails

What a program has asked for (``held``, ``reduces``, ``after_forward``, ``after_backward``), whether autograd has saved
something (``saved``) and gradients that wait (``waits``) go with each state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from ..collectives import all_reduce_
from ..collectives.over_dims import gather_parts, reduce_parts
from ..futures.work import Work
from ..meshes import Mesh
from ..meshes.cut import Cut, mark
from ..proxy.proxy import where_is
from ..runtime.master.route import route

#: The groups of the parts that there are, by the id of the part; and the whole parameters that were cut, by theirs: one
#: that is still alive is tied to a module outside of the group.
group_of_part: WeakValueDictionary[int, ParameterGroup] = WeakValueDictionary()
were_cut: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()


class ShardedState(Enum):
    """The parameters that the modules of a group have, and what is there of the whole ones."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"
    GATHERED_STALE = "gathered, and a part was written since"
    UNSHARDED = "unsharded"
    UNSHARDED_STALE = "unsharded, and a part was written since"


_S = ShardedState
#: The states to which each may change.
CHANGES: dict[ShardedState, set[ShardedState]] = {
    _S.SHARDED: {_S.GATHERING},
    _S.GATHERING: {_S.GATHERED, _S.SHARDED},
    _S.GATHERED: {_S.GATHERED_STALE, _S.UNSHARDED, _S.SHARDED},
    _S.GATHERED_STALE: {_S.GATHERED, _S.SHARDED},
    _S.UNSHARDED: {_S.UNSHARDED_STALE, _S.SHARDED},
    _S.UNSHARDED_STALE: {_S.UNSHARDED, _S.SHARDED},
}
#: What ``begin_all_gather`` changes, and what undoes it.
_BEGUN = {
    _S.SHARDED: _S.GATHERING,
    _S.GATHERED: _S.GATHERED_STALE,
    _S.UNSHARDED: _S.UNSHARDED_STALE,
}
_FORGOTTEN = {begun: before for before, begun in _BEGUN.items()}


@dataclass(eq=False)
class ShardedParameter:
    """A parameter of a group: each rank's share of its dimension 0."""

    name: str  #: in the module of the group
    places: list[tuple[nn.Module, str]]  #: the modules that have it, several if it is tied
    parameter: nn.Parameter
    cut: Cut

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return (self.cut.size, *self.parameter.shape[1:])

    @torch.no_grad()
    def clear_padding(self) -> None:
        """Has zeros where a part that was only made has whatever was there, and no checkpoint will write."""
        if self.cut.padding is not None and where_is(self.parameter) is self.cut.place:
            self.parameter.masked_fill_(self.cut.padding.view(-1, *(1 for _ in self.parameter.shape[1:])), 0)


class ParameterGroup:
    """Parameters that are gathered together, and freed together."""

    def __init__(
        self, parts: Sequence[ShardedParameter], mesh: Mesh, over: str, also: tuple[str, ...], policy: Any
    ) -> None:
        self.parts, self.mesh, self.over, self.also, self.policy = list(parts), mesh, over, also, policy
        self.ranks = mesh.size(over)
        self.after_forward = self.after_backward = True  #: when it is freed
        self.reduces = True  #: whether backward passes reduce
        self.held = False  #: the user has asked for the whole parameters
        self.saved = False  #: autograd may ask for them
        self.sharded_state = ShardedState.SHARDED
        self.values: list[torch.Tensor] | None = None  #: the whole parameters, while they are there
        self.gathered: Any = None  #: the state of the parts when they were gathered
        self._coming: tuple[Any, list[tuple[list[int], list[Any]]]] | None = None
        self._waiting: list[torch.Tensor | None] = [None] * len(parts)  #: gradients of passes that did not reduce
        self.schedule: Any = None
        for part in parts:
            group_of_part[id(part.parameter)] = self

    # ---- whole parameters --------------------------------------------------------------------------------------------

    def state(self) -> tuple[Any, ...]:
        """Returns what changes when a part is written."""
        return tuple((part.parameter._version, getattr(part.parameter, "_h", None)) for part in self.parts)

    def _change(self, to: ShardedState) -> None:
        if to is not self.sharded_state:
            if to not in CHANGES[self.sharded_state]:
                raise AssertionError(f"a group that is {self.sharded_state.value} can't become {to.value}")
            self.sharded_state = to

    @property
    def is_whole(self) -> bool:
        """True while the modules have the whole parameters."""
        return self.sharded_state in (ShardedState.UNSHARDED, ShardedState.UNSHARDED_STALE)

    @torch.no_grad()
    def begin_all_gather(self, beside: bool) -> Work[Any] | None:
        """Begins to gather the parameters, unless they are there or on their way."""
        if not self.parts:
            return None
        state = self.state()
        if self.values is not None and same_state(self.gathered, state):
            return None
        if self._coming is not None and same_state(self._coming[0], state):
            return None
        self._check_place()
        beside = beside and _may_be_beside()
        work, coming = None, []
        with torch.inference_mode(False):
            for pack in self._packs():
                dtype = self._dtype(pack[0])
                shares = [self.parts[i].parameter.detach().reshape(-1).to(dtype) for i in pack]
                parts, work = gather_parts(torch.cat(shares), self.over, beside)
                coming.append((pack, parts))
        self._change(_BEGUN.get(self.sharded_state, self.sharded_state))
        self._coming = state, coming
        return work

    @torch.no_grad()
    def ready(self) -> list[torch.Tensor]:
        """Returns the whole parameters: gathers them, if they are not there, or not those of now."""
        self.begin_all_gather(beside=False)
        if self._coming is not None:
            (self.gathered, coming), self._coming, self.values = self._coming, None, None
            try:
                self.values = self._joined(coming)
                self._change(ShardedState.UNSHARDED if self.is_whole else ShardedState.GATHERED)
            except BaseException:  # a loss, or a Ctrl-C
                self.reshard()
                raise
        return self.values or []

    def _joined(self, coming: list[tuple[list[int], list[Any]]]) -> list[torch.Tensor]:
        """Returns the whole parameters, in the order of the parts, and frees what was gathered of them."""
        found: dict[int, torch.Tensor] = {}
        with torch.inference_mode(False):
            while coming:
                pack, parts = coming.pop()
                at = 0
                for i in pack:
                    share = self.parts[i].parameter
                    size = share.numel()
                    value = torch.cat([part.narrow(0, at, size).view(share.shape) for part in parts])
                    found[i] = value.narrow(0, 0, self.parts[i].cut.size) if len(value) else value
                    at += size
                del parts
        return [found[i] for i in range(len(self.parts))]

    def unshard(self) -> None:
        """Has the modules have the whole parameters."""
        if not self.parts:
            return
        self.ready()
        made = _Unshard.apply(self, *(part.parameter for part in self.parts))  # type: ignore[no-untyped-call]
        for i, value in enumerate(made):
            value._is_param = True  # for modules that ask whether it is one
            value._whole = self, i
        self._change(ShardedState.UNSHARDED)  # before, so that ``reshard`` undoes a part of it
        self._setattr_on_modules(made)

    def reshard(self) -> None:
        """Has the modules have the parts, and frees the whole parameters.

        Modules that have parts already keep what they have: others may have come in the place of the parts
        (``reset_sharded_params``).
        """
        self._coming = self.values = None
        if self.is_whole:
            self._setattr_on_modules([part.parameter for part in self.parts])
        self._change(ShardedState.SHARDED)

    def discard_unused_gather(self) -> None:
        """Forgets what was begun to be gathered, and not used, unless the user has asked for it."""
        if not self.held:
            self._coming = None
            self._change(_FORGOTTEN.get(self.sharded_state, self.sharded_state))

    def reset_after_failure(self) -> None:
        """Forgets what a backward pass that failed has left."""
        self._waiting = [None] * len(self.parts)
        self.saved = self.held = False
        self.reshard()

    def _setattr_on_modules(self, parameters: Sequence[torch.Tensor]) -> None:
        for part, parameter in zip(self.parts, parameters, strict=True):
            for module, name in part.places:
                module._parameters[name] = parameter  # type: ignore[assignment]
        for module in {module for part in self.parts for module, _ in part.places}:
            if isinstance(module, nn.RNNBase):  # which has them in a list, too
                module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]

    def reset_sharded_params(self) -> None:
        """Takes parameters that have come in the place of the parts, by ``load_state_dict(assign=True)`` or a move."""
        for part in self.parts:
            module, name = part.places[0]
            there = module._parameters[name]
            if there is not part.parameter and isinstance(there, nn.Parameter) and not self.is_whole:
                if there.shape != part.parameter.shape:
                    raise RuntimeError(
                        f"fully_shard: {part.name!r} was replaced by a parameter of shape {tuple(there.shape)}, and "
                        f"each rank's part has {tuple(part.parameter.shape)}; replace parameters before fully_shard"
                    )
                group_of_part.pop(id(part.parameter), None)  # another parameter may get its id
                part.parameter = there
                mark(there, ((part.cut, 0),))
                group_of_part[id(there)] = self
                for other, its_name in part.places[1:]:
                    other._parameters[its_name] = there

    def _check_place(self) -> None:
        for part in self.parts:
            there = where_is(part.parameter)
            if there is not part.cut.place:
                if part.parameter.is_meta:
                    raise RuntimeError(
                        f"{part.name!r} has no memory yet, as it was made on the meta device: "
                        "model.to_empty(device=mesh.device), and dt.training.initialize(model) or a checkpoint"
                    )
                raise RuntimeError(
                    f"{part.name!r} was sharded over {self.mesh}, and is on {there or part.parameter.device} now; "
                    "model.to(mesh.device)"
                )

    def _dtype(self, i: int) -> torch.dtype:
        """Returns the dtype of a whole parameter."""
        dtype = self.parts[i].parameter.dtype
        wanted = self.policy.param_dtype if self.policy is not None and dtype.is_floating_point else None
        return wanted or dtype

    def _packs(self) -> list[list[int]]:
        """Returns the parameters of each dtype."""
        packs: dict[torch.dtype, list[int]] = {}
        for i in range(len(self.parts)):
            packs.setdefault(self._dtype(i), []).append(i)
        return list(packs.values())

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def accumulate_unsharded_grads(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Takes the gradients of the whole parameters from a backward pass that has all of them."""
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            name = self.parts[i].name
            if grad.layout is not torch.strided:
                raise TypeError(
                    f"fully_shard: the gradient of {name!r} is {grad.layout}, and has to be strided; sparse=False"
                )
            if grad.requires_grad:
                raise RuntimeError(
                    f"fully_shard: the gradient of {name!r} has a gradient itself (create_graph=True), which parts of "
                    "it would lose"
                )
            before = self._waiting[i]
            self._waiting[i] = grad if before is None else before + grad
        self.saved = False
        if self.after_backward:
            self.held = False
            self.reshard()

    @property
    def waits(self) -> bool:
        """True if there are gradients that no collective has reduced."""
        return any(grad is not None for grad in self._waiting)

    def reduce(self, beside: bool) -> tuple[list[ReducedGradients], list[Work[Any]]]:
        """Reduces the gradients that wait: each rank gets its part of the mean."""
        beside = beside and not self.also and _may_be_beside()
        packs: dict[torch.dtype, list[int]] = {}
        for i, waiting in enumerate(self._waiting):
            if waiting is not None:
                wanted = self.policy.reduce_dtype if self.policy is not None and waiting.is_floating_point() else None
                packs.setdefault(wanted or waiting.dtype, []).append(i)
            del waiting  # each is freed as soon as it is packed
        made, works = [], []
        for dtype, pack in packs.items():
            rows = []
            for i in pack:
                grad: Any = self._waiting[i]
                self._waiting[i], one = None, self.parts[i]
                rows.append(one.cut.padded(grad, 0).reshape(self.ranks, one.parameter.numel()).to(dtype))
                del grad
            flat = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
            del rows
            pieces = [flat.select(0, rank).contiguous() for rank in range(self.ranks)]
            part, work = reduce_parts(pieces, "avg", self.over, beside)
            if self.also:
                all_reduce_(part, "avg", over=self.also)
            if work is not None:
                works.append(work)
            made.append(ReducedGradients([self.parts[i] for i in pack], part))
        return made, works


@dataclass(eq=False)
class ReducedGradients:
    """The reduced gradients of some parameters, each rank's parts, in one tensor that may be on its way."""

    parts: list[ShardedParameter]
    flat: Any

    def accumulate_grad(self) -> None:
        """Adds them to the parameters' gradients."""
        at = 0
        for part in self.parts:
            parameter = part.parameter
            # a view that is not made before it is used: so nothing waits for the collective meanwhile
            grad = self.flat.narrow(0, at, parameter.numel()).view(parameter.shape).to(parameter.dtype)
            at += parameter.numel()
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad += grad
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                hook(parameter)


class _Unshard(torch.autograd.Function):
    """The parts of a group to the whole parameters."""

    @staticmethod
    def forward(ctx: Any, group: ParameterGroup, *parts: Any) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        made = tuple(value.detach() for value in group.values or ())
        ctx.mark_non_differentiable(*(x for x, part in zip(made, parts, strict=True) if not part.requires_grad))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        group: ParameterGroup = ctx.group
        group.schedule.post_backward(group, grads)
        return None, *(None for _ in grads)


def _may_be_beside() -> bool:
    """Returns whether a collective may run beside what comes next: in a graph none does."""
    return route.get().recorder is None


def same_state(a: Any, b: Any) -> bool:
    """Returns whether parts are as they were."""
    return a is b or (a is not None and all(v == w and h is k for (v, h), (w, k) in zip(a, b, strict=True)))
