"""The hints at what to send in place of a value that can't cross a wire."""

from __future__ import annotations

from typing import Any

from .announced import found_in, mro_of, name_of

#: For each class, the expression that gives the same content as something that can cross. Classes first that are
#: subclasses of others here.
_INSTEAD = {
    "numpy.ndarray": "numpy.asarray(x)",
    "numpy.generic": "x.item()",
    "torch.nn.modules.module.Module": "x.state_dict()",
    "torch.optim.optimizer.Optimizer": "x.state_dict()",
    "torch.device": "str(x)",
    "torch.storage.UntypedStorage": "torch.empty(0, dtype=torch.uint8).set_(x)",
    "torch.storage.TypedStorage": "torch.empty(0, dtype=x.dtype).set_(x)",
    "pandas.core.frame.DataFrame": "x.to_dict()",
    "pandas.core.series.Series": "x.to_numpy()",
    "datetime.datetime": "datetime.fromisoformat(x.isoformat())",
    "enum.Enum": "x.value",
    "builtins.BaseException": "repr(x)",
    "builtins.memoryview": "bytes(x)",
    "builtins.coroutine": "asyncio.run(x)",
    "_io._IOBase": "x.read()",
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
    kind = type(value)
    names = [name_of(base) for base in mro_of(kind)]
    if found_in(kind, "__next__") is not None:
        names.append("collections.abc.Iterator")
    if found_in(kind, "__fspath__") is not None:
        names.append("os.PathLike")
    found = next((_INSTEAD[name] for name in names if name in _INSTEAD), None)
    return f"for x return {found}" if found else "return what it is made of, or a dataclass"
