"""What local torch refuses or keeps at the edges of its operations, and proxies with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import disttensor as dt

pytestmark = pytest.mark.usefixtures("clean")


def mask(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool, device=device)


MASKS: dict[str, Callable[[torch.Tensor, torch.device], object]] = {
    "read": lambda z, d: z[mask(3, device=d)],
    "with a local mask": lambda z, d: z[mask(3, device=torch.device("cpu"))],
    "second dimension": lambda z, d: z[:, mask(3, device=d)],
    "two dimensions": lambda z, d: z[mask(4, 4, device=d)],
    "too many dimensions": lambda z, d: z[mask(4, 5, 1, device=d)],
    "beside indices": lambda z, d: z[torch.tensor([0, 1], device=d), mask(3, device=d)],
    "after a mask": lambda z, d: z[mask(4, device=d), mask(4, device=d)],
    "bytes": lambda z, d: z[:, mask(3, device=d).to(torch.uint8)],
    "write a number": lambda z, d: z.__setitem__(mask(3, device=d), 1.0),
    "write tensors": lambda z, d: z.__setitem__((slice(None), mask(3, device=d)), torch.ones(4, 3, device=d)),
    "index_put": lambda z, d: z.index_put((mask(3, device=d),), torch.tensor(1.0, device=d)),
    "index_put_": lambda z, d: z.index_put_((mask(3, device=d),), torch.tensor(1.0, device=d), accumulate=True),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_another_shape_is_refused_at_the_line(name: str) -> None:
    with pytest.raises(IndexError) as local:
        MASKS[name](torch.zeros(4, 5), torch.device("cpu"))
    with pytest.raises(IndexError) as remote:
        MASKS[name](torch.zeros(4, 5, device="node:1"), torch.device("node:1"))
    assert str(remote.value) == str(local.value)
    dt.synchronize()
