"""The simulated NCCL: by its calls, under torch.distributed, and under the data channel "nccl"."""

from __future__ import annotations

import pytest
from limits import HANG
from simcuda_kit import dies, run, run_session, start

pytestmark = [pytest.mark.simcuda, pytest.mark.cold]

# ---- by its calls

BEGIN = "from nccl_calls import *\nfrom simcuda_calls import *\nimport ctypes, threading\nimport numpy as np\n"


def test_every_operation_of_every_type_and_operator():
    run(
        BEGIN
        + """
N, COUNT = 3, 5

def numbers(dtype, me, count=COUNT):
    values = np.random.default_rng(me).integers(-3, 4, count)
    return (values * 0.75).astype(dtype) if "float" in dtype else values.astype(dtype)

def reduced(op, parts):
    dtype = parts[0].dtype
    if op == AVERAGE and dtype.kind == "f":
        parts = [p * dtype.type(1 / N) for p in parts]
    steps = {SUM: np.add, AVERAGE: np.add, PRODUCT: np.multiply, MAX: np.fmax, MIN: np.fmin}
    total = parts[0]
    for part in parts[1:]:
        total = steps[op](total, part).astype(dtype)
    if op == AVERAGE and dtype.kind != "f":
        total = (np.sign(total) * (abs(total) // N)).astype(dtype)  # towards 0
    return total

def same(got, want, *what):
    assert got.tobytes() == want.tobytes(), (what, got, want)

def part(own):
    me = own.me
    def out(like):
        return malloc(like.nbytes)
    for dtype, number in TYPES.items():
        one = [numbers(dtype, r) for r in range(N)]
        many = [numbers(dtype, 10 + r, N * COUNT) for r in range(N)]
        block = lambda values, r: values[r * COUNT:(r + 1) * COUNT]
        mine, whole = own.array(one[me]), own.array(many[me])
        for op in range(5):
            to = out(one[me])
            own.do("AllReduce", mine, to, COUNT, number, op)
            same(own.read(to, one[me]), reduced(op, one), "all_reduce", dtype, op)
            to = out(one[me])
            own.do("Reduce", mine, to if me == 1 else None, COUNT, number, op, 1)
            if me == 1:
                same(own.read(to, one[me]), reduced(op, one), "reduce", dtype, op)
            to = out(one[me])
            own.do("ReduceScatter", whole, to, COUNT, number, op)
            same(own.read(to, one[me]), block(reduced(op, many), me), "reduce_scatter", dtype, op)
        both = own.array(one[me])
        own.do("AllReduce", both, both, COUNT, number, SUM)
        same(own.read(both, one[me]), reduced(SUM, one), "in place", dtype)
    for number, size in [*((n, np.dtype(d).itemsize) for d, n in TYPES.items()), (BFLOAT16, 2), (FLOAT8, 1), (11, 1)]:
        one = [np.random.default_rng(r).bytes(COUNT * size) for r in range(N)]
        one = [np.frombuffer(x, np.uint8) for x in one]
        many = [np.frombuffer(np.random.default_rng(10 + r).bytes(N * COUNT * size), np.uint8) for r in range(N)]
        block = lambda values, r: values[r * COUNT * size:(r + 1) * COUNT * size]
        mine, whole = own.array(one[me]), own.array(many[me])
        to = out(one[me])
        own.do("Broadcast", mine if me == 1 else None, to, COUNT, number, 1)
        same(own.read(to, one[me]), one[1], "broadcast", number)
        own.do("Bcast", both := own.array(one[me]), COUNT, number, 2)
        same(own.read(both, one[me]), one[2], "bcast", number)
        to = out(many[me])
        own.do("AllGather", mine, to, COUNT, number)
        same(own.read(to, many[me]), np.concatenate(one), "all_gather", number)
        own.do("Gather", mine, (to := out(many[me])) if me == 2 else None, COUNT, number, 2)
        if me == 2:
            same(own.read(to, many[me]), np.concatenate(one), "gather", number)
        own.do("Scatter", whole if me == 0 else None, to := out(one[me]), COUNT, number, 0)
        same(own.read(to, one[me]), block(many[0], me), "scatter", number)
        own.do("AlltoAll", whole, to := out(many[me]), COUNT, number)
        same(own.read(to, many[me]), np.concatenate([block(x, me) for x in many]), "all_to_all", number)
        nccl("GroupStart")
        own.do("Send", mine, COUNT, number, (me + 1) % N)
        own.do("Recv", to := out(one[me]), COUNT, number, (me - 1) % N)
        nccl("GroupEnd")
        same(own.read(to, one[me]), one[(me - 1) % N], "send", number)
together(N, part)
""",
        devices=3,
        delay_ms=0,
    )


