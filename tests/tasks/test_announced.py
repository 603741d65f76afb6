"""What comes back from functions on nodes: values with their types, and objects of the classes that a call names."""

from __future__ import annotations

import dataclasses
import datetime as dates
import pathlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import hostile_workers
import msgspec
import numpy as np
import pytest
import torch
import value_kit as kit
from value_kit import Broken, NoFile, OwnHash, Pair, Point, Stats

import disttensor as dt


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with dt.init_master_worker(nodes=2, threads=1):
        torch.ones(1 << 14, device="node:1").cpu()  # the data channel connects at the first transfer
        yield


def stats(loss: float = 1.0) -> Stats:
    return Stats(loss, 2, [Point(torch.ones(2), np.arange(3))])


def annotated() -> list[Pair] | None:
    return [Pair(1, 2)]


def annotated_for(x: int) -> Pair | Point:
    return Pair(x, Point(x))


def raising(error: BaseException) -> None:
    raise error


def test_plain_values_keep_their_types() -> None:
    now = dates.datetime(2024, 2, 29, tzinfo=dates.UTC)
    value = {"a": np.float32(1.5), "p": pathlib.Path("/x"), "t": (now, frozenset({1}), 2**70)}
    made = dt.run(lambda: value, node=1)
    assert made == value
    assert [type(x) for x in made.values()] == [type(x) for x in value.values()]


def test_large_arrays_come_and_nothing_of_them_stays() -> None:
    before = torch.node.memory_allocated("node:1")
    made = dt.run(lambda: [np.arange(1 << 17).reshape(2, -1), torch.ones(2), "x" * (1 << 21)], node=1)
    assert (made[0] == np.arange(1 << 17).reshape(2, -1)).all()
    assert made[1].device == torch.device("node:1")
    assert made[2] == "x" * (1 << 21)
    del made
    dt.run(int, node=1)  # it begins when all has left the node: what is being sent counts, and the script has it first
    assert torch.node.memory_allocated("node:1") == before


@pytest.mark.parametrize(
    "call",
    [
        partial(stats, 1.0),
        lambda: stats(),
    ],
    ids=["annotated", "named"],
)
def test_a_dataclass_is_made_of_its_fields(call: Any) -> None:
    kit.RAN.clear()
    made = dt.run(call, node=1, returns=(Stats, Point))
    assert not kit.RAN, "no line of the class was run here"
    assert type(made) is Stats
    assert (made.loss, made.steps, made.total) == (1.0, 2, 2.0)
    assert made.inner[0].x.tolist() == [1, 1]
    assert made.inner[0].y.tolist() == [0, 1, 2]
    kit.RAN.clear()


def test_who_announces() -> None:
    point = Point(1)
    assert dt.run(annotated, node=1) == [Pair(1, 2)]
    assert dt.run(lambda deep: deep["x"][0], {"x": [point]}, node=1) == point
    assert dt.run(partial(lambda p: p, point), node=1) == point
    assert dt.run(Pair, 1, 2, node=1) == Pair(1, 2)
    assert dt.run(lambda p: p, dt.tasks.Each([point, Pair(1)]), node=[0, 1]) == [point, Pair(1)]
    assert dt.submit(lambda: {point: 1}, node=1, returns=dict[Point, int]).result() == {point: 1}
    kit.RAN.clear()


def test_nobody_has_announced_it() -> None:
    with pytest.raises(TypeError, match=r"on node 1: what came is the dataclass value_kit.Point, .*returns=Class"):
        dt.run(lambda: Point(1), node=1)
    with pytest.raises(TypeError, match="names no dataclass"):
        dt.run(lambda: 1, node=1, returns=int)
    with pytest.raises(TypeError, match="is not an exception"):
        dt.run(lambda: 1, node=1, raises=Point)
    with pytest.raises(TypeError, match="__hash__ or __eq__ of its own"):
        dt.run(lambda: {OwnHash(1): 2}, node=1, returns=OwnHash)
    kit.RAN.clear()
    assert dt.run(lambda: 1, node=1) == 1


def test_a_result_is_an_argument_on_its_node() -> None:
    work = dt.submit(lambda: Point(3, np.arange(100_000)), node=1, returns=Point)
    assert dt.submit(lambda p: (p.x, int(p.y.sum())), work, node=1).result() == (3, 4999950000)
    assert work.result().x == 3


