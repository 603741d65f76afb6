"""What can't come back from a node ends in a sentence, by whichever way it was called, and harms nothing.

Each value of ``VALUES`` is returned, or raised, by a function for each of ``WAYS``. The error says which function, on
which node, from which line of the script, what the value is and what to do; the node goes on, nothing is unpickled, and
no line of a class is run in the script.
"""

from __future__ import annotations

import collections
import dataclasses
import pickle
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import value_kit as kit
from value_kit import Broken, Pair, Point

import disttensor as dt


class Doer:
    """Returns what it is given the maker of."""

    def do(self, make: Callable[[], Any]) -> Pair | Point:
        return make()  # type: ignore[no-any-return]


def call(make: Callable[[], Any]) -> Pair | Point:
    return make()  # type: ignore[no-any-return]


class Ways:
    """The ways to have a function run on a node."""

    def __init__(self) -> None:
        self.actor = dt.actor(Doer, node=1, raises=[Broken])
        self.executor = dt.tasks.Executor(raises=[Broken])

    def run(self, make: Any) -> Any:
        return dt.run(call, make, node=1, raises=[Broken])

    def several(self, make: Any) -> Any:
        return dt.run(call, make, node=[0, 1], raises=[Broken])[1]

    def submit(self, make: Any) -> Any:
        return dt.submit(call, make, node=1, raises=[Broken]).result()

    def beside(self, make: Any) -> Any:
        return dt.submit(call, make, node=1, beside=True, raises=[Broken]).result()

    def map(self, make: Any) -> Any:
        return next(dt.map(call, [make], raises=[Broken]))

    def method(self, make: Any) -> Any:
        return self.actor.do(make).result()

    def pool(self, make: Any) -> Any:
        return self.executor.submit(call, make).result()


WAYS = ["run", "several", "submit", "beside", "map", "method", "pool"]


@pytest.fixture(scope="module")
def ways() -> Iterator[Ways]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was unpickled")

    with dt.init_master_worker(nodes=2, threads=1), pytest.MonkeyPatch.context() as patch:
        for node in (0, 1):
            torch.ones(1 << 14, device=f"node:{node}").cpu()  # the data channel connects at the first transfer
        made = Ways()
        for name in ("loads", "load", "Unpickler", "_Unpickler"):
            patch.setattr(pickle, name, refuse)
        with made.executor:
            assert made.executor.submit(int).result() == 0  # its thread is there
            yield made
        made.actor.close().wait()


class Plain: ...


@dataclasses.dataclass
class Unannounced:
    x: Any = 1


class UnannouncedError(Exception): ...


class Text(str):
    __slots__ = ()


def itself() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(10_000):
        made = [made]
    return made


def numbers() -> Iterator[int]:
    yield 1


async def later() -> int:
    return 1


async def stream() -> AsyncIterator[int]:
    yield 1


# Functions by name, and no lambdas: a lambda goes with the classes that it names, which announces them.


def unannounced() -> Any:
    return Unannounced()


def nested_one() -> Any:
    return [{1: Unannounced()}]


def in_an_announced_one() -> Any:
    return Point(Unannounced())


def unannounced_error() -> Any:
    return UnannouncedError(1)


def raise_unannounced() -> None:
    raise UnannouncedError("so")


def lacking() -> Any:
    made = Unannounced()
    del made.x
    return made


def more() -> Any:
    made = Unannounced()
    made.y = 1  # type: ignore[attr-defined]
    return made


def namesake() -> Any:
    return collections.namedtuple("Pair", "first second third", module=Pair.__module__)(1, 2, 3)


def freed(left: int = 0) -> torch.Tensor:
    x = torch.ones(4)
    x.untyped_storage().resize_(left)
    return x


def raising(error: BaseException) -> None:
    raise error


def file() -> Any:
    return open("/dev/null")


def with_a_file() -> Broken:
    error = Broken(1)
    error.args = (file(),)
    return error


def with_a_tensor() -> Broken:
    error = Broken(1)
    error.args = (torch.ones(1),)
    return error


_TO_DO = r"; (for x )?return .*only tensors and plain data.* come back"
_NAMED = r" was not announced; objects of your classes come back if .* has named the class: returns=Class"
_NONE = "a .*Tensor of shape .* has no memory: .*; return a tensor that has values"
_STAYS = r".*it can't be raised as what it is: it has "

