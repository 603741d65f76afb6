"""Finds whether a Program can be compiled to do what the interpreter does, by running it on fake tensors.

Generated code has no errors: an exception inside one of its parallel regions would end the process, and one anywhere
else would come in the middle of writes. So a program fits if none of its lines can fail; for indices into tensors that
is checked, by eager code, before each replay (``CompiledCall.checks``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...store import memory
from ...template import HIDDEN_WRITES
from ..program import Line, Num, Program, Reg
from .draws import IN_PLACE, LIKE, drawn
from .listing import Given, NotCompilable
from .numbers import call


@dataclass
class CompiledCall:
    """The way a node calls the compiled library. Everything in it is plain, for JSON."""

    #: per argument of the library, before the numbers: ["input", i]; ["base", i, elements]: the memory of input i,
    #: flat, for the inputs that share it; ["draw", k]
    arguments: list[list[Any]] = field(default_factory=list)
    #: random tensors to draw before a call, in order: [line, size, stride, dtype] of the tensor to fill, or [line]
    draws: list[list[Any]] = field(default_factory=list)
    #: lines that compute, from inputs, the indices to check
    fence: list[int] = field(default_factory=list)
    #: [register, low, high, also]: all elements within low <= x < high, or equal to ``also``
    checks: list[list[Any]] = field(default_factory=list)
    #: per output of the program: [source, index] or [source, index, size, stride, offset] of a view of it; sources are
    #: "input", "draw" and "made", an output of the library
    results: list[list[Any]] = field(default_factory=list)
    #: registers that the library gives back, and their size and stride
    made: list[list[Any]] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        return asdict(self)


class Analysis:
    """Runs a program on fake tensors, and finds where each register's memory comes from."""

    def __init__(self, program: Program, given: Sequence[Given]) -> None:
        """To be called under a FakeTensorMode. Raises NotCompilable."""
        self.program = program
        self.given = given
        self.fakes: dict[int, Tensor] = {}
        self.maker: dict[int, int] = {}  #: register -> line
        self.below: dict[int, int] = {}  #: register of indices -> a bound that all are below
        self.written: set[int] = set()
        self.plan = CompiledCall()
        self._indexed: list[tuple[int, int, int, int | None]] = []
        for register, tensor in zip(program.inputs, inputs_of(given), strict=True):
            self.fakes[register] = tensor
        for i, line in enumerate(program.lines):
            self._line(i, line)
        self._arguments()
        self._results()
        self._fence()

    # ---- lines -----------------------------------------------------------------------------------------------------

    def _line(self, i: int, line: Line) -> None:
        op, name = line.op, line.op.name()
        base = name.partition(".")[0].removeprefix("aten::")
        if op.namespace not in ("aten", "prims"):
            raise NotCompilable(f"{name} is not torch's own")
        if base in UNFIT or base.startswith(UNFIT_FAMILIES):
            raise NotCompilable(f"{name} may fail, or changes a tensor's geometry")
        args = tuple(self._fill(a) for a in line.args)
        kwargs = {k: self._fill(v) for k, v in line.kwargs.items()}
        if base in DIVISIONS or kwargs.get("rounding_mode"):
            _check_division(name, args)
        if torch.Tag.nondeterministic_seeded in op.tags:
            self._random(i, line, base)
        if base in INDEXING:
            named = dict(zip((a.name for a in op._schema.arguments), line.args, strict=False)) | line.kwargs
            self._indexed += INDEXING[base](named, self.fakes)
        self._writes(line)
        try:
            outs = tensors_of(call(op, args, kwargs))
        except Exception as e:  # its result depends on data, say; a fake tensor has none
            raise NotCompilable(f"{name}: {type(e).__name__}: {e}") from None
        if line.outs:
            if len(outs) != len(line.outs):
                raise NotCompilable(f"{name} gave {len(outs)} tensors")
            for register, fake in zip(line.outs, outs, strict=True):
                self.fakes[register], self.maker[register] = fake, i
            self._bound(line, base)

    def _fill(self, value: Any) -> Any:
        if isinstance(value, Reg):
            return self.fakes[value.index]
        if isinstance(value, Num):
            return 0.5
        return [self._fill(v) for v in value] if isinstance(value, list) else value

    def _writes(self, line: Line) -> None:
        for k, argument in enumerate(line.op._schema.arguments):
            info = argument.alias_info
            hidden = HIDDEN_WRITES.get(line.op._schema.name, ())
            if argument.name in hidden or (info is not None and info.is_write):
                value = line.args[k] if k < len(line.args) else line.kwargs.get(argument.name)
                for register in registers(value):
                    fake = self.fakes[register]
                    if torch._debug_has_internal_overlap(fake) == 1:
                        raise NotCompilable("it writes a tensor whose elements overlap")
                    self.written.add(memory(fake))

    def _random(self, i: int, line: Line, base: str) -> None:
        rest = [*line.args[1:], *line.kwargs.values()]
        if any(_holds(v, (Reg, Num)) for v in rest) or _holds(line.kwargs.get("generator"), torch.Generator):
            raise NotCompilable(f"what {line.op.name()} draws depends on tensors or numbers that change")
        first = line.args[0] if line.args else None
        if isinstance(first, Num):
            raise NotCompilable(f"what {line.op.name()} draws depends on a number that changes")
        if not isinstance(first, Reg):
            self.plan.draws.append([i])
            return
        if base not in IN_PLACE | LIKE:
            raise NotCompilable(f"what {line.op.name()} draws depends on a tensor")
        fake = self.fakes[first.index]
        self.plan.draws.append([i, list(fake.shape), list(fake.stride()), str(fake.dtype)])

    def _bound(self, line: Line, base: str) -> None:
        first = line.args[0] if line.args else None
        if base in SELECTIONS:
            assert isinstance(first, Reg)
            self.below[line.outs[-1]] = _selected(self.fakes[first.index], line, base)
        elif base == "arange" and isinstance(line.args[-1], int) and all(isinstance(a, int) for a in line.args):
            start, end, step = (0, line.args[0], 1) if len(line.args) == 1 else (*line.args, 1)[:3]
            if start >= 0 and step > 0 and not self.fakes[line.outs[0]].dtype.is_floating_point:
                self.below[line.outs[0]] = end
        elif base in SHAPES and isinstance(first, Reg) and first.index in self.below:
            for register in line.outs:
                self.below[register] = self.below[first.index]

    # ---- the call --------------------------------------------------------------------------------------------------

    def _arguments(self) -> None:
        based = {
            g.memory
            for i, g in enumerate(self.given)
            if g.extent and memory(self.fakes[self.program.inputs[i]]) in self.written
        }
        for i, g in enumerate(self.given):
            if g.memory not in based:
                self.plan.arguments.append(["input", i])
            elif g.memory == i:
                if any(o.dtype != g.dtype for o in self.given if o.memory == i):
                    raise NotCompilable("it writes memory that inputs of different dtypes share")
                self.plan.arguments.append(["base", i, g.extent // g.dtype.itemsize])
        self.plan.arguments += [["draw", k] for k in range(len(self.plan.draws))]

    def _results(self) -> None:
        """Plans outputs as views of an input, or of the register that first had their memory: aliases as in eager."""
        owners = {memory(self.fakes[r]): ("input", i, r) for i, r in reversed(list(enumerate(self.program.inputs)))}
        for k, (i, *_) in enumerate(self.plan.draws):
            for register in drawn(self.program.lines[i]):
                owners[memory(self.fakes[register])] = ("draw", k, register)
        whole: dict[int, int] = {}
        # an output itself is preferred to the tensor that it is a view of
        for register in (*self.program.outputs, *self.maker):
            if _whole(self.fakes[register]):
                whole.setdefault(memory(self.fakes[register]), register)
        for register in self.program.outputs:
            fake = self.fakes[register]
            where = memory(fake)
            if register in self.program.inputs:
                self.plan.results.append(["input", self.program.inputs.index(register)])
                continue
            if where not in owners:
                if where not in whole:
                    raise NotCompilable("an output's memory has gaps")
                base = self.fakes[whole[where]]
                owners[where] = ("made", len(self.plan.made), whole[where])
                self.plan.made.append([whole[where], list(base.shape), list(base.stride())])
            source, i, owner = owners[where]
            if owner == register:
                self.plan.results.append([source, i])
                continue
            if fake.dtype != self.fakes[owner].dtype or fake.is_conj() or fake.is_neg():
                raise NotCompilable("an output is a view in another dtype")
            offset = int(fake.storage_offset()) - int(self.fakes[owner].storage_offset())
            self.plan.results.append([source, i, list(fake.shape), list(fake.stride()), offset])

    # ---- indices ---------------------------------------------------------------------------------------------------

    def _fence(self) -> None:
        lines: set[int] = set()
        for register, low, high, also in self._indexed:
            fake = self.fakes[register]
            if memory(fake) in self.written:
                raise NotCompilable("an index is written in the program that uses it")
            if fake.numel() == 0 or fake.dtype == torch.bool or self.below.get(register, high + 1) <= high:
                continue
            lines |= self._slice(register)
            check = [register, low, high, also]
            if check not in self.plan.checks:
                self.plan.checks.append(check)
        self.plan.fence = sorted(lines)

    def _slice(self, register: int) -> set[int]:
        """Returns the lines that compute a register of indices.

        They must be cheap, and must read the values that they will read when their turn comes.
        """
        if memory(self.fakes[register]) in self.written:
            raise NotCompilable("an index is written before it is used")
        i = self.maker.get(register)
        if i is None:
            return set()
        line = self.program.lines[i]
        fake = self.fakes[register]
        if fake.dtype.is_floating_point or fake.dtype.is_complex or torch.Tag.nondeterministic_seeded in line.op.tags:
            raise NotCompilable("an index is computed from other than indices")
        if _holds([*line.args, *line.kwargs.values()], Num):
            raise NotCompilable("an index is computed from a number that changes")
        return {i}.union(*(self._slice(r) for v in (*line.args, *line.kwargs.values()) for r in registers(v)))


def inputs_of(given: Sequence[Given]) -> list[Tensor]:
    """Makes tensors of that geometry, which share memory as the inputs do, with nothing in them."""
    out: list[Tensor] = []
    for g in given:
        if not g.extent:
            out.append(torch.empty_strided(g.size, g.stride, dtype=g.dtype))
            continue
        flat = torch.empty(g.extent, dtype=torch.uint8) if g.memory == len(out) else out[g.memory]
        view = torch.empty(0, dtype=g.dtype).set_(flat.untyped_storage(), g.offset, g.size, g.stride)
        out.append(view)
    return out


def registers(value: Any) -> Iterator[int]:
    if isinstance(value, Reg):
        yield value.index
    elif isinstance(value, list):
        for v in value:
            yield from registers(v)


def tensors_of(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [t for r in result for t in tensors_of(r)] if isinstance(result, (list, tuple)) else []


def _selected(x: Tensor, line: Line, base: str) -> int:
    """Returns a bound that all indices selected from ``x`` are below."""
    if base == "max_pool2d_with_indices":
        return int(x.shape[-1] * x.shape[-2])
    at = SELECTIONS[base]
    dim = line.args[at] if len(line.args) > at else line.kwargs.get("dim", None if base[:3] == "arg" else -1)
    return int(x.numel() if dim is None else x.shape[dim] if x.dim() else 1)


def _holds(value: Any, types: Any) -> bool:
    return any(_holds(v, types) for v in value) if isinstance(value, list) else isinstance(value, types)


def _dense(x: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(x))


def _whole(x: Tensor) -> bool:
    """Returns whether the tensor's elements are all of its memory."""
    return (
        _dense(x) and x.untyped_storage().nbytes() == x.numel() * x.dtype.itemsize and not (x.is_conj() or x.is_neg())
    )


def _check_division(name: str, args: tuple[Any, ...]) -> None:
    """Refuses integers that may be divided by zero: eager raises, generated code ends the process."""
    x, y = args[0], args[1]
    whole = [not t.dtype.is_floating_point if isinstance(t, Tensor) else isinstance(t, int) for t in (x, y)]
    if all(whole) and not (isinstance(y, int) and y > 0):
        raise NotCompilable(f"{name} of integers")


#: Operators that may fail on the data that they are given, or that change a register's geometry.
UNFIT = frozenset(
    {
        *("resize_", "resize_as_", "set_", "binary_cross_entropy", "binary_cross_entropy_backward"),
        *("_assert_async", "_local_scalar_dense", "_ctc_loss", "inverse", "logdet", "slogdet", "det"),
        *("multinomial", "bincount", "histc", "geqrf", "ormqr", "lstsq", "triangular_solve", "multi_margin_loss"),
        *("multilabel_margin_loss_forward", "max_unpool2d", "max_unpool3d", "repeat_interleave", "_embedding_bag"),
        *("_embedding_bag_forward_only", "embedding_renorm_", "segment_reduce", "_pdist_forward", "rrelu_with_noise"),
        *("masked_scatter", "masked_scatter_", "put", "put_", "searchsorted", "lift_fresh_copy", "rename_"),
    }
)
#: Operators whose names begin so are unfit, too. The last look at whether gradients are recorded, and the node tells
#: them (node/op_fast_path.py).
UNFIT_FAMILIES = (
    "linalg_",
    "_linalg_",
    "cholesky",
    "lu_",
    "_lu_",
    "_fft",
    "quantize",
    "_weight_norm_interface",
    "mkldnn_",
)

DIVISIONS = frozenset({"remainder", "remainder_", "fmod", "fmod_", "floor_divide", "floor_divide_"}) | {
    *("pow", "pow_", "__rshift__", "__lshift__", "gcd", "gcd_", "lcm", "lcm_", "bitwise_left_shift"),
    "bitwise_right_shift",
}

#: Operators whose last output holds indices along a dimension; the place of that dimension among their arguments.
SELECTIONS = {
    "argmax": 1,
    "argmin": 1,
    "sort": 1,
    "argsort": 1,
    "max": 1,
    "min": 1,
    "topk": 2,
    "max_pool2d_with_indices": 1,
}

#: Operators whose outputs hold elements of their first argument and no others.
SHAPES = frozenset(
    {
        *("view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "select", "slice", "clone", "detach"),
        *("_unsafe_view", "alias", "reshape", "narrow", "flatten", "unbind", "split", "as_strided", "contiguous"),
    }
)

Check = tuple[int, int, int, int | None]
Indexed = Callable[[dict[str, Any], dict[int, Tensor]], list[Check]]


def _along(name: str = "index") -> Indexed:
    """Returns the checks of operators with ``self``, ``dim`` and an index along it."""

    def checks(n: dict[str, Any], fakes: dict[int, Tensor]) -> list[Check]:
        x = fakes[n["self"].index]
        return [(n[name].index, 0, x.shape[n["dim"]] if x.dim() else 1, None)]

    return checks


def _several(n: dict[str, Any], fakes: dict[int, Tensor]) -> list[Check]:
    x = fakes[n["self"].index]
    out: list[Check] = []
    dim = 0
    for index in n["indices"]:
        if index is not None:
            fake = fakes[index.index]
            if fake.dtype in (torch.bool, torch.uint8):
                dim += fake.dim()
                continue
            out.append((index.index, -x.shape[dim], x.shape[dim], None))
        dim += 1
    return out


def _classes(n: dict[str, Any], fakes: dict[int, Tensor]) -> list[Check]:
    x = fakes[n["self"].index]
    return [(n["target"].index, 0, x.shape[1 if x.dim() > 1 else 0], n.get("ignore_index", -100))]


INDEXING: dict[str, Indexed] = {
    "embedding": lambda n, f: [(n["indices"].index, 0, f[n["weight"].index].shape[0], None)],
    "embedding_dense_backward": lambda n, f: [(n["indices"].index, 0, n["num_weights"], None)],
    "take": lambda n, f: [(n["index"].index, -f[n["self"].index].numel(), f[n["self"].index].numel(), None)],
    "max_pool2d_with_indices_backward": lambda n, f: [
        (n["indices"].index, 0, f[n["self"].index].shape[-1] * f[n["self"].index].shape[-2], None)
    ],
    **dict.fromkeys(("index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put"), _several),
    **dict.fromkeys(("_index_put_impl_",), _several),
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"), _classes),
    **{
        f"{base}{tail}": _along()
        for base in ("gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add", "index_copy")
        for tail in ("", "_")
    },
    **{name: _along() for name in ("index_fill", "index_fill_", "index_reduce", "index_reduce_")},
}
