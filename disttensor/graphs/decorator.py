"""``@dt.graphed``: records a function of tensors by itself, at its second call, and replays it from then on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch

from ..proxy.proxy import DistributedTensor
from ..runtime.master.route import route
from ..runtime.protocol.errors import GraphError
from ..session import current
from ..session.places import current_node, varied
from . import first_replay
from .leaves import Spec, flatten, unflatten
from .recorded import Recorded, record
from .traced_numbers import Changed, Number, Tape

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class _Entry:
    """The recording for one signature."""

    kept: list[Any]  #: the arguments that count by identity, kept alive so that no other object gets their ids
    recorded: Recorded | None = None
    numbers: list[float] = field(default_factory=list)  #: the floats of this call
    spec: Spec | None = None  #: of the results


class Graphed(Generic[P, R]):
    """A function that replays itself, returned by ``graphed``. ``clear()`` drops its recordings."""

    def __init__(self, function: Callable[P, R], engine: str, verify: bool, limit: int) -> None:
        update_wrapper(self, function)
        self._function = function
        self._engine = engine
        self._verify = verify
        self._limit = limit
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def clear(self) -> None:
        self._entries.clear()

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else lambda *args, **kwargs: self(owner, *args, **kwargs)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if route.get().recorder is not None:  # part of a larger recording
            return self._function(*args, **kwargs)
        leaves, spec = flatten((args, kwargs))
        key, kept = _signature(leaves, spec)
        entry = self._entries.get(key)
        if entry is None:  # the first call is what CUDA graphs call warming up
            while len(self._entries) >= self._limit:
                self._entries.popitem(last=False)
            self._entries[key] = _Entry(kept)
            return self._function(*args, **kwargs)
        self._entries.move_to_end(key)
        entry.numbers[:] = [leaf for leaf in leaves if type(leaf) is float]
        if entry.recorded is None:
            self._record(entry, leaves, spec)
            if self._verify:
                eager = lambda: self._function(*args, **kwargs)  # noqa: E731
                return first_replay.verified(  # type: ignore[no-any-return]
                    lambda: self._play(entry, leaves, False), eager, *self._recorded(entry, leaves)
                )
        try:
            return self._play(entry, leaves)  # type: ignore[no-any-return]
        except Changed:  # a branch on a number goes the other way now
            entry.recorded = None
            self._record(entry, leaves, spec)
            return self._play(entry, leaves)  # type: ignore[no-any-return]

    def _record(self, entry: _Entry, leaves: list[Any], spec: Spec) -> None:
        tensors = [i for i, leaf in enumerate(leaves) if _is_input(leaf)]
        floats = [i for i, leaf in enumerate(leaves) if type(leaf) is float]
        specs: list[Spec] = []
        now = entry.numbers  # not the entry, which has the graph: a circle

        def traced(stands: list[Any], tape: Tape) -> list[Any]:
            for k, i in enumerate(floats):
                stands[i] = tape.root(leaves[i], lambda k=k: now[k])  # type: ignore[misc]
            numbers = [stands[i] for i in floats]
            args, kwargs = unflatten(stands, spec)
            results, of_results = flatten(self._function(*args, **kwargs), graded=True)
            specs.append(of_results)
            if any(isinstance(leaf, Number) for leaf in results):
                raise GraphError(
                    f"{self._function.__qualname__} returns a number that depends on its arguments; return a tensor"
                )
            lost = [k for k, number in enumerate(numbers) if not tape.reached(number)]
            if lost:
                raise GraphError(
                    f"{self._function.__qualname__}: float argument {lost[0]} reached no operation as it is; a replay "
                    "could not change it (math.sqrt and others make ordinary numbers); pass an int or a tensor"
                )
            return results

        entry.recorded = record(traced, leaves, tensors, self._engine)
        (entry.spec,) = specs

    def _play(self, entry: _Entry, leaves: list[Any], advance: bool = True) -> Any:
        assert entry.recorded is not None
        assert entry.spec is not None
        return unflatten(entry.recorded.play(leaves, advance), entry.spec)

    def _recorded(self, entry: _Entry, leaves: list[Any]) -> tuple[Any, dict[int, int]]:
        """Returns the recorder, and for each stand-in's ref the ref of this call's argument."""
        assert entry.recorded is not None
        recorder = entry.recorded.graph.recorded
        return recorder, dict(zip(recorder.inputs, entry.recorded.refs(leaves), strict=True))


def _is_input(leaf: Any) -> bool:
    return isinstance(leaf, DistributedTensor) and not leaf.requires_grad


def _signature(leaves: list[Any], spec: Spec) -> tuple[Hashable, list[Any]]:
    """Returns the key of the recording that a call can replay, and the objects that the key names by identity."""
    key: list[Hashable] = [spec, id(current.session()), _modes()]
    kept: list[Any] = [current.session()]
    seen: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        if _is_input(leaf):
            key.append((leaf._h.meta, seen.setdefault(id(leaf._h), i)))
        elif isinstance(leaf, torch.Tensor) and leaf.device.type != "node":
            raise GraphError(
                f"argument {i} of a graphed function is a tensor of the master's {tuple(leaf.shape)}, which would be "
                "recorded with the values that it has now; send it to a node before (x.to('node:0'))"
            )
        elif isinstance(leaf, torch.Tensor) and not leaf.is_leaf:
            raise GraphError(
                f"argument {i} of a graphed function was computed from tensors that require a gradient, and replays "
                "are outside of autograd; compute it inside, or give x.detach()"
            )
        elif type(leaf) is float:
            key.append(float)
        elif leaf is None or type(leaf) in (int, bool, str, torch.dtype, torch.device):
            key.append((type(leaf), leaf))
        else:
            key.append((type(leaf), id(leaf), getattr(leaf, "training", None)))
            kept.append(leaf)
    return tuple(key), kept


def _modes() -> Hashable:
    """Returns the part of torch's state that changes the meaning of operations."""
    casts = torch.get_autocast_dtype("node") if torch.is_autocast_enabled("node") else None
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return *modes, casts, torch.get_default_dtype(), current_node.get(), varied.get()


