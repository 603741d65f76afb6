"""What orders the work of CUDA's streams, piece by piece: each call waits, or names a device, for a reason.

The programs have no session, or one whose nodes are threads: they take a third of the CPU of one with processes.
tools/ci/cuda_mutants.py deletes the calls one after the other, and has the smallest of these tests notice.
"""

from __future__ import annotations

import pytest
from simcuda_kit import run

pytestmark = [pytest.mark.simcuda, pytest.mark.cold]

BEGIN = """
import threading, torch
from torch import cuda
LONG = 100_000_000  # cycles, for which a stream is busy

def late(x, value=7.0):
    # returns what a stream is going to make of a tensor, much later
    cuda._sleep(LONG)
    return x.fill_(value)

def same(found, wanted):
    torch.testing.assert_close(found.cpu(), torch.full(found.shape, wanted))
"""

PROGRAMS: dict[str, str] = {}

PROGRAMS["nccl"] = """
# a communicator is of the device that it is given, whichever is current; and its mark of what that one has been given
from disttensor.runtime.channel.nccl.library import Communicator
id, pause, wrong = Communicator.unique_id(), threading.Event(), []
def until(done):
    while not done():
        pause.wait(0.0005)
def rank(me):
    try:
        place = torch.device("cuda", me)
        comm = Communicator(place, 2, id, me)
        until(comm.ready)
        x = torch.full((4,), me + 1.0, device=place)
        comm.all_reduce(x, x, "SUM")
        until(comm.ready)
        until(comm.mark())
        same(x, 3.0)
        with cuda.device(place):
            cuda._sleep(LONG)
        done = comm.mark()
        assert not done(), "the device has just begun"
        cuda.current_stream(place).synchronize()
        assert done()
    except BaseException as error:
        wrong.append(error)
threads = [threading.Thread(target=rank, args=(me,)) for me in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
if wrong:
    raise wrong[0]
"""

PROGRAMS["ipc"] = """
# what a peer hears of, and what it lets go of, is there, or done with, on whatever stream it was made
from disttensor.runtime.channel.shm.cuda_ipc import FREE, USED, CudaSharing, _Buffer, _Buffered, finish
home = torch.device("cuda:0")
one = cuda.Stream()
x = torch.zeros(1000, device=home)
cuda.synchronize()
with cuda.stream(one):
    late(x)
    finish(home)
    assert one.query()
    buffer = _Buffer(1 << 20, home)
    cuda._sleep(LONG)
    slept = one.record_event()
    buffer.offer()
    assert slept.query(), "the peer looks for the sign"
    buffer.page._map[1] = 1  # as if the peer had mapped it
    sharing = CudaSharing(lambda word: None)
    sharing._buffers.append(buffer)
    late(x, 8.0)
    prepared = sharing.prepare(x)
    assert one.query(), "the sender's thread has another stream"
buffer.page.state = FREE
with cuda.stream(one):
    cuda._sleep(LONG)
    staged = sharing.stage(prepared)
    assert staged is not None and buffer.page.state == USED, (staged, buffer.page.state)
    assert one.query(), "the peer reads the buffer"
class Page:
    def free(self):
        assert one.query(), "the sender writes the buffer again"
        self.freed = True
page, y = Page(), torch.zeros(1000, device=home)
cuda.synchronize()
with cuda.stream(one):
    cuda._sleep(LONG)
    assert _Buffered(page, buffer.memory[:4000]).into(y) and page.freed
    same(y, 8.0)
"""

