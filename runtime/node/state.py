"""What a node has, and how it tells what failed: its tensors, templates, channels and functions.

Whoever applies commands stands on this: the receiving thread (executor.py), lanes (streams/), replays (graphs/). None
of them knows another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..channel.base import Arrival
from ..channel.opened import Channels
from ..collective.shared_pages import SharedPagesOfGroups
from ..protocol import codec
from ..protocol import commands as c
from ..protocol.allow_list import AllowList
from ..protocol.errors import ProtocolError
from ..protocol.failure_ids import Poison, replayed
from ..protocol.traits import TRAITS
from . import geometry
from .failures import told
from .rng_lock import get_rng_state
from .store import Later, NotReplayed, Pending, Store, Unmade, memory
from .template import Template
from .user_functions import Functions


class PoisonRead(Exception):
    """A command reads what is poison."""

    def __init__(self, poison: Poison) -> None:
        super().__init__()
        self.poison = poison


class NodeState:
    """A node's own state. Commands are applied to it in order, by one thread at a time unless it has streams."""

    def __init__(
        self,
        rank: int,
        emit: Callable[[c.Reply], None],
        channels: Channels,
        allow: AllowList,
        functions: Functions,
        simulate_cuda: int = 0,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """``emit`` takes what the master has to be told; ``progress`` is called when ``done`` has grown behind the
        back of the thread that calls ``apply``. Both by any thread, once there are streams."""
        self.rank = rank
        self.store = Store()
        self.emit = emit
        self.progress = progress
        self.channels = channels
        self.channel = channels.data[0]  #: the session's own
        self.boards = SharedPagesOfGroups()
        self.functions = functions
        self.templates: dict[int, Template] = {}
        self.allow = allow
        self._simulate_cuda = simulate_cuda
        self.cuda = not simulate_cuda and torch.cuda.is_available()
        self._devices: set[int] = set()  #: indices of CUDA devices that the master has named
        self.results: dict[int, list[torch.Tensor]] = {}  #: what functions have returned, until the master names it
        #: the number of the command that is next, or being applied
        self.seq = 0
        self.at = -1  #: if that is a replay: which of the graph's commands is being applied

    def __repr__(self) -> str:
        held = len(self.store.entries)
        return f"<{type(self).__name__} node={self.rank} seq={self.seq} tensors={held} templates={len(self.templates)}>"

    @property
    def number(self) -> int:
        """What names the command that is being applied in a failure."""
        return replayed(self.seq, self.at)

    def device(self, name: str) -> torch.device:
        """A device of this node by name; a simulated CUDA device is the CPU's memory. Raises RuntimeError."""
        device = torch.device(name)
        if device.type == "cuda" and self._simulate_cuda:
            if (device.index or 0) >= self._simulate_cuda:
                raise RuntimeError(f"node {self.rank} has {self._simulate_cuda} simulated CUDA devices, not {name}")
            return torch.device("cpu")
        if device.type == "cuda":
            self._devices.add(device.index or 0)
        return device

    def geometry(self, tensor: torch.Tensor) -> c.Geometry:
        """Raises TypeError for a tensor that strides don't describe: a proxy of it would be wrong."""
        found = geometry.of(tensor)
        return c.Geometry(found.shape, found.stride, found.offset, found.dtype, str(tensor.device), found.bits)

    # ---- effects that commands have on whatever thread -----------------------------------------------------------

    def answer(self, command: c.Ask, template: Template, result: Any) -> list[torch.Tensor | None]:
        """Tells what an operator that was asked has given: a value, or the geometry of tensors, which are returned.
        Raises ProtocolError, and has told nothing, for another number of them than the master expects."""
        if not template.outs:
            self.emit(c.Answer(command.request, codec.to_value(result)))
            return []
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        if len(results) != template.outs:
            raise template.miscounted(len(results))
        self.emit(c.Shapes(command.request, tuple(None if t is None else self.geometry(t) for t in results)))
        return results

    def receive(self, command: c.Recv) -> Pending:
        """Begins it, and gives what stands for the tensor."""
        dtype = codec.dtype_of(command.dtype)
        codec.check_shape(command.shape, dtype.itemsize)
        shape, peer, transfer = command.shape, command.peer, command.transfer
        channel = self.channels.data[command.channel]
        try:
            device = self.device(command.device)
            if device.type == "cpu":
                arrival = channel.iarrive(shape, dtype, peer, transfer)
            else:
                tensor = torch.empty(shape, dtype=dtype, device=device)
                arrival = Arrival(channel.irecv(tensor, peer, transfer), lambda: tensor)
        except Exception:
            # the bytes come all the same: into a tensor that they don't fit, so that they are dropped
            channel.irecv(torch.empty(0, dtype=torch.uint8), peer, transfer)
            raise
        return Pending(arrival, peer, math.prod(shape) * dtype.itemsize, str(device))

    def finish_run(self, command: c.Run, data: bytes, tensors: list[torch.Tensor]) -> None:
        """Tells what a function has returned."""
        geometries = tuple(map(self.geometry, tensors))
        if tensors:
            self.results[command.request] = tensors
        self.emit(c.Result(command.request, data, geometries, self.functions.kept(command)))

    def synchronized(self, command: c.Sync) -> None:
        """The answer to a Sync, when all is done but what CUDA devices are still at."""
        for index in sorted(self._devices):
            torch.cuda.synchronize(index)
        self.emit(c.Done(command.request))

    def memory(self, command: c.Memory) -> None:
        count, held = self.store.usage(command.device or None)
        self.emit(c.Answer(command.request, f"{count} {held}"))

    def effect(self, command: c.Command, tensor: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        """Does a command that needs nothing but its operands, which ``tensor`` gives, in whichever thread. Returns what
        it makes."""
        match command:
            case c.Seed():
                # not torch.manual_seed: it would seed further backends, a session's own nodes among them
                torch.default_generator.manual_seed(command.seed)
                if torch.cuda.is_available():
                    torch.cuda.manual_seed_all(command.seed)
            case c.Random(state=b""):
                state = _generator(self.device(command.device))
                self.emit(c.Answer(command.request, state.numpy().tobytes().hex()))
            case c.Random():
                state = torch.frombuffer(bytearray(command.state), dtype=torch.uint8)
                _set_generator(self.device(command.device), state)
                self.emit(c.Done(command.request))
            case c.Keep(restore=True):
                _set_generator(self.device(command.device), tensor(command.ref))
            case c.Keep():
                return [_generator(self.device(command.device))]
            case c.Storage():
                found = tensor(command.ref)
                storage = found.untyped_storage()
                place = " ".join(map(str, (found.storage_offset(), *found.stride())))
                self.emit(c.Answer(command.request, f"{memory(found)} {storage.data_ptr()} {storage.nbytes()} {place}"))
            case _:
                raise ProtocolError(f"{type(command).__name__} needs more than its operands")
        return []

    # ---- entries and poison ----------------------------------------------------------------------------------------

    def entry(self, ref: int) -> torch.Tensor | Poison:
        """The tensor or poison under ``ref``; waits for one that is on its way. Raises KeyError."""
        entry = self.store.entries[ref]
        if isinstance(entry, Later):
            entry = self.store.entries[ref] = entry.result(partial(self.tell, "transfer"))  # type: ignore[assignment]
            self.store.pending.pop(ref, None)
        elif isinstance(entry, Unmade):
            raise NotReplayed
        return entry  # type: ignore[return-value]

    def tensor(self, ref: int) -> torch.Tensor:
        """The same; poison is raised."""
        entry = self.entry(ref)
        if isinstance(entry, Poison):
            raise PoisonRead(entry)
        return entry

    def settle_all(self) -> None:
        for ref in list(self.store.pending):
            self.entry(ref)
        self.store.settle(None)

    def give_up(self, command: c.Command, poison: Poison) -> None:
        """Puts poison where the outputs of a failed command would be, and answers if it was to be answered."""
        call = command.call if isinstance(command, c.Ask) else command
        template = self.templates.get(call.template) if isinstance(call, c.Call) else None
        traits, entries = TRAITS[type(command)], self.store.entries
        if template is not None or not isinstance(call, c.Call):
            try:
                for ref in traits.makes(command, template):
                    entries[ref] = poison
                for ref in traits.writes(command, template):
                    self.spoil(ref, poison)
            except Exception:  # arguments that don't fit their template; Failed has told
                if isinstance(call, c.Call):
                    entries[call.out] = poison
        if isinstance(command, c.Run):
            self.functions.skip(command)
        request = getattr(command, "request", None)
        if request is not None:
            self.emit(c.Poisoned(request, poison.rank, poison.seq))

    def spoil(self, ref: int, poison: Poison) -> None:
        """Poisons what lies under ``ref``, with all that shares its memory."""
        entries = self.store.entries
        target = entries.get(ref)
        for alias in self.store.aliases(target) if isinstance(target, torch.Tensor) else [ref]:
            entries[alias] = poison

    def tell(self, op: str, error: Exception, number: int | None = None) -> Poison:
        """Tells the master that a command has failed: that of this number, or the one that is being applied."""
        number = self.number if number is None else number
        self.emit(told(number, op, error))
        return Poison(self.rank, number)


def _generator(device: torch.device) -> torch.Tensor:
    """The state of a device's default generator, on the CPU."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else get_rng_state()


def _set_generator(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