def test_reductions_of_numbers_at_the_edges():
    run(
        BEGIN
        + """
EDGES = np.array([0.0, -0.0, 1.0, 65504.0, 60000.0, 6e-8, 3e-5, 6.1e-5, np.inf, np.nan, 1e-40, 3e38])
EDGES = np.concatenate([EDGES, [1.0009765625, 1.01171875]])

class Bfloat16:
    # arrays of float32 whose lower halves are 0
    @staticmethod
    def of(x):
        bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
        down, rest = bits & 0xFFFF0000, bits & 0xFFFF
        up = (rest > 0x8000) | ((rest == 0x8000) & (down & 0x10000 != 0))  # to the nearest, or the even one
        made = (down + np.where(up, 0x10000, 0)).astype(np.uint32).view(np.float32)
        return np.where(np.isnan(x), np.float32(np.nan), made).astype(np.float32)
    write = staticmethod(lambda x: (x.view(np.uint32) >> 16).astype(np.uint16))
    read = staticmethod(lambda x: (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32))

class Numpys:
    def __init__(self, dtype):
        self.dtype = dtype
    of = lambda self, x: np.asarray(x).astype(self.dtype)
    write = lambda self, x: x
    read = lambda self, x: x.view(self.dtype)

def part(own):
    for number, kind in ((9, Bfloat16), (6, Numpys(np.float16)), (7, Numpys(np.float32)), (8, Numpys(np.float64))):
        with np.errstate(all="ignore"):
            a, b = kind.of(EDGES), kind.of(EDGES[::-1])
            half = kind.of([0.5])
            wants = {SUM: a + b, PRODUCT: a * b, MAX: np.fmax(a, b), MIN: np.fmin(a, b),
                     AVERAGE: kind.of(a * half) + kind.of(b * half)}
            wants = {op: kind.of(want) for op, want in wants.items()}
        given = kind.write((a, b)[own.me])
        at, to = own.array(given), malloc(given.nbytes)
        for op, want in wants.items():
            own.do("AllReduce", at, to, len(EDGES), number, op)
            got = kind.read(own.read(to, given).copy())
            assert np.array_equal(got, want, equal_nan=True), (number, op, got, want)
together(2, part)
""",
        devices=2,
        delay_ms=0,
    )


def test_eight_ranks_and_more_bytes_than_fit_in_a_pipe():
    run(
        BEGIN
        + """
N, COUNT = 8, 300_001
def part(own):
    given = np.arange(COUNT, dtype=np.int64) * (own.me + 1)
    at = own.array(given)
    own.do("AllReduce", at, at, COUNT, 4, SUM)
    assert (own.read(at, given) == np.arange(COUNT) * 36).all()
    own.do("Broadcast", at, at, COUNT, 4, 7)
    nccl("GroupStart")  # with itself too
    for r in range(N):
        own.do("Send", at, COUNT // N, 4, r)
    outs = [malloc(8 * (COUNT // N)) for _ in range(N)]
    for r in range(N):
        own.do("Recv", outs[r], COUNT // N, 4, r)
    nccl("GroupEnd")
    for out in outs:
        assert (own.read(out, given[:COUNT // N]) == np.arange(COUNT // N) * 36).all()
together(N, part)
""",
        devices=8,
        delay_ms=1,
    )


def test_nothing_is_read_before_the_stream_comes_to_it_nor_written_before_the_others_come():
    run(
        BEGIN
        + """
here = threading.Barrier(2)
def part(own):
    given, other = np.full(8, own.me, np.float32), stream()
    at, to = malloc(32), malloc(32)
    with held(own.stream):
        own.do("AllReduce", at, to, 8, 7, SUM)
        up(at, given.tobytes(), other)
        call("cudaStreamSynchronize", other)
    assert (own.read(to, given) == 1).all(), "what was written after it was issued"
    to = malloc(32)
    here.wait()
    if own.me == 0:
        own.do("AllReduce", at, to, 8, 7, SUM)
        assert down(to, 32, other) == PATTERN * 16 and not own.done(), "rank 1 has not come"
    here.wait()
    if own.me == 1:
        own.do("AllReduce", at, to, 8, 7, SUM)
    own.wait()
    assert (own.read(to, given) == 1).all()
together(2, part)
""",
        devices=2,
    )


def test_operations_of_one_communicator_keep_their_order_on_all_streams():
    run(
        BEGIN
        + """
def part(own):
    other = stream()
    one = own.array(np.ones(4, np.float32))
    with held(own.stream):
        own.do("AllReduce", one, to := malloc(16), 4, 7, SUM)
        nccl("AllReduce", to, to, 4, 7, SUM, own.comm, other)
        assert code("cudaStreamQuery", other) == NOT_READY
    call("cudaStreamSynchronize", other)
    assert (own.read(to, np.ones(4, np.float32)) == 4).all()
    # a group on two streams waits for both, and both wait for it
    a, b = malloc(16), malloc(16)
    with held(other):
        up(b, np.full(4, 7, np.float32).tobytes(), other)
        nccl("GroupStart")
        own.do("AllReduce", one, a, 4, 7, SUM)
        nccl("AllReduce", b, b, 4, 7, SUM, own.comm, other)
        nccl("GroupEnd")
        assert not own.done()
    assert (own.read(b, np.ones(4, np.float32)) == 14).all(), "by the first stream"
    assert (np.frombuffer(down(a, 16, other), np.float32) == 2).all(), "by the other one"
together(2, part)
""",
        devices=2,
    )


