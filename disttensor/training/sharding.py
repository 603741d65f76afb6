"""``fully_shard``: parameters, gradients and optimizers' states of a module are cut along a dim of a mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ..collectives import broadcast
from ..errors.argument_checks import flag, needing, spelled
from ..futures.work import Work
from ..meshes import Mesh, varying
from ..meshes.cut import Cut, cut_of, mark, part_of, whole_of
from ..meshes.mesh import all_dims_of, along
from ..runtime.process.spelling import shown
from .batches import shares_of
from .groups import ParameterGroup, ShardedParameter, group_of_part, were_cut
from .named import place_of
from .schedule import GatherSchedule, Saving, in_backward, running

M = TypeVar("M", bound=nn.Module)


@spelled
@needing("dt.fully_shard(module, dt.mesh(dp=2))", "module", "mesh")
def fully_shard(
    module: M,
    mesh: Mesh,
    *,
    over: str | None = None,
    replicas: str | None = None,
    reshard_after_forward: bool = True,
    mp_policy: Any = None,
) -> M:
    """Cuts a module's parameters along a dim of a mesh, each in dimension 0, and returns the module.

    Each rank has a part of the parameters, of their gradients and of the optimizer's states. What one call cuts is a
    group: it is gathered as a whole before the module's forward pass, freed after it, gathered again in the backward
    pass, and its gradients are reduced as soon as all are there: each rank gets its part of their mean. So call it for
    the submodules first, such as each block of a transformer, and for the model last. It is
    ``torch.distributed.fsdp.fully_shard`` for meshes (docs/SHARDED.md).

        >>> mesh = dt.mesh(dp=2)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
        >>> for layer in model:
        ...     _ = dt.fully_shard(layer, mesh)
        >>> _ = dt.fully_shard(model, mesh)
        >>> [tuple(p.shape) for p in model.parameters()]        # 3 of 5 rows, and 1 of 1
        [(3, 3), (3,), (1, 5), (1,)]
        >>> model(torch.ones(4, 3)).sum().backward()            # two rows of the batch on each rank
        >>> model[0].weight.grad.shape
        torch.Size([3, 3])

    Args:
        module: a module at the script, on the mesh, or on the meta device. Of its parameters those that no earlier call
            has cut are this call's group.
        mesh: the mesh, or some of its dims, as torch's: ``mesh["dp"]``, or ``mesh["rep", "dp"]`` for hybrid sharding.
        over: the name of the dim along which parameters are cut, and ranks have shares of a batch. Default: that of
            ``mesh["dp"]``, the only one of a mesh, or "dp". Of ``mesh["rep", "dp"]``, and of a mesh of two dims that
            are not called "dp", it is the second, and the first is ``replicas``, as in torch.
        replicas: the name of another dim along which ranks have shares of a batch, and the same parts: the mean of
            gradients is over both dims, and parameters are gathered along ``over`` only (hybrid sharding).
        reshard_after_forward: free the whole parameters after the forward pass. If not, they stay until the backward
            pass has done with them: one collective less, and more memory.
        mp_policy: a ``torch.distributed.fsdp.MixedPrecisionPolicy``.

    Make the optimizer after it. The class of the module becomes a subclass of its own and of ``FSDPModule``. Returns at
    once, but for the upload of parameters that are at the script.

    Raises TypeError for a module or mesh that is none, or a policy that is none; ValueError for an unknown dim, dims
    that do not say along which to cut, a parameter without a dimension, one that is cut already (``dt.nn``), one that
    is tied to a module outside, a module that is sharded already; NodeLost.
    """
    along_dim, copies = _dims(mesh, over, replicas)
    mesh = all_dims_of(mesh)
    also = _check(module, mesh, along_dim, copies, mp_policy)
    reshard(module)
    flag("reshard_after_forward", reshard_after_forward)
    group = ParameterGroup(_cut(module, mesh, along_dim, also), mesh, along_dim, also, mp_policy)
    group.after_forward = bool(reshard_after_forward)
    for buffer_of, name, buffer in _buffers(module):
        if place_of(buffer) is None and not buffer.is_meta:
            buffer_of._buffers[name] = buffer.to(mesh.device)
    kind = type(module)
    module.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {"__module__": kind.__module__})
    module._sharding = _Sharding(group)  # type: ignore[assignment]
    module.register_state_dict_pre_hook(_before_state_dict)  # type: ignore[no-untyped-call]
    module.register_state_dict_post_hook(_whole_entries)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_own_entries)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]
    return module


class FSDPModule:
    """The methods that a module has beyond its own after ``fully_shard``, named as those of torch's FSDPModule."""

    _sharding: _Sharding

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns a module of the plain class: a slice of a Sequential is made by its class, and is not sharded."""
        plain: Any = cls.__mro__[2]
        return plain(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module does, with whole parameters."""
        sharding = self._sharding
        with sharding.forward(self, args, kwargs) as (args, kwargs):
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        sharding.before_backward(self, output)
        policy = sharding.group.policy
        return output if policy is None or policy.output_dtype is None else _cast(output, policy.output_dtype)

    def unshard(self, async_op: bool = False) -> Work[Any] | None:
        """Gathers the parameters of this module's group, which then stay whole until ``reshard``, or until a backward
        pass has done with them.

        Returns at once. With ``async_op`` what comes next on the nodes runs beside the collective, the next forward
        pass is the first that sees whole parameters, and a Work is returned, unless there is nothing to gather.
        """
        group = self._sharding.group
        group.reset_sharded_params()
        group.held = True
        if async_op:
            return group.begin_all_gather(beside=True)
        group.unshard()
        return None

    def reshard(self) -> None:
        """Frees the whole parameters of this module's group; the module has its parts again."""
        group = self._sharding.group
        group.held = False
        group.reshard()
        group.reset_sharded_params()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Sets whether backward passes reduce gradients. Those of passes that do not are kept, whole, on each rank, and
        reduced with the next pass that does."""
        for group in self._groups(recurse):
            group.reduces = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether the whole parameters are freed after the forward pass."""
        for group in self._groups(recurse):
            group.after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Sets whether the whole parameters are freed when a backward pass has their gradients."""
        for group in self._groups(recurse):
            group.after_backward = reshard_after_backward

    def _groups(self, recurse: bool = True) -> list[ParameterGroup]:
        modules = self.modules() if recurse else [self]  # type: ignore[attr-defined]
        return [module._sharding.group for module in modules if isinstance(module, FSDPModule)]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        group = self._sharding.group
        group.held = False
        group.reshard()  # what goes elsewhere, or to another dtype, are the parts
        empty = [part for part in group.parts if part.parameter.is_meta]
        moved = super()._apply(*args, **kwargs)  # type: ignore[misc]
        group.reset_sharded_params()
        for part in empty:
            part.clear_padding()
        return moved

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            f"a module that fully_shard has cut is not copied: make the plain {_plain_name(self)} anew, fully_shard "
            "it, and load_state_dict(model.state_dict())"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"a module that fully_shard has cut is not pickled: save its state_dict(), which is that of the plain "
            f"{_plain_name(self)}"
        )


def reshard(module: nn.Module) -> None:
    """Has a module, and all below it, have their parts: those are the parameters that optimizers and checkpoints
    know."""
    for one in module.modules():
        if isinstance(one, FSDPModule):
            one.reshard()


def _plain_name(module: object) -> str:
    return type(module).__name__.removeprefix("FSDP")


class _Sharding:
    """The group of a module that is sharded, and its forward passes."""

    def __init__(self, group: ParameterGroup) -> None:
        self.group = group
        self.schedule: GatherSchedule | None = None  #: if it was the outermost

    @contextlib.contextmanager
    def forward(self, module: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        """Is a forward pass of the module; gives its arguments."""
        group, again = self.group, in_backward()
        group.reset_sharded_params()
        with contextlib.ExitStack() as stack:
            schedule = running.get()
            if schedule is None and not again:
                if Saving.in_checkpoint():
                    raise RuntimeError(
                        f"fully_shard: a checkpoint is around the outermost module that is sharded, "
                        f"{_plain_name(module)}, and would draw other random numbers as it computes it again; put "
                        "checkpoints around modules inside of it, or call fully_shard for the model that has it"
                    )
                schedule = self._outermost(module)
                args, kwargs = shares_of((args, kwargs), group.mesh, (group.over, *group.also), "fully_shard")
                stack.enter_context(schedule.forward())
                stack.enter_context(varying(group.over, *group.also))
            if torch.is_grad_enabled() and not Saving.on():
                stack.enter_context(Saving())
            if again:  # a checkpoint computes it again
                (group.schedule or self._outermost(module)).pre_backward_unshard(group)
                group.unshard()
            elif schedule is not None:
                schedule.pre_forward_unshard(group)
            policy = group.policy
            if policy is not None and policy.cast_forward_inputs and policy.param_dtype is not None:
                args, kwargs = _cast((args, kwargs), policy.param_dtype)
            try:
                yield args, kwargs
            finally:
                if not again and not group.held and (group.after_forward or not torch.is_grad_enabled()):
                    group.reshard()

    def before_backward(self, module: Any, output: Any) -> None:
        """Has the module have whole parameters in a backward pass, too: a checkpoint within its forward pass computes
        with them. There is none in torch's own layers, some of which need no parameters then."""
        if self.group.parts and torch.is_grad_enabled() and not _is_torchs_layer(module):
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(self._pre_backward)

    def _pre_backward(self, grad: torch.Tensor) -> None:
        schedule = self.group.schedule
        if in_backward() and not self.group.is_whole:
            with torch.enable_grad():
                schedule.pre_backward_unshard(self.group)
                self.group.unshard()

    def _outermost(self, module: nn.Module) -> GatherSchedule:
        groups = [m._sharding.group for m in module.modules() if isinstance(m, FSDPModule)]
        if self.schedule is None or set(groups) != set(self.schedule.order):
            self.schedule = GatherSchedule(groups)
        for group in groups:
            group.schedule = self.schedule
        return self.schedule


