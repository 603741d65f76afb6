"""What a DataLoader's worker puts into shared memory, in one process: ``Placing``, and ``Adoption`` at the script."""

from __future__ import annotations

import gc
import os
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from disttensor.data.from_workers import Placing
from disttensor.data.parts import Parts
from disttensor.runtime.channel.shm import adopted
from disttensor.runtime.channel.shm.adopted import Adoption, Pools
from disttensor.runtime.channel.shm.segments import FREE, USED, Mappings
from disttensor.runtime.protocol.errors import ProtocolError


def sample(n: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((50_000,), float(n)), "y": torch.zeros(n)}


def test_a_batch_that_fails_gives_its_memory_back() -> None:
    placing = Placing(1, Adoption())
    with pytest.raises(RuntimeError, match="equal size"):
        placing(default_collate, [sample(1), sample(2)], None)
    made = [placing(default_collate, [sample(1)] * 2, None)["x"] for _ in range(2)]
    assert made[0]._segments != made[1]._segments
    segments = {segment.id for batch in made for segment in batch._segments}
    assert len(segments) == 2, "the failed one's was used again"
    assert placing._pools is not None
    assert sum(map(len, placing._pools._places[0]._by_size.values())) == 2


def through(batch: Any) -> Any:
    return pickle.loads(pickle.dumps(batch))


def test_what_is_dropped_is_free_again() -> None:
    adoption = Adoption()
    placing = Placing(2, adoption)
    made = placing(torch.stack, [torch.full((50_000,), n) for n in range(4)], None)
    states = [segment.state for segment in made._segments]
    found = through(made)
    assert type(found) is Parts
    assert [part[:, 0].tolist() for part in found.tensors] == [[0, 1], [2, 3]]
    del found
    assert (states, [segment.state for segment in made._segments]) == ([USED, USED], [FREE, FREE])


def test_it_is_claimed_once() -> None:
    adoption = Adoption()
    made = Placing(1, adoption)(torch.stack, [torch.ones(50_000)], None)
    (part,) = through(made).tensors
    assert adopted.claimed(part.data_ptr()) is not None
    assert adopted.claimed(part.data_ptr()) is None
    del part
    assert made._segments[0].state == USED, "it is the peer's now"


def test_a_peer_lets_go_after_the_end() -> None:
    adoption, peer = Adoption(), Mappings()
    made = Placing(1, adoption)(torch.stack, [torch.ones(50_000)], None)
    (part,) = through(made).tensors
    segment = adopted.claimed(part.data_ptr())
    assert segment is not None
    mapping = peer.open(segment.describe(), part.nbytes)
    lease = mapping.lease(part.nbytes)
    adoption.end()
    assert not mapping.over, "its tensor is there"
    del lease
    gc.collect()
    assert mapping.over


def test_who_comes_late_is_told() -> None:
    adoption = Adoption()
    made = Placing(1, adoption)(torch.stack, [torch.ones(50_000)], None)
    told = pickle.dumps(made)
    os.close(made._segments[0].fd)
    made._segments[0].fd = -1
    with pytest.raises(RuntimeError, match=r"worker process .* can't be had from its shared memory: .*ended"):
        pickle.loads(told)
    del adoption
    with pytest.raises(RuntimeError, match="after the end of the loop"):
        pickle.loads(told)


def test_more_elements_than_there_are_bytes() -> None:
    segment, _ = Pools().take_segment(0, (70_000,), torch.uint8)
    with pytest.raises(ProtocolError, match=r"70000 elements of .* in a segment of"):
        Adoption().adopt_segment(segment.describe(), (70_000,), torch.float64)
