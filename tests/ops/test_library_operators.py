"""Operators of other libraries, with kernels for the CPU as C++ has them: ``allow_ops``, and shapes that data tell."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from equal import same

import disttensor as dt
from disttensor import testing

#: What a library does when it is imported.
LIBRARY = """
import torch

theirs = torch.library.Library("theirs", "DEF")
for schema in ("keep(Tensor x, float at) -> Tensor", "guess(Tensor x) -> Tensor", "twice(Tensor x) -> Tensor",
               "told(Tensor x) -> Tensor", "add_(Tensor(a!) x) -> Tensor(a!)"):
    theirs.define(schema)
theirs.impl("keep", lambda x, at: (x > at).nonzero()[:, 0], "CPU")
theirs.impl("guess", lambda x: x[x > 0].clone(), "CPU")
theirs.impl("twice", lambda x: x * 2, "CPU")
theirs.impl("told", lambda x: x * 3, "CPU")
theirs.impl("add_", lambda x: x.add_(1), "CPU")
torch.library.register_fake("theirs::told", torch.empty_like, lib=theirs)
# as torchvision's nms says that only the data tell
torch.library.register_fake(
    "theirs::guess", lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()), lib=theirs
)
others = torch.library.Library("others", "DEF")
for library, name in ((theirs, "theirs"), (others, "others")):  # Python for all devices, which waits for a value
    library.define("summed(Tensor x) -> Tensor")
    library.impl("summed", lambda x: x + sum(x.tolist()), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{name}::summed", torch.empty_like, lib=library)
others.define("told(Tensor x) -> Tensor")
others.impl("told", lambda x: x * 3, "CPU")
torch.library.register_fake("others::told", torch.empty_like, lib=others)
"""


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    """The library, in this process."""
    space: dict[str, Any] = {}
    exec(LIBRARY, space)
    yield torch.ops.theirs
    space.clear()  # the library goes with its last reference


@pytest.fixture
def theirs(library: Any) -> Iterator[Any]:
    """It, with nodes that are threads of this process and so have it as well."""
    with dt.init_master_worker(nodes=2, launcher="inproc", allow_ops=["theirs::*"]):
        yield library


def test_shapes_that_depend_on_data_are_asked_for_each_time(theirs: Any) -> None:
    x = torch.tensor([1.0, -1.0, 2.0, 3.0])
    for op, *args in ((theirs.guess,), (theirs.keep, 0.0), (theirs.keep, 2.0)):
        for values in (x, -x, x * 0, x):  # one signature
            same(op(values.to("node:1"), *args), op(values, *args))


def test_what_has_a_meta_kernel_is_not_asked(theirs: Any) -> None:
    x = torch.tensor([1.0, -1.0])
    remote, other = x.to("node:1"), x.tile(2).to("node:1")
    with testing.MessageLog() as log:
        y = theirs.told(remote)
    assert log.commands == ["Usable", "Define theirs::told", "Call theirs::told"]
    assert log.replies == ["Unusable"]
    with testing.MessageLog() as log:
        theirs.told(other)
    assert log.commands == ["Call theirs::told"]
    assert log.replies == []
    same(y, x * 3)
    same(theirs.twice(remote), x * 2)
    same(theirs.add_(remote), x + 1)
    same(remote, x + 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's imports
def test_a_compiled_graph_has_what_is_allowed_whole_and_names_what_runs_part_by_part(theirs: Any) -> None:
    for space, whole in ((theirs, True), (torch.ops.others, False)):
        torch.compiler.reset()
        compiled = torch.compile(lambda x, space=space: space.summed(x * 2) + 1)
        with warnings.catch_warnings(record=True) as caught, testing.MessageLog() as log:
            warnings.simplefilter("always")
            for k in range(3):
                x = torch.arange(3.0) + k
                same(compiled(x.to("node:1")), x * 2 + (x * 2).sum() + 1)
        said = [str(each.message) for each in caught if "operator by operator" in str(each.message)]
        assert ("Replay" in log[1].commands, len(said)) == (whole, not whole)
    assert "Nodes run others::summed part by part; allow_ops=['others::*'] has them run it whole" in said[0]
    torch.compiler.reset()


def test_what_is_not_allowed_is_refused_at_the_call(theirs: Any) -> None:
    x = torch.ones(2, device="node:1")
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"allow_ops=\['others::\*'\]"):
            torch.ops.others.told(x)
    with pytest.raises(NotImplementedError, match="beyond tensors"):
        torch.ops.aten.from_file("/nowhere", False, 1, device="node:1")
    dt.synchronize()  # and nothing was sent
    same(x + 1, torch.full((2,), 2.0))


def test_nodes_import_the_library(library: Any) -> None:
    with dt.init_master_worker(nodes=1, allow_ops=["theirs::*"]):
        x = torch.ones(2, device="node:0")
        for _ in range(2):  # at the call
            with pytest.raises(NotImplementedError, match=r"node 0: .*this node.*disttensor\.run\(exec, 'import"):
                library.twice(x)
        dt.run(exec, LIBRARY + "torch.kept = theirs, others", node=[0])  # else it would be garbage
        with testing.MessageLog() as log:
            same(library.twice(x), torch.full((2,), 2.0))
        assert log.commands[:3] == ["Usable", "Define theirs::twice", "Ask theirs::twice"]
        same(library.told(x), torch.full((2,), 3.0))
        same(library.guess(x - 1), torch.ones(0))


REGISTERED_LATER = """
import torch
import disttensor as dt


def lacking(names):
    there = set(torch._C._dispatch_get_all_op_names())
    return [name for name in names if name not in there]


with dt.init_master_worker(nodes=1, launcher="local"):
    import torch._inductor.inductor_prims

    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(("aten::", "prims::"))]
    print(len(names) > 2000, "prims::fma" in dt.run(lacking, names))
    a, b, c = torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)
    programs = {
        "prims::fma": lambda op, to: op(to(a), to(b), to(c)),
        "prims::prepare_softmax_online": lambda op, to: op(to(a), 1),
        "prims::_unsafe_index_put_": lambda op, to: op(to(a), [to(torch.tensor([1]))], to(b[:1])),
        "prims::inductor_force_stride_order": lambda op, to: op(to(a), (1, 2)),
    }
    for name in dt.run(lacking, names):
        if name in programs:
            op = getattr(torch.ops.prims, name.removeprefix("prims::"))
            got, want = programs[name](op, lambda x: x.to("node:0")), programs[name](op, lambda x: x.clone())
            got, want = [x if isinstance(x, tuple) else (x,) for x in (got, want)]
            print(name, all(torch.equal(g.cpu(), w) and g.stride() == w.stride() for g, w in zip(got, want)))
"""


def test_what_the_scripts_torch_has_registered_later_runs_part_by_part(
    script: Callable[..., CompletedProcess[str]],
) -> None:
    """Modules of torch's that the script has imported register operators among torch's own, which no node has."""
    done = script(REGISTERED_LATER)
    first, *programs = done.stdout.splitlines() or [done.stderr]
    assert first == "True True"
    assert sorted(programs) == [
        "prims::_unsafe_index_put_ True", "prims::fma True", "prims::inductor_force_stride_order True",
        "prims::prepare_softmax_online True",
    ], done.stderr  # fmt: skip