@overload
def graphed(function: Callable[P, R]) -> Graphed[P, R]: ...
@overload
def graphed(
    *, engine: str = "interpreter", verify: bool = False, limit: int = 16
) -> Callable[[Callable[P, R]], Graphed[P, R]]: ...
def graphed(function: Any = None, *, engine: str = "interpreter", verify: bool = False, limit: int = 16) -> Any:
    """Makes a function of tensors replay itself: ``@dt.graphed`` or ``@dt.graphed(verify=True)``.

        >>> @dt.graphed
        ... def scaled(x, factor):
        ...     return (x * factor).sum()
        >>> x = torch.ones(3, device="node:0")
        >>> [scaled(x, factor).item() for factor in (1.0, 2.0, 3.0)]    # in eager, recorded and replayed, replayed
        [3.0, 6.0, 9.0]

    Args:
        function: a function of tensors on nodes, at any depth of its arguments, and other values.
        engine: what replays its graphs on the nodes, as for ``graph``.
        verify: compare the first replay of each recording with the function itself, which runs once more from the same
            tensors and the same generators, and raise GraphError with a list of the differences.
        limit: the number of recordings that are kept, the latest used ones.

    The first call with a signature runs the function as it is, the second records it into a graph, and that and all
    later calls replay it with one small command per node, and return at once. A signature is the metadata (shape,
    strides, dtype, place) of the tensors among the arguments, the values of integers, texts and the like, the identity
    of everything else, parameters included (for modules also whether they are training), the current node, and torch's
    modes (gradients, casts); a change of shapes records again. Floats are declared numbers: they may change from call
    to call. Results are new tensors at each call, outside of autograd.

    Raises GraphError for operations that can't be recorded (see ``graph``), local tensors among the arguments, tensors
    that were computed from ones that require a gradient, and a float that no operation got as it is.
    """

    def wrap(function: Callable[P, R]) -> Graphed[P, R]:
        return Graphed(function, engine, verify, limit)

    return wrap if function is None else wrap(function)
