"""The hints at what to send in place of a value that can't cross a wire."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

#: For each class, the expression that gives the same content as something that can cross. Classes first that are
#: subclasses of others here.
_INSTEAD = {
    "numpy.ndarray": "numpy.asarray(x)",
    "numpy.generic": "x.item()",
    "torch.nn.modules.module.Module": "x.state_dict()",
    "torch.optim.optimizer.Optimizer": "x.state_dict()",
    "torch.device": "str(x)",
    "pandas.core.frame.DataFrame": "x.to_dict()",
    "pandas.core.series.Series": "x.to_numpy()",
    "datetime.datetime": "datetime.fromisoformat(x.isoformat())",
    "enum.Enum": "x.value",
    "builtins.BaseException": "repr(x)",
    "builtins.memoryview": "bytes(x)",
    "types.SimpleNamespace": "vars(x)",
    "collections.abc.Iterator": "list(x)",
    "os.PathLike": "pathlib.Path(x)",
    "builtins.str": "str(x)",
    "builtins.bytes": "bytes(x)",
    "builtins.int": "int(x)",
    "builtins.float": "float(x)",
    "builtins.dict": "dict(x)",
    "builtins.list": "list(x)",
    "builtins.tuple": "tuple(x)",
    "builtins.set": "set(x)",
}


def instead(value: Any) -> str:
    """Returns a hint: "for x return list(x)"."""
    names = [f"{base.__module__}.{base.__qualname__}" for base in type(value).__mro__]
    if isinstance(value, Iterator):
        names.append("collections.abc.Iterator")
    if isinstance(value, os.PathLike):
        names.append("os.PathLike")
    found = next((_INSTEAD[name] for name in names if name in _INSTEAD), None)
    return f"for x return {found}" if found else "return what it is made of, or a dataclass"
