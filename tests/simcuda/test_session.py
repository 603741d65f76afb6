"""Nodes whose GPUs are simulated ones: disttensor's own lines that name torch.cuda."""

from __future__ import annotations

import pytest
from simcuda_kit import run_session

pytestmark = [pytest.mark.simcuda, pytest.mark.cold]


@pytest.mark.parametrize("backend", ["shm"])
def test_tensors_go_up_across_both_ways_and_down(backend):
    run_session(
        """
x = torch.arange(float(1 << 18))
a = x.to(dt.device(0, "cuda:0"))
b = (a + 1).to(dt.device(1, "cuda:0"))
assert torch.equal(b.cpu(), x + 1)
c = (b * 2).to(dt.device(0, "cuda:0"))
assert torch.equal(c.cpu(), (x + 1) * 2)
""",
        backend=backend,
        delay_ms=1,
    )
