"""Pickles that are kept: a function on a node is what it is here at the time of the call, whatever has changed since
the last one, and is pickled once while nothing has. The function itself, called here, gives the expected result."""

from __future__ import annotations

import importlib
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from opcodes import opcodes, without_a_collector

import disttensor as dt
from disttensor.session import current
from disttensor.tasks import kept_pickles, sending
from disttensor.tasks.plain import DEEPEST, WIDEST, is_plain
from disttensor.tasks.reloaded_modules import ReloadedModules

#: How many functions are made, and how often each is called.
FUNCTIONS, CALLS = 300, 7
#: Values of which some are equal, and none is another one.
VALUES = (0, 1, True, 1.0, "1", b"1", None, (1, 2), (1, 2.0), (True, ("a", None)), 2**80, 1 + 0j, frozenset({1}))


@pytest.fixture(scope="module", autouse=True)
def node() -> Iterator[None]:
    with dt.init_master_worker(nodes=1, threads=1):
        yield


@pytest.fixture(autouse=True)
def no_ipython(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have imported it; then each call compares the code of modules, which its
    %autoreload changes."""
    monkeypatch.delitem(sys.modules, "IPython", raising=False)


def pickles() -> kept_pickles.KeptPickles:
    return current.session().part(kept_pickles.KeptPickles)


def found(fn: Any) -> bool:
    """Returns whether a function's pickle is kept, and would be taken."""
    return pickles().find(fn, cloudpickle.list_registry_pickle_by_value()) is not None


def sent(fn: Any) -> bytes:
    """Returns the pickle of a function as it goes to the node."""
    place = current.session().places.at(0).one
    return sending.pickled_function(fn, place.session, place, sending.KeptAlive(), "it")[0]


def anew(fn: Any) -> bytes:
    place = current.session().places.at(0).one
    return sending.pickled(fn, place, sending.KeptAlive(), "it")


def made(source: str, **names: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the function ``f`` of a source, which goes by value, and its globals."""
    space = {"__name__": "nowhere", **names}
    exec(compile(source, "<made>", "exec"), space)
    return space["f"], space


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def given(self, x: Any) -> Any:
        return x, self.value


Change = Callable[[Any], None]  #: changes something that a function refers to


def a_cell(value: Any) -> tuple[Any, list[Change]]:
    def outer(held: Any) -> tuple[Any, Change]:
        def f(x: Any) -> Any:
            return x, held

        def change(new: Any) -> None:
            nonlocal held
            held = new

        return f, change

    f, change = outer(value)
    f.__module__ = "nowhere"
    return f, [change]


def a_list_in_a_cell(value: Any) -> tuple[Any, list[Change]]:
    f, _ = a_cell(kept := [value])
    return f, [kept.append, lambda new: kept.__setitem__(0, new)]


def a_tuple_with_a_dict(value: Any) -> tuple[Any, list[Change]]:
    f, _ = a_cell((1, kept := {"k": value}))
    return f, [lambda new: kept.__setitem__("k", new)]


def a_global(value: Any) -> tuple[Any, list[Change]]:
    f, space = made("def f(x): return x, g, len([x])", g=value)

    def shadow(new: Any) -> None:
        space["len"] = lambda _: new

    return f, [lambda new: space.__setitem__("g", new), shadow, lambda _: space.pop("len", None)]


def a_global_of_a_function_within(value: Any) -> tuple[Any, list[Change]]:
    f, space = made("def f(x):\n def inner(): return g\n return x, inner()", g=value)
    return f, [lambda new: space.__setitem__("g", new)]


def a_global_that_comes_and_goes(value: Any) -> tuple[Any, list[Change]]:
    f, space = made("def f(x):\n try: return x, g\n except NameError: return x", h=value)
    return f, [lambda new: space.__setitem__("g", new), lambda _: space.pop("g", None)]


def a_helper(value: Any) -> tuple[Any, list[Change]]:
    f, space = made("def h(x, k=0): return x, k, g\ndef f(x): return h(x)", g=value)
    other = made("def f(x, k=0): return 'other', x, k")[0]

    def default(new: Any) -> None:
        space["h"].__defaults__ = (new,)

    def code(new: Any) -> None:
        space["h"].__code__ = other.__code__ if new else (lambda x, k=0: x).__code__

    return f, [lambda new: space.__setitem__("g", new), default, code, lambda _: space.__setitem__("h", other)]


def defaults(value: Any) -> tuple[Any, list[Change]]:
    f, _ = made("def f(x, a=0, *, b=0): return x, a, b, f.__doc__", f=None)
    f.__globals__["f"] = f

    def positional(new: Any) -> None:
        f.__defaults__ = (new,)

    def named(new: Any) -> None:
        f.__kwdefaults__ = {"b": new}

    def document(new: Any) -> None:
        f.__doc__ = repr(new)

    return f, [positional, named, document, lambda new: f.__kwdefaults__.__setitem__("b", new)]


def a_default_that_is_a_list(value: Any) -> tuple[Any, list[Change]]:
    f, _ = made("def f(x, a=[]): return x, list(a)")
    return f, [f.__defaults__[0].append]


def an_attribute(value: Any) -> tuple[Any, list[Change]]:
    f, _ = made("def f(x): return x, f.factor, sorted(f.__dict__)")
    f.factor = value
    return f, [partial(setattr, f, "factor"), lambda new: f.__dict__.__setitem__("other", new)]


def code_of_its_own(value: Any) -> tuple[Any, list[Change]]:
    f, _ = made("def f(x): return x")
    codes = [(lambda x: (x, 1)).__code__, (lambda x: (x, 1.0)).__code__, (lambda x: (x, True)).__code__]
    return f, [lambda _: setattr(f, "__code__", codes[random.Random(repr(_)).randrange(3)])]


def a_partial(value: Any) -> tuple[Any, list[Change]]:
    inner, space = made("def f(x, y, *, z=0): return x, y, z, g", g=value)
    f = partial(inner, value, z=value)
    return f, [lambda new: f.keywords.__setitem__("z", new), lambda new: space.__setitem__("g", new)]


def a_partial_of_a_list(value: Any) -> tuple[Any, list[Change]]:
    kept = [value]
    f = partial(made("def f(x, y): return list(x), y")[0], kept)
    return f, [kept.append]


def a_method(value: Any) -> tuple[Any, list[Change]]:
    holder = Holder(value)
    f, _ = made("def f(x): return held(x)", held=holder.given)
    return f, [partial(setattr, holder, "value")]


def a_bound_method(value: Any) -> tuple[Any, list[Change]]:
    holder = Holder(value)
    return holder.given, [partial(setattr, holder, "value")]


def a_class(value: Any) -> tuple[Any, list[Change]]:
    kind = type("Kind", (), {"value": value, "__module__": "nowhere"})
    f, space = made("def f(x): return x, Kind.value, math.sqrt(4), sqrt(9)", Kind=kind, math=math, sqrt=math.sqrt)
    return f, [partial(setattr, kind, "value"), lambda _: space.__setitem__("sqrt", math.floor)]


KINDS = (
    *(a_cell, a_list_in_a_cell, a_tuple_with_a_dict, a_global, a_global_of_a_function_within),
    *(a_global_that_comes_and_goes, a_helper, defaults, a_default_that_is_a_list, an_attribute, code_of_its_own),
    *(a_partial, a_partial_of_a_list, a_method, a_bound_method, a_class),
)
#: Those of which nothing is ever kept, as no identity tells of a change.
NEVER = {a_list_in_a_cell, a_tuple_with_a_dict, a_default_that_is_a_list, a_partial_of_a_list, a_method, a_bound_method,
         a_class}  # fmt: skip


def test_functions_that_change_between_calls() -> None:
    """300 functions: each call's pickle is that of a pickler that keeps nothing, and does what the function does."""
    draw, kept = random.Random(4), dict.fromkeys(KINDS, 0)
    for number in range(FUNCTIONS):
        kind = KINDS[number % len(KINDS)]
        f, changes = kind(draw.choice(VALUES))
        for call in range(CALLS):
            if call and draw.random() < 0.4:
                draw.choice(changes)(draw.choice(VALUES))
            kept[kind] += found(f)
            data, expected = sent(f), repr(f(call))
            assert data == anew(f), (kind, number, call)
            assert repr(cloudpickle.loads(data)(call)) == expected, (kind, number, call)
            if call % 3 == 0:
                assert repr(dt.submit(f, call, node=0).result()) == expected, (kind, number, call)
    for kind, times in kept.items():
        assert (times == 0) == (kind in NEVER), (kind, times)


def test_a_function_by_name_is_kept_while_its_module_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "kept_by_name.py"

    def write(text: str, when: int) -> None:
        file.write_text(text)
        os.utime(file, (when, when))
        importlib.invalidate_caches()

    write("K = 1\ndef f(): return 'first', K", 1_000_000_000)
    module = importlib.import_module("kept_by_name")
    dt.run(lambda folder: sys.path.insert(0, folder), str(tmp_path), node=0)
    try:
        f = module.f
        assert [dt.run(f, node=0) for _ in range(3)] == [("first", 1)] * 3
        assert found(f)
        # another function has its name: by name the node would run that
        module.f = lambda: "another"
        assert not found(f)
        assert [dt.run(f, node=0) for _ in range(3)] == [f()] * 3 == [("first", 1)] * 3
        assert found(f)
        module.f = f  # and goes by name again
        assert not found(f)
        assert sent(f) == anew(f)
        assert [dt.run(f, node=0) for _ in range(3)] == [("first", 1)] * 3
        # registered by value, it goes with the globals that it has here
        module.K = 2
        cloudpickle.register_pickle_by_value(module)
        try:
            assert dt.run(f, node=0) == f() == ("first", 2)
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        write("K = 3\ndef f(): return 'second', K", 1_000_000_001)
        importlib.reload(module)
        for _ in range(3):
            assert dt.run(module.f, node=0) == module.f() == ("second", 3)
            assert dt.run(f, node=0) == f() == ("first", 3)
        for module.K in (4, 5):  # what was reloaded goes by value
            assert dt.run(module.f, node=0) == module.f() == ("second", module.K)
    finally:
        sys.modules.pop("kept_by_name", None)


def test_what_a_function_may_use_of_a_package_is_imported_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "kept_package").mkdir()
    (tmp_path / "kept_package" / "__init__.py").write_text("")
    (tmp_path / "kept_package" / "part.py").write_text("value = 5")
    package = importlib.import_module("kept_package")
    f, _ = made("def f():\n try: return p.part.value\n except AttributeError: return None", p=package)
    try:
        before = [sent(f) for _ in range(3)]
        assert found(f)
        importlib.import_module("kept_package.part")
        assert not found(f)
        assert sent(f) == anew(f) != before[-1]
    finally:
        for name in ("kept_package", "kept_package.part"):
            sys.modules.pop(name, None)


def test_a_change_while_it_is_pickled_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another thread, between the look at the parts and the pickle."""
    f, space = made("def f(): return g", g=1)
    assert [sent(f) for _ in range(3)]
    assert found(f)
    pickled = sending.pickled

    def late(*args: Any) -> bytes:
        space["g"] = 3
        return pickled(*args)

    space["g"] = 2
    with monkeypatch.context() as patch:
        patch.setattr(sending, "pickled", late)
        assert cloudpickle.loads(sent(f))() == 3
    space["g"] = 2
    assert cloudpickle.loads(sent(f))() == f() == 2


def test_a_functions_state_on_its_node_is_that_of_its_pickle() -> None:
    """Whether a pickle is kept or made anew changes nothing for what the node keeps of a function."""
    source = "def f():\n '{}'\n global n\n n += 1\n return n"
    f, _ = made(source.format("kept"), n=0)
    kept = [dt.run(f, node=0) for _ in range(4)]
    g, _ = made(source.format("made anew"), n=0)
    before = []
    for _ in range(4):
        current.session()._parts.pop(kept_pickles.KeptPickles, None)
        before.append(dt.run(g, node=0))
    assert kept == before
    assert f.__globals__["n"] == 0


def test_tensors_are_never_kept() -> None:
    x = torch.arange(3.0, device="node:0")
    f, _ = made("def f(): return x.sum()", x=x)
    for value in (3.0, 6.0, 12.0, 24.0):
        assert dt.run(f, node=0).item() == value
        assert not found(f)
        x *= 2


def test_functions_that_come_once_are_not_held() -> None:
    import weakref

    f, _ = made("def f(): return 1")
    gone = weakref.ref(f)
    dt.run(f, node=0)
    space = f.__globals__
    del f
    space.clear()
    assert gone() is None


def test_no_more_than_so_many_are_kept() -> None:
    functions = [made("def f(): return k", k=k)[0] for k in range(kept_pickles.KEPT + 5)]
    for f in functions:
        sent(f), sent(f)
    assert len(pickles()._kept) == kept_pickles.KEPT
    assert found(functions[-1])
    assert not found(functions[0])


def test_one_that_changes_each_time_is_given_up_and_one_that_rests_is_not() -> None:
    f, space = made("def f(): return g", g=0)
    for space["g"] in range(1000, 1000 + 2 * kept_pickles.TRIES):
        sent(f)
    for _ in range(3):
        sent(f)
    assert not found(f)
    f, space = made("def f(): return g", g=0)
    for space["g"] in range(1000, 1000 + 2 * kept_pickles.TRIES):
        for _ in range(4):
            sent(f)
        assert found(f)


# ---- arguments -----------------------------------------------------------------------------------------------------


def plain_values() -> list[Any]:
    draw = random.Random(7)

    def value(depth: int) -> Any:
        if depth == 0 or draw.random() < 0.3:
            return draw.choice(
                [
                    None,
                    True,
                    0,
                    -1,
                    2**70,
                    -(2**200),
                    0.5,
                    math.inf,
                    math.nan,
                    2j,
                    "",
                    "a" * 300,
                    "\ud800",
                    "é",
                    b"",
                    b"x",
                ]
            )
        parts = [value(depth - 1) for _ in range(draw.randrange(4))]
        parts += parts[:1]  # what is shared stays shared
        kind = draw.randrange(3)
        return tuple(parts) if kind == 0 else parts if kind == 1 else {str(k): part for k, part in enumerate(parts)}

    shared = [1, 2]
    return [*(value(5) for _ in range(200)), [shared, shared, (shared,)], {(1, 2): 3, None: 4, 1.5: b"k"}]


def test_plain_arguments_go_as_they_do_with_others() -> None:
    """Byte by byte what the pickler of everything makes."""
    place = current.session().places.at(0).one
    token = torch.zeros(1, dtype=torch.int64, device="node:0")
    for value in plain_values():
        assert is_plain(value)
        for args in ((value,), (token, "method", (value,), {"k": value})):
            keeps = [sending.KeptAlive(token if args[0] is token else None) for _ in range(2)]
            kwargs = {} if args[0] is token else {"named": value}
            quick = sending.pickled_arguments(args, kwargs, place, keeps[0], "it")
            assert quick == sending.pickled((args, kwargs), place, keeps[1], "it")
            assert keeps[0].refs == keeps[1].refs


def test_what_is_not_plain() -> None:
    class Text(str):
        pass

    class Table(dict[str, int]):
        pass

    endless: list[Any] = []
    endless.append(endless)
    deep: Any = 1
    for _ in range(DEEPEST + 1):
        deep = (deep,)
    wide: Any = 1
    for _ in range(5):
        wide = [wide] * 1000
    odd = [Text("a"), Table(), {Text("k"): 1}, [Text("v")], range(3), {1}, object(), (1, [], object())]
    odd += [torch.zeros(1), endless, deep, wide, time.struct_time(range(9)), [[]] * (WIDEST + 1), bytearray(b"x")]
    assert [each for each in odd if is_plain(each)] == []
    assert is_plain([[]] * WIDEST)
    assert is_plain(list(range(10 * WIDEST)))


def test_arguments_on_the_node_are_those_given() -> None:
    shared = [1]
    for args in ((shared, shared), (True, 1, 1.0), ((1, [2]), [1, (2,)]), (2**100, -0.0, math.nan), ({"a": (None,)},)):
        assert dt.run(lambda *args: repr(args), *args, node=0) == repr(args)
    assert dt.run(lambda a, b: a is b, shared, shared, node=0)
    assert dt.run(lambda a, b: a is b, shared, b=shared, node=0)


# ---- the cost ------------------------------------------------------------------------------------------------------


def one(x: int) -> int:
    return x + 1


class Counted:
    def add(self, k: int) -> int:
        return k


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the counts are those of Python 3.11")
@pytest.mark.parametrize("what", ["submit", "an actor's call"])
def test_the_opcodes_of_a_call(what: str) -> None:
    """Without those of answers, which come meanwhile or later: the node is stopped. Nor those of frees: all is kept."""
    current.session().part(ReloadedModules)._seen.clear()  # a call looks at what those before it have sent
    actor = dt.actor(Counted, node=0)
    local, _ = made("def f(x): return x + 1")
    kept: list[Any] = []
    call, most = {
        "submit": (lambda: kept.append(dt.submit(local, 1, node=0)), SUBMIT),
        "an actor's call": (lambda: kept.append(actor.add(1)), ACTOR),
    }[what]
    pid = dt.run(os.getpid, node=0)
    for _ in range(3):
        call()
    dt.synchronize()
    with without_a_collector():
        os.kill(pid, signal.SIGSTOP)
        try:
            counts = [opcodes(call) for _ in range(10)]
        finally:
            os.kill(pid, signal.SIGCONT)
    actor.close().wait()
    assert min(counts) <= most, counts


#: The opcodes of Python that a call executes in the script's thread, until it is on its way.
SUBMIT, ACTOR = 3059, 3526
