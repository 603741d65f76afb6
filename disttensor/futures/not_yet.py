"""A Work refuses to be used as the value that it stands for: ``work + 1``, ``work[0]``, ``float(work)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

_OPERATORS = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift"),
    *("and", "or", "xor"),
)
_SPECIAL = (
    *(f"__{prefix}{name}__" for name in _OPERATORS for prefix in ("", "r")),
    *("__neg__", "__pos__", "__abs__", "__invert__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__float__", "__int__", "__index__", "__complex__", "__round__", "__trunc__", "__floor__", "__ceil__"),
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__len__", "__array__"),
)


def _words(what: str) -> str:
    return (
        f"a Work is a value on its way, and not the value ({what}): work.result() waits for it and returns it, "
        "work.wait() waits for its end only"
    )


class NotYet:
    """A value on its way, and not that value: what a value would do raises TypeError that says how to get it."""

    def __bool__(self) -> bool:
        """Returns True, as objects do, so that ``if work:`` means that there is one."""
        return True

    def __format__(self, spec: str) -> str:
        if spec:
            raise TypeError(_words(f"format {spec!r}"))
        return str(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: object = (), kwargs: object = None) -> NoReturn:
        """Raises TypeError: torch has been given a Work in the place of a tensor."""
        raise TypeError(_words(getattr(func, "__name__", str(func))))

    if not TYPE_CHECKING:  # to a checker it has neither these attributes nor the operators below

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(text if name.startswith("_") else _words(text), name=name, obj=self)


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: NotYet, *_: object, **__: object) -> NoReturn:
        raise TypeError(_words(name))

    return refuse


for _name in _SPECIAL:
    setattr(NotYet, _name, _refusing(_name))
