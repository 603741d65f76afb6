"""The ``repr`` of a proxy: torch's own text, for which only the elements that it shows are fetched."""

from __future__ import annotations

import torch
from torch import _tensor_str

from ..runtime.protocol.errors import DisttensorError, RanksDiffer
from ..session.places import MeshPlace

#: The most ranks of a mesh whose values are shown.
_SHOWN = 3


def text(tensor: torch.Tensor) -> str:
    """Returns the text of a proxy. Never raises: where the elements can't be fetched, the text says why."""
    suffixes = [f"device={device_of(tensor)}"]
    try:
        contents, named = _contents(tensor)
        if not named:
            suffixes.append(f"size={tuple(tensor.shape)}")
    except RanksDiffer:
        return _shards(tensor)
    except Exception as e:
        contents = "..."
        what = (
            str(e).splitlines()[0]
            if isinstance(e, DisttensorError)
            else f"{type(e).__name__}: {str(e).splitlines()[0]}"
        )
        suffixes += [f"size={tuple(tensor.shape)}", f"<{what}>"]
    default = torch.get_default_dtype()
    usual = (default, default.to_complex(), torch.int64, torch.bool)
    if tensor.dtype not in usual[: 1 if tensor.numel() == 0 else None]:
        suffixes.append(f"dtype={tensor.dtype}")
    if tensor.grad_fn is not None:
        suffixes.append(f"grad_fn=<{type(tensor.grad_fn).__name__}>")
    elif tensor.requires_grad:
        suffixes.append("requires_grad=True")
    name = "Parameter containing:\n" if isinstance(tensor, torch.nn.Parameter) else ""
    return name + str(_tensor_str._add_suffixes(f"tensor({contents}", suffixes, 7, False))


def device_of(tensor: torch.Tensor) -> str:
    """Returns a proxy's device as a text shows it: a mesh by its dims, as torch's index of it means nothing to a
    reader."""
    place = tensor._place  # type: ignore[attr-defined]
    # torch's index of a mesh says nothing to a reader
    if not isinstance(place, MeshPlace):
        return repr(str(tensor.device))
    return f"mesh({', '.join(f'{name}={size}' for name, size in place.dims.items())})"


def _shards(tensor: torch.Tensor) -> str:
    """Returns the shards of a mesh's tensor, one below the other; of many the first ones."""
    place = tensor._h.meta.place  # type: ignore[attr-defined]
    shown = tensor.shards()[:_SHOWN]  # type: ignore[attr-defined]
    lines = [f"{place.where(i)}: {text(shard.detach())}" for i, shard in enumerate(shown)]
    more = ["..."] if len(place.members) > _SHOWN else []
    return "\n".join([f"on {place}:", *lines, *more])


def _contents(tensor: torch.Tensor) -> tuple[str, bool]:
    """Returns the numbers as text, and whether they show the shape."""
    if tensor.numel() == 0:
        return "[]", tensor.dim() == 1
    options = _tensor_str.PRINT_OPTS
    with torch.no_grad():
        if tensor.numel() <= options.threshold:
            local = tensor.detach().cpu()
            return _tensor_str._tensor_str(local, 7), True
        edge = options.edgeitems
        local = _edges(tensor.detach(), edge + 1).cpu()
        shown = _edges(local, edge)
        if local.is_complex():
            real, imag = (_tensor_str._Formatter(part) for part in (shown.real, shown.imag))
            return _tensor_str._tensor_str_with_formatter(local, 7, True, real, imag), True
        return _tensor_str._tensor_str_with_formatter(local, 7, True, _tensor_str._Formatter(shown)), True


def _edges(tensor: torch.Tensor, edge: int) -> torch.Tensor:
    """Returns the first and last ``edge`` entries along each dimension."""
    for d in range(tensor.dim()):
        n = tensor.shape[d]
        if n > 2 * edge:
            tensor = torch.cat([tensor.narrow(d, 0, edge), tensor.narrow(d, n - edge, edge)], d)
    return tensor
