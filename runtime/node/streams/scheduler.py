"""The scheduler of a node with streams: it turns commands into tasks of lanes.

Nodes whose master made no stream never come here: their receiving thread executes by itself (executor.py). While there
are streams the default one is a lane too, except while none of the others is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from ...channel.base import MASTER, Transfer
from ...channel.ticket import Ticket
from ...collective import NATIVE
from ...process import page
from ...process.observing import FunctionDone
from ...protocol import codec
from ...protocol import commands as c
from ...protocol.allow_list import RESIZE_STORAGE
from ...protocol.errors import ChannelError, PoisonedError, ProtocolError
from ...protocol.failure_ids import Poison
from ...protocol.traits import TRAITS, kinds
from .. import warned
from ..collectives import join
from ..failures import name_of
from ..held import Holding
from ..state import NodeState, PoisonRead
from ..store import Entry, Later, Outgrown, Pending, Promise, Reading, Unmade, made, memory, release
from ..template import Template, tensors_of
from ..user_functions import Returned
from .cuda_lane import CudaLane, CudaMark, keep_for_default, on, sign
from .events import Events
from .lane import Lane, LaneTask, Results, Run, Values, when_all
from .lanes import Lanes, stream_of

#: After so many commands none of which was for a stream, the receiving thread does those of the default one by itself:
#: handing a small operation over costs as much as doing it.
LATELY = 1024
#: Bytes of the operands of a collective that takes a moment only, except in waits for other ranks.
BRIEF = 64 << 10


class Graphs(Protocol):
    """The part of the node's graphs that lanes know of."""

    def sends(self, graph: int) -> bool: ...

    def switches(self, graph: int) -> bool: ...


