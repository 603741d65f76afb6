"""Applies commands to a node's store. No sockets: messages to the master go to ``emit``.

A failed command poisons its outputs and the tensors that it would have written, is reported once (Failed), and the node
goes on. A command that reads poison is skipped and passes the poison on.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from ..channel.opened import Channels
from ..channel.registry import why_unusable
from ..channel.ticket import Ticket
from ..process import page
from ..process.observing import FunctionDone, NodeSeam
from ..process.page import COLLECTIVE, COMMANDS, RECEIVE
from ..protocol import codec
from ..protocol import commands as c
from ..protocol.allow_list import RESIZE_STORAGE, AllowList
from ..protocol.errors import ProtocolError
from ..protocol.failure_ids import Poison, earliest
from ..protocol.traits import TRAITS
from . import collectives, warned
from .failures import name_of
from .graphs.graphs import NodeGraphs
from .state import NodeState, PoisonRead
from .store import Later, NotReplayed, Outgrown, Pending, Store
from .streams.events import Events
from .streams.scheduler import Scheduler
from .template import Broken, Template
from .user_functions import Functions


#: Invariant 1: commands are applied in issue order, each at most once (``apply``).
class CommandExecutor(NodeState):
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
        seam: NodeSeam | None = None,
        first: int = 0,
    ) -> None:
        """Takes the arguments of NodeState. ``first``: the number of the first command."""
        super().__init__(rank, emit, channels, allow, functions, simulate_cuda, progress, seam)
        self.seq = first
        self._end = first  #: the number after the last command of the batch that is being applied
        self.stopped = False
        self.events = Events(self)
        self.graphs = NodeGraphs(self, self.one, self.failed)
        self._forgotten: set[int] = set()  #: templates to drop as soon as no graph needs them
        self._lanes: Scheduler | None = None
        self._beside = False  #: whether there are streams
        #: whether a Recv was applied since ``Ahead.look``
        self.received = False
        #: receives that have begun before their turn, or the errors with which they could not, by transfer
        self.early: dict[int, Pending | Exception] = {}

    def apply(self, batch: c.Batch) -> None:
        """Applies the next batch. Raises ProtocolError for any other one: a gap or a repeat fails the node."""
        if batch.first != self.seq:
            raise ProtocolError(f"batch {batch.first} came where {self.seq} was due: commands were lost or repeated")
        if self._beside:
            self._schedule(batch.commands, batch.first)
            return
        end = self._end = batch.first + len(batch.commands)
        templates, call, store = self.templates, c.Call, self.store
        for seq, command in enumerate(batch.commands, batch.first):
            try:
                if type(command) is call:
                    template = templates[command.template]
                    if store.sending and template.mutated:
                        self.seq = seq
                        self._wait_for_sends(template, command)
                    template.run(command.out, command.args)
                else:
                    self.seq = seq
                    self.other(command)
                    if self._beside:
                        self._schedule(batch.commands[seq + 1 - batch.first :], seq + 1)
                        return
            except Exception as e:
                self.seq = seq
                self.failed(command, e)
        self.seq = end
        if store.sending:
            store.wait_for_sends([])  # drops references to tensors whose bytes have left: they may have been freed

    def apply_timed(self, batch: c.Batch, moments: array[float], now: Callable[[], float]) -> None:
        """Does what ``apply`` does, and notes when it begins with each command, and when it has ended.

        A loop of its own: one that served both would have each command pay for a look whether its time is wanted.
        """
        if batch.first != self.seq:
            self.apply(batch)  # which refuses it
        templates, call, store, note = self.templates, c.Call, self.store, moments.append
        if self._beside:
            self._schedule(_timed(batch.commands, note, now), batch.first)
            return
        end = self._end = batch.first + len(batch.commands)
        for seq, command in enumerate(batch.commands, batch.first):
            note(now())
            try:
                if type(command) is call:
                    template = templates[command.template]
                    if store.sending and template.mutated:
                        self.seq = seq
                        self._wait_for_sends(template, command)
                    template.run(command.out, command.args)
                else:
                    self.seq = seq
                    self.other(command)
                    if self._beside:
                        rest = batch.commands[seq + 1 - batch.first :]
                        self._schedule(_timed(rest, note, now), seq + 1)
                        return
            except Exception as e:
                self.seq = seq
                self.failed(command, e)
        note(now())
        self.seq = end
        if store.sending:
            store.wait_for_sends([])

    def one(self, command: c.Command) -> None:
        """Applies a command that a graph has recorded."""
        try:
            self.other(command)
        except Exception as e:
            self.failed(command, e)

    def _schedule(self, commands: Iterable[c.Command], first: int) -> None:
        """Applies commands, numbered from ``first``, on a node with streams, whose lanes run them."""
        lanes, seq = self._lanes, first - 1
        assert lanes is not None
        for seq, command in enumerate(commands, first):
            self.seq = seq
            try:
                lanes.do(command)
            except Exception as e:
                lanes.fail(command, e)
        self.seq = seq + 1
        if self.store.sending:
            self.store.wait_for_sends([])
        if lanes.idle:  # the last stream is gone
            lanes.close()
            self._lanes, self._beside = None, False

    @property
    def done(self) -> int:
        """The number of commands that are done for good. Any thread may ask for it."""
        lanes = self._lanes
        return self.seq if lanes is None else lanes.done()

    def close(self) -> None:
        """Ends the threads beside the receiving thread. One that waits for a transfer goes on until the channel is
        closed."""
        self.graphs.close()
        self.shared_pages.close()
        if self._lanes is not None:
            self._lanes.close()

    def join(self, timeout: float) -> None:
        """Waits for the threads after ``close``, ``timeout`` seconds at most."""
        if self._lanes is not None:
            self._lanes.join(timeout)

    # ---- the less frequent commands --------------------------------------------------------------------------------

    def other(self, command: c.Command) -> None:
        """Applies any command."""
        store = self.store
        match command:
            case c.Call():
                template = self.templates[command.template]
                if template.mutated and store.sending:
                    self._wait_for_sends(template, command)
                if type(command) is c.First:
                    self._hear(template, command)
                    template.compare(command, store.entries)
                else:
                    try:
                        template.run(command.out, command.args)
                    except warned.Loud:
                        self._hear(template, command)
            case c.Free():
                store.free(command.first, command.distances)
            case c.Replay():
                self.graphs.replay(command)
            case c.Define():
                try:
                    template = Template(command, self.allow, store.entries, self.device)
                except Exception as e:  # reported now, and each call of the template is poisoned by it
                    template = Broken(command, PoisonRead(self.report_failure(command.op, e)))
                if command.op == RESIZE_STORAGE:
                    template.run = template.call = partial(_resize, store, template)
                self.templates[command.template] = template
                if self.check is not None:
                    self.look_at(template)
            case c.Forget():
                self._forgotten.update(command.templates)
                for number in self._forgotten - self.graphs.templates():
                    self._forgotten.discard(number)
                    self.templates.pop(number, None)
            case c.Ask():
                self._ask(command)
            case c.Send() if self._goes_on(command.ref):
                self._begin_lanes(command)
            case c.Send():
                self._send(command)
            case c.Download() if self._goes_on(command.ref):
                self._answer_at_arrival(command)
            case c.Recv():
                self._recv(command)
            case c.Piece():
                self.functions.piece(command.key, command.data, command.last)
            case c.Run():
                self._run(command)
            case c.Adopt(refs=()):
                self.results.pop(command.request, None)
            case c.Adopt():
                self.adopt_results(command)
            case c.Default():
                torch.set_default_dtype(codec.dtype_of(command.dtype))
            case c.Switch():
                self.switch(command)
            case c.Upload() | c.Download() | c.Seed() | c.Swap() | c.Random() | c.Keep() | c.Storage() | c.Digest():
                made = self.effect(command, self.tensor)
                store.entries.update(zip(TRAITS[type(command)].makes(command, None), made, strict=True))
            case c.Sync():
                self.settle_all()
                self.synchronized(command)
            case c.Memory():
                self.memory(command)
            case c.MemoryStats():
                self.memory_stats(command, self.number)
            case c.Collective(request=0):
                page.mine.begin_command(self.seq, COLLECTIVE)
                collectives.take_part(self, command)
                page.mine.begin_command(self.seq, COMMANDS)
            case c.MakeStream() | c.Wait() | c.Signal() | c.Await() | c.Join() | c.Collective():
                self._begin_lanes(command)
            case c.Record() | c.Query() | c.Elapsed():
                self.events.do(command)
            case c.GraphPart():
                self.graphs.part(command)
            case c.EndGraph():
                self.graphs.define(command)
            case c.Discard():
                self.graphs.discard(command)
            case c.Engines():
                self.emit(c.GraphEngines(command.request, self.graphs.engines(command.graph)))
            case c.Count():
                self.emit(c.TrafficCounts(command.request, self.traffic()))
            case c.Peer():
                self.channels.connect(command.channel, command.rank, command.addresses, command.key)
            case c.Open():
                self.emit(c.Opened(command.request, self.channels.open(command.channel, command.name)))
            case c.Usable():
                why_not = self.allow.why_not if command.ops else partial(why_unusable, rank=self.rank)
                self.emit(c.Unusable(command.request, tuple(codec.one_line(why_not(name)) for name in command.names)))
            case c.Lost():
                self.channels.mark_lost(command.rank, command.why)
            case c.Again():
                self.note_new_worker(command)
            case c.StopNode():
                self.stopped = True
                store.clear()
            case c.On():
                raise ProtocolError(f"stream {command.stream} is unknown")  # while there is one, lanes take it
            case _:
                raise ProtocolError(f"{type(command).__name__} is not for the executor")

    def _begin_lanes(self, command: c.Command) -> None:
        """Has lanes do this command and those that come, until there is nothing for them to do (``_schedule``)."""
        self._lanes = Scheduler(self, self.other, self.failed, self.events, self.graphs)
        self._beside = True
        self._lanes.do(command)

    def _goes_on(self, ref: int) -> bool:
        """Returns whether a tensor is on its way, so that the node goes on: it is passed on when it is there. Not while
        peaks are counted, which are not exact then."""
        if self._lanes is not None or self.at >= 0 or self.store.tally is not None:
            return False
        entry = self.store.entries.get(ref)
        return isinstance(entry, Later) and not entry.is_completed()

    def _ask(self, command: c.Ask) -> None:
        call = command.call
        template = self.templates[call.template]
        if template.mutated and self.store.sending:
            self._wait_for_sends(template, call)
        if template.outs or template.mutated:  # mostly the first call of a signature, or one with shapes of its own
            made = warned.hear(template, template.aloud(self.store.entries), call, self.emit, self.number)
        else:
            made = template.call(call.out, call.args)
        results = self.answer(command, template, made, self.store.entries)
        if template.outs:
            for ref, tensor in zip(template.results(call.out, call.args), results, strict=True):
                if tensor is not None:
                    self.store.entries[ref] = tensor

    def _hear(self, template: Template, call: c.Call) -> None:
        """Applies a call whose warnings are told."""
        entries = self.store.entries
        warned.hear(template, template.storing(entries, template.aloud(entries)), call, self.emit, self.number)

    def _send(self, command: c.Send) -> None:
        channel = self.channels.data[command.channel]
        try:
            entry = self.entry(command.ref)
        except Exception:  # as below: nobody must wait for what there is not
            channel.refuse(command.peer, command.transfer, self.rank, self.number)
            raise
        if isinstance(entry, Poison):
            channel.refuse(command.peer, command.transfer, entry.rank, entry.seq)
            return
        if self.store.sending:
            self.store.make_way(entry.nbytes)
        try:
            transfer = channel.isend(entry, command.peer, command.transfer)
        except Exception:  # a layout or dtype that the channel doesn't carry, or no memory: nobody must wait for it
            channel.refuse(command.peer, command.transfer, self.rank, self.number)
            raise
        if not transfer.is_completed():
            self.store.sending.append((entry, transfer))

    def _answer_at_arrival(self, command: c.Download) -> None:
        """Answers a question for a tensor that is on its way when it is there, in the thread that has received it:
        lanes would cost the node as much as several questions."""
        entry, read, number = self.store.entries[command.ref], Ticket(), self.number
        if not (isinstance(entry, Pending) and entry.device == "cpu"):  # what is put on a device is this thread's
            self.effect(command, self.tensor)
            return

        def answer() -> None:
            try:
                value = entry.result(partial(self.report_failure, "transfer", number=number))
                if isinstance(value, torch.Tensor):
                    self.effect(command, lambda ref: value)
                else:
                    self.emit(c.Poisoned(command.request, value.rank, value.seq))
            except Exception as e:
                poison = self.report_failure(name_of(command), e, number)
                self.emit(c.Poisoned(command.request, poison.rank, poison.seq))
            finally:
                read.finish()

        self.store.sending.append((entry, read))  # so that who writes it waits
        entry.transfer.add_done_callback(answer)

    def _recv(self, command: c.Recv) -> None:
        self.received = True
        pending = self.early.pop(command.transfer, None) or self.receive(command)
        if isinstance(pending, Exception):
            raise pending
        self.store.entries[command.out] = self.store.pending[command.out] = pending

    def _run(self, command: c.Run) -> None:
        self.store.wait_for_sends(None)  # the function may write tensors that are being sent
        job, number, seam = self.functions.claim(command), self.number, self.seam
        run = partial(job, self.hold_tensor if command.holds else self.lent)
        if seam.function.listeners:
            named = name_of(command), command.request
            run = partial(seam.notify_end_of, seam.function, FunctionDone, run, "", number, *named)
        with page.mine.function(number), warned.telling(self.emit, number):
            done = run()
        refs, more = TRAITS[c.Run].makes(command, None), self.seq + 1 < self._end
        self.store.entries.update(zip(refs, self.finish_run(command, more, *done), strict=True))

    # ---- transfers and poison --------------------------------------------------------------------------------------

    def _wait_for_sends(self, template: Template, call: c.Call) -> None:
        targets = [self.entry(call.out - int(call.args[i])) for i in template.mutated]  # type: ignore[arg-type]
        self.store.wait_for_sends([t for t in targets if isinstance(t, torch.Tensor)])

    def failed(self, command: c.Command, error: Exception) -> None:
        """Handles a failed command: retries it if it met a tensor on its way, passes poison on, or reports an error."""
        if isinstance(command, c.On):  # it is for a stream that is unknown, and nobody else's
            self.give_up(command.command, self.report_failure(name_of(command), error))
            return
        if type(error) is warned.Loud:
            try:
                self.other(command)
                return
            except Exception as again:
                error = again
        call = command.call if isinstance(command, c.Ask) else command
        template = self.templates.get(call.template) if isinstance(call, c.Call) else None
        poison: Poison | None = error.poison if type(error) is PoisonRead else None
        if template is not None and isinstance(call, c.Call) and poison is None:
            try:
                operands = template.operands(call.out, call.args)
                spent = [e for e in map(self.store.entries.get, operands) if isinstance(e, Outgrown)]
                if spent and template.name != RESIZE_STORAGE:
                    error = spent[0].error()
                waited = any(isinstance(self.store.entries.get(ref), Later) for ref in operands)
                read = [e for e in map(self.entry, operands) if isinstance(e, Poison)]
            except NotReplayed as e:
                waited, read, error = False, [], e
            except Exception:  # invalid arguments from the master: the command's own error is reported
                waited, read = False, []
            poison = earliest(read)
            if poison is None and waited:
                page.mine.begin_command(self.seq, RECEIVE)
                try:
                    self.other(command)
                    page.mine.begin_command(self.seq, COMMANDS)
                    return
                except Exception as again:
                    again.__context__ = None  # the report leaves out that it came too early the first time
                    error = again
        if poison is None:
            poison = self.report_failure(template.name if template else name_of(command), error)
        self.give_up(command, poison)


def _resize(store: Store, template: Template, out: int, args: tuple[c.Plain, ...]) -> None:
    """Runs a call of the operator that makes memory smaller or larger."""
    (ref,) = template.operands(out, args)
    store.resize(ref, int(args[1]))  # type: ignore[arg-type]


def _timed(
    commands: Iterable[c.Command], note: Callable[[float], None], now: Callable[[], float]
) -> Iterator[c.Command]:
    """Yields commands; notes when each is asked for, and when all are done."""
    for command in commands:
        note(now())
        yield command
    note(now())
