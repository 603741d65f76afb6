"""What goes wrong, wherever and in whichever thread, is raised there as what it is; the session stays usable."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from equal import same
from raising import RAISING, Boom, boom
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import testing

Cause = Callable[[], object]

#: Seconds for what takes a moment; longer is a hang.
SOON = 20


pytestmark = pytest.mark.usefixtures("clean")


def leaf(device: str = "node:1") -> torch.Tensor:
    return torch.ones(3, device=device, requires_grad=True)


def usable(*devices: str) -> None:
    assert torch.is_grad_enabled()
    assert torch.autograd.is_multithreading_enabled()
    for device in devices or ("node:0", "node:1"):
        dt.synchronize(device)
        x = leaf(device)
        checkpoint(lambda y: y * y, x * 1, use_reentrant=False).sum().backward()
        same(x.grad, torch.full((3,), 2.0))


# ---- where -----------------------------------------------------------------------------------------------------------


def in_forward(cause: Cause) -> None:
    y = leaf("node:0") * 2
    cause()
    assert y.sum().item() == 6


def in_backward(cause: Cause) -> None:
    x = leaf("node:0")
    y = x * 2

    def hook(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            cause()

    y.register_hook(hook)
    y.sum().backward()
    same(x.grad, torch.full((3,), 2.0))


def same_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def in_recomputation(reentrant: bool) -> Callable[[Cause], None]:
    def run(cause: Cause) -> None:
        calls: list[int] = []

        def body(a: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) == 2:
                with torch.autograd.graph.saved_tensors_hooks(same_tensor, same_tensor):  # they are not the body's
                    cause()
            return a.exp()

        x = leaf("node:0")
        checkpoint(body, x * 0, use_reentrant=reentrant).sum().backward()
        same(x.grad, torch.zeros(3))

    return run


PLACES = {
    "forward": in_forward,
    "backward": in_backward,
    "recomputation": in_recomputation(False),
    "reentrant": in_recomputation(True),
}
wherever = pytest.mark.parametrize("place", PLACES)
in_any_thread = pytest.mark.parametrize("thread", ["main", "other"])


def run(thread: str, place: str, cause: Cause) -> None:
    """Runs ``cause`` there and raises what comes out of it."""
    if thread == "main":
        return PLACES[place](cause)
    errors: list[BaseException] = []

    def body() -> None:
        try:
            PLACES[place](cause)
        except BaseException as e:
            errors.append(e)

    other = threading.Thread(target=body)
    other.start()
    other.join(SOON)
    assert not other.is_alive()
    if errors:
        raise errors[0]


# ---- operations ------------------------------------------------------------------------------------------------------


def fails_later() -> torch.Tensor:
    return torch.ones(3, device="node:1").gather(0, torch.tensor([7], device="node:1"))


def fails_too() -> torch.Tensor:
    return torch.zeros(3, device="node:1").scatter(0, torch.tensor([4], device="node:1"), 1.0)


OPERATIONS: dict[str, tuple[Cause, type[Exception], str]] = {
    "wrong shape": (lambda: leaf() + torch.ones(4, device="node:1"), RuntimeError, "shape|size"),
    "two nodes": (lambda: leaf() + torch.ones(3, device="node:0"), RuntimeError, "node:1.*node:0|node:0.*node:1"),
    "local operand": (lambda: leaf() + torch.ones(3), RuntimeError, "same device"),
    "no such node": (lambda: torch.ones(3, device="node:7"), RuntimeError, "node:7"),
    "fails on the node": (lambda: fails_later().item(), RuntimeError, "gather"),
    "asked shape": (lambda: fails_later().nonzero(), RuntimeError, "gather"),
    "fetched": (lambda: fails_later().cpu(), RuntimeError, "gather"),
    "function": (lambda: dt.run(boom, node=1), dt.errors.RemoteError, "Boom"),
}


@in_any_thread
@wherever
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name: str, place: str, thread: str) -> None:
    cause, kind, text = OPERATIONS[name]
    with pytest.raises(kind, match=text) as caught:
        run(thread, place, cause)
    assert any("test_error_matrix.py" in str(entry.path) for entry in caught.traceback)
    usable()


@in_any_thread
@wherever
def test_operations_that_nobody_asks_about(place: str, thread: str) -> None:
    """The earliest is raised at the next synchronization, with the others attached."""
    run(thread, place, lambda: [fails_later(), fails_too()])
    with pytest.raises(RuntimeError, match=r"gather(.|\n)*test_error_matrix.py:\d+ in fails_later") as raised:
        dt.synchronize()
    assert "in fails_too" in raised.value.__notes__[-1]
    usable()


# ---- hooks -----------------------------------------------------------------------------------------------------------


def _module(register: str, module: bool = True) -> Cause:
    def program() -> None:
        layer = torch.nn.Linear(3, 3).to("node:1")
        handle = getattr(layer if module else torch.nn.modules.module, register)(boom)
        try:
            layer(leaf()).sum().backward()
        finally:
            handle.remove()

    return program


def _optimizer(register: str) -> Cause:
    def program() -> None:
        x = leaf()
        optimizer = torch.optim.SGD([x], 0.1)
        getattr(optimizer, register)(boom)
        x.sum().backward()
        optimizer.step()

    return program


def _multi_grad(mode: Any) -> Cause:
    def program() -> None:
        x, y = leaf(), leaf("node:0")
        torch.autograd.graph.register_multi_grad_hook((x, y), boom, mode=mode)
        ((x * 2).sum().cpu() + (y * 2).sum().cpu()).backward()

    return program


def _callback() -> None:
    y = leaf() * 2
    y.register_hook(lambda g: torch.autograd.Variable._execution_engine.queue_callback(boom))
    y.sum().backward()


def _pack() -> None:
    with torch.autograd.graph.saved_tensors_hooks(boom, boom):
        leaf().exp()


def _mode(base: Any, method: str) -> Cause:
    mode = type("Mode", (base,), {method: boom})

    def program() -> None:
        x = leaf()
        with mode():
            x.exp()

    return program


def _function(method: str) -> Cause:
    methods = {"forward": staticmethod(lambda x: x * 2), "setup_context": staticmethod(lambda *args: None)}
    function: Any = type("Function", (torch.autograd.Function,), methods | {method: staticmethod(boom)})
    return lambda: function.apply(leaf())


def _anomaly() -> None:
    with pytest.warns(UserWarning, match="Anomaly|Error detected"), torch.autograd.detect_anomaly():
        RAISING["function"]()


HOOKS: dict[str, Cause] = {
    **RAISING,
    "forward pre": _module("register_forward_pre_hook"),
    "forward": _module("register_forward_hook"),
    "every forward pre": _module("register_module_forward_pre_hook", False),
    "every forward": _module("register_module_forward_hook", False),
    "every backward pre": _module("register_module_full_backward_pre_hook", False),
    "every backward": _module("register_module_full_backward_hook", False),
    "step pre": _optimizer("register_step_pre_hook"),
    "step post": _optimizer("register_step_post_hook"),
    "all gradients": _multi_grad("all"),
    "any gradient": _multi_grad("any"),
    "engine's callback": _callback,
    "pack": _pack,
    "function mode": _mode(torch.overrides.TorchFunctionMode, "__torch_function__"),
    "dispatch mode": _mode(torch.utils._python_dispatch.TorchDispatchMode, "__torch_dispatch__"),
    "forward of a function": _function("forward"),
    "context of a function": _function("setup_context"),
    "anomaly": _anomaly,
}


@in_any_thread
@wherever
@pytest.mark.parametrize("name", HOOKS)
def test_hooks(name: str, place: str, thread: str) -> None:
    with pytest.raises(Boom, match="boom") as caught:
        run(thread, place, HOOKS[name])
    assert caught.traceback[-1].path.name == "raising.py"  # where it was raised
    usable()


# ---- a full window, and Ctrl-C ---------------------------------------------------------------------------------------

_released = threading.Event()


def _hold() -> None:
    """Keeps a node busy."""
    assert _released.wait(SOON)


@pytest.fixture
def busy() -> Iterator[Callable[[Cause], None]]:
    """A function that fills the window of node 1, which is busy, and calls another once it is full."""
    _released.clear()
    holder = threading.Thread(target=dt.run, args=(_hold,), kwargs={"node": 1})
    holder.start()

    def fill(full: Cause) -> None:
        reached: list[object] = []

        def at_window() -> None:
            if not reached:
                reached.append(full())

        with testing.at("window", at_window):
            x = torch.zeros(1, device="node:1")
            while not reached:
                x.add_(1)

    yield fill
    _released.set()
    holder.join(SOON)


@in_any_thread
@wherever
def test_a_full_window(place: str, thread: str, busy: Callable[[Cause], None]) -> None:
    run(thread, place, lambda: busy(_released.set))
    usable()


@wherever
def test_an_interrupt_at_a_full_window(place: str, busy: Callable[[Cause], None]) -> None:
    with pytest.raises(KeyboardInterrupt):
        run("main", place, lambda: busy(lambda: signal.raise_signal(signal.SIGINT)))
    _released.set()
    usable()


@wherever
def test_an_interrupt(place: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        run("main", place, lambda: signal.raise_signal(signal.SIGINT))
    usable()


@wherever
def test_an_interrupt_is_the_main_threads(place: str) -> None:
    """What another thread does is done as if there was none."""
    inside, goes_on, errors = threading.Event(), threading.Event(), []

    def body() -> None:
        try:
            PLACES[place](lambda: (inside.set(), goes_on.wait(SOON)))
        except BaseException as e:
            errors.append(e)

    other = threading.Thread(target=body)
    other.start()
    assert inside.wait(SOON)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    goes_on.set()
    other.join(SOON)
    assert errors == []
    usable()
