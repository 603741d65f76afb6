"""``python -m disttensor.run``: the command dtrun. As a module it can be called, for its name is ``dt.run``'s too."""

from __future__ import annotations

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    """Importing this module makes it ``disttensor.run``, which is the function's name: so it does as that."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from .tasks.functions import run

        return run(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable

if __name__ == "__main__":
    from .cli.command import main

    sys.exit(main())
