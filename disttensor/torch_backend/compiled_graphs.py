"""The graphs of ``torch.compile`` on nodes: each is recorded, and then played by one command per node or mesh.

    dynamo: a function's graph --AOT autograd--> a graph forward, and one backward --`CompiledGraph`--> two commands

Dynamo and AOT have checked before that a graph fits its arguments. Only metadata may differ then, as with dynamic
shapes: there is a recording for each.
"""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any
from weakref import WeakSet

import torch
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from ..dispatch.call_site import calling_compiled, is_users_file
from ..dispatch.dispatch import scalar
from ..dispatch.op_table import enter
from ..graphs.recorded import Recorded, record
from ..graphs.traced_numbers import Tape
from ..proxy.proxy import DistributedTensor
from ..runtime.master.route import route
from ..runtime.process.generated_code import function
from ..runtime.protocol.errors import GraphError
from ..session import caches, current
from ..session.places import varied

aten = torch.ops.aten

#: The recordings that a graph keeps, of the metadata that were used last.
_LIMIT = 16
_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')


def compile_for_nodes(model: GraphModule, inputs: Sequence[Any], engine: str) -> Callable[..., Any]:
    """Returns the function that runs a graph of dynamo's on its nodes, for ``torch.compile``."""
    from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.exc import TorchDynamoException

    backend = aot_autograd(
        fw_compiler=partial(_compiled_forward, engine),
        bw_compiler=partial(_compiled, engine),
        inference_compiler=partial(_compiled, engine),
        partition_fn=min_cut_rematerialization_partition,  # that of aot_eager, whose numbers these are to be
        keep_inference_input_mutations=True,
    )
    try:
        return backend(model, inputs)
    except TorchDynamoException:  # with which dynamo begins anew
        raise
    except Exception as error:
        _say_by_operator(model.graph, f"AOT autograd refuses it: {error}")
        return model.forward


def _compiled_forward(engine: str, model: GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """Compiles a graph whose results are the caller's and, after these, what its backward needs."""
    return _compiled(engine, model, inputs, TracingContext.get().fw_metadata.num_forward_returns)  # type: ignore[union-attr]


def _compiled(
    engine: str, model: GraphModule, inputs: Sequence[Any], returned: int | None = None
) -> Callable[[list[Any]], Sequence[Any]]:
    """``returned``: how many of the results are the caller's, if not all."""
    keep_linear_whole(model.graph)
    sum_at_once(model.graph)
    model.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
    model.recompile()
    compiled = CompiledGraph(model, engine, returned)

    def run(args: list[Any]) -> Sequence[Any]:
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]  # what has one argument, a list, which it may empty
    return run


class CompiledGraph:
    """A graph forward or backward. Its first call with some metadata runs operator by operator, the second is recorded,
    and it and all others are played."""

    def __init__(self, model: GraphModule, engine: str, returned: int | None) -> None:
        self._model = model
        self._engine = engine
        self._returned = returned
        self._recordings: OrderedDict[Hashable, Recorded | None] = OrderedDict()
        #: the key that was used last, and its recording
        self._last: tuple[Hashable, Recorded | None] = (None, None)
        self._by_operator = False
        #: the arguments that are tensors of the script's, 0-dim ones, and a device of the place that they are sent to
        self._local: list[int] = []
        self._device = torch.device("node")
        _graphs.add(self)
        try:
            self._local, self._device = _local_arguments(model.graph, returned)
        except GraphError as error:
            self._give_up(str(error))

    def clear(self) -> None:
        self._recordings.clear()
        self._last = (None, None)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if self._by_operator or route.get().recorder is not None:
            return self._model.forward(args)  # type: ignore[no-any-return]
        if self._local:
            self._send(args)
        metas = tuple([arg._h.meta if type(arg) is DistributedTensor else arg for arg in args])
        key = metas, varied.get(), id(current.session())
        last, recorded = self._last
        if key != last:  # mostly it is, and that is quicker than a look-up
            recorded = self._recordings.get(key)
        if recorded is None:
            if key not in self._recordings:  # the first call is what CUDA graphs call warming up
                self._recordings[key] = None
                if len(self._recordings) > _LIMIT:
                    self._recordings.popitem(last=False)
                return _run(self._model, args)
            try:
                recorded = self._recordings[key] = self._record(args)
            except GraphError as error:
                self._give_up(f"{error}{_in_parts(self._model.graph)}")
                return self._model.forward(args)  # type: ignore[no-any-return]
        if key != last:
            self._recordings.move_to_end(key)
            self._last = key, recorded
        results = recorded.play(args, line=calling_compiled)
        args.clear()
        return results

    def _send(self, args: list[Any]) -> None:
        """Has numbers of the script's travel as operands do. A forward graph gives its own to the backward as sent."""
        place = current.session().places.of(self._device).host
        for i in self._local:
            if type(args[i]) is not DistributedTensor:
                args[i] = scalar(args[i], place)

    def _record(self, args: list[Any]) -> Recorded:
        tensors = [i for i, arg in enumerate(args) if type(arg) is DistributedTensor]
        recorded = record(self._traced, args, tensors, self._engine, distinct=True)
        if any(isinstance(result, torch.Tensor) for result in recorded.results[: self._returned]):
            raise GraphError("a result is a tensor that no operation of the graph makes")
        return recorded

    def _traced(self, stands: list[Any], tape: Tape) -> list[Any]:
        return list(_run(self._model, stands))

    def _give_up(self, reason: str) -> None:
        self._by_operator = True
        self.clear()
        _say_by_operator(self._model.graph, reason)


