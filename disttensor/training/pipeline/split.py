"""Stages of a module that has none: torch.export traces it, and the graph is cut where it says so.

The marks are those of torch.distributed.pipelining: a SplitPoint before or after a submodule, or ``pipe_split()`` in
the module's own forward. torch's ``pipeline()`` makes modules of the parts that send past each other what a later stage
needs; here what a later stage needs goes through the stages between, so that each stage has one neighbour.

A trace is of one mode, and one size: dropout is in it or not, and ``x.shape[0]`` is a number. So there is one for
training and one for evaluation, and other sizes are refused.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.utils._pytree import TreeSpec, tree_flatten

from ...proxy.proxy import where_is
from ...runtime.process.spelling import did_you_mean, shown

#: The shape and dtype of a tensor of the example; None for what is no tensor.
Size = tuple[tuple[int, ...], torch.dtype] | None


@dataclass
class Trace:
    """A module in stages, in one mode."""

    graphs: list[fx.GraphModule]  #: each takes and returns a flat list of values, the last one's output is a tree's
    output: TreeSpec  #: that tree
    sizes: list[Size]  #: those of the leaves of what the first one takes


def traces(module: nn.Module, split_spec: Any, example: Any) -> dict[bool, Trace]:
    """Returns a module in stages, for training and for evaluation. Its parameters are those of the stages.

    Raises TypeError for what is no module, no dict of SplitPoints, or without an example; ValueError for an unknown
    name, or a parameter that is not local; RuntimeError for what torch.export can't trace.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"Pipeline: split_spec cuts a module, not {type(module).__name__}")
    if example is None:
        raise TypeError(
            "Pipeline: split_spec needs example=..., a micro-batch (a tensor, or a tuple of what the module's forward "
            "takes), with which the module is traced"
        )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if (place := where_is(tensor)) is not None:
            raise ValueError(f"Pipeline: {name!r} is on {place}; a module is traced where it is local")
    args = example if isinstance(example, tuple) else (example,)
    modes = {each: each.training for each in module.modules()}
    found = {}
    try:
        with _marked(module, split_spec or {}):
            for training in (True, False):
                if training is not module.training:
                    module.train(training)
                found[training] = _trace(module, args)
                for each, mode in modes.items():
                    each.training = mode
    finally:
        for each, mode in modes.items():
            each.training = mode
    return found


@contextmanager
def _marked(module: nn.Module, split_spec: Any) -> Iterator[None]:
    """Has a module call ``pipe_split`` where it is to be cut."""
    from torch.distributed.pipelining import SplitPoint, pipe_split  # takes a third of a second

    if not isinstance(split_spec, Mapping):
        raise TypeError(
            f"Pipeline: split_spec is a dict such as {{'layers.2': SplitPoint.BEGINNING}}, not {shown(split_spec)}"
        )
    known = [name for name, _ in module.named_modules() if name]
    hooks = []
    try:
        for name, point in split_spec.items():
            if name not in known:
                raise ValueError(
                    f"Pipeline: split_spec names {name!r}, which is no submodule of {type(module).__name__}"
                    f"{did_you_mean(name, known)}"
                )
            if not isinstance(point, SplitPoint):
                raise TypeError(
                    f"Pipeline: split_spec[{name!r}] is {point!r}, and has to be a torch.distributed.pipelining."
                    "SplitPoint"
                )
            cut: Any = lambda *_: pipe_split()  # noqa: E731
            submodule = module.get_submodule(name)
            if point is SplitPoint.BEGINNING:
                hooks.append(submodule.register_forward_pre_hook(cut, prepend=True))
            else:
                hooks.append(submodule.register_forward_hook(cut))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _trace(module: nn.Module, args: tuple[Any, ...]) -> Trace:
    try:
        program = torch.export.export(module, args)
    except Exception as e:
        raise RuntimeError(
            f"Pipeline: torch.export can't trace {type(module).__name__} ({type(e).__name__}: "
            f"{str(e).strip().splitlines()[0]}); a list of modules needs no trace"
        ) from e
    whole: Any = program.module(check_guards=False)
    return Trace(_parts(whole), program.call_spec.out_spec, sizes_of(tree_flatten(args)[0]))


def sizes_of(leaves: Sequence[Any]) -> list[Size]:
    """Returns the sizes of what a first stage takes."""
    return [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]


def in_words(sizes: Sequence[Size]) -> str:
    """Returns sizes for a message."""
    return ", ".join("no tensor" if size is None else f"{size[0]} {size[1]}" for size in sizes)


def _is_split(node: fx.Node) -> bool:
    return node.op == "call_function" and "_pipe_split" in str(node.target)


def _parts(whole: fx.GraphModule) -> list[fx.GraphModule]:
    """Returns a graph in parts, cut at its marks. One takes what parts before have made, and it or a later one uses."""
    part: dict[fx.Node, int] = {}  #: of each node that computes something
    at, empty = 0, True
    for node in whole.graph.nodes:
        if _is_split(node):
            at, empty = at + (not empty), True
        elif node.op not in ("placeholder", "get_attr", "output") and not _is_check(node):
            part[node] = at
            empty = empty and node.target is operator.getitem
    if empty and at:  # a mark behind the last layer
        at -= 1
        part = {node: min(p, at) for node, p in part.items()}
    last = at
    inputs = [node for node in whole.graph.nodes if node.op == "placeholder"]
    (end,) = [node for node in whole.graph.nodes if node.op == "output"]
    made = [*inputs, *part]  # in order

    def until(node: fx.Node) -> int:
        """Returns the last part that uses a value."""
        return max((last if user is end else part.get(user, -1) for user in node.users), default=-1)

    graphs = []
    for p in range(last + 1):
        takes = inputs if p == 0 else [n for n in made if part.get(n, -1) < p <= until(n)]
        gives = [n for n in made if part.get(n, -1) <= p < until(n)]
        graphs.append(_part(whole, [n for n in part if part[n] == p], takes, gives, end if p == last else None))
    return graphs


def _part(
    whole: fx.GraphModule, nodes: list[fx.Node], takes: list[fx.Node], gives: list[fx.Node], end: fx.Node | None
) -> fx.GraphModule:
    graph = fx.Graph()
    here: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in takes}

    def value(node: fx.Node) -> fx.Node:
        if node not in here:
            if node.op != "get_attr":
                raise RuntimeError(f"Pipeline: torch.export's program uses {node.name} in a stage that does not get it")
            here[node] = graph.node_copy(node)
        return here[node]

    for node in nodes:
        for used in node.all_input_nodes:
            value(used)
        here[node] = graph.node_copy(node, value)
    graph.output(tuple(map(value, gives)) if end is None else fx.node.map_arg(end.args[0], value))
    return fx.GraphModule(whole, graph)


def _is_check(node: fx.Node) -> bool:
    """Returns whether a node only looks whether a tensor is where it was in the trace."""
    return node.target is torch.ops.aten._assert_tensor_metadata.default


def make_on_device(graph: fx.GraphModule, device: torch.device) -> None:
    """Has a part make its tensors on a device, where they were made locally in the trace."""
    for node in graph.graph.nodes:
        moved: Any = lambda x: device if isinstance(x, torch.device) else x  # noqa: E731
        node.args, node.kwargs = map_aggregate(node.args, moved), map_aggregate(node.kwargs, moved)
    graph.recompile()
