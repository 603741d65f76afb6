"""Commands to effects on a node's store. No sockets: what has to be told goes to ``emit``.

A failed command poisons its outputs and whatever it would have written, is told once (Failed), and the node goes on.
A command that reads poison is skipped and passes the poison on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from ..channel.base import Arrival
from ..channel.counted import count
from ..channel.opened import Channels
from ..channel.registry import why_unusable
from ..collective.shared_pages import Boards
from ..protocol import codec
from ..protocol import commands as c
from ..protocol.allow_list import AllowList
from ..protocol.errors import ProtocolError
from ..protocol.failure_ids import Poison, earliest, replayed
from . import collectives, geometry
from .failures import name_of, told
from .graphs.graphs import Graphs
from .rng_lock import get_rng_state
from .store import Later, NotReplayed, Pending, Store, Unmade, memory
from .streams.events import Events
from .streams.scheduler import Dealer
from .template import Broken, Template
from .user_functions import Functions


class Executor:
    """Applies commands in order. One per node, used by one thread."""

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
        self.stopped = False
        self.emit = emit
        self.progress = progress
        self.channels = channels
        self.channel = channels.data[0]  #: the session's own
        self.boards = Boards()
        self.functions = functions
        self.templates: dict[int, Template] = {}
        self._allow = allow
        self._simulate_cuda = simulate_cuda
        self.cuda = not simulate_cuda and torch.cuda.is_available()
        self._devices: set[int] = set()  #: indices of CUDA devices that the master has named
        self.events = Events(self)
        self._lanes: Dealer | None = None
        self._beside = False  #: there are streams
        self._results: dict[int, list[torch.Tensor]] = {}
        #: a Recv was applied; whoever looks for more of them clears this
        self.received = False
        #: receives that have begun before their turn, or why they could not, by transfer
        self.early: dict[int, Pending | Exception] = {}
        #: the number of the command that is next, or being applied
        self.seq = 0
        self.at = -1  #: if that is a replay: which of the graph's commands is being applied
        self.graphs = Graphs(self)

    def apply(self, batch: c.Batch) -> None:
        """Raises ProtocolError when the batch is not the next one: a gap or a repeat fails the node."""
        if batch.first != self.seq:
            raise ProtocolError(f"batch {batch.first} came where {self.seq} was due: commands were lost or repeated")
        if self._beside:
            self._deal_out(batch, 0)
            return
        templates, call, store = self.templates, c.Call, self.store
        for seq, command in enumerate(batch.commands, batch.first):
            try:
                if type(command) is call:
                    template = templates[command.template]
                    if store.sending and template.mutated:
                        self.seq = seq
                        self._settle(template, command)
                    template.run(command.out, command.args)
                else:
                    self.seq = seq
                    self.other(command)
                    if self._beside:
                        self._deal_out(batch, seq + 1 - batch.first)
                        return
            except Exception as e:
                self.seq = seq
                self.failed(command, e)
        self.seq = batch.first + len(batch.commands)
        if self.store.sending:
            self.store.settle([])  # lets go of what has left: it may have been freed

    def one(self, command: c.Command) -> None:
        """Applies a command that a graph has recorded."""
        try:
            self.other(command)
        except Exception as e:
            self.failed(command, e)

    @property
    def number(self) -> int:
        """What names the command that is being applied in a failure."""
        return replayed(self.seq, self.at)

    def _deal_out(self, batch: c.Batch, start: int) -> None:
        """The same for a node with streams, whose lanes do the commands."""
        lanes = self._lanes
        assert lanes is not None
        for seq, command in enumerate(batch.commands[start:], batch.first + start):
            self.seq = seq
            try:
                lanes.do(command)
            except Exception as e:
                lanes.fail(command, e)
        self.seq = batch.first + len(batch.commands)
        if self.store.sending:
            self.store.settle([])
        if lanes.idle:  # the last stream is gone
            lanes.close()
            self._lanes, self._beside = None, False

    @property
    def done(self) -> int:
        """How many commands are done for good. Asked by any thread."""
        lanes = self._lanes
        return self.seq if lanes is None else lanes.done()

    def close(self) -> None:
        """Ends what runs beside the receiving thread; what waits for a transfer waits until the channel is closed."""
        self.graphs.close()
        self.boards.close()
        if self._lanes is not None:
            self._lanes.close()

    def join(self, timeout: float) -> None:
        """After ``close``: waits for the threads."""
        if self._lanes is not None:
            self._lanes.join(timeout)

    # ---- the less frequent commands --------------------------------------------------------------------------------

    def other(self, command: c.Command) -> None:
        """Does any command."""
        store = self.store
        match command:
            case c.Call():
                template = self.templates[command.template]
                if template.mutated and store.sending:
                    self._settle(template, command)
                template.run(command.out, command.args)
                if type(command) is c.First:
                    template.compare(command, store.entries)
            case c.Free():
                store.free(command.first, command.distances)
            case c.Define():
                try:
                    template = Template(command, self._allow, store.entries, self.device)
                except Exception as e:  # told now; each call of it is poisoned by it
                    template = Broken(command, _PoisonRead(self.tell(command.op, e)))
                self.templates[command.template] = template
            case c.Forget():
                needed = self.graphs.templates()
                for number in [n for n in self.templates if n < command.below and n not in needed]:
                    del self.templates[number]
            case c.Ask():
                self._ask(command)
            case c.Send():
                self._send(command)
            case c.Recv():
                self._recv(command)
            case c.Piece():
                self.functions.piece(command.key, command.data, command.last)
            case c.Run():
                self._run(command)
            case c.Adopt(refs=()):
                self._results.pop(command.request, None)
            case c.Adopt():
                for ref, tensor in zip(command.refs, self._results.pop(command.request), strict=True):
                    if ref:
                        store.entries[ref] = tensor
            case c.Seed():
                # not torch.manual_seed: it would seed further backends, a session's own nodes among them
                torch.default_generator.manual_seed(command.seed)
                if torch.cuda.is_available():
                    torch.cuda.manual_seed_all(command.seed)
            case c.Default():
                torch.set_default_dtype(codec.dtype_of(command.dtype))
            case c.Random():
                self.random(command)
            case c.Keep(restore=True):
                self.restore(command.device, self._tensor(command.ref))
            case c.Keep():
                store.entries[command.ref] = self.generator(command.device)
            case c.Sync():
                self._settle_all()
                self.synchronized(command)
            case c.Memory():
                self.memory(command)
            case c.Storage():
                self.storage(command.request, self._tensor(command.ref))
            case c.Collective(done=0):
                collectives.take_part(self, command)
            case c.Stream() | c.Wait() | c.Signal() | c.Await() | c.Join() | c.Collective():
                self._lanes = Dealer(self)
                self._beside = True
                self._lanes.do(command)
            case c.Record() | c.Query() | c.Elapsed():
                self.events.do(command)
            case c.Replay():
                self.graphs.replay(command)
            case c.Part():
                self.graphs.part(command)
            case c.Graph():
                self.graphs.define(command)
            case c.Discard():
                self.graphs.discard(command)
            case c.Engines():
                self.emit(c.Answer(command.request, self.graphs.engines(command.graph)))
            case c.Count():
                self.emit(c.Counts(command.request, count(self.channels)))
            case c.Peer():
                self.channels.connect(command.channel, command.rank, command.address, command.key)
            case c.Open():
                self.emit(c.Answer(command.request, self.channels.open(command.channel, command.name)))
            case c.Usable():
                why_not = self._allow.why_not if command.ops else partial(why_unusable, rank=self.rank)
                self.emit(c.Answer(command.request, "\n".join(map(why_not, command.names))))
            case c.Lost():
                self.channels.forget(command.rank, command.why)
            case c.Stop():
                self.stopped = True
                store.clear()
            case _:
                raise ProtocolError(f"{type(command).__name__} is not for the executor")

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

    def _ask(self, command: c.Ask) -> None:
        call = command.call
        template = self.templates[call.template]
        if template.mutated and self.store.sending:
            self._settle(template, call)
        result = template.call(call.out, call.args)
        if not template.outs:
            self.emit(c.Answer(command.request, codec.to_value(result)))
            return
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        for ref, tensor in zip(template.results(call.out, call.args), results, strict=True):
            if tensor is not None:
                self.store.entries[ref] = tensor
        self.emit(c.Shapes(command.request, tuple(None if t is None else self.geometry(t) for t in results)))

    def geometry(self, tensor: torch.Tensor) -> c.Geometry:
        """Raises TypeError for a tensor that strides don't describe: a proxy of it would be wrong."""
        found = geometry.of(tensor)
        return c.Geometry(found.shape, found.stride, found.offset, found.dtype, str(tensor.device), found.bits)

    def _send(self, command: c.Send) -> None:
        channel = self.channels.data[command.channel]
        try:
            entry = self.entry(command.ref)
        except KeyError:
            channel.refuse(command.peer, command.transfer, self.rank, self.number)
            raise
        if isinstance(entry, Poison):
            channel.refuse(command.peer, command.transfer, entry.rank, entry.seq)
            return
        try:
            transfer = channel.isend(entry, command.peer, command.transfer)
        except Exception:  # a layout or dtype that the channel doesn't carry, or no memory: nobody must wait for it
            channel.refuse(command.peer, command.transfer, self.rank, self.number)
            raise
        if not transfer.is_completed():
            self.store.sending.append((entry, transfer))

    def _recv(self, command: c.Recv) -> None:
        self.received = True
        pending = self.early.pop(command.transfer, None) or self.receive(command)
        if isinstance(pending, Exception):
            raise pending
        self.store.entries[command.out] = self.store.pending[command.out] = pending

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

    def _run(self, command: c.Run) -> None:
        self.store.settle(None)  # the function may write what is being sent
        self.finish_run(command, *self.functions.claim(command)(self._tensor))

    def finish_run(self, command: c.Run, data: bytes, tensors: list[torch.Tensor]) -> None:
        """Tells what a function has returned."""
        geometries = tuple(map(self.geometry, tensors))
        if tensors:
            self._results[command.request] = tensors
        self.emit(c.Result(command.request, data, geometries, self.functions.kept(command)))

    def synchronized(self, command: c.Sync) -> None:
        """The answer to a Sync, when all is done but what CUDA devices are still at."""
        for index in sorted(self._devices):
            torch.cuda.synchronize(index)
        self.emit(c.Done(command.request))

    def random(self, command: c.Random) -> None:
        if command.state:
            _set_generator(self.device(command.device), torch.frombuffer(bytearray(command.state), dtype=torch.uint8))
            self.emit(c.Done(command.request))
        else:
            self.emit(c.Answer(command.request, self.generator(command.device).numpy().tobytes().hex()))

    def generator(self, device: str) -> torch.Tensor:
        """The state of a device's generator."""
        return _generator(self.device(device))

    def restore(self, device: str, state: torch.Tensor) -> None:
        _set_generator(self.device(device), state)

    def memory(self, command: c.Memory) -> None:
        count, held = self.store.usage(command.device or None)
        self.emit(c.Answer(command.request, f"{count} {held}"))

    def storage(self, request: int, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        place = " ".join(map(str, (tensor.storage_offset(), *tensor.stride())))
        self.emit(c.Answer(request, f"{memory(tensor)} {storage.data_ptr()} {storage.nbytes()} {place}"))

    # ---- transfers and poison --------------------------------------------------------------------------------------

    def entry(self, ref: int) -> torch.Tensor | Poison:
        """The tensor or poison under ``ref``; waits for one that is on its way. Raises KeyError."""
        entry = self.store.entries[ref]
        if isinstance(entry, Later):
            entry = self.store.entries[ref] = entry.result(partial(self.tell, "transfer"))  # type: ignore[assignment]
            self.store.pending.pop(ref, None)
        elif isinstance(entry, Unmade):
            raise NotReplayed
        return entry  # type: ignore[return-value]

    def _tensor(self, ref: int) -> torch.Tensor:
        """The same; poison is raised."""
        entry = self.entry(ref)
        if isinstance(entry, Poison):
            raise _PoisonRead(entry)
        return entry

    def _settle_all(self) -> None:
        for ref in list(self.store.pending):
            self.entry(ref)
        self.store.settle(None)

    def _settle(self, template: Template, call: c.Call) -> None:
        targets = [self.entry(call.out - int(call.args[i])) for i in template.mutated]  # type: ignore[arg-type]
        self.store.settle([t for t in targets if isinstance(t, torch.Tensor)])

    def failed(self, command: c.Command, error: Exception) -> None:
        """The way out of every failed command: retry if it met a tensor on its way, pass poison on, or tell."""
        call = command.call if isinstance(command, c.Ask) else command
        template = self.templates.get(call.template) if isinstance(call, c.Call) else None
        poison: Poison | None = error.poison if type(error) is _PoisonRead else None
        if template is not None and isinstance(call, c.Call) and poison is None:
            try:
                operands = template.operands(call.out, call.args)
                waited = any(isinstance(self.store.entries.get(ref), Later) for ref in operands)
                read = [e for e in map(self.entry, operands) if isinstance(e, Poison)]
            except NotReplayed as e:
                waited, read, error = False, [], e
            except Exception:  # nonsense from the master: told as what the command itself raised
                waited, read = False, []
            poison = earliest(read)
            if poison is None and waited:
                try:
                    self.other(command)
                    return
                except Exception as again:
                    again.__context__ = None  # that it came too early the first time is nobody's concern
                    error = again
        if poison is None:
            poison = self.tell(template.name if template else name_of(command), error)
        self.give_up(command, poison)

    def give_up(self, command: c.Command, poison: Poison) -> None:
        """Puts poison where the outputs of a failed command would be, and answers if it was to be answered."""
        call = command.call if isinstance(command, c.Ask) else command
        request = getattr(command, "request", None)
        template = self.templates.get(call.template) if isinstance(call, c.Call) else None
        if template is not None and isinstance(call, c.Call):
            self._spread(template, call, poison)
        elif isinstance(command, c.Recv):
            self.store.entries[command.out] = poison
        elif isinstance(command, c.Keep) and not command.restore:
            self.store.entries[command.ref] = poison
        elif isinstance(command, c.Run):
            self.functions.skip(command)
        elif isinstance(command, c.Collective):
            for ref in command.outs:
                self.spoil(ref, poison)
        if request is not None:
            self.emit(c.Poisoned(request, poison.rank, poison.seq))

    def _spread(self, template: Template, call: c.Call, poison: Poison) -> None:
        entries = self.store.entries
        try:
            for ref in template.results(call.out, call.args):
                entries[ref] = poison
            for i in template.mutated:
                self.spoil(call.out - int(call.args[i]), poison)  # type: ignore[arg-type]
        except Exception:  # arguments that don't fit their template; Failed has told
            entries[call.out] = poison

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


class _PoisonRead(Exception):
    def __init__(self, poison: Poison) -> None:
        super().__init__()
        self.poison = poison


def _generator(device: torch.device) -> torch.Tensor:
    """The state of a device's default generator, on the CPU."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else get_rng_state()


def _set_generator(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
