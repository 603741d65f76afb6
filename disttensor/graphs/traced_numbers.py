"""Python numbers that each replay of a graph gives anew: a learning rate, an optimizer's count of its steps.

While a graph is recorded such a number is a `Number`: a float with a slightly different value, so that an operation's
argument can be recognised as this number by its bits. Arithmetic on it gives further Numbers. Their expressions are
kept as lines of Python, which a replay runs on its own numbers: exactly the arithmetic of the eager program.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, SupportsIndex

from ..dispatch.call_site import here
from ..runtime.master.failures import line_of
from ..runtime.process.generated_code import function
from ..runtime.process.spelling import shown
from ..runtime.protocol.errors import GraphError

_UNARY = {"-": operator.neg, "+": operator.pos}
_BINARY = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}
_COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


class Tape:
    """The arithmetic of a recording on the numbers that replays give."""

    def __init__(self) -> None:
        self._sources: list[Callable[[], Any]] = []
        self._lines: list[str] = []
        self._known: dict[str, str] = {}  #: an expression -> the variable that holds it
        self._marks: dict[float, str] = {}  #: the value that stands for a Number -> its variable
        self._used: dict[str, int] = {}  #: variable -> its index in the result of ``compiled()()``
        self._parents: dict[str, tuple[str, ...]] = {}
        self._reached: set[str] = set()

    def root(self, value: float, source: Callable[[], Any]) -> Number:
        """Returns a Number that ``source`` gives before each replay, and that is ``value`` now."""
        self._sources.append(source)
        name = f"x{len(self._sources) - 1}"
        return self._number(value, name, ())

    def derived(self, value: Any, text: str, parents: tuple[str, ...]) -> Number:
        """Returns the Number for an expression over variables."""
        name = self._known.get(text)
        if name is None:
            name = self._known[text] = f"v{len(self._lines)}"
            self._lines.append(f"{name} = {text}")
        return self._number(value, name, parents)

    def check(self, text: str, parents: tuple[str, ...], value: Any) -> None:
        """Notes that the program took a branch because ``text`` is ``value``: a replay where it is not is refused."""
        key = f"check {text}"
        if key not in self._known:
            self._known[key] = ""
            self._lines.append(f"if ({text}) != {value!r}: raise changed({text!r}, {line_of(here(1))!r})")
        self._reach(parents)

    def _number(self, value: Any, name: str, parents: tuple[str, ...]) -> Number:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise GraphError(f"a number that replays give anew became {shown(value)}, which is not a real number")
        mark = self._mark(float(value))
        self._marks[mark] = name
        self._parents.setdefault(name, parents)
        number = Number(mark)
        number.real_value, number.tape, number.name = value, self, name
        return number

    def _mark(self, value: float) -> float:
        """Returns a value that stands for a Number and that no other has: near the real one, on the side of zero, where
        operators' ranges end less often."""
        odd = 2 * len(self._marks) + 1
        mark = value - value * odd * 2.0**-40 if math.isfinite(value) else 0.0
        while mark in self._marks or mark in (value, 0.0):
            odd += 2
            mark = odd * 1.2345678901234567e-290
        return mark

    def find(self, value: Any) -> int | None:
        """Returns the index, in the result of ``compiled()()``, of the Number that an operation's argument stands for;
        None if it stands for none."""
        name = self._marks.get(value) if type(value) is float else None
        if name is None:
            return None
        self._reach((name,))
        return self._used.setdefault(name, len(self._used))

    def _reach(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in self._reached:
                self._reached.add(name)
                self._reach(self._parents[name])

    def reached(self, number: Number) -> bool:
        """Returns whether an operation or a branch depends on a Number."""
        return number.name in self._reached

    def compiled(self) -> Callable[[], tuple[float, ...]]:
        """Returns a function that evaluates all used numbers. It raises GraphError where the program would take another
        branch."""
        names: dict[str, Any] = {"changed": Changed, "inf": math.inf, "nan": math.nan, "sources": tuple(self._sources)}
        roots = "".join(f"x{i}, " for i in range(len(self._sources)))
        text = ["def numbers():", f"    [{roots}] = [source() for source in sources]"]
        text += [f"    {line}" for line in self._lines]
        text.append(f"    return ({''.join(f'{name}, ' for name in self._used)})")
        return function("numbers", "\n".join(text), names)  # type: ignore[no-any-return]


class Changed(GraphError):
    """The program would take another branch than the one that was recorded."""

    def __init__(self, text: str, line: str) -> None:
        super().__init__(
            f"what was recorded goes another way at {line}, where it depends on a number ({text}); record it again"
        )


def _plain(value: Any) -> Any:
    return value.real_value if type(value) is Number else value


def _text(value: Any) -> str:
    if type(value) is Number:
        return value.name
    return f"({float.__repr__(value)})" if isinstance(value, float) else f"({int(value)!r})"


def _names(*values: Any) -> tuple[str, ...]:
    return tuple(v.name for v in values if type(v) is Number)


def _binary(symbol: str, swapped: bool) -> Callable[[Number, Any], Any]:
    compute = _BINARY[symbol]

    def method(self: Number, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        a, b = (other, self) if swapped else (self, other)
        return self.tape.derived(compute(_plain(a), _plain(b)), f"{_text(a)} {symbol} {_text(b)}", _names(a, b))

    return method


def _comparison(symbol: str) -> Callable[[Number, Any], Any]:
    compare = _COMPARISONS[symbol]

    def method(self: Number, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        result = compare(_plain(self), _plain(other))
        self.tape.check(f"{_text(self)} {symbol} {_text(other)}", _names(self, other), result)
        return result

    return method


class Number(float):
    """A float of a recording, whose expression each replay computes anew."""

    real_value: Any
    tape: Tape
    name: str

    for _symbol, _name in zip(_BINARY, ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"), strict=True):
        locals()[f"__{_name}__"] = _binary(_symbol, False)
        locals()[f"__r{_name}__"] = _binary(_symbol, True)
    for _symbol, _name in zip(_COMPARISONS, ("lt", "le", "gt", "ge", "eq", "ne"), strict=True):
        locals()[f"__{_name}__"] = _comparison(_symbol)
    del _symbol, _name

    def __neg__(self) -> Number:
        return self.tape.derived(-self.real_value, f"-{self.name}", (self.name,))

    def __pos__(self) -> Number:
        return self

    def __abs__(self) -> Number:
        return self.tape.derived(abs(self.real_value), f"abs({self.name})", (self.name,))

    def _fixed(self, text: str, value: Any) -> Any:
        """Returns ``value``, an ordinary number or boolean made of this one: a replay where it differs is refused."""
        self.tape.check(f"{text.format(self.name)}", (self.name,), value)
        return value

    def __bool__(self) -> bool:
        return bool(self._fixed("bool({})", bool(self.real_value)))

    def __int__(self) -> int:
        return int(self._fixed("int({})", int(self.real_value)))

    def __trunc__(self) -> int:
        return int(self)

    def __round__(self, ndigits: SupportsIndex | None = None) -> Any:
        digits = None if ndigits is None else int(ndigits)
        return self._fixed(f"round({{}}, {digits})", round(self.real_value, digits))

    def __floor__(self) -> int:
        return int(self._fixed("{} // 1", self.real_value // 1))

    def __ceil__(self) -> int:
        return -int(self._fixed("-{} // 1", -self.real_value // 1))

    def is_integer(self) -> bool:
        return bool(self._fixed("float({}).is_integer()", float(self.real_value).is_integer()))

    def __hash__(self) -> int:
        return float.__hash__(self)

    def __repr__(self) -> str:
        return repr(self.real_value)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.real_value, spec)