def test_sends_without_a_group_wait_for_each_other_and_an_abort_ends_them():
    run(
        BEGIN
        + """
here = threading.Barrier(2)
def part(own):
    at = own.array(np.ones(4, np.float32))
    own.do("Send", at, 4, 7, 1 - own.me)
    own.do("Recv", at, 4, 7, 1 - own.me)
    here.wait()
    threading.Event().wait(0.1)  # longer than it could take
    assert not own.done()
    here.wait()
    nccl("CommAbort", own.comm)
    own.wait()
    assert asks("CommAbort", own.comm) == ARGUMENT, "it is gone"
def quiet(own):
    part(own)
    own.comm = None
together(2, quiet, ends="CommAbort")
assert communicators() == 0
""",
        devices=2,
    )


def test_ranks_that_do_different_things_are_reported_and_wait():
    program = """
def part(own):
    at = malloc(64)
    {work}
    pause = threading.Event()
    while "waits without end" not in last_error():
        pause.wait(0.002)
    here.wait()
    assert own.me == 0 or not own.done(), "who sends may be done"
    nccl("CommAbort", own.comm)
    own.wait()
    own.comm = None
here = threading.Barrier(2)
together(2, part, ends="CommAbort")
print(last_error())
"""
    for work, says in (
        ('own.do("AllReduce", at, at, 4 + own.me, 7, SUM)', "all_reduce of 5 float32, operator 0"),
        ('own.do("AllReduce", at, at, 4, 7 if own.me else 6, SUM)', "all_reduce of 4 float16, operator 0"),
        ('own.do("AllReduce", at, at, 4, 7, own.me)', "all_reduce of 4 float32, operator 1"),
        (
            'own.do("AllReduce", at, at, 4, 7, SUM) if own.me else own.do("AllGather", at, malloc(64), 4, 7)',
            "all_gather of 4 float32",
        ),
        ('own.do("Send", at, 5, 7, 1) if not own.me else own.do("Recv", at, 4, 7, 0)', "send of 5 float32"),
    ):
        assert says in run(BEGIN + program.format(work=work), devices=2, delay_ms=0), work


def test_a_communicator_whose_calls_do_not_wait():
    run(
        BEGIN
        + """
id = unique_id()
error, first = begin(id, 2, 0, waits_not())
assert error == IN_PROGRESS and state(first) == IN_PROGRESS, "nobody else has come"
at = malloc(16)
s = stream()
assert asks("AllReduce", at, at, 4, 7, SUM, first, s) == ARGUMENT
assert "previous call is not done yet" in last_error(first)
call("cudaSetDevice", 1)
t = stream()
error, second = begin(id, 2, 1, waits_not())
other = malloc(16)
assert settled(first) == settled(second) == OK
count, me, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
nccl("CommCount", second, ctypes.byref(count)); nccl("CommUserRank", second, ctypes.byref(me))
nccl("CommCuDevice", second, ctypes.byref(device))
assert (count.value, me.value, device.value) == (2, 1, 1)
up(at, np.full(4, 2, np.float32).tobytes(), s); up(other, np.full(4, 3, np.float32).tobytes(), t)
assert asks("AllReduce", at, at, 4, 7, SUM, first, s) == IN_PROGRESS
assert asks("AllReduce", other, other, 4, 7, SUM, second, t) == IN_PROGRESS
assert settled(first) == settled(second) == OK
assert np.frombuffer(down(at, 16, s), np.float32).tolist() == [5] * 4
assert asks("CommFinalize", first) == asks("CommFinalize", second) == IN_PROGRESS
assert settled(first) == settled(second) == OK
nccl("CommDestroy", first); nccl("CommDestroy", second)
assert communicators() == 0
""",
        devices=2,
    )


def test_a_rank_that_never_comes():
    run(
        BEGIN
        + """
error, comm = begin(unique_id(), 2, 0, waits_not())
threading.Event().wait(0.05)
assert state(comm) == IN_PROGRESS
nccl("CommAbort", comm)
assert communicators() == 0
ended = threading.Event()
def blocks():
    print(begin(unique_id(), 2, 0)[0])
    ended.set()
threading.Thread(target=blocks, daemon=True).start()
assert not ended.wait(0.1)
""",
    )


def test_communicators_are_split():
    run(
        BEGIN
        + """
def part(own):
    for round in range(2):
        child = ctypes.c_size_t(1)
        color = -1 if own.me == 3 else own.me % 2
        nccl("CommSplit", own.comm, ctypes.c_int(color), ctypes.c_int(-own.me), ctypes.byref(child), None)
        if own.me == 3:
            assert not child.value
            continue
        me, size = ctypes.c_int(), ctypes.c_int()
        nccl("CommUserRank", child.value, ctypes.byref(me)); nccl("CommCount", child.value, ctypes.byref(size))
        at = own.array(np.array([own.me, me.value, size.value], np.int32))
        nccl("AllReduce", at, at, 3, 2, SUM, child.value, own.stream)
        got = own.read(at, np.zeros(3, np.int32)).tolist()
        assert got == ([6, 3, 9] if color == 0 else [1, 0, 1]), got
        assert me.value == {0: 2, 2: 1, 4: 0, 1: 0}[own.me], "by their keys"
        nccl("CommDestroy", child.value)
together(5, part)
assert communicators() == 0
""",
        devices=5,
    )


