"""The nccl channel. There is no GPU in most places: a library of threads, over CPU tensors, stands for NCCL."""

from __future__ import annotations

import threading
from functools import reduce

import channel_kit
import msgspec
import pytest
import torch
from native_channel import _all_parts

import disttensor as dt
from disttensor import testing
from disttensor.runtime.channel.nccl import channel as nccl
from disttensor.runtime.channel.nccl.channel import NcclChannel
from disttensor.runtime.channel.nccl.library import Communicator
from disttensor.runtime.collective.reduction import ReduceOp, kernel
from disttensor.runtime.contracts.data_channel import check_data_channel
from disttensor.runtime.contracts.data_channel_kit import LIMIT
from disttensor.runtime.protocol.errors import BrokenError
from disttensor.session import channel_router, current

N = 3


#: What each rank gave, by communicator and number of the call.
meetings: dict[bytes, dict[int, dict[int, tuple]]] = {}
lock = threading.Lock()


class Stand(Communicator):
    """As the real one, to the caller."""

    def __init__(self, device, size, id, me):
        self.device, self.size, self.me = torch.device("cpu"), size, me
        self._calls, self._number = meetings.setdefault(id, {}), 0
        self._gone = False

    @staticmethod
    def unique_id():
        return len(meetings).to_bytes(128, "little")

    def ready(self):
        return True

    def abort(self):
        self._gone = True

    def mark(self):
        number, calls = self._number, self._calls
        return lambda: all(len(calls[k]) == self.size and calls[k][0][0] == "done" for k in range(number))

    def _give(self, *what):
        assert not self._gone
        with lock:
            call = self._calls.setdefault(self._number, {})
            call[self.me] = what
            if len(call) == self.size:
                parts = [call[i] for i in range(self.size)]
                assert len({part[0] for part in parts}) == 1, "ranks disagree"
                getattr(self, f"do_{what[0]}")([part[1:] for part in parts])
                call[0] = ("done",)
        self._number += 1

    def all_reduce(self, *what):
        self._give("all_reduce", *what)

    def reduce(self, *what):
        self._give("reduce", *what)

    def broadcast(self, *what):
        self._give("broadcast", *what)

    def all_gather(self, *what):
        self._give("all_gather", *what)

    def reduce_scatter(self, *what):
        self._give("reduce_scatter", *what)

    def exchange(self, *what):
        self._give("exchange", *what)

    @staticmethod
    def total(parts):
        op = ReduceOp[parts[0][2]]
        made = reduce(kernel(op), [part[0].clone() for part in parts])
        return made / len(parts) if op is ReduceOp.AVG else made

    def do_all_reduce(self, parts):
        total = self.total(parts)
        for part in parts:
            part[1].copy_(total)

    def do_reduce(self, parts):
        parts[parts[0][3]][1].copy_(self.total(parts))

    def do_broadcast(self, parts):
        for part in parts:
            part[1].copy_(parts[part[2]][0])

    def do_all_gather(self, parts):
        for part in parts:
            part[1].copy_(torch.cat([other[0] for other in parts]))

    def do_reduce_scatter(self, parts):
        for part, piece in zip(parts, self.total(parts).chunk(len(parts)), strict=True):
            part[1].copy_(piece)

    def do_exchange(self, parts):
        for me, (_, receives) in enumerate(parts):
            for tensor, source in receives:
                tensor.copy_(next(sent for sent, to in parts[source][0] if to == me))


@pytest.fixture
def channels(monkeypatch):
    monkeypatch.setattr(NcclChannel, "communicator", Stand)
    monkeypatch.setattr(nccl, "_default", lambda: torch.device("cpu"))
    meetings.clear()
    made = channel_kit.connected(NcclChannel, range(N))
    yield made
    for channel in made:
        channel.close()


