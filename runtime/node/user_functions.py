"""Runs users' functions on a node, and encodes their results.

Functions come pickled from the master only, over the authenticated control channel, and only through
``_loads_from_master``. Nothing goes back pickled: results are tensors and plain data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import msgspec
import torch

from ..protocol import commands as c
from ..protocol.errors import DisttensorError, ProtocolError
from ..protocol.failure_ids import attempt
from .interruption import Interruption
from .store import Other

#: The most bytes of a pickled function, or of the pickled arguments of one call.
MAX_PICKLE = 64 << 20
#: The most functions that are kept after their first call.
MAX_KEPT = 1024

Tensors = Callable[[int], torch.Tensor]  #: returns a tensor by its ref
#: Runs a function, given ``Tensors``; returns (plain data with tensors as extension values, those tensors).
Job = Callable[[Tensors], tuple[bytes, list[torch.Tensor]]]

_TENSOR, _TUPLE, _COMPLEX, _SET, _DICT = 1, 2, 3, 4, 5
_encoder = msgspec.msgpack.Encoder()


def key_of(data: bytes) -> bytes:
    """Returns the name under which pickled ``data`` is sent and kept."""
    return hashlib.blake2b(data, digest_size=32).digest()


class Worlds(Protocol):
    """Runs functions as ranks of a process group: see process_groups.py."""

    def within(self, told: c.World, job: Job) -> Job:
        """Returns a job that runs ``job`` as a rank of the process group ``told``."""

    def give_up(self, told: c.World) -> None:
        """Withdraws this rank, which does not take part: the others need not wait for it."""

    def has(self, told: c.World) -> bool:
        """Returns whether the process group still exists."""

    def close(self) -> None:
        """Leaves the current group, if there is one."""


class Functions:
    """Collects the pieces of pickled functions, keeps functions by digest, and runs them."""

    def __init__(self, allowed: str = "any", worlds: Worlds | None = None) -> None:
        self._allowed = allowed
        self._worlds = worlds
        self._pieces: dict[bytes, bytearray] = {}
        self._whole: dict[bytes, bytes] = {}
        self._kept: dict[bytes, _Function] = {}
        self._interruption = Interruption()

    def piece(self, key: bytes, data: bytes, last: bool) -> None:
        """Adds a piece. Raises ProtocolError when the pieces are too long or do not match the digest ``key``."""
        whole = self._pieces.setdefault(key, bytearray())
        whole += data
        if len(whole) > MAX_PICKLE:
            del self._pieces[key]
            raise ProtocolError(
                f"a pickled function or its arguments exceed {MAX_PICKLE >> 20} MiB; send tensors instead"
            )
        if last:
            done = bytes(self._pieces.pop(key))
            if key_of(done) != key:
                raise ProtocolError("a pickled function arrived damaged")
            self._whole[key] = done

    def claim(self, command: c.Run) -> Job:
        """Takes the pieces that have arrived for ``command``; returns the job that runs it, in any thread.

        Raises ProtocolError where they have not all arrived, or for a process group that can't be; DisttensorError
        where no functions are run.
        """
        # both are taken whatever happens: nobody else would take them
        code, arguments = self._whole.pop(command.function, b""), self._whole.pop(command.arguments, b"")
        if self._allowed == "none":
            raise DisttensorError("this node runs no user functions (functions='none')")
        function = _Function(code) if code else self._kept.get(command.function)
        if not arguments or function is None:
            raise ProtocolError("a function was to be run that has not arrived as a whole")
        if code and command.keep:
            while len(self._kept) >= MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[command.function] = function
        job: Job = partial(self._run, command, partial(_run, function, arguments))
        if command.world is None:
            return job
        if self._worlds is None:
            raise DisttensorError("this node has no process groups")
        return self._worlds.within(command.world, job)

    def cancel(self, request: int) -> None:
        """Raises KeyboardInterrupt in the function of a request, in whichever thread it runs; has it not begin where it
        has not. Called by the side channel's thread."""
        self._interruption.cancel(request)

    def _run(self, command: c.Run, job: Job, tensors: Tensors) -> tuple[bytes, list[torch.Tensor]]:
        return self._interruption.run(command.request, command.what, partial(job, tensors))

    def skip(self, command: c.Run) -> None:
        """Withdraws from the command's process group, if any: the command is not going to be run."""
        if command.world is not None and self._worlds is not None:
            self._worlds.give_up(command.world)

    def kept(self, command: c.Run) -> bool:
        """Returns whether the process group that ``command`` was run in still exists; True where it had none."""
        return command.world is None or self._worlds is None or self._worlds.has(command.world)

    def close(self) -> None:
        if self._worlds is not None:
            self._worlds.close()


class Outcome(Other):
    """A function's result, as the script gets it, for other functions of the node."""

    def __init__(self, data: bytes, tensors: list[torch.Tensor]) -> None:
        self._data = data
        self.tensors = tensors

    def value(self) -> Any:
        """Returns the result: each time another one, with the same tensors."""
        return decode_result(self._data, self.tensors)


