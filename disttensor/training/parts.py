"""Parameters of which each rank has a part: their gradients are clipped, their optimizers' states put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..meshes.cut import Cuts, cut_of, part_of, whole_of, whole_shape


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales gradients so that their norm, all taken for one vector, is ``max_norm`` at most; returns what it was.

    It is ``torch.nn.utils.clip_grad_norm_``, which does the same: of gradients that are cut along dims of a mesh
    (``dt.nn``, ``dt.fully_shard``) the norm is that of the whole ones, with each rank's part counted once; what all
    ranks have is counted once, too. Returns at once, unless ``error_if_nonfinite``.

    Raises ValueError for a ``norm_type`` that is not above 0, where gradients are cut; RuntimeError for a norm that is
    not finite, if ``error_if_nonfinite``.
    """
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


@torch.no_grad()
def whole_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the state dict that an optimizer of the plain model would have, for ``torch.save``: states of parameters
    of which each rank has a part are put together, alike on all ranks. Returns at once.

        >>> mesh = dt.mesh(tp=2)
        >>> layer = dt.nn.ColumnParallelLinear(3, 5, mesh=mesh)
        >>> optimizer = torch.optim.AdamW(layer.parameters())
        >>> layer(torch.ones(1, 3, device=mesh.device)).sum().backward()
        >>> optimizer.step()
        >>> state = dt.training.whole_state_dict(optimizer)
        >>> state["state"][0]["exp_avg"].shape, optimizer.state[layer.weight]["exp_avg"].shape
        (torch.Size([5, 3]), torch.Size([3, 3]))

    Every node has all of the whole states for as long as the result lives. Raises TypeError for what is no optimizer,
    NodeLost.
    """
    return _changed(optimizer, optimizer.state_dict() if _checked(optimizer) else {}, _joined)


@torch.no_grad()
def load_whole_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Loads a state dict of the plain model's optimizer, or of ``whole_state_dict``: each rank takes its parts of the
    states. Returns at once.

    Raises TypeError for what is no optimizer, ValueError for a state dict of other groups of parameters, NodeLost.
    """
    if _checked(optimizer):
        optimizer.load_state_dict(_changed(optimizer, state_dict, _own_part))


def _checked(optimizer: object) -> bool:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"whole states are those of an optimizer, not of {type(optimizer).__name__}")
    return True


def _joined(value: torch.Tensor, parameter: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    return whole_of(value, cuts) if value.shape == parameter.shape else value


def _own_part(value: torch.Tensor, parameter: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    return part_of(value, cuts) if tuple(value.shape) == whole_shape(parameter, cuts) else value


def _changed(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    change: Callable[[torch.Tensor, torch.Tensor, Cuts], torch.Tensor],
) -> dict[str, Any]:
    """Returns a state dict in which the states of parameters that are parts are changed."""
    states = dict(state_dict["state"])
    for number, parameter in _numbered(optimizer, state_dict):
        cuts = cut_of(parameter)
        if cuts and number in states:
            states[number] = {
                name: change(value, parameter, cuts) if isinstance(value, torch.Tensor) else value
                for name, value in states[number].items()
            }
    return {**state_dict, "state": states}


def _numbered(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> Iterator[tuple[int, torch.nn.Parameter]]:
    """(the state dict's number of a parameter, the parameter), of all."""
    for ours, theirs in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        yield from zip(theirs["params"], ours["params"], strict=False)
