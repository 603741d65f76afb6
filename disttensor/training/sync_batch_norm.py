"""torch.nn.SyncBatchNorm on a mesh: the statistics of a batch are those of all ranks.

Torch's layer asks torch.distributed for a process group, and without one it is BatchNorm. The script has none, so each
rank would normalize by its own rows, and nobody would say so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from ..collectives import all_gather
from ..collectives.over_dims import Over, groups
from ..meshes.as_torch import world
from ..meshes.as_torch.process_group import MeshGroup
from ..proxy.proxy import where_is
from ..runtime.process.spelling import shown
from ..session.places import MeshPlace


def synchronizing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the layer's forward pass, which on a mesh takes the statistics of a batch over all ranks; or over those
    along dims, where the layer's ``process_group`` is the name of a dim or several, or torch's group of one.

    It raises TypeError for another ``process_group``, ValueError for an unknown dim.
    """

    @wraps(original)
    def forward(self: torch.nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
        place = where_is(input)
        if place is None and world.found() is not None:  # torch would look for the mesh's other ranks
            return BatchNorm.forward(self, input)
        # a node's batch is the whole batch
        if not (self.training and isinstance(place, MeshPlace) and input.numel()):
            return original(self, input)  # type: ignore[no-any-return]
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        over = _over(self.process_group, place)
        if len(groups(place, over, "SyncBatchNorm")[0]) == 1:
            return original(self, input)  # type: ignore[no-any-return]
        return _normalized(self, input, over)

    return forward


def _over(group: Any, place: MeshPlace) -> Over:
    if group is None:
        return tuple(place.dims)
    if isinstance(group, MeshGroup) and group.place is place.origin and group.over:
        return group.over
    if isinstance(group, str) or (
        isinstance(group, (tuple, list)) and group and all(isinstance(name, str) for name in group)
    ):
        return group
    raise TypeError(
        f"SyncBatchNorm on {place}: process_group is the name of a dim of the mesh, or several, along which the ranks "
        f"have the statistics of a batch together ({', '.join(place.dims)}), mesh.torch.get_group(dim), or None for "
        f"all ranks; it is {shown(group)}"
    )


def _normalized(layer: torch.nn.SyncBatchNorm, x: Any, over: Over) -> torch.Tensor:
    channels = x.shape[1]
    half = x.dtype in (torch.float16, torch.bfloat16)
    values: torch.Tensor = x.float() if half else x
    var, mean = torch.var_mean(values, [d for d in range(x.dim()) if d != 1], correction=0)
    # ranks of a mesh have one shape, so that each counts as much as another
    ranks: Any = all_gather(torch.stack((mean, var)).unsqueeze(0), over=over)
    means, variances = ranks.unbind(1)
    mean = means.mean(0)
    var = variances.mean(0) + (means - mean).square().mean(0)
    _track(layer, mean.detach(), var.detach(), len(means) * (x.numel() // channels))
    wide = (1, channels, *(1 for _ in range(x.dim() - 2)))
    scale = torch.rsqrt(var + layer.eps)
    if layer.weight is not None:
        scale = scale * layer.weight
    # the mean is taken off first: a large one would take the last digits of the products
    out = (values - mean.view(wide)) * scale.view(wide)
    if layer.bias is not None:
        out = out + layer.bias.view(wide)
    return out.to(x.dtype)  # type: ignore[no-any-return]


@torch.no_grad()
def _track(layer: torch.nn.SyncBatchNorm, mean: torch.Tensor, var: torch.Tensor, count: int) -> None:
    """Adds a batch of ``count`` values for each channel to the running statistics, as torch does."""
    if not layer.track_running_stats:
        return
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    factor: Any = layer.momentum
    if factor is None:  # the mean of all batches; a number would have to be waited for
        factor = (1.0 / layer.num_batches_tracked.double()).to(mean.dtype)
    for running, new in ((layer.running_mean, mean), (layer.running_var, var * (count / (count - 1)))):
        if running is not None:
            running.mul_(1 - factor).add_((new * factor).to(running.dtype))
