"""``dt.map`` in chunks: small items go to nodes by the command, each runs once, and none waits for a slow one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from began import Began, tell
from doors import Door, until
from limits import HANG

import disttensor as dt
from disttensor.runtime.node import chunks
from disttensor.tasks import mapping

COUNT = 60


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with dt.init_master_worker(nodes=2, threads=1):
        dt.run(have_time, node=[0, 1])
        with dt.tasks.Channel() as channel:  # connections are made at first use: have them before the tests
            for node in range(2):
                torch.arange(3, device=f"node:{node}").cpu()
                dt.run(double, channel, 1, node=node)
                torch.ones(1).to(f"node:{node}").cpu()
        yield


def have_time() -> None:
    """Has chunks end by what is in them, however busy the machine is."""
    chunks.LONGEST = HANG


def take_for_slow(seconds: float) -> float:
    """Sets after how many seconds an item of this node is a slow one; returns what it was."""
    before, chunks.SLOW = chunks.SLOW, seconds
    return before


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many items go in each chunk; the first ones have 20."""
    found, send = list[int](), mapping.submit_items

    def note(session: Any, fn: Any, items: Any, *more: Any) -> Any:
        found.append(len(items))
        return send(session, fn, items, *more)

    monkeypatch.setattr(mapping, "submit_items", note)
    monkeypatch.setattr(mapping, "FIRST", 20)
    return found


@pytest.fixture
def none_slow() -> Iterator[None]:
    """No item is slow, however long it takes."""
    before = dt.run(take_for_slow, HANG, node=0), dt.run(take_for_slow, HANG, node=1)
    yield
    for node in (each["rank"] for each in dt.nodes() if each["alive"]):
        dt.run(take_for_slow, before[node], node=node)


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """Where items note that they begin."""
    (path := tmp_path / "ran").touch()
    return path


def begun(path: Path) -> list[int]:
    """Returns the items that have begun, in their order: one that has begun twice comes twice."""
    return sorted(map(int, path.read_text().split()))


def note(path: str, number: int) -> None:
    with open(path, "a") as file:
        file.write(f"{number}\n")


def noted(path: str, number: int, slow: int, port: int) -> int:
    """Notes that an item has begun; that of number ``slow`` waits at a door."""
    note(path, number)
    if number == slow:
        until(port)
    return number


def square(x: int) -> int:
    return x * x


def test_items_go_one_by_one_first_and_then_in_chunks(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "FIRST", 1)
    assert list(dt.map(square, range(1000), nodes=[1])) == [k * k for k in range(1000)]
    assert sizes[0] == 1
    assert all(size <= 2 * max(sizes[:k]) for k, size in enumerate(sizes) if k)
    assert max(sizes) > 1


@pytest.mark.parametrize("per_node", [1, 2])
@pytest.mark.parametrize("ordered", [True, False])
def test_each_item_runs_once(ordered: bool, per_node: int, sizes: list[int], ran: Path) -> None:
    args = repeat(str(ran)), range(COUNT), repeat(-1), repeat(0)
    found = list(dt.map(noted, *args, ordered=ordered, per_node=per_node))
    assert (found if ordered else sorted(found)) == begun(ran) == list(range(COUNT))
    assert max(sizes) > 1