class Scheduler(Lanes):
    """The lanes of one node; decides which command goes to which lane.

    ``apply`` does a command in the calling thread; ``failed`` is the way out of one that failed there.
    """

    def __init__(
        self,
        node: NodeState,
        apply: Callable[[c.Command], None],
        failed: Callable[[c.Command, Exception], None],
        events: Events,
        graphs: Graphs,
    ) -> None:
        super().__init__(node)
        self._apply, self._failed, self._events, self._graphs = apply, failed, events, graphs
        self._users: dict[int, Lane] = {}  #: the streams that the master made, by ref
        self._peers: dict[int, Lane] = {}  #: the lanes that send to a peer, in order
        self.default = self.lane("default")
        self._lately = 0  #: commands until the receiving thread does the default stream's again
        self._make: dict[type, Callable[[Lane, Any], None]] = {
            **dict.fromkeys(kinds("anywhere"), self._effect),
            c.Call: self._call,
            c.First: self._call,
            c.Ask: self._ask,
            c.Send: self._send,
            c.Download: self._download,
            c.Recv: self._recv,
            c.Run: self._function,
            c.Record: self._record,
            c.Wait: self._wait,
            c.Await: self._await,
            c.Replay: self._replay,
            c.Collective: self._collective,
        }
        self._collective_lane: Lane | None = None  #: does all collectives of a node, one after the other
        self._ended: list[int] = []  #: requests of those that have ended, which the master was not told of yet

    def do(self, command: c.Command) -> None:
        """Deals out one command. The caller has to pass an exception of it to ``fail``."""
        if self._arrived or self._spoiled or self._taints:
            self.drain()
        if type(command) is c.On:
            self._lately = LATELY
            lane = self._users.get(command.stream)
            if lane is None:
                raise ProtocolError(f"stream {command.stream} is unknown")
            self._make[type(command.command)](lane, command.command)
        elif type(command) is c.Call and not (self._lately or self.default.order or self.cuda):
            self._inline(command)
        elif type(command) in self._make:
            self._lately = max(0, self._lately - 1)
            self._make[type(command)](self.default, command)
        else:
            self._other(command)

    def fail(self, command: c.Command, error: Exception) -> None:
        """Gives up a command that could not even be queued."""
        if isinstance(command, c.On):
            command = command.command
        template = self.node.templates.get(command.template) if isinstance(command, c.Call) else None
        name = name_of(command) if template is None else template.name
        poison = error.poison if type(error) is PoisonRead else self.report_failure(self.node.seq, name, error)
        self.node.give_up(command, poison)

    def _other(self, command: c.Command) -> None:
        node = self.node
        match command:
            case c.MakeStream():
                self.stream(command)
            case c.Free():
                self.store.free(command.first, command.distances)
                self._let_go()
            case c.Forget():
                self._apply(command)
                self._drop_twins()
            case c.Sync():
                self.when_done(lambda: node.synchronized(command))
            case c.Memory():
                when_all(map(self.mark, self.busy()), lambda: node.memory(command))
            case c.MemoryStats():
                number = node.number
                when_all(map(self.mark, self.busy()), lambda: node.memory_stats(command, number))
            case c.Signal():
                self._signal(command)
            case c.Join():
                self._join(command)
            case c.Default() | c.Switch() | c.GraphPart() | c.EndGraph() | c.Discard():  # these concern all streams
                self.wait_for(self.busy())
                self._apply(command)
                if isinstance(command, c.Switch):  # templates may make other closures now (finite.py)
                    self._drop_twins()
            case _:
                self._apply(command)

    def _drop_twins(self) -> None:
        for lane in self._all:
            lane.twins.clear()

    def stream(self, command: c.MakeStream) -> None:
        """Makes a stream."""
        device, name = self.node.device(command.device), str(command.ref)
        lane = self.cuda_lane(name, device, command.priority) if device.type == "cuda" else self.lane(name)
        self._users[command.ref] = self.entries[command.ref] = lane
        self._lately = LATELY

    @property
    def idle(self) -> bool:
        """True once there are no streams any more and nothing is under way: the executor can do without lanes."""
        if self._users or self.busy():
            return False
        self.drain()
        if self._taints:
            return False
        if self.cuda:
            for tensor in (*map(made, self.entries.values()), *self.node.returned()):
                if tensor is not None:
                    keep_for_default(tensor)
        return True

    def _let_go(self) -> None:
        for ref in [ref for ref in self._users if ref not in self.entries]:
            lane = self._users.pop(ref)
            if isinstance(lane, CudaLane):
                self._task(lane, "MakeStream", _joins(lane))
            lane.end()

    def _inline(self, call: c.Call) -> None:
        """Does a call of the default stream in the receiving thread, or queues it if an operand is not there yet."""
        node = self.node
        template = node.templates[call.template]
        if self.store.sending and template.mutated:
            self._call(self.default, call)
            return
        try:
            template.run(call.out, call.args)
        except Exception as e:
            try:
                operands = [self.entries.get(ref) for ref in template.operands(call.out, call.args)]
            except Exception:
                operands = []
            if any(isinstance(entry, Later) and not entry.is_completed() for entry in operands):
                self._call(self.default, call)
            else:
                self._failed(call, e)

    def _task(
        self,
        lane: Lane,
        name: str,
        run: Run,
        reads: Sequence[int] = (),
        outs: Sequence[int] = (),
        **more: Any,
    ) -> None:
        captured = {ref: self.node.present(ref) for ref in reads}
        self.put(lane, LaneTask(self.node.seq, name, run, captured, [(ref, Promise()) for ref in outs], **more))

    def _call(self, lane: Lane, call: c.Call) -> None:
        template = self.node.templates[call.template]
        if template.name == RESIZE_STORAGE:  # the tensors of other streams' tasks may lie there
            self.wait_for(self.busy())
            try:
                self._apply(call)
            except Exception as e:
                self._failed(call, e)
            return
        self._task(
            lane,
            template.name,
            partial(_run_call, self.node, self.node.number, lane, template, call),
            template.operands(call.out, call.args),
            template.results(call.out, call.args),
            writes=template.written(call.out, call.args),
            views=template.views,
        )

    def _ask(self, lane: Lane, ask: c.Ask) -> None:
        call, node = ask.call, self.node
        template, number = node.templates[call.template], node.number

        def run(values: Values) -> Results:
            made = _hear(node, number, lane, template, call)
            return node.answer(ask, template, made, values) or None

        self._task(
            lane,
            template.name,
            run,
            template.operands(call.out, call.args),
            template.results(call.out, call.args),
            writes=template.written(call.out, call.args),
            keeps=True,
            spoil=self._answers(ask.request),
            views=template.views,
        )

    def _answers(self, request: int) -> Callable[[Poison], None]:
        return lambda poison: self.node.emit(c.Poisoned(request, poison.rank, poison.seq))

    def _function(self, lane: Lane, command: c.Run) -> None:
        node = self.node
        job, number = node.functions.claim(command), node.number
        sends = list(self.store.sending)
        held = Holding({ref: self.node.present(ref) for ref in command.refs} if command.holds else {})
        cuda = self.cuda

        def done(values: Callable[[int], Any]) -> Returned:
            run, seam = partial(job, values), node.seam
            if seam.function.listeners:
                named = stream_of(lane), number, name_of(command), command.request
                run = partial(seam.notify_end_of, seam.function, FunctionDone, run, *named)
            with page.mine.function_beside(number), warned.telling(node.emit, number):
                returned = run()
            if cuda:  # before the script hears of them, which may have other streams use them
                sign(returned[1])
            return returned

        def run(values: Values) -> Results:
            if command.holds:
                try:
                    return node.finish_run(command, len(lane.order) > 1, *done(held.__getitem__))
                finally:
                    held.release_unread()
            touched = {memory(tensor) for tensor in values.values() if isinstance(tensor, torch.Tensor)}
            for entry, transfer in sends:  # the function may write their memory, and what it has kept of earlier calls
                release(entry, transfer, None if isinstance(entry, Reading) and not command.outs else touched)
            returned = done(lambda ref: self.store.lent(ref, values[ref]))
            return node.finish_run(command, len(lane.order) > 1, *returned)

        answer = self._answers(command.request)

        def spoil(poison: Poison) -> None:
            held.release_unread()
            node.functions.skip(command)
            answer(poison)

        outs = TRAITS[c.Run].makes(command, None)
        self._task(lane, name_of(command), run, command.refs, outs, spoil=spoil, views=not command.holds)
        if command.holds:
            self.store.sending.append((held, held))

    def _effect(self, lane: Lane, command: Any) -> None:
        """Queues a command that needs nothing but its operands."""
        if isinstance(command, c.Storage) and isinstance(self.entries.get(command.ref), Outgrown):
            self._apply(command)  # the one question that a tensor without its memory has an answer to
            return
        traits, node = TRAITS[type(command)], self.node
        self._task(
            lane,
            type(command).__name__,
            lambda values: node.effect(command, values.__getitem__) or None,
            traits.reads(command, None),
            traits.makes(command, None),
            spoil=self._answers(command.request) if traits.answers else None,
        )

    def _replay(self, lane: Lane, command: c.Replay) -> None:
        """Replays a graph in the receiving thread, in the lane's turn.

        Inputs that other streams make are waited for at their use. On a device it is the default stream's.
        """
        if self._graphs.switches(command.graph):  # of the whole process
            self.wait_for(self.busy())
        sends = self._graphs.sends(command.graph)
        collective = [self._collective_lane] if self._collective_lane is not None else []
        self.wait_for([lane, *((*self._peers.values(), *collective) if sends else ())])
        if not isinstance(lane, CudaLane):
            self._apply(command)
            return
        lane.join_default()
        try:
            self._apply(command)
        finally:
            lane.follow_default()

    def _collective(self, lane: Lane, command: c.Collective) -> None:
        """Queues a collective on a lane of its own.

        Nodes that do collectives in one order don't wait for each other in a circle.
        """
        node, seq, request = self.node, self.node.seq, command.request
        collective, began = self._collective_lane, False
        if collective is None or collective.ended:
            collective = self._collective_lane = self.lane("collective")

        def run(values: Values) -> Results:
            nonlocal began
            began = True
            with page.mine.collective_beside():
                join(node, seq, command, values, stream_of(collective), self._tell_ends)
            if request:
                self._ended.append(request)
            if self._ended and not _goes_on(collective):
                self._tell_ends()
            return None

        def spoil(poison: Poison) -> None:
            if not began and not self.closed:  # the other ranks wait for this one all the same
                given = collective.values
                try:
                    run({ref: v if isinstance(v := given.get(ref), torch.Tensor) else poison for ref in reads})
                    return
                except PoisonedError as error:
                    poison = Poison(error.rank, error.seq)
                except Exception as error:
                    poison = self.report_failure(seq, command.kind, error)
            self._tell_ends()
            if request:
                node.emit(c.Poisoned(request, poison.rank, poison.seq))

        reads = {ref: self._operand(ref, command.kind) for ref in (*command.inputs, *command.outs)}
        waits = [self.mark(lane)] if lane.order else []
        task = LaneTask(seq, command.kind, run, reads, writes=command.outs, waits=waits, spoil=spoil)
        size = sum(command.lengths) * codec.dtype_of(command.dtype).itemsize
        task.brief = not self.cuda and command.algorithm != NATIVE and size <= BRIEF
        self.put(collective, task)
        if not request:
            self._task(lane, command.kind, _nothing, waits=[self.mark(collective)])

    def _tell_ends(self) -> None:
        """Tells the master of the collectives that have ended. Called on their lane."""
        if self._ended:
            ended, self._ended = self._ended, []
            self.node.emit(c.TookPart(tuple(ended)))
            self.node.progress()

    def _operand(self, ref: int, what: str) -> Entry:
        entry = self.entries.get(ref)
        if entry is None or isinstance(entry, Unmade | Outgrown):
            try:
                return self.node.entry(ref)
            except Exception as e:
                return self.report_failure(self.node.seq, what, e)
        return entry

    # ---- events ----------------------------------------------------------------------------------------------------

    def _record(self, lane: Lane, command: c.Record) -> None:
        mark = self._events.new(command)
        # a transfer to the default stream delays only the commands that use its tensor; an event waits for it
        arriving = [p.transfer for p in self.store.pending.values()] if lane is self.default else []
        if lane.is_over():  # a stream that has done all says so at once
            place: AbstractContextManager[None] = on(lane, (), list) if self.cuda else nullcontext()
            with place:
                when_all(arriving, mark.reach)
            return
        self._task(
            lane, "Record", lambda values: when_all(arriving, mark.reach), spoil=lambda _: mark.reach(), over=True
        )

    def _wait(self, lane: Lane, command: c.Wait) -> None:
        mark = self._events[command.ref]
        if not mark.is_completed():
            self._task(lane, "Wait", _nothing, waits=[mark])

    def _await(self, lane: Lane, command: c.Await) -> None:
        arrival = self._events.arrival(command)

        def run(values: Values) -> Results:
            try:
                arrival.wait()
            except ChannelError as error:
                self.node.channel.blame(error, command.peer)
                raise
            return None

        self._task(lane, "Wait", run)

    def _signal(self, command: c.Signal) -> None:
        self._to_peer(command, torch.empty(0, dtype=torch.uint8), [self._events[command.ref]])

    def _join(self, command: c.Join) -> None:
        mark, done = self._events[command.ref], partial(self.node.emit, c.Done(command.request))
        if not isinstance(mark, CudaMark):
            mark.add_done_callback(done)
        else:  # in a thread of its own, for a CUDA event calls nobody
            lane = self.lane("join")
            self._task(lane, "Join", lambda values: done(), waits=[mark])
            lane.end()

    # ---- transfers -------------------------------------------------------------------------------------------------

    def _send(self, lane: Lane, command: c.Send) -> None:
        """Queues a send on the lane of its peer, which sends in the order of issue when ``lane`` has come this far."""
        entry = self.entries.get(command.ref)
        waiting = isinstance(entry, Later) and not entry.is_completed()
        peer = self._peers.get(command.peer)
        if entry is None or not (lane.order or waiting or self.cuda or (peer is not None and peer.order)):
            self._apply(command)
        elif not lane.order:
            self._to_peer(command, entry)
        elif waiting and (not self.cuda or isinstance(entry, Pending)):
            # the lane goes on, and the send alone waits for its tensor; one that is made on a device is the lane's
            self._to_peer(command, entry, [self.mark(lane)])
        else:
            reached = Promise()
            task = LaneTask(self.node.seq, "Send", lambda v: [v[command.ref]], {command.ref: entry}, [(0, reached)])
            self.put(lane, task)
            self._to_peer(command, reached)

    def _to_peer(self, command: c.Send | c.Signal, entry: Entry, waits: Sequence[Transfer] = ()) -> None:
        """Sends ``entry`` once it exists and all earlier sends to its peer are on their way."""
        sent, peer, transfer = Ticket(), command.peer, command.transfer
        channel = self.node.channels.data[command.channel if isinstance(command, c.Send) else 0]

        def run(values: Values) -> Results:
            channel.isend(values[0], peer, transfer).add_done_callback(sent.finish)
            return None

        def spoil(poison: Poison) -> None:
            try:
                channel.refuse(peer, transfer, poison.rank, poison.seq)
            finally:
                sent.finish()

        self.store.sending.append((entry, sent))
        self.put(self._peer(peer), LaneTask(self.node.seq, "Send", run, {0: entry}, waits=waits, spoil=spoil))

    def _peer(self, peer: int) -> Lane:
        """Returns the lane of what goes to a peer."""
        lane = self._peers.get(peer)
        if lane is None:
            lane = self._peers[peer] = self.lane(f"to-{peer}")
        return lane

    def _download(self, lane: Lane, command: c.Download) -> None:
        """Queues a question for a tensor on its lane; or, where another one makes the tensor, or a peer sends it, among
        what goes to the script: the lane goes on, as it does from a send."""
        entry = self.entries.get(command.ref)
        waiting = isinstance(entry, Later) and not entry.is_completed()
        if entry is None or not waiting or self.cuda or _makes(lane, entry):
            self._effect(lane, command)
            return
        sent, answer = Ticket(), self._answers(command.request)

        def run(values: Values) -> Results:
            self.node.effect(command, lambda ref: values[0])
            sent.finish()
            return None

        def spoil(poison: Poison) -> None:
            try:
                answer(poison)
            finally:
                sent.finish()

        self.store.sending.append((entry, sent))
        task = LaneTask(self.node.seq, "Download", run, {0: entry}, waits=[self.mark(lane)], spoil=spoil)
        self.put(self._peer(MASTER), task)

    def _recv(self, lane: Lane, command: c.Recv) -> None:
        self._apply(command)
        if lane is not self.default:  # the default one goes on until a command uses the tensor
            self.store.pending.pop(command.out, None)
            self._task(lane, "transfer", _nothing, [command.out])


