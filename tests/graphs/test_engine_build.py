"""Compiled programs in earnest: the compiling process, the cache folder, and what becomes of both."""

from __future__ import annotations

import copy
import gc
import os
import random
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import HANG
from program_kit import KINDS, SENTINELS, copies, interpret, play, record, start, steps_of
from torch import Tensor
from torch.nn import functional as F

import disttensor as dt
from disttensor.runtime.node.graphs.engines import builder, switching
from disttensor.runtime.node.graphs.engines.builder import Build, Builder
from disttensor.runtime.node.graphs.engines.switching import SwitchingEngine
from disttensor.runtime.node.graphs.interpreter import Interpreter
from disttensor.runtime.node.store import memory

# a compiler's settings are read when torch._inductor is imported, which the process has that programs are forked from
pytestmark = pytest.mark.cold

A, B, C = SENTINELS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty cache folder. What C++ compilers share between programs stays where it is."""
    monkeypatch.setattr(builder, "folder", lambda: str(tmp_path))
    return str(tmp_path)


@pytest.fixture
def builders() -> Iterator[Builder]:
    made = Builder()
    yield made
    made.close()


class Everything:
    """A training step of every kind of layer that differs to a compiler, and what is awkward about memory."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.x, self.w, self.table = torch.randn(4, 6), torch.randn(6, 6), torch.randn(7, 3)
        self.turned = self.w.t()
        self.labels = torch.tensor([1, 2, 3, 0])
        self.buffer = torch.rand(40) + 1
        self.image, self.sequence = torch.randn(2, 3, 8, 8), torch.randn(2, 5, 8)
        self.norm = torch.nn.BatchNorm1d(6)
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.momentum = torch.optim.SGD([*self.conv.parameters(), *self.layer.parameters()], A, momentum=0.9)
        self()

    def __call__(self) -> list[Tensor]:
        x, w, buffer = self.x, self.w, self.buffer
        w.view(-1)[3:9].add_(1)
        out = [w @ w]
        self.turned.mul_(0.5)
        w.add_(1)
        a, b = x + 1, (x + 1)[2]
        b.zero_()
        out += [a, a[1], a.t(), x[0], x, b, x.expand(2, 4, 6), (x + 1).expand(2, 4, 6)]
        torch.rand(3)
        out += [F.dropout(x, 0.3), torch.randn(3), torch.rand_like(x), F.dropout(x.t(), 0.5), torch.randperm(5)]
        buffer.mul_(A).add_(buffer, alpha=-B).addcmul_(buffer, buffer, value=A).lerp_(buffer * 2, C)
        torch._foreach_mul_([buffer, x], A)
        torch._foreach_addcdiv_([buffer], [buffer + 9], [buffer * 0 + 3], [C])
        out += [x / A, w + B, self.norm(x).detach(), torch.arange(5) + self.labels[0], x.max(1)[1], x.sum()]
        out += [self.table[self.labels], F.embedding(self.labels, self.table), x.gather(1, x.argmax(1, True))]
        self.momentum.zero_grad()
        loss = F.max_pool2d(self.conv(self.image), 2).pow(2).mean() + self.layer(self.sequence).pow(2).mean()
        (loss + F.cross_entropy(x, self.labels)).backward()
        self.momentum.step()
        return [*out, loss.detach() + 0]