#: All of them, by which they lose what keeps a session alive when that ends.
_graphs: WeakSet[CompiledGraph] = WeakSet()


def _forget_session() -> None:
    for graph in list(_graphs):
        graph.clear()


caches.places(_forget_session)


def _say_by_operator(graph: Graph, reason: str) -> None:
    count = sum(node.op not in ("placeholder", "output") for node in graph.nodes)
    warnings.warn(
        f"torch.compile: a graph runs on its nodes operator by operator ({count} of them), with eager's numbers and "
        f"speed, because it can't be recorded: {reason}",
        stacklevel=3,
    )


def _in_parts(graph: Graph) -> str:
    """Returns what is to be said of the operators of a graph that are a library's Python, and run part by part."""
    allow = current.session().allow
    operators = {node.target for node in graph.nodes if isinstance(node.target, OpOverload)}
    found = sorted(op.name() for op in operators if enter(op).python and not allow.added(op.name()))
    if not found:
        return ""
    spaces = sorted({f"{name.partition('::')[0]}::*" for name in found})
    return f". Nodes run {', '.join(found)} part by part; allow_ops={spaces} has them run it whole (docs/DIFFERENT.md)"


def _local_arguments(graph: Graph, returned: int | None) -> tuple[list[int], torch.device]:
    """Returns which arguments are tensors of the script's, and a device of the graph's.

    These are sent, and so is computed on nodes what is computed of them: that goes for numbers, 0-dim tensors that are
    not written, where it is plain which nodes. Raises GraphError for others, and where results are the script's.
    """
    found = list[int]()
    made = set[Node]()  #: the local tensors that are arguments, or made of these
    devices = dict.fromkeys(node.meta["val"].device for node in graph.nodes if _is_tensor(node) and not _is_local(node))
    for i, node in enumerate(graph.nodes):
        if node.op == "output":
            if any(isinstance(result, Node) and _is_local(result) for result in tree_leaves(node.args)[:returned]):
                raise GraphError("a result is a tensor of the script's")
        elif _is_local(node):
            if node.op == "placeholder":
                found.append(i)
            if node.op == "placeholder" or made & set(node.all_input_nodes):
                made.add(node)
                if not _is_tensor(node) or node.meta["val"].dim() or _writes(node):
                    raise GraphError("an argument is a tensor of the script's")
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise GraphError(f"{node.target} draws random numbers in the script")
    if found and len({current.session().places.of(device).host for device in devices}) != 1:
        raise GraphError("an argument is a tensor of the script's, and the nodes are several")
    return found, next(iter(devices), torch.device("node"))


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_local(node: Node) -> bool:
    values = tree_leaves(node.meta.get("val"))
    return any(isinstance(value, torch.Tensor) and value.device.type != "node" for value in values)