def test_announced_exceptions_are_raised_as_what_they_are() -> None:
    kit.RAN.clear()
    for wait in (
        lambda: dt.run(lambda: raising(Broken(3, where="here")), node=1, raises=Broken),
        lambda: dt.run(lambda: raising(Broken(3, where="here")), node=[0, 1], raises=[Broken]),
        lambda: dt.submit(lambda: raising(Broken(3, where="here")), node=1, raises=Broken).result(),
    ):
        with pytest.raises(Broken) as caught:
            wait()
        assert not kit.RAN
        assert (str(caught.value), caught.value.code, caught.value.where) == ("broken 3", 3, "here")
        notes = "\n".join(caught.value.__notes__)
        assert "failed: <lambda>() on node" in notes
        assert "in raising" in notes
    with pytest.raises(NoFile) as found:
        dt.run(lambda: raising(NoFile(2, "no", "/x")), node=1, raises=NoFile)
    assert (found.value.errno, found.value.filename) == (2, "/x")


def point_or_broken(x: int) -> Any:
    return Point(x) if x % 2 == 0 else raising(Broken(x, where="here"))


def test_map_announces_for_all_its_calls() -> None:
    kit.RAN.clear()
    assert list(dt.map(lambda x: Point(x), [1, 2], returns=Point)) == [Point(1), Point(2)]
    kit.RAN.clear()
    assert list(dt.map(lambda p: p, [Point(1), Pair(2)], per_node=2)) == [Point(1), Pair(2)]
    assert list(dt.map(annotated_for, [3, 4])) == [Pair(3, Point(3)), Pair(4, Point(4))]
    kit.RAN.clear()
    results = dt.map(point_or_broken, [2, 3], returns=[Point], raises=Broken)
    assert next(results).x == 2
    with pytest.raises(Broken) as caught:
        next(results)
    assert (caught.value.code, caught.value.where) == (3, "here")
    assert not kit.RAN
    with pytest.raises(TypeError, match=r"what came is the dataclass value_kit\.Point, .*returns=Class"):
        list(dt.map(lambda x: Point(x), [1]))
    with pytest.raises(TypeError, match="names no dataclass"):
        dt.map(pow, [1], [2], returns=int)
    with pytest.raises(dt.errors.RemoteError, match=r"value_kit\.Broken: broken 1"):
        list(dt.map(point_or_broken, [1], returns=Point))
    assert list(dt.map(pow, [2], [3])) == [8]


class Counter:
    """Has methods that say what they return, and some that do not."""

    def __init__(self, start: int) -> None:
        if start < 0:
            raise Broken(start, where="init")
        self.count = start

    def stats(self) -> Stats | Point:
        return stats(self.count)

    def history(self) -> list[Pair]:
        return [Pair(k, torch.full((2,), float(k))) for k in range(self.count)]

    def point(self, x: Any) -> Any:
        return x if isinstance(x, Point) else Point(self.count)

    def fail(self) -> None:
        raise Broken(self.count, where="here")

    def itself(self) -> Counter:
        self.count += 1
        return self


@dataclasses.dataclass
class Weights:
    """An actor that is a dataclass: what it is made of can come back."""

    weight: torch.Tensor
    steps: int = 0

    def step(self) -> Weights:
        self.weight += 1
        self.steps += 1
        return self


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Pair:
        return Pair(x + 1, x * 2)


def test_the_methods_of_an_actor_announce_and_so_does_its_maker() -> None:
    actor = dt.actor(Counter, 2, node=1)
    kit.RAN.clear()
    made, history = actor.stats().result(), actor.history().result()
    given = actor.point(Point(7, "y")).result()  # announced by the argument
    assert kit.RAN == ["__post_init__"], "of this line's own Point, and of nothing that came"
    assert (type(made), made.loss, made.inner[0].x.device) == (Stats, 2, torch.device("node:1"))
    assert [pair.second.tolist() for pair in history] == [[0, 0], [1, 1]]
    assert given == Point(7, "y")
    with pytest.raises(TypeError, match=r"Counter\.point\(\) on node 1: .*Point, .* if dt\.actor has named the class"):
        actor.point(0).result()
    with pytest.raises(dt.errors.RemoteError, match=r"value_kit\.Broken: broken 2") as other:
        actor.fail().result()
    assert "raises=[...] in dt.actor" in other.value.__notes__[-1]
    net = dt.actor(Net, node=1)(torch.ones(1)).result()
    assert (type(net), net.first.item(), net.second.item()) == (Pair, 2, 2)

    named = dt.actor(Counter, 5, node=1, returns=Point, raises=[Broken])
    assert named.point(0).result() == Point(5)
    with pytest.raises(Broken) as caught:
        named.fail().result()
    assert (caught.value.code, caught.value.where) == (5, "here")
    assert "Counter.fail() on node 1" in "".join(caught.value.__notes__)
    assert actor.stats().result().steps == 2


