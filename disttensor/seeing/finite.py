"""``dt.seeing.check_finite``: nodes look at what they compute, and the first NaN or infinity raises with its line."""

from __future__ import annotations

from typing import Self

from ..session import current
from ..session.session import Session


class check_finite:
    """Has all nodes look at what they compute in a ``with`` block: what has NaN or infinity fails with NonFiniteError.

    The error comes as those of other operations do, at the next point at which the script hears of it, and names the
    line, the operator, the node and how many NaN and infinities there are: docs/SEEING.md says what is looked at. The
    results of what has failed are lost. Entering and leaving the block return at once; ``begin()`` and ``end()`` do the
    same for a whole job.

    >>> x = torch.zeros(3, device="node:0")
    >>> with dt.seeing.check_finite():
    ...     y = x / x
    >>> try:
    ...     y.sum().item()
    ... except dt.errors.NonFiniteError as error:
    ...     print(error.operator, error.nan)
    aten::div.Tensor 3

    Args:
        inf: whether infinities count, too. Not so for models that fill masks with them.

    To begin raises DisttensorError without a session.
    """

    def __init__(self, *, inf: bool = True) -> None:
        self._inf = bool(inf)
        self._session: Session | None = None

    def __repr__(self) -> str:
        return f"<check_finite inf={self._inf} {'on' if self._session is not None else 'off'}>"

    def begin(self) -> None:
        """Has nodes look at what is issued from now on. Returns at once; twice is fine."""
        if self._session is None:
            self._session = session = current.session()
            session.switches.check_finite(self._inf, True)

    def end(self) -> None:
        """Ends that, unless another check is on. Returns at once; twice is fine."""
        session, self._session = self._session, None
        if session is not None:
            session.switches.check_finite(self._inf, False)

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
