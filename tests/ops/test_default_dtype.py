"""torch.set_default_dtype, in a session: nodes and cached plans follow at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from subprocess import CompletedProcess

import pytest
import torch
from equal import same

import disttensor as dt

PROGRAMS: dict[str, Callable[[torch.Tensor], object]] = {
    "divided": lambda x: x / 2,
    "mean of a comparison": lambda x: (x > 1) * 0.5,
    "times a number": lambda x: x * 1.5,
    "exp": lambda x: x.exp(),
    "empty": lambda x: torch.empty(3, device=x.device).fill_(1.5),
    "zeros": lambda x: torch.zeros(2, device=x.device),
    "arange": lambda x: torch.arange(0, 1.5, 0.5, device=x.device),
    "full like": lambda x: torch.full_like(x, 0.5, dtype=None),
    "complex": lambda x: x * 1j,
    "sqrt of a view": lambda x: x[1:].sqrt(),
}


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module", params=["inproc", "local"])
def nodes(request: pytest.FixtureRequest) -> Iterator[None]:
    """One node, of both kinds."""
    with dt.init_master_worker(nodes=1, launcher=request.param):
        torch.ones(1 << 14).to("node:0").cpu()  # connects the data channel, which stays
        yield


#: docs/COMPATIBILITY.md: there torch's meta kernels and real ones disagree about a complex number beside bfloat16.
OTHERS = (torch.bfloat16,) if torch.__version__ < (2, 15) else ()


@pytest.mark.parametrize("name", PROGRAMS)
def test_cached_plans_follow(name: str, nodes: None) -> None:
    more = OTHERS if name == "complex" else (torch.bfloat16,)
    local = torch.tensor([1, 2, 3])
    remote = local.to("node:0")
    program, held = PROGRAMS[name], []
    for dtype in (torch.float32, torch.float64, torch.float32, *more, torch.float32):
        torch.set_default_dtype(dtype)
        for _ in range(2):
            held.append((program(remote), program(local)))  # nothing waits for the node between two defaults
    torch.set_default_dtype(torch.float32)
    for got, want in held:
        same(got, want)
    assert torch.get_default_dtype() is torch.float32


def test_a_function_on_a_node_may_set_it(nodes: None) -> None:
    def function() -> torch.Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return torch.zeros(2)
        finally:
            torch.set_default_dtype(before)

    assert dt.run(function, node=0).dtype is torch.float64


BEFORE = """
import torch
import disttensor as dt

torch.set_default_dtype(torch.float64)
with dt.init_master_worker(nodes=1, launcher="local"):
    for x in (torch.tensor([1, 2]).to("node:0") / 2, torch.zeros(2, device="node:0")):
        print(x.dtype, x.cpu().dtype)
"""


def test_a_default_of_before_the_session(script: Callable[..., CompletedProcess[str]]) -> None:
    done = script(BEFORE)
    assert done.stdout == "torch.float64 torch.float64\n" * 2, done.stderr
