"""The same line of several nodes is shown once; every node's lines stay in order and none is lost."""

from __future__ import annotations

import random

import pytest

from disttensor.runtime.launch.output.folding import HOLD, ROOM, OutputFolding


def shown(folder: OutputFolding, now: float, everyone: int) -> list[tuple[list[int], bytes]]:
    return [(sorted(g.ranks), g.text) for g in folder.take_due(now, everyone)]


def test_what_all_have_printed_does_not_wait() -> None:
    folder = OutputFolding()
    for rank in range(3):
        assert shown(folder, 0, 3) == []
        folder.add(rank, 1, b"hello", 0)
    assert shown(folder, 0, 3) == [([0, 1, 2], b"hello")]
    assert folder.due() is None


def test_what_only_some_print_waits_for_a_moment() -> None:
    folder = OutputFolding()
    folder.add(2, 1, b"hello", 5)
    folder.add(0, 1, b"hello", 5 + HOLD / 2)
    assert folder.due() == 5 + HOLD
    assert shown(folder, 5 + HOLD * 0.9, 3) == []
    assert shown(folder, 5 + HOLD, 3) == [([0, 2], b"hello")]
    folder.add(1, 1, b"hello", 6)  # too late
    assert shown(folder, 7, 3) == [([1], b"hello")]


def test_a_single_node_never_waits() -> None:
    folder = OutputFolding()
    for text in (b"a", b"a", b"b"):
        folder.add(0, 1, text, 0)
        assert shown(folder, 0, 1) == [([0], text)]


def test_each_node_has_something_of_its_own_first() -> None:
    folder = OutputFolding()
    for rank in range(3):
        folder.add(rank, 1, b"I am %d" % rank, 0)
        folder.add(rank, 1, b"ready", 0)
    assert shown(folder, HOLD, 3) == [*(([r], b"I am %d" % r) for r in range(3)), ([0, 1, 2], b"ready")]


def test_order_of_a_node_goes_before_folding() -> None:
    folder = OutputFolding()
    for rank, text in ((0, b"a"), (0, b"b"), (1, b"b"), (1, b"a")):
        folder.add(rank, 1, text, 0)
    assert shown(folder, HOLD, 3) == [([0], b"a"), ([0, 1], b"b"), ([1], b"a")]


def test_repeated_lines_pair_off() -> None:
    folder = OutputFolding()
    for rank in (0, 1):
        for _ in range(3):
            folder.add(rank, 1, b"again", 0)
    assert shown(folder, 0, 2) == [([0, 1], b"again")] * 3


def test_stdout_and_stderr_are_two_things() -> None:
    folder = OutputFolding()
    folder.add(0, 1, b"x", 0)
    folder.add(1, 2, b"x", 0)
    assert shown(folder, 1, 2) == [([0], b"x"), ([1], b"x")]


def test_a_flood_does_not_fill_the_memory() -> None:
    folder, out = OutputFolding(), 0
    for i in range(100):
        folder.add(0, 1, b"%d" % i + b"x" * (ROOM // 10), 0)
        out += len(folder.take_due(0, 2))
    assert out >= 90
    assert folder.take_due(HOLD, 2)


@pytest.mark.parametrize("seed", range(20))
def test_random_lines(seed: int) -> None:
    """Whatever comes when: nothing is lost, nothing is shown late, and nobody's lines change their order."""
    draw = random.Random(seed)
    folder, now, nodes = OutputFolding(), 0.0, draw.randint(1, 5)
    said: dict[int, list[bytes]] = {r: [] for r in range(nodes)}
    seen: dict[int, list[bytes]] = {r: [] for r in range(nodes)}
    waiting: dict[int, list[float]] = {r: [] for r in range(nodes)}

    def show(count: int) -> None:
        for group in folder.take_due(now, count):
            assert len(set(group.ranks)) == len(group.ranks)
            for rank in group.ranks:
                seen[rank].append(group.text)
                waiting[rank].pop(0)
        assert all(now - began < HOLD for times in waiting.values() for began in times)

    for _ in range(400):
        rank, text = draw.randrange(nodes), b"line %d" % draw.randrange(3)
        folder.add(rank, 1, text, now)
        said[rank].append(text)
        waiting[rank].append(now)
        show(nodes)
        now += draw.choice([0, HOLD / 10, HOLD / 3])
        show(nodes)
    now += HOLD
    show(nodes)
    assert seen == said
