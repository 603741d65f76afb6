"""A root with agents on this host: nodes are dealt, heard, and ended with whoever is above them. Nodes are stubs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import msgspec
import pytest
from output_kit import unfolded
from test_launch import STUBS, bundles, collect

from disttensor.runtime.bundle import Bundle
from disttensor.runtime.launch import Exited, Started
from disttensor.runtime.launch.plan import Host, Plan
from disttensor.runtime.launch.planned import PlannedLauncher

Tree = Callable[..., PlannedLauncher]


def plan(*slots: int, **options: str) -> Plan:
    hosts = tuple(Host(name, n) for name, n in zip("abcdefgh", slots, strict=False))
    return Plan("nearby", hosts=hosts, options={"preload": " ".join(STUBS), **options})


def asked(*jobs: str) -> list[Bundle]:
    return [msgspec.structs.replace(bundle, nodes=len(jobs)) for bundle in bundles(*jobs)]


@pytest.fixture
def tree() -> Iterator[Tree]:
    with contextlib.ExitStack() as stack:

        def start(*slots: int, **options: str) -> PlannedLauncher:
            launcher = PlannedLauncher(plan(*slots, **options), "stub_workers:act")
            stack.callback(launcher.stop, 0)
            return launcher

        yield start


def test_ranks_in_blocks(tree: Tree, capfd: pytest.CaptureFixture[str]) -> None:
    launcher = tree(2, 1, 2)
    assert launcher.capacity == 5
    launcher.start(asked(*["place"] * 4))
    events = collect(launcher, 8)
    assert {e.rank: e.host for e in events if isinstance(e, Started)} == {0: "a", 1: "a", 2: "b", 3: "c"}
    ended = {e.rank: e for e in events if isinstance(e, Exited)}
    assert all(e.code == 0 for e in ended.values())
    places = ["0 of 2", "1 of 2", "0 of 1", "0 of 1"]
    assert [ended[k].tail for k in range(4)] == [(place,) for place in places]
    launcher.stop(0)
    assert sorted(unfolded(capfd.readouterr().out.splitlines())) == [
        f"[node {k}] {place}" for k, place in enumerate(places)
    ]
