"""What a new user does wrong: each is an error of that line, which names what was meant."""

from __future__ import annotations

import enum
import functools
import operator
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from telling import said

import disttensor

#: Untyped: what follows is wrong, and mypy would say so.
dt: Any = disttensor

Mistake = tuple[type[Exception], str, Callable[[], object]]


def wrong(name: str, mistakes: dict[str, Mistake]) -> None:
    kind, text, program = mistakes[name]
    with pytest.raises(kind) as raised:
        program()
    assert re.search(text, str(raised.value)), str(raised.value)
    assert type(raised.value) is kind


@pytest.fixture
def settled(nodes: object) -> Iterator[None]:
    """No error from before, and none left for the next test."""
    dt.synchronize()
    yield
    dt.synchronize()


# ---- before a session ------------------------------------------------------------------------------------------------


def test_a_node_is_used_before_there_is_a_session(script: Callable[..., Any]) -> None:
    """And what torch says of other devices stays as it is."""
    done = script(
        """
import io, torch
import torch.nn as nn

def said(program):
    try:
        return str(program())
    except Exception as e:
        return f"{type(e).__name__}: {e}"

others = [
    lambda: torch.ones(3, device="nod:0"), lambda: torch.ones(3, device="node:x"), lambda: torch.ones(2, device="cuda"),
    lambda: torch.device("nodes"), lambda: torch.ones(3, device=""), lambda: torch.zeros(2, device="cpu:0").device,
    lambda: torch.accelerator.current_accelerator(), lambda: torch.accelerator.is_available(),
]
before = [said(program) for program in others]
import disttensor as dt

print("same" if [said(program) for program in others] == before else "others")
where = torch.device("node:1")
for program in (
    lambda: torch.ones(3, device="node:0"), lambda: torch.randn(3, device=where),
    lambda: torch.tensor([1.0], device="node"),
    lambda: torch.ones(3).to("node:0"), lambda: nn.Linear(3, 3).to("node:1"), lambda: nn.Linear(3, 3, device="node:1"),
    lambda: torch.empty_like(torch.ones(3), device="node:0"), lambda: dt.factories.zeros(3), lambda: dt.run(print),
    lambda: torch.node.synchronize(), lambda: dt.synchronize("node:1"),
):
    print(said(program))
dt.init_master_worker(nodes=2, launcher="inproc")
print(torch.ones(3, device=where).sum().item())
"""
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "same", done
    assert lines[1:-1] == ["DisttensorError: there is no session; call disttensor.init_master_worker() first"] * 11, (
        done
    )
    assert lines[-1] == "3.0", done


def start(**arguments: Any) -> Callable[[], object]:
    return lambda: dt.init_master_worker(**{"launcher": "inproc", **arguments}).__exit__(None, None, None)


STARTS: dict[str, Mistake] = {
    "a number first": (TypeError, r"not 2; did you mean nodes=2\?", lambda: dt.init_master_worker(2)),
    "nnodes": (TypeError, r"init_master_worker\(\) got .*'nnodes'; did you mean nodes=\?", start(nnodes=2)),
    "backends": (TypeError, r"'backends'; did you mean backend=\?", start(backends="tcp")),
    "far off": (TypeError, r"'zzz'; it has backend, nodes, spares, init_method", start(zzz=1)),
    "nodes 0": (ValueError, "nodes=0: at least 1 is needed", start(nodes=0)),
    "nodes -1": (ValueError, "nodes=-1: at least 1 is needed", start(nodes=-1)),
    "nodes text": (TypeError, "nodes is a whole number, or a pair .*, not '4'", start(nodes="4")),
    "nodes fraction": (TypeError, r"nodes is a whole number, .*, not 1\.5", start(nodes=1.5)),
    "nodes bool": (TypeError, "nodes is a whole number, .*, not True", start(nodes=True)),
    "nodes backwards": (ValueError, r"nodes=\(3, 1\): .*did you mean \(1, 3\)\?", start(nodes=(3, 1))),
    "nodes triple": (ValueError, r"nodes=\(1, 2, 3\): a pair", start(nodes=(1, 2, 3))),
    "capitals": (ValueError, r"unknown data channel 'NCCL'; .*did you mean 'nccl'\?", start(backend="NCCL")),
    "nccl2": (ValueError, r"unknown data channel 'nccl2'; .*did you mean 'nccl'\?", start(backend="nccl2")),
    "launcher": (ValueError, r"launcher 'slrum' is unknown \(known: .*did you mean 'slurm'\?", start(launcher="slrum")),
    "bind": (ValueError, r"bind 'gpus' is unknown \(known: .*did you mean 'gpu'\?", start(bind="gpus")),
    "security": (ValueError, r"security 'curved' is unknown .*did you mean 'curve'\?", start(security="curved")),
    "functions": (ValueError, r"functions 'nnone' is unknown .*did you mean 'none'\?", start(functions="nnone")),
    "threads": (ValueError, "threads=0: at least 1", start(threads=0)),
    "simulate_cuda": (TypeError, r"simulate_cuda is a whole number, not 0\.5", start(simulate_cuda=0.5)),
    "allow_ops": (TypeError, r"allow_ops is a list of texts .*, not 'a::\*'", start(allow_ops="a::*")),
    "env": (TypeError, "env is a dict, not 'A=1'", start(env="A=1")),
    "timeout": (ValueError, "timeout=0: more than 0 seconds", start(timeout=0)),
    "timeout text": (TypeError, "timeout is a number of seconds, not '9'", start(timeout="9")),
    "interface": (ValueError, "interface='eth99' .*leave it out", start(interface="eth99")),
    "interface local": (ValueError, "interface='eth99' .*leave it out", start(interface="eth99", launcher="local")),
    "hosts": (TypeError, r"hosts is a list of texts such as \['a:4'\]", start(hosts=[1], launcher="ssh")),
    "no attribute": (AttributeError, r"no attribute 'allreduce'; did you mean 'all_reduce'\?", lambda: dt.allreduce),
    "near nothing": (AttributeError, "no attribute 'xyzzy'$", lambda: dt.xyzzy),
}


@pytest.mark.parametrize("name", STARTS)
def test_mistakes_at_the_start(name: str) -> None:
    wrong(name, STARTS)
    assert not dt.session.is_initialized()


def test_a_session_in_words_while_it_runs_and_after_it() -> None:
    one = dt.init_master_worker(nodes=1, launcher="inproc")
    assert repr(one) == "<disttensor session, 1 node>"
    with pytest.raises(RuntimeError, match="exist_ok=True"):
        dt.init_master_worker(nodes=1, launcher="inproc")
    again = dt.init_master_worker(nodes=1, launcher="inproc", exist_ok=True)
    assert repr(again) == repr(one)
    with pytest.raises(ValueError, match="nodes=2: the session that is running has 1"):
        dt.init_master_worker(nodes=2, exist_ok=True)
    dt.shutdown()
    assert repr(one) == repr(again) == "<disttensor session, 1 node, shut down>"
    with dt.init_master_worker(nodes=2, launcher="inproc", exist_ok=True) as two:
        assert repr(two) == "<disttensor session, 2 nodes>"
        assert repr(one) == "<disttensor session, 1 node, shut down>"


# ---- nodes -----------------------------------------------------------------------------------------------------------


def where() -> list[int]:
    return [1]


class Callable_:
    def __call__(self, x: int = 0, *, nod: int = 0) -> tuple[int, int]:
        return x, nod


def ones(*nodes: int) -> list[torch.Tensor]:
    return [torch.ones(2, device=f"node:{node}") for node in nodes]


NODES: dict[str, Mistake] = {
    "device": (RuntimeError, r"'node:5' does not exist: the session has 3 nodes, node:0 to node:2", lambda: ones(5)),
    "nod=": (
        TypeError,
        r"run\(\) has no argument 'nod', and where takes none .*mean node=\?",
        lambda: dt.run(where, nod=1),
    ),
    "Nodes=": (TypeError, r"no argument 'Nodes', .*mean node=\?", lambda: dt.run(lambda: 1, Nodes=[1])),
    "one rank": (
        TypeError,
        r"such as node=\[0, 1\], .*; on node=1 alone the",
        lambda: dt.run(where, node=1, distributed=True),
    ),
    "one rank, by text": (
        TypeError,
        "on node='node:1' alone the",
        lambda: dt.run(where, node="node:1", distributed=True),
    ),
    "no function": (TypeError, r"run takes a function .*\[1\] can't be called", lambda: dt.run(where())),
    "node text": (
        ValueError,
        "a node is an integer or a text such as 'node:1', not 'cpu'",
        lambda: dt.run(where, node="cpu"),
    ),
    "node far": (RuntimeError, "'node:7' does not exist", lambda: dt.run(where, node="node:7")),
    "node float": (TypeError, r"a node is an integer .*not 1\.5", lambda: dt.run(where, node=1.5)),
    "synchronize": (ValueError, "not 'cuda:1'", lambda: dt.synchronize("cuda:1")),
    "group": (TypeError, r"such as \[0, 1\], not of 1", lambda: dt.collectives.new_group(1)),
    "group of a text": (TypeError, r"such as \[0, 1\], not of 'node:1'", lambda: dt.collectives.new_group("node:1")),
    "prefetch": (RuntimeError, "'node:9' does not exist", lambda: dt.data.prefetch([], "node:9")),
    "prefetch depth": (TypeError, r"depth is a whole number, not 1\.5", lambda: dt.data.prefetch([], 1, depth=1.5)),
    "one tensor": (
        ValueError,
        r"all_reduce takes .*session has 3 nodes .*new_group\(\[1\]\)",
        lambda: dt.all_reduce(ones(1)),
    ),
    "one of reduce": (
        ValueError,
        "reduce takes a list of one tensor per node",
        lambda: dt.collectives.reduce(ones(0), 0),
    ),
    "one of broadcast": (ValueError, "broadcast takes a list", lambda: dt.broadcast(ones(0), 0)),
    "one differentiable": (
        ValueError,
        "all_reduce takes a list",
        lambda: dt.collectives.functional.all_reduce(ones(0)),
    ),
    "keyword": (
        TypeError,
        r"all_reduce\(\) got .*'async'; did you mean async_op=\?",
        lambda: dt.all_reduce(ones(0, 1), **{"async": True}),
    ),
    "keyword of a group": (
        TypeError,
        r"barrier\(\) got .*'groups'; did you mean group=\?",
        lambda: dt.collectives.barrier(groups=None),
    ),
    "wait": (TypeError, "count is a whole number, not '2'", lambda: dt.wait_for_nodes("2")),
}


@pytest.mark.parametrize("name", NODES)
def test_mistakes_about_nodes(name: str, settled: None) -> None:
    wrong(name, NODES)


def test_a_node_is_named_by_number_or_text_alike(settled: None) -> None:
    for node in (1, "node:1", torch.device("node:1")):
        assert dt.run(where, node=node) == [1]
        with dt.node(node):
            assert dt.session.current_node() == 1
    assert dt.collectives.new_group(["node:1", 0]).nodes == (1, 0)
    assert dt.run(where, node=["node:0", 1]) == [[1], [1]]
    assert dt.device("node:1", "cpu") == dt.device(1, "cpu")


def test_a_function_has_keywords_of_its_own(settled: None) -> None:
    assert dt.run(Callable_(), 2, nod=3, node=1) == (2, 3)
    assert dt.run(dict, nod=3) == {"nod": 3}
    assert dt.run(lambda **kwargs: kwargs, nod=3) == {"nod": 3}


def test_one_tensor_is_enough_where_it_is_said(settled: None) -> None:
    (x,) = ones(1)
    dt.all_reduce([x], group=dt.collectives.new_group([1]))
    dt.all_reduce([x, torch.ones(2, device=dt.device(1, "cuda:1"))])
    assert x.tolist() == [2.0, 2.0]


# ---- shapes ----------------------------------------------------------------------------------------------------------


def at(device: str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.ones(shape, device=device) for shape in shapes]


SHAPES: dict[str, Callable[[str], object]] = {
    "matmul": lambda d: operator.matmul(*at(d, (3, 4), (3, 4))),
    "batches": lambda d: torch.bmm(*at(d, (2, 3, 4), (2, 3, 4))),
    "four dimensions": lambda d: operator.matmul(*at(d, (2, 3, 4, 5), (2, 3, 4, 5))),
    "vector": lambda d: torch.mv(*at(d, (2, 3), (4,))),
    "dot": lambda d: torch.dot(*at(d, (3,), (4,))),
    "bias": lambda d: torch.addmm(*at(d, (5,), (2, 3), (3, 4))),
    "layer": lambda d: nn.Linear(3, 4, device=d)(*at(d, (2, 5))),
    "convolution": lambda d: nn.Conv2d(3, 4, 3, device=d)(*at(d, (2, 2, 5, 5))),
    "normalization": lambda d: nn.LayerNorm(4, device=d)(*at(d, (2, 3))),
    "broadcast": lambda d: operator.sub(*at(d, (2, 3), (2, 4))),
    "in place": lambda d: at(d, (2,))[0].copy_(*at(d, (3,))),
    "labels": lambda d: nn.functional.cross_entropy(*at(d, (2, 3)), torch.zeros(3, dtype=torch.int64, device=d)),
    "index": lambda d: at(d, (3, 3))[0].gather(0, torch.zeros(4, dtype=torch.int64, device=d)),
    "embedding": lambda d: nn.functional.embedding(*at(d, (2,), (3, 4))),
    "view": lambda d: at(d, (2, 3))[0].view(7),
    "stack": lambda d: torch.stack(at(d, (3,), (4,))),
}


@pytest.mark.parametrize("name", SHAPES)
def test_wrong_shapes_are_said_as_local_torch_says_them(name: str, settled: None) -> None:
    program, state = SHAPES[name], torch.get_rng_state()
    with pytest.raises((RuntimeError, ValueError, IndexError)) as local:
        program("cpu")
    torch.set_rng_state(state)
    with pytest.raises(type(local.value)) as raised:
        program("node:1")
    assert str(raised.value) == str(local.value)


def test_what_is_too_large_to_be_made_here_is_said_all_the_same(settled: None) -> None:
    """In the words of torch's meta kernels, and with no more memory than they need."""
    x = torch.empty(1 << 20, 1 << 10, device="node:1")
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        x @ x


# ---- functions on nodes ----------------------------------------------------------------------------------------------


def fails(error: BaseException) -> None:
    raise error


ERRORS: dict[str, tuple[BaseException, tuple[Any, ...]]] = {
    "key": (KeyError("b"), ("b",)),
    "key in two": (KeyError((1, "b")), ((1, "b"),)),
    "index": (IndexError("no 3"), ("no 3",)),
    "file": (FileNotFoundError(2, "No such file or directory", "x.csv"), (2, "No such file or directory")),
    "encoding": (UnicodeEncodeError("ascii", "a", 0, 1, "no"), ("ascii", "a", 0, 1, "no")),
    "several": (ValueError("a", 2, None), ("a", 2, None)),
    "nothing": (ValueError(), ()),
    "empty": (StopIteration(5), (5,)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_exception_is_what_it_was_and_its_notes_say_where(name: str, settled: None) -> None:
    """Its arguments and text are as they would be here; a traceback shows the node and the user's line."""
    error, args = ERRORS[name]
    with pytest.raises(type(error)) as raised:
        dt.run(fails, error, node=1)
    assert type(raised.value) is type(error)
    assert raised.value.args == (args or ("",))
    assert str(raised.value) == str(error)
    assert getattr(raised.value, "filename", None) == getattr(error, "filename", None)
    first, trace = raised.value.__notes__
    assert re.match(r"  failed: fails\(\) on node 1 \(host .*\)\n  issued: .*test_mistakes.py:\d+ in test_an_", first)
    assert trace.startswith("--- traceback on node 1 ---\nTraceback (most recent call last):")
    assert "in fails\n    raise error" in trace
    assert "runtime" not in trace


def test_a_key_that_is_not_plain(settled: None) -> None:
    with pytest.raises(KeyError) as raised:
        dt.run(fails, KeyError(object()), node=1)
    assert "object object" in raised.value.args[0]


def test_an_operator_has_no_traceback_of_ours(settled: None) -> None:
    labels = torch.tensor([9], device="node:1")
    with pytest.raises(IndexError, match="Target 9 is out of bounds") as raised:
        torch.nn.functional.nll_loss(torch.zeros(1, 3, device="node:1"), labels).item()
    (where,) = raised.value.__notes__
    assert where.startswith("  failed: aten::nll_loss_forward on node 1")
    assert "test_mistakes.py" in where


def test_what_ended_a_function_by_itself(settled: None) -> None:
    with pytest.raises(dt.DisttensorError, match=r"sys.exit\(3\); the node goes on; let it return instead") as raised:
        dt.run(lambda: exit(3), node=1)
    assert "failed: <lambda>() on node 1" in said(raised.value)


def test_functions_by_name(settled: None) -> None:
    class Policy:
        def act(self) -> None:
            raise ValueError

        def __call__(self) -> None:
            raise ValueError

    for function, name in (
        (Policy().act, "Policy.act"), (Policy(), "Policy"), (functools.partial(fails, ValueError()), "fails"),
    ):  # fmt: skip
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - it says nothing
            dt.run(function, node=1)
        assert f"failed: {name}() on node 1" in said(raised.value)


class Colour(enum.Enum):
    RED = object()


RESULTS: dict[str, tuple[Callable[[], object], str]] = {
    "module": (lambda: nn.Linear(1, 1), r"Linear; for x return x.state_dict\(\)"),
    "optimizer": (lambda: torch.optim.SGD(nn.Linear(1, 1).parameters()), r"SGD; for x return x.state_dict\(\)"),
    "in a list": (lambda: [1, {"a": nn.Linear(1, 1)}], r"Linear; for x return x.state_dict\(\)"),
    "storage": (
        lambda: torch.ones(1).untyped_storage(),
        r"UntypedStorage; for x return torch\.empty\(0, .*uint8\)\.set_\(x\)",
    ),
    "enum": (lambda: Colour.RED, "Colour"),
    "generator": (lambda: (x for x in "ab"), r"generator; for x return list\(x\)"),
    "anything": (object, "builtins.object; return what it is made of"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_that_cannot_come_back(name: str, settled: None) -> None:
    function, text = RESULTS[name]
    with pytest.raises(TypeError, match=text) as raised:
        dt.run(function, node=1)
    assert not any("traceback" in note for note in getattr(raised.value, "__notes__", ()))


LOCK = threading.Lock()


class Holder:
    def __init__(self) -> None:
        self.inner = {"lock": LOCK}

    def method(self) -> None:
        pass


def of_a_variable() -> Callable[[], object]:
    lock = threading.Lock()

    def fetch() -> object:
        return lock

    return fetch


UNPICKLABLE: dict[str, tuple[Callable[[], object], str]] = {
    "variable": (
        lambda: dt.run(of_a_variable(), node=1),
        r"fetch\(\) can't be sent to node 1: the variable 'lock' of fetch\(\) is a _thread.lock",
    ),
    "argument": (
        lambda: dt.run(len, [1, LOCK], node=1),
        r"the arguments of len\(\) can't .*: argument 1 of len\(\)\[1\] is a _thread.lock",
    ),
    "keyword": (lambda: dt.run(dict, a=LOCK, node=1), r"the argument 'a' of dict\(\) is a _thread.lock"),
    "attribute": (
        lambda: dt.run(Holder().method, node=1),
        r"the attribute 'inner' of the object whose method method\(\) is\['lock'\] is a",
    ),
    "partial": (lambda: dt.run(functools.partial(print, LOCK), node=1), "is a _thread.lock"),
    "on several": (lambda: dt.run(print, LOCK, node=[0, 1]), "can't be sent to node 0: .* is a _thread.lock"),
    "generator": (lambda: dt.run(print, (x for x in "ab"), node=1), "argument 1 of print.* is a builtins.generator"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNPICKLABLE)
def test_what_cannot_be_sent_is_named(name: str, settled: None) -> None:
    program, text = UNPICKLABLE[name]
    with pytest.raises(TypeError, match=text) as raised:
        program()
    assert re.search(r"\(cannot pickle .*\); make it inside of the function", str(raised.value))


def test_a_module_that_only_the_script_finds(script: Callable[..., Any], tmp_path: Any) -> None:
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "found_here.py").write_text("x = 5")
    done = script(
        """
import sys
import disttensor as dt
dt.init_master_worker(nodes=1)
sys.path.append(sys.path[0] + "/later")

def load(name):
    return __import__(name).x

for name in ("found_here", "found_nowhere"):
    for node in (0, [0]):
        try:
            dt.run(load, name, node=node)
        except ModuleNotFoundError as e:
            print(e, *e.__notes__, sep="|")
"""
    )
    assert done.stdout.count("before init_master_worker(), or in the function") == 2, done
    assert done.stdout.count("found_nowhere is not here either: pip install it on all hosts") == 2, done
    assert done.stdout.count("failed: load() on node 0") == 4, done
