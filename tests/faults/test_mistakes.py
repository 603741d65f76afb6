"""What a new user does wrong: each is an error of that line, which names what was meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

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
    lambda: torch.empty_like(torch.ones(3), device="node:0"), lambda: dt.zeros(3), lambda: dt.run(print),
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
    "far off": (TypeError, r"'zzz'; it has backend, nodes, init_method", start(zzz=1)),
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
    assert not dt.is_initialized()


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
    "device": (RuntimeError, r"'node:5' does not exist: the session has 2 nodes, node:0 to node:1", lambda: ones(5)),
    "nod=": (
        TypeError,
        r"run\(\) has no argument 'nod', and where takes none .*mean node=\?",
        lambda: dt.run(where, nod=1),
    ),
    "Nodes=": (TypeError, r"no argument 'Nodes', .*mean nodes=\?", lambda: dt.run(lambda: 1, Nodes=[1])),
    "nodes=1": (TypeError, r"list of nodes, such as \[0, 1\].*node=1$", lambda: dt.run(where, nodes=1)),
    "nodes=text": (TypeError, "it is node='node:1'$", lambda: dt.run(where, nodes="node:1")),
    "no function": (TypeError, r"run takes a function .*\[1\] can't be called", lambda: dt.run(where())),
    "node text": (
        ValueError,
        "a node is an integer or a text such as 'node:1', not 'cpu'",
        lambda: dt.run(where, node="cpu"),
    ),
    "node far": (RuntimeError, "'node:7' does not exist", lambda: dt.run(where, node="node:7")),
    "node float": (TypeError, r"a node is an integer .*not 1\.5", lambda: dt.run(where, node=1.5)),
    "synchronize": (ValueError, "not 'cuda:1'", lambda: dt.synchronize("cuda:1")),
    "group": (TypeError, r"such as \[0, 1\], not of 1", lambda: dt.new_group(1)),
    "group of a text": (TypeError, r"such as \[0, 1\], not of 'node:1'", lambda: dt.new_group("node:1")),
    "prefetch": (RuntimeError, "'node:9' does not exist", lambda: dt.prefetch([], "node:9")),
    "prefetch depth": (TypeError, r"depth is a whole number, not 1\.5", lambda: dt.prefetch([], 1, depth=1.5)),
    "one tensor": (
        ValueError,
        r"all_reduce takes .*session has 2 nodes .*new_group\(\[1\]\)",
        lambda: dt.all_reduce(ones(1)),
    ),
    "one of reduce": (ValueError, "reduce takes a list of one tensor per node", lambda: dt.reduce(ones(0), 0)),
    "one of broadcast": (ValueError, "broadcast takes a list", lambda: dt.broadcast(ones(0), 0)),
    "one differentiable": (ValueError, "all_reduce takes a list", lambda: dt.functional.all_reduce(ones(0))),
    "one nested": (ValueError, "all_reduce takes a list", lambda: dt.all_reduce([{"w": ones(0)[0]}], torch.add)),
    "keyword": (
        TypeError,
        r"all_reduce\(\) got .*'async'; did you mean async_op=\?",
        lambda: dt.all_reduce(ones(0, 1), **{"async": True}),
    ),
    "keyword of a group": (
        TypeError,
        r"barrier\(\) got .*'groups'; did you mean group=\?",
        lambda: dt.barrier(groups=None),
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
            assert dt.current_node() == 1
    assert dt.new_group(["node:1", 0]).nodes == (1, 0)
    assert dt.run(where, node=["node:0", 1]) == [[1], [1]]
    assert dt.device("node:1", "cpu") == dt.device(1, "cpu")


def test_a_function_has_keywords_of_its_own(settled: None) -> None:
    assert dt.run(Callable_(), 2, nod=3, node=1) == (2, 3)
    assert dt.run(dict, nod=3) == {"nod": 3}
    assert dt.run(lambda **kwargs: kwargs, nod=3) == {"nod": 3}


def test_one_tensor_is_enough_where_it_is_said(settled: None) -> None:
    (x,) = ones(1)
    dt.all_reduce([x], group=dt.new_group([1]))
    dt.all_reduce([x, torch.ones(2, device=dt.device(1, "cuda:1"))])
    assert x.tolist() == [2.0, 2.0]