@pytest.mark.slow
def test_a_compiled_program_does_what_the_interpreter_does(
    folder: str, builders: Builder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program, inputs = record(Everything(), 3)
    ours, theirs = copies(inputs), copies(inputs)
    engine = SwitchingEngine(program, Interpreter(program), "inductor", builders)
    numbers = ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.5, 1, 1.0), (0.1, 0.2, 0.3))
    with torch.no_grad():
        for i, values in enumerate(numbers):
            torch.manual_seed(i)
            expected = interpret(program, theirs, values)
            state = torch.get_rng_state()
            torch.manual_seed(i)
            results = engine.run(ours, values)
            assert torch.equal(state, torch.get_rng_state())
            assert engine.used == ("inductor" if i else "interpreter"), engine.why
            alike([*results, *ours], [*expected, *theirs])
            if i == 0:
                assert engine.wait(2 * HANG)  # the compiler had not ended after one, beside a load of 30

        broken = copies(inputs)
        where = next(t for t in broken if t.dtype == torch.int64 and t.dim())
        where[0] = 99
        with pytest.raises(IndexError) as raised:
            engine.run(broken, numbers[0])
        halted = engine.halted(raised.value)
        assert halted is not None
        assert "index" in program.lines[halted[0]].op.name() or "embedding" in program.lines[halted[0]].op.name()

        # a second process finds it in the folder
        monkeypatch.setattr(subprocess, "Popen", None)
        again = SwitchingEngine(program, Interpreter(program), "inductor", Builder())
        again.run(copies(inputs), numbers[0])
        assert again.used == "inductor"
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("threads", [1, 2])
def test_random_programs(folder: str, builders: Builder, threads: int) -> None:
    """Many, side by side in one library, since each takes some ten seconds to compile."""
    dice = random.Random(threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        plans = [[(dice.randrange(KINDS), dice.randrange(8), dice.randrange(8)) for _ in range(12)] for _ in range(20)]
        pools = [start() for _ in plans]
        program, inputs = record(
            lambda: [t for plan, pool in zip(plans, pools, strict=True) for t in play(plan, pool)], 3
        )
        engine = SwitchingEngine(program, Interpreter(program), "inductor", builders)
        ours, theirs = copies(inputs), copies(inputs)
        engine.run(copies(inputs), (0.1, 0.2, 0.3))
        assert engine.wait()
        for i, numbers in enumerate(((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.9, 1, 0.2))):
            torch.manual_seed(i)
            expected = interpret(program, theirs, numbers)
            torch.manual_seed(i)
            results = engine.run(ours, numbers)
            assert engine.used == "inductor", engine.why
            alike([*results, *ours], [*expected, *theirs])
    finally:
        torch.set_num_threads(before)


def alike(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5, msg=lambda m, i=i: f"{i}: {m}")
        assert (steps_of(one), one.storage_offset()) == (steps_of(other), other.storage_offset()), i
    kin = [[[memory(a) == memory(b) for b in tensors] for a in tensors] for tensors in (ours, theirs)]
    assert kin[0] == kin[1]


def simple(builders: Builder, engine: str = "inductor", **plan: Any) -> tuple[SwitchingEngine, list[Tensor]]:
    program, inputs = record(lambda: [(torch.ones(3) + 1) * 2 - 1])
    return SwitchingEngine(program, Interpreter(program), engine, builders), inputs


def test_no_compiler_is_told_once(
    folder: str, builders: Builder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    for _ in range(2):
        engine, inputs = simple(builders, "auto")
        for _ in range(2):
            engine.run(inputs, ())
            assert engine.used == "interpreter"
            assert engine.wait(HANG)
        assert "no C++ compiler" in engine.why
    assert [r.getMessage() for r in caplog.records] == [
        "disttensor: graphs stay with the interpreter: no C++ compiler that works was found on this node"
        " (torch looks for g++ and clang++, or $CXX)"
    ]


def test_what_does_not_fit_is_told_if_asked_for(
    folder: str, builders: Builder, caplog: pytest.LogCaptureFixture
) -> None:
    for name, messages in (("inductor", 1), ("auto", 1)):
        program, inputs = record(lambda: [torch.linalg.inv(torch.eye(3) + 1)])
        engine = SwitchingEngine(program, Interpreter(program), name, builders)
        engine.run(inputs, ())
        assert engine.wait(HANG)
        engine.run(inputs, ())
        assert "linalg_inv_ex may fail" in engine.why
        assert len(caplog.records) == messages


def test_closing_ends_the_compiling_process(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    builders = Builder()
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **kwargs))
        return started[0]

    monkeypatch.setattr(builder.subprocess, "Popen", start)
    engines = [simple(builders) for _ in range(2)]
    for engine, inputs in engines:
        engine.run(inputs, ())
    builders.close()
    assert all(engine.wait(0) for engine, _ in engines)
    assert all(p.returncode is not None for p in started)
    engine, inputs = engines[0]
    engine.run(inputs, ())
    assert engine.used == "interpreter"


def test_the_compiling_process_ends_with_its_parent(script: Callable[..., Any], tmp_path: Path) -> None:
    done = script(
        "import os, sys\n"
        "from disttensor.runtime.node.graphs.engines import builder\n"
        "b = builder.Builder()\n"
        "made = b.build('x' * 10)\n"
        "while b._process is None: pass\n"
        "print(b._process.pid, flush=True)\n"
        "os._exit(0)\n",
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path),
    )
    pid = int(done.stdout)
    try:
        waiting = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poller = select.poll()
    poller.register(waiting, select.POLLIN)
    assert poller.poll(HANG * 1000)
    os.close(waiting)


@pytest.mark.parametrize("which", ["disttensor", "."])
def test_a_folder_of_somebody_else_is_refused(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, and the one around it: who can write that can put another folder in our folder's place."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert builder.folder() == str(tmp_path / "disttensor")
    (tmp_path / which).chmod(0o777)
    with pytest.raises(PermissionError, match="alone"):
        builder.folder()


def test_the_folder_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new" / "cache"))
    before = os.umask(0)
    try:
        builder.folder()
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in sorted(tmp_path.rglob("*"))] == [0o700] * 3


