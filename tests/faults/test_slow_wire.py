"""A session whose connections are slow, cut into slices, and far: right numbers, and nobody is taken for dead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
import torch
from equal import same
from slow_wire import Wire, Wires
from variants import variants

import disttensor as dt
from disttensor.runtime.launch.starters.local import LocalLauncher
from disttensor.session.channel_router import ChannelRouter

#: By name: the wire, and how many bytes of a tensor cross it.
WIRES = {
    "all of these": (Wire(delay=0.2, slices=1, rate=1e6), 4_000),
    "200 ms": (Wire(delay=0.2), 400_000),
    "slices of a byte": (Wire(slices=1), 40_000),
    "1 MB/s": (Wire(rate=1e6), 400_000),
}


@pytest.fixture
def wires(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wires]:
    """Every connection of the sessions of the test goes by these: "control", "side" and "data"."""
    start, exchange = LocalLauncher.start, ChannelRouter.take_addresses
    with Wires(WIRES[name][0]) as wires:

        def far(self: LocalLauncher, bundles: Any) -> None:
            there = [
                msgspec.structs.replace(
                    bundle,
                    address=wires.to("control", bundle.address),
                    side_addresses=tuple(wires.to("side", address) for address in bundle.side_addresses),
                )
                for bundle in bundles
            ]
            start(self, there)

        def further(self: ChannelRouter, number: int, come: Mapping[int, Any], master: Any) -> None:
            def moved(addresses: Any) -> Any:
                return msgspec.structs.replace(addresses, transfers=wires.to("data", addresses.transfers))

            exchange(self, number, {rank: moved(addresses) for rank, addresses in come.items()}, moved(master))

        monkeypatch.setattr(LocalLauncher, "start", far)
        monkeypatch.setattr(ChannelRouter, "take_addresses", further)
        yield wires


@pytest.mark.fault(27)
@pytest.mark.parametrize("name", variants(WIRES))
def test_right_numbers_and_nobody_is_lost(name: str, wires: Wires) -> None:
    size = WIRES[name][1]
    local = torch.randn(size // 4)
    with dt.init_master_worker("tcp", nodes=2, threads=1):
        x = local.to("node:0")
        y = x.to("node:1")
        same(torch.exp(y), torch.exp(local))
        z = torch.zeros(10, dtype=torch.int64, device="node:1")
        for k in range(300):
            z += k
        assert z.tolist() == [300 * 299 // 2] * 10
        both = [x, y]
        dt.all_reduce(both)
        same(both[1], local * 2)
        assert [node["alive"] for node in dt.nodes()] == [True, True]
    with_commands = size * ((size <= 64 << 10) + 2 * (size <= 32 << 10))  # the upload; what came down
    assert wires.passed("data") > 4 * size - with_commands
    assert wires.passed("control") > 4_000 + with_commands
    assert wires.passed("side") > 0