#: What makes the value, the error, and what this says.
VALUES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a lambda": (lambda: lambda: 1, TypeError, "returned a builtins.function" + _TO_DO),
    "an open file": (file, TypeError, r"a _io.TextIOWrapper; for x return x.read\(\)"),
    "an object": (Plain, TypeError, r"a [\w.]*\.Plain" + _TO_DO),
    "a class": (lambda: Plain, TypeError, "a builtins.type" + _TO_DO),
    "a module": (lambda: pickle, TypeError, "a builtins.module" + _TO_DO),
    "a nested object": (lambda: {"a": [1, {"b": (Plain(),)}]}, TypeError, r"a [\w.]*\.Plain" + _TO_DO),
    "a key": (lambda: {Plain(): 1}, TypeError, r"a [\w.]*\.Plain" + _TO_DO),
    "a str of its own class": (lambda: Text("x"), TypeError, r"a [\w.]*\.Text; for x return str\(x\)"),
    "a generator": (numbers, TypeError, r"a builtins.generator; for x return list\(x\)"),
    "a coroutine": (later, TypeError, r"a builtins.coroutine; for x return asyncio.run\(x\)"),
    "an async generator": (stream, TypeError, "a builtins.async_generator" + _TO_DO),
    "a dataclass": (unannounced, TypeError, r"what came is the dataclass [\w.]*\.Unannounced, which" + _NAMED),
    "a nested dataclass": (nested_one, TypeError, r"the dataclass [\w.]*\.Unannounced, which" + _NAMED),
    "a dataclass in one": (in_an_announced_one, TypeError, r"dataclass [\w.]*\.Unannounced, which" + _NAMED),
    "a field is missing": (lacking, TypeError, r"a [\w.]*\.Unannounced has no value for its field 'x'"),
    "an attribute is no field": (more, TypeError, "has the attribute 'y', which is no field .* make it a field"),
    "a namesake": (namesake, dt.DisttensorError, r"a value_kit\.Pair has 2 values, not 3; .* make their names differ"),
    "an exception": (unannounced_error, TypeError, r"the exception [\w.]*\.UnannouncedError, which" + _NAMED),
    "itself": (itself, ValueError, "returned what is more than 100 deep; does it contain itself"),
    "too deep": (deep, ValueError, "returned what is more than 100 deep"),
    "a huge str": (lambda: "x" * (65 << 20), ValueError, r"returned 681574\d\d bytes, and 64 MiB .*; make it some"),
    "a huge list": (lambda: ["x" * (1 << 20)] * 65, ValueError, r"68157\d\d\d bytes, and 64 MiB .*; make it"),
    "a __reduce__": (kit.Reducing, TypeError, r"a value_kit\.Reducing" + _TO_DO),
    "a lying __class__": (kit.Lying, TypeError, r"a value_kit\.Lying" + _TO_DO),
    "angry methods": (kit.Angry, TypeError, r"a value_kit\.Angry" + _TO_DO),
    "an angry metaclass": (kit.of_angry_kind, TypeError, r"a value_kit\.OfAngry" + _TO_DO),
    "an angry factory": (lambda: collections.defaultdict(kit.Angry()), TypeError, "a defaultdict of .* return dict"),
    "an exit while it is looked at": (kit.Exiting, dt.DisttensorError, r"sys.exit\(.*\); the node goes on"),
    "an array of objects": (lambda: np.array([Plain()]), TypeError, "Python objects; for x return x.tolist"),
    "a sparse tensor": (lambda: torch.eye(3).to_sparse(), TypeError, r"torch.sparse_coo tensor .*x.to_dense\(\)"),
    "a meta tensor": (lambda: torch.ones(3, device="meta"), TypeError, _NONE),
    "a freed tensor": (freed, TypeError, _NONE),
    "a freed tensor in a list": (lambda: [torch.ones(1), freed(8)], TypeError, _NONE),
    "raises an unannounced one": (raise_unannounced, dt.errors.RemoteError, r"\.UnannouncedError: so.*raises=\["),
    "raises one with a file": (lambda: raising(with_a_file()), dt.errors.RemoteError, "value_kit.Broken: .*TextIO"),
    "raises one with a tensor": (lambda: raising(with_a_tensor()), dt.errors.RemoteError, "value_kit.Broken: .*tensor"),
    "raises an angry one": (lambda: raising(kit.AngryError()), dt.errors.RemoteError, r"\.AngryError: .*can't be had"),
    "raises an exit": (lambda: raising(SystemExit(3)), dt.DisttensorError, r"sys.exit\(3\); the node goes on"),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_it_ends_in_a_sentence_and_harms_nothing(name: str, ways: Ways) -> None:
    make, kind, says = VALUES[name]
    for way in WAYS:
        go = getattr(ways, way)
        kit.RAN.clear()
        with pytest.raises(kind) as caught:
            go(make)
        text = "\n".join([str(caught.value), *caught.value.__notes__])
        assert re.search(says, text, re.DOTALL), (way, text)
        function, line = "Doer.do" if way == "method" else "call", rf"{re.escape(__file__)}:\d+ in Ways\.{way}"
        where = rf"failed: {function}\(\) on node [01] \(host .*, pid \d+\)\n  issued: {line}"
        assert re.search(where, text), (way, text)
        assert not kit.RAN, way
        assert go(int) == 0, way
    assert all(node["alive"] for node in dt.nodes())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("make", "says"),
    [(with_a_file, "it has a _io.TextIOWrapper"), (with_a_tensor, "it has tensors")],
    ids=["file", "tensor"],
)
def test_why_an_announced_exception_is_not_raised_as_it_is(make: Any, says: str, way: str, ways: Ways) -> None:
    with pytest.raises(dt.errors.RemoteError) as caught:
        getattr(ways, way)(lambda: raising(make()))
    assert f"it can't be raised as what it is: {says}" in caught.value.__notes__[-1]


def free(x: torch.Tensor) -> None:
    x.untyped_storage().resize_(0)


@pytest.mark.parametrize("numel", [4, 1 << 20])
def test_what_a_function_has_freed_does_not_leave_and_the_connection_stays(numel: int, ways: Ways) -> None:
    for leave in (lambda x: x.cpu(), lambda x: x.to("node:0").cpu()):
        x, other = torch.ones(numel, device="node:1"), torch.ones(2, device="node:1")
        dt.run(free, x, node=1)
        with pytest.raises(TypeError, match="a Tensor without memory cannot travel"):
            leave(x)
        assert leave(other).tolist() == [1, 1]
    dt.synchronize()