def together(channels, call, ranks=range(N)):
    outcomes = {}

    def rank(me):
        try:
            outcomes[me] = call(channels[me])
        except Exception as error:
            outcomes[me] = error

    threads = [threading.Thread(target=rank, args=(me,)) for me in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes


#: kind -> inputs and outs, at the root and elsewhere
FORMS = {
    "all_reduce": ((1, 1), (1, 1)), "reduce": ((1, 1), (1, 0)), "broadcast": ((1, 0), (0, 1)),
    "all_gather": ((1, N), (1, N)), "gather": ((1, N), (1, 0)), "scatter": ((N, 1), (0, 1)),
    "reduce_scatter": ((N, 1), (N, 1)), "all_to_all": ((N, N), (N, N)),
}  # fmt: skip


@pytest.mark.row("G1")
@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT"])
@pytest.mark.parametrize("kind", FORMS)
def test_every_collective(channels, kind, op):
    for number in range(2):

        def form(me):
            given, wanted = FORMS[kind][me != 1]
            numbers = torch.Generator().manual_seed(me)
            return [torch.randn(5, generator=numbers) for _ in range(given)], [torch.zeros(5) for _ in range(wanted)]

        parts, expected = [form(me) for me in range(N)], [form(me) for me in range(N)]
        _all_parts(kind, expected, ReduceOp[op], 1)

        def call(channel, parts=parts, number=number):
            channel.collective(kind, range(N), channel.rank, *parts[channel.rank], op, 1, number)

        assert together(channels, call) == dict.fromkeys(range(N))
        for (inputs, outs), (same, wanted) in zip(parts, expected, strict=True):
            torch.testing.assert_close(outs, wanted)
            assert all(map(torch.equal, inputs, same)), "inputs stay"
    assert len(meetings) == 1, "one communicator"


def all_reduce(ranks, number):
    def call(channel):
        x = torch.ones(5)
        channel.collective("all_reduce", ranks, ranks.index(channel.rank), [x], [x], "SUM", 0, number)
        return x[0].item()

    return call


def test_a_rank_that_is_lost_breaks_the_others_who_go_on(channels):
    together(channels, all_reduce([0, 1, 2], 1))
    timer = threading.Timer(0.1, lambda: [channel.mark_lost(2, "stopped") for channel in channels[:2]])
    timer.start()
    outcomes = together(channels, all_reduce([0, 1, 2], 2), [0, 1])
    timer.join()
    for error in outcomes.values():
        assert isinstance(error, BrokenError)
        assert error.rank == 2
        assert "stopped" in str(error)
    assert together(channels, all_reduce([1, 0], 3), [0, 1]) == {0: 2, 1: 2}


def test_a_connection_of_nccls_that_breaks_ends_the_collective_on_all_ranks(channels, monkeypatch):
    """While all live: the device says nothing, only the communicator does. The next collective has another one."""
    together(channels, all_reduce([0, 1, 2], 1))
    monkeypatch.setattr("disttensor.runtime.channel.library_groups._NEWS", 0.1)
    mark, broken = Stand.mark, []

    def marked(comm):
        if comm.me == 0:
            broken.append(comm)
        return mark(comm)

    def ready(comm):
        if comm in broken:
            raise RuntimeError("NCCL: remote process exited or there was a network error")
        return True

    with monkeypatch.context() as patch:
        patch.setattr(Stand, "mark", marked)
        patch.setattr(Stand, "ready", ready)
        outcomes = together(channels, all_reduce([0, 1, 2], 2), [0, 1])  # rank 2's part does not arrive
    assert all(isinstance(error, BrokenError) for error in outcomes.values())
    assert "all_reduce of ranks [0, 1, 2] by NCCL broke off: NCCL: remote process" in str(outcomes[0])
    assert [comm._gone for comm in broken] == [True]
    assert together(channels, all_reduce([1, 0], 3), [0, 1]) == {0: 2, 1: 2}


def test_a_communicator_that_never_comes_to_be(channels):
    """A rank is lost before it has told what the others need."""
    timer = threading.Timer(0.1, lambda: [channel.mark_lost(0, "stopped") for channel in channels[1:]])
    timer.start()
    outcomes = together(channels, all_reduce([0, 1, 2], 1), [1, 2])
    timer.join()
    assert all(isinstance(error, BrokenError) and error.rank == 0 for error in outcomes.values())


def test_what_it_is_for():
    has = NcclChannel.has_collective
    channel = channel_kit.connected(NcclChannel, [0])[0]
    assert has(channel, "all_reduce", dtype=torch.float32, device="cuda")
    assert not has(channel, "all_reduce", dtype=torch.float32, device="cpu")
    assert not has(channel, "all_reduce", dtype=torch.float32, op="MAX", device="cuda")
    assert has(channel, "broadcast", dtype=torch.int16, device="cuda")
    channel.close()
    if not torch.cuda.is_available():
        with dt.init_master_worker(nodes=2, launcher="inproc"):
            assert not dt.channels.available()["all_reduce", "cuda", "nccl"]


def test_auto_takes_it_for_each_group_whose_nodes_have_a_gpu_each(monkeypatch):
    """Of a list, and of groups along dims of a mesh: these have one channel, so all or none. Two nodes share a GPU."""
    monkeypatch.setattr(channel_router, "BEST", "native_channel:NativeChannel")
    with dt.init_master_worker(nodes=4, launcher="inproc", simulate_cuda=1):
        session = current.session()
        for node, gpu in zip(session.nodes, "abab", strict=True):
            node.connection.hello = msgspec.structs.replace(node.hello, gpus=(gpu,))
        m = dt.mesh(dp=2, tp=2, device="cuda:0")
        for place in (m._place, *m._place.members):
            monkeypatch.setattr(place, "kernels", "cuda")
        monkeypatch.setattr(session.router, "automatic", True)
        x = dt.meshes.from_shards(m, [torch.full((8,), float(k)) for k in range(4)])

        def of_a_mesh(*over):
            return [shard[0].item() for shard in dt.all_reduce(x, over=over).shards()]

        def of_a_list(*nodes):
            xs = [torch.full((8,), float(k), device=dt.device(k, "cuda:0")) for k in nodes]
            dt.all_reduce(xs)
            return [x[0].item() for x in xs]

        one = dt.meshes.from_shards(dt.mesh(one=1, nodes=[3], device="cuda:0"), [torch.ones(8)])
        for native, call, sums in (
            (False, lambda: of_a_mesh("dp"), [2, 4, 2, 4]),
            (False, lambda: of_a_mesh("dp", "tp"), [6] * 4),
            (False, lambda: of_a_list(2, 0), [2] * 2),
            (False, lambda: [dt.all_reduce(one, over="one").at(one=0)[0].item()], [1]),
            (False, lambda: [dt.all_reduce(x, over="tp", algorithm="ring").at(dp=0, tp=0)[0].item()], [1]),
            (True, lambda: of_a_mesh("tp"), [1, 1, 5, 5]),
            (True, lambda: of_a_list(0, 3), [3] * 2),
        ):
            assert ("native_channel:NativeChannel" in session.router.numbers) <= native, "opened, and not used"
            with testing.MessageLog() as log:
                assert call() == sums
            ways = {name.split()[-1] == "native" for name in log.commands if name.startswith("Collective")}
            assert ways == {native}, sums


@pytest.mark.gpu(2)
def test_between_two_gpus():
    with dt.init_master_worker(nodes=2, backend="nccl"):
        local = [torch.randn(1 << 20) for _ in range(2)]
        xs = [x.to(dt.device(k, "cuda:0")) for k, x in enumerate(local)]  # each node is bound to a GPU of its own
        dt.all_reduce(xs, algorithm="native")
        for x in xs:
            torch.testing.assert_close(x.cpu(), sum(local))


def test_transfers():
    check_data_channel(lambda n: channel_kit.connected(NcclChannel, range(-1, n - 1)))
