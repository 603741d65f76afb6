"""Numbers that ranks have each its own of, such as their coordinates, where torch's functions ask for one integer.

The script is not a rank. An int would be that of rank 0 for all, silently, so torch gets a ``torch.SymInt``, whose
node has the number of each rank: sums and products of it are such numbers again, and plain ones where all ranks agree.
What needs one number of ranks that differ (``if``, ``==`` there, an index, a range) raises RanksDiffer; hashing is
torch's TypeError. Torch's LocalIntNode will not do: with that ``s == 0`` is False and ``bool(s)`` True for all.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import FrameType
from typing import Any, NoReturn

import torch

from ...runtime.protocol.errors import DisttensorError, RanksDiffer
from ...session.places import MeshPlace

#: The attribute of an operand that has the SymInt of which torch has made it.
_OPERAND = "_disttensor_wrapped_number"
#: How many of the different numbers an error, or a number in print, shows.
_SHOWN = 3

Number = int | float | bool

_OF_A_DIM = (
    "a group of some of the ranks is that of a dim: mesh.split, or mesh.flatten, names other dims, and "
    "mesh.torch.get_group(dim) is its group"
)
_TO_ANOTHER = "dt.collectives.permute_ranks(x, over=..., by=1) sends each rank's tensor to another"
_OBJECTS = "an object of the script goes to a function on each rank as an argument: dt.run(fn, obj, node=mesh)"
#: What to write in the place of functions of torch.distributed that ask which rank they are on.
INSTEAD = {
    "send": _TO_ANOTHER,
    "recv": _TO_ANOTHER,
    "isend": _TO_ANOTHER,
    "irecv": _TO_ANOTHER,
    "batch_isend_irecv": _TO_ANOTHER,
    "gather": "torch.distributed.all_gather gives all of them what one would have",
    "scatter": "dt.shard(t, mesh, dp=0) cuts a tensor for them, and dt.meshes.from_shards takes its parts",
    "gather_object": "dt.run(fn, node=mesh) gives a list of what a function returns on each",
    "all_gather_object": "dt.run(fn, node=mesh) gives a list of what a function returns on each",
    "scatter_object_list": "dt.run(fn, dt.tasks.Each(objects), node=mesh) gives each rank its own",
    "broadcast_object_list": _OBJECTS,
    "send_object_list": _OBJECTS,
    "recv_object_list": _OBJECTS,
    "monitored_barrier": "dt.collectives.monitored_barrier is the script's",
    "new_group": _OF_A_DIM,
    "new_subgroups": _OF_A_DIM,
    "new_subgroups_by_enumeration": _OF_A_DIM,
    "split_group": _OF_A_DIM,
    "shrink_group": "dt.mesh(nodes=[...]) is made of any nodes",
    "nn.functional._Broadcast": "torch.distributed._functional_collectives.broadcast has its gradient, too",
    "nn.functional.gather": "torch.distributed.nn.functional.all_gather gives all of them what one would have",
    "nn.functional.scatter": "dt.shard(t, mesh, dp=0) cuts a tensor for them, and has a gradient",
    "optim.ZeroRedundancyOptimizer": "dt.fully_shard(model, mesh) has an optimizer's state, too, in parts",
}
#: The modules that these are in, and what the names have in front.
_MODULES = {
    "torch.distributed.distributed_c10d": "",
    "torch.distributed.nn.functional": "nn.functional.",
    "torch.distributed.optim.zero_redundancy_optimizer": "optim.",
}


def rank_number(place: MeshPlace, values: Sequence[int]) -> Any:
    """Returns the number that each rank of a mesh has, by ``values`` in the ranks' order: an int where all have one,
    else a ``torch.SymInt``."""
    if len(set(values)) == 1:
        return values[0]
    import torch.fx.experimental.sym_node  # gives SymInt its operators, and takes sympy's time

    return torch.SymInt(RankNode(place, tuple(values)))


def numbers_of(value: object) -> tuple[Number, ...] | None:
    """Returns the numbers of all ranks that a SymInt or SymBool stands for; None for anything else."""
    node = getattr(value, "node", None)
    return node.values if isinstance(node, RankNode) else None


def _called() -> str | None:
    """Returns the name of the function of torch.distributed that runs now, the outermost one, where it is in
    ``INSTEAD``."""
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("torch", "disttensor")):
        front = _MODULES.get(frame.f_globals["__name__"])
        if front is not None and (name := front + frame.f_code.co_qualname.partition(".")[0]) in INSTEAD:
            found = name
        frame = frame.f_back
    return found


def refusing_operands(original: object) -> property:
    """Returns ``torch.Tensor._wrapped_number``, which torch sets where it makes an operand of a SymInt, as in
    ``x + s``: that of ranks is refused there. On a local tensor torch would compute with 7777777 in its place.

    Torch asks for it at each operation with a number whose gradient is recorded. So what looks it up is C, not Python.
    """

    def put(self: torch.Tensor, value: object) -> None:
        if numbers_of(value) is not None:
            value.node.guard_int()  # type: ignore[attr-defined]  # raises
        setattr(self, _OPERAND, value)

    return property(operator.attrgetter(_OPERAND), put)


def choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``torch.sym_ite``, which gives of each rank the one number or the other: torch asks for nodes of its own
    class there."""

    @wraps(original)
    def sym_ite(b: Any, t: Any, f: Any) -> Any:
        true = numbers_of(b)
        if true is None:
            return original(b, t, f)
        values = [b.node.values_of(each.node) if hasattr(each, "node") else (each,) * len(true) for each in (t, f)]
        return rank_number(
            b.node.place, [one if is_true else other for is_true, one, other in zip(true, *values, strict=True)]
        )

    return sym_ite


