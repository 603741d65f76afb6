"""Entries and plans. An entry says how an operator's arguments are sorted; a plan, computed once per signature, what a
call sends and returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from ..proxy.meta import Meta, large
from ..runtime.master.failures import Site
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..session import caches
from ..session.places import Place
from .meta_inference import asks_always, gives_value, writes_out
from .trial import can_be_tried

# The kinds of arguments: parts of the key (on which a plan depends), or of the call (which is sent each time).
TENSOR = 0  #: a proxy: its meta in the key, its ref in the call. A number in its place is a NUMBER
NUMBER = 1  #: a Scalar or float: its type in the key, its value in the call
INDEX = 2  #: an integer that both decides the shape and changes often: in the key and in the call
STATIC = 3  #: a static value: in the key, and in the template
LIST = 4  #: a list of static values
TENSORS = 5  #: a list of proxies, some of which may be None
NUMBERS = 6  #: a list of numbers
GENERATOR = 7  #: a generator of the user's, or None

_INDEXED = {
    ("aten::select.int", "index"),
    ("aten::slice.Tensor", "start"),
    ("aten::slice.Tensor", "end"),
    ("aten::select_backward", "index"),
    ("aten::slice_backward", "start"),
    ("aten::slice_backward", "end"),
}
#: Operators whose Scalar arguments decide the shape.
_EXACT = {"aten::arange", "aten::range"}

#: Plans per operator and table. A full table is dropped as a whole: it only makes the next calls slower once.
MAX_PLANS = 4096

_KINDS = {
    "Tensor": TENSOR,
    "number": NUMBER,
    "float": NUMBER,
    "List[int]": LIST,
    "List[bool]": LIST,
    "List[Tensor]": TENSORS,
    "List[Optional[Tensor]]": TENSORS,
    "List[number]": NUMBERS,
    "List[float]": NUMBERS,
    "Generator": GENERATOR,
}


def _is_torchs(name: str) -> bool:
    """Returns whether an operator is torch's own, as whoever imports torch has it.

    Others are registered when some module of torch's is imported, as ``prims::fma`` by the compiler's: the script's
    process may have them, and a node's not.
    """
    namespace, _, rest = name.partition("::")
    return namespace == "aten" or (namespace == "prims" and hasattr(torch._prims, rest.partition(".")[0]))


class OpEntry:
    """The facts of an operator that do not depend on its arguments, its handler and its plans."""

    __slots__ = (
        "asks",
        "composite",
        "draws",
        "fallback",
        "forms",
        "handler",
        "kinds",
        "known_forms",
        "kwkinds",
        "lists",
        "mutable",
        "name",
        "op",
        "out",
        "plans",
        "pointwise",
        "python",
        "quick",
        "returned",
        "right",
        "shortcuts",
        "single",
        "torchs",
        "tried",
        "value",
        "view",
        "writes",
    )

    def __init__(self, op: OpOverload) -> None:
        schema = op._schema
        self.op = op
        self.name = op.name()
        self.kinds = tuple(self._kind(a) for a in schema.arguments if not a.kwarg_only)
        self.kwkinds = {a.name: self._kind(a) for a in schema.arguments}
        #: whether torch passes lists to it, which can't be part of a key
        self.lists = any(k in (LIST, NUMBERS) for k in self.kinds)
        self.mutable = schema.is_mutable
        #: positions (or names) of the arguments that are written
        self.writes = tuple(
            a.name if a.kwarg_only else i
            for i, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        )
        #: whether it writes its results into tensors that it is given by name
        self.out = writes_out(op)
        #: the arguments that the operator writes and returns: of `add_` the first, of `add.out` its out
        self.returned = self._returned(schema)
        self.view = op.is_view and not self.mutable
        #: made of other operators, into which torch's autograd takes it apart; without autograd it arrives in one piece
        self.composite = self._composite()
        self.torchs = _is_torchs(self.name)  #: torch's own, not another library's, so that each node has it
        self.python = self._python()
        self.asks = asks_always(op)
        #: whether an operand that is read may be the very tensor that is written
        self.pointwise = torch.Tag.pointwise in op.tags or self.name == "aten::copy_"
        #: whether a signature's first call is tried here (`trial.py`)
        self.tried = can_be_tried(op)
        #: whether it draws random numbers from the default generator
        self.draws = torch.Tag.nondeterministic_seeded in op.tags
        self.value = gives_value(op) and not self.mutable
        self.plans: dict[tuple[Any, ...], Plan] = {}
        #: (meta, meta), (meta, float), (meta, int) or (meta, NoneType) -> plan, for the fast path of `dispatch`
        self.quick: dict[tuple[Any, Any], Plan] = {}
        #: the same, for methods that pass ``dispatch`` by (method_shortcuts.py); empty while something surrounds that
        self.shortcuts: dict[tuple[Any, Any], Plan] = {}
        #: number of arguments -> the function that issues calls of known forms with so many (signature_forms.py), and
        #: which forms these are
        self.forms: dict[int, Callable[[tuple[Any, ...]], Any]] = {}
        self.known_forms: set[str] = set()
        #: whether it returns tensors only, and no lists of them
        self.single = all(str(r.type) == "Tensor" for r in schema.returns)
        #: whether its meta kernel was right, by layout of the operands (`lying` in first_call.py)
        self.right: dict[Any, bool] = {}
        self.handler: Callable[..., Any] | None = None
        self.fallback: Callable[..., Any] | None = None

    def store(self, table: dict[Any, Any], key: Any, known: Plan | bool) -> None:
        """Adds an entry to one of this operator's tables. A full table is emptied first, with the others."""
        if len(table) >= MAX_PLANS:
            self.drop_plans()
        if isinstance(known, Plan):
            caches.keep(table, key, known, known.place)
        else:
            table[key] = known

    def drop_plans(self) -> None:
        """Drops all plans, and the findings about the meta kernel."""
        self.plans.clear()
        self.quick.clear()
        self.shortcuts.clear()
        self.right.clear()

    def _composite(self) -> bool:
        def has(key: str) -> bool:
            return torch._C._dispatch_has_kernel_for_dispatch_key(self.name, key)

        return has("CompositeImplicitAutograd") and not has("PrivateUse1")

    def _python(self) -> bool:
        """Returns whether it is a library's operator with one kernel for all devices (``torch.library.custom_op``)."""
        return not self.torchs and torch._C._dispatch_has_kernel_for_dispatch_key(
            self.name, "CompositeExplicitAutograd"
        )

    def _kind(self, argument: torch.Argument) -> int:
        text = str(argument.type)
        if text.startswith("Optional["):
            text = text[9:-1]
        kind = _KINDS.get(text, LIST if text.startswith("List[") else STATIC)
        if (self.name, argument.name) in _INDEXED or (kind == NUMBER and self.name.partition(".")[0] in _EXACT):
            return INDEX
        return kind

    @staticmethod
    def _returned(schema: Any) -> tuple[int | str, ...]:
        """Returns the arguments that are results because they were written, by position or name."""
        by_alias = {}
        for i, a in enumerate(schema.arguments):
            if a.alias_info is not None and a.alias_info.is_write:
                for name in a.alias_info.before_set:
                    by_alias[name] = a.name if a.kwarg_only else i
        found: list[int | str] = []
        for r in schema.returns:
            if r.alias_info is not None and r.alias_info.is_write:
                found.extend(by_alias[name] for name in r.alias_info.before_set)
        return tuple(found)

    def specs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensor_type: type, device: str
    ) -> tuple[tuple[c.Spec, ...], tuple[tuple[str, c.Spec], ...]]:
        """Returns the template's arguments, with holes in the order in which ``dispatch`` fills them."""

        def spec(kind: int, value: Any) -> c.Spec:
            if isinstance(value, tensor_type):
                return c.Hole(True)
            if value is None:
                return None
            if isinstance(value, torch.device):
                return c.Device(device)
            if kind == TENSORS:
                return c.Items(tuple(None if v is None else c.Hole(True) for v in value))
            if kind == NUMBERS and not any(isinstance(v, complex) for v in value):
                return c.Items(tuple(c.Hole(False) for _ in value))
            if kind <= INDEX and type(value) in (int, float, bool):
                return c.Hole(False)
            return codec.to_spec(value)

        return (
            tuple(spec(k, a) for k, a in zip(self.kinds, args, strict=False)),
            tuple((name, spec(self.kwkinds[name], v)) for name, v in kwargs.items()),
        )


