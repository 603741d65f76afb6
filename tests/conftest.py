"""Fixtures for all tests: a session on in-process nodes, and a guard against leaked resources.

`nodes` starts a session per module: three nodes that are threads of this process, with two simulated CUDA devices each.
They share the process's random generator, so a node that is seeded draws what local CPU draws.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flaked
import homes
import leaks
import pytest
import torch
import torch_state
import warm
from _pytest.faulthandler import fault_handler_stderr_fd_key
from _pytest.logging import catching_logs
from aftermath import probe
from checkout import ROOT, search_path
from hypothesis.configuration import set_hypothesis_home_dir
from limits import HANG
from side_channels import await_side_channels

import disttensor as dt

# The job of a shell's "&" ignores Ctrl-C, and one of nohup a hang-up: so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)  # these tests go on, what they start does not inherit it

# What hypothesis remembers of Unicode lies with pytest's own cache, not in a folder more.
set_hypothesis_home_dir(ROOT / ".pytest_cache" / "hypothesis")

# Sessions that lose nodes write flight records: here, and not where the user's are.
FLIGHTS = tempfile.mkdtemp(prefix="flights-")
os.environ["DISTTENSOR_FLIGHT"] = FLIGHTS

# Triton's bindings (of torch 2.15's builds for CUDA) tell of leaks at the end of who is forked with them.
LEAKY = torch.__version__ >= (2, 15) and find_spec("triton") is not None
if not os.environ.get("DISTTENSOR_TESTS_COLD") and not LEAKY:
    warm.install()


def enter_at_the_root(self: catching_logs[Any]) -> logging.Handler:
    """Does what pytest's own does for the root logger only. That one looks through all loggers, six times a test, for
    those that do not pass on what they are told, and finds the fifty of torch's. Ours pass on."""
    root = logging.getLogger()
    if self.level is not None:
        self.handler.setLevel(self.level)
        self.orig_level = root.level
        root.setLevel(min(self.orig_level, self.level))
    root.addHandler(self.handler)
    self.attached_loggers.append(root)
    return self.handler


if "attached_loggers" in vars(catching_logs):  # since pytest 9.1
    catching_logs.__enter__ = enter_at_the_root  # type: ignore[method-assign]

# Each time that it is seeded torch puts the whole stack into words, for each kind of device that this machine lacks:
# pytest's is deep, and that took a third of the time of the operators' tests.
for devices in (torch.cuda, torch.xpu, torch.mtia):
    vars(devices)["traceback"] = SimpleNamespace(format_stack=list)

#: How the names of files end whose tests are about how programs end.
ABOUT_ENDS = ("_ends", "_endings", "_crashes")

#: Seconds after which a teardown hangs.
HANGS = 300.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--flaked", action="store_true", help="only what tests/flaked.txt names")


def pytest_configure() -> None:
    """Has tqdm, with which torch.compile shows its progress where it is installed, begin no thread with its first bar,
    and make its semaphore now: both would stay, and be found as what a test has left."""
    with contextlib.suppress(ImportError):
        from tqdm import tqdm

        tqdm.monitor_interval = 0
        tqdm.get_lock()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--flaked"):
        named = flaked.names()
        items[:] = [item for item in items if any(flaked.is_named(item.nodeid, name) for name in named)]


