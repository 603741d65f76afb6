"""The current node: what ``with dt.node(1):`` sets. One per thread and per asyncio task (a contextvar)."""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType

from . import state

_current: ContextVar[int] = ContextVar("disttensor_node", default=0)


class node:
    """Makes node ``k`` the current one inside of a ``with`` block: where factories put their tensors.

    An operation runs where its operands live, whatever node is current. Blocks nest; the same object can be entered
    again. Raises ValueError for a node that does not exist, TypeError for what is no integer.
    """

    def __init__(self, k: int) -> None:
        state.session().places.at(k)
        self.index = k
        self._tokens: list[Token[int]] = []

    def __enter__(self) -> node:
        self._tokens.append(_current.set(self.index))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.reset(self._tokens.pop())

    def __repr__(self) -> str:
        return f"node({self.index})"


def current_node() -> int:
    """The node that factories use now: 0 unless inside of a ``node(k)`` block."""
    return _current.get()