class _Function:
    """A user's function, unpickled when it is first run."""

    def __init__(self, code: bytes) -> None:
        self._code = code
        self._loading = threading.RLock()
        self._function: Callable[..., Any] | None = None

    def get(self, tensor: Tensors) -> Callable[..., Any]:
        with self._loading:
            if self._function is None:
                self._function = _loads_from_master(self._code, tensor)
                self._code = b""
            return self._function


def _run(function: _Function, arguments: bytes, tensor: Tensors) -> tuple[bytes, list[torch.Tensor]]:
    call = function.get(tensor)
    args, kwargs = _loads_from_master(arguments, tensor)
    tensors: list[torch.Tensor] = []
    with torch.enable_grad():
        try:
            result = call(*args, **kwargs)
        except SystemExit as e:
            status = attempt(partial(repr, e.code), "the code")
            raise DisttensorError(
                f"the function called sys.exit({status}); the node goes on; let it return instead"
            ) from e
        except Exception:
            raise
        except BaseException as e:  # KeyboardInterrupt, CancelledError: such an exception would end the node
            text = attempt(partial(str, e), "its text")
            raise DisttensorError(f"the function raised {type(e).__name__}: {text}; the node goes on") from e
    return _encoder.encode(_plain(result, tensors)), tensors


def _loads_from_master(data: bytes, tensor: Callable[[int], torch.Tensor]) -> Any:
    return _FromMaster(data, tensor).load()


#: Invariant 9: a node unpickles here only; nothing that a node sends is unpickled.
class _FromMaster(pickle.Unpickler):
    """The unpickler of what the master sends, which owns this worker: the one place where a worker unpickles.

    A subclass, as from Python 3.13 on an object of the C class takes no ``persistent_load``.
    """

    def __init__(self, data: bytes, tensor: Callable[[int], torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensor = tensor

    def persistent_load(self, pid: Any) -> Any:
        found: Any = self._tensor(int(pid))
        return found.value() if isinstance(found, Outcome) else found


def _plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return msgspec.msgpack.Ext(_TENSOR, b"")
    if isinstance(value, list):
        return [_plain(v, tensors) for v in value]
    if isinstance(value, tuple):
        return msgspec.msgpack.Ext(_TUPLE, _encoder.encode([_plain(v, tensors) for v in value]))
    if isinstance(value, (set, frozenset)):
        return msgspec.msgpack.Ext(_SET, _encoder.encode([_plain(v, tensors) for v in value]))
    if isinstance(value, dict):
        if all(isinstance(k, (str, int)) for k in value):
            return {k: _plain(v, tensors) for k, v in value.items()}
        pairs = [[_plain(k, tensors), _plain(v, tensors)] for k, v in value.items()]
        return msgspec.msgpack.Ext(_DICT, _encoder.encode(pairs))
    if isinstance(value, complex):
        return msgspec.msgpack.Ext(_COMPLEX, _encoder.encode([value.real, value.imag]))
    raise TypeError(
        f"a function on a node returned a {type(value).__module__}.{type(value).__qualname__}; {_instead(value)} "
        "(only tensors and plain data (None, numbers, text, bytes, lists, tuples, sets, dicts of them) come back, "
        "because the master never unpickles what a node sends)"
    )


#: For each class, the expression that gives the same content as tensors and plain data.
_INSTEAD = {
    "numpy.ndarray": "torch.from_numpy(x)",
    "numpy.generic": "x.item()",
    "torch.nn.modules.module.Module": "x.state_dict()",
    "torch.optim.optimizer.Optimizer": "x.state_dict()",
    "pandas.core.frame.DataFrame": "x.to_dict()",
    "datetime.date": "x.isoformat()",
    "datetime.time": "x.isoformat()",
    "datetime.timedelta": "x.total_seconds()",
    "enum.Enum": "x.value",
    "collections.abc.Iterator": "list(x)",
    "os.PathLike": "str(x)",
    "builtins.range": "list(x)",
}


def _instead(value: Any) -> str:
    """Returns a hint at what the function had better return."""
    names = [f"{base.__module__}.{base.__qualname__}" for base in type(value).__mro__]
    names += ["collections.abc.Iterator"] * isinstance(value, Iterator) + ["os.PathLike"] * isinstance(
        value, os.PathLike
    )
    found = next((_INSTEAD[name] for name in names if name in _INSTEAD), None)
    if found is None and dataclasses.is_dataclass(value):
        found = "dataclasses.asdict(x)"
    return f"for x return {found}" if found else "return what it is made of"


def decode_result(data: bytes, tensors: list[Any]) -> Any:
    """Decodes a result on the master: plain data, with ``tensors`` in order where the node had tensors.

    Raises ProtocolError.
    """
    queue = deque(tensors)  # emptied, because the function that takes from it lives in a cycle with its decoder

    def extension(code: int, body: memoryview) -> Any:
        if code == _TENSOR:
            return queue.popleft()
        items = decoder.decode(body)
        if code == _COMPLEX:
            return complex(*items)
        if code == _DICT:
            return dict(items)
        return tuple(items) if code == _TUPLE else set(items)

    decoder = msgspec.msgpack.Decoder(ext_hook=extension)
    try:
        return decoder.decode(data)
    except (ValueError, IndexError, TypeError, RecursionError) as e:
        raise ProtocolError(f"a result of {len(data)} bytes can't be read: {e}") from None
