"""The simulated CUDA runtime, by its calls, without torch."""

from __future__ import annotations

import pytest
from limits import HANG
from simcuda_kit import dies, run, start

pytestmark = [pytest.mark.simcuda, pytest.mark.cold]

BEGIN = "from simcuda_calls import *\nimport ctypes\n"


def test_bytes_go_up_across_and_down():
    run(
        BEGIN
        + """
data = bytes(range(256)) * 40
a, b, s = malloc(len(data)), malloc(len(data)), stream()
up(a, data, s)
call("cudaMemcpyAsync", b, a, len(data), 3, s)
assert down(b, len(data), s) == data
call("cudaMemsetAsync", b + 1, 7, 3, s)
assert down(b, 5, s) == bytes([0, 7, 7, 7, 4])
call("cudaFree", a)
assert code("cudaFree", a) == INVALID_VALUE
assert code("cudaMemcpyAsync", b, b"x" * 20000, 20000, 1, s) == INVALID_VALUE, "past its end"
"""
    )


def test_fresh_and_pinned_memory_is_full_of_the_pattern():
    run(BEGIN + "assert down(malloc(4097), 4096) == PATTERN * 2048\nassert pinned(64).raw == PATTERN * 32")


@pytest.mark.parametrize(
    ("access", "says"),
    [("ctypes.string_at(a, 1)", "the host reads"), ("ctypes.memset(a, 0, 1)", "the host writes")],
)
def test_the_host_does_not_touch_device_memory(access, says):
    program = BEGIN + f'a = malloc(64)\nup(a, b"x" * 64)\ncall("cudaDeviceSynchronize")\n{access}'
    assert f"simcuda: {says} device memory at 0x" in dies(program)


def test_the_host_does_not_touch_it_while_a_task_works_there():
    program = BEGIN + "a = malloc(64)\ns = stream()\nwith held(s):\n    ctypes.string_at(a, 1)"
    assert "simcuda: the host reads device memory" in dies(program)


def test_a_read_without_its_wait_is_wrong_and_with_it_right():
    run(
        BEGIN
        + """
wrong = 0
for k in range(20):
    a, out, s, t = malloc(64), pinned(64), stream(), stream()
    e = event()
    up(a, bytes([k]) * 64, s)
    call("cudaEventRecord", e, s)
    call("cudaMemcpyAsync", out, a, 64, 2, s)
    wrong += out.raw != bytes([k]) * 64
    call("cudaStreamSynchronize", s)
    assert out.raw == bytes([k]) * 64
    call("cudaStreamWaitEvent", t, e, 0)
    assert down(a, 64, t) == bytes([k]) * 64
assert wrong == 20, wrong
""",
        delay_ms=5,
    )


def test_a_pinned_source_is_read_late_and_another_is_staged():
    run(
        BEGIN
        + """
source, a, b, s = pinned(8), malloc(8), malloc(8), stream()
plain = ctypes.create_string_buffer(b"earlier!", 8)
source.raw = b"earlier!"
with held(s):
    call("cudaMemcpyAsync", a, source, 8, 1, s)
    call("cudaMemcpyAsync", b, plain, 8, 1, s)
    source.raw = plain.raw = b"later..."
assert (down(a, 8, s), down(b, 8, s)) == (b"later...", b"earlier!")
"""
    )


def test_the_legacy_stream_waits_for_blocking_ones_only():
    run(
        BEGIN
        + """
a = malloc(8)
blocking, apart = stream(0), stream()
with held(apart):
    up(a, b"legacy..")
    assert down(a, 8) == b"legacy.."
with held(blocking):
    up(a, b"blocking", blocking)
    up(a, b"legacy..")
    out = pinned(8)
    call("cudaMemcpyAsync", out, a, 8, 2, 0)
    assert code("cudaStreamQuery", 0) == NOT_READY
    up(a, b"blocking", blocking)
    call("cudaMemcpyAsync", out, a, 8, 2, 0)
call("cudaDeviceSynchronize")
assert out.raw == b"blocking", out.raw
"""
    )


def test_events_say_when():
    run(
        BEGIN
        + """
s, before, after, untimed = stream(), event(), event(), event(UNTIMED)
ms = ctypes.c_float()
assert code("cudaEventQuery", before) == SUCCESS, "never recorded"
assert code("cudaEventElapsedTime", ctypes.byref(ms), before, after) == 400
call("cudaEventRecord", before, s)
with held(s):
    call("cudaEventRecord", after, s)
    assert code("cudaEventQuery", after) == NOT_READY
    assert code("cudaEventElapsedTime", ctypes.byref(ms), before, after) == NOT_READY
call("cudaEventSynchronize", after)
call("cudaEventElapsedTime", ctypes.byref(ms), before, after)
assert ms.value > 0
call("cudaEventRecord", untimed, s)
assert code("cudaEventElapsedTime", ctypes.byref(ms), before, untimed) == 400
call("cudaEventDestroy", after)
assert code("cudaEventQuery", after) == 400
"""
    )


