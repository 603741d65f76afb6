"""The twin of programs over meshes: it computes each rank's tensors by plain local torch, one rank after the other.

It knows nothing of disttensor. A value on a place is a list with one local tensor for each rank, a view is a real view
of it, a shard on a node is the very tensor in that list, and a collective is a formula over the list. What it computes
is exact: floats are multiples of an eighth and small, so that the order of a sum does not show.

It also knows the rules of the documents, and refuses (`Refused`) what a right program does not do: to use a view of
what an asynchronous collective is writing, or to write what another stream may read.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F

#: The largest number: a sum of many of them, of eighths, is exact in float32.
LARGEST = 4096
#: The type of the error of an index that is out of range, and of one rank's value that is asked of ranks that differ.
OUT_OF_RANGE, DIFFER = "IndexError", "RanksDiffer"


#: Dims of a mesh, each with its size.
Dims = tuple[tuple[str, int], ...]


class Refused(Exception):
    """A statement that a right program does not have here, or that can't be compared to the bit."""


#: A tensor as a rank has it: the type of its error, or dtype, shape, strides, offset and bits.
Seen = Any


@dataclass(frozen=True)
class Where:
    """A place: a node, without dims, or a mesh. Two of the same nodes, in their order, and dims are one."""

    nodes: tuple[int, ...]
    dims: Dims = ()

    def groups(self, over: tuple[str, ...], views: Sequence[Dims] = ()) -> list[list[int]]:
        """The ranks that differ along some dims only. ``views`` are other dims of the same place."""
        joined: list[set[int]] = [{rank} for rank in range(len(self.nodes))]
        for name in over:
            dims = next((dims for dims in (self.dims, *views) if name in dict(dims)), None)
            if dims is None:
                raise Refused(f"no dim {name}")
            along: dict[tuple[int, ...], set[int]] = {}
            names = [n for n, _ in dims]
            for rank, at in enumerate(itertools.product(*(range(size) for _, size in dims))):
                along.setdefault(tuple(a for n, a in zip(names, at, strict=True) if n != name), set()).add(rank)
            for group in along.values():
                union = set().union(*(joined[rank] for rank in group))
                for rank in union:
                    joined[rank] = union
        return sorted({tuple(sorted(group)): sorted(group) for group in joined}.values())

    def coordinates(self) -> list[dict[str, int]]:
        names = [name for name, _ in self.dims]
        return [dict(zip(names, at, strict=True)) for at in itertools.product(*(range(size) for _, size in self.dims))]


@dataclass
class Memory:
    """The memory of a tensor and its views. It is kept, so that no other has its address."""

    storage: torch.UntypedStorage
    failed: bool = False
    writer: str = ""  #: the tensor through which an asynchronous collective is writing it
    readers: set[str] = field(default_factory=set)  #: streams that may still read it


@dataclass
class Value:
    where: Where
    shards: list[torch.Tensor]


@dataclass
class Recorded:
    """A graph: its statements, the tensors that they read, and those of the last replay by their names."""

    body: tuple[Statement, ...]
    inputs: dict[str, Value]
    gone: tuple[str, ...]
    held: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Statement:
    """A line (or a few) of a program; for it the twin calls its method ``do_kind`` with ``args``."""

    kind: str
    code: str
    args: tuple[Any, ...] = ()
    out: tuple[str, ...] = ()
    body: tuple[Statement, ...] = ()


#: Statements that do no more than to bind a name, or to drop it.
PURE = {
    *("each", "index", "at", "shard_of", "copy", "from_shards", "shard", "local", "coordinate", "collective"),
    *("leaf", "drop", "ask", "check", "close"),
}


@cache
def compiled(expression: str) -> CodeType:
    return compile(expression, "<twin>", "eval")


def bits(x: torch.Tensor) -> bytes:
    x = x.detach().flatten().clone(memory_format=torch.contiguous_format)
    return x.view(torch.uint8).numpy().tobytes() if x.numel() else b""


def seed_of_a_rank(seed: int, along: tuple[str, ...], at: Sequence[int]) -> int:
    """Returns the seed with which a rank's generator begins for numbers that vary along dims."""
    return int(blake2b(repr((seed, along, *at)).encode(), digest_size=8).hexdigest(), 16) >> 1


