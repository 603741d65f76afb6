"""Runs users' functions on a node.

Functions come pickled from the master only, over the authenticated control channel, and only through
``_loads_from_master``. Nothing goes back pickled: results are values of protocol/values.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from ..process.forked_child import EndsForkedChild
from ..protocol import commands as c
from ..protocol import values
from ..protocol.errors import DisttensorError, ProtocolError
from ..protocol.failure_ids import attempt
from ..protocol.framing import Assembly
from . import holders, where
from .chunks import Chunk, ChunkWatch
from .held import HeldTensor
from .interruption import Interruption
from .store import Other, shared

#: The most bytes of a pickled function, or of the pickled arguments of one call.
MAX_PICKLE = 64 << 20
_TOO_LONG = f"a pickled function or its arguments exceed {MAX_PICKLE >> 20} MiB; send tensors instead"
#: The most functions that are kept after their first call.
MAX_KEPT = 1024

_T = TypeVar("_T")

Tensors = Callable[[int], torch.Tensor | HeldTensor]  #: returns a tensor by its ref
#: An encoded value, the tensors beside it, and the classes of users' objects in it.
Returned = tuple[bytes, list[torch.Tensor], Collection[type]]
Job = Callable[[Tensors], Returned]  #: runs a function

#: The end of torch's words for a device that it does not know, and what they mean on a node.
_NO_DEVICE = "device string: node"
_ON_A_NODE = (
    "functions on a node have local tensors, and no devices of other nodes: return the tensor, and the script can move "
    'it, as in dt.run(...).to("node:1")'
)


def key_of(data: bytes) -> bytes:
    """Returns the name under which pickled ``data`` is sent and kept."""
    return hashlib.blake2b(data, digest_size=32).digest()


class Worlds(Protocol):
    """Runs functions as ranks of a process group: see process_groups.py."""

    def within(self, told: c.World, job: Job, interrupt: Callable[[], None]) -> Job:
        """Returns a job that runs ``job`` as a rank of the process group ``told``, and may call ``interrupt``."""

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
        self.rank, self.device = -1, "cpu"  #: the node's number and default device
        self._pieces: dict[bytes, Assembly] = {}
        self._whole: dict[bytes, bytes] = {}
        self._kept: dict[bytes, _Function] = {}
        self.interruption = Interruption()
        self.emit: Callable[[c.Reply], None] = lambda reply: None  #: takes what is told of a chunk
        self.watch = ChunkWatch()

    def piece(self, key: bytes, data: bytes, last: bool) -> None:
        """Adds a piece. Raises ProtocolError when the pieces are too long or do not match the digest ``key``."""
        whole = self._pieces.pop(key, None) or Assembly(MAX_PICKLE, _TOO_LONG)
        done = whole.add(data, last)
        if done is None:
            self._pieces[key] = whole
        elif key_of(done) != key:
            raise ProtocolError("a pickled function arrived damaged")
        else:
            self._whole[key] = done

    def claim(self, command: c.Run) -> Job:
        """Takes the pieces that have arrived for ``command``; returns the job that runs it, in any thread.

        Raises ProtocolError where they have not all arrived, or for a process group that can't be; DisttensorError
        where no functions are run.
        """
        # both are taken whatever happens: nobody else would take them
        code, arguments = self._whole.pop(command.function, b""), command.arguments
        if command.apart:
            arguments = self._whole.pop(arguments, b"")
        if self._allowed == "none":
            raise DisttensorError("this node runs no user functions (functions='none')")
        function = _Function(code) if code else self._kept.get(command.function)
        if not arguments or function is None:
            raise ProtocolError("a function was to be run that has not arrived as a whole")
        if code and command.keep:
            while len(self._kept) >= MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[command.function] = function
        run = partial(_run, function, arguments, command)
        job: Job = partial(self._run_items if command.items else self._run, command, run)
        if command.world is None:
            return job
        if self._worlds is None:
            raise DisttensorError("this node has no process groups")
        return self._worlds.within(command.world, job, partial(self.cancel, command.request))

    def cancel(self, request: int) -> None:
        """Raises KeyboardInterrupt in the function of a request, in whichever thread it runs; has it not begin where it
        has not. Called by threads in which no function runs: the side channel's, that of a process group."""
        self.interruption.cancel(request)

    def _run_items(self, command: c.Run, job: Callable[[Tensors, Chunk], Returned], tensors: Tensors) -> Returned:
        chunk = Chunk(command.request, self.emit, partial(self.interruption.may_go_on, command.request))
        with self.watch.over(chunk):
            return self._run(command, lambda tensor: job(tensor, chunk), tensors)

    def _run(self, command: c.Run, job: Job, tensors: Tensors) -> Returned:
        with where.at(self._where(command)), holders.during(command.what):
            return self.interruption.run(command.request, command.what, partial(job, tensors))

    def _where(self, command: c.Run) -> where.Where:
        index, mesh, coordinates = command.index, command.mesh, dict[str, int]()
        for name, size in zip(reversed(mesh.names), reversed(mesh.sizes), strict=True) if mesh is not None else ():
            index, coordinates[name] = divmod(index, max(1, size))
        return where.Where(self.rank, self.device, dict(reversed(coordinates.items())), command.nodes)

    def skip(self, command: c.Run) -> None:
        """Withdraws from the command's process group, if any: the command is not going to be run."""
        if command.world is not None and self._worlds is not None:
            self._worlds.give_up(command.world)

    def kept(self, command: c.Run) -> bool:
        """Returns whether the process group that ``command`` was run in still exists; True where it had none."""
        return command.world is None or self._worlds is None or self._worlds.has(command.world)

    def close(self) -> None:
        self.watch.close()
        if self._worlds is not None:
            self._worlds.close()