COUNT = BEGIN + 'n = ctypes.c_int()\ne = code("cudaGetDeviceCount", ctypes.byref(n))\nprint(e, n.value)'


@pytest.mark.parametrize(
    ("visible", "said"),
    [
        (None, "0 3"),
        ("2,0", "0 2"),
        ("1,7,0", "0 1"),
        ("", "100 0"),
        ("-1", "100 0"),
        ("1,1", "100 0"),
        ("GPU-73696d63", "0 1"),
    ],
)
def test_visible_devices(visible, said):
    assert run(COUNT, visible=visible, devices=3) == said + "\n"


def test_visible_devices_are_in_their_order():
    program = (
        BEGIN + 'b = ctypes.create_string_buffer(32)\ncall("cudaDeviceGetPCIBusId", b, 32, 0)\nprint(b.value.decode())'
    )
    assert run(program, visible="2,0", devices=3) == "0000:03:00.0\n"


def test_visible_devices_are_those_of_the_first_call():
    """A fork of a process that has called nothing yet has its own, as the nodes of a host do."""
    forked = """
import os
for device in ("2", "0,1"):
    if not os.fork():
        os.environ["CUDA_VISIBLE_DEVICES"] = device
        n, b = ctypes.c_int(), ctypes.create_string_buffer(32)
        call("cudaGetDeviceCount", ctypes.byref(n))
        call("cudaDeviceGetPCIBusId", b, 32, 0)
        print(n.value, b.value.decode(), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
    assert run(BEGIN + forked, visible="1", devices=3) == "1 0000:03:00.0\n2 0000:01:00.0\n"


def test_memory_is_what_was_chosen():
    run(
        BEGIN
        + """
free, total = ctypes.c_size_t(), ctypes.c_size_t()
def left():
    call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return free.value >> 20, total.value >> 20
assert left() == (16, 16)
a = malloc(10 << 20)
assert left() == (6, 16)
got = ctypes.c_size_t()
assert code("cudaMalloc", ctypes.byref(got), 7 << 20) == NO_MEMORY and code("cudaGetLastError") == NO_MEMORY
assert code("cudaGetLastError") == SUCCESS
call("cudaFree", a)
malloc(16 << 20)
""",
        memory="16M",
    )


def test_the_nth_allocation_fails_once():
    run(
        BEGIN
        + "malloc(8); malloc(8)\ngot = ctypes.c_size_t()\n"
        + 'assert code("cudaMalloc", ctypes.byref(got), 8) == NO_MEMORY\nmalloc(8)',
        fail_allocation=3,
    )


def test_an_error_of_a_task_sticks():
    run(
        BEGIN
        + """
a, s = malloc(8), stream()
up(a, b"x" * 8, s)
up(a, b"y" * 8, s)
assert code("cudaStreamSynchronize", s) == ILLEGAL
assert code("cudaGetLastError") == code("cudaGetLastError") == ILLEGAL
got = ctypes.c_size_t()
assert code("cudaMalloc", ctypes.byref(got), 8) == ILLEGAL
device = ctypes.c_int()
assert code("cudaGetDevice", ctypes.byref(device)) == code("cudaSetDevice", 0) == SUCCESS, "what torch's guards call"
""",
        fail_task=2,
    )


def test_peers_may_be_refused():
    asks = 'can = ctypes.c_int()\ncall("cudaDeviceCanAccessPeer", ctypes.byref(can), 0, 1)\n'
    asks += 'print(can.value, code("cudaDeviceEnablePeerAccess", 1, 0), code("cudaDeviceEnablePeerAccess", 1, 0))'
    assert run(BEGIN + asks, devices=2) == "1 0 704\n"
    assert run(BEGIN + asks, devices=2, peers=0) == "0 217 217\n"


OTHER = """
import sys
a, e = (Handle64.from_buffer_copy(bytes.fromhex(x)) for x in sys.stdin.readline().split())
memory, event = ctypes.c_size_t(), ctypes.c_size_t()
call("cudaIpcOpenMemHandle", ctypes.byref(memory), a, 1)
call("cudaIpcOpenEventHandle", ctypes.byref(event), e)
s = stream()
call("cudaStreamWaitEvent", s, event.value, 0)
out = pinned(8)
call("cudaMemcpyAsync", out, memory.value, 8, 2, s)
print("issued", code("cudaStreamQuery", s), flush=True)
sys.stdin.readline()
call("cudaStreamSynchronize", s)
up(memory.value, b"answered"); call("cudaDeviceSynchronize")
print(out.raw.decode(), flush=True)
sys.stdin.readline()
while down(memory.value, 4) != PATTERN * 2: pass
print(True)
call("cudaIpcCloseMemHandle", memory.value)
"""


def test_another_process_has_its_memory_and_waits_for_its_event():
    mine = """