PROGRAMS["actors"] = """
# the methods of an actor come one after the other, on whatever streams
from types import SimpleNamespace
from disttensor.runtime.node import actors
class Thing:
    def __init__(self):
        self.x = torch.zeros(1000, device="cuda")
    def late(self, value):
        late(self.x, value)
    def double(self):
        self.x *= 2
    def close(self):
        global last
        last = self.x + 1
actor = actors.ActorInstance("Thing", 0, ("job", 1))
actor.object = Thing()
x = actor.object.x
cuda.synchronize()
for method, args in (("late", (3.0,)), ("double", ()), ("late", (5.0,))):
    with cuda.stream(cuda.Stream()):
        actors.call_of(actor, method, args, {})
    if method == "double":
        cuda.synchronize()
        same(x, 6.0)
with cuda.stream(cuda.Stream()):
    actor.close()
    cuda.current_stream().synchronize()
    same(last, 6.0)

# and draw from generators of its own, one for each device
def draws(index):
    with cuda.device(index):
        return torch.randn(50, device="cuda")
actor, twin = (actors.ActorInstance("Thing", 5, ("job", number)) for number in (2, 3))
actor.object = twin.object = SimpleNamespace(draws=draws)
drawn = [actors.call_of(it, "draws", (index,), {}) for it in (actor, twin) for index in (0, 0, 1)]
assert [x.device.index for x in drawn] == [0, 0, 1] * 2
first, second, other, *again = (x.cpu() for x in drawn)
assert torch.equal(first, other) and not torch.equal(first, second)
assert all(map(torch.equal, (first, second, other), again))
"""

PROGRAMS["held"] = """
# a tensor that a function reads beside what comes next is read, or copied for it, when it has been made
from disttensor.runtime.node.held import HeldTensor
one, two = cuda.Stream(), cuda.Stream()
x = torch.zeros(1000, device="cuda")
for k, ask in enumerate((lambda held: held.read(lambda t: t.cpu()), lambda held: held.copy() or held._copy)):
    cuda.synchronize()
    held = HeldTensor(x)
    with cuda.stream(one):
        late(x, k + 1.0)
    with cuda.stream(two):
        same(ask(held), k + 1.0)
with cuda.stream(one):
    late(x, 9.0)
    held.read(lambda t: same(t, 2.0))
"""

PROGRAMS["generators"] = """
# a generator of a mesh begins on the device that is named, whichever is current
from types import SimpleNamespace
from disttensor.runtime.node import state
from disttensor.runtime.protocol import commands as c
state.role = SimpleNamespace(is_node=lambda: True)
node = SimpleNamespace(device=torch.device, rank=0, _drawing={}, _resting={})
cuda.manual_seed_all(1)
state.NodeState._swap(node, c.Swap(1, "cuda:1", 77))
assert [generator.initial_seed() for generator in cuda.default_generators] == [1, 77]
"""

PROGRAMS["synchronized"] = """
# who waits for a node waits for all devices that its process has used, whichever is current
from types import SimpleNamespace
from disttensor.runtime.node import state
from disttensor.runtime.protocol import commands as c
events = []
for index in range(2):
    with cuda.device(index):
        cuda._sleep(LONG)
        events.append(cuda.current_stream().record_event())
assert not any(event.query() for event in events)
state.NodeState.synchronized(SimpleNamespace(emit=lambda reply: None), c.Sync(1))
assert all(event.query() for event in events)
"""

PROGRAMS["lanes"] = """
from types import SimpleNamespace
from disttensor.runtime.node.streams import cuda_lane
from disttensor.runtime.node.streams.cuda_lane import CudaLane, CudaMark
home = torch.device("cuda:0")
default = cuda.default_stream()
def lane():
    return CudaLane(home, 0, "one", lambda lane, task: None, lambda lane: None)
x = torch.zeros(1000, device=home)
x + 1, lane()  # what is done for the first time may take longer than any stream is late
cuda.synchronize()

# a mark is done when its stream has come to it, and not before
one = lane()
with cuda.stream(one.stream):
    marks = [CudaMark(home, True) for _ in range(2)]
    marks[0].reach()
    cuda._sleep(LONG)
    marks[1].reach()
    assert not marks[1].is_completed()
    assert marks[1].since(marks[0]) > 50
    cuda._sleep(LONG)
    mark = CudaMark(home, False)
    mark.reach()
    mark.wait()
    assert one.stream.query() and mark.is_completed()

# a new lane comes after what the default stream has been given, and follows it, and it follows the lane, when told to
late(x, 1.0)
for follow in (lane, lambda: one.follow_default() or one):
    there = follow()
    with cuda.stream(there.stream):
        y = x + 1
        cuda.current_stream().synchronize()
    same(y, 2.0)
    late(x, 1.0)
cuda.synchronize()
with cuda.stream(one.stream):
    late(x, 3.0)
one.join_default()
y = x + 1
default.synchronize()
same(y, 4.0)

# a lane waits for a mark on the device
with cuda.stream(one.stream):
    late(x, 5.0)
    mark = CudaMark(home, False)
    mark.reach()
two = lane()
cuda_lane.wait(two, mark)
with cuda.stream(two.stream):
    y = x + 1
    cuda.current_stream().synchronize()
same(y, 6.0)
"""