def pytest_collection() -> None:
    """Nothing of what is collected is garbage: to look for it takes a quarter of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Has the collector look at what tests make only; at all that was imported and collected it takes 0.3 s."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that is marked ``gpu(2)`` needs two CUDA devices; `make gpu` says where there are fewer."""
    # the internals of torch.testing, which some tests import, forbid what users' programs may do: assignments to flags
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    if mark := item.get_closest_marker("gpu"):
        needed, there = mark.args[0] if mark.args else 1, torch.cuda.device_count()
        if there < needed:
            pytest.skip(f"needs {needed} CUDA devices, and here are {there}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Nobody reads how an expected failure came about; to put that into words takes half a second in torch's files."""
    try:
        return (yield)
    except Exception as error:
        if item.get_closest_marker("xfail") and not item.config.getoption("runxfail"):
            error.__traceback__, error.__context__, error.__cause__ = None, None, None
        raise


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Where a test hangs, its session may wait for the same thing: pytest-timeout ends only the first of the two."""
    faulthandler.dump_traceback_later(HANGS, exit=True, file=item.config.stash[fault_handler_stderr_fd_key])
    try:
        return (yield)
    finally:  # pytest does it where it has a time limit of its own, which `make fuzz` takes away
        faulthandler.cancel_dump_traceback_later()


def pytest_unconfigure(config: pytest.Config) -> None:
    """The end of the program waits for threads, too."""
    shutil.rmtree(FLIGHTS, ignore_errors=True)
    if hasattr(config, "workerinput"):
        return  # a process of xdist's, which waits for the others at its end
    faulthandler.dump_traceback_later(HANGS, exit=True, file=sys.__stderr__)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Three in-process nodes, for the module."""
    with dt.init_master_worker(nodes=3, launcher="inproc", simulate_cuda=2) as session:
        yield session


@pytest.fixture
def settled() -> Iterator[None]:
    """What the test has issued is done when it ends, without an error that nobody has seen, and node 0 computes."""
    yield
    dt.synchronize()
    probe(0)


@pytest.fixture(params=homes.HOMES)
def home(request: pytest.FixtureRequest, nodes: object) -> homes.Home:
    """A device of a node, or a mesh of the module's nodes."""
    if isinstance(request.param, str):
        return homes.Home(dt.device(1, request.param), (1,))
    unable = getattr(request.module, "NOT_ON_A_MESH", {})
    assert all(hasattr(request.module, name.partition("[")[0]) for name in unable), "a test on the list is gone"
    if reason := next((unable[name] for name in homes.names(request.node) if name in unable), None):
        request.applymarker(pytest.mark.xfail(raises=RuntimeError, strict=True, reason=reason))
    return homes.Rank(request.param)


@pytest.fixture(scope="module")
def processes() -> Iterator[None]:
    """Two nodes that are processes, for the module; one thread on either side, so that numbers are equal to the bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with dt.init_master_worker(nodes=2, threads=1):
        for node in range(2):  # connections are made at first use: have them before the tests look for leaks
            torch.ones(1 << 20).to(f"node:{node}").cpu()
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def clean(nodes: object) -> Iterator[None]:
    """The nodes of the module, with no error left over before the test and none after it."""
    dt.synchronize()
    yield
    dt.synchronize()


@pytest.fixture(scope="module", params=["inproc", "local"])
def either(request: pytest.FixtureRequest) -> Iterator[None]:
    """Two nodes of either kind, for the module."""
    with dt.init_master_worker(nodes=2, threads=1, launcher=request.param):
        # what is made at first use: have it before the tests look for leaks
        for node in range(2):
            torch.ones(1 << 20).to(f"node:{node}").to(f"node:{1 - node}").cpu()
        dt.fetch(torch.ones(1, device="node:0")).add_done_callback(lambda work: None)
        yield


@pytest.fixture
def calm(either: None) -> Iterator[None]:
    """They, with no error left over before the test and none after it."""
    dt.synchronize()
    yield
    dt.synchronize()


# ---- leaks -----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def torch_as_found(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails when a test leaves a setting of torch's changed, and puts it back."""
    if "nodes" in request.fixturenames:
        request.getfixturevalue("nodes")
    before = torch_state.now()
    yield
    torch_state.check(before, request.node.name)


@pytest.fixture(autouse=True, scope="module")
def no_leaks_of_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails when a module leaves a process, a thread, a socket or a segment of shared memory behind."""
    before = leaks.Held.now()
    yield
    leaks.check(before, request.node.name)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails when a test leaves any of those behind but memory; what its module's fixtures hold was there before."""
    if "nodes" in request.fixturenames:
        request.getfixturevalue("nodes")
    await_side_channels()
    before = leaks.Held.now(memory=False)
    yield
    leaks.check(before, request.node.name)


# ---- scripts ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a text as a Python program of its own and gives what it printed: for what may end a process."""

    def run(text: str, timeout: float = HANG, **environment: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "program.py"
        path.write_text(text)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path(), **environment}
        return subprocess.run(
            [sys.executable, str(path)], capture_output=True, text=True, timeout=timeout, env=env, cwd=tmp_path
        )

    return run


@pytest.fixture(autouse=True)
def warm_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Has programs of tests that are marked `cold` start as ever, and not as forks of one that has imported torch; has
    those of tests about ends, by their marks or their files' names, take apart all that they were forked with."""
    about_ends = request.node.path.stem.endswith(ABOUT_ENDS) or request.node.get_closest_marker("whole_ends")
    with (
        warm.cold() if request.node.get_closest_marker("cold") else contextlib.nullcontext(),
        warm.whole_ends() if about_ends else contextlib.nullcontext(),
    ):
        yield


@pytest.fixture(autouse=True)
def same_seed() -> None:
    """Every test starts from the same random numbers, whichever ran before."""
    torch.default_generator.manual_seed(0)
