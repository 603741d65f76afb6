"""The part of ``doctor --gpu`` that has a process of its own: what each GPU computes, what goes between them, nodes.

A step is begun by a line that says so, with its limit, and ends with its row. After one that goes wrong the rest is
tried by a new process: what a GPU has failed at may have broken this one's CUDA. A session of nodes begins with the
first step that needs it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..runtime.host.affinity import VISIBLE, this_host
from .doctor import AGAIN, BEGINS, GIB, MARK, MIB, NONE, OK, WRONG, CheckRow, Step, size

#: Nodes of the session: two on one GPU, else one for each, up to so many.
_NODES = 8
#: Bytes of a copy between GPUs, and of one whose speed is measured where there is memory enough.
_COPIED, _MEASURED = MIB, 256 * MIB
#: The largest of so many measurements counts.
_TIMES = 3
#: Below this part of what torch.cuda carries alone, ours is said to be slow.
_SLOW = 0.1
#: A GPU's cycles for which a stream is kept busy while another one works.
_BUSY = 200_000_000

#: The largest error that a result may have, as a part of the largest number of the result that the CPU computes in
#: float64. TF32 is off. A dtype with 24 bits gives 1e-6 here, one with 8 bits (bfloat16) 4e-3.
TOLERANCES = {
    "matmul": 1e-5,
    "matmul in bfloat16": 1e-2,
    "conv2d": 1e-5,
    "sum": 1e-5,
    "var": 1e-5,
    "amax": 0.0,
    "softmax": 1e-5,
}

_NONE = "torch sees no GPU, so none was tried"
_REPORT = "send this, with the rows above, in a bug report"
_DRIVER = "`nvidia-smi` has to show the GPU, and `dmesg | grep NVRM` no error of it: mend these first, else " + _REPORT


class Nothing(Exception):
    """A step that finds nothing to try, or that has something to say of what works."""

    def __init__(self, found: str, do: str = "") -> None:
        super().__init__(found)
        self.found, self.do = found, do


class Over(Exception):
    """A machine on which nothing more can be tried."""

    def __init__(self, why: str, do: str = "") -> None:
        super().__init__(why)
        self.do = do


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the rows of the steps after ``--after``, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m disttensor.cli.gpu_trial", description="Try this machine's GPUs.")
    parser.add_argument("--after", metavar="NAME", help="leave out the steps up to this one")
    after = parser.parse_args(argv).after
    names = [step.name for step, _ in STEPS]
    if after:  # what was tried before has waited for torch's import, and CUDA's begin
        cuda()
    for step, tries in STEPS[names.index(after) + 1 if after else 0 :]:
        print(BEGINS + json.dumps(step._asdict()), flush=True)
        row, over = outcome(step, tries)
        print(MARK + json.dumps(row._asdict()), flush=True)
        if row.state == WRONG:
            # not by way of the session's end and CUDA's: either may hang, and nodes end with this process
            os._exit(0 if over or step.name == names[-1] else AGAIN)
    if "disttensor.startup.start" in sys.modules:
        from ..startup.start import shutdown

        shutdown()
    return 0


def outcome(step: Step, tries: Callable[[], str]) -> tuple[CheckRow, bool]:
    """Returns the row of a step, and whether nothing more can be tried."""
    try:
        return CheckRow(step.name, OK, tries()), False
    except Nothing as e:
        return CheckRow(step.name, NONE, e.found, e.do), False
    except Over as e:
        return CheckRow(step.name, WRONG, str(e), e.do or step.do), True
    except Exception as e:
        return CheckRow(step.name, WRONG, f"{type(e).__name__}: {e}".splitlines()[0], step.do), False


# ---- torch.cuda alone ------------------------------------------------------------------------------------------------


@functools.cache
def cuda() -> Any:
    """Returns torch, with numbers of as many bits as their dtypes have. Raises Over where it sees no GPU."""
    import torch

    if torch.version.cuda is None:
        why = f"{_NONE}: this torch ({torch.__version__}) is built without CUDA"
        if not this_host().gpus:
            why += ", and no driver names a GPU here"
        raise Over(why, "on a machine with a GPU install a build for CUDA: https://pytorch.org/get-started")
    if os.environ.get(VISIBLE) is not None and not this_host().gpus:
        raise Over(
            f"{_NONE}: {VISIBLE} names none", f"unset {VISIBLE}, or name GPUs by numbers or UUIDs (`nvidia-smi -L`)"
        )
    try:
        torch.cuda.init()
    except Exception as e:
        raise Over(
            f"{_NONE}: {str(e).splitlines()[0]}",
            "`nvidia-smi` has to list the GPUs: install NVIDIA's driver, anew or newer; docker wants --gpus all",
        ) from e
    backends: Any = torch.backends
    backends.cuda.matmul.fp32_precision = backends.cudnn.conv.fp32_precision = "ieee"
    return torch


def devices() -> list[str]:
    """Returns the names of the GPUs."""
    return [f"cuda:{at}" for at in range(cuda().cuda.device_count())]


def gpus() -> str:
    """Says which GPUs there are, and whether this build of torch has code for them and nodes can be bound to them."""
    torch = cuda()
    found = [torch.cuda.get_device_properties(name) for name in devices()]
    left = [torch.cuda.mem_get_info(name)[0] for name in devices()]
    text = ", ".join(
        f"{name} {of.name} ({size(free)} of {size(of.total_memory)} are free, capability {of.major}.{of.minor})"
        for name, of, free in zip(devices(), found, left, strict=True)
    )
    text += f"; CUDA {torch.version.cuda}"
    if any(of.name.startswith("simcuda") for of in found):
        text += "; these devices are simulated (tools/simcuda), so that nothing below tells of a GPU"
    if len(this_host().gpus) != len(found):
        do = f"say which: {VISIBLE}={','.join(map(str, range(len(found))))}"
        raise Nothing(
            f"{text}; neither {VISIBLE} nor NVIDIA's management library names them, so all nodes share all", do
        )
    if min(left) < GIB // 2:
        raise Nothing(text, "other programs have the memory (`nvidia-smi` lists them): end those first")
    return text


def numbers() -> str:
    """Compares what each GPU computes with float64 on the CPU. Raises ArithmeticError."""
    torch = cuda()
    functional = torch.nn.functional
    make = torch.Generator().manual_seed(241)
    a, b = (torch.randn(384, 384, generator=make) for _ in range(2))
    image, weight = torch.randn(4, 8, 32, 32, generator=make), torch.randn(16, 8, 3, 3, generator=make)
    rows = torch.randn(64, 4096, generator=make)

    cases: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "matmul": (torch.matmul, (a, b)),
        "matmul in bfloat16": (torch.matmul, (a.bfloat16(), b.bfloat16())),
        "conv2d": (functional.conv2d, (image, weight)),
        "sum": (lambda x: x.sum(1), (rows,)),
        "var": (lambda x: x.var(1), (rows,)),
        "amax": (lambda x: x.amax(1), (rows,)),
        "softmax": (lambda x: x.softmax(1), (rows,)),
    }
    said, wrong = [], []
    for name, (compute, given) in cases.items():
        wanted = compute(*(x.double() for x in given))
        most = 0.0
        for device in devices():
            got = compute(*(x.to(device) for x in given)).cpu().double()
            error = float((got - wanted).abs().max() / wanted.abs().max())
            most = max(most, error)
            if not error <= TOLERANCES[name]:  # which NaN is not
                wrong.append(f"{device} has an error of {error:.1e} in {name}, which may be {TOLERANCES[name]:g}")
        said.append(f"{name} {most:.1e} ({TOLERANCES[name]:g})")
    if wrong:
        raise ArithmeticError("; ".join(wrong))
    return "largest errors, and what they may be at most: " + ", ".join(said)


def streams() -> str:
    """Tries whether two streams work side by side, and wait for each other by events. Raises ArithmeticError."""
    torch = cuda()
    for name in devices():
        with torch.cuda.device(name):
            # again for longer, should something have kept the other stream's work from being done in time
            if not any(_side_by_side(torch, name, cycles) for cycles in (_BUSY, 4 * _BUSY, 16 * _BUSY)):
                do = "unset CUDA_LAUNCH_BLOCKING and CUDA_DEVICE_MAX_CONNECTIONS; results are right either way"
                raise Nothing(f"{name}: a stream has waited for another one without being asked to", do)
    return "two streams work side by side; events order them, and tell the time between"


def _side_by_side(torch: Any, name: str, cycles: int) -> bool:
    """Returns whether a stream has done its work while another one was busy, which it waits for afterwards."""
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(busy):
        begun.record()
        torch.cuda._sleep(cycles)
        x = torch.full((_COPIED,), 3.0, device=name)
        ended.record()
    with torch.cuda.stream(other):
        y = torch.full((_COPIED,), 2.0, device=name)
        other.synchronize()
        aside = not ended.query()
        other.wait_event(ended)
        z = x * y
        x.record_stream(other)
        right = bool((z == 6).all())
    if not right:
        raise ArithmeticError(f"{name}: a stream that waits for an event reads what was there before it")
    if not begun.elapsed_time(ended) > 0:
        raise ArithmeticError(f"{name}: no time is between two events with work between them")
    return aside


def graphs() -> str:
    """Captures a graph on each GPU, and compares its replays with the CPU. Raises ArithmeticError."""
    torch = cuda()
    for name in devices():
        with torch.cuda.device(name):
            x, w = torch.ones(64, 64, device=name), torch.full((64, 64), 0.5, device=name)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                (x @ w).relu().sum(1)  # libraries make their handles at first use
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):  # else of the device that has captured first
                y = (x @ w).relu().sum(1)
            for k in range(1, 4):
                x.fill_(k)
                graph.replay()
                if y.cpu().tolist() != [64 * 32.0 * k] * 64:
                    raise ArithmeticError(f"{name}: a replay has computed something else than its program")
    return "captured, and replayed three times with other inputs"


def peers() -> str:
    """Copies between each two GPUs, and compares to the bit. Raises ArithmeticError."""
    torch, names = cuda(), devices()[:_NODES]
    if len(names) < 2:
        raise Nothing("one GPU")
    apart = []
    for i, one in enumerate(names):
        x = torch.arange(_COPIED // 4, dtype=torch.int32, device=one) + i
        for k, other in enumerate(names):
            if i == k:
                continue
            if not torch.cuda.can_device_access_peer(i, k):
                apart.append(f"{one} and {other}")
            for _ in range(2):
                if not torch.equal((x + 0).to(other).cpu(), x.cpu()):
                    raise ArithmeticError(f"what comes to {other} is not what {one} has sent")
    if apart:
        text = f"copies come as they are; {', '.join(apart)} have no access to each other"
        raise Nothing(text, "`nvidia-smi topo -m` says why; copies go by the host's memory, which is slower")
    return f"all {len(names)} have access to each other, and copies come as they are"


def nccl() -> str:
    """Does collectives of a communicator of one GPU. Raises ArithmeticError."""
    torch = cuda()
    from ..runtime.channel.nccl.library import Communicator

    one = Communicator(torch.device("cuda:0"), 1, Communicator.unique_id(), 0)

    def wait(until: Callable[[], bool]) -> None:
        while not until():
            time.sleep(0)  # the time limit is that of the row

    wait(one.ready)
    source = torch.arange(1024.0, device="cuda:0")
    summed, gathered = torch.zeros_like(source), torch.zeros_like(source)
    for collective in (
        functools.partial(one.all_reduce, source, summed, "SUM"),
        functools.partial(one.all_gather, source, gathered),
        functools.partial(one.broadcast, source, source, 0),
    ):
        collective()
        wait(one.ready)  # NCCL refuses a call that comes before it has taken the last one
    wait(one.mark())
    right = torch.equal(summed.cpu(), torch.arange(1024.0)) and torch.equal(gathered.cpu(), summed.cpu())
    one.abort()
    if not right:
        raise ArithmeticError("a collective of one rank has changed its numbers")
    return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}; collectives of one rank are right"


# ---- nodes -----------------------------------------------------------------------------------------------------------


class TrialSession(NamedTuple):
    """The nodes, and where each one's tensors are."""

    dt: Any
    homes: list[Any]
    seconds: float