def test_what_a_process_does_with_all_of_its_devices():
    run(
        BEGIN
        + """
comms = (ctypes.c_size_t * 3)()
nccl("CommInitAll", comms, 3, None)
ats = []
for d in range(3):
    call("cudaSetDevice", d)
    ats.append(malloc(4))
    up(ats[d], np.array([d], np.int32).tobytes())
nccl("GroupStart")
for d in range(3):
    nccl("AllReduce", ats[d], ats[d], 1, 2, SUM, comms[d], None)
nccl("GroupEnd")
for d in range(3):
    call("cudaSetDevice", d)
    assert down(ats[d], 4) == np.array([3], np.int32).tobytes()
for comm in comms:
    nccl("CommDestroy", comm)
""",
        devices=3,
    )


def test_operators_that_multiply_first():
    run(
        BEGIN
        + """
def part(own):
    op = ctypes.c_int()
    half = np.array([0.5], np.float32)
    at = own.array(np.full(4, own.me + 1, np.float32))
    nccl("RedOpCreatePreMulSum", ctypes.byref(op), half.ctypes.data_as(ctypes.c_void_p), 7, 1, own.comm)
    own.do("AllReduce", at, to := malloc(16), 4, 7, op.value)
    nccl("RedOpDestroy", op, own.comm)
    assert (own.read(to, np.zeros(4, np.float32)) == 1.5).all()
    there = own.array(half)
    nccl("RedOpCreatePreMulSum", ctypes.byref(op), there, 7, 0, own.comm)
    own.do("AllReduce", at, to := malloc(16), 4, 7, op.value)
    assert (own.read(to, np.zeros(4, np.float32)) == 1.5).all()
    assert asks("AllReduce", at, to, 4, 8, op.value, own.comm, own.stream) == ARGUMENT, "of another type"
together(2, part)
""",
        devices=2,
    )


def test_what_is_wrong_is_said():
    run(
        BEGIN
        + """
version = ctypes.c_int()
nccl("GetVersion", ctypes.byref(version))
assert version.value == 22907
assert text(REMOTE) == "remote process exited or there was a network error" and text(99) == "unknown result code"
assert asks("GroupEnd") == USAGE and "not in a group call" in last_error()
assert begin(unique_id(), 2, 2)[0] == ARGUMENT
assert begin(Id(), 1, 0)[0] == REMOTE
assert asks("CommDestroy", 12345) == ARGUMENT
own = Rank(unique_id(), 1, 0)
at = own.array(np.ones(4, np.float32))
assert asks("AllReduce", at, at, 4, 12, SUM, own.comm, own.stream) == ARGUMENT
assert asks("AllReduce", at, at, 4, 7, 5, own.comm, own.stream) == ARGUMENT
assert asks("AllReduce", at, at, 4, FLOAT8, SUM, own.comm, own.stream) == ARGUMENT
assert "FP8" in last_error(own.comm)
assert asks("Broadcast", at, at, 4, 7, 1, own.comm, own.stream) == ARGUMENT
nccl("GroupStart")
assert asks("Broadcast", at, at, 4, 7, 1, own.comm, own.stream) == ARGUMENT
assert asks("GroupEnd") == ARGUMENT, "and nothing of the group is done"
assert asks("Send", at, 4, 7, 0, own.comm, own.stream) == USAGE, "to itself, alone"
assert asks("AllReduce", at, at, 4, 7, SUM, own.comm, 12345) == CUDA
own.do("AllReduce", at, at, 4, 7, SUM)
own.do("AllReduce", at, at, 0, 7, SUM)
assert (own.read(at, np.ones(4, np.float32)) == 1).all()
id, results = unique_id(), []
def twice():
    results.append(begin(id, 2, len(results))[0])
threads = [threading.Thread(target=lambda me=me: results.append(begin(id, 2, me)[0])) for me in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
assert results == [USAGE] * 2 and "Duplicate GPU detected" in last_error(), "two ranks on one device"
plain = ctypes.create_string_buffer(16)
assert asks("AllReduce", plain, plain, 4, 7, SUM, own.comm, own.stream) == OK
assert code("cudaStreamSynchronize", own.stream) == ILLEGAL, "memory that no device can use"
""",
    )


def test_what_is_not_written_aborts_with_its_name():
    assert "simcuda: ncclMemAlloc: is not written" in dies(BEGIN + 'asks("MemAlloc")')


def test_a_graph_of_an_all_reduce_is_replayed():
    run(
        BEGIN
        + """
def part(own):
    at = malloc(16)
    graph = graph_of(own, lambda: own.do("AllReduce", at, at, 4, 7, SUM))
    for k in range(3):
        up(at, np.full(4, k + own.me, np.float32).tobytes(), own.stream)
        call("cudaGraphLaunch", graph, own.stream)
        own.do("AllReduce", at, at, 4, 7, SUM)
        assert (own.read(at, np.zeros(4, np.float32)) == 2 * (2 * k + 1)).all()
together(2, part)
""",
        devices=2,
    )