class Outcome(Other):
    """A function's result, as the script gets it, for other functions of the node."""

    def __init__(self, data: bytes, tensors: list[torch.Tensor], classes: Collection[type] = ()) -> None:
        """``classes``: those of objects in it."""
        self._data, self._classes = data, classes
        self.tensors = tensors

    def value(self, copied: bool = False) -> Any:
        """Returns the result: each time another one, with the same tensors, or with copies of them."""
        tensors = [tensor.clone() for tensor in self.tensors] if copied else self.tensors
        return values.decode(self._data, tensors, self._classes)


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


def _run(
    function: _Function, arguments: bytes, command: c.Run, tensor: Tensors, chunk: Chunk | None = None
) -> Returned:
    if chunk is not None:
        return guarded(command.what, partial(_result_of_last, function, arguments, command.beside, tensor, chunk))
    return guarded(command.what, partial(_result_of, function, arguments, command, tensor))


def guarded(what: str, job: Callable[[], _T]) -> _T:
    """Runs code of the user's, named in words, and returns what it does. Raises an Exception for whatever that raises:
    others would end the node."""
    try:
        with EndsForkedChild(what or "a function"):
            return job()
    except SystemExit as e:
        status = attempt(partial(repr, e.code), "the code")
        raise DisttensorError(f"the function called sys.exit({status}); the node goes on; let it return instead") from e
    except Exception as e:
        if type(e) is RuntimeError and str(e).endswith(_NO_DEVICE):
            e.args = (f"{_ON_A_NODE} ({e})",)
        raise
    except BaseException as e:  # KeyboardInterrupt, CancelledError: such an exception would end the node
        text = attempt(partial(str, e), "its text")
        raise DisttensorError(f"the function raised {type(e).__name__}: {text}; the node goes on") from e


def _result_of_last(function: _Function, arguments: bytes, beside: bool, tensor: Tensors, chunk: Chunk) -> Returned:
    """Calls a function for the items of a chunk."""
    call, items = function.get(tensor), _loads_from_master(arguments, tensor)
    with torch.enable_grad():
        return chunk.run(items, partial(_result_of_item, call, beside, tensor))


def _result_of_item(call: Callable[..., Any], beside: bool, tensor: Tensors, item: bytes) -> Returned:
    if not torch.is_grad_enabled():  # as the item before has left it
        torch.set_grad_enabled(True)
    args, kwargs = _loads_from_master(item, tensor)
    tensors: list[torch.Tensor] = []
    classes: set[type] = set()
    return values.encode(call(*args, **kwargs), tensors, beside=beside, classes=classes), tensors, classes


def _result_of(function: _Function, arguments: bytes, command: c.Run, tensor: Tensors) -> Returned:
    """Calls a function. Users' code is run where it is unpickled and its result is encoded, too, and may raise
    anything."""
    call = function.get(tensor)
    args, kwargs = _loads_from_master(arguments, tensor)
    if command.first:
        args = (tensor(command.first), *args)
    tensors: list[torch.Tensor] = []
    with torch.enable_grad():
        result = call(*args, **kwargs)
    classes: set[type] = set()
    data = values.encode(result, tensors, beside=command.beside, classes=classes)
    if getattr(call, "keeps_state", False):
        del result  # or it would hold all of them
        tensors = [tensor.clone() if shared(tensor) else tensor for tensor in tensors]
    return data, tensors, classes


def _loads_from_master(data: bytes, tensor: Tensors) -> Any:
    return _FromMaster(data, tensor).load()


def function_of(data: bytes) -> Any:
    """Returns a function that the script has pickled by itself, into what it holds for all."""
    return _loads_from_master(data, _no_tensor)


def _no_tensor(ref: int) -> Any:
    raise ProtocolError(f"a function by itself names the tensor {ref}")


#: Invariant 9: a node unpickles here only; nothing that a node sends is unpickled.
class _FromMaster(pickle.Unpickler):
    """The unpickler of what the master sends, which owns this worker: the one place where a worker unpickles.

    A subclass, as from Python 3.13 on an object of the C class takes no ``persistent_load``.
    """

    def __init__(self, data: bytes, tensor: Tensors) -> None:
        super().__init__(io.BytesIO(data))
        self._tensor = tensor

    def persistent_load(self, pid: Any) -> Any:
        found: Any = self._tensor(abs(int(pid)))
        return found.value(copied=pid < 0) if isinstance(found, Outcome) else found
