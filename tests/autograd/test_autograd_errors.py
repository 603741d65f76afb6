"""Errors inside of a backward above proxies surface as they are, and leave everything usable.

The cases that could end the process (an exception that passes through C++ in a backward) are tried in a process of
their own first; only if it survives are they run here.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import search_path
from equal import same
from limits import HANG
from raising import RAISING, Boom, _x

import disttensor as dt
from disttensor import testing

pytestmark = pytest.mark.usefixtures("clean")


def _mistake_in_an_operation() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad @ torch.ones(7, 7, device="node:1")

    Wrong.apply(_x()).sum().backward()


def _two_nodes_in_an_operation() -> None:
    y = _x() * 2
    y.register_hook(lambda g: g + torch.ones(3, device="node:0"))
    y.sum().backward()


def _wrong_node_of_a_gradient() -> None:
    y = _x() * 2
    y.register_hook(lambda g: torch.ones(4, device="node:1"))
    y.sum().backward()


MISTAKES = {
    "shape": _mistake_in_an_operation,
    "two nodes": _two_nodes_in_an_operation,
    "wrong shape": _wrong_node_of_a_gradient,
}


def check_raising(name: str) -> None:
    for _ in range(3):
        with pytest.raises(Boom, match="boom") as e:
            RAISING[name]()
        assert e.traceback
        usable()


def usable() -> None:
    x = _x()
    (x * x).sum().backward()
    same(x.grad, torch.full((3,), 2.0))
    assert torch.autograd.is_multithreading_enabled()


def all_raising() -> None:
    """What the process of their own runs."""
    with dt.init_master_worker(nodes=2, launcher="inproc", simulate_cuda=2):
        for name in RAISING:
            print("trying", name, flush=True)
            check_raising(name)
        for name, program in MISTAKES.items():
            print("trying", name, flush=True)
            with pytest.raises(RuntimeError):
                program()
            usable()
    print("survived", flush=True)


@pytest.fixture(scope="module")
def survives() -> str:
    """The output of a process that tries all that could end one."""
    done = subprocess.run(
        [sys.executable, "-c", "import test_autograd_errors as t; t.all_raising()"],
        capture_output=True,
        text=True,
        timeout=HANG,
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": search_path()},
    )
    return f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-2000:]}"


def test_errors_do_not_end_the_process(survives: str) -> None:
    assert survives.startswith("exit code 0\n"), survives
    assert "survived" in survives


@pytest.mark.parametrize("name", RAISING)
def test_errors_surface_as_they_are(name: str, survives: str) -> None:
    if "survived" not in survives:
        pytest.skip("it may end the process")
    check_raising(name)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_backward(name: str, survives: str) -> None:
    if "survived" not in survives:
        pytest.skip("it may end the process")
    with pytest.raises(RuntimeError):
        MISTAKES[name]()
    usable()


def test_errors_leave_no_references(survives: str) -> None:
    if "survived" not in survives:
        pytest.skip("it may end the process")
    x = _x()
    gc.collect()
    dt.synchronize()
    before = testing.usage(x)
    for _ in range(10):
        for name in ("tensor hook", "function", "checkpoint", "post accumulate"):
            with pytest.raises(Boom):
                RAISING[name]()
    gc.collect()
    dt.synchronize()
    assert testing.usage(x) == before


def test_errors_of_concurrent_backwards_reach_their_own_thread(survives: str) -> None:
    if "survived" not in survives:
        pytest.skip("it may end the process")
    found: list[tuple[int, str]] = []

    def run(number: int) -> None:
        def fail(grad: torch.Tensor) -> None:
            raise Boom(f"of thread {number}")

        for _ in range(20):
            y = _x() * 2
            y.register_hook(fail)
            try:
                y.sum().backward()
            except Exception as e:
                found.append((number, str(e)))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        sys.setswitchinterval(interval)
    assert sorted(found) == [(n, f"of thread {n}") for n in range(4) for _ in range(20)]