PROGRAMS["tensors"] = """
from disttensor.runtime.node.streams import cuda_lane
from disttensor.runtime.node.streams.cuda_lane import CudaLane
home = torch.device("cuda:0")
default = cuda.default_stream()
one, two = (CudaLane(home, 0, name, lambda lane, task: None, lambda lane: None) for name in ("one", "two"))
x, y = torch.zeros(1000, device=home), torch.zeros(1000, device=home)

# what a lane writes, another one reads after that, and the default stream where it takes it over
made = []
with cuda_lane.on(one, [], lambda: made):
    made.append(late(x, 1.0))
with cuda_lane.on(two, [x], list):
    z = x + 1
two.stream.synchronize()
same(z, 2.0)
made = []
with cuda_lane.on(one, [x], lambda: made):
    made.append(late(x, 3.0))
cuda_lane.take_over([x])
z = x + 1
default.synchronize()
same(z, 4.0)
# what the default stream writes, a lane reads after that
late(y, 5.0)
with cuda_lane.on(two, [y], list):
    z = y + 1
two.stream.synchronize()
same(z, 6.0)

# memory that another stream reads is not used for anything else meanwhile
def passes_on(lane, ends):
    cuda.synchronize()
    cuda.empty_cache()
    reads = []
    with cuda_lane.on(one, [], lambda: reads):
        reads.append(torch.full((1 << 18,), 7.0, device=home))
    with ends(reads):
        cuda._sleep(LONG)
        got = reads[0] * 1
    cuda.set_stream(one.stream)  # whose the memory is
    at = reads[0].data_ptr()
    reads.clear()
    try:
        others = [torch.full((1 << 18,), 1.0, device=home) for _ in range(4)]
        assert at not in [other.data_ptr() for other in others]
    finally:
        cuda.set_stream(default)
    cuda.synchronize()
    same(got, 7.0)
from contextlib import nullcontext
passes_on(two, lambda reads: cuda_lane.on(two, reads, list))
def kept(reads):
    cuda_lane.keep_for_default(reads[0])
    return nullcontext()
passes_on(None, kept)
"""


SESSION = """
import disttensor as dt
session = dt.init_master_worker(nodes=2, launcher="inproc")
def slowly():
    cuda._sleep(LONG)
s = dt.Stream(0)
x, w = torch.zeros(1000, device="node:0"), torch.ones(1000, device="node:0")
"""

PROGRAMS["replays"] = (
    SESSION
    + """
for how in ({}, {"engine": "cudagraph"}):
    with dt.graph(g := dt.Graph(), **how):
        y = x * 2 + w
    for k in range(6):
        with dt.stream(s):
            dt.run(slowly, node=0)
            x.fill_(k)
        g.replay()  # after what another stream has made
        same(y, k * 2 + 1.0)
        with dt.stream(s):
            z = y + 1
        same(z, k * 2 + 2.0)
        dt.run(slowly, node=0)
        x.fill_(k + 10)
        g.replay()
        with dt.stream(s):
            z = y + 1  # of this replay, not the last one
        same(z, k * 2 + 22.0)

part, view = x[:500], y[:500]
same(view, 31.0)
for k in range(3):  # on the stream of other work, of which nothing is noted with x and y: it was done through views
    with dt.stream(s):
        dt.run(slowly, node=0)
        part.fill_(k)
        g.replay()
    same(view, k * 2 + 1.0)
    with dt.stream(s):
        z = view + 1
    same(z, k * 2 + 2.0)
    x.fill_(k + 10)
    dt.run(slowly, node=0)
    with dt.stream(s):
        g.replay()
        z = view + 1
    same(z, k * 2 + 22.0)

with dt.graph(far := dt.Graph()):
    there = x.to("node:1")
for k in range(3):
    with dt.stream(s):
        dt.run(slowly, node=0)
        x.fill_(k + 5)
    far.replay()
    same(there, k + 5.0)
dt.shutdown()
"""
)