class Twin:
    #: Whether an index may be out of range: where nodes have GPUs, such a kernel ends what its process has of them.
    mistakes = True

    def __init__(self, meshes: dict[Where, list[Dims]], streams: Sequence[str], seed: int) -> None:
        """``meshes``: those that there were when all was seeded, each with the dims of its views."""
        self.names: dict[str, Value] = {}
        self.views = meshes
        self.works: dict[str, tuple[str, Value | None]] = {}
        self.graphs: dict[str, Recorded] = {}
        self.functions: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[Statement, ...]]] = {}
        self.memories: dict[int, Memory] = {}
        #: by stream: the memory that was written since it has waited for the default one
        self.written: dict[str, set[int]] = {name: set() for name in streams}
        self.states: dict[tuple[object, ...], torch.Tensor] = {}
        self.seed_is = seed
        self.playing = False  #: in a graph, or a function that is replayed
        self.replaying = False  #: in a replay, which waits for all streams

    # ---- statements that happen whole or not at all ------------------------------------------------------------------

    def do(self, statement: Statement) -> Any:
        """Does a statement and returns the values that it shows; raises Refused, and then it has changed nothing."""
        restore = None if statement.kind in PURE else self.snapshot()
        try:
            return getattr(self, f"do_{statement.kind}")(statement, *statement.args)
        except (Refused, RuntimeError, IndexError, TypeError, ValueError, KeyError) as error:
            if restore is not None:
                restore()
            raise Refused(f"{type(error).__name__}: {error}") from error

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that brings everything back to where it is now."""
        dicts = {name: dict(getattr(self, name)) for name in ("names", "works", "states", "graphs", "functions")}
        held = {key: dict(graph.held) for key, graph in self.graphs.items()}
        written = {key: set(value) for key, value in self.written.items()}
        seed, playing, replaying = self.seed_is, self.playing, self.replaying
        before = [(m, m.storage.clone(), m.failed, m.writer, set(m.readers)) for m in self.memories.values()]

        def restore() -> None:
            for name, value in dicts.items():
                setattr(self, name, value)
            for key, graph in self.graphs.items():
                graph.held = held[key]
            self.written, self.seed_is, self.playing, self.replaying = written, seed, playing, replaying
            for memory, storage, failed, writer, readers in before:
                memory.storage.copy_(storage)
                memory.failed, memory.writer, memory.readers = failed, writer, readers

        return restore

    def run(self, body: Sequence[Statement]) -> None:
        for statement in body:
            getattr(self, f"do_{statement.kind}")(statement, *statement.args)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def memory(self, x: torch.Tensor) -> Memory:
        storage = x.untyped_storage()
        return self.memories.setdefault(storage._cdata, Memory(storage))

    def used(self, *names: str) -> list[Value]:
        """The values of names, for statements that read them."""
        values = [self.names[name] for name in names]
        for name, value in zip(names, values, strict=True):
            for x in value.shards:
                if self.memory(x).writer not in ("", name):
                    raise Refused("a view of a tensor that a collective is writing")
        return values

    def make(self, name: str, where: Where, shards: Sequence[torch.Tensor], failed: Sequence[bool] = ()) -> None:
        for x in shards:
            exact(x)
        self.refuse_mistakes(failed)
        for x, fails in zip(shards, failed, strict=False):
            self.memory(x).failed |= fails
        for x in shards:
            if self.memory(x).writer:
                raise Refused("a view of a tensor that a collective is writing")
            if self.memory(x).failed and (x.requires_grad or self.playing):
                raise Refused("a tensor that fails is compared without gradients and graphs")
        self.names[name] = Value(where, list(shards))

    def failed(self, value: Value) -> list[bool]:
        return [self.memory(x).failed for x in value.shards]

    def refuse_mistakes(self, failed: Sequence[bool]) -> None:
        if any(failed) and not self.mistakes:
            raise Refused("an index out of range")

    def wrote(self, shards: Sequence[torch.Tensor], failed: Sequence[bool]) -> None:
        self.refuse_mistakes(failed)
        for x, fails in zip(shards, failed, strict=True):
            exact(x)
            memory = self.memory(x)
            memory.failed |= fails
            if memory.readers and not self.replaying:
                raise Refused("another stream may still read it")
            if memory.failed and self.playing:
                raise Refused("a tensor that fails is compared without graphs")
            for written in self.written.values():
                written.add(x.untyped_storage()._cdata)

    # ---- what each rank does by itself -------------------------------------------------------------------------------

    def do_each(self, statement: Statement, expression: str, names: tuple[str, ...], where: Where) -> None:
        """A new tensor or a view: the same expression on each rank. ``where`` is for one without operands."""
        self._each(statement.out[0], expression, names, where)

    def _each(self, out: str, expression: str, names: tuple[str, ...], where: Where) -> None:
        values = self.used(*names)
        for value in values:
            if value.where != values[0].where:
                raise Refused("two places")
        where = values[0].where if values else where
        shards = []
        for rank in range(len(where.nodes)):
            shards.append(self._eval(expression, names, values, rank))
        failed = [any(self.memory(value.shards[rank]).failed for value in values) for rank in range(len(where.nodes))]
        self.make(out, where, shards, failed)

    def _eval(self, expression: str, names: Sequence[str], values: Sequence[Value], rank: int) -> Any:
        local = {name: value.shards[rank] for name, value in zip(names, values, strict=True)}
        return eval(compiled(expression), {"torch": torch, "F": F, **local})

    def do_write(self, statement: Statement, expression: str, target: str, names: tuple[str, ...]) -> None:
        """An expression that writes ``target``, perhaps through a view."""
        values = self.used(target, *names)
        for value in values:
            if value.where != values[0].where:
                raise Refused("two places")
        if any(x.requires_grad for value in values for x in value.shards):
            raise Refused("gradients are compared without writes")
        first = values[0].shards[0]
        if any(size > 1 and not stride for size, stride in zip(first.shape, first.stride(), strict=True)):
            raise Refused("several elements in one place")
        failed = [any(flags) for flags in zip(*map(self.failed, values), strict=True)]
        for rank in range(len(values[0].where.nodes)):
            self._eval(expression, (target, *names), values, rank)
        self.wrote(values[0].shards, failed)

    def do_index(self, statement: Statement, source: str, index: str) -> None:
        """``source[index]`` fails on the ranks whose index is out of range."""
        x, i = self.used(source, index)
        if x.where != i.where or i.shards[0].dtype != torch.int64 or not x.shards[0].dim() or not i.shards[0].dim():
            raise Refused("no index")
        if not x.shards[0].shape[0]:
            raise Refused("raised at the line")
        shards, failed = [], []
        for a, at in zip(x.shards, i.shards, strict=True):
            try:
                shards.append(a[at])
                outside = False
            except IndexError:
                shards.append(a.new_zeros((*at.shape, *a.shape[1:])))
                outside = True
            failed.append(outside or self.memory(a).failed or self.memory(at).failed)
        self.make(statement.out[0], x.where, shards, failed)

    def do_index_fill_(self, statement: Statement, target: str, index: str, number: float) -> None:
        x, i = self.used(target, index)
        if x.where != i.where or i.shards[0].dtype != torch.int64 or not x.shards[0].dim() or i.shards[0].dim() != 1:
            raise Refused("no index")
        if not x.shards[0].shape[0] or self.memory(x.shards[0]) is self.memory(i.shards[0]):
            raise Refused("raised at the line")
        failed = []
        for a, at in zip(x.shards, i.shards, strict=True):
            try:
                a.index_fill_(0, at, number)
                outside = False
            except IndexError:
                outside = True
            failed.append(outside or self.memory(a).failed or self.memory(at).failed)
        self.wrote(x.shards, failed)

    # ---- random numbers ----------------------------------------------------------------------------------------------

    def do_random(
        self, statement: Statement, expression: str, names: tuple[str, ...], where: Where, along: tuple[str, ...]
    ) -> None:
        """As ``each`` or a write, by generators: a node has one, a mesh one of its own on each of its nodes, and one
        more for each way in which its ranks may vary."""
        if names:
            where = self.names[names[0]].where
        values = self.used(*names)
        if not where.dims:
            along = ()
        elif where not in self.views:
            raise Refused("a mesh that begins with a seed of its own")
        shards = []
        for rank in range(len(where.nodes)):
            with self._generator(where, rank, along):
                shards.append(self._eval(expression, names, values, rank))
        failed = [any(self.memory(value.shards[rank]).failed for value in values) for rank in range(len(shards))]
        if statement.out:
            self.make(statement.out[0], where, shards, failed)
        else:
            self.wrote(values[0].shards, failed)

    @contextlib.contextmanager
    def _generator(self, where: Where, rank: int, along: tuple[str, ...]) -> Iterator[None]:
        key = (where, rank, along)
        before = torch.default_generator.get_state()
        try:
            if key in self.states:
                torch.default_generator.set_state(self.states[key])
            else:
                at = [where.coordinates()[rank][name] for name in along]
                seed = seed_of_a_rank(self.seed_is, along, at) if along else self.seed_is
                torch.default_generator.manual_seed(seed)
            yield
            self.states[key] = torch.default_generator.get_state()
        finally:
            torch.default_generator.set_state(before)

    def do_seed(self, statement: Statement, seed: int) -> None:
        self.seed_is, self.states = seed, {}

    # ---- places ------------------------------------------------------------------------------------------------------

    def do_at(self, statement: Statement, name: str, coordinates: dict[str, int]) -> None:
        (value,) = self.used(name)
        where = value.where
        ranks = [
            rank
            for rank, at in enumerate(where.coordinates())
            if all(at[dim] == wanted for dim, wanted in coordinates.items())
        ]
        dims = tuple((dim, size) for dim, size in where.dims if dim not in coordinates)
        if not where.dims or not ranks:
            raise Refused("no such rank")
        if len(ranks) == len(where.nodes) > 1:
            dims = where.dims
        if len(ranks) == 1:
            dims = ()
        shards = [value.shards[rank] for rank in ranks]
        self.make(statement.out[0], Where(tuple(where.nodes[rank] for rank in ranks), dims), shards)

    def do_shard_of(self, statement: Statement, name: str, rank: int) -> None:
        (value,) = self.used(name)
        if not value.where.dims:
            raise Refused("not on a mesh")
        self.make(statement.out[0], Where((value.where.nodes[rank],)), [value.shards[rank]])

    def do_copy(self, statement: Statement, name: str, to: Where) -> None:
        """``x.to(...)``: along dims of one name each coordinate keeps its values, along new dims all get them."""
        (value,) = self.used(name)
        here = value.where
        if here == to:
            self.names[statement.out[0]] = value
            return
        if here.dims and not to.dims:
            raise Refused("of one value there may be several")
        if not {*here.dims} <= {*to.dims}:
            raise Refused("other dims")
        ranks = []
        for at in to.coordinates() or [{}]:
            wanted = {name: at[name] for name, _ in here.dims}
            ranks.append(here.coordinates().index(wanted) if here.dims else 0)
        failed = self.failed(value)
        shards = [value.shards[rank].clone() for rank in ranks]
        self.make(statement.out[0], to, shards, [failed[rank] for rank in ranks])

    def do_from_shards(self, statement: Statement, to: Where, names: tuple[str, ...]) -> None:
        values = self.used(*names)
        if len(values) != len(to.nodes) or any(len(value.shards) != 1 or value.where.dims for value in values):
            raise Refused("a tensor for each rank")
        shards = [value.shards[0] for value in values]
        if any(x.shape != shards[0].shape or x.dtype != shards[0].dtype for x in shards):
            raise Refused("one shape")
        copies = [x.clone(memory_format=torch.contiguous_format) for x in shards]
        self.make(statement.out[0], to, copies, [self.memory(x).failed for x in shards])

    def do_shard(self, statement: Statement, to: Where, name: str, cuts: dict[str, int]) -> None:
        (value,) = self.used(name)
        if value.where.dims:
            raise Refused("on a mesh already")
        failed = self.failed(value)[0]
        shards = []
        for at in to.coordinates():
            x = value.shards[0]
            for dim, d in cuts.items():
                size = dict(to.dims)[dim]
                if not -x.dim() <= d < x.dim() or x.shape[d] % size:
                    raise Refused("sizes")
                x = x.chunk(size, d)[at[dim]] if x.shape[d] else x
            shards.append(x.clone(memory_format=torch.contiguous_format))
        self.make(statement.out[0], to, shards, [failed] * len(shards))

    def do_local(self, statement: Statement, to: Where, expressions: tuple[str, ...]) -> None:
        """Local tensors that go to the ranks, one for each or one for all."""
        made = [eval(compiled(text), {"torch": torch}) for text in expressions]
        shards = [made[rank % len(made)].clone(memory_format=torch.contiguous_format) for rank in range(len(to.nodes))]
        self.make(statement.out[0], to, shards)

    def do_coordinate(self, statement: Statement, to: Where, dim: str) -> None:
        self.make(statement.out[0], to, [torch.tensor(at[dim]) for at in to.coordinates()])

    # ---- collectives -------------------------------------------------------------------------------------------------

    def collective(
        self, what: str, value: Value, over: tuple[str, ...], options: dict[str, Any]
    ) -> tuple[list[torch.Tensor], list[bool]]:
        """Returns the results on all ranks, and for each rank whether it fails."""
        groups = value.where.groups(over, self.views.get(value.where, ()))
        if value.shards[0].requires_grad and options.get("op", "sum") not in ("sum", "avg"):
            raise Refused("no gradient")
        shards, failed = list(value.shards), self.failed(value)
        for group in groups:
            xs, bad = [value.shards[rank] for rank in group], [self.memory(value.shards[rank]).failed for rank in group]
            n = len(group)
            for i, rank in enumerate(group):
                made: torch.Tensor
                if any(bad) and what in ("permute_ranks", "broadcast"):
                    raise Refused("whether it fails on a rank that does not need the rank that fails is left open")
                match what:
                    case "all_reduce":
                        made = reduced(xs, options["op"])
                    case "all_gather":
                        made = torch.cat(xs, options["dim"])
                    case "reduce_scatter":
                        made = divided(reduced(xs, options["op"]), options["dim"], n)[i]
                    case "all_to_all":
                        made = torch.cat([divided(x, options["split"], n)[i] for x in xs], options["cat"])
                    case "permute_ranks":
                        made = xs[(i - options["by"]) % n]
                    case "broadcast":
                        if not 0 <= options["src"] < n:
                            raise Refused("no such rank")
                        made = xs[options["src"]]
                    case _:
                        raise AssertionError(what)
                shards[rank], failed[rank] = made.clone(memory_format=torch.contiguous_format), any(bad)
        return shards, failed

    def do_collective(
        self, statement: Statement, what: str, name: str, over: tuple[str, ...], options: dict[str, Any]
    ) -> None:
        (value,) = self.used(name)
        if not value.where.dims:
            raise Refused("not on a mesh")
        self.make(statement.out[0], value.where, *self.collective(what, value, over, options))

    def do_begin(
        self, statement: Statement, what: str, name: str, over: tuple[str, ...], options: dict[str, Any]
    ) -> None:
        """A collective with async_op=True, of the values that the tensor has now."""
        if self.playing:
            raise Refused("not in a graph")
        self.do_collective(statement, what, name, over, options)
        if any(self.failed(self.names[statement.out[0]])):
            raise Refused("the wait raises")
        self.works[statement.out[0]] = ("", self.names.pop(statement.out[0]))

    def do_wait(self, statement: Statement, work: str) -> None:
        name, value = self.works.pop(work)
        if value is not None:
            self.names[statement.out[0]] = value
            return
        for memory in self.memories.values():
            if memory.writer == name:
                memory.writer = ""

    def do_reduce_(self, statement: Statement, name: str, over: tuple[str, ...], op: str, begin: bool) -> None:
        """``all_reduce_`` writes its tensor; with ``begin`` it is one with async_op=True."""
        (value,) = self.used(name)
        if not value.where.dims or any(x.requires_grad for x in value.shards):
            raise Refused("not on a mesh")
        if any(self.memory(x).writer for x in value.shards) or (begin and self.playing):
            raise Refused("another is under way")
        made, failed = self.collective("all_reduce", value, over, {"op": op})
        for x, result in zip(value.shards, made, strict=True):
            x.copy_(result)
        self.wrote(value.shards, failed)
        if begin:
            if any(failed) or not value.shards[0].is_contiguous():
                raise Refused("the wait raises")
            for x in value.shards:
                self.memory(x).writer = name
            self.works[statement.out[0]] = (name, None)

    def do_listed(self, statement: Statement, what: str, names: tuple[str, ...], option: Any) -> None:
        """A collective over a list of tensors on nodes: it writes them."""
        values = self.used(*names)
        xs = [value.shards[0] for value in values]
        if any(value.where.dims for value in values) or len({value.where for value in values}) < len(values):
            raise Refused("one on each node")
        if any(x.shape != xs[0].shape or x.dtype != xs[0].dtype or x.requires_grad for x in xs):
            raise Refused("one shape")
        bad = [self.memory(x).failed for x in xs]
        if what == "all_reduce":
            result = reduced(xs, option)
        else:
            result = xs[option]
            if any(bad):
                raise Refused("left open, as above")
        result = result.clone()
        targets = [x for i, x in enumerate(xs) if what == "all_reduce" or i != option]
        for x in targets:
            x.copy_(result)
        self.wrote(targets, [any(bad)] * len(targets))

    def do_agree_(self, statement: Statement, name: str) -> None:
        (value,) = self.used(name)
        if not value.where.dims or any(x.requires_grad for x in value.shards) or any(self.failed(value)):
            raise Refused("not on a mesh")
        first = value.shards[0].clone()
        for x in value.shards:
            x.copy_(first)
        self.wrote(value.shards, [False] * len(value.shards))

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def do_leaf(self, statement: Statement, name: str) -> None:
        (value,) = self.used(name)
        if not value.shards[0].is_floating_point() or any(self.failed(value)):
            raise Refused("no gradient")
        self.make(statement.out[0], value.where, [x.detach().clone().requires_grad_() for x in value.shards])

    def do_grad(self, statement: Statement, names: tuple[str, ...], leaves: tuple[str, ...]) -> None:
        """The gradients of the sum of all ranks' squares of some tensors."""
        total = sum(x.square().sum() for name in names for x in self.names[name].shards)
        if not isinstance(total, torch.Tensor) or not total.requires_grad:
            raise Refused("no gradient")
        for out, leaf in zip(statement.out, leaves, strict=True):
            xs = self.names[leaf].shards
            grads = torch.autograd.grad(total, xs, retain_graph=True, allow_unused=True)
            if all(grad is None for grad in grads):
                raise Refused("unused")
            made = [torch.zeros_like(x) if grad is None else grad.detach() for x, grad in zip(xs, grads, strict=True)]
            # their strides, and the sign of a zero on a rank that has no part in the sum, are autograd's own affair
            made = [grad.clone(memory_format=torch.contiguous_format) + 0.0 for grad in made]
            self.make(out, self.names[leaf].where, made)

    # ---- graphs ------------------------------------------------------------------------------------------------------

    def do_record(self, statement: Statement, graph: str, inputs: tuple[str, ...], gone: tuple[str, ...]) -> None:
        """The body runs once as it is, and is recorded; the recording's tensors are there from the first replay on."""
        if self.playing:
            raise Refused("in another graph")
        for value in self.used(*inputs):
            if any(self.failed(value)) or any(x.requires_grad for x in value.shards):
                raise Refused("a tensor that fails is compared without graphs")
            if any(self.memory(x).writer for x in value.shards):
                raise Refused("a collective is writing it")
        before = set(self.names)
        self.playing = True
        self.run(statement.body)
        self.playing = False
        self.graphs[graph] = Recorded(statement.body, {name: self.names[name] for name in inputs}, gone)
        for name in set(self.names) - before:
            del self.names[name]

    def do_replay(self, statement: Statement, graph: str) -> None:
        recorded = self.graphs[graph]
        outer, self.names = self.names, dict(recorded.inputs)
        for value in (*recorded.inputs.values(), *recorded.held.values()):
            if any(self.failed(value)) or any(self.memory(x).writer for x in value.shards):
                raise Refused("a tensor that fails is compared without graphs")
        written = {key: set(value) for key, value in self.written.items()}
        self.playing = self.replaying = True
        self.run(recorded.body)
        self.playing = self.replaying = False
        made, self.names = self.names, outer
        self.written = written  # a replay keeps its place in all streams
        for name, new in made.items():
            if name in recorded.inputs or name in recorded.gone:
                continue
            old = recorded.held.get(name)
            if old is None:
                recorded.held[name] = self.names[name] = new
                continue
            for x, y in zip(old.shards, new.shards, strict=True):
                mine, theirs = x.untyped_storage(), y.untyped_storage()
                if self.memory(x).writer:
                    raise Refused("a collective is writing it")
                if mine._cdata != theirs._cdata:
                    mine.copy_(theirs)

    def do_define(
        self, statement: Statement, function: str, parameters: tuple[str, ...], results: tuple[str, ...]
    ) -> None:
        self.functions[function] = (parameters, results, statement.body)

    def do_call(self, statement: Statement, function: str, arguments: tuple[str, ...]) -> None:
        """A call of a ``@dt.graphed`` function does what the function itself does."""
        if self.playing:
            raise Refused("in a graph")
        parameters, results, body = self.functions[function]
        values = self.used(*arguments)
        for value in values:
            if any(self.failed(value)) or any(self.memory(x).writer or x.requires_grad for x in value.shards):
                raise Refused("a tensor that fails is compared without graphs")
        outer, self.names = self.names, dict(zip(parameters, values, strict=True))
        self.playing = True
        self.run(body)
        self.playing = False
        made, self.names = self.names, outer
        for out, result in zip(statement.out, results, strict=True):
            self.names[out] = made[result]

    # ---- streams -----------------------------------------------------------------------------------------------------

    def do_beside(self, statement: Statement, stream: str, expression: str, names: tuple[str, ...]) -> None:
        """A new tensor, on a stream of a node."""
        values = self.used(*names)
        written = self.written.setdefault(stream, set())
        for x in (x for value in values for x in value.shards):
            if x.untyped_storage()._cdata in written or x.requires_grad:
                raise Refused("written since the stream has waited")
            self.memory(x).readers.add(stream)
        known = {id(self.memory(x)) for value in values for x in value.shards}
        self._each(statement.out[0], expression, names, values[0].where)
        if id(self.memory(self.names[statement.out[0]].shards[0])) in known:
            raise Refused("a view")

    def do_join(self, statement: Statement, stream: str) -> None:
        """The stream waits for the default one, and that for the stream."""
        self.written[stream] = set()
        for memory in self.memories.values():
            memory.readers.discard(stream)

    # ---- what is seen ------------------------------------------------------------------------------------------------

    def do_drop(self, statement: Statement, name: str) -> None:
        (value,) = self.used(name)
        if any(self.memory(x).writer for x in value.shards):
            raise Refused("a collective is writing it")
        del self.names[name]

    def do_close(self, statement: Statement) -> None:
        """A mesh gives its slot back; its tensors stay."""

    def do_ask(self, statement: Statement, name: str) -> object:
        (value,) = self.used(name)
        failed = self.failed(value)
        if any(failed):
            return OUT_OF_RANGE
        if any(bits(x) != bits(value.shards[0]) for x in value.shards):
            return DIFFER
        return value.shards[0].tolist()

    def do_check(self, statement: Statement) -> dict[str, list[Seen]]:
        """Returns all tensors as each rank has them, except those that a collective is writing."""
        return {
            name: list(map(self.seen, value.shards))
            for name, value in self.names.items()
            if not any(self.memory(x).writer for x in value.shards)
        }

    def seen(self, x: torch.Tensor) -> Seen:
        if self.memory(x).failed:
            return OUT_OF_RANGE
        return x.dtype, tuple(x.shape), x.stride(), x.storage_offset(), bits(x)