@pytest.mark.parametrize(("slower", "kept"), [(1.0, "interpreter"), (0.0, "inductor")])
def test_auto_keeps_what_was_faster(slower: float, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(switching, "perf_counter", lambda: clock[0])

    class Plain(Interpreter):
        def __init__(self, program: Any) -> None:
            super().__init__(program)
            plain = self.run
            self.run = lambda *a: [clock.__setitem__(0, clock[0] + 0.5), plain(*a)][1]  # type: ignore[assignment]

    program, inputs = record(lambda: [torch.ones(3) + 1])

    def library(_: Any) -> list[Tensor]:
        clock[0] += slower
        return [torch.ones(3) + 1]

    build = Build("", "", 1)
    build.plan = {
        "arguments": [],
        "draws": [],
        "fence": [],
        "checks": [],
        "results": [["made", 0]],
        "made": [[0, [3], [1]]],
    }
    monkeypatch.setattr(build, "library", lambda: library)
    monkeypatch.setattr(Builder, "build", lambda self, text: build)
    engine = SwitchingEngine(program, Plain(program), "auto", Builder())
    for _ in range(3):
        assert engine.run(inputs, ())[0].tolist() == [2, 2, 2]
        assert engine.used == "interpreter"
    build.done.set()
    for _ in range(4 * switching.TRIALS):
        engine.run(inputs, ())
    assert engine.used == kept


def test_nodes_import_no_compiler() -> None:
    code = "import disttensor.runtime.node.worker, sys; print({'torch._inductor', 'torch._dynamo'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG)
    assert done.stdout.strip() == "set()"


def test_a_graph_on_a_node_changes_over_to_compiled_code() -> None:
    """While it is compiled, replays go on; the losses are those of a local run, whichever engine made them."""
    torch.manual_seed(0)
    here = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(5, 3))
    x, y = torch.randn(8, 6), torch.randint(3, (8,))

    def stepper(net: torch.nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    with dt.init_master_worker(nodes=1, threads=1):
        local = stepper(here, x, y)
        remote = stepper(copy.deepcopy(here).to("node:0"), x.to("node:0"), y.to("node:0"))
        torch.manual_seed(7)
        assert remote().item() == pytest.approx(local().item())
        g = dt.Graph()
        with dt.graph(g, engine="inductor"):
            loss = remote()
        compiled = 0
        while compiled < 3:
            g.replay()
            assert loss.item() == pytest.approx(local().item(), rel=1e-3)
            ((engine, why),) = g.engines()[0]
            assert not why
            compiled += engine == "inductor"


COMPILER = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # as in test_compile.py
@pytest.mark.skipif(COMPILER is None, reason="neither g++ nor clang++, nor what $CXX says, is on this machine")
def test_what_torch_compile_records_on_a_mesh_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, of which both nodes take what lies in one folder then."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    here = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    with dt.init_master_worker(nodes=2, threads=1):
        mesh = dt.mesh(dp=2)
        net, xs, ys = copy.deepcopy(here).to(mesh.device), x.to(mesh.device), y.to(mesh.device)
        loss_of = torch.compile(lambda: F.cross_entropy(net(xs), ys), options={"engine": "inductor"})
        F.cross_entropy(here(x), y).backward()

        def step() -> None:
            loss_of().backward()
            for p, q in zip(net.parameters(), here.parameters(), strict=True):
                assert p.grad is not None
                assert all(torch.allclose(shard.cpu(), q.grad, atol=1e-6) for shard in p.grad.shards())  # type: ignore[attr-defined, arg-type]
                p.grad = None

        for _ in range(3):
            step()
        for node in range(2):
            dt.run(built_all, node=node)
        step()
        graphs = [each.engines() for each in gc.get_objects() if type(each) is dt.Graph and each.id]
        assert graphs == [{0: [("inductor", "")], 1: [("inductor", "")]}] * 2
    torch.compiler.reset()
    assert len(list((tmp_path / "disttensor").glob("*/model.so"))) == 2


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ("interpreter", "^$"),
        ("auto", "so short a program is not compiled"),
        ("inductor", "linalg_inv_ex may fail"),
        ("cudagraph", "on one CUDA device"),
    ],
)
def test_a_graph_says_what_runs_it(caplog: pytest.LogCaptureFixture, engine: str, why: str) -> None:
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        x = torch.eye(3, device="node:0") * 2
        g = dt.Graph()
        with pytest.raises(dt.errors.GraphError, match="empty"):
            g.engines()
        torch.linalg.inv_ex(x)
        with dt.graph(g, engine=engine):
            y = torch.linalg.inv_ex(x)[0]
        assert g.engines() == {0: [("interpreter", "")]}
        g.replay()
        while not re.search(why, g.engines()[0][0][1]):
            g.replay()
        assert y.diag().tolist() == [0.5, 0.5, 0.5]
    told = [record for record in caplog.records if why in record.getMessage()]  # others are of how slow the machine is
    assert len(told) == (engine in ("inductor", "cudagraph"))


