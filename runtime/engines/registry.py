"""Engines by the names that users give (``engine="..."``). A new one: one class, and one line here."""

from __future__ import annotations

from collections.abc import Callable

from ..interpreter import Interpreter
from ..program import Engine
from .choice import Choice

ENGINES: dict[str, Callable[..., Engine]] = {
    "interpreter": lambda program, builder: Interpreter(program),
    "inductor": lambda program, builder: Choice(program, Interpreter(program), "inductor", builder),
    "auto": lambda program, builder: Choice(program, Interpreter(program), "auto", builder),
}