import sys
a, e, s = malloc(8), event(SHARED), stream()
memory, of_event = Handle64(), Handle64()
call("cudaIpcGetMemHandle", ctypes.byref(memory), a)
call("cudaIpcGetEventHandle", ctypes.byref(of_event), e)
got = ctypes.c_size_t()
assert code("cudaIpcOpenMemHandle", ctypes.byref(got), memory, 1) == 201, "its own"
with held(s):
    up(a, b"question", s)
    call("cudaEventRecord", e, s)
    print(memory.hex(), of_event.hex(), flush=True)
    sys.stdin.readline()
print("going", flush=True)
sys.stdin.readline()
print(down(a, 8).decode(), flush=True)
call("cudaFree", a)
print("freed", flush=True)
sys.stdin.readline()
"""

    def tell(process, line=""):
        process.stdin.write(line + "\n")
        process.stdin.flush()

    with start(BEGIN + mine) as owner, start(BEGIN + OTHER) as user:
        tell(user, owner.stdout.readline().strip())
        assert user.stdout.readline() == "issued 600\n"
        tell(owner)
        assert owner.stdout.readline() == "going\n"
        tell(user)
        assert user.stdout.readline() == "question\n"
        tell(owner)
        assert owner.stdout.readline() == "answered\n"
        assert owner.stdout.readline() == "freed\n"
        tell(owner)
        tell(user)
        assert user.communicate(timeout=HANG)[0] == "True\n"
        owner.communicate(timeout=HANG)
        assert (owner.returncode, user.returncode) == (0, 0)


def test_processes_share_a_device_by_a_ledger(tmp_path):
    holds = BEGIN + 'malloc(10 << 20)\nprint("has", flush=True)\ninput()'
    asks = BEGIN + 'n = ctypes.c_size_t()\nprint(code("cudaMalloc", ctypes.byref(n), 10 << 20))'
    settings = {"memory": "16M", "ledger": tmp_path / "ledger"}
    with start(holds, **settings) as holder:
        assert holder.stdout.readline() == "has\n"
        assert run(asks, **settings) == "2\n"
        holder.communicate("\n", timeout=HANG)
    assert run(asks, **settings) == "0\n", "it is gone, and what it had"


def test_a_capture_records_refuses_and_is_replayed():
    run(
        BEGIN
        + """
s, t, e, f = stream(), stream(), event(UNTIMED), event(UNTIMED)
a, b = malloc(8), malloc(8)
up(a, b"00000000", s); up(b, b"11111111", s); call("cudaStreamSynchronize", s)

def begin(): call("cudaStreamBeginCapture", s, 0)
def end():
    graph = ctypes.c_size_t()
    return code("cudaStreamEndCapture", s, ctypes.byref(graph)), graph.value

begin()
call("cudaEventRecord", e, s)
call("cudaStreamWaitEvent", t, e, 0)
call("cudaMemcpyAsync", a, b, 8, 3, t)
call("cudaEventRecord", f, t)
call("cudaStreamWaitEvent", s, f, 0)
error, graph = end()
assert error == SUCCESS
assert down(a, 8, s) == b"00000000", "nothing of it is done yet"
runs = made("cudaGraphInstantiateWithFlags", graph, 0)
call("cudaGraphDestroy", graph)
for value in b"22222222", b"33333333":
    up(b, value, s)
    call("cudaGraphLaunch", runs, s)
    assert down(a, 8, s) == value
call("cudaGraphExecDestroy", runs)
begin()
assert code("cudaStreamSynchronize", s) == 900
assert end()[0] == 901
begin()
got = ctypes.c_size_t()
assert code("cudaMalloc", ctypes.byref(got), 8) == 900
assert end()[0] == 901
begin()
call("cudaEventRecord", e, s)
call("cudaStreamWaitEvent", t, e, 0)
call("cudaMemsetAsync", a, 0, 8, t)
assert end()[0] == 904, "unjoined"
begin()
call("cudaEventRecord", e, t)
assert code("cudaStreamWaitEvent", s, e, 0) == 905
assert end()[0] == 901
"""
    )


CAPTURES = """
import threading
s, t, other = stream(), stream(), event(UNTIMED)
def begin(on=s, mode=0): call("cudaStreamBeginCapture", on, mode)
def end(on=s):
    graph = ctypes.c_size_t()
    return code("cudaStreamEndCapture", on, ctypes.byref(graph))
def elsewhere(work):
    # returns what a call says in another thread
    said = []
    thread = threading.Thread(target=lambda: said.append(work()))
    thread.start(); thread.join()
    return said[0]
def query(): return code("cudaEventQuery", other)
def allocate():
    got = ctypes.c_size_t()
    return code("cudaMalloc", ctypes.byref(got), 8)
