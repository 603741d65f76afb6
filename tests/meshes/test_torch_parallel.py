"""``parallelize_module`` with torch's styles over ``mesh.torch``: losses and weights of torchrun's, in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from dtensor_kit import torchruns
from parallel_programs import PROGRAMS

import disttensor as dt

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=4, threads=1, launcher="inproc"):
        yield


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[torch.Tensor]]]:
    """By program, what each of torchrun's ranks has."""
    return dict(zip(PROGRAMS, torchruns([*PROGRAMS], tmp_path_factory.mktemp("torchrun")), strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_and_weights_are_torchruns(name: str, theirs: dict[str, list[list[torch.Tensor]]]) -> None:
    m = dt.mesh(dp=2, tp=2)
    found = PROGRAMS[name](m.torch, m.device)
    for rank, wanted in enumerate(theirs[name]):
        for ours, each in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.shards()[rank].cpu(), each, rtol=0, atol=1e-12)