@functools.cache
def session() -> TrialSession:
    """Returns the session of nodes on the GPUs, which the first call starts."""
    count = len(devices())
    dt: Any = sys.modules["disttensor"]  # as a user's script has it; it stands above all folders
    begun = time.monotonic()
    nodes = max(2, min(count, _NODES))
    try:
        dt.init_master_worker(nodes=nodes, launcher="local", threads=1, timeout=90)
    except Exception as e:
        raise Over(f"{nodes} nodes did not start, and what needs them was not tried: {e}".splitlines()[0]) from e
    return TrialSession(dt, [dt.device(k, "cuda:0") for k in range(nodes)], time.monotonic() - begun)


def same(found: Any, wanted: Any, what: str) -> None:
    """Raises ArithmeticError where a node's numbers are not those of the CPU, within 1e-5 of the largest."""
    found, wanted = found.double().cpu(), wanted.double()
    error = float((found - wanted).abs().max() / wanted.abs().max())
    if not error <= 1e-5:
        raise ArithmeticError(f"{what} has an error of {error:.1e} (at most 1e-05)")


def nodes() -> str:
    """Starts the nodes, and compares what they compute."""
    torch, (dt, homes, seconds) = cuda(), session()
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(241))
    wanted = (x.double() @ x.double().t()).relu().softmax(0)
    uuids = dt.run(_uuid, node=range(len(homes)))
    for k, home in enumerate(homes):
        there = x.to(home)
        same((there @ there.t()).relu().softmax(0), wanted, f"what node {k} computes")
    seen = len({*uuids})
    if seen != min(len(homes), len(devices())):
        raise ArithmeticError(f"{len(homes)} nodes have taken {seen} of {len(devices())} GPUs")
    return (
        f"{len(homes)} nodes on {seen} GPU{'s' * (seen > 1)} started in {seconds:.1f} s, and compute what the CPU does"
    )