def holes_of(specs: tuple[Any, ...]) -> Iterator[bool]:
    """Returns for each of a Call's arguments whether it is a tensor. ``specs``: the positional ones and the named."""

    def walk(spec: c.Spec) -> Iterator[bool]:
        if isinstance(spec, c.Hole):
            yield spec.tensor
        elif isinstance(spec, c.Items):
            for item in spec.items:
                yield from walk(item)

    positional, named = specs
    for spec in (*positional, *(spec for _, spec in named)):
        yield from walk(spec)


class Plan:
    """The plan of one signature on one node: the template that a call sends, and the metadata of its results."""

    __slots__ = (
        "foreseen",
        "generation",
        "heavy",
        "kind",
        "meta",
        "new",
        "place",
        "refusals",
        "shapes",
        "specs",
        "template",
        "values",
    )

    def __init__(
        self, kind: int, place: Place, specs: tuple[Any, ...], shapes: Any, outs: int, site: Site | None
    ) -> None:
        self.kind = kind
        #: for a VIEW: no node has compared its geometry yet
        self.new = True
        #: for a VIEW: the numbers among its arguments, which go into the call (its key has them all). For WARNS: its
        #: kind otherwise, whether it warns each time, and the value that operands have in a trial
        self.values: tuple[Any, ...] = ()
        #: for SHARING: the errors of operands that overlap, by which of them lie in the same memory
        self.refusals: dict[tuple[int, ...], RuntimeError | None] = {}
        self.place = place
        self.specs: tuple[Any, ...] = (*specs, outs)
        self.foreseen = False  #: the script warns of its calls
        #: a Meta for ONE; nested metas and None for MANY; new geometries of the written arguments for RESHAPED
        self.shapes = shapes
        self.meta: Meta | None = shapes if isinstance(shapes, Meta) else None
        #: for MANY: all its tensors together are as much as a large one
        self.heavy = kind == MANY and _bytes(shapes) >= large(place.outbox)
        self.generation = place.home.generation
        self.template = self.define(site)

    def define(self, site: Site | None) -> int:
        """Defines the template if need be, and returns its number; ``template`` holds the number as long as the node's
        generation is the plan's."""
        name, args, kwargs, outs = self.specs
        return self.place.define(name, args, kwargs, outs, site, self.foreseen)

    def warn(self, each: bool, value: int, site: Site | None) -> None:
        """Has the script warn of the plan's calls, of ``each`` or of the next one, by a trial with operands of this
        value."""
        self.values, self.kind, self.foreseen = (self.kind, each, value), WARNS, True
        self.template = self.define(site)


def _bytes(metas: Any) -> int:
    return sum([meta.nbytes for meta in tree_leaves(metas) if isinstance(meta, Meta)])


ONE = 0  #: one new tensor
WRITTEN = 1  #: no new tensor: an argument was written
MANY = 2  #: several new tensors
RESHAPED = 3  #: an argument was written and has another geometry now
VIEW = 4  #: one alias; costs no command until it is used
SHARING = 5  #: as WRITTEN, but other operands may lie in the same memory
WARNS = 6  #: one of the others (``values`` has it), of which the script warns first