_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul,
}  # fmt: skip


def reduced(xs: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    if op in ("max", "min") and any(bool(((x == 0) & x.signbit()).any()) for x in xs):
        raise Refused("of two zeros either is the largest")
    total = xs[0]
    for x in xs[1:]:
        total = _FOLDS[op](total, x)
    if op == "avg" and not total.is_floating_point():
        raise Refused("integers have no average")
    return total / len(xs) if op == "avg" else total


def divided(x: torch.Tensor, dim: int, n: int) -> list[torch.Tensor]:
    if not -x.dim() <= dim < x.dim() or x.shape[dim] % n:
        raise Refused("sizes")
    step = x.shape[dim] // n
    return [x.narrow(dim, i * step, step) for i in range(n)]


def exact(x: torch.Tensor) -> None:
    """Raises Refused for numbers whose sums would depend on their order, or that grow."""
    if not isinstance(x, torch.Tensor):
        raise Refused("not a tensor")
    if x.numel() > 4096:
        raise Refused("large")
    if x.dtype == torch.bool or not x.numel():
        return
    y = x.detach()
    if x.is_floating_point() and not bool(torch.equal((y * 8).round(), y * 8)):
        raise Refused("no eighths")
    if not bool((y.abs() <= LARGEST).all()):
        raise Refused("too large")