def _uuid() -> str:
    import torch

    return str(torch.cuda.get_device_properties(0).uuid)


def ipc() -> str:
    """Has a node map another one's tensor, by torch alone, read it and write there."""
    torch, (dt, homes, _) = cuda(), session()
    x = torch.arange(1024.0).to(homes[0])
    exported = dt.run(_export, x, node=0)
    total = dt.run(_use, exported, node=1)
    if total != 1024 * 1023 / 2 or x[0].item() != 241:
        raise ArithmeticError(
            f"node 1 has read {total}, and node 0 reads {x[0].item()} after it: what was shared is not"
        )
    return "node 1 has mapped a tensor of node 0, read it, and written there"


def _export(x: Any) -> Any:
    return x.untyped_storage()._share_cuda_()


def _use(exported: Any) -> float:
    import torch

    storage = torch.UntypedStorage._new_shared_cuda(*exported)
    x = torch.empty(0, device=storage.device).set_(storage)[:1024]
    total = x.sum().item()
    x[0] = 241
    torch.cuda.synchronize()
    return float(total)


def carried(channel: str) -> str:
    """Sends tensors up, from each node to the next one and back, and down, by a channel."""
    torch, (dt, homes, _) = cuda(), session()
    dt.channels.select(["send", "upload", "download"], channel)
    try:
        x = torch.randn(_COPIED // 4, generator=torch.Generator().manual_seed(7))
        for home, other in zip(homes, [*homes[1:], homes[0]], strict=True):
            a = x.to(home)
            for _ in range(4):  # a buffer that both map is made at the first, and taken from the second or third on
                a = (a + 1).to(other) - 1
                a = (a * 2).to(home) / 2
            same(a, x, "what has gone from node to node")
    finally:
        dt.channels.reset()
    return f"{size(_COPIED)} went up, {8 * len(homes)} times from GPU to GPU of two nodes, and down"


def node_streams() -> str:
    """Orders two streams of a node by events, and compares."""
    torch, (dt, homes, _) = cuda(), session()
    one, two = dt.Stream(0, "cuda:0"), dt.Stream(0, "cuda:0")
    x = torch.arange(4096.0).to(homes[0])
    for k in range(8):
        with dt.stream(one):
            x.add_(1)
            for _ in range(4):
                x.mul_(2).div_(2)
            written = one.record_event()
        two.wait_event(written)
        with dt.stream(two):
            y = x * 2
            read = two.record_event()
        one.wait_event(read)
        same(y, (torch.arange(4096.0) + k + 1) * 2, "what a stream reads after an event")
    return "two streams of a node wait for each other's events"


def node_graphs() -> str:
    """Replays a training step on a node by a CUDA graph, and compares with the CPU."""
    torch, (dt, homes, _) = cuda(), session()
    x, w = torch.randn(32, 16, generator=torch.Generator().manual_seed(3)), torch.full((16, 4), 0.1)

    def step(x: Any, w: Any) -> Any:
        loss = (x @ w).tanh().square().mean()
        (gradient,) = torch.autograd.grad(loss, w)
        with torch.no_grad():
            w.sub_(gradient, alpha=0.5)
        return loss.detach()

    here, there = w.clone().requires_grad_(), w.to(homes[0]).requires_grad_()
    given = x.to(homes[0])
    step(x, here), step(given, there)
    graph = dt.Graph()
    with dt.graph(graph, engine="cudagraph"):
        loss = step(given, there)
    for _ in range(6):
        graph.replay()
        same(loss, step(x, here), "the loss of a replayed step")
    same(there.detach(), here.detach(), "a parameter after replayed steps")
    (ran,) = graph.engines().values()
    if ran != [("cudagraph", "")]:
        raise ArithmeticError(f"the node has replayed by {ran[0][0]}: {ran[0][1]}")
    return "a training step is captured on a node, and its replays are right"


def memory() -> str:
    """Asks a node for its memory, and for more than there is, and goes on."""
    torch, homes = cuda(), session().homes
    node = torch.node
    x = torch.zeros(_COPIED // 4, device=homes[0])
    held, (free, total) = node.memory_allocated(homes[0]), node.mem_get_info(homes[0])
    if held < _COPIED or not 0 < free <= total:
        raise ArithmeticError(
            f"node 0 holds {held} bytes, of which one tensor has {_COPIED}, and has {free} of {total}"
        )
    try:
        torch.empty(1 << 46, device=homes[0]).sum().item()
    except torch.OutOfMemoryError:
        pass
    else:
        raise ArithmeticError("the node made a tensor of 256 TiB, and raised no torch.OutOfMemoryError")
    same((x + 1).sum(), torch.tensor(_COPIED / 4), "a sum after an error for want of memory")
    return (
        f"{size(free)} of {size(total)} are free; what is too large raises torch.OutOfMemoryError, and node 0 goes on"
    )


def nodes_nccl() -> str:
    """Does collectives of the nodes by NCCL, each on a GPU of its own."""
    torch, (dt, homes, _) = cuda(), session()
    if len(devices()) < len(homes):
        raise Nothing("one GPU, and NCCL wants one for each node")
    dt.channels.select(["all_reduce", "broadcast", "all_gather"], "nccl")
    try:
        local = [torch.randn(4096, generator=torch.Generator().manual_seed(k)) for k in range(len(homes))]
        xs = [x.to(home) for x, home in zip(local, homes, strict=True)]
        dt.all_reduce(xs, algorithm="native")
        for k, x in enumerate(xs):
            same(x, torch.stack(local).double().sum(0), f"node {k}'s sum")
        xs = [x.to(home) for x, home in zip(local, homes, strict=True)]
        dt.broadcast(xs, src=1, algorithm="native")
        for k, x in enumerate(xs):
            same(x, local[1], f"what node {k} has of node 1")
    finally:
        dt.channels.reset()
    return f"sums and broadcasts of {len(homes)} nodes are right"


def training() -> str:
    """Trains a model on a mesh of the nodes, and compares its parameters with those of the CPU."""
    torch, (dt, homes, _) = cuda(), session()
    mesh = dt.mesh(dp=len(homes))
    torch.manual_seed(241)
    local = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    x, y = torch.randn(8 * len(homes), 16), torch.randn(8 * len(homes), 1)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    net.load_state_dict(local.state_dict())
    model = dt.DataParallel(net.to(mesh.device), mesh)
    for module, target in ((local, y), (model, dt.shard(y, mesh, dp=0))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(4):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(module(x), target).backward()
            optimizer.step()
    dt.training.assert_replicas_equal(model)
    for name, wanted in local.state_dict().items():
        same(net.state_dict()[name].at(dp=0), wanted, f"{name} after four steps")
    return f"data parallel on a mesh of {len(homes)} nodes, four steps: the parameters are the CPU's"


# ---- speed -----------------------------------------------------------------------------------------------------------


def speed() -> str:
    """Measures copies of torch.cuda alone, and ours, of the same bytes."""
    torch, (dt, homes, _) = cuda(), session()
    free = min(torch.cuda.mem_get_info(name)[0] for name in devices())
    count = min(_MEASURED, free // 32)
    here, across = torch.zeros(count, dtype=torch.uint8), devices()[-1]
    with warnings.catch_warnings():  # beside nodes it takes the GPU's name, which torch warns of
        warnings.simplefilter("ignore", DeprecationWarning)
        pinned = here.pin_memory()
    there = torch.zeros(count, dtype=torch.uint8, device="cuda:0")
    other = torch.empty(count, dtype=torch.uint8, device=across)

    def copied(to: Any, source: Any) -> Callable[[], None]:
        def copy() -> None:
            to.copy_(source, non_blocking=True)
            for name in devices():
                torch.cuda.synchronize(name)

        return copy

    alone = {
        "up": _rate(count, copied(there, pinned)),
        "down": _rate(count, copied(pinned, there)),
        "across": _rate(count, copied(other, there)),
    }
    del pinned, there, other
    torch.cuda.empty_cache()
    on_node = here.to(homes[0])

    def moved() -> None:
        on_node.to(homes[1])
        dt.synchronize()

    def up() -> None:
        here.to(homes[0])
        dt.synchronize()

    ours = {"up": _rate(count, up), "down": _rate(count, on_node.cpu)}
    for channel in ("shm", "tcp"):
        dt.channels.select("send", channel)
        ours["across" if channel == "shm" else "across by tcp"] = _rate(count, moved)
    dt.channels.reset()
    text = f"{size(count)}, in GiB/s: torch.cuda alone (pinned memory; {alone_across(across)}) {_listed(alone)}"
    text += f"; ours (memory that is not pinned; from node 0 to node 1 by shm) {_listed(ours)}"
    slow = [way for way, rate in alone.items() if ours[way] < _SLOW * rate]
    if slow:
        do = "pin what goes up (`x.pin_memory()`); see whether the row CUDA IPC is well; docs/CHANNELS.md"
        raise Nothing(f"{text}; less than a tenth of torch.cuda's: {', '.join(slow)}", do)
    return text


def alone_across(across: str) -> str:
    """Returns which GPUs the copies of torch.cuda alone went between."""
    return "within cuda:0" if across == "cuda:0" else f"from cuda:0 to {across}"


def _rate(count: int, carry: Callable[[], Any]) -> float:
    """Returns the bytes per second of a copy: of the fastest one, after one that is not counted."""
    best = 0.0
    for k in range(_TIMES + 1):
        begun = time.perf_counter()
        carry()
        if k:
            best = max(best, count / (time.perf_counter() - begun))
    return best


def _listed(rates: dict[str, float]) -> str:
    return ", ".join(f"{way} {rate / GIB:.2f}" for way, rate in rates.items())


_NUMBERS = (
    "run it again: other errors each time are a defect of the GPU (`nvidia-smi -q -d ECC,TEMPERATURE`), the same ones "
    "of torch's build or the driver"
)
_PEERS = (
    "PCIe's access control (ACS) or an IOMMU may change what GPUs tell each other: switch them off in the BIOS; "
    'NCCL_P2P_DISABLE=1 and `backend="tcp"` do without'
)
_IPC = (
    "processes need one IPC and PID namespace (docker run --ipc=host --pid=host), and no PYTORCH_CUDA_ALLOC_CONF with "
    "expandable_segments; nodes stage copies on the CPU where it fails"
)
_NCCL = 'NCCL_DEBUG=WARN says what NCCL misses; `backend="auto"` and algorithm="ring" do without; ' + _REPORT

#: The steps in their order, with the time that it may take on a machine under load: a process's first use of torch,
#: CUDA and NCCL may take a minute each.
STEPS: list[tuple[Step, Callable[[], str]]] = [
    (Step("GPUs", 180.0, _DRIVER), gpus),
    (Step("numbers", 120.0, _NUMBERS), numbers),
    (Step("streams", 60.0, _DRIVER), streams),
    (Step("CUDA graphs", 60.0, _DRIVER), graphs),
    (Step("peer access", 60.0, _PEERS), peers),
    (Step("NCCL of one", 120.0, _NCCL), nccl),
    (Step("nodes", 180.0, "see the rows above; " + _REPORT), nodes),
    (Step("CUDA IPC", 60.0, _IPC), ipc),
    (Step("channel shm", 60.0, _IPC), functools.partial(carried, "shm")),
    (Step("channel tcp", 60.0, _REPORT), functools.partial(carried, "tcp")),
    (Step("streams of nodes", 60.0, _REPORT), node_streams),
    (Step("graphs of nodes", 60.0, _REPORT), node_graphs),
    (Step("memory of nodes", 60.0, _REPORT), memory),
    (Step("training", 120.0, _REPORT), training),
    (Step("NCCL of nodes", 120.0, _NCCL), nodes_nccl),
    (Step("speed", 180.0, _REPORT), speed),
]


if __name__ == "__main__":
    sys.exit(main())