def _goes_on(lane: Lane) -> bool:
    """Returns whether what a lane does next is brief, and can begin at once: what has ended is told then when it has
    ended too, or waits for another rank."""
    try:
        this, task = lane.order[0], lane.order[1]
    except IndexError:
        return False
    if not task.brief or task.sends or not all([mark.is_completed() for mark in task.waits]):
        return False
    made = [promise for _, promise in this.writes]  # as good as kept
    return all(
        not isinstance(entry, Later) or entry.is_completed() or any(entry is each for each in made)
        for entry in task.reads.values()
    )


def _makes(lane: Lane, entry: Entry) -> bool:
    """Returns whether a task of the lane makes this entry."""
    tasks = reversed(tuple(lane.order))  # at once: the lane's thread takes done ones out
    return any(entry is promise for task in tasks for _, promise in (*task.outs, *task.writes))


def _joins(lane: CudaLane) -> Run:
    return lambda values: lane.join_default()


def _nothing(values: Values) -> Results:
    return None


def _twin(lane: Lane, template: Template) -> Callable[[int, Any], Any]:
    """Returns the template's closure over the operands of the lane's task."""
    twin = lane.twins.get(template)
    if twin is None:
        twin = lane.twins[template] = template.over(lane.values)
    return twin


def _hear(node: NodeState, number: int, lane: Lane, template: Template, call: c.Call) -> Any:
    return warned.hear(template, template.aloud(lane.values), call, node.emit, number)


def _run_call(node: NodeState, number: int, lane: Lane, template: Template, call: c.Call, values: Values) -> Results:
    if template.loud or type(call) is c.First:
        result = _hear(node, number, lane, template, call)
    else:
        result = _twin(lane, template)(call.out, call.args)
    results = [] if not template.outs else [result] if isinstance(result, torch.Tensor) else tensors_of(result)
    if type(call) is c.First:
        template.compare(
            call, {**lane.values, **dict(zip(template.results(call.out, call.args), results, strict=True))}
        )
    return results or None