PEER = """
import sys
id = Id.from_buffer_copy(bytes.fromhex(sys.stdin.readline()))
call("cudaSetDevice", 1)
error, comm = begin(id, 2, 1)
s, at = stream(), malloc(16)
print(error, flush=True)
nccl("AllReduce", at, at, 4, 7, SUM, comm, s)
call("cudaStreamSynchronize", s)
print("once", flush=True)
sys.stdin.readline()
"""
OWNER = """
import sys
id = unique_id()
print(bytes(id).hex(), flush=True)
error, comm = begin(id, 2, 0)
s, at = stream(), malloc(16)
nccl("AllReduce", at, at, 4, 7, SUM, comm, s)
call("cudaStreamSynchronize", s)
nccl("AllReduce", at, at, 4, 7, SUM, comm, s)
print("issued", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("hosts", [0, 1])
def test_a_process_that_is_killed(hosts):
    """On one host nobody is told; of another host's the connection ends. What waits waits on, until it is aborted."""
    sees = {
        0: "threading.Event().wait(0.1); assert state(comm) == OK",
        1: "while state(comm) == OK: threading.Event().wait(0.002)\nassert state(comm) == REMOTE",
    }[hosts]
    ends = f'\n{sees}\nassert code("cudaStreamQuery", s) == NOT_READY\nnccl("CommAbort", comm)\n'
    ends += 'call("cudaStreamSynchronize", s)\nassert communicators() == 0'
    settings = {"devices": 2, "nccl_hosts": hosts}
    with start(BEGIN + OWNER + ends, **settings) as owner, start(BEGIN + PEER, **settings) as peer:
        peer.stdin.write(owner.stdout.readline())
        peer.stdin.flush()
        assert [peer.stdout.readline(), peer.stdout.readline()] == ["0\n", "once\n"]
        assert owner.stdout.readline() == "issued\n"
        peer.kill()
        peer.wait(HANG)
        _, err = owner.communicate("\n", timeout=HANG)
        assert owner.returncode == 0, err
        assert ("has lost the connection with rank 1" in err) == bool(hosts)


# ---- under torch.distributed

DISTRIBUTED = """
import torch, torch.distributed as dist
from torch.testing import assert_close
RANK, SIZE = {rank}, {size}
torch.cuda.set_device(RANK)
place = torch.device("cuda", RANK)
dist.init_process_group("nccl", init_method="file://{folder}/store", rank=RANK, world_size=SIZE, device_id=place)
def same(got, want):
    assert got.device == place
    assert_close(got.cpu(), want)
"""
EVERYTHING = """
def of(rank, *shape, dtype=torch.float32):
    numbers = torch.Generator().manual_seed(rank)
    values = torch.randn(shape or (7,), generator=numbers) * 4
    return values if dtype == torch.float32 else values.round().to(dtype)  # whose sums are exact
def mine(*shape, **kwargs):
    return of(RANK, *shape, **kwargs).to(place)
def all_of(*shape, **kwargs):
    return torch.stack([of(r, *shape, **kwargs) for r in range(SIZE)])
x = mine()
dist.all_reduce(x)
same(x, all_of().sum(0))
for op, want in ((dist.ReduceOp.MAX, all_of().amax(0)), (dist.ReduceOp.PRODUCT, all_of().prod(0)),
                 (dist.ReduceOp.AVG, all_of().mean(0))):
    dist.all_reduce(x := mine(), op)
    same(x, want)
for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
    dist.all_reduce(x := mine(dtype=dtype))
    same(x, all_of(dtype=dtype).sum(0).to(dtype))
dist.all_reduce(x := mine() > 0, dist.ReduceOp.MAX)
same(x, (all_of() > 0).any(0))
dist.all_reduce(x := mine(), dist._make_nccl_premul_sum(0.25))
same(x, all_of().sum(0) / 4)
dist.reduce(x := mine(), 1)
if RANK == 1:
    same(x, all_of().sum(0))
dist.broadcast(x := mine(), 1)
same(x, of(1))
outs = [torch.empty(7, device=place) for _ in range(SIZE)]
dist.all_gather(outs, mine())
same(torch.stack(outs), all_of())
dist.all_gather_single(out := torch.empty(SIZE, 7, device=place), mine())
same(out, all_of())
dist.reduce_scatter(out := torch.empty(7, device=place), list(mine(SIZE, 7)))
same(out, all_of(SIZE, 7).sum(0)[RANK])
dist.reduce_scatter_single(out := torch.empty(7, device=place), mine(SIZE, 7))
same(out, all_of(SIZE, 7).sum(0)[RANK])
dist.all_to_all_single(out := torch.empty(SIZE, 7, device=place), mine(SIZE, 7))
same(out, all_of(SIZE, 7)[:, RANK])
dist.all_to_all(outs := [torch.empty(7, device=place) for _ in range(SIZE)], list(mine(SIZE, 7)))
same(torch.stack(outs), all_of(SIZE, 7)[:, RANK])
counts = [r + 1 for r in range(SIZE)]
out = torch.empty(SIZE * (RANK + 1), device=place)
dist.all_to_all_single(out, mine(sum(counts)), [RANK + 1] * SIZE, counts)
same(out, torch.cat([of(r, sum(counts)).split(counts)[RANK] for r in range(SIZE)]))
outs = [torch.empty(7, device=place) for _ in range(SIZE)]
dist.gather(mine(), outs if RANK == 0 else None)
if RANK == 0:
    same(torch.stack(outs), all_of())
dist.scatter(out := torch.empty(7, device=place), list(mine(SIZE, 7)) if RANK == 1 else None, 1)
same(out, of(1, SIZE, 7)[RANK])
after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine(), after), dist.P2POp(dist.irecv, x, before)])
for work in works:
    work.wait()
same(x, of(before))
if RANK == 0:
    dist.send(mine(), 1)
elif RANK == 1:
    dist.recv(x, 0)
    same(x, of(0))
dist.barrier()
dist.all_gather_object(objects := [None] * SIZE, RANK)
assert objects == list(range(SIZE))

# beside the stream that it was issued on, which waits for it in wait()
work = dist.all_reduce(x := mine(1000), async_op=True)
early = x + 0
work.wait()
late = x + 0
same(late, all_of(1000).sum(0))
work = dist.all_reduce(x := mine(100_000), async_op=True)
del work
torch.cuda.synchronize()
same(x, all_of(100_000).sum(0))

pair = dist.new_group([0, 1])
if RANK < 2:
    dist.all_reduce(x := mine(), group=pair)
    same(x, of(0) + of(1))

model = torch.nn.Linear(5, 3)
with torch.no_grad():
    for p in model.parameters():
        p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
import copy
own = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model).to(place), device_ids=[RANK])
data = torch.randn(SIZE * 4, 5, generator=torch.Generator().manual_seed(9))
for net, rows in ((own, data.chunk(SIZE)[RANK].to(place)), (model, data)):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(rows).square().mean().backward()
        optimizer.step()
for p, q in zip(own.module.parameters(), model.parameters()):
    same(p.detach(), q.detach())
torch.cuda.synchronize()
dist.destroy_process_group()
import ctypes
assert ctypes.CDLL(None).simcuda_communicators() == 0
"""


