"""Large bounds of what crosses a wire, lowered for both ends, which are in one process: one less, as much, one more."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import pytest
import torch
from bounds_kit import Job
from limits import HANG

import disttensor as dt
from disttensor.errors import DisttensorError
from disttensor.runtime.endpoints import frames
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol.values import form
from disttensor.tasks import Channel, Endpoint

LOWER = {
    "MAX_DATA": (5000, lambda n: ["x" * (n - 4)]),
    "MAX_OBJECTS": (700, lambda n: [1.5] * (n - 1)),
    "MAX_CONTAINERS": (600, lambda n: [[] for _ in range(n - 1)]),
    "MAX_BROUGHT": (1 << 17, lambda n: b"x" * n),
}


@pytest.mark.parametrize("name", LOWER)
def test_a_value_at_a_bound_that_is_lowered(
    nodes: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, make = LOWER[name]
    monkeypatch.setattr(form, name, most)
    channel = Channel()
    with Endpoint(tmp_path / "file") as endpoint, dt.tasks.connect(tmp_path / "file") as client:
        job = Job(channel, endpoint.clients(1, HANG)[0], client)
        for way in ("returned", "from_node", "to_node", "from_client", "to_client"):
            fits = []
            for n in (most // 2, most - 1, most, most + 1, most + 8):
                with contextlib.suppress(ValueError):
                    assert getattr(job, way)(make, n), (way, n)
                    fits.append(n)
            if name == "MAX_BROUGHT" and way in ("from_node", "to_node"):  # an item has it with everything else
                assert len(fits) == 5, way
            else:
                assert fits == [most // 2, most - 1, most], way
            assert job.from_client(torch.arange, 3), way
            assert job.to_client(torch.arange, 3), way


def test_an_item_of_more_bytes_than_may_be(nodes: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disttensor.runtime.shared.values.MAX_ITEM", 4096)
    channel = Channel()

    def put(n: int, channel: Channel) -> None:
        channel.put(torch.ones(n))

    for ask in (put, partial(dt.run, put, node=1)):
        ask(1000, channel)  # type: ignore[operator]
        assert len(channel.get(timeout=HANG)) == 1000
        with pytest.raises(ValueError, match="an item has"):
            ask(1010, channel)  # type: ignore[operator]
        assert channel.empty()


def test_a_message_of_more_bytes_than_may_be(nodes: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_BYTES", 4096)
    with Endpoint(tmp_path / "file") as endpoint, dt.tasks.connect(tmp_path / "file") as client:
        job = Job(Channel(), endpoint.clients(1, HANG)[0], client)
        for send in (job.from_client, job.to_client):
            assert send(torch.arange, 512)
            with pytest.raises(ValueError, match="a message has 1 tensors of 4104 bytes"):
                send(torch.arange, 513)
            assert send(torch.arange, 511)


def test_a_call_that_no_message_carries(nodes: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused at its line, and the next one as well: a node that had not been told of an operator would fail at
    each of its calls, without a word of why."""
    monkeypatch.setattr(codec, "MAX_MESSAGE", 20_000)
    x = torch.ones(1, device="node:1")
    most = (20_000 - 256) // 5 - 1  # and one for the result
    for n in (most - 1, most):
        assert torch.cat([x] * n).sum().item() == n
    for _ in range(2):
        with pytest.raises(DisttensorError, match="aten::cat: this call takes up to"):
            torch.cat([x] * (most + 1))
    # many results, of whose geometry the first call would tell
    parts = torch.arange(3000, device="node:1").unbind()
    assert [parts[i].item() for i in (0, 1, 2999)] == [0, 1, 2999]
    with pytest.raises(DisttensorError, match="aten::unbind"):
        torch.arange(5000, device="node:1").unbind()
    assert x.sum().item() == 1
