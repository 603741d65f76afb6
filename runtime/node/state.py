"""A node's state: its tensors, templates, channels and functions; and its reports of failures.

All code that applies commands uses this: the receiving thread (executor.py), lanes (streams/), replays (graphs/). None
of these knows another.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import torch
from msgspec.structs import replace

from ..channel.base import MASTER, Arrival
from ..channel.counted import BY_COMMANDS, Row, TransferTally, count
from ..channel.opened import Channels
from ..channel.payload import bytes_of, of_bytes
from ..collective.shared_pages import SharedPagesOfGroups
from ..host.cuda_devices import in_use
from ..host.memory_limit import begin_peak, memory_left, resident
from ..process import role, torch_switches
from ..process.observing import NodeSeam
from ..protocol import codec
from ..protocol import commands as c
from ..protocol.allow_list import AllowList
from ..protocol.errors import DisttensorError, ProtocolError
from ..protocol.failure_ids import Poison, replayed
from ..protocol.finite import CHECK_FINITE, INF, NAN
from ..protocol.traits import TRAITS
from . import geometry, where
from .failures import failure_report, is_shortage, name_of
from .finite import FiniteCheck, remove_from
from .held import HeldTensor
from .memory_tally import MemoryTally
from .rng_lock import get_rng_state
from .store import Later, NotReplayed, Outgrown, Pending, Store, Unmade, memory, trim
from .template import Template
from .user_functions import Functions, Outcome

#: The most tensors that the report of a failure for want of memory names.
SHOWN = 64
#: So many failures in a row for want of memory say what the node holds; a row ends with so many seconds without one.
TOLD, STREAK = 16, 0.1
#: The most bytes of a result that waits for those of the functions behind it.
BRIEF_RESULT = 1024
#: The device that torch's error names, whichever one is current.
_GPU = re.compile(r"\bGPU (\d+)")


class PoisonRead(Exception):
    """Raised by a command that reads poison."""

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
        seam: NodeSeam | None = None,
    ) -> None:
        """Begins without tensors and templates.

        ``emit`` takes the replies for the master; ``progress`` is called when ``done`` has grown in another thread than
        the one that calls ``apply``. Any thread may call both, once there are streams. ``seam``: where observers look
        in.
        """
        self.rank = rank
        self.seam = NodeSeam(rank) if seam is None else seam
        self.store = Store()
        self.emit = emit
        #: takes a reply that may leave with those that follow at once
        self.emit_with_next: Callable[[c.Reply], None] = emit
        self.progress = progress
        self.channels = channels
        self.channel = channels.data[0]  #: the session's own
        self.uploads = TransferTally()  #: those that travelled with commands
        self.downloads = TransferTally()  #: those that travelled with replies
        self.shared_pages = SharedPagesOfGroups()
        self.functions = functions
        functions.rank = rank
        functions.emit, functions.watch.told = emit, progress
        self.templates: dict[int, Template] = {}
        self.allow = allow
        self._simulate_cuda = simulate_cuda
        self.cuda = not simulate_cuda and torch.cuda.is_available()
        functions.device = "cuda:0" if self.cuda else "cpu"
        where.set_place(rank, functions.device)
        self._drawing: dict[str, int] = {}  #: the place whose generator is in use, by device; 0 is the node itself
        self._resting: dict[tuple[int, str], torch.Tensor] = {}  #: states of the others, by place and device
        self.results: dict[int, list[torch.Tensor]] = {}  #: tensors that functions returned, by request
        #: whole results of functions, by request, for as long as the script has their tokens
        self.outcomes: WeakValueDictionary[int, Outcome] = WeakValueDictionary()
        #: has default streams wait for those that made these tensors, and others for the default ones from then on:
        #: what uses tensors in the receiving thread says so before, and of what it has written afterwards
        self.take_over: Callable[[Iterable[Any]], None] = in_order
        #: the number of the command that is next, or being applied
        self.seq = 0
        self.at = -1  #: in a replay: the index of the graph's command that is being applied
        #: what is gone with losses, the earliest first: refs below a bound, the lost node and its incarnation
        self.gone: list[tuple[int, int, int]] = []
        #: what looks whether what is computed is finite, while the script wants that
        self.check: FiniteCheck | None = None
        self.shortages = 0  #: commands that failed for want of memory
        self._short_at, self._streak = 0.0, 0  #: when the last of them was, and how many there were in a row

    def __repr__(self) -> str:
        held = len(self.store.entries)
        return f"<{type(self).__name__} node={self.rank} seq={self.seq} tensors={held} templates={len(self.templates)}>"

    @property
    def number(self) -> int:
        """The number that names the current command in a failure."""
        return replayed(self.seq, self.at)

    def what(self, command: c.Command) -> str:
        """Returns a name of a command for observers: the operator's, the function's, the collective's."""
        match command:
            case c.On(command=inner):
                return self.what(inner)
            case c.Call(template=number) | c.Ask(call=c.Call(template=number)) if number in self.templates:
                return self.templates[number].name
            case c.Collective(kind=kind):
                return kind
            case _:
                return name_of(command)

    def device(self, name: str) -> torch.device:
        """Returns a device of this node by name; for a simulated CUDA device the CPU. Raises RuntimeError for a missing
        one."""
        device = torch.device(name)
        if device.type == "cuda" and self._simulate_cuda:
            if (device.index or 0) >= self._simulate_cuda:
                raise RuntimeError(f"node {self.rank} has {self._simulate_cuda} simulated CUDA devices, not {name}")
            return torch.device("cpu")
        return device

    def geometry(self, tensor: torch.Tensor) -> c.Geometry:
        """Returns the geometry of a tensor.

        Raises TypeError for a tensor that strides don't describe: a proxy of it would be wrong.
        """
        found = geometry.of(tensor)
        told = c.Geometry(found.shape, found.stride, found.offset, found.dtype, str(tensor.device), found.bits)
        try:
            codec.check_geometry(told)
        except ProtocolError as e:  # the script would say so, and lose the node for it
            raise TypeError(f"a tensor can't have a proxy: {e}") from None
        return told

    # ---- effects that commands have on any thread ------------------------------------------------------------------

    def answer(
        self, command: c.Ask, template: Template, result: Any, operands: Mapping[int, Any]
    ) -> list[torch.Tensor | None]:
        """Answers an Ask with its operator's result: a value, or the geometry of tensors, which are returned. Of an
        operator that returns nothing these are those of its ``operands`` that it has written.

        Raises ProtocolError, and has answered nothing, for another number of tensors, or of refs for them, than the
        master expects.
        """
        if not template.outs:
            self.emit(c.Answer(command.request, codec.to_value(result)))
            return []
        if result is None:
            result = [operands[ref] for ref in template.written(command.call.out, command.call.args)]
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        if len(results) != template.outs:
            raise template.miscounted(len(results))
        refs = template.results(command.call.out, command.call.args)
        if len(refs) != template.outs:
            raise ProtocolError(
                f"{template.name} puts out {template.outs} tensors, and a call of it names {len(refs)} refs"
            )
        self.emit(c.Shapes(command.request, tuple(None if t is None else self.geometry(t) for t in results)))
        return results

    def switch(self, command: c.Switch) -> None:
        """Sets switches: torch's, and whether what is computed is looked at.

        Raises ProtocolError for a check that there is not, ValueError and torch's own errors.
        """
        settings = dict(command.settings)
        found = settings.pop(CHECK_FINITE, None)
        if found is not None:
            if found not in ("", NAN, INF):
                raise ProtocolError(f"there is no check {found!r}")
            self.check = FiniteCheck(found == INF) if found else None
            for template in self.templates.values():
                self.look_at(template)
        if role.is_node():  # nodes that are threads have the script's switches, which are their process's
            torch_switches.put(settings.items())

    def look_at(self, template: Template) -> None:
        """Has what the calls of a template give be looked at, or not any more."""
        if self.check is not None:
            self.check.put_into(template, self.store.entries)
        else:
            remove_from(template, self.store.entries)

    def receive(self, command: c.Recv) -> Pending:
        """Begins to receive a tensor, and returns its stand-in."""
        shape, peer, transfer = command.shape, command.peer, command.transfer
        channel = self.channels.data[command.channel]
        try:
            dtype = codec.dtype_of(command.dtype)
            codec.check_shape(command.shape, dtype.itemsize)
            device = self.device(command.device)
            if device.type == "cpu":
                arrival = channel.iarrive(shape, dtype, peer, transfer)
            else:
                tensor = torch.empty(shape, dtype=dtype, device=device)
                arrival = Arrival(channel.irecv(tensor, peer, transfer), lambda: tensor)
        except Exception:
            # the bytes come all the same: they go into a tensor that they don't fit, so that they are dropped
            channel.irecv(torch.empty(0, dtype=torch.uint8), peer, transfer)
            raise
        return Pending(arrival, channel, peer, math.prod(shape) * dtype.itemsize, str(device), (dtype, shape))

    def finish_run(
        self, command: c.Run, more: bool, data: bytes, tensors: list[torch.Tensor], classes: Collection[type] = ()
    ) -> list[Any]:
        """Answers a Run with its function's result. Returns what the command has refs for: tensors, and the whole.
        ``more``: whether this thread does something else at once, whose answers the result may wait for."""
        if command.outs and len(tensors) != len(command.outs):
            raise ProtocolError(f"{command.what} returned {len(tensors)} tensors, and not {len(command.outs)}")
        for tensor in tensors:
            geometry.check_returned(tensor)
        if self.check is not None:
            self.check.look_at(name_of(command), tensors)
        geometries = tuple(map(self.geometry, tensors))
        made: list[Any] = list(tensors) if command.outs else []
        if command.token:
            self.outcomes[command.request] = whole = Outcome(data, tensors, classes)
            made.append(whole)
        elif tensors and not command.outs:
            self.results[command.request] = tensors
        emit = self.emit_with_next if more and len(data) <= BRIEF_RESULT else self.emit
        emit(c.Result(command.request, data, geometries, self.functions.kept(command)))
        return made

    def returned(self) -> Iterator[torch.Tensor]:
        """Yields the tensors that functions have returned and that have no refs yet."""
        yield from chain.from_iterable(self.results.values())
        yield from chain.from_iterable(whole.tensors for whole in self.outcomes.values())

    def adopt_results(self, command: c.Adopt) -> None:
        """Gives refs to tensors that a function has returned. Raises KeyError where there are none."""
        whole = self.outcomes.pop(command.request, None)
        tensors = self.results.pop(command.request) if whole is None else whole.tensors
        for ref, tensor in zip(command.refs, tensors, strict=True):
            if ref:
                self.store.entries[ref] = tensor

    def synchronized(self, command: c.Sync) -> None:
        """Answers a Sync once CUDA devices are done, too; everything else is."""
        for index in in_use():  # by functions alone, too
            torch.cuda.synchronize(index)
        self.emit(c.Done(command.request))

    def memory(self, command: c.Memory) -> None:
        """Answers a Memory."""
        count, held = self.store.usage(command.device or None)
        self.emit(c.MemoryUsage(command.request, count, held))

    def memory_stats(self, command: c.MemoryStats, number: int) -> None:
        """Answers a MemoryStats, which is the command of this number; with poison if that fails."""
        try:
            self.emit(self._memory_stats(command))
        except Exception as e:
            poison = self.report_failure(type(command).__name__, e, number)
            self.emit(c.Poisoned(command.request, poison.rank, poison.seq))

    def _memory_stats(self, command: c.MemoryStats) -> c.MemoryFigures:
        device, store = self.device(command.device), self.store
        counted = device.type == "cuda" or store.tally is not None
        figures = _cuda_figures(device, command.first) if device.type == "cuda" else self._cpu_figures(command.first)
        holdings = self.holdings(device, min(command.largest, codec.MAX_HELD))
        return c.MemoryFigures(command.request, tuple(sorted(figures.items())), holdings, counted)

    def _cpu_figures(self, first: str) -> dict[str, int]:
        """Does what a MemoryStats names ``first``, and returns the CPU's figures. What is reserved is what the process
        has in memory, tensors and all else; its peak the kernel's own."""
        store = self.store
        if first == "trim":
            trim(0)
        if first == "reset":
            begin_peak()
        if first in ("count", "reset", "accumulated") and store.tally is None:
            store.tally = MemoryTally(store)
        tally = store.tally
        if isinstance(tally, MemoryTally):
            if first == "reset":
                tally.look()
                tally.reset_peaks()
            elif first == "accumulated":
                tally.reset_sums()
            figures = tally.figures()
        else:
            figures = MemoryTally(store).figures()
            figures = {name: figure for name, figure in figures.items() if name.endswith("current")}
        now, peak = resident()
        process = {"reserved_bytes.all.current": now, "reserved_bytes.all.peak": peak, "num_ooms": self.shortages}
        return {**figures, **process}

    def holdings(self, device: torch.device, largest: int) -> c.Holdings:
        """Returns what the node holds on a device, with the ``largest`` tensors, and what is left of its memory."""
        name = str(device)
        free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else memory_left()
        held = tuple(c.Held(ref, size, _described(tensor)) for ref, size, tensor in self.store.largest(largest, name))
        return c.Holdings(*self.store.usage(name), free, total, held)

    def effect(self, command: c.Command, tensor: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        """Applies a command that needs nothing but its operands, which ``tensor`` gives, in any thread.

        Returns the tensors that it makes.
        """
        match command:
            case c.Seed():
                # not torch.manual_seed: it would seed further backends, a session's own nodes among them
                torch.default_generator.manual_seed(command.seed)
                if torch.cuda.is_available():
                    torch.cuda.manual_seed_all(command.seed)
                if command.all:
                    self._resting.clear()
            case c.Swap():
                self._swap(command)
            case c.Random(state=b""):
                state = _generator(self.device(command.device))
                self.emit(c.RngState(command.request, state.numpy().tobytes()))
            case c.Random():
                state = torch.frombuffer(bytearray(command.state), dtype=torch.uint8)
                _set_generator(self.device(command.device), state)
                self.emit(c.Done(command.request))
            case c.Keep(restore=True):
                _set_generator(self.device(command.device), tensor(command.ref))
            case c.Keep():
                return [_generator(self.device(command.device))]
            case c.Upload():
                return [self._unpacked(command)]
            case c.Download():
                began, found = time.perf_counter(), tensor(command.ref)
                data = bytes_of(found)
                self.downloads.add(len(data), began)
                dtype = codec.dtype_id(found.dtype)
                self.emit(c.Downloaded(command.request, tuple(found.shape), dtype, data))
            case c.Storage():
                entry = self.store.entries.get(command.ref)
                found = entry.tensor if isinstance(entry, Outgrown) else tensor(command.ref)
                storage = found.untyped_storage()
                self.emit(
                    c.StorageInfo(
                        command.request, memory(found), storage.data_ptr(), storage.nbytes(),
                        int(found.storage_offset()), found.stride(),
                    )
                )  # fmt: skip
            case c.Digest():
                self.emit(c.Digested(command.request, geometry.digest(tensor(command.ref))))
            case _:
                raise ProtocolError(f"{type(command).__name__} needs more than its operands")
        return []

    def _unpacked(self, command: c.Upload) -> torch.Tensor:
        """Returns the tensor that a command has the bytes of. Raises ProtocolError where they are not as many."""
        began = time.perf_counter()
        dtype = codec.dtype_of_data(command.dtype, command.shape, command.data)
        tensor = of_bytes(command.data, dtype, command.shape)
        device = self.device(command.device)
        if device.type != "cpu":
            tensor = tensor.to(device)
        self.uploads.add(len(command.data), began)
        return tensor

    def traffic(self) -> tuple[Row, ...]:
        """Returns the counts of what the data channels have carried, and commands and replies."""
        uploads, downloads = self.uploads.figures(), self.downloads.figures()
        small = (BY_COMMANDS, "transfers", MASTER, downloads, uploads)
        return (*count(self.channels), *([small] if uploads[0] or downloads[0] else []))

    def _swap(self, command: c.Swap) -> None:
        if not role.is_node():
            return  # nodes that are threads have one generator together, which is their process's
        device = self.device(command.device)
        name = str(device)  # simulated devices draw from the CPU's generator
        before, own = self._drawing.get(name, 0), dict(command.seeds).get(self.rank)
        if before != command.place:
            self._resting[before, name] = _generator(device)
            self._drawing[name] = command.place
            state = self._resting.pop((command.place, name), None)
            if state is not None and own is None:
                _set_generator(device, state)
                return
        elif own is None:
            return
        seed = command.seed if own is None else own
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)

    # ---- entries and poison ----------------------------------------------------------------------------------------

    def entry(self, ref: int) -> torch.Tensor | Poison:
        """Returns the tensor or poison under ``ref``; waits for a tensor on its way. Raises KeyError, NotReplayed,
        RuntimeError for one that has outgrown its memory."""
        entry = self.present(ref)
        if isinstance(entry, Later):
            entry = self.store.entries[ref] = entry.result(partial(self.report_failure, "transfer"))  # type: ignore[assignment]
            self.store.pending.pop(ref, None)
        elif isinstance(entry, Unmade):
            raise NotReplayed
        elif isinstance(entry, Outgrown):
            raise entry.error()
        return entry  # type: ignore[no-any-return]

    def present(self, ref: int) -> Any:
        """Returns the entry under ``ref``; for what is gone with a loss its poison.

        An earlier worker in this node's place held it, or nobody made it while a node of its mesh was lost. Its first
        use reports that. Raises KeyError for a ref that is not gone.
        """
        entry = self.store.entries.get(ref)
        return entry if entry is not None else self._missing(ref)

    def _missing(self, ref: int) -> Poison:
        for before, rank, incarnation in self.gone:
            if ref < before:
                held = (
                    f"tensor {ref} was held by" if rank == self.rank else f"tensor {ref} was not made, with the loss of"
                )
                where = f"incarnation {incarnation} of node {rank}, in whose place another worker is now"
                why = f"{held} {where}: it was lost, and was not restored"
                failed = failure_report(self.number, "the use of a tensor", DisttensorError(why))
                self.emit(replace(failed, lost=rank, incarnation=incarnation))
                poison = self.store.entries[ref] = Poison(self.rank, self.number)
                return poison
        raise KeyError(ref)

    def note_new_worker(self, command: c.Again) -> None:
        """Notes that another worker is in a lost node's place."""
        self.gone.append((command.before, command.rank, command.incarnation - 1))
        for pending in self.store.pending.values():  # what has failed is told at its first use
            if pending.peer == command.rank and pending.former < 0:
                pending.former = command.incarnation - 1
        if command.rank != self.rank:
            self.channels.forgive(command.rank, command.incarnation)
            self.shared_pages.forget_rank(command.rank)

    def tensor(self, ref: int) -> torch.Tensor:
        """Returns the tensor under ``ref``, as ``entry`` does. Raises PoisonRead for poison."""
        entry = self.entry(ref)
        if isinstance(entry, Poison):
            raise PoisonRead(entry)
        return entry

    def lent(self, ref: int) -> torch.Tensor:
        """Returns the tensor under ``ref``, as ``tensor`` does, for a function that may keep it."""
        return self.store.lent(ref, self.tensor(ref))  # type: ignore[no-any-return]

    def hold_tensor(self, ref: int) -> HeldTensor:
        """Returns the tensor under ``ref`` for a function that wants it held, where nothing runs beside that."""
        return HeldTensor(self.tensor(ref))

    def settle_all(self) -> None:
        """Waits for all receives and sends."""
        for ref in list(self.store.pending):
            if ref in self.store.entries:
                self.entry(ref)
            else:  # a replay has freed it, and nothing had used it
                del self.store.pending[ref]
        self.store.wait_for_sends(None)

    def give_up(self, command: c.Command, poison: Poison) -> None:
        """Puts poison in place of a failed command's outputs, and of what it should have written, and answers the
        command if it asks for an answer.

        An Ask leaves what it should have written as it is: the script waits, and its line raises the error, after which
        the tensor has, as with local torch, whatever the operator has left in it.
        """
        call = command.call if isinstance(command, c.Ask) else command
        template = self.templates.get(call.template) if isinstance(call, c.Call) else None
        traits, entries = TRAITS[type(command)], self.store.entries
        if template is not None or not isinstance(call, c.Call):
            try:
                for ref in traits.makes(command, template):
                    entries[ref] = poison
                for ref in () if isinstance(command, c.Ask) else traits.writes(command, template):
                    self.spoil(ref, poison)
            except Exception:  # arguments that don't fit their template, as Failed has told
                if isinstance(call, c.Call):
                    entries[call.out] = poison
        if isinstance(command, c.Run):
            self.functions.skip(command)
        if traits.answers and command.request:  # type: ignore[union-attr]
            self.emit(c.Poisoned(command.request, poison.rank, poison.seq))  # type: ignore[union-attr]

    def spoil(self, ref: int, poison: Poison) -> None:
        """Poisons the tensor under ``ref``, with all that share its memory."""
        entries = self.store.entries
        target = entries.get(ref)
        for alias in self.store.aliases(target) if isinstance(target, torch.Tensor) else [ref]:
            entries[alias] = poison

    def report_failure(self, op: str, error: Exception, number: int | None = None) -> Poison:
        """Tells the master that a command failed: the one of this number, or the current one. Returns its poison."""
        number = self.number if number is None else number
        self.emit(failure_report(number, op, error, self._short(error), self.channels.nodes))
        return Poison(self.rank, number)

    def _short(self, error: Exception) -> c.Holdings | None:
        """Returns what the node holds, if a command failed for want of memory: of many in a row, for the first ones."""
        if not is_shortage(error):
            return None
        self.shortages += 1
        now = time.monotonic()
        self._streak = self._streak + 1 if now - self._short_at < STREAK else 1
        self._short_at = now
        if self._streak > TOLD:
            return None
        device = torch.device("cpu")
        with suppress(Exception):  # there may be too little even for that
            if self.cuda and issubclass(type(error), torch.OutOfMemoryError):
                named = _GPU.search(str(error))
                device = torch.device("cuda", int(named[1]) if named else torch.cuda.current_device())
            return self.holdings(device, SHOWN)
        return None


def in_order(tensors: Iterable[Any]) -> None:
    """Does nothing: all that a node without lanes does is on default streams, in the order of its issue."""


def _cuda_figures(device: torch.device, first: str) -> dict[str, int]:
    """Does what a MemoryStats names ``first``, and returns what torch's allocator counts of a CUDA device."""
    if first == "trim":
        torch.cuda.empty_cache()
    elif first == "reset":
        torch.cuda.reset_peak_memory_stats(device)
    elif first == "accumulated":
        torch.cuda.reset_accumulated_memory_stats(device)
    return {name: n for name, n in torch.cuda.memory_stats(device).items() if type(n) is int and n >= 0}


def _described(tensor: torch.Tensor | Pending) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"[: codec.MAX_WHAT]


def _generator(device: torch.device) -> torch.Tensor:
    """Returns the state of a device's default generator, on the CPU."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else get_rng_state()


def _set_generator(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
