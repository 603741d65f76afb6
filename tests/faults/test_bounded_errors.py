"""No error prints whole tensors: they would be pages of numbers, and those of one on a node would be waited for.

Each public function is given tensors in the place of each of its arguments.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import disttensor as dt

#: Those that end what is here, wait for what does not come, or whose text is Python's (an Enum's) or torch's own.
LEFT_OUT = (
    *("init", "init_master_worker", "shutdown", "kill", "stop", "resume", "cut", "limit", "limits"),
    *("synchronize", "wait_for_nodes", "recv", "barrier", "monitored_barrier", "connect"),
    "ReduceOp",
)
#: Themes that are not in ``dir``.
BESIDE = ("checkpoint", "factories", "nn", "testing", "training", "verify", "views")

#: The value of all elements; a text with more of these has the tensor in it.
VALUE = 12345.5


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Each public function and class, once."""
    themes = [name for name in dir(dt) if inspect.ismodule(getattr(dt, name))]
    seen: set[int] = set()
    for theme in ["", *themes, *BESIDE]:
        module = importlib.import_module(f"disttensor.{theme}".rstrip("."))
        for name in getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]:
            one = getattr(module, name)
            error = isinstance(one, type) and issubclass(one, BaseException)
            if not callable(one) or error or name in LEFT_OUT or id(one) in seen:
                continue
            seen.add(id(one))
            yield f"{theme}.{name}", one


def calls(one: Callable[..., Any], wrong: object, fills: list[object]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of a function with something wrong: at first places, and by each keyword beside arguments that may be
    right."""
    for count in (1, 2, 3):
        yield f"{count}", partial(one, *[wrong] * count)
    try:
        parameters = inspect.signature(one).parameters.values()
    except ValueError:
        return
    needed = sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    for p in parameters:
        if p.default is not p.empty and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD):
            for fill in fills:
                yield f"{p.name}=", partial(one, *[fill] * needed, **{p.name: wrong})


def test_no_error_prints_a_tensor() -> None:
    found, errors = [], 0
    with dt.init_master_worker(nodes=2, launcher="inproc"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a few calls are right, and torch warns of them
        remote = torch.full((40, 40), VALUE).to("node:1")
        mesh = dt.mesh(dp=2)
        on_mesh = torch.ones(2, device=mesh.device)
        fills = [remote, [torch.ones(2, device=f"node:{k}") for k in range(2)], lambda *a: 1, mesh, on_mesh]
        for name, one in public():
            for wrong in (remote, [remote.cpu(), remote]):
                for how, call in calls(one, wrong, fills):
                    try:
                        call()
                    except Exception as e:
                        errors += 1
                        text = str(e)
                        if len(text) > 2000 or text.count("12345.5") > 3:
                            found.append((name, how, text[:80]))
        dt.synchronize()
    assert errors > 1000
    assert found == []


def test_a_cuda_device_of_a_node_without_gpus() -> None:
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        x = torch.ones(3, device="node:1")
        for call in (
            x.cuda,
            lambda: x.cuda(1),
            lambda: x.dist_send(0, device="cuda"),
            lambda: torch.ones(3).dist_send(1, device=0),
            lambda: dt.device(1, "cuda"),
            lambda: torch.nn.Linear(2, 2).to("node:1").cuda(),
            lambda: dt.factories.zeros(2, device="cuda"),
            lambda: dt.mesh(dp=2, device="cuda"),
        ):
            with pytest.raises(RuntimeError, match=r"has no device cuda:[01]; it has cpu\. .*simulate_cuda=2"):
                call()
    with (
        dt.init_master_worker(nodes=1, launcher="inproc", simulate_cuda=2),
        pytest.raises(RuntimeError, match=r"no device cuda:2; it has cpu, cuda:0, cuda:1$"),
    ):
        torch.ones(3, device="node:0").cuda(2)
