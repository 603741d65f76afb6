"""Initial values of parameters of which each rank has a part: made whole, a module at a time, and cut."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..meshes.cut import part_of, whole_of
from .groups import ShardedParameter
from .sharding import FSDPModule, reshard


def initialize(module: nn.Module, init: Callable[[nn.Module], object] | None = None) -> None:
    """Makes the initial values of a module that ``fully_shard`` has cut, those that the plain module would make on the
    mesh for the same ``torch.manual_seed``, whatever the number of ranks. Returns at once.

        >>> mesh = dt.mesh(dp=2)
        >>> with torch.device("meta"):
        ...     model = dt.fully_shard(torch.nn.Linear(3, 5), mesh)
        >>> _ = model.to_empty(device=mesh.device)      # each rank makes its part only
        >>> dt.training.initialize(model)

    Args:
        module: a module; what of it is not sharded is initialized as well.
        init: a function of a module, as for ``module.apply``: called with each submodule, the innermost first. Default:
            its ``reset_parameters()``, or ``_reset_parameters()``, where it has one.

    While a submodule is initialized its parameters, and those below it that are in the same group, are whole, drawn
    alike on all ranks; each rank keeps its part. So nodes hold one submodule's parameters as a whole at a time.

    Raises TypeError for what is no module, or, without ``init``, for a module that has parameters and no
    reset_parameters; RuntimeError for parameters without memory (``to_empty`` first), and for a function that writes
    parameters of another group, of which it sees parts; NodeLost.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"initialize takes a module, not {type(module).__name__}")
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise RuntimeError(f"initialize: {name!r} has no memory yet; module.to_empty(device=mesh.device) first")
    reshard(module)
    groups = [m._sharding.group for m in module.modules() if isinstance(m, FSDPModule)]
    parts = [part for group in groups for part in group.parts]
    for name, submodule, nearest in list(_innermost_first(module, "", None)):
        run: Any = init
        if run is None:
            run = _reset_of(name or type(module).__name__, submodule)
            if run is None:
                continue
        below = {id(m) for m in submodule.modules()}
        own = nearest._sharding.group.parts if nearest is not None else []
        mine = [part for part in own if any(id(owner) in below for owner, _ in part.places)]
        with torch.no_grad(), _whole(mine, [part for part in parts if part not in mine], name or "it"):
            run(submodule)


def _innermost_first(module: nn.Module, name: str, nearest: Any) -> Iterator[tuple[str, nn.Module, Any]]:
    """(name, module, the sharded one that it is in), as ``module.apply`` goes."""
    nearest = module if isinstance(module, FSDPModule) else nearest
    for its_name, child in module.named_children():
        yield from _innermost_first(child, f"{name}.{its_name}" if name else its_name, nearest)
    yield name, module, nearest


def _reset_of(name: str, module: nn.Module) -> Callable[[nn.Module], object] | None:
    for method in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, method, None)
        if callable(reset):
            return lambda _: reset()
    if any(parameter is not None for parameter in module._parameters.values()):
        raise TypeError(
            f"initialize: {name} ({type(module).__name__}) has parameters and no reset_parameters(); give one, or "
            "initialize(model, init) with a function of a module"
        )
    return None


@contextlib.contextmanager
def _whole(parts: list[ShardedParameter], others: list[ShardedParameter], name: str) -> Iterator[None]:
    """Has modules have whole parameters in the place of parts, whose values the parts take in the end."""
    versions = [part.parameter._version for part in others]
    made = []
    for part in parts:
        whole = nn.Parameter(whole_of(part.parameter, ((part.cut, 0),)), part.parameter.requires_grad)
        made.append((whole, whole._version))
        for owner, its_name in part.places:
            owner._parameters[its_name] = whole
    try:
        yield
    finally:
        for part in parts:
            for owner, its_name in part.places:
                owner._parameters[its_name] = part.parameter
    for part, (whole, before) in zip(parts, made, strict=True):
        if whole._version != before:
            part.parameter.copy_(part_of(whole.detach(), ((part.cut, 0),)))
    for part, version in zip(others, versions, strict=True):
        if part.parameter._version != version:
            raise RuntimeError(
                f"initialize: the function of {name!r} wrote {part.name!r}, which is in another group, so that each "
                "rank has a part of it there: the same numbers in each; initialize it as the submodule that has it"
            )