def as_mode(mode, work):
    kept = ctypes.c_int(mode)
    call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(kept))
    try:
        return work()
    finally:
        call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(kept))
GLOBAL, OF_THREAD, RELAXED = 0, 1, 2
"""


def test_what_else_a_capture_refuses():
    """By CUDA's numbers, and that the graph is lost then: two captures that would become one, an end on another stream
    or in another thread, work of the legacy stream beside a blocking one's, waits for what is captured."""
    run(
        BEGIN
        + CAPTURES
        + """
memory = malloc(8)
begin(); begin(t)
call("cudaEventRecord", other, t)
assert code("cudaStreamWaitEvent", s, other, 0) == 902, "a merge"
assert (end(), end(t)) == (901, 901)
begin()
call("cudaEventRecord", other, s)
call("cudaStreamWaitEvent", t, other, 0)
assert end(t) == 903, "unmatched"
call("cudaEventRecord", other, t)
call("cudaStreamWaitEvent", s, other, 0)
assert end() == SUCCESS
blocking = stream(0)
begin(blocking)
assert code("cudaMemsetAsync", memory, 0, 8, 0) == 906, "implicit"
assert end(blocking) == 901
for wait in ("cudaEventQuery", "cudaEventSynchronize"):
    begin()
    call("cudaEventRecord", other, s)
    assert code(wait, other) == 907, "captured"
    assert end() == 901
begin()
assert code("cudaStreamQuery", s) == 900
assert end() == 901
begin()
assert code("cudaDeviceSynchronize") == 900
assert end() == 901
for mode in (GLOBAL, OF_THREAD):
    begin(mode=mode)
    assert elsewhere(end) == 908, "another thread's"
    assert end() == SUCCESS
begin(mode=RELAXED)
assert elsewhere(end) == SUCCESS
assert code("cudaStreamBeginCapture", 0, 0) == 900, "the legacy stream"
"""
    )


def test_whose_calls_a_capture_refuses():
    """What allocates or asks for an event's state: of all threads where a capture is global, unless they have relaxed
    that for captures of others; of its own where it is its thread's; of none where either is relaxed."""
    run(
        BEGIN
        + CAPTURES
        + """
call("cudaEventRecord", other, t)
call("cudaEventSynchronize", other)
for work in (query, allocate):
    for mode, here, there in ((GLOBAL, 900, 900), (OF_THREAD, 900, SUCCESS), (RELAXED, SUCCESS, SUCCESS)):
        for run, wanted in ((lambda work: work(), here), (elsewhere, there)):
            begin(mode=mode)
            assert run(work) == wanted, (work, mode, wanted)
            assert end() == (901 if wanted else SUCCESS)
    for own, here, there in ((OF_THREAD, 900, SUCCESS), (RELAXED, SUCCESS, SUCCESS)):
        for run, wanted in ((lambda work: work(), here), (elsewhere, there)):
            begin()
            assert run(lambda: as_mode(own, work)) == wanted, (work, own, wanted)
            assert end() == (901 if wanted else SUCCESS)
"""
    )


def test_what_is_not_written_aborts_with_its_name():
    assert "simcuda: cudaMallocManaged: is not written" in dies(BEGIN + 'code("cudaMallocManaged")')


def test_a_driver_function_that_is_not_written_aborts_with_its_name():
    program = BEGIN + "f = ctypes.c_void_p()"
    program += '\ncall("cudaGetDriverEntryPointByVersion", b"cuMemCreate", ctypes.byref(f), 12000, 0, None)'
    program += "\nctypes.CFUNCTYPE(None)(f.value)()"
    assert "simcuda: cuMemCreate: is not written" in dies(program)


def test_a_kernel_that_nobody_has_replaced_aborts_with_its_name():
    program = BEGIN + 'kernel, name = b"a host function", b"_Z6doublePf"\n'
    program += "ctypes.CDLL(None).__cudaRegisterFunction(None, kernel, None, name, 0, None, None, None, None, None)\n"
    program += 'code("cudaLaunchKernelExC", None, kernel, None)'
    assert "a launch of double(float*), which nobody has replaced" in dies(program)


def test_a_wait_inside_a_task_aborts():
    program = BEGIN + 's = stream()\ncb = Callback(lambda d: code("cudaDeviceSynchronize") and None)\n'
    program += 'call("cudaLaunchHostFunc", s, cb, None)\ncall("cudaStreamSynchronize", s)'
    assert "cudaDeviceSynchronize: waits inside a task" in dies(program)


def test_a_fork_of_a_process_that_has_used_it_cannot():
    run(
        BEGIN
        + """
import os
malloc(8)
pid = os.fork()
if not pid:
    n = ctypes.c_int()
    os._exit(code("cudaGetDevice", ctypes.byref(n)))
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
"""
    )