def _is_torchs_layer(module: nn.Module) -> bool:
    return not module._modules and type(module).__mro__[2].__module__.startswith("torch.nn.")


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, values)


# ---- cutting ---------------------------------------------------------------------------------------------------------


def _dims(mesh: Any, over: Any, replicas: Any) -> tuple[Any, Any]:
    """Returns the dim along which parameters are cut, and that of the replicas: as they are given, and else by the
    names of the mesh's dims. Raises ValueError where these do not say it."""
    if not isinstance(mesh, Mesh):
        return over, replicas
    if over is None:
        over = along(mesh, None, "dp")
        if mesh.ndim == 2 and (over == mesh.names or "dp" not in mesh.names):
            if replicas is None:
                replicas, over = mesh.names
            else:
                over = next(name for name in mesh.names if name != replicas)
        elif not isinstance(over, str):
            raise ValueError(
                f"fully_shard: {mesh} are {mesh.ndim} dims; over= says along which of them to cut, and replicas= which "
                "other one has copies. Without, mesh[...] names one dim, or first that of the copies and then the other"
            )
    if isinstance(replicas, str):
        along(mesh, replicas, "dp")
    return along(mesh, over, "dp"), replicas


def _check(module: object, mesh: object, over: object, replicas: object, policy: object) -> tuple[str, ...]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard takes a module, not {type(module).__name__}; of several, call it for each")
    if not isinstance(mesh, Mesh):
        raise TypeError(f"fully_shard takes a mesh, as in fully_shard(model, dt.mesh(dp=4)), not {shown(mesh)}")
    if not isinstance(over, str):
        raise TypeError(f"fully_shard: over is the name of one dim of the mesh, as in over='dp', not {shown(over)}")
    mesh.size(over)
    if replicas is not None:
        if not isinstance(replicas, str):
            raise TypeError(f"fully_shard: replicas is the name of a dim, as in replicas='rep', not {shown(replicas)}")
        mesh.size(replicas)
        if replicas == over:
            raise ValueError(f"fully_shard: over and replicas are two dims of the mesh, and both are {shown(over)}")
    if isinstance(module, FSDPModule):
        raise ValueError(f"fully_shard: this {_plain_name(module)} is sharded already")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        raise ValueError(
            f"fully_shard: a {type(module).__name__} has no forward pass before which to gather; call it for each of "
            "its modules"
        )
    fields = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if policy is not None and not all(hasattr(policy, field) for field in fields):
        raise TypeError(f"fully_shard: mp_policy is a torch.distributed.fsdp.MixedPrecisionPolicy, not {shown(policy)}")
    return () if replicas is None else (replicas,)


