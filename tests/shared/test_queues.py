"""Channels between the script and functions on nodes: with the same meaning from everywhere."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from everywhere import here, on_node

import disttensor as dt
from disttensor.tasks import Channel, ShutDown, select

pytestmark = pytest.mark.row("I22")


@pytest.fixture(scope="module", autouse=True)
def reached(either: None) -> None:
    """Each node has its connection before the tests look for leaks."""
    for node in range(2):
        assert dt.run(Channel.qsize, Channel(), node=node) == 0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(6) as made:
        yield made


def on_lane(fn: Callable[..., Any], *args: Any) -> Any:
    with dt.stream(dt.Stream(node=1)):
        return dt.run(fn, *args, node=1)


def same(got: Any, put: torch.Tensor) -> None:
    """A local tensor with the values, the dtype and the shape of one that was put."""
    assert type(got) is torch.Tensor
    assert got.dtype is put.dtype
    assert got.device.type == "cpu"
    assert torch.equal(got, put)


FROM = pytest.mark.parametrize("at", [here, on_node, on_lane])


def refusals(c: Any) -> list[str]:
    """What a channel with room for two says at its ends."""
    import queue

    said = []

    def tried(fn: Any, *args: Any, **kwargs: Any) -> None:
        try:
            said.append(repr(fn(*args, **kwargs)))
        except (queue.Empty, queue.Full, ShutDown, ValueError, TypeError) as e:
            said.append(type(e).__name__)

    tried(c.get_nowait)
    tried(c.get, timeout=0.01)
    tried(c.get, timeout=-1)
    tried(c.put, None)
    tried(c.put_many, [1])
    tried(c.put_nowait, 2)
    tried(c.put, 2, timeout=0.01)
    tried(c.put, object())
    said += [str(c.qsize()), str(c.full()), str(c.empty()), str(c.closed), str(c.drained)]
    c.close()
    c.close()
    tried(c.put, 3)
    tried(c.put, 3, False)
    said += [str(c.closed), str(c.drained)]
    tried(c.get)
    tried(c.get_nowait)
    tried(c.get)
    tried(c.get_nowait)
    said += [str(c.drained), str(list(c))]
    return said


@FROM
def test_its_ends(at: Callable[..., Any]) -> None:
    assert at(refusals, Channel(2)) == [
        *("Empty", "Empty", "ValueError", "None", "None", "Full", "Full", "TypeError"),
        *("2", "True", "False", "False", "False", "ShutDown", "ShutDown", "True", "False"),
        *("None", "1", "ShutDown", "ShutDown", "True", "[]"),
    ]


VALUES: list[Any] = [
    *(None, 0, "text", b"bytes", [1, (2, 3)], {"a": {4}}, 1j),
    *(
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(True),
        torch.empty(0, 3),
        torch.zeros((), dtype=torch.bfloat16),
    ),
    *([torch.ones(2), {"x": torch.arange(3)}], torch.randn(3, dtype=torch.cfloat).conj()),
]


@FROM
def test_what_is_put_comes_out(at: Callable[..., Any]) -> None:
    there, back = Channel(), Channel()
    there.put_many(VALUES)
    there.close()

    def pass_on(a: Channel, b: Channel) -> None:
        for item in a:
            b.put(item)
        b.close()

    at(pass_on, there, back)
    came = list(back)
    assert len(came) == len(VALUES)
    for got, put in zip(came, VALUES, strict=True):
        if isinstance(put, torch.Tensor):
            same(got, put.resolve_conj())
        elif isinstance(put, list) and isinstance(put[0], torch.Tensor):
            same(got[0], put[0])
            same(got[1]["x"], put[1]["x"])
        else:
            assert got == put
            assert type(got) is type(put)


def test_a_tensor_is_copied_when_it_is_put() -> None:
    c, x, y = Channel(), torch.zeros(2), torch.ones(2, device="node:1")
    c.put_many([x, y])
    x.fill_(5), y.fill_(5)
    same(c.get(), torch.zeros(2))
    assert dt.run(lambda c: c.get().tolist(), c, node=0) == [1.0, 1.0]


def test_a_large_item() -> None:
    c = Channel()
    x = torch.arange(1 << 20)
    dt.run(lambda c, x: c.put(x), c, x, node=1)
    same(c.get(), x)
    with pytest.raises(ValueError, match="64 MiB"):
        c.put(torch.empty(65 << 20, dtype=torch.uint8))


def test_room_holds_up_who_puts(pool: ThreadPoolExecutor) -> None:
    """The third item is not in before the first is out; and all come in order."""
    c, told = Channel(2), Channel()

    def fill(c: Channel, told: Channel) -> None:
        for i in range(5):
            c.put(i)
            told.put(i)

    filling = pool.submit(dt.run, fill, c, told, node=1)
    assert [told.get(), told.get()] == [0, 1]
    with pytest.raises(queue.Empty):
        told.get(timeout=0.05)
    assert c.qsize() == 2
    assert [c.get() for _ in range(5)] == [*range(5)]
    filling.result()


@pytest.mark.parametrize("what", ["get", "put"])
def test_close_wakes_all_who_wait(pool: ThreadPoolExecutor, what: str) -> None:
    c, begun = Channel(1), Channel()
    if what == "put":
        c.put(0)

    def waits(c: Channel, begun: Channel, what: str) -> str:

        begun.put(1)
        try:
            c.get() if what == "get" else c.put(1)
        except ShutDown:
            return "told"
        return "not told"

    waiting = [pool.submit(dt.run, waits, c, begun, what, node=1), pool.submit(waits, c, begun, what)]
    assert [begun.get(), begun.get()] == [1, 1]
    c.close()
    assert [one.result() for one in waiting] == ["told", "told"]


def test_every_item_to_one_reader(pool: ThreadPoolExecutor) -> None:
    """Several readers and writers on nodes, and in the script."""
    c, begun = Channel(3), Channel()

    def write(c: Channel, first: int) -> None:
        c.put_many(range(first, first + 40))

    def read(c: Channel, begun: Channel) -> list[int]:
        begun.put(1)
        return list(c)

    readers: list[Any] = [dt.submit(read, c, begun, node=node, beside=True) for node in (0, 1)]
    readers += [pool.submit(read, c, begun) for _ in range(2)]
    assert [begun.get() for _ in readers] == [1] * 4
    writers: list[Any] = [dt.submit(write, c, 100 * node, node=node) for node in (0, 1)]
    writers += [pool.submit(write, c, 200)]
    write(c, 300)
    for writer in writers:
        writer.result()
    c.close()
    got = [reader.result() for reader in readers]
    assert sorted(x for part in got for x in part) == [*range(40), *range(100, 140), *range(200, 240), *range(300, 340)]
    for part in got:  # each writer's in its order
        for first in range(0, 400, 100):
            ordered = [x for x in part if x // 100 == first // 100]
            assert ordered == sorted(ordered)


@FROM
def test_select(at: Callable[..., Any]) -> None:
    a, b, c = Channel(), Channel(), Channel()

    def choose(a: Channel, b: Channel, c: Channel) -> list[Any]:
        import queue

        from disttensor.tasks import select

        seen: list[Any] = []
        for timeout in (0, 0.01):
            try:
                select(a, b, timeout=timeout)
            except queue.Empty:
                seen.append("empty")
        b.put(None)
        channel, item = select(a, b)
        seen += [channel is b, item]
        a.put_many([0] * 60)
        b.put_many([1] * 60)
        first = [select(a, b)[1] for _ in range(60)]
        seen.append(10 < sum(first) < 50)  # neither one starves
        a.close(immediate=True)
        b.close()
        seen.append(sum(select(a, b)[1] for _ in range(60 - sum(first))))
        try:
            select(a, b)
        except ShutDown:
            seen.append("shut")
        try:
            select(a, b, c, timeout=0)
        except queue.Empty:
            seen.append("c is open")
        return seen

    found = at(choose, a, b, c)
    assert found[:5] == ["empty", "empty", True, None, True]
    assert found[6:] == ["shut", "c is open"]


def answers(requests: Any) -> int:
    """Answers each question by the channel that came with it."""
    count = 0
    for asked in requests:
        asked["to"][0].put(asked["x"] * 2)
        count += 1
    return count


@FROM
def test_a_channel_through_a_channel(at: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
    """Whoever gets it can use it, and so can whom it is handed on to."""
    requests, passed = Channel(name="requests"), Channel(maxsize=3)
    replies = [Channel(maxsize=2, name=f"to {i}") for i in range(2)]
    work = pool.submit(dt.run, answers, requests, node=0)
    with requests:  # closed at the end, whatever happens: the pool waits for its work
        for i, reply in enumerate(replies):
            passed.put((reply,))
            at(lambda a, b, x: b.put({"to": list(a.get()), "x": x}), passed, requests, torch.full((2,), float(i)))
        assert [reply.get(timeout=60).tolist() for reply in replies] == [[0.0, 0.0], [2.0, 2.0]]
        passed.put(passed)
        assert passed.get() is not passed
        passed.put([replies[1]])
        found = passed.get()[0]
        assert (repr(found), found.maxsize) == ("<Channel to 1 maxsize=2>", 2)
        found.put("back")
        assert replies[1].get() == "back"
        with pytest.raises(TypeError, match="Channel"):
            passed.put({replies[0]: 1})
    assert work.result() == 2


def test_select_refuses() -> None:
    with pytest.raises(ValueError, match="1 to 1024 channels, not 0"):
        select()
    with pytest.raises(TypeError, match="takes channels, not 3"):
        select(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not negative"):
        select(Channel(), timeout=-1)
    with pytest.raises(TypeError, match="a number of items"):
        Channel(None)  # type: ignore[arg-type]


def test_select_waits_for_whichever_is_first(pool: ThreadPoolExecutor) -> None:
    a, b = Channel(), Channel()
    waiting = [pool.submit(dt.run, lambda a, b: select(a, b)[1], a, b, node=1), pool.submit(lambda: select(a, b)[1])]
    b.put("b")
    a.put("a")
    assert sorted(one.result() for one in waiting) == ["a", "b"]
    assert a.qsize() == b.qsize() == 0


def test_a_pipeline_closes_from_its_source(pool: ThreadPoolExecutor) -> None:
    """The ancestor's: each stage ends when the one before has closed."""
    channels = [Channel(2) for _ in range(3)]

    def stage(source: Channel, sink: Channel, by: int) -> int:
        with sink:
            return sum(1 for item in source if sink.put(item * by) is None)

    stages = [pool.submit(dt.run, stage, channels[i], channels[i + 1], 3 + i, node=i) for i in range(2)]
    feeding = pool.submit(lambda: (channels[0].put_many(torch.arange(10.0)), channels[0].close()))
    came = list(channels[2])
    feeding.result()
    assert [x.item() for x in came] == [i * 12.0 for i in range(10)]
    assert [one.result() for one in stages] == [10, 10]
    assert all(c.drained for c in channels)
