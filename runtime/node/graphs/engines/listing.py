"""The listing of a Program and its inputs' geometry as text, for the compiling process and as the cache's key."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from ...store import memory
from ..program import Line, Num, Program, Reg


class NotCompilable(Exception):
    """A program can't be compiled, for the reason given: it stays with the interpreter."""


@dataclass(frozen=True)
class Given:
    """An input's geometry. ``memory`` is the index of the first input that shares its memory.

    ``offset`` (elements) and ``extent`` (the memory's bytes) are 0 for one that shares it with no other input.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    memory: int
    extent: int


def input_geometry(inputs: Sequence[torch.Tensor]) -> tuple[Given, ...]:
    """Returns the inputs' geometry. Raises NotCompilable for inputs that are not plain CPU memory."""
    groups: dict[int, list[int]] = {}
    for i, tensor in enumerate(inputs):
        if not _plain(tensor):
            raise NotCompilable(f"input {i} is a {tensor.layout} tensor on {tensor.device}")
        groups.setdefault(whose(tensor, i), []).append(i)
    out: list[Given | None] = [None] * len(inputs)
    for members in groups.values():
        shared = len(members) > 1
        for i in members:
            t = inputs[i]
            offset, extent = (int(t.storage_offset()), t.untyped_storage().nbytes()) if shared else (0, 0)
            out[i] = Given(t.dtype, tuple(t.shape), t.stride(), offset, members[0], extent)
    return tuple(g for g in out if g is not None)


def whose(tensor: torch.Tensor, i: int) -> int:
    """Returns a key: equal for inputs that share memory. Input ``i``, if it has no elements, shares it with none."""
    return memory(tensor) if tensor.numel() else -i - 1


def _plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()
    )


def dump(program: Program, inputs: Sequence[Given]) -> str:
    """Lists a program as JSON, its registers counted anew, so that the same recording gives the same text.

    Raises NotCompilable for arguments that have no text.
    """
    names = counted(program)
    lines = [
        [
            line.op.name(),
            [_text(a, names) for a in line.args],
            {k: _text(v, names) for k, v in line.kwargs.items()},
            [names[o] for o in line.outs],
            line.single,
        ]
        for line in program.lines
    ]
    return json.dumps(
        {
            "lines": lines,
            "inputs": [names[i] for i in program.inputs],
            "outputs": [names[o] for o in program.outputs],
            "numbers": program.numbers,
            "given": [[str(g.dtype), g.size, g.stride, g.offset, g.memory, g.extent] for g in inputs],
        }
    )


def counted(program: Program) -> dict[int, int]:
    """Numbers the program's registers in the order in which they get their values."""
    registers = (*program.inputs, *(o for line in program.lines for o in line.outs))
    return {register: i for i, register in enumerate(dict.fromkeys(registers))}


def parse(text: str) -> tuple[Program, tuple[Given, ...]]:
    """Reads what ``dump`` wrote."""
    raw = json.loads(text)
    lines = tuple(
        Line(
            _operator(op),
            tuple(_value(a) for a in args),
            {k: _value(v) for k, v in kwargs.items()},
            tuple(outs),
            single,
        )
        for op, args, kwargs, outs, single in raw["lines"]
    )
    program = Program(lines, tuple(raw["inputs"]), tuple(raw["outputs"]), raw["numbers"])
    inputs = tuple(
        Given(_attribute(d), tuple(size), tuple(stride), offset, memory, extent)
        for d, size, stride, offset, memory, extent in raw["given"]
    )
    return program, inputs


def _text(value: Any, names: dict[int, int]) -> object:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [_text(v, names) for v in value]
        case Reg(index):
            return {"reg": names[index]}
        case Num(index):
            return {"num": index}
        case complex():
            return {"complex": [value.real, value.imag]}
        case torch.device():
            return {"device": str(value)}
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {"torch": str(value)}
        case _:
            raise NotCompilable(f"an argument is a {type(value).__name__}")


def _value(text: Any) -> object:
    match text:
        case list():
            return [_value(t) for t in text]
        case {"reg": index}:
            return Reg(index)
        case {"num": index}:
            return Num(index)
        case {"complex": [real, imag]}:
            return complex(real, imag)
        case {"device": name}:
            return torch.device(name)
        case {"torch": name}:
            return _attribute(name)
        case _:
            return text


def _attribute(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))


def _operator(name: str) -> OpOverload:
    qualified, _, overload = name.partition(".")
    namespace, _, base = qualified.partition("::")
    op = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    assert isinstance(op, OpOverload), name
    return op
