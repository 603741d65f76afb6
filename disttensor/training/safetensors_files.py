"""Weights from safetensors files, read by the nodes themselves: each reads its own parts, and the script none."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from ..meshes import Mesh
from ..meshes.cut import Cuts, cut_of, whole_shape
from ..session.places import MeshPlace
from ..tasks import Each, run
from .named import place_of
from .sharding import reshard

Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def load_safetensors(module: nn.Module, files: Files, *, strict: bool = True) -> _IncompatibleKeys:
    """Loads a module's parameters and buffers, which are on a mesh, from safetensors files that the nodes read.

    Each node reads the parts that it has (of ``dt.fully_shard``, ``dt.nn``), and what all have as a whole. No byte of
    the weights goes through the script. Waits.

    Args:
        module: a module on a mesh, such as one that was made on the meta device, after ``to_empty``.
        files: a path, several, or a folder of which all ``*.safetensors`` are meant; as the nodes see them. The names
            in them are those of the plain module's state dict.
        strict: whether names that are missing, or of nothing in the module, are an error.

    Returns the missing and the unexpected names, as ``load_state_dict``. Raises RuntimeError for these if ``strict``,
    and for other shapes, before anything is read; TypeError for what is on no mesh; the node's own error for files that
    it does not have; ImportError where a node has no safetensors; NodeLost.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"load_safetensors takes a module, not {type(module).__name__}")
    reshard(module)
    tensors = _tensors(module)
    mesh = _mesh_of(tensors)
    paths = [os.fspath(files)] if isinstance(files, (str, os.PathLike)) else [os.fspath(path) for path in files]

    def contents() -> list[tuple[str, dict[str, list[int]]]]:
        import glob
        import os

        found = []
        for path in paths:
            inside = (
                sorted(glob.glob(os.path.join(glob.escape(path), "*.safetensors"))) if os.path.isdir(path) else [path]
            )
            if not inside:
                raise FileNotFoundError(f"load_safetensors: there is no *.safetensors in {path!r}")
            for file in inside:
                with _opened(file) as opened:
                    found.append((file, {name: opened.get_slice(name).get_shape() for name in opened.keys()}))  # noqa: SIM118
        return found

    there: list[tuple[str, dict[str, list[int]]]] = run(contents, node=mesh.nodes[0])
    result = _compared(module, tensors, {name: shape for _, names in there for name, shape in names.items()}, strict)

    def read(file: str, jobs: list[tuple[str, list[tuple[int, int]]]], *parts: torch.Tensor) -> None:
        with torch.no_grad(), _opened(file) as opened:
            for (name, bounds), part in zip(jobs, parts, strict=True):
                if not bounds:
                    part.copy_(opened.get_tensor(name))
                    continue
                sizes = [stop - start for start, stop in bounds]
                if [*part.shape] != sizes:
                    part.zero_()
                if all(sizes):
                    whole = opened.get_slice(name)[tuple(slice(start, stop) for start, stop in bounds)]
                    part[tuple(slice(size) for size in sizes)].copy_(whole)

    for file, names in there:
        wanted = [name for name in names if name in tensors]
        if wanted:
            parts = [tensors[name].detach() for name in wanted]
            jobs = [[(name, _bounds(tensors[name], rank)) for name in wanted] for rank in range(len(mesh))]
            run(read, file, Each(jobs), *parts, node=mesh)
            for name in wanted:
                torch.autograd.graph.increment_version(tensors[name])
    return result


def _opened(file: str) -> Any:
    """Opens a safetensors file, on a node."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise ImportError(
            "load_safetensors: this node has no safetensors; pip install safetensors on its host"
        ) from None
    return safe_open(file, framework="pt")


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns what the module's state dict has, by all names: parameters, or the parts of them, and buffers."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _mesh_of(tensors: dict[str, torch.Tensor]) -> Mesh:
    places: dict[MeshPlace, str] = {}
    for name, tensor in tensors.items():
        place = place_of(tensor)
        if place is None:
            if tensor.is_meta:
                raise RuntimeError(f"load_safetensors: {name!r} has no memory yet; module.to_empty(device=mesh.device)")
            raise TypeError(
                f"load_safetensors: {name!r} is on {tensor.device}, and on no mesh; at the script or on one node it is "
                "module.load_state_dict(safetensors.torch.load_file(path))"
            )
        places.setdefault(place, name)
    if len(places) != 1:
        where = " and ".join(f"{name!r} on {place}" for place, name in places.items())
        raise ValueError(f"load_safetensors takes a module on one mesh, and has {where or 'no parameter or buffer'}")
    place = next(iter(places))
    return Mesh(place, place.dims)


def _compared(
    module: nn.Module, tensors: dict[str, torch.Tensor], there: dict[str, list[int]], strict: bool
) -> _IncompatibleKeys:
    loaded = {id(tensors[name]) for name in there if name in tensors}  # a tied one by one of its names
    missing = [name for name, tensor in tensors.items() if name not in there and id(tensor) not in loaded]
    unexpected = [name for name in there if name not in tensors]
    errors = []
    if strict and missing:
        errors.append(f"missing: {', '.join(map(repr, missing))}")
    if strict and unexpected:
        errors.append(f"of nothing in the module: {', '.join(map(repr, unexpected))}")
    for name, shape in there.items():
        tensor = tensors.get(name)
        if tensor is not None and tuple(shape) != (wanted := whole_shape(tensor, cut_of(tensor))):
            errors.append(f"{name!r} has shape {tuple(shape)} in the file, {wanted} in the module")
    if errors:
        raise RuntimeError(f"load_safetensors for {type(module).__name__}:\n\t" + "\n\t".join(errors))
    return _IncompatibleKeys(missing, unexpected)


def _bounds(tensor: torch.Tensor, rank: int) -> list[tuple[int, int]]:
    """Returns where a rank's part begins and ends in each dimension of the whole tensor."""
    cuts: Cuts = cut_of(tensor)
    found = [(0, size) for size in whole_shape(tensor, cuts)]
    for cut, dim in cuts:
        start, stop = found[dim]
        begin = start + cut.share * _coordinate(cut.place.axes[cut.over], rank)
        found[dim] = min(begin, stop), min(begin + cut.share, stop)
    return found


def _coordinate(groups: Sequence[Sequence[int]], rank: int) -> int:
    return next(group.index(rank) for group in groups if rank in group)