PROGRAMS["outputs"] = (
    SESSION
    + """
# what others see of an output gets the values of the next replay: after what streams have written, before they read it
from disttensor.runtime.node.graphs import graphs
from disttensor.runtime.node.streams import cuda_lane
with dt.graph(g := dt.Graph(), engine="interpreter"):  # each replay makes other tensors
    y = x * 2 + w
g.replay()
view = y[:500]
same(view, 1.0)
for k in range(3):
    with dt.stream(s):
        dt.run(slowly, node=0)
        y.mul_(100)
    x.fill_(k)
    g.replay()
    dt.synchronize()
    same(view, k * 2 + 1.0)

fill, seen = graphs._fill, []
other = cuda_lane.CudaLane(torch.device("cuda:0"), 0, "other", lambda lane, task: None, lambda lane: None)
def late_fill(old, new):
    with cuda_lane.on(other, [old], list):  # as a lane does, beside the receiving thread
        seen.append(old + 0)
    cuda._sleep(LONG)
    fill(old, new)
graphs._fill = late_fill
x.fill_(9)
g.replay()
with dt.stream(s):
    z = y + 1
same(z, 20.0)
assert seen, "nothing was filled"
dt.shutdown()
"""
)

PROGRAMS["streams"] = (
    SESSION
    + """
import sys
sys.opened = opened = threading.Event()  # functions on nodes, which are threads, find it there
def held():
    # has a stream do nothing until it is opened, and a while longer
    import sys
    import simcuda_kernels
    simcuda_kernels.launch(torch.device("cuda:0"), sys.opened.wait)
    cuda._sleep(LONG)
def heard():
    # returns when the node has dealt with all that it was sent, and its device may have done nothing
    for _ in range(2):
        dt.run(lambda: None, node=0)

# an event of a stream is one of that, also where all that was issued to it is with the device
with dt.stream(s):
    assert not dt.run(lambda: cuda.current_stream() == cuda.default_stream(), node=0)
    dt.run(slowly, node=0)
event = s.record_event()
assert not event.query()
event.synchronize()
assert s.query()

# the default stream comes after a stream that is dropped, also where it reads a view of what that has written
part = x[:500]
before = {*threading.enumerate()}
one = dt.Stream(0)
with dt.stream(one):
    dt.run(held, node=0)
    part.fill_(3)
del one
heard()  # by then the node knows that it is dropped
for thread in {*threading.enumerate()} - before:
    if thread.name.startswith("disttensor-lane-") and not thread.name.endswith("-default"):
        thread.join()  # and by then its thread has issued all that it had to
y = x[:500] + 1
heard()  # by then it has been issued
opened.set()
same(y, 4.0)

# and so does a stream after an event
t = dt.Stream(0)
with dt.stream(t):
    dt.run(slowly, node=0)
    part.fill_(5)
s.wait_event(t.record_event())
with dt.stream(s):
    y = x[:500] + 1
same(y, 6.0)

# what a function returns can be used by other streams as soon as the script hears of it
def made(x):
    cuda._sleep(LONG)
    return x * 3
with dt.stream(t):
    y = dt.run(made, part, node=0)
with dt.stream(s):
    z = y + 1
same(z, 16.0)
dt.shutdown()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_order(name: str) -> None:
    run(BEGIN + PROGRAMS[name], kernels=True, devices=2)
