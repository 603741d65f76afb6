"""What local torch refuses or keeps at the edges of its operations, and proxies with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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


DEV = "node:1"
#: (layout, program) for what would make a tensor that is not strided
LAYOUTS: dict[str, tuple[str, Callable[[torch.Tensor], object]]] = {
    "to_sparse": ("sparse_coo", lambda x: x.to_sparse()),
    "to_sparse of some dimensions": ("sparse_coo", lambda x: x.to_sparse(1)),
    "to_sparse_csr": ("sparse_csr", lambda x: x.to_sparse_csr()),
    "to_sparse_csc": ("sparse_csc", lambda x: x.to_sparse_csc()),
    "to_sparse_bsr": ("sparse_bsr", lambda x: x.to_sparse_bsr((2, 2))),
    "to_mkldnn": ("_mkldnn", lambda x: x.to_mkldnn()),
    "quantize": ("quantized", lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)),
    "quantize dynamically": ("quantized", lambda x: torch.quantize_per_tensor_dynamic(x, torch.qint8, False)),
    "zeros_like": ("sparse_coo", lambda x: torch.zeros_like(x, layout=torch.sparse_coo)),
    "sent": ("sparse_csr", lambda x: torch.eye(3).to_sparse_csr().to(DEV)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_not_strided_is_refused_at_the_line(name: str) -> None:
    layout, program = LAYOUTS[name]
    x = torch.rand(6, 8, device=DEV)
    with pytest.raises(NotImplementedError, match=f"{layout} can't be on a node"):
        program(x)
    dt.synchronize()


@pytest.mark.filterwarnings("ignore")
def test_a_storage_shows_where_it_is() -> None:
    text = repr(torch.ones(6, device=DEV).untyped_storage())
    assert text == repr(torch.ones(6, device="meta").untyped_storage()).replace("meta", DEV)
    assert repr(torch.ones(1, dtype=torch.uint8).untyped_storage()).startswith(" 1\n")


def test_a_local_tensor_is_not_written_in_vain() -> None:
    local = torch.tensor(0.0)
    with pytest.raises(RuntimeError, match="cpu"):
        local += torch.ones((), device="node:1")


def test_numbers_that_do_not_fit() -> None:
    x = torch.ones(2, device="node:1")
    assert (x + 1).sum().item() == 4
    with pytest.raises((OverflowError, RuntimeError)):
        x + 2**70
    assert (x + 2).sum().item() == 6


@pytest.fixture
def doubled() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """An operator of a library: Python, for any device."""
    with torch.library._scoped_library("disttensor_test", "FRAGMENT"):

        @torch.library.custom_op("disttensor_test::doubled", mutates_args=())
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        double.register_fake(lambda x: torch.empty_like(x))
        double.register_autograd(lambda ctx, grad: grad * 2)
        yield double


def test_a_librarys_operator_in_python_runs_part_by_part(doubled: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.arange(3.0, device="node:1").requires_grad_()
    y = doubled(x)
    y.sum().backward()
    assert y.tolist() == [0, 2, 4]
    assert x.grad.tolist() == [2, 2, 2]