def _each(function: Callable[..., Any]) -> Callable[..., RankNode]:
    """Returns the operation of nodes that does ``function`` with the numbers of each rank."""

    def of_each(self: RankNode, *others: Any) -> RankNode:
        return RankNode(self.place, tuple(map(function, self.values, *[self.values_of(other) for other in others])))

    return of_each


class RankNode:
    """The node of a SymInt, SymFloat or SymBool: a number of each rank. Its methods are those that torch calls."""

    __slots__ = ("place", "values")

    def __init__(self, place: MeshPlace, values: tuple[Number, ...]) -> None:
        self.place, self.values = place, values

    # ---- operations

    add, sub, mul, mod = _each(operator.add), _each(operator.sub), _each(operator.mul), _each(operator.mod)
    floordiv = int_floordiv = _each(operator.floordiv)
    truediv = int_truediv = float_truediv = _each(operator.truediv)
    pow = pow_by_natural = float_pow = _each(operator.pow)
    eq, ne, lt, le = _each(operator.eq), _each(operator.ne), _each(operator.lt), _each(operator.le)
    gt, ge = _each(operator.gt), _each(operator.ge)
    and_, or_ = _each(operator.and_), _each(operator.or_)
    bitwise_and, bitwise_or, bitwise_xor = _each(operator.and_), _each(operator.or_), _each(operator.xor)
    lshift, rshift = _each(operator.lshift), _each(operator.rshift)
    sym_min, sym_max, sym_not, sym_float = _each(min), _each(max), _each(operator.not_), _each(float)
    neg, pos, abs = _each(operator.neg), _each(operator.pos), _each(abs)
    floor, ceil, trunc = _each(math.floor), _each(math.ceil), _each(math.trunc)
    sym_and, sym_or = and_, or_

    def values_of(self, other: Any) -> tuple[Number, ...]:
        """Returns the numbers of another operand. Raises TypeError for one of another kind, DisttensorError for
        numbers of another mesh's ranks."""
        if not isinstance(other, RankNode):
            raise TypeError(f"a number of ranks and a {type(other).__name__}, which torch is tracing, have no result")
        if other.place is not self.place and not other.is_constant():
            raise DisttensorError(f"these are numbers of the ranks of two meshes: {self.place}, and {other.place}")
        return other.values

    def sym_sum(self, others: Sequence[Any]) -> RankNode:
        return RankNode(self.place, tuple(map(sum, zip(*[self.values_of(other) for other in others], strict=True))))

    def wrap_int(self, number: Number) -> RankNode:
        return RankNode(self.place, (number,) * len(self.values))

    wrap_bool = wrap_float = wrap_int

    # ---- one number, for Python

    def guard_int(self, *where: Any) -> Any:
        """Returns the number that all ranks have. Raises RanksDiffer where they have different ones."""
        if self.is_constant():
            return self.values[0]
        self._refuse()

    int_ = bool_ = guard_bool = guard_float = expect_true = expect_size = guard_size_oblivious = guard_int

    def guard_or_false(self, *where: Any) -> bool:
        """Returns whether this is true of all ranks. Torch asks so where what it does for False is right for both."""
        return all(self.values)

    statically_known_true = guard_or_false

    def guard_or_true(self, *where: Any) -> bool:
        """Returns whether this is true of some rank. Torch asks so where what it does for True is right for both."""
        return any(self.values)

    def _refuse(self) -> NoReturn:
        """Raises RanksDiffer, which says what to write in the place of torch's function that asked."""
        if (what := _called()) is not None:
            raise RanksDiffer(
                f"torch.distributed.{what} is another call on one rank than on the others, and the script calls for "
                f"all ranks of {self.place} at once: {INSTEAD[what]}"
            )
        over = next(iter(self.place.dims))
        raise RanksDiffer(
            f"this number is another one on each rank of {self.place} ({self._str()}), and the script, which is none "
            f"of them, would need one for all. mesh.coordinate({over!r}) is a tensor that has each rank's coordinate, "
            "x.at(...) a rank's part of a tensor, and dt.run(fn, node=mesh, distributed=True) runs a function as each "
            "rank. For what has nothing to do with the mesh, torch.distributed.destroy_process_group() ends the "
            "process group that mesh.torch has made"
        )

    def maybe_as_int(self) -> Number | None:
        return self.values[0] if self.is_constant() else None

    def is_constant(self) -> bool:
        return len(set(self.values)) == 1

    def has_hint(self) -> bool:
        return False

    # ---- what it is

    def is_bool(self) -> bool:
        return isinstance(self.values[0], bool)

    def is_float(self) -> bool:
        return isinstance(self.values[0], float)

    def is_int(self) -> bool:
        return not self.is_bool() and not self.is_float()

    def is_symbolic(self) -> bool:
        return False

    def is_nested_int(self) -> bool:
        return False

    def nested_int(self) -> None:
        return None

    def clone(self) -> RankNode:
        return self

    def _str(self) -> str:
        first: dict[Number, int] = {}
        for rank, value in enumerate(self.values):
            first.setdefault(value, rank)
        shown = [f"{value} at {self.place.where(rank)}" for value, rank in list(first.items())[:_SHOWN]]
        return f"{'; '.join(shown)}{'; ...' if len(first) > _SHOWN else ''}"

    def __repr__(self) -> str:
        return f"<{self._str()}>"

    __str__ = _graph_repr = __repr__

    def __reduce__(self) -> NoReturn:
        raise TypeError("a number of ranks can't be pickled, as it is of its session's mesh")

    def __copy__(self) -> RankNode:
        return self

    def __deepcopy__(self, memo: object) -> RankNode:
        return self