def test_a_method_that_returns_its_object() -> None:
    plain = dt.actor(Counter, 2, node=1)
    for _ in range(2):
        with pytest.raises(
            TypeError, match=r"Counter\.itself\(\) returned the actor's object, .*; return None, or what"
        ):
            plain.itself().result()
    assert plain.stats().result().loss == 4  # it has run each time
    actor = dt.actor(Weights, torch.zeros(2), node=1)
    first, second = actor.step().result(), actor.step().result()
    assert [(type(each), each.steps, each.weight.tolist()) for each in (first, second)] == [
        (Weights, 1, [1, 1]),  # a copy, of then
        (Weights, 2, [2, 2]),
    ]
    first.weight.zero_()
    assert actor.step().result().weight.tolist() == [3, 3]


def test_an_announced_exception_of_init_is_raised_by_ready_and_by_each_call() -> None:
    kit.RAN.clear()
    actor = dt.actor(Counter, -1, node=1, raises=Broken)
    for work in (actor.stats(), actor.ready, actor.stats(), actor.close()):
        with pytest.raises(Broken) as caught:
            work.result()
        assert (caught.value.code, caught.value.where) == (-1, "init")
    assert not kit.RAN
    other = dt.actor(Counter, -1, node=1)
    for work in (other.ready, other.stats()):
        with pytest.raises(dt.errors.RemoteError, match=r"value_kit\.Broken: broken -1") as told:
            work.result()
        assert sum("raises=" in note for note in told.value.__notes__) == 1
    for wrong, says in (({"returns": int}, "names no dataclass"), ({"raises": Point}, "is not an exception")):
        with pytest.raises(TypeError, match=says):
            dt.actor(Counter, 1, node=1, **wrong)


def test_others_are_remote_errors_that_say_what_to_do() -> None:
    with pytest.raises(dt.errors.RemoteError, match=r"value_kit\.Broken: broken 3") as caught:
        dt.run(lambda: raising(Broken(3)), node=1)
    assert "raises=" in caught.value.__notes__[-1]
    kit.RAN.clear()


def _object(kind: str, name: str, parts: Any) -> bytes:
    return bytes(4) + msgspec.msgpack.encode(msgspec.msgpack.Ext(16, msgspec.msgpack.encode([kind, name, parts])))


_FIELDS = {"loss": 1.0, "steps": 1, "inner": None, "total": 0.0}
SAID: dict[str, tuple[bytes, type[Exception]]] = {
    "another class": (_object("dataclass", "value_kit.Telling", [{}]), TypeError),
    "a class of Python's": (_object("dataclass", "subprocess.Popen", [{"args": "x"}]), TypeError),
    "a field that is none": (_object("dataclass", "value_kit.Stats", [{**_FIELDS, "x": 1}]), dt.DisttensorError),
    "a million fields": (
        _object("dataclass", "value_kit.Stats", [{f"{i:x}": 0 for i in range(100_000)}]),
        dt.DisttensorError,
    ),
    "__class__": (_object("dataclass", "value_kit.Stats", [{**_FIELDS, "__class__": 1}]), dt.DisttensorError),
    "a tensor that is none": (b"\1\0\0\0\0\0\0\0", dt.DisttensorError),
}


@pytest.mark.fault(34)
@pytest.mark.parametrize("name", SAID)
def test_a_node_that_was_taken_over_makes_nothing_of_it(name: str) -> None:
    data, error = SAID[name]
    kit.RAN.clear()
    with pytest.raises((TypeError, dt.DisttensorError)):  # it answers so already
        dt.run(hostile_workers.answer_with, data, node=1, returns=Stats)
    with pytest.raises(error):
        dt.run(stats, node=1, returns=Stats)
    assert not kit.RAN
    assert dt.run(annotated, node=0) == [Pair(1, 2)]


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    "attributes", [{"retry": 1}, {"__class__": 1}, {"add_note": 1}, {f"{i:x}": 0 for i in range(1000)}], ids=str
)
def test_an_exception_that_no_honest_node_has_is_a_remote_error(attributes: dict[str, Any]) -> None:
    kit.RAN.clear()
    dt.run(hostile_workers.fail_with, _object("exception", "value_kit.Broken", [[], attributes, []]), node=0)
    with pytest.raises(dt.errors.RemoteError) as caught:
        dt.run(lambda: 1 / 0, node=0, raises=Broken)
    assert "can't be raised as what it is" in caught.value.__notes__[-1]
    assert not kit.RAN
