"""``python -m disttensor.run``: the command dtrun. The module can be called, because its name is ``dt.run``'s too."""

from __future__ import annotations

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    """A module that can be called: importing it makes it ``disttensor.run``, so it acts as the function of that
    name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from .tasks.functions import run

        return run(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable

if __name__ == "__main__":
    from .cli.command import main

    sys.exit(main())