def test_no_folder_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builders: Builder) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    engine, inputs = simple(builders, "auto")
    assert engine.run(inputs, ())[0].tolist() == [3, 3, 3]
    assert re.search(r"(FileExists|NotADirectory)Error.*/file'", engine.why)


def test_a_session_that_ends_while_its_node_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with dt.init_master_worker(nodes=1, threads=1):
        x = torch.ones(3, device="node:0")
        y = (x + 1) * 2 - 1
        g = dt.Graph()
        with dt.graph(g, engine="inductor"):
            y = (x + 1) * 2 - 1
        g.replay()
        child = dt.run(compiling, node=0)
        assert y.tolist() == [3, 3, 3]
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert {path.suffix for path in (tmp_path / "disttensor").iterdir()} <= {".lock", ".draft"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "disttensor").iterdir())


def built_all() -> None:
    """Waits until this node has nothing to build."""
    (found,) = (b for b in gc.get_objects() if type(b) is Builder)
    if (thread := found._thread) is not None:
        thread.join()


def compiling() -> int:
    """The process that compiles for this node."""
    (found,) = (b for b in gc.get_objects() if type(b) is Builder)
    while found._process is None:
        pass
    return found._process.pid


#: In place of the process that compiles: says that it has begun, and goes on when it is told to.
TOLD = """
import os, sys
sys.stdin.readline()
open(os.environ["BEGUN"], "w").close()
open(os.environ["GO"]).read()
sys.exit(1)
"""


@pytest.mark.usefixtures("folder")
def test_what_is_compiled_and_what_waits_for_that_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builders: Builder
) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    for fifo in (begun, go):
        os.mkfifo(fifo)
        monkeypatch.setenv(fifo.name.upper(), str(fifo))
    (tmp_path / "told.py").write_text(TOLD)
    monkeypatch.setattr(builder, "_CHILD", str(tmp_path / "told.py"))
    assert builders.under_way == (0, 0.0)
    first = builders.build("one program")
    begun.open().close()
    second = builders.build("another program")
    number, seconds = builders.under_way
    assert number == 2
    assert 0 < seconds < HANG
    go.open("w").close()
    assert first.done.wait(HANG)
    assert first.why.startswith("compiling failed (1)")
    begun.open().close()
    assert builders.under_way[0] == 1
    go.open("w").close()
    assert second.done.wait(HANG)
    builders.close()
    assert builders.under_way == (0, 0.0)


#: In place of the process that compiles: the same one, of which a test is told that it compiles, and that it waits for
#: another one. What it compiles is unfit, once it is told to go on.
TELLING = """
import fcntl, importlib.util, json, os, sys
said, go = (os.open(os.environ[name], os.O_RDWR) for name in ("SAID", "GO"))
spec = importlib.util.spec_from_file_location("child", os.environ["CHILD"])
child = importlib.util.module_from_spec(spec)
spec.loader.exec_module(child)
def flock(file, how, real=fcntl.flock):
    try:
        real(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.write(said, b"waits")
        real(file, how)
def compile(text, folder, threads):
    os.write(said, b"compiles")
    os.read(go, 1)
    with open(f"{folder}/plan.json", "w") as file:
        json.dump({"unfit": text.strip()}, file)
    return 0
fcntl.flock, child._compile = flock, compile
os._exit(child.main(*sys.argv[1:]))
"""


@pytest.mark.usefixtures("folder")
def test_of_a_hosts_nodes_one_compiles_and_the_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builders: Builder
) -> None:
    """A builder is a node's: both ask for one program, and one process compiles it."""
    pipes = []
    for name in ("SAID", "GO"):
        os.mkfifo(tmp_path / name)
        monkeypatch.setenv(name, str(tmp_path / name))
        pipes.append(os.open(tmp_path / name, os.O_RDWR))
    said, go = pipes
    (tmp_path / "telling.py").write_text(TELLING)
    monkeypatch.setenv("CHILD", builder._CHILD)
    monkeypatch.setattr(builder, "_CHILD", str(tmp_path / "telling.py"))
    another = Builder()
    try:
        builds = [builders.build("one program")]
        assert os.read(said, 99) == b"compiles"
        builds.append(another.build("one program"))
        assert os.read(said, 99) == b"waits"
        os.write(go, b"..")
        for build in builds:
            assert build.done.wait(HANG)
            assert build.why == "one program"
        os.set_blocking(said, False)
        with pytest.raises(BlockingIOError):  # neither has said anything else
            os.read(said, 99)
    finally:
        another.close()
        for pipe in pipes:
            os.close(pipe)