def _cut(module: nn.Module, mesh: Mesh, over: str, also: tuple[str, ...]) -> list[ShardedParameter]:
    """Returns the parts of a module's parameters that are in no group, in the place of which it has them now."""
    found: dict[int, tuple[nn.Parameter, str, list[tuple[nn.Module, str]]]] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or id(parameter) in group_of_part:
                continue
            full = f"{prefix}.{name}" if prefix else name
            _check_parameter(full, parameter)
            found.setdefault(id(parameter), (parameter, full, []))[2].append((owner, name))
    cuts: dict[int, Cut] = {}
    parts = []
    for parameter, name, places in found.values():
        size = parameter.shape[0]
        cut = cuts.setdefault(size, Cut(mesh, over, size, "module that fully_shard has cut"))
        made = nn.Parameter(_own(parameter, cut, also), parameter.requires_grad)
        mark(made, ((cut, 0),))
        for owner, its_name in places:
            owner._parameters[its_name] = made
        were_cut[id(parameter)] = parameter
        parts.append(ShardedParameter(name, places, made, cut))
    for owner in {owner for part in parts for owner, _ in part.places}:
        if isinstance(owner, nn.RNNBase):
            owner._flat_weights = [getattr(owner, name, None) for name in owner._flat_weights_names]
    return parts


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.UninitializedParameter):
        raise ValueError(f"fully_shard: {name!r} has no shape yet; run a forward pass of the lazy module first")
    if not parameter.dim():
        raise ValueError(f"fully_shard: {name!r} has no dimension that could be cut; make it a parameter of shape (1,)")
    if cut := cut_of(parameter):
        raise ValueError(
            f"fully_shard: {name!r} is cut along {cut[0][0].over!r} already, by {cut[0][0].what}; fully_shard takes "
            "plain modules"
        )
    if id(parameter) in were_cut:
        raise ValueError(
            f"fully_shard: {name!r} is tied to a parameter that an earlier call has cut, of a submodule that has only "
            "one of the two; call fully_shard for no less than a module that has both"
        )


