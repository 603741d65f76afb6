"""The queues of several nodes beside those of single ones: each node gets its commands in the order in which they were
issued, each once, and frees after all uses. No sockets, no nodes."""

from __future__ import annotations

import itertools
import random
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from fuzzing import SEEDS, fuzz
from hypothesis import strategies as st

from disttensor.runtime.master.command_queue import CommandQueue
from disttensor.runtime.master.link import Link
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.arguments import Addresses
from disttensor.runtime.protocol.bundle import PROTOCOL
from disttensor.runtime.protocol.errors import NodeLost
from disttensor.runtime.transport.base import Spoke
from disttensor.runtime.transport.inproc import InprocHub

NODES = 4
#: Two that overlap each other, the mesh of all, and the same nodes in another order.
FANS = ((0, 1, 2, 3), (0, 1), (1, 2, 3), (2, 0))


class KeepingHub(InprocHub):
    """Keeps the messages, by rank, and sends none."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self.logs: dict[int, list[bytes]] = {rank: [] for rank in range(nodes)}

    def send(self, rank: int, message: bytes) -> None:
        self.logs[rank].append(message)


class Script:
    """A link whose messages are kept, and what a script does with its queues."""

    def __init__(self) -> None:
        hub = KeepingHub(NODES)
        self.link, self.logs = Link(hub, NODES, None, lambda error: None), hub.logs
        self.queues: list[CommandQueue] = [node.outbox for node in self.link.nodes]
        self.queues += [self.link.sender.fan_out(ranks) for ranks in FANS]
        self.refs = itertools.count(1)

    def issue(self, queue: CommandQueue, uses: list[int]) -> int:
        """As the hot path does; returns the ref that is made."""
        out = next(self.refs)
        commands = queue.commands
        commands += (c.Call(0, out, tuple(out - ref for ref in uses)), None)
        if len(commands) >= queue.limit:
            self.link.sender.at_limit(queue)
        return out

    def commands(self, rank: int) -> list[c.Command]:
        """What a node has got, whose numbers have to follow one another."""
        found: list[c.Command] = []
        for message in self.logs[rank]:
            batch = codec.decode_batch(message)
            assert batch.first == len(found)
            found += batch.commands
        return found

    def check_frees(self) -> None:
        """Asserts that no node uses a ref behind its free, and frees none twice."""
        for rank in range(NODES):
            gone = set[int]()
            for command in self.commands(rank):
                if isinstance(command, c.Free):
                    freed = list(itertools.accumulate(command.distances, initial=command.first))
                    assert gone.isdisjoint(freed), f"freed twice on node {rank}"
                    gone.update(freed)
                elif isinstance(command, c.Call):
                    used = {command.out - int(d) for d in command.args}  # type: ignore[arg-type]
                    assert gone.isdisjoint(used), f"node {rank} uses {used & gone} behind their free"

    def end(self) -> None:
        self.link.sender.flush_all()
        self.close()

    def close(self) -> None:
        self.link.close()
        self.link.interrupts.restore()  # as a session does: or each script would wrap the handlers of those before it


@pytest.fixture
def script() -> Iterator[Script]:
    made = Script()
    yield made
    made.close()


def outs(commands: list[c.Command]) -> list[int]:
    return [command.out for command in commands if isinstance(command, c.Call)]


# ---- one thread ------------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.sampled_from(["issue", "issue", "issue", "large", "drop", "flush", "flush_all", "add"]),
              st.integers(0, 50), st.integers(0, 50), st.integers(0, 50)),
    min_size=1, max_size=120,
)  # fmt: skip


def run(steps: list[tuple[str, int, int, int]]) -> None:
    script = Script()
    issued: list[tuple[tuple[int, ...], int]] = []
    alive: list[tuple[int, CommandQueue]] = []
    for kind, a, b, d in steps:
        queue = script.queues[a % len(script.queues)]
        if kind == "large":  # as before a command that allocates much
            queue.free_dead()
            assert not any(other.dead for other in (queue, *queue.overlaps))
        if kind in ("issue", "add", "large"):
            there = [ref for ref, owner in alive if set(queue.ranks) <= set(owner.ranks)]
            uses = sorted({there[n % len(there)] for n in (b, d)}) if there else []
            if kind != "add":
                ref = script.issue(queue, uses)
            else:
                ref = next(script.refs)
                if queue.add(c.Call(0, ref, tuple(ref - use for use in uses))):
                    script.link.sender.at_limit(queue)
            issued.append((queue.ranks, ref))
            alive.append((ref, queue))
        elif kind == "drop" and alive:
            ref, owner = alive.pop(b % len(alive))
            owner.dead.append(ref)
        elif kind == "flush":
            script.link.sender.flush(queue)
        elif kind == "flush_all":
            script.link.sender.flush_all()
    for ref, owner in alive:
        owner.dead.append(ref)
    script.end()
    for rank in range(NODES):
        assert outs(script.commands(rank)) == [ref for ranks, ref in issued if rank in ranks]
        freed = [
            ref
            for command in script.commands(rank)
            if isinstance(command, c.Free)
            for ref in itertools.accumulate(command.distances, initial=command.first)
        ]
        assert sorted(freed) == sorted(ref for ranks, ref in issued if rank in ranks)
    script.check_frees()


@pytest.mark.parametrize("name", SEEDS)
def test_each_node_gets_what_was_issued_in_order(name: str) -> None:
    fuzz(SEEDS[name], 100, run, STEPS)


# ---- several threads -------------------------------------------------------------------------------------------------


@dataclass
class Shared:
    """What threads hand on to each other: refs with the queue that owns each, once they are issued."""

    alive: list[tuple[int, CommandQueue]] = field(default_factory=list)
    #: ref -> (tick before it was issued, tick behind it, ranks)
    times: dict[int, tuple[int, int, tuple[int, ...]]] = field(default_factory=dict)
    clock: Iterator[int] = field(default_factory=itertools.count)


def work(script: Script, shared: Shared, seed: int, steps: int) -> None:
    chance = random.Random(seed)
    for _ in range(steps):
        queue = chance.choice(script.queues)
        candidates = list(shared.alive)[-20:]
        uses = [ref for ref, owner in candidates if set(queue.ranks) <= set(owner.ranks)][:2]
        before = next(shared.clock)
        ref = script.issue(queue, uses)
        shared.times[ref] = before, next(shared.clock), queue.ranks
        shared.alive.append((ref, queue))
        if chance.random() < 0.02:
            script.link.sender.flush_all()


@pytest.mark.parametrize("seed", range(4))
def test_threads_that_hand_tensors_on(seed: int, script: Script) -> None:
    """What was issued when another command began comes before it on each node that gets both."""
    shared, interval = Shared(), sys.getswitchinterval()
    threads = [threading.Thread(target=work, args=(script, shared, 10 * seed + i, 400)) for i in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    script.link.sender.flush_all()
    for rank in range(NODES):
        got = outs(script.commands(rank))
        assert sorted(got) == sorted(ref for ref, (_, _, ranks) in shared.times.items() if rank in ranks)
        latest = -1  # of all that came later, the earliest end may not be before this one's beginning
        for ref in reversed(got):
            begin, end, _ = shared.times[ref]
            assert latest < 0 or begin < latest, f"node {rank}: {ref} was issued behind one that it got later"
            latest = end if latest < 0 else min(latest, end)


@pytest.mark.parametrize("seed", range(4))
def test_a_shut_queue_lets_nobody_pass_for_a_moment(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who appends to one has to find the limit 0, whenever: else the command waits there while its thread goes on, and
    what that issues elsewhere overtakes it."""
    script, chance, wrong = Script(), random.Random(seed), []
    slot, lock = CommandQueue.__dict__["limit"], script.link.sender._state.lock

    def set_limit(queue: CommandQueue, value: int) -> None:
        if value and queue.overlaps and (queue.shut or not lock._is_owned()):
            wrong.append(f"{value} for {queue.ranks}, {'shut' if queue.shut else 'without the lock'}")
        slot.__set__(queue, value)

    monkeypatch.setattr(CommandQueue, "limit", property(slot.__get__, set_limit))
    for queue in script.queues:
        queue.restart()  # as long as the nodes are idle
    for _ in range(400):
        queue = chance.choice(script.queues)
        for _ in range(chance.choice([1, 1, 1, 40])):
            queue.dead.append(script.issue(queue, []))
        if chance.random() < 0.1:
            script.link.sender.flush(queue)
    script.end()
    assert not wrong, wrong[:3]