# ---- fewer operators -------------------------------------------------------------------------------------------------


def keep_linear_whole(graph: Graph) -> None:
    """Has a graph compute each ``linear``, which AOT takes apart, as one operator: the same product and sum, of a
    matrix, and less for nodes to do."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.kwargs:
            continue
        if node.target is aten.addmm.default:
            bias, input, turned = node.args
        elif node.target is aten.mm.default:
            (input, turned), bias = node.args, None
        else:
            continue
        weight = _turned(turned)
        if weight is None or (bias is not None and not _is_row(bias, weight)):
            continue
        with graph.inserting_before(node):
            whole = graph.call_function(aten.linear.default, (input, weight, bias))
        whole.meta = node.meta
        node.replace_all_uses_with(whole)
        graph.erase_node(node)
        if not turned.users:
            graph.erase_node(turned)


def _turned(node: Any) -> Node | None:
    """Returns the matrix of which this is the transpose; None where it is another operator's result."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    turns = node.target is aten.t.default or (node.target is aten.permute.default and list(node.args[1]) == [1, 0])  # type: ignore[arg-type]
    return node.args[0] if turns else None  # type: ignore[return-value]


def _is_row(bias: Any, weight: Node) -> bool:
    """Returns whether this is a vector with a number for each row of a weight."""
    shape = bias.meta["val"].shape
    return len(shape) == 1 and bool(shape[0] == weight.meta["val"].shape[0])


def sum_at_once(graph: Graph) -> None:
    """Has a graph compute each sum without the dims over which it goes, where AOT keeps these and then has a view
    without them, as of a bias' gradient: the same numbers, an operator less."""
    for view in list(graph.nodes):
        if view.op != "call_function" or view.target not in _VIEWS:
            continue
        whole = view.args[0]
        if not isinstance(whole, Node) or whole.target is not aten.sum.dim_IntList or len(whole.users) > 1:
            continue
        if list(whole.args[2:]) == [True] and _without(whole, view):
            whole.args = whole.args[:2]
            whole.meta["val"] = view.meta["val"]
            view.replace_all_uses_with(whole)
            graph.erase_node(view)


_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def _without(whole: Node, view: Node) -> bool:
    """Returns whether a view has the shape of a sum without the dims over which the sum goes."""
    kept, shape = whole.meta["val"].shape, list(view.meta["val"].shape)
    gone = {dim % max(len(kept), 1) for dim in whole.args[1] or range(len(kept))}  # type: ignore[union-attr,operator]
    left = [size for dim, size in enumerate(kept) if dim not in gone]
    return all(type(size) is int for size in (*left, *shape)) and shape == left


# ---- lines -----------------------------------------------------------------------------------------------------------


class _Lines(Interpreter):
    """Runs a graph, each operator as if the line of the user's called it that dynamo has found it at."""

    def run_node(self, n: Node) -> Any:
        self._call = _from_line(*found) if (found := _line(n)) else operator_call
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._call(target, args, kwargs)


def operator_call(target: Any, args: Any, kwargs: Any) -> Any:
    return target(*args, **kwargs)


def _run(model: GraphModule, args: list[Any]) -> Sequence[Any]:
    runner = _Lines(model)
    runner.extra_traceback = False  # which would write the compiler's name of an operator into the message of its error
    return runner.run(*args)  # type: ignore[no-any-return]


def _line(node: Node) -> tuple[str, int, str] | None:
    """Returns file, line and function of the user's innermost line that has called an operator."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return next(((file, int(n), name) for file, n, name in reversed(frames) if is_users_file(file)), None)


@cache
def _from_line(file: str, line: int, name: str) -> Callable[[Any, Any, Any], Any]:
    """Returns `operator_call` with code that lies in this line."""
    code = _written.__code__.replace(co_filename=file, co_firstlineno=line, co_name=name, co_qualname=name)
    return FunctionType(code, {})


#: The call takes two lines, so that no column of it is taken for one of the user's.
_written = function("call", "def call(target, args, kwargs): return target(\n*args, **kwargs)", {})
