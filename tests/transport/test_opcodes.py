"""The hot path, counted: the opcodes of Python that an operation executes in the script, and a message on its node.

A count is the same in every run and on every machine, which a time is not. What makes one grow says why in its commit,
and raises it here; what lowers one lowers it here, so that it does not grow again.
"""

from __future__ import annotations

import math
import select
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import is_
from threading import get_ident
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from limits import HANG
from opcodes import Counter, opcodes, without_a_collector
from thread_nodes import thread_nodes

import disttensor as dt
from disttensor.dispatch import copies, op_table, whole_batches
from disttensor.futures.listening import GroupEnd
from disttensor.runtime.master import waiting as waiting_module
from disttensor.runtime.master.requests import Waker
from disttensor.runtime.master.sender import Sender
from disttensor.runtime.master.waiting import Waiting
from disttensor.runtime.node.gathering import Gathering
from disttensor.runtime.node.graphs.engines.compiled import Compiled
from disttensor.runtime.node.graphs.engines.listing import input_geometry
from disttensor.runtime.node.graphs.program import Program
from disttensor.runtime.node.receive_ahead import Ahead
from disttensor.runtime.process.observing import IssueNotes, MessageSent
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.seeing.recording import Recording
from disttensor.session import current

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the counts are those of Python 3.11; other Pythons have other opcodes"
)

#: How often something is done before it is counted, so that it takes its quick way.
WARM = 60
#: How often it is counted: the least count is that of an operation that neither sends the queue nor waits for room.
TIMES = 30


@dataclass
class Operands:
    plain: torch.Tensor
    other: torch.Tensor
    leaf: torch.Tensor
    spread: torch.Tensor
    each: list[torch.Tensor]  #: one for each node
    local: torch.Tensor
    square: torch.Tensor
    weight: torch.Tensor  #: of the size of ``square``, with a gradient


#: Operations, and the opcodes that the script's thread executes for each, with the call of the function here.
OPERATIONS: dict[str, tuple[Callable[[Operands], object], int]] = {
    "x * 2": (lambda it: it.plain * 2, 185),
    "x + y": (lambda it: it.plain + it.other, 176),
    "x[0]": (lambda it: it.plain[0], 161),
    "x += y": (lambda it: it.plain.add_(it.other), 181),
    "x *= 2": (lambda it: it.plain.mul_(2), 190),
    "x.zero_()": (lambda it: it.plain.zero_(), 153),
    "a form with a static argument": (lambda it: torch.softmax(it.plain, 0), 202),
    "a form of three": (lambda it: torch.lerp(it.plain, it.other, 0.5), 230),
    "a form in place": (lambda it: it.plain.lerp_(it.other, 0.5), 223),
    "zeros_like": (lambda it: torch.zeros_like(it.plain), 217),
    "x * 2, with gradients": (lambda it: it.leaf * 2, 339),
    "x + y, with gradients": (lambda it: it.leaf + it.other, 329),
    "linear, with gradients": (lambda it: F.linear(it.square, it.weight), 368),
    "x[0], with gradients": (lambda it: it.leaf[0], 201),
    "x * 2, on a mesh": (lambda it: it.spread * 2, 185),
    "x + y, on a mesh": (lambda it: it.spread + it.spread, 176),
    "x[0], on a mesh": (lambda it: it.spread[0], 161),
    'local.to("node:0")': (lambda it: it.local.to("node:0"), 589),
    "x.copy_(local)": (lambda it: it.plain.copy_(it.local), 899),
    "local.to(mesh)": (lambda it: it.local.to(it.spread.device), 623),
}
#: Small collectives, and the opcodes of the script's thread for each, from the call to the queue.
COLLECTIVES: dict[str, tuple[Callable[[Operands], object], int]] = {
    "a list": (lambda it: dt.all_reduce(it.each), 2015),
    "a list, asynchronous": (lambda it: dt.all_reduce(it.each, async_op=True), 2230),
    "a mesh": (lambda it: dt.collectives.all_reduce_(it.spread, over="dp"), 1530),
    "a mesh, asynchronous": (lambda it: dt.collectives.all_reduce_(it.spread, over="dp", async_op=True), 1727),
    "a mesh, to a new tensor": (lambda it: dt.all_reduce(it.spread, over="dp"), 2344),
}
#: Those of a wait for an asynchronous one that has ended; and of each node's answer, where one reply has many.
WAITED, ANSWERED = 21, 31
#: The opcodes of the flight record, which is always on: for a message that is sent to a node, and for one that a node
#: has applied. An operation has none.
SENT_RECORD, APPLIED_RECORD = 69, 28
#: Places, and the opcodes of the script's thread for one message to them, with one operation.
SENT: dict[str, tuple[Callable[[Operands], torch.Tensor], int]] = {
    "a node": (lambda it: it.plain, 830 + SENT_RECORD),
    "a mesh": (lambda it: it.spread, 1221 + 2 * SENT_RECORD),
}
#: Those that a listener to what is sent adds to one for a node, without its own.
HEARD = 88
#: The opcodes of a node's thread for a message with one operation, once it has taken it.
MESSAGE = 257 + APPLIED_RECORD
#: Those of a replay on its node besides the program's own, however many inputs and results it has.
REPLAY = 163
#: Those of a compiled program that is given inputs anew, however many, without the library's and one result.
COMPILED = 169
#: Those that a listener to what is issued adds to an operation, and one to a node's commands to a message with one
#: operation; without their own.
ISSUED, COMMANDS = 104, 219
#: Those that a profile adds while it records: to an operation where several threads issue, to a message that is sent
#: (beside ``HEARD``), to a command on its node, and to a message there.
NOTED, SENT_NOTED, TIMED, BEGUN = 31, 89, 9, 195
#: Those of an edge of a part with a name, with one queue in use, and of its end besides.
EDGE, REGION = 48, 20