def test_what_comes_to_a_shut_queue_while_others_are_packed_waits(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads issue meanwhile, the second one what may depend on the first one's result."""
    mesh, pair = script.link.sender.fan_out((0, 1, 2, 3)), script.link.sender.fan_out((2, 0))
    script.link.sender.open(mesh)
    mesh.set_flush_threshold(100)
    first = script.issue(mesh, [])
    waiting = next(script.refs)
    pair.queue += (c.Call(0, waiting, ()), None)  # by a thread that is about to open the queue
    refs, pack = [], CommandQueue.pack_commands

    def pack_commands(queue: CommandQueue, *first: int) -> None:
        pack(queue, *first)
        if queue is mesh and not refs:
            refs.extend([next(script.refs), next(script.refs)])
            mesh.queue += (c.Call(0, refs[0], ()), None)
            pair.queue += (c.Call(0, refs[1], (refs[1] - refs[0],)), None)

    monkeypatch.setattr(CommandQueue, "pack_commands", pack_commands)
    for queue in (pair, mesh, pair):
        script.link.sender.flush(queue)
    assert [outs(script.commands(rank)) for rank in (0, 1)] == [[first, waiting, *refs], [first, refs[0]]]


def test_a_forked_child_has_locks_of_its_own(script: Script) -> None:
    for queue in script.queues:
        old = queue.lock
        queue.forked()
        assert queue.lock is not None
        assert queue.lock is not old


# ---- one at a time ---------------------------------------------------------------------------------------------------


def test_a_command_is_encoded_once_and_numbered_for_each(script: Script) -> None:
    node, mesh = script.queues[0], script.link.sender.fan_out((0, 1, 2, 3))
    script.issue(node, [])
    script.issue(mesh, [])
    script.link.sender.flush_all()
    batches = {rank: [codec.decode_batch(m) for m in script.logs[rank]] for rank in range(NODES)}
    assert [b.first for b in batches[0]] == [0, 1]
    assert [b.first for b in batches[3]] == [0]
    assert batches[0][1].commands == batches[3][0].commands
    (first, sites), (second, others) = (list(script.link.nodes[rank].outbox._flight)[-1][1:3] for rank in (2, 3))
    assert (first, sites) == (second, others)
    assert sites is others  # kept once


def test_the_same_nodes_have_one_queue(script: Script) -> None:
    assert script.link.sender.fan_out((0, 1)) is script.link.sender.fan_out((0, 1))
    assert script.link.sender.fan_out((1, 0)) is not script.link.sender.fan_out((0, 1))


def test_at_most_one_of_two_that_overlap_is_open(script: Script) -> None:
    for queue in script.queues * 2:
        script.issue(queue, [])
        assert not queue.shut
        for other in queue.overlaps:
            assert other.shut
            assert not other.queue


def test_a_free_waits_for_a_use_whose_thread_is_about_to_open_its_queue(script: Script) -> None:
    """It has appended a command to a queue that is shut, and has not looked at its limit yet."""
    node, mesh = script.queues[1], script.link.sender.fan_out((0, 1, 2, 3))
    ref = script.issue(mesh, [])
    script.link.sender.flush_all()
    script.issue(mesh, [])
    out = next(script.refs)
    node.queue += (c.Call(0, out, (out - ref,)), None)
    mesh.dead.append(ref)
    script.link.sender.flush(mesh)
    script.link.sender.flush_all()
    assert out in outs(script.commands(1))
    script.check_frees()


@pytest.mark.parametrize("dies", [0, 1, 2])
@pytest.mark.parametrize("made", [0, 1, 2])
def test_what_is_dead_is_freed_before_much_is_made(dies: int, made: int, script: Script) -> None:
    """Whichever of the queues that overlap has the one and the other."""
    queues = [script.queues[1], script.link.sender.fan_out((0, 1)), script.link.sender.fan_out((1, 2, 3))]
    ref = script.issue(queues[dies], [])
    used = script.issue(script.queues[1], [ref])
    queues[dies].dead.append(ref)
    queues[made].free_dead()
    out = script.issue(queues[made], [])
    script.link.sender.flush_all()
    got = script.commands(1)
    assert outs(got) == [ref, used, out]
    (at,) = (at for at, command in enumerate(got) if command == c.Free(ref, ()))
    assert outs(got[:at]) == [ref, used]
    assert outs(got[at:]) == [out]
    script.check_frees()


def test_much_that_is_made_in_turns_is_sent(script: Script) -> None:
    """Each packs what is dead, so that no queue ever is long enough to be flushed."""
    node, mesh = script.queues[1], script.link.sender.fan_out((0, 1, 2, 3))
    for _ in range(400):
        for queue in (node, mesh):
            queue.dead.append(script.issue(queue, []))
            queue.free_dead()
    assert len(script.commands(1)) > 400
    script.link.sender.flush_all()
    script.check_frees()


def test_when_a_member_is_lost_the_others_have_what_was_issued(script: Script) -> None:
    mesh = script.link.sender.fan_out((1, 2, 3))
    script.link.sender.open(mesh)
    mesh.set_flush_threshold(100)
    ref = script.issue(mesh, [])
    assert mesh.queue
    script.link.losses.lose(2, "killed")
    with pytest.raises(NodeLost, match="node 2"):
        script.issue(mesh, [ref])
    kept = script.issue(script.queues[1], [ref])
    mesh.dead.append(ref)
    script.link.sender.flush_all()
    assert outs(script.commands(1)) == [ref, kept]
    assert outs(script.commands(3)) == [ref]
    assert c.Free(ref, ()) in script.commands(1)
    assert c.Free(ref, ()) in script.commands(3)
    script.check_frees()


def greeted(link: Link, nodes: int) -> list[Spoke]:
    """Returns the ends of so many nodes, which have said hello."""
    hello = c.Hello(
        PROTOCOL, "job", 1, "host", str(torch.__version__), "3.11.0", ("cpu",), False, Addresses("a:1"),
        c.Abilities("AVX2", False, False, False),
    )  # fmt: skip
    spokes = [link.hub.spoke(rank) for rank in range(nodes)]  # type: ignore[attr-defined]
    for spoke in spokes:
        spoke.send(codec.encode(c.Report(0, (hello,))))
    link.replies.drain()
    return spokes


@pytest.mark.parametrize("rank", [0, 2])
def test_a_node_of_a_mesh_answers_a_question_once(rank: int, script: Script) -> None:
    link, spokes = script.link, greeted(script.link, 3)
    request = link.requests.new_to_all(link.sender.fan_out((0, 1, 2)), c.Answer)
    for value in (1.0, 2.0):
        spokes[rank].send(codec.encode(c.Report(0, (c.Answer(request.id, value),))))
        link.replies.drain()
    assert [node.lost is None for node in link.nodes[:3]] == [it != rank for it in range(3)]
    assert request.replies == {rank: c.Answer(request.id, 1.0)}
    for spoke in spokes:
        spoke.close()


def test_an_answer_to_a_question_that_a_loss_has_ended_is_no_offence(script: Script) -> None:
    """The other members may have answered before they heard of the loss."""
    mesh, spokes = script.link.sender.fan_out((0, 1, 2)), greeted(script.link, 3)
    request = script.link.requests.new_to_all(mesh, c.Answer)
    script.link.losses.lose(1, "killed")
    with pytest.raises(NodeLost, match="node 1"):
        script.link.waiting.wait(request)
    for rank in (0, 2):
        spokes[rank].send(codec.encode(c.Report(0, (c.Answer(request.id, 1.0),))))
    script.link.replies.drain()
    assert [script.link.nodes[rank].lost is None for rank in range(3)] == [True, False, True]
    for rank in (0, 2):
        spokes[rank].send(codec.encode(c.Report(0, (c.Answer(request.id, 1.0),))))
    script.link.replies.drain()
    assert script.link.nodes[0].lost is not None  # once only
    for spoke in spokes:
        spoke.close()


def test_a_script_leaves_the_handlers_of_signals_as_they_were() -> None:
    before = signal.getsignal(signal.SIGINT)
    made = Script()
    made.issue(made.queues[0], [])
    made.end()
    assert signal.getsignal(signal.SIGINT) is before