def _distributed(size: int, folder: object, program: str, **settings: object) -> list[str]:
    processes = [
        start(DISTRIBUTED.format(rank=rank, size=size, folder=folder) + program, kernels=True, devices=size, **settings)
        for rank in range(size)
    ]
    try:
        told = [process.communicate(timeout=HANG) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(HANG)
    for process, (out, err) in zip(processes, told, strict=True):
        assert process.returncode == 0, f"exit code {process.returncode}\n{out}{err}"
    return [out for out, _ in told]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_torch_distributed(tmp_path, size):
    _distributed(size, tmp_path, EVERYTHING, delay_ms=1)


# ---- under the data channel

SESSION = """
import ctypes, os, signal
from disttensor.collectives import ReduceOp
N = len(dt.nodes())
places = [torch.device(f"node:{k}") for k in range(N)]
def local(shape=(1000,), dtype=torch.float32):
    return [(torch.randn(shape, generator=torch.Generator().manual_seed(k)) * 4).to(dtype) for k in range(N)]
def up(values):
    return [x.to(place) for x, place in zip(values, places)]  # as many as there are values
def same(got, want):
    torch.testing.assert_close(got.cpu(), want)
def communicators(nodes):
    return dt.run(lambda: ctypes.CDLL(None).simcuda_communicators(), node=nodes, distributed=True)
"""


def test_the_data_channel():
    run_session(
        SESSION
        + """
# a rank that has nothing to give makes the communicator with the others all the same, and they hear why
xs = up(local())
xs[0] = torch.empty(1 << 40, device=places[0])[:1000]
dt.all_reduce(xs, algorithm="native")
try:
    xs[1].cpu()
except torch.OutOfMemoryError as error:
    assert "node 0" in str(error) + "".join(error.__notes__), error
else:
    raise AssertionError
for op, dtype, want in (
    ("SUM", torch.float32, lambda xs: xs.sum(0)), ("AVG", torch.float64, lambda xs: xs.mean(0)),
    ("PRODUCT", torch.int64, lambda xs: xs.prod(0)), ("MAX", torch.int32, lambda xs: xs.amax(0)),
    ("SUM", torch.bfloat16, lambda xs: xs.sum(0)),
):
    xs = up(local(dtype=dtype))
    dt.all_reduce(xs, op, algorithm="native")
    for x in xs:
        same(x, want(torch.stack(local(dtype=dtype))))
assert communicators(range(N)) == [1] * N, "it was NCCL"
whole = torch.stack(local())
dt.broadcast(xs := up(local()), 1, algorithm="native")
for x in xs:
    same(x, whole[1])
dt.collectives.reduce(xs := up(local()), 1, algorithm="native")
same(xs[1], whole.sum(0))
lists = [[torch.empty(1000, device=place) for _ in range(N)] for place in places]
dt.collectives.all_gather(lists, up(local()), algorithm="native")
for outs in lists:
    same(torch.stack([out.cpu() for out in outs]), whole)
dt.collectives.gather(xs := up(local()), lists[0], 0)
same(torch.stack([out.cpu() for out in lists[0]]), whole)
outs = [torch.empty(1000, device=place) for place in places]
dt.collectives.scatter(outs, [x + 1 for x in lists[1]], 1)
for out, part in zip(outs, whole):
    same(out, part + 1)
dt.collectives.reduce_scatter(outs, lists, algorithm="native")
for out, part in zip(outs, whole):
    same(out, part * N)
targets = [[torch.empty(1000, device=place) for _ in range(N)] for place in places]
sources = [[x + k for x in lists[k]] for k in range(N)]
dt.collectives.all_to_all(targets, sources)
for k, row in enumerate(targets):
    for j, out in enumerate(row):
        same(out, whole[k] + j)

work = dt.all_reduce(xs := up(local()), async_op=True, algorithm="native")
beside = [x * 2 for x in up(local())]
assert work.result() is xs
for x, y, part in zip(xs, beside, whole):
    same(x, whole.sum(0))
    same(y, part * 2)
dt.collectives.send(xs[0] + 1, outs[1])
same(outs[1], whole.sum(0) + 1)
x = up(local())
for _ in range(5):
    x = [y * 0.5 for y in x]
    dt.all_reduce(x, algorithm="native")
same(x[0], whole.sum(0) * (0.5 ** 5 * N ** 4))
assert communicators(range(N)) == [1] * N
""",
        backend="nccl",
        visible="0,1",
        devices=2,
        delay_ms=1,
    )


def test_a_communicator_ends_with_its_object():
    """Or by ``abort``, which ends it once."""
    run(
        """
import ctypes, torch
from disttensor.runtime.channel.nccl.library import Communicator
def alone():
    comm = Communicator(torch.device("cuda:0"), 1, Communicator.unique_id(), 0)
    while not comm.ready():
        pass
    return comm
count = ctypes.CDLL(None).simcuda_communicators
first, second = alone(), alone()
assert count() == 2
del first
assert count() == 1
second.abort()
second.abort()
assert count() == 0
x = torch.empty(4, device="cuda:0")
for call in (second.ready, lambda: second.exchange([(x, 0)], [(x, 0)])):
    try:
        call()
    except RuntimeError as error:
        assert "invalid argument" in str(error)
    else:
        raise AssertionError
third = alone()  # not within the group that the exchange began
assert count() == 1
"""
    )


@pytest.mark.slow
def test_memory_of_a_call_that_is_under_way_is_not_used_for_anything_else():
    """Calls return before the stream has their work, and what they were given may be a tensor that nobody else has."""
    run(
        """
import threading, torch
from disttensor.runtime.channel.nccl.library import Communicator
COUNT = 1000
id, wrong, pause = Communicator.unique_id(), [], threading.Event()
def until(done, meanwhile=lambda: pause.wait(0.0005)):
    while not done():
        meanwhile()
def rank(me):
    place = torch.device("cuda", me)
    torch.cuda.set_device(me)
    comm = Communicator(place, 2, id, me)
    until(comm.ready)
    x, out = torch.full((COUNT,), me + 1.0).to(place), torch.empty(COUNT, device=place)
    other = torch.full((COUNT,), 7.0)
    for want, call in (
        (3.0, lambda: comm.all_reduce(x.clone(), out, "SUM")),
        (2.0 - me, lambda: comm.exchange([(x.clone(), 1 - me)], [(out, 1 - me)])),
    ):
        call()
        others = []  # use what the allocator has, while the call is under way
        until(comm.ready, lambda: len(others) < 4 and others.append(other.to(place)))
        until(comm.mark())
        if not torch.equal(out.cpu(), torch.full((COUNT,), want)):
            wrong.append((me, want, out[:1].cpu()))
threads = [threading.Thread(target=rank, args=(me,)) for me in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
assert not wrong, wrong
""",
        devices=2,
    )


SESSIONS = {
    "a node that is killed in the middle": """
xs = up(local())
dt.all_reduce(xs, algorithm="native")
dt.all_reduce(ys := up(local()[:2]), algorithm="native")
same(ys[0], sum(local()[:2]))
dt.synchronize()
assert communicators(range(N)) == [2, 2, 1]
pid = dt.nodes()[2].pid
os.kill(pid, signal.SIGSTOP)  # what is issued now waits for it
dt.all_reduce(xs, algorithm="native")
later = xs[1] * 2
os.kill(pid, signal.SIGKILL)
for x in (xs[0], xs[1], later):
    try:
        x.sum().item()
    except dt.NodeLost as lost:
        assert lost.rank == 2, lost
    else:
        raise AssertionError("it has been reduced")
dt.all_reduce(ys := up(local()[:2]), "AVG", algorithm="native")
same(ys[1], sum(local()[:2]) / 2)
assert communicators([0, 1]) == [1, 1], "the broken one has ended"
""",
    "threads of a script at once, beside copies from node to node": """
import threading
whole, wrong = torch.stack(local()), []
def reduced(me, k):
    dt.all_reduce(xs := up([x + me + k for x in local()]), algorithm="native" if me else "ring")
    for x in xs:
        same(x, whole.sum(0) + N * (me + k))
def spread(me, k):
    dt.broadcast(xs := up([x * (me + k) for x in local()]), k % N, algorithm="native")
    for x in xs:
        same(x, whole[k % N] * (me + k))
def moved(me, k):
    x, *_ = up(local())
    for place in [*places[1:], places[0]] * 2:
        x = (x + 1).to(place)
    same(x, whole[0] + 2 * N)
def turns(me, work):
    try:
        for k in range(6):
            work(me, k)
    except BaseException as error:
        wrong.append(error)
works = (reduced, reduced, spread, moved)
threads = [threading.Thread(target=turns, args=each) for each in enumerate(works)]
[t.start() for t in threads]; [t.join() for t in threads]
if wrong:
    raise wrong[0]
assert communicators(range(N)) == [1] * N, "they share it"
""",
    "functions as ranks": """
def ranks(x):
    import torch.distributed as dist
    y = x.clone()
    dist.all_reduce(y)
    work = dist.all_reduce(z := x + 1, async_op=True)
    work.wait()
    return dist.get_backend(), y, z, x.device.type
for _ in range(2):
    told = dt.run(ranks, dt.tasks.Each(up(local())), node=range(N), distributed=True)
    for backend, y, z, kind in told:
        assert "nccl" in backend and kind == "cuda", (backend, kind)
        same(y, torch.stack(local()).sum(0))
        same(z, torch.stack(local()).sum(0) + N)
""",
    # 0: before there is a communicator of these ranks; 1: in a group that the function has made; 2: where the others
    # would go on for ever without the results; 3: by a kill
    "functions whose ranks wait for one that does not come": """
import time
import torch.distributed as dist
def ranks(x, what):
    me, last = dist.get_rank(), dist.get_world_size() - 1
    if what == 1:
        some = dist.new_group([0, last])
        if me in (0, last):
            dist.all_reduce(x.clone(), group=some)
            torch.cuda.synchronize()
    elif what >= 2:
        some = None
        dist.all_reduce(x.clone())
        torch.cuda.synchronize()
    if me == last:
        if what < 3:
            raise ValueError("not I")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x, group=some if me == 0 and what else None)  # on the device nothing ends this
    while what == 2:
        time.sleep(0.01)
    torch.cuda.synchronize()
for what, kind in enumerate((ValueError, ValueError, ValueError, dt.NodeLost)):
    try:
        dt.run(ranks, dt.tasks.Each(up(local())), what, node=range(N), distributed=True)
    except kind as error:
        assert "and 2 other nodes broke off, as ranks wait for each other" in error.__notes__, (what, error.__notes__)
    else:
        raise AssertionError(what)
def reduced(x):
    dist.all_reduce(x)
    return x
for total in dt.run(reduced, dt.tasks.Each(up(local()[:2])), node=[0, 1], distributed=True):
    same(total, sum(local()[:2]))
assert communicators([0, 1]) == [1, 1], "the broken ones have ended"
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SESSIONS)
def test_sessions(name):
    run_session(SESSION + SESSIONS[name], nodes=3, backend="nccl", visible="0,1,2", devices=3, delay_ms=1)


@pytest.mark.slow
def test_auto_takes_it_for_meshes():
    """Over dims, and in the training that goes by them; each group has a communicator."""
    run_session(
        SESSION
        + """
from torch import nn
assert communicators(range(N)) == [0] * N
m = dt.mesh(dp=2, tp=2)
x = dt.meshes.from_shards(m, local())
whole = torch.stack(local()).view(2, 2, -1)
for shard, total in zip(dt.all_reduce(x, over="tp").shards(), whole.sum(1).repeat_interleave(2, 0)):
    same(shard, total)
assert communicators(range(N)) == [1] * N
work = dt.all_reduce(x * 2, over="tp", async_op=True)
y = x + 1
for shard, total in zip(work.result().shards(), whole.sum(1).repeat_interleave(2, 0)):
    same(shard, total * 2)
for shard, part in zip(y.shards(), local()):
    same(shard, part + 1)
z = dt.meshes.from_shards(m, local()).requires_grad_()
(dt.all_reduce(z, over=("dp", "tp")) ** 2).sum().backward()
for shard in z.grad.shards():
    same(shard, 2 * N * whole.sum((0, 1)))
assert communicators(range(N)) == [2] * N
torch.manual_seed(0)
model = nn.Linear(8, 4)
batch = torch.randn(12, 8)
model(batch).square().mean().backward()
want = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
d = dt.mesh(dp=N)
there = dt.DataParallel(model.to(d.device), d)
there(dt.shard(batch, d, dp=0)).square().mean().backward()
for p, grad in zip(there.parameters(), want):
    for shard in p.grad.shards():
        same(shard, grad)
assert communicators(range(N)) == [2] * N, "that of all nodes is used again"
""",
        nodes=4,
        backend="auto",
        visible="0,1,2,3",
        devices=4,
        delay_ms=1,
    )


@pytest.mark.slow
def test_two_nodes_on_one_device_are_told():
    run_session(
        SESSION
        + """
xs = up(local())
dt.all_reduce(xs, algorithm="native")
for x in xs:
    try:
        x.cpu()
    except dt.errors.RemoteError as error:
        assert "Duplicate GPU detected" in str(error), error
    else:
        raise AssertionError
dt.all_reduce(ys := up(local()), algorithm="ring")
same(ys[0], sum(local()))
""",
        backend="nccl",
        delay_ms=1,
    )
