"""torch.distributed given tensors on nodes: an error that names the function of ours.

Its functions are for processes that each run the whole script with tensors of their own. Without a process group they
would say that one has to be made, which would not help here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..meshes.as_torch import world
from ..proxy.proxy import DistributedTensor
from ..session.places import MeshPlace, Place

#: The functions of ours, by the names of torch's, where these have other names.
_OURS = {
    **{name: f"dt.{name}" for name in ("all_gather", "all_reduce", "broadcast")},
    "reduce_scatter": "dt.collectives.reduce_scatter",
    "all_to_all": "dt.collectives.all_to_all",
    "all_to_all_single": "dt.collectives.all_to_all",
    "all_gather_single": "dt.collectives.all_gather_into_tensor",
    "all_reduce_coalesced": "dt.all_reduce",
    "all_gather_coalesced": "dt.all_gather",
    "reduce_scatter_single": "dt.collectives.reduce_scatter",
    "reduce_scatter_tensor": "dt.collectives.reduce_scatter",
    "broadcast_object_list": "dt.collectives.broadcast_object",
    "scatter_object_list": "dt.collectives.scatter_object",
    "send_object_list": "dt.run",
    "recv_object_list": "dt.run",
    "P2POp.__new__": "dt.collectives.P2POp",
}
#: Those that take a tensor on a mesh and the name of a dim as well.
_OVER_DIMS = ("dt.all_reduce", "dt.all_gather", "dt.broadcast", "dt.collectives.reduce_scatter")


def checking(original: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    """Returns the check of arguments that torch's functions begin with, which refuses tensors on nodes as well."""

    @wraps(original)
    def check(param: Any, param_name: str) -> None:
        found = _on_a_node(param)
        if found is not None and world.found() is None:  # the process group of a mesh says itself what it takes
            raise _refusal(found)
        original(param, param_name)

    return check


def asking(original: Callable[[], Any]) -> Callable[[], Any]:
    """Returns what gives functions the default process group; where there is none, one that has been called with a
    tensor on a node refuses that instead of asking for a group."""

    @wraps(original)
    def get_default_group() -> Any:
        try:
            return original()
        except ValueError:
            for frame in _called():
                names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
                found = _on_a_node([frame.f_locals.get(name) for name in names])
                if found is not None:
                    raise _refusal(found) from None
            raise

    return get_default_group


def _called() -> Iterator[FrameType]:
    """Yields the frames of the functions of torch.distributed that run now, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == "torch.distributed.distributed_c10d":
            yield frame
        elif module not in (__name__, "torch.distributed.c10d_logger", "typing_extensions", "warnings"):
            return
        frame = frame.f_back


def refusing_modules(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what makes a module parallel, or the ``__init__`` of such a class, which refuses a module on nodes
    first."""
    name = original.__qualname__.removesuffix(".__init__")
    ours = "dt.DataParallel" if name.endswith("DataParallel") and "Sharded" not in name else "dt.fully_shard"

    @wraps(original)
    def local_only(*args: Any, **kwargs: Any) -> Any:
        modules = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.nn.Module)]
        begun = [module for module in modules if "_parameters" in vars(module)]  # not the one that is being made
        found = _on_a_node([[*module.parameters(), *module.buffers()] for module in begun])
        # torch's own fully_shard goes along a dim of mesh.torch
        if found is not None and getattr(kwargs.get("mesh"), "device_type", "") != "node":
            raise TypeError(
                f"{name} is for processes that each run the script, and this model is on {found._place}: "
                f"{_advice(ours, found._place)} is the same for a script and its nodes{_torchs(name)}"
            )
        return original(*args, **kwargs)

    return local_only


def _torchs(name: str) -> str:
    """Returns how torch's own is called from the script."""
    return ", and fully_shard(model, mesh=mesh.torch) is torch's" if name == "fully_shard" else ""


def _advice(ours: str, place: Place) -> str:
    """Returns the call of ours for a model at this place."""
    # a model on a node has to go to a mesh first
    if not isinstance(place, MeshPlace):
        return f"{ours}(model.to(mesh), mesh), where mesh is dt.mesh(dp={len(place.session.nodes)}),"
    over = "" if "dp" in place.axes else f", over={next(iter(place.dims))!r}"
    return f"{ours}(model, mesh{over})"


def _on_a_node(value: Any) -> DistributedTensor | None:
    return next((leaf for leaf in tree_leaves(value) if isinstance(leaf, DistributedTensor)), None)


def _refusal(tensor: DistributedTensor) -> TypeError:
    """Returns the error of the function of torch.distributed that has been called."""
    called = [frame.f_code.co_qualname for frame in _called() if not frame.f_code.co_name.startswith("_get")]
    name = next((name for name in reversed(called) if not name.startswith("_")), called[-1] if called else "")
    ours, place = _OURS.get(name, f"dt.collectives.{name}"), tensor._place
    # what to write depends on whether the tensor has dims
    if not isinstance(place, MeshPlace):
        call = f"{ours} does it for tensors on nodes, from the script"
    elif ours in _OVER_DIMS:
        call = f"{ours}(x, ..., over={next(iter(place.dims))!r}) does it for a tensor on a mesh, from the script"
    else:
        call = f"{ours} does it for tensors on nodes, from the script; of one on a mesh take x.shards()"
    return TypeError(
        f"torch.distributed.{name.removesuffix('.__new__')} is for processes that each have tensors of their own, and "
        f"this tensor is on {place}: {call} (docs/MIGRATING.md)"
    )