#: Questions for a value, and the opcodes of the script's thread for each, without those of the exchange of messages,
#: which are the same for all.
QUESTIONS: dict[str, tuple[Callable[[Operands], Any], int]] = {
    "x.item()": (lambda it: it.plain[0], 343),
    "x.cpu()": (lambda it: it.plain, 441),
    'x.to("cpu")': (lambda it: it.plain, 498),
    'x.to(device="cpu")': (lambda it: it.plain, 500),
    "dt.fetch(x)": (lambda it: it.plain, 597),
}
#: Those of `.item()` of a mesh for each further node: its message, its reply, and the look whether all say the same.
FURTHER_NODE = 649


#: Functions of the user's that are called on a node, and the opcodes of the script's thread for each call, to the queue
#: of a node that is busy, and for a look at the result, once it is there.
CALLS: dict[str, tuple[Callable[[Any], Any], int, int]] = {
    "submit": (lambda _: dt.submit(add, 1, 2, node=0), 1999, 326),
    "an actor's method": (lambda actor: actor.add(1), 1869, 334),
}


@pytest.fixture
def operands(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operands]:
    # what other tests of this process have left: IPython, with which each call looks whether a cell has changed its
    # module; what the first block of another node has put around this method; what looks at uploads beside accelerate
    monkeypatch.setattr(copies, "upload", whole_batches.plain)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    if "to" in vars(torch.Tensor):
        monkeypatch.delattr(torch.Tensor, "to")
    for entry in op_table.entries.values():  # forms of other tests' calls, which come before those of these
        entry.forms.clear(), entry.known_forms.clear()
    with dt.init_master_worker(nodes=2, launcher="inproc"), without_a_collector():
        here = torch.ones(4)
        leaf = torch.ones(4, device="node:0", requires_grad=True)
        each = [here.to(f"node:{k}") for k in range(2)]
        square = torch.ones(4, 4, device="node:0")
        weight = square.clone().requires_grad_()
        spread = here.to(dt.mesh(dp=2).device)
        yield Operands(here.to("node:0"), here.to("node:0"), leaf, spread, each, here, square, weight)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation(name: str, operands: Operands) -> None:
    """The least of many: in the script's thread, from the call to the queue."""
    function, expected = OPERATIONS[name]
    counts = [opcodes(function, operands) for _ in range(WARM + TIMES)][WARM:]
    assert min(counts) == expected