@torch.no_grad()
def _own(parameter: torch.Tensor, cut: Cut, also: tuple[str, ...]) -> torch.Tensor:
    whole = parameter.detach()
    if whole.is_meta:
        return torch.empty((cut.share, *whole.shape[1:]), dtype=whole.dtype, device="meta")
    if place_of(whole) is cut.place:
        whole = broadcast(whole, over=(cut.over, *also))  # all begin with the first one's
    return cut.shares(whole, 0)


def _buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                yield owner, name, buffer


# ---- state dicts -----------------------------------------------------------------------------------------------------


def _before_state_dict(module: Any, prefix: str, keep_vars: bool) -> None:
    module.reshard()


@torch.no_grad()
def _whole_entries(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Puts whole parameters in the place of parts, unless they are the parameters themselves (``keep_vars``)."""
    for part, names in _names(module):
        if isinstance(state.get(prefix + names[0]), nn.Parameter):
            continue
        whole = whole_of(part.parameter, ((part.cut, 0),))
        for name in names:
            if prefix + name in state:
                state[prefix + name] = whole


def _own_entries(
    module: Any,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: Any,
    missing: Any,
    unexpected: Any,
    errors: Any,
) -> None:
    """Puts parts in the place of whole parameters that are to be loaded."""
    module.reshard()
    for part, names in _names(module):
        for name in names:
            value = state.get(prefix + name)
            if not isinstance(value, torch.Tensor) or value is part.parameter:
                continue
            if tuple(value.shape) == part.shape:
                state[prefix + name] = part_of(value.detach(), ((part.cut, 0),))
            elif place_of(value) is not part.cut.place or value.shape != part.parameter.shape:
                errors.append(
                    f"size mismatch for {prefix}{name}: {tuple(value.shape)} in the checkpoint, {part.shape} is the "
                    "whole parameter."
                )
                state[prefix + name] = part.parameter.detach()


def _after_load(module: Any, keys: Any) -> None:
    module._sharding.group.reset_sharded_params()  # with assign=True: what the optimizer is made of next are parts


def _names(module: Any) -> Iterator[tuple[ShardedParameter, list[str]]]:
    """(a part of the module's group, all names under which its state dict has it)."""
    prefixes: dict[int, list[str]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        prefixes.setdefault(id(owner), []).append(f"{prefix}." if prefix else "")
    for part in module._sharding.group.parts:
        yield part, [prefix + name for owner, name in part.places for prefix in prefixes.get(id(owner), ())]
