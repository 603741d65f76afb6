"""Local programs of libraries that ask whether there is a process group: with ``mesh.torch`` they are as without, or an
error says what ends it. They never do what rank 0 would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from library_programs import accelerated, lit, on_device, resumed, saved, trained, unchanged

import disttensor as dt
from disttensor.errors import RanksDiffer

AS_WITHOUT: dict[str, Callable[[Path], list[Any]]] = {
    "accelerate": lambda folder: accelerated(unchanged, 6),
    "Trainer": lambda folder: trained(unchanged, folder),
    "Lightning": lit,
}
#: Those of which rank 0 does more than the others: it writes.
REFUSED: dict[str, Callable[[Path], list[Any]]] = {
    "Trainer's checkpoints": lambda folder: resumed(unchanged, folder),
    "save_pretrained": lambda folder: saved(unchanged, folder),
}


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=4, launcher="inproc"):
        yield


def run(program: Callable[[Path], list[Any]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    if program is lit:
        return lit(folder)
    with on_device("cpu", monkeypatch):
        return program(folder)


@pytest.fixture
def group() -> Iterator[Callable[[], object]]:
    """Makes the process group of a mesh."""
    yield lambda: dt.mesh(dp=2, tp=2).torch
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning:lightning")
@pytest.mark.parametrize("name", AS_WITHOUT)
def test_local_programs_are_as_without(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: Any) -> None:
    without = run(AS_WITHOUT[name], tmp_path / "without", monkeypatch)
    group()
    found = run(AS_WITHOUT[name], tmp_path / "with", monkeypatch)
    assert len(found) == len(without) > 0
    for one, other in zip(found, without, strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=0, atol=0)


@pytest.mark.parametrize("name", REFUSED)
def test_local_programs_that_ask_for_the_scripts_rank(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: Any
) -> None:
    group()
    with pytest.raises(RanksDiffer, match=r"another one on each rank.*destroy_process_group\(\) ends"):
        run(REFUSED[name], tmp_path, monkeypatch)