@pytest.mark.parametrize("per_node", [1, 2])
@pytest.mark.parametrize("slow", [0, 7, 19])
def test_a_slow_item_delays_no_other(slow: int, per_node: int, sizes: list[int], ran: Path) -> None:
    """All others have come before it ends, those that its chunk has begun before and those that come after it there."""
    with Door() as door:
        more = range(COUNT), repeat(slow), repeat(door.port)
        results = dt.map(noted, repeat(str(ran)), *more, ordered=False, per_node=per_node)
        others = [next(results) for _ in range(COUNT - 1)]
        assert sorted(others) == [k for k in range(COUNT) if k != slow]
        door.open()
        assert list(results) == [slow]
    assert begun(ran) == list(range(COUNT))
    assert sizes[0] == (20 if per_node == 1 else COUNT // 4)


def test_results_before_a_slow_item_come_in_their_order_while_it_runs(sizes: list[int], ran: Path) -> None:
    with Door() as door:
        results = dt.map(noted, repeat(str(ran)), range(COUNT), repeat(13), repeat(door.port), nodes=[0])
        assert [next(results) for _ in range(13)] == list(range(13))
        door.open()
        assert list(results) == list(range(13, COUNT))
    assert begun(ran) == list(range(COUNT))


def refuse(path: str, number: int) -> int:
    note(path, number)
    if number == 7:
        raise ValueError(f"not {number}")
    return number


@pytest.mark.parametrize("retries", [0, 2])
def test_an_error_is_raised_in_its_turn_after_the_results_before_it(retries: int, sizes: list[int], ran: Path) -> None:
    results = dt.map(refuse, repeat(str(ran)), range(COUNT), nodes=[1], retries=retries)
    assert [next(results) for _ in range(7)] == list(range(7))
    with pytest.raises(ValueError, match="not 7") as raised:
        next(results)
    assert list(results) == []
    assert any("refuse() on node 1" in text for text in raised.value.__notes__)
    assert any("test_map_chunks.py" in text for text in raised.value.__notes__)
    dt.synchronize()  # no error is left
    assert begun(ran)[:8] == list(range(8))
    assert sizes[0] == 20


class Point(NamedTuple):
    x: int


def point_at(number: int) -> Any:
    return Point(number) if number == 7 else number


def test_a_result_that_cannot_come_back_is_an_error_in_its_turn(sizes: list[int]) -> None:
    results = dt.map(point_at, range(COUNT))
    assert [next(results) for _ in range(7)] == list(range(7))
    with pytest.raises(TypeError, match=r"Point.*objects of your classes come back if"):
        next(results)
    assert list(dt.map(point_at, range(COUNT), returns=Point))[7] == Point(7)
    assert sizes[0] == 20


def test_tensors_come_back_from_chunks_and_then_one_by_one(sizes: list[int]) -> None:
    found = list(dt.map(torch.arange, range(COUNT)))
    assert [len(tensor) for tensor in found] == list(range(COUNT))
    assert found[5].tolist() == [0, 1, 2, 3, 4]
    assert {len(str(tensor.device)) for tensor in found} == {6}
    assert sizes[2:] == [1] * len(sizes[2:])


def append(values: list[int]) -> list[int]:
    values.append(1)
    return values


def test_items_share_no_argument_and_no_result(sizes: list[int]) -> None:
    """Of one object here each item gets its own, as by the command for each."""
    assert list(dt.map(append, [[0]] * COUNT)) == [[0, 1]] * COUNT
    assert list(dt.map(lambda _, kept=[]: append(kept)[:], range(3), nodes=[0])) == [[1], [1, 1], [1, 1, 1]]
    assert sizes[0] == 20


def test_a_function_with_tensors_and_arguments_that_are_not_plain_go_one_by_one(sizes: list[int]) -> None:
    x = torch.ones(2, device="node:0")
    assert list(dt.map(lambda k: k * len(x), range(30), nodes=[0])) == [2 * k for k in range(30)]
    assert sizes == [20]
    assert [value.sum().item() for value in dt.map(lambda k: x * k, range(30), nodes=[0])] == [
        2.0 * k for k in range(30)
    ]
    assert sizes[1:] == [20, *[1] * 19]
    del sizes[:]
    mixed = [1, 2, {3}, 4, torch.ones(3), 5]
    assert (
        list(dt.map(lambda item: len(item) if not isinstance(item, int) else item, mixed * 5)) == [1, 2, 1, 4, 3, 5] * 5
    )
    assert sizes[0] == 2
    assert set(sizes) <= {1, 2, 3}


def grad_mode(_: int) -> bool:
    was = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    return was


def test_an_item_finds_gradients_on_whatever_the_one_before_has_left(sizes: list[int]) -> None:
    assert list(dt.map(grad_mode, range(COUNT))) == [True] * COUNT
    assert sizes[0] == 20


def double(channel: Any, x: int) -> int:
    channel.put(2 * x)
    return x


def test_of_an_iterator_items_are_taken_one_by_one(sizes: list[int]) -> None:
    """The iterator waits for what the item has done that it gave before."""
    with dt.tasks.Channel() as channel:

        def waits() -> Iterator[int]:
            for k in range(10):
                yield k
                assert channel.get(HANG) == 2 * k

        assert list(dt.map(double, repeat(channel), waits(), nodes=[0])) == list(range(10))
    assert list(dt.map(square, iter(range(10)))) == [k * k for k in range(10)]
    assert sizes == []


def loop(path: str, number: int, port: int, catches: bool) -> int:
    note(path, number)
    if number == 3:
        try:
            tell(port)
            while True:
                pass
        except KeyboardInterrupt:
            if not catches:
                raise
    return number


@pytest.mark.usefixtures("none_slow")
@pytest.mark.parametrize("catches", [False, True])
def test_no_item_begins_after_one_that_was_cancelled(catches: bool, sizes: list[int], ran: Path) -> None:
    """By Ctrl-C, while the script waits for the chunk, whose item 3 has no end of its own."""
    with Began(partial(os.kill, os.getpid(), signal.SIGINT)) as port:
        results = dt.map(loop, repeat(str(ran)), range(20), repeat(port), repeat(catches), nodes=[0])
        with pytest.raises(KeyboardInterrupt):
            next(results)
    assert dt.run(square, 3, node=0) == 9
    assert begun(ran) == [0, 1, 2, 3]
    dt.synchronize()
    assert sizes == [20]


def ends(path: str, number: int, once: bool) -> int:
    """Ends the node that runs number 7; ``once``: where it is there for the first time."""
    there = number == 7 and not (once and 7 in begun(Path(path)))
    note(path, number)
    if there:
        os._exit(9)
    return number


@pytest.mark.usefixtures("none_slow")
def test_items_of_a_lost_node_are_given_to_another_if_asked(
    sizes: list[int], ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = repeat(str(ran)), range(COUNT), repeat(True)
    assert list(dt.map(ends, *args, retries=1)) == list(range(COUNT))
    assert begun(ran).count(7) == 2
    assert sizes[0] == 20
    assert sizes.count(1) >= 20  # those that were on the node: each alone, as any may have ended it
    ran.write_text("")
    send = mapping.submit_items

    def lost_at_once(session: Any, fn: Any, items: Any, back: Any, node: int, *more: Any) -> Any:
        work = send(session, fn, items, back, node, *more)
        with pytest.raises(dt.NodeLost):
            dt.run(square, 3, node=node)
        return work

    monkeypatch.setattr(mapping, "submit_items", lost_at_once)  # the loss is known before there is more to begin
    with pytest.raises(dt.NodeLost) as raised:
        list(dt.map(ends, repeat(str(ran)), range(COUNT), repeat(False)))
    assert any("item 0, or one of 19 beside it, was there" in text for text in raised.value.__notes__)
    assert begun(ran) == list(range(8))
