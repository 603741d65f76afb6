"""``dt.map``, ``dt.tasks.share`` and ``dt.tasks.here``: many items on nodes, what they share, and where they are.

The cases of torch-ipc's test/test_map.lua, where ``ipc.map(n, fn, x):join()`` is ``list(dt.map(fn, [x] * n))``:

| theirs | here |
|---|---|
| testSingle, testSingleWithN, testMultiple, testMultipleWithN | test_one_value_and_several_from_each_call |
| testNil | test_none_goes_in_and_comes_back |
| testErrors, testMoreErrors | test_an_error_of_any_call_is_raised |
| testUpvalueError | test_a_function_has_globals_of_its_own_and_its_closure; theirs refused closures |
| testCheckErrors | test_errors_are_seen_while_others_run_which_can_still_be_joined |
| testLuaCheckStack | test_a_thousand_calls; theirs were as many threads, and about the size of Lua's stack |
| testLastArg | test_a_call_knows_which_one_it_is |
| testBigArguments, testBigReturns | test_large_tables_in_and_out |
| testFunctionMapId | test_a_table_of_all_kinds_beside_the_number |

``map_extended``, a function for set-up that may have no closure, has no counterpart: modules are imported, and
``dt.tasks.share`` sends once what all calls need.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from began import Began, tell
from doors import Door, until
from limits import HANG

import disttensor as dt


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with dt.init_master_worker(nodes=3, threads=1):
        # connections are made at first use: have them before the tests look for leaks
        dt.run(torch.distributed.get_rank, node=[0, 1, 2], distributed=True)
        lock = dt.tasks.Lock()
        for node in range(3):
            torch.ones(1 << 14).to(f"node:{node}").cpu()
            dt.run(with_lock, lock, node=node)
        yield


def with_lock(lock: dt.tasks.Lock) -> None:
    with lock:
        pass


def square(x: int) -> int:
    return x * x


def refuse(x: int) -> int:
    if x == 3:
        raise ValueError(f"not {x}")
    return x


def pid(_: Any) -> int:
    return os.getpid()


def loop_once(item: tuple[int, int]) -> int:
    """Loops for ever, unless nobody listens any more."""
    try:
        return loop_if(item)
    except ConnectionRefusedError:
        return item[0]


def loop_if(item: tuple[int, int]) -> int:
    number, port = item
    if port:
        tell(port)
        while True:
            pass
    return number


def fails_when_cancelled(item: tuple[int, int]) -> int:
    try:
        return loop_if(item)
    except KeyboardInterrupt:
        raise ValueError("nobody asked for it") from None


@pytest.mark.row("I20")
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("per_node", [1, 2])
def test_results_are_those_of_the_built_in(ordered: bool, per_node: int) -> None:
    for n in (0, 1, 3, 20):
        found = list(dt.map(pow, range(n), itertools.repeat(2), ordered=ordered, per_node=per_node))
        assert (found if ordered else sorted(found)) == list(map(pow, range(n), itertools.repeat(2)))
    assert set(dt.map(pid, range(12), nodes=[1, 2], ordered=ordered)) == {dt.run(os.getpid, node=k) for k in (1, 2)}


@pytest.mark.row("I20")
def test_results_keep_the_order_of_items_whichever_ends_first() -> None:
    """The first item ends when the third does, which begins only once the script has the result of the second."""
    with dt.tasks.Channel() as gate:

        def in_turn(item: int) -> Any:
            return gate.get() if item == 0 else gate.put("opened") if item == 2 else item

        assert list(dt.map(in_turn, range(3), nodes=[0, 1])) == ["opened", 1, None]
        assert next(iter(dt.map(in_turn, range(3), nodes=[0, 1], ordered=False))) == 1


@pytest.mark.row("I20")
def test_tensors_and_many_values_come_back() -> None:
    x = torch.arange(6.0)
    for made, (low, high), nothing in dt.map(lambda t: (t * 2, (t.min().item(), "high"), None), [x, x, x]):
        assert torch.equal(made.cpu(), x * 2)
        assert ((low, high), nothing) == ((0.0, "high"), None)
    total = sum(part.cpu() for part in dt.map(torch.square, [x.to("node:0"), x.to("node:1")]))
    assert torch.equal(total, 2 * x * x)


@pytest.mark.parametrize("ordered", [True, False])
def test_items_are_taken_as_their_turn_comes(ordered: bool) -> None:
    taken = itertools.count()
    results = dt.map(square, taken, ordered=ordered)
    first = [next(results) for _ in range(50)]
    if ordered:
        assert first == [k * k for k in range(50)]
    results.close()  # type: ignore[attr-defined]
    assert next(taken) <= 50 + 2 * 3


@pytest.mark.row("I20")
def test_the_first_error_is_raised_and_the_rest_is_cancelled() -> None:
    results = dt.map(refuse, itertools.count())
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="not 3") as raised:
        next(results)
    assert list(results) == []
    assert any("test_map.py" in note for note in raised.value.__notes__)
    begun = threading.Event()
    with Began(begun.set) as port:  # one that never ends by itself
        results = dt.map(loop_if, [(0, 0), (1, port)])
        assert next(results) == 0
        assert begun.wait(HANG)
        results.close()  # type: ignore[attr-defined]
    assert [dt.run(square, 3, node=node) for node in range(3)] == [9] * 3

    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        list(dt.map(square, broken()))
    with pytest.raises(TypeError, match="can't be sent"):
        list(dt.map(square, [threading.Lock()]))
    dt.synchronize()


@pytest.mark.parametrize("per_node", [1, 2])
def test_errors_of_what_is_cancelled_are_raised_nowhere_and_those_of_its_arguments_are(per_node: int) -> None:
    begun = threading.Event()
    with Began(begun.set) as port:
        results = dt.map(fails_when_cancelled, [(0, 0), (1, port)], per_node=per_node)
        assert next(results) == 0
        assert begun.wait(HANG)
        results.close()  # type: ignore[attr-defined]
    dt.synchronize()
    failed = torch.ones(3, device="node:1").index_select(0, torch.tensor([7], device="node:1"))
    results = dt.map(len, ["first", failed], nodes=[0, 1], per_node=per_node)
    assert next(results) == 5
    results.close()  # type: ignore[attr-defined]
    with pytest.raises(IndexError, match="out of range"):
        dt.synchronize()


def step(what: Any) -> int:
    if isinstance(what, tuple):
        what[0](what[1])
    return 1


def test_an_error_of_an_argument_is_raised_nowhere_while_its_turn_has_not_come() -> None:
    """The item ends before the first one: that was seen when another one begins in its place. The map is dropped before
    its turn, so whoever asks next raises the error."""
    failed = torch.ones(3, device="node:1").index_select(0, torch.tensor([7], device="node:1"))
    with Door() as door, Began(door.open) as port:
        results = dt.map(step, [(until, door.port), failed, (tell, port)], nodes=[0, 1])
        assert next(results) == 1
        results.close()  # type: ignore[attr-defined]
    with pytest.raises(IndexError, match="out of range"):
        dt.synchronize()


def test_a_work_that_has_failed_and_is_asked_whether_it_was_cancelled_has_not_raised_its_error() -> None:
    failed = torch.ones(3, device="node:1").index_select(0, torch.tensor([7], device="node:1"))
    work = dt.submit(step, failed, node=1)
    with contextlib.suppress(IndexError):
        while not work.is_completed():
            dt.run(square, 2, node=1)
    assert not work.cancelled()
    with pytest.raises(IndexError, match="out of range"):
        dt.synchronize()


class Verdict(Exception):
    pass


def gives(error: BaseException) -> BaseException:
    return error


@pytest.mark.parametrize("ordered", [True, False])
def test_an_error_that_a_function_returns_is_its_result(ordered: bool) -> None:
    found = list(dt.map(gives, [Verdict("a"), Verdict("b")], returns=Verdict, ordered=ordered))
    assert [type(error) for error in found] == [Verdict] * 2
    assert {error.args for error in found} == {("a",), ("b",)}


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: dt.map(square), TypeError, "at least one iterable"),
        (lambda: dt.map(3, [1]), TypeError, "3 can't be called"),
        (lambda: dt.map(square, [1], per_node=0), ValueError, "per_node is 0, and has to be 1 at least"),
        (lambda: dt.map(square, [1], retries=-1), ValueError, "retries is -1"),
        (lambda: dt.map(square, [1], per_node="2"), TypeError, "per_node is a number, not '2'"),
        (lambda: dt.map(square, [1], nodes=[9]), ValueError, "9"),
        (lambda: dt.map(square, 5), TypeError, "iterable"),
    ],
)
def test_mistakes_are_said_at_once(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


class Counted:
    """Counts how often it is pickled; on a node it is a list."""

    pickled = 0

    def __reduce__(self) -> Any:
        Counted.pickled += 1
        return list, (["shared", 2, 3],)


def kept() -> int:
    """Counts what this process has of such lists."""
    gc.collect()
    lists = [found for found in gc.get_objects() if type(found) is list and found and type(found[0]) is str]
    return sum(found[0] == "shared" for found in lists)


@pytest.mark.row("I25")
def test_what_is_shared_is_serialised_once_and_sent_once_to_each_node() -> None:
    ref = dt.tasks.share(Counted(), nodes=[0])
    assert [dt.run(kept, node=node) for node in range(3)] == [1, 0, 0]
    assert [dt.run(len, ref, node=k % 2) for k in range(6)] == [3] * 6
    assert Counted.pickled == 1
    dt.run(list.append, ref, 4, node=0)  # the node's own copy
    assert dt.run(lambda named: named["a"][0], {"a": [ref]}, node=0) == ["shared", 2, 3, 4]
    assert dt.run(list, ref, node=1) == ["shared", 2, 3]
    assert list(dt.map(lambda k, table: table[k], range(3), [ref] * 3)) == ["shared", 2, 3]
    tensors = dt.tasks.share([torch.ones(3), "text"])
    assert dt.run(lambda pair: pair[0].sum().item(), tensors, node=1) == 3
    assert dt.submit(lambda pair: pair[0] * 2, tensors, node=2, beside=True).result().sum().item() == 6
    assert isinstance(ref.value, Counted)
    del ref, tensors
    dt.synchronize()
    assert [dt.run(kept, node=node) for node in range(3)] == [0, 0, 0]
    with pytest.raises(TypeError, match="can't be sent to node 0"):
        dt.tasks.share(threading.Lock(), nodes=[0])


def place() -> tuple[Any, ...]:
    here = dt.tasks.here()
    return here.node, str(here.device), here.host, here.coordinates


def test_a_function_knows_where_it_is() -> None:
    host = dt.nodes()[0]["host"]
    assert dt.run(place, node=2) == (2, "cpu", host, {})
    assert dt.submit(place, node=1, beside=True).result() == (1, "cpu", host, {})
    mesh = dt.mesh(dp=3, tp=1)
    expected = [(k, "cpu", host, {"dp": k, "tp": 0}) for k in range(3)]
    assert dt.run(place, node=mesh) == dt.submit(place, node=mesh).result() == expected
    assert dt.run(lambda: dt.tasks.here()["dp"], node=mesh, distributed=True) == [0, 1, 2]
    assert dt.run(place, node=2) == (2, "cpu", host, {})
    with pytest.raises(KeyError, match=r"no dim 'dp'.*not run on a mesh"):
        dt.run(lambda: dt.tasks.here()["dp"], node=0)
    assert dt.tasks.here().node is None
    assert dt.tasks.here().coordinates == {}


@pytest.mark.parametrize(
    "ask",
    [
        lambda: dt.run(len, []),
        lambda: dt.submit(len, []),
        lambda: list(dt.map(square, [1])),
        lambda: dt.nodes(),
        lambda: dt.mesh(dp=2),
        lambda: dt.tasks.share(1),
        lambda: dt.tasks.Executor(),
    ],
)
def test_what_it_asks_of_the_session_is_refused_in_words_that_are_right_there(ask: Any) -> None:
    with pytest.raises(dt.DisttensorError, match=r"function runs on node 1, which has no session.*dt\.tasks\.here\(\)"):
        dt.run(ask, node=1)


def test_devices_of_nodes_are_refused_there() -> None:
    with pytest.raises(RuntimeError, match=r"^functions on a node have local tensors, .*\(Expected one of"):
        dt.run(lambda: torch.zeros(2, device="node:1"), node=1)


GLOBAL: int | None = None


def same(*args: Any) -> Any:
    return args if len(args) > 1 else args[0]


def boom_at(number: int) -> int:
    if number == 1:
        raise ValueError("boom")
    return 42


def own_global() -> int | None:
    return GLOBAL


def set_global() -> int | None:
    global GLOBAL
    GLOBAL = 46
    return own_global()


@pytest.mark.row("I20")
@pytest.mark.parametrize("n", [1, 3])
def test_one_value_and_several_from_each_call(n: int) -> None:
    assert list(dt.map(same, [42] * n)) == [42] * n
    assert list(dt.map(same, ["hi"] * n, [42] * n, [{"k": 2}] * n)) == [("hi", 42, {"k": 2})] * n


def test_none_goes_in_and_comes_back() -> None:
    assert list(dt.map(same, [None], [42])) == [(None, 42)]
    assert list(dt.map(same, [None, 1])) == [None, 1]


@pytest.mark.row("I20")
@pytest.mark.parametrize("calls", [[1], [0, 1], [1, 0]])
def test_an_error_of_any_call_is_raised(calls: list[int]) -> None:
    with pytest.raises(ValueError, match="boom"):
        list(dt.map(boom_at, calls))


@pytest.mark.row("I20")
def test_a_function_has_globals_of_its_own_and_its_closure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "GLOBAL", 32)
    assert list(dt.map(lambda _: own_global(), range(3))) == [None] * 3
    assert dt.run(set_global, node=0) == 46
    assert GLOBAL == 32
    i, j = 1, 2
    assert list(dt.map(lambda k: i + j + k, [1])) == [4]


@pytest.mark.row("I20")
def test_errors_are_seen_while_others_run_which_can_still_be_joined() -> None:
    with Door() as door:
        works = [dt.submit(boom_at, 1, node=0), dt.submit(until, door.port, node=1)]
        first = next(dt.futures.as_completed(works))
        assert first is works[0]
        assert isinstance(first.exception(), ValueError)
        assert not works[1].is_completed()
        door.open()
        assert works[1].result() == "!"


def test_a_thousand_calls() -> None:
    assert sum(dt.map(lambda _: 1, range(1000), per_node=2)) == 1000


@pytest.mark.row("I20")
def test_a_call_knows_which_one_it_is() -> None:
    assert list(dt.map(same, ["hi"] * 4, range(1, 5))) == [("hi", k) for k in range(1, 5)]
    assert dt.run(lambda _: dt.tasks.here().node, "hi", node=[2, 0, 1]) == [2, 0, 1]


def test_large_tables_in_and_out() -> None:
    data = list(range(1000))
    assert list(dt.map(list.__getitem__, [data] * 3, [0, 500, 999])) == [0, 500, 999]
    assert list(dt.map(lambda _: list(range(1000)), range(3))) == [data] * 3


@pytest.mark.row("I20")
def test_a_table_of_all_kinds_beside_the_number() -> None:
    there = torch.zeros(10, device="node:1")
    options = {
        "asts": {f"asdfasdfa{k}": k for k in range(1000)}, "verbose": 3232, "mode": "string", "barrier": True,
        "mutex": dt.tasks.Lock(), "partitions": torch.arange(10), "there": there, "report_every": 200,
    }  # fmt: skip

    def use(opt: dict[str, Any], number: int) -> tuple[Any, ...]:
        with opt["mutex"]:
            opt["there"][number] = 1  # the node's own tensor, and no copy
        kinds = [type(opt[name]) for name in ("asts", "verbose", "mode", "barrier", "report_every")]
        named = kinds == [dict, int, str, bool, int] and type(number) is int
        return named, opt["asts"]["asdfasdfa999"], opt["partitions"].sum().item(), (GLOBAL or 3) + 5

    assert list(dt.map(use, [options] * 3, range(3), nodes=[1])) == [(True, 999, 45, 8)] * 3
    assert there.tolist() == [1.0] * 3 + [0.0] * 7


@pytest.mark.row("I20")
def test_a_node_that_is_lost_is_told_and_its_items_go_to_others_if_asked() -> None:
    begun = threading.Event()
    with Began(begun.set) as port:  # its second connection is refused: the item given again ends
        results = dt.map(loop_once, [(k, port if k == 2 else 0) for k in range(9)], retries=1)
        assert next(results) == 0
        assert begun.wait(HANG)
    there = [node["pid"] for node in dt.nodes()]
    os.kill(there[2], 9)  # where item 2 is
    assert list(results) == list(range(1, 9))
    with pytest.raises(dt.NodeLost, match="node 2"):
        list(dt.map(square, range(9), nodes=[2]))
    begun.clear()
    with Began(begun.set) as port:
        results = dt.map(loop_if, [(0, port), (1, 0)], nodes=[1])
        thread = threading.Thread(target=lambda: (begun.wait(HANG), os.kill(there[1], 9)))
        thread.start()
        with pytest.raises(dt.NodeLost) as raised:
            next(results)
        thread.join()
    assert any("item 0 was there" in note and "retries=1" in note for note in raised.value.__notes__)
    assert list(dt.map(square, range(3))) == [0, 1, 4]
