"""Plans for tensor parallel models: which layers are cut along a dim of a mesh, by the names of modules."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from ..errors.argument_checks import needing
from ..meshes import Mesh
from ..meshes.mesh import all_dims_of, along
from ..runtime.process.spelling import shown
from .embedding import ParallelEmbedding
from .linear import ColumnParallelLinear, RowParallelLinear
from .sharded import Sharded


class _Cutting(NamedTuple):
    """How a layer is cut."""

    by_outputs: bool  #: by its outputs' features, as a column parallel layer; else by its inputs', or its vocabulary
    whole: bool  #: whether all ranks get all outputs, or inputs, on the side that is cut


_COLUMN, _ROW = _Cutting(True, False), _Cutting(False, False)
#: By our names, and by those of the transformers library's plans (``model.tp_plan``).
_NAMED = {
    "column": _COLUMN, "colwise": _COLUMN,
    "row": _ROW, "rowwise": _ROW,
    "colwise_gather_output": _Cutting(True, True), "colwise_rep": _Cutting(True, True),
    "rowwise_split_input": _Cutting(False, True), "rowwise_rep": _Cutting(False, True),
    "embedding_rowwise": _Cutting(False, True),
}  # fmt: skip
#: How many characters of the modules' names an error shows.
_SHOWN = 200
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


@needing("dt.nn.parallelize(model, mesh, {'layers.*.up': 'column', 'layers.*.down': 'row'})", "module", "mesh", "plan")
def parallelize(module: nn.Module, mesh: Mesh, plan: Any, over: str | None = None) -> nn.Module:
    """Replaces layers of a model by tensor parallel ones, as a plan says, and moves the others to the mesh.

    The layers are those of ``dt.nn``, whose operations cost what those of other tensors on a mesh do, and which take
    sizes that the ranks do not divide. ``parallelize_module(model, mesh.torch["tp"], plan)`` makes DTensors of the same
    plan. (The function is torch's ``parallelize_module``.)

        >>> model = nn.Sequential(nn.Linear(8, 21), nn.GELU(), nn.Linear(21, 8))
        >>> dt.nn.parallelize(model, dt.mesh(tp=2), {"0": "column", "2": "row"})
        Sequential(
          (0): ColumnParallelLinear(in_features=8, out_features=21 over tp=2, bias=True, gather_output=False)
          (1): GELU(approximate='none')
          (2): RowParallelLinear(in_features=21 over tp=2, out_features=8, bias=True, input_is_parallel=True)
        )

    Args:
        module: a model, local or on the mesh, with an nn.Linear or nn.Embedding wherever the plan cuts. It is changed.
        mesh: the mesh that the parameters are on.
        plan: styles by the names of modules, in which ``*`` stands for any one part; or one style, for the module
            itself. A style is one of torch's ``ColwiseParallel`` and ``RowwiseParallel``, with the layouts
            ``Replicate()`` and ``Shard(-1)``; "column" or "row", as torch's two without arguments; or one of the
            transformers library's names of such: "colwise", "rowwise", "colwise_gather_output" and the like.
        over: the name of the dim along which layers are cut; along others each rank has the same. Default: that of
            ``mesh["tp"]``, the only one of a mesh, or "tp".

    Returns the module, or the layer that takes its place. Nothing waits. Nothing is changed where it raises: TypeError
    for another style, and for a layer of another kind; ValueError for a name that no module has, for two styles of one
    layer, for a layer with hooks, and for a weight that layers share which are not cut alike.
    """
    over, mesh = along(mesh, over, "tp"), all_dims_of(mesh)
    cut = _matched(module, plan)
    for name, cutting in cut.items():
        _check_layer(name, module.get_submodule(name), cutting)
    shared = _shared(module, cut)
    if "" in cut:
        return _parallel(module, cut[""], mesh, over)
    made = {name: _parallel(module.get_submodule(name), cutting, mesh, over) for name, cutting in cut.items()}
    for first, *others in shared:
        for other in others:
            made[other].weight = made[first].weight
    for name, layer in made.items():
        module.set_submodule(name, layer)
    return module.to(mesh.device)


def _matched(module: nn.Module, plan: Any) -> dict[str, _Cutting]:
    """Returns how each layer is cut that a plan names."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"dt.nn.parallelize takes a module, not {shown(module)}")
    found: dict[str, _Cutting] = {}
    names = [name for name, _ in module.named_modules()]
    for pattern, style in plan.items() if isinstance(plan, Mapping) else (("", plan),):
        cutting = _cutting(pattern, style)
        matches = [name for name in names if _matches(name, pattern)]
        if not matches:
            known = ", ".join(repr(name) for name in names if name)
            raise ValueError(f"dt.nn.parallelize: no module is named {pattern!r}; there are {known[:_SHOWN]}")
        for name in matches:
            if found.setdefault(name, cutting) != cutting:
                raise ValueError(f"dt.nn.parallelize: the plan has two styles for {name!r}, the second by {pattern!r}")
    return found


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _cutting(name: str, style: object) -> _Cutting:
    """Returns how a layer is cut by a style. Raises TypeError for another one."""
    cutting = _NAMED.get(style) if isinstance(style, str) else _cutting_of_torchs(style)
    if cutting is None:
        raise TypeError(
            f"dt.nn.parallelize: {name!r} has {shown(style)}; a style is one of {', '.join(map(repr, _NAMED))}, or "
            "torch's ColwiseParallel and RowwiseParallel with the layouts Replicate() and Shard(-1). For others: "
            "torch.distributed.tensor.parallel.parallelize_module(model, mesh.torch['tp'], plan)"
        )
    return cutting


def _cutting_of_torchs(style: object) -> _Cutting | None:
    """Returns how a layer is cut by a style of torch's; None for one that is not a cut of these layers."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    whole, part = (Replicate(),), (Shard(-1),)
    if type(style) not in (ColwiseParallel, RowwiseParallel) or not style.use_local_output:  # type: ignore[attr-defined]
        return None
    by_outputs = type(style) is ColwiseParallel
    ends = style.input_layouts, style.output_layouts  # type: ignore[attr-defined]
    beside, cut = ends if by_outputs else reversed(ends)
    return _Cutting(by_outputs, cut == whole) if beside == whole and cut in (whole, part) else None


def _check_layer(name: str, layer: nn.Module, cutting: _Cutting) -> None:
    """Raises TypeError for a layer that can't be cut so, ValueError for one with hooks."""
    kinds = (nn.Linear,) if cutting.by_outputs else (nn.Linear, nn.Embedding)
    if type(layer) not in kinds:  # subclasses compute more, or otherwise
        raise TypeError(
            f"dt.nn.parallelize: {name!r} is of {type(layer).__name__}, and layers of "
            f"{' and '.join('nn.' + kind.__name__ for kind in kinds)} are cut so"
        )
    if any(getattr(layer, hooks) for hooks in _HOOKS):
        raise ValueError(
            f"dt.nn.parallelize: {name!r} has hooks, which its parallel layer would not have; register them afterwards"
        )


def _shared(module: nn.Module, cut: Mapping[str, _Cutting]) -> list[list[str]]:
    """Returns the layers that are cut and share a weight. Raises ValueError where they would not be cut alike."""
    holders: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    found = []
    for names in holders.values():
        layers = [name.rpartition(".")[0] for name in names]
        if len(names) > 1 and any(layer in cut for layer in layers):
            ways = {_dim(module.get_submodule(layer), cut.get(layer)) for layer in layers}
            if len(ways) > 1 or any(not name.endswith("weight") for name in names):
                raise ValueError(
                    f"dt.nn.parallelize: {' and '.join(map(repr, names))} are one parameter, and the plan does not cut "
                    "them alike: a table by its vocabulary ('row') and a linear layer by its outputs ('column') are"
                )
            found.append(layers)
    return found


def _dim(layer: nn.Module, cutting: _Cutting | None) -> int | None:
    """Returns the dimension in which a layer's weight is cut."""
    if cutting is None:
        return None
    return 0 if cutting.by_outputs or isinstance(layer, nn.Embedding) else 1


def _parallel(layer: Any, cutting: _Cutting, mesh: Mesh, over: str) -> Sharded:
    """Returns the parallel layer with the values of a plain one."""
    if isinstance(layer, nn.Embedding):
        return ParallelEmbedding.from_plain(layer, mesh, over)
    if cutting.by_outputs:
        return ColumnParallelLinear.from_plain(layer, mesh, over, gather_output=cutting.whole)
    return RowParallelLinear.from_plain(layer, mesh, over, input_is_parallel=not cutting.whole)
