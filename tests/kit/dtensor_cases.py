"""Calls of the operators that torch's DTensor has a rule for, with operands that lie on a (2, 2) mesh in each way.

What an operator is called with is what torch's own database of operators calls it with, at its samples and in their
backward passes. All is by rule: nothing is chosen for an operator. A case has plain values only, so that a program of
torchrun's does without the database.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from zlib import crc32

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

#: The mesh, and its ranks' coordinates.
SHAPE = (2, 2)
RANKS = list(itertools.product(*map(range, SHAPE)))
KINDS: tuple[Any, ...] = (Replicate(), Shard(0), Shard(1), Partial())
PAIRS = list(itertools.product(KINDS, KINDS))
#: Of the sizes in the database's samples, those that both dims of the mesh divide.
SIZES = {"XS": 2, "S": 4, "M": 8, "L": 16}
DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)
#: Of each operator of the database so many samples are called, of at most so many entries.
SAMPLES, ENTRIES = 12, 2048


@dataclasses.dataclass
class Operand:
    """A tensor of a case: each rank's part, and how the parts make the whole."""

    parts: list[torch.Tensor]
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclasses.dataclass
class Case:
    """A call of an operator: ``args`` and ``kwargs`` have operands in the places of tensors."""

    operator: str
    placements: tuple[Any, ...]  #: the first operand's
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.operator} {', '.join(map(str, self.placements))}"


@dataclasses.dataclass
class Call:
    """What an operator was called with."""

    operator: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, torch.Tensor)]

    def worth(self) -> tuple[bool, int]:
        """Whether the mesh divides all sizes, and in how many ways the first tensor can lie."""
        even = all(size == 1 or size % 2 == 0 for x in self.tensors for size in x.shape)
        return even, len({laid(self.tensors[0], pair) for pair in PAIRS})


def operators() -> dict[str, Any]:
    """Those that DTensor has a rule for, by their names; without inductor's, which are there once that is imported."""
    later = vars(sys.modules.get("torch._inductor.inductor_prims", types.SimpleNamespace())).values()
    inductors = {
        str(value) for value in later if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    }
    rules = DTensor._op_dispatcher.sharding_propagator
    tables = (rules.op_strategy_funcs, rules.op_to_rules, getattr(rules, "op_single_dim_strategy_funcs", {}))
    found = sorted({op for table in tables for op in table}, key=str)
    return {str(op): op for op in found if str(op) not in inductors}


def operator(name: str) -> Any:
    library, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, library), packet), overload)


# ---- what operators are called with


class Calls(TorchDispatchMode):
    """Keeps of each operator the first call that is worth the most."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        super().__init__()
        self.wanted, self.found = wanted, dict[str, Call]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name in self.wanted:
            before = self.found.get(name)
            if before is None or before.worth() < (True, len(PAIRS)):
                call = Call(name, *tree_map(_copy, (args, kwargs or {})))
                if _plain(call) and (before is None or call.worth() > before.worth()):
                    self.found[name] = call
        return func(*args, **(kwargs or {}))


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel() <= ENTRIES:
        return value.detach().clone(memory_format=torch.contiguous_format)
    return value


_VALUES = (
    torch.Tensor, int, float, complex, str, torch.dtype, torch.device, torch.memory_format, torch.layout,
)  # fmt: skip


def _plain(call: Call) -> bool:
    """Whether it has tensors, all of them small ones of this process, and nothing that a file can't have."""
    leaves = tree_leaves((call.args, call.kwargs))
    tensors = call.tensors
    return (
        bool(tensors)
        and all(type(x) is torch.Tensor and x.layout is torch.strided and x.device.type == "cpu" for x in tensors)
        and all(0 < x.numel() <= ENTRIES for x in tensors)
        and not any(x.is_conj() or x.is_neg() for x in tensors)
        and all(x is None or isinstance(x, _VALUES) for x in leaves)
    )


@contextlib.contextmanager
def even_sizes() -> Iterator[None]:
    """The database's samples have sizes that the mesh divides."""
    before = []
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal"):
            for size, value in SIZES.items():
                if isinstance(vars(module).get(size), int):
                    before.append((module, size, vars(module)[size]))
                    vars(module)[size] = value
    try:
        yield
    finally:
        for module, size, value in before:
            vars(module)[size] = value


def calls(entries: Iterable[Any], wanted: dict[str, Any]) -> dict[str, Call]:
    """What the samples of entries of the database call, in forward and backward passes."""
    mode = Calls(wanted)
    with even_sizes():
        for entry in entries:
            dtype = next((dtype for dtype in DTYPES if dtype in entry.supported_dtypes("cpu")), None)
            if dtype is None:
                continue
            grad = entry.supports_autograd and dtype in entry.supported_backward_dtypes("cpu")
            torch.manual_seed(crc32(entry.name.encode()))
            for sample in itertools.islice(_samples(entry, dtype, grad), SAMPLES):
                with mode, contextlib.suppress(Exception):  # what was called before a sample's own trouble, counts
                    _call(entry, sample)
    return mode.found