@pytest.mark.parametrize("name", ["x * 2", "x * 2, with gradients"])
def test_an_operation_costs_what_it_cost_before_a_mesh_was_torchs(name: str, operands: Operands) -> None:
    """Torch asks the operand that it makes of a number for the SymInt behind it, which may be one of ranks."""
    _ = dt.mesh(dp=2).torch
    function, expected = OPERATIONS[name]
    assert min([opcodes(function, operands) for _ in range(WARM + TIMES)][WARM:]) == expected


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question(monkeypatch: pytest.MonkeyPatch, name: str, operands: Operands) -> None:
    """What is around the exchange makes a small download as cheap as a value."""
    of, expected = QUESTIONS[name]
    asked, counter, works = of(operands), Counter(), list[Any]()
    ask: Any = {
        "x.item()": asked.item,
        "x.cpu()": asked.cpu,
        'x.to("cpu")': lambda: asked.to("cpu"),
        'x.to(device="cpu")': lambda: asked.to(device="cpu"),
        "dt.fetch(x)": lambda: works.append(dt.fetch(asked)),
    }[name]
    for exchange in ("exchange", "flush"):
        original = getattr(Sender, exchange)

        def uncounted(*args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            sys.settrace(None)
            reply = original(*args, **kwargs)
            if get_ident() in counting:
                counter.join(sys._getframe(1))
            return reply

        monkeypatch.setattr(Sender, exchange, uncounted)
    counts, counting = list[int](), set[int]()
    for _ in range(WARM + TIMES):
        counter.count = 0
        counting.add(get_ident())
        sys.settrace(counter.trace)
        ask()
        sys.settrace(None)
        counting.clear()
        counts.append(counter.count)
        while works:
            works.pop().wait()
    assert min(counts[WARM:]) == expected


def test_a_question_to_a_mesh() -> None:
    assert item_of_a_mesh(3) - item_of_a_mesh(2) == FURTHER_NODE


def item_of_a_mesh(nodes: int) -> int:
    """Returns the least opcodes of a question whose answers are all there at the first look, in the ranks' order. With
    the link's lock, so that no other thread takes them."""
    counter, counts, arrived = Counter(), list[int](), list[tuple[int, bytes]]()

    def poll(waiting: Waiting, poller: select.poll, waker: Waker, seconds: float) -> bool:
        sys.settrace(None)
        while len(arrived) < nodes:
            poller.poll()
            arrived.extend(drain(hub))
        arrived.sort()
        counter.join(sys._getframe(1))
        return waiting._readable([(hub.fileno(), select.POLLIN)], waker)

    def take(_: object) -> list[tuple[int, bytes]]:
        taken = arrived[:]
        arrived.clear()
        return taken

    with dt.init_master_worker(nodes=nodes, launcher="inproc"), without_a_collector():
        x, link = torch.ones((), device=dt.mesh(dp=nodes).device), current.session().link
        hub = link.replies._hub
        drain = type(hub).drain
        with pytest.MonkeyPatch.context() as patch:
            for _ in range(WARM + TIMES):
                dt.synchronize()
                with link.lock:
                    patch.setattr(Waiting, "_poll", poll)
                    patch.setattr(type(hub), "drain", take)
                    patch.setattr(waiting_module, "RECORDED", math.inf)  # beside a load each wait takes so long
                    codec._head.cache_clear()  # it has heads of other sessions
                    counter.count = 0
                    sys.settrace(counter.trace)
                    x.item()
                    sys.settrace(None)
                    patch.undo()
                counts.append(counter.count)
    return min(counts[WARM:])


GATE = threading.Event()


def pass_gate() -> None:
    assert GATE.wait(HANG)


def add(x: int, y: int) -> int:
    return x + y


class Sum:
    def __init__(self) -> None:
        self.sum = 0

    def add(self, x: int) -> int:
        self.sum += x
        return self.sum


@pytest.mark.parametrize("name", CALLS)
def test_a_call(name: str, operands: Operands) -> None:
    """The least of many: the function's pickle is kept, and a message takes several calls."""
    call, expected, looked = CALLS[name]
    actor, works, calls = dt.actor(Sum, node=0), list[Any](), list[int]()
    GATE.clear()
    busy = dt.submit(pass_gate, node=0)
    try:
        for _ in range(WARM + TIMES):
            calls.append(opcodes(lambda: works.append(call(actor))))
    finally:
        GATE.set()
    busy.result()
    assert works[-1].result() == (3 if name == "submit" else WARM + TIMES)
    looks = [opcodes(work.result) for work in works[:-1]]
    assert (min(calls[WARM:]), min(looks)) == (expected, looked)
    assert operands


@pytest.mark.parametrize("place", SENT)
def test_a_flush(place: str, operands: Operands) -> None:
    of, expected = SENT[place]
    assert flushed(of(operands)) == expected


def test_a_flush_with_a_listener(operands: Operands) -> None:
    with current.session().link.seam.sent.heard_by([].append):
        assert flushed(operands.plain) == SENT["a node"][1] + HEARD
    assert flushed(operands.plain) == SENT["a node"][1]


def test_an_operation_with_a_listener(operands: Operands) -> None:
    """It has no cost before and after: issuing threads have another queue meanwhile."""
    function, expected = OPERATIONS["x * 2"]
    with current.session().link.seam.issued.heard_by([].append):
        counts = [opcodes(function, operands) for _ in range(WARM + TIMES)][WARM:]
        assert min(counts) == expected + ISSUED
    counts = [opcodes(function, operands) for _ in range(WARM + TIMES)][WARM:]
    assert min(counts) == expected


@pytest.mark.parametrize("several", [False, True])
def test_an_operation_while_a_profile_is_on(operands: Operands, several: bool) -> None:
    """The time and the line are noted at a queue's limit; where several threads issue, of each. It has no cost before
    and after."""
    function, expected = OPERATIONS["x * 2"]
    link, notes = current.session().link, IssueNotes(room=1000)
    notes.complete = several
    for recorded, more in ((None, 0), (notes, NOTED if several else 0), (None, 0)):
        link.note_issued(recorded)
        counts = [opcodes(function, operands) for _ in range(WARM + TIMES)][WARM:]
        assert min(counts) == expected + more
        if recorded is not None:
            with link.lock:  # else another thread may send it first
                operands.plain * 2
                link.sender.at_limit(operands.plain._place.outbox)
    if several:
        assert len(notes.noted[(0,), get_ident()]) == 2 * (WARM + TIMES + 1)
    else:
        assert not notes.noted
        assert 0 < len(notes.lines) < 4 * (WARM + TIMES)


def test_a_part_with_a_name_while_a_profile_is_on(operands: Operands) -> None:
    """A step of an optimizer has two, so each of their opcodes counts."""
    recording = Recording(current.session().link)

    def most(function: Callable[..., object], *arguments: object) -> int:
        """With a command in the queue, which the thread that flushes may take before."""
        counts = []
        for _ in range(TIMES):
            operands.plain * 2
            counts.append(opcodes(function, *arguments))
        return max(counts)

    assert most(recording.note_edge) == EDGE
    assert most(recording.note_region, 0.0, "forward") == EDGE + REGION


def test_a_message_that_is_sent_while_a_profile_is_on(operands: Operands) -> None:
    """Without what a listener adds."""
    link, sent = current.session().link, list[MessageSent]()
    with link.seam.sent.heard_by(sent.append):
        operands.plain * 2
        dt.synchronize()
    recording = Recording(link)
    assert {opcodes(recording._note_sent, event) for event in sent} == {SENT_NOTED}


@pytest.mark.parametrize("commands", [1, 5])
def test_a_command_on_its_node_while_a_profile_is_on(commands: int) -> None:
    """A loop of its own notes the time before each command: what else it does is what the other does."""
    with thread_nodes(1) as (worker,), without_a_collector():
        x, sent = torch.ones(4, device="node:0"), list[MessageSent]()
        x.mul_(1)
        with current.session().link.seam.sent.heard_by(sent.append):
            x.mul_(1)
            dt.synchronize()
        call = next(it for it in codec.decode_batch(sent[0].message).commands if type(it) is c.Call)
        executor, gathering, counts = worker.executor, Gathering(worker.seam), list[int]()
        first = executor.seq
        for points in ((), ("timed",)):
            gathering.watch(points, 1000, 1000)
            for _ in range(3):  # the message before is told of with the next one
                batch = c.Batch(executor.seq, (call,) * commands)
                count = opcodes(worker._apply if points else executor.apply, batch, *([1] if points else []))
            counts.append(count)
        executor.seq = first
    assert counts[1] - counts[0] == BEGUN + commands * TIMED


@pytest.mark.parametrize(("inputs", "results"), [(1, 2), (9, 2), (1, 9)])
def test_a_replay_on_its_node(inputs: int, results: int) -> None:
    """Of a function's commands: from the tensors that the replay names to those that it makes."""
    held = torch.ones(4)

    @dt.graphed
    def function(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        made = [x + held for x in xs]
        return [made[0] * k for k in range(results)]

    with thread_nodes(1) as (worker,), without_a_collector():
        held, xs = held.to("node:0"), [torch.ones(4, device="node:0") for _ in range(inputs)]
        kept, sent = [function(xs) for _ in range(3)], list[MessageSent]()
        dt.synchronize()
        with current.session().link.seam.sent.heard_by(sent.append):
            kept.append(function(xs))
            dt.synchronize()
        replay = next(it for it in codec.decode_batch(sent[0].message).commands if type(it) is c.Replay)
        graphs, entries = worker.executor.graphs, worker.executor.store.entries
        (segment,) = graphs._graphs[replay.graph].steps
        given = [entries[ref] for ref in (*replay.inputs, held._h.ref)]  # type: ignore[attr-defined]
        whole, program = opcodes(graphs.replay, replay), opcodes(segment.engine.run, given, ())  # type: ignore[union-attr]
    assert whole - program == REPLAY


@pytest.mark.parametrize("inputs", [1, 30])
def test_inputs_of_a_compiled_program(inputs: int) -> None:
    """What is looked at of them: a backward program has more than a hundred that are new at each replay."""
    tensors = [torch.ones(4, 6) for _ in range(inputs)]
    program = Program((), tuple(range(inputs)), (0,), 0)
    taken = [["input", i] for i in range(inputs)]
    plan = {"arguments": taken, "draws": [], "fence": [], "checks": [], "results": [["input", 0]], "made": []}
    compiled = Compiled(program, input_geometry(tensors), plan, lambda arguments: [])
    counts = []
    for _ in range(3):
        new = [tensor.clone() for tensor in tensors]
        counts.append(opcodes(compiled.run, new, ()))
        assert all(map(is_, compiled._arguments, new))
    assert counts[1:] == [COMPILED] * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_on_its_node() -> None:
    """Its node has no more operators than in eager, of which one makes the first gradient."""
    with thread_nodes(1) as (worker,):
        layers = [layer for _ in range(3) for layer in (torch.nn.Linear(4, 4), torch.nn.ReLU())]
        model, x = torch.nn.Sequential(*layers).to("node:0"), torch.ones(3, 4, device="node:0")
        y = torch.tensor([0, 1, 2], device="node:0")

        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(model(x), y)

        def step(loss_of: Callable[..., torch.Tensor]) -> None:
            loss_of(x).backward()
            model.zero_grad()

        def lines() -> int:
            dt.synchronize()
            graphs: list[Any] = list(worker.executor.graphs._graphs.values())
            return sum(len(step.program.lines) for graph in graphs for step in graph.steps)

        compiled = torch.compile(loss_of)
        for _ in range(2):
            step(compiled)
        found, g = lines(), dt.Graph()
        step(loss_of)
        with dt.graph(g):
            step(loss_of)
        assert 0 < found < lines() - found


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective(name: str, operands: Operands) -> None:
    """The least of many. With the link's lock, so that no other thread sends it."""
    function, expected = COLLECTIVES[name]
    link, counts = current.session().link, list[int]()
    for _ in range(WARM + TIMES):
        with link.lock:
            for queue in link.queues:
                queue.set_flush_threshold(100)
            counts.append(opcodes(function, operands))
        dt.synchronize()
    assert min(counts[WARM:]) == expected


def test_the_end_of_a_collective(operands: Operands) -> None:
    """What each node's answer costs, and a wait for the work then."""
    link, waits, answers = current.session().link, list[int](), list[int]()
    for _ in range(TIMES):
        works: list[Any] = [dt.all_reduce(operands.each, async_op=True) for _ in range(2)]
        dt.synchronize()
        waits += [opcodes(work.wait) for work in works]
        ends = [GroupEnd(current.session(), (0, 1)) for _ in range(8)]
        for many in (1, 7):
            reply = c.TookPart(tuple(end.request.id for end in ends[:many]))
            answers.append(opcodes(link.replies._take_reply, link.nodes[0], reply))
            link.replies._take_reply(link.nodes[1], reply)
            del ends[:many]
    assert (min(waits), (min(answers[1::2]) - min(answers[::2])) // 6) == (WAITED, ANSWERED)


def flushed(x: Any) -> int:
    """Returns the least opcodes of a flush of one operation. With the link's lock, so that no other thread sends it."""
    link, counts = current.session().link, list[int]()
    queue = x._place.outbox
    for _ in range(WARM + TIMES):
        with link.lock:
            queue.set_flush_threshold(100)  # else the operation itself may send it
            result = x * 2
            counts.append(opcodes(lambda _: link.sender.flush(queue), operands))
        del result
        dt.synchronize()
    return min(counts[WARM:])


@pytest.mark.parametrize(("heard", "expected"), [(False, MESSAGE), (True, MESSAGE + COMMANDS)])
def test_a_message(monkeypatch: pytest.MonkeyPatch, heard: bool, expected: int) -> None:
    """From a message that the node has taken to its looking for the next one, which may have to wait.

    With one node: nodes that are threads of one process have one page on which they note what they do.
    """
    counter, original = Counter(), Ahead.next
    taken: list[tuple[list[type], int]] = []
    counts: list[int] = []

    def next_one(ahead: Ahead) -> Any:
        if taken and taken[-1][0] == [c.Call]:
            counts.append(counter.count - taken[-1][1])
        if heard and not taken:
            ahead._executor.seam.commands.add([].append)
        batch, size = original(ahead)
        counter.join(sys._getframe(1))
        taken.append(([type(command) for command in batch.commands], counter.count))
        return batch, size

    monkeypatch.setattr(Ahead, "next", next_one)
    with dt.init_master_worker(nodes=1, launcher="inproc"), without_a_collector():
        x, results = torch.ones(4, device="node:0"), []
        for _ in range(TIMES):
            results.append(x * 2)
            dt.synchronize()
        monkeypatch.undo()
        dt.synchronize()
    assert len(counts) > TIMES // 2
    assert set(counts[2:]) == {expected}