def _samples(entry: Any, dtype: torch.dtype, grad: bool) -> Iterator[Any]:
    with contextlib.suppress(Exception):  # of sizes that a sample was not written for
        yield from entry.sample_inputs("cpu", dtype, requires_grad=grad)


def _call(entry: Any, sample: Any) -> None:
    """Runs a sample forward and backward."""
    leaves = [x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
    outs = tree_leaves(entry.op(sample.input, *sample.args, **sample.kwargs))
    outs = [x for x in outs if isinstance(x, torch.Tensor) and x.requires_grad]
    leaves = [x for x in leaves if x.requires_grad]
    if outs and leaves:
        torch.autograd.grad(outs, leaves, [torch.ones_like(x) for x in outs], allow_unused=True)


# ---- what the database calls otherwise only


def more_calls(found: dict[str, Call], wanted: dict[str, Any]) -> dict[str, Call]:
    """Calls of operators that no sample calls: with what another overload was called with, or by their schemas."""
    made: dict[str, Call] = {}
    for name in wanted.keys() - found.keys():
        call = _as_another(name, found) or _by_schema(name)
        if call is not None:
            made[name] = call
    return made


def _types(name: str) -> tuple[str, ...]:
    return tuple(str(a.type) for a in operator(name)._schema.arguments if not a.is_out)


def _as_another(name: str, found: dict[str, Call]) -> Call | None:
    """Returns the call of an operator in place, or with ``out=``, by that of its functional form."""
    library, packet, overload = name.split(".")
    outs = [a.name for a in operator(name)._schema.arguments if a.is_out]
    for other, call in found.items():
        own, of, _ = other.split(".")
        if own != library or _types(other) != _types(name):
            continue
        if outs and of == packet:
            results: list[torch.Tensor] = []
            with contextlib.suppress(Exception):  # of arguments that were made by the schema
                made = operator(other)(*tree_map(_copy, call.args), **tree_map(_copy, call.kwargs))
                results = [torch.zeros_like(x) for x in tree_leaves(made)]
            if len(results) == len(outs):
                return Call(name, call.args, call.kwargs | dict(zip(outs, results, strict=True)))
        elif f"{of}_" == packet and other.endswith(f".{overload}"):
            return Call(name, call.args, call.kwargs)
    return None


def _by_schema(name: str) -> Call | None:
    """Returns a call with as few arguments as the schema has, if those are tensors and numbers."""
    torch.manual_seed(crc32(name.encode()))
    args = []
    for argument in operator(name)._schema.arguments:
        if argument.has_default_value():
            break
        make = _MADE.get(str(argument.type))
        if make is None or argument.is_out:
            return None
        args.append(make())
    return Call(name, tuple(args), {})


#: What an argument is, by its type.
_MADE: dict[str, Callable[[], Any]] = {
    "Tensor": lambda: torch.rand(4, 4) + 0.5,
    "List[Tensor]": lambda: [torch.rand(4, 4) + 0.5, torch.rand(8, 4) + 0.5],
    "number": lambda: 2.0,
    "List[number]": lambda: [2.0, 0.5],
}


# ---- how operands lie


def laid(x: torch.Tensor, pair: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the placements nearest to a pair that a tensor can have: whole, where it has no such dimension or the
    mesh does not divide that, or where there are no sums."""
    sizes, placements = list(x.shape), []
    for placement, ranks in zip(pair, SHAPE, strict=True):
        if isinstance(placement, Shard):
            if placement.dim >= x.dim() or sizes[placement.dim] % ranks or sizes[placement.dim] < ranks:
                placement = Replicate()
            else:
                sizes[placement.dim] //= ranks
        elif isinstance(placement, Partial) and x.dtype is torch.bool:
            placement = Replicate()
        placements.append(placement)
    return tuple(placements)


def operand(x: torch.Tensor, pair: tuple[Any, ...]) -> Operand:
    """Returns the tensor as the mesh's ranks have it: of a sum each of two has another summand."""
    placements = laid(x, pair)
    parts = []
    for at in RANKS:
        part = x
        for placement, i in zip(placements, at, strict=True):
            if isinstance(placement, Partial):
                part = torch.full_like(part, 1) if i else part - 1
        for placement, i, ranks in zip(placements, at, SHAPE, strict=True):
            if isinstance(placement, Shard):
                part = part.chunk(ranks, placement.dim)[i]
        parts.append(part.clone(memory_format=torch.contiguous_format))
    return Operand(parts, placements, tuple(x.shape), x.stride())


def cases_of(found: dict[str, Call], every: int = 1) -> list[Case]:
    """Returns the cases of what was called: of each operator one for each way in which its first tensor can lie, in
    turn for its overloads; of other tensors each lies in another way. Of ``every`` ways one."""
    packets: dict[str, list[Call]] = {}
    for name in sorted(found):
        packets.setdefault(name.rpartition(".")[0], []).append(found[name])
    made = []
    for packet, overloads in packets.items():
        seen = set()
        for i, pair in enumerate(PAIRS):
            call = overloads[i % len(overloads)]
            key = call.operator, laid(call.tensors[0], pair)
            if key in seen or (crc32(packet.encode()) + i) % every:
                continue
            seen.add(key)
            turn = itertools.count()

            def lay(v: Any, i: int = i, turn: Iterator[int] = turn) -> Any:
                if not isinstance(v, torch.Tensor):
                    return v
                return operand(v, PAIRS[(i + 7 * next(turn)) % len(PAIRS)])

            args, kwargs = tree_map(lay, (call.args, call.kwargs))
            made.append(Case(call.operator, key[1], args, kwargs))
    return made


# ---- what they give


@dataclasses.dataclass
class Refused:
    """A case raised."""

    error: str


@dataclasses.dataclass
class Piece:
    """A DTensor that a case gave, or wrote into: of torchrun a rank's part, here the parts of all."""

    placements: str
    shape: tuple[int, ...]
    local: Any


def answer(case: Case, make: Callable[[Operand], Any], taken: Callable[[Any], Any]) -> Any:
    """Calls the operator with DTensors that ``make`` makes, and returns what there is then: a list of pieces and other
    values, or a refusal. ``taken`` says what is kept of a local tensor."""
    args, kwargs = tree_map(lambda v: make(v) if isinstance(v, Operand) else v, (case.args, case.kwargs))
    function = operator(case.operator)
    try:
        outs = function(*args, **kwargs)
        written = tree_leaves((args, kwargs)) if function._schema.is_mutable else []
        return [_piece(v, taken) for v in [*tree_leaves(outs), *(v for v in written if isinstance(v, DTensor))]]
    except Exception as e:
        return Refused(f"{type(e).__name__}: {e}".split("\n")[0])


def _piece(value: Any, taken: Callable[[Any], Any]) -> Any:
    if isinstance(value, DTensor):
        return Piece(", ".join(map(str, value.placements)), tuple(value.shape), taken(value._local_tensor))
    return taken(value) if isinstance(value, torch.Tensor) else value


#: What a refusal of parts of several sizes says.
UNEVEN = "a tensor on a mesh has one shape on all ranks"
#: Operators whose values are what memory happens to hold.
UNDEFINED = ("empty", "new_empty", "resize")


def difference(case: Case, ours: Any, theirs: list[Any]) -> str | None:
    """Returns how an answer of ours differs from those of torchrun's ranks; None where it does not, and where torchrun
    has none."""
    if isinstance(theirs[0], Refused):
        return None
    if isinstance(ours, Refused):
        return ours.error
    if len(ours) != len(theirs[0]):
        return f"{len(ours)} results, and not {len(theirs[0])}"
    function = operator(case.operator)
    free = torch.Tag.nondeterministic_seeded in function.tags or function._schema.name[6:].startswith(UNDEFINED)
    for rank, own in enumerate(theirs):
        for here, there in zip(ours, own, strict=True):
            found = _differs(here, there, rank, free)
            if found is not None:
                return found
    return None


def _differs(here: Any, there: Any, rank: int, free: bool) -> str | None:
    if isinstance(there, Piece):
        if not isinstance(here, Piece):
            return f"a {type(here).__name__}, and no DTensor"
        if (here.placements, here.shape) != (there.placements, there.shape):
            return f"{here.placements} of {here.shape}, and not {there.placements} of {there.shape}"
        here, there = here.local, there.local
    if isinstance(there, torch.Tensor):
        if not isinstance(here, list):
            return f"a {type(here).__name__}, and no tensor"
        here = here[rank]
        if (here.shape, here.dtype) != (there.shape, there.dtype):
            return f"{here.dtype} of {tuple(here.shape)}, and not {there.dtype} of {tuple(there.shape)}"
        return None if free or alike(here, there) else "other values"
    return None if free or here == there or here != here else f"{here!r}, and not {there!r}"


def alike(here: torch.Tensor, there: torch.Tensor) -> bool:
    """Whether two tensors have the same values, up to the rounding of what sums in another order."""
    if not (here.is_floating_point() or here.is_complex()):
        return torch.equal(here, there)
    rough = torch.finfo(here.dtype).eps * 64
    scale = max(1.0, there.abs().nan_to_num(0, 0, 0).max().item()) if there.numel() else 1.0
    return torch.allclose(here, there, rough, rough * scale, equal_nan=True)
