"""Errors: mistakes at the user's line, failures on nodes at the next synchronization, and what they poison."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from equal import same
from telling import said

import disttensor as dt
from disttensor import testing

pytestmark = pytest.mark.usefixtures("settled")


@pytest.fixture
def settled(nodes: object) -> Iterator[None]:
    """No error from before, and none left for the next test."""
    yield
    with contextlib.suppress(Exception):
        dt.synchronize()
    dt.synchronize()


# ---- mistakes --------------------------------------------------------------------------------------------------------

MISTAKES: dict[str, Callable[[torch.device], object]] = {
    "matmul": lambda d: torch.ones(2, 3, device=d) @ torch.ones(2, 3, device=d),
    "broadcast": lambda d: torch.ones(2, 3, device=d) + torch.ones(4, device=d),
    "view": lambda d: torch.ones(2, 3, device=d).view(7),
    "cat": lambda d: torch.cat([torch.ones(2, device=d), torch.ones(2, 2, device=d)]),
    "dim": lambda d: torch.ones(2, device=d).sum(3),
    "index": lambda d: torch.ones(2, device=d)[5],
    "select": lambda d: torch.ones(2, device=d).select(0, 2),
    "result type": lambda d: torch.ones(2, dtype=torch.int64, device=d).add_(0.5),
    "mm dtype": lambda d: torch.ones(2, 2, device=d) @ torch.ones(2, 2, dtype=torch.float64, device=d),
    "linear": lambda d: F.linear(torch.ones(2, 3, device=d), torch.ones(4, 4, device=d)),
    "conv": lambda d: F.conv2d(torch.ones(1, 3, 4, 4, device=d), torch.ones(2, 2, 3, 3, device=d)),
    "reshape": lambda d: torch.ones(5, device=d).reshape(2, 3),
    "expand": lambda d: torch.ones(5, device=d).expand(3, 4),
    "squeeze bad dim": lambda d: torch.ones(5, device=d).squeeze(4),
    "stack": lambda d: torch.stack([]),
    "bool of many": lambda d: bool(torch.ones(2, device=d)),
    "item of many": lambda d: torch.ones(2, device=d).item(),
    "setitem": lambda d: torch.ones(2, 3, device=d).__setitem__(0, torch.ones(4, device=d)),
    "mean of int": lambda d: torch.ones(2, dtype=torch.int64, device=d).mean(),
    "bad unflatten": lambda d: torch.ones(6, device=d).unflatten(0, (4, 2)),
    "transpose": lambda d: torch.ones(2, device=d).transpose(0, 1),
    "permute": lambda d: torch.ones(2, 3, device=d).permute(0, 0),
    "leaf": lambda d: torch.ones(2, device=d, requires_grad=True).add_(1),
    "int grad": lambda d: torch.ones(2, dtype=torch.int64, device=d).requires_grad_(),
    "backward of many": lambda d: torch.ones(2, device=d, requires_grad=True).mul(2).backward(),
    "no grad": lambda d: torch.ones(2, device=d).sum().backward(),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_torchs_errors_at_the_line(name: str) -> None:
    program = MISTAKES[name]
    with pytest.raises(Exception) as local:  # noqa: PT011
        program(torch.device("cpu"))
    with pytest.raises(Exception) as remote:  # noqa: PT011
        program(torch.device("node:1"))
    assert remote.type is local.type
    assert any(e.path.name == "test_errors.py" and e.name == "<lambda>" for e in remote.traceback)
    dt.synchronize()  # nothing has failed on the node


@pytest.mark.row("M16")
def test_operands_on_two_nodes() -> None:
    a, b = torch.ones(2, 3, device="node:0"), torch.ones(2, 3, device="node:1")
    programs = [
        lambda: a + b,
        lambda: torch.cat([a, b]),
        lambda: a.add_(b),
        lambda: F.linear(a, b),
        lambda: torch.where(a > 0, a, b),
        lambda: torch.addmm(a[:, :2], a, b.t()),
        lambda: torch.stack([a, b]),
        lambda: torch.add(a, a, out=b),
    ]
    for program in programs:
        with pytest.raises(RuntimeError, match=r"\.to\(") as e:
            program()
        text = str(e.value)
        assert "node 0" in text
        assert "node 1" in text
    same(a, torch.ones(2, 3))


def test_operands_on_two_devices_of_a_node() -> None:
    a, b = torch.ones(2, device=dt.device(1, "cuda:0")), torch.ones(2, device=dt.device(1, "cuda:1"))
    with pytest.raises(RuntimeError, match=r"cuda:0.*cuda:1.*\.to\("):
        a + b
    cpu = torch.ones(2, device=dt.device(1, "cpu"))
    with pytest.raises(RuntimeError, match=r"\.to\("):
        a + cpu


def test_scalars_of_the_nodes_cpu_stand_beside_its_cuda() -> None:
    a, s = torch.ones(2, device=dt.device(1, "cuda:0")), torch.tensor(3.0, device=dt.device(1, "cpu"))
    for result in (a + s, s + a, s * a, torch.where(a > 0, s, a)):
        assert result.get_device() == 0
        same(result, torch.full((2,), result[0].item()))
    with pytest.raises(RuntimeError, match=r"\.to\("):
        a + torch.tensor(3.0, device=dt.device(0, "cpu"))


@pytest.mark.parametrize(
    "program",
    [
        lambda a, x: a + x,
        lambda a, x: x + a,
        lambda a, x: a.add_(x),
        lambda a, x: torch.cat([a, x]),
        lambda a, x: F.linear(a, x),
        lambda a, x: a @ x,
        lambda a, x: torch.mm(x, a),
        lambda a, x: torch.where(x > 0, a, a),
    ],
)
def test_a_local_tensor_with_a_remote_one(program: Callable[..., object]) -> None:
    a, x = torch.ones(3, 3, device="node:1"), torch.ones(3, 3)
    with pytest.raises(RuntimeError, match=r"\.to\(|dist_send") as e:
        program(a, x)
    assert "node 1" in str(e.value)
    assert "cpu" in str(e.value)
    same(a, torch.ones(3, 3))


def test_numbers_and_scalars_are_welcome() -> None:
    a = torch.ones(3, device="node:1")
    same(a + torch.tensor(2.0), torch.full((3,), 3.0))
    same(torch.tensor(2.0) * a, torch.full((3,), 2.0))
    with pytest.raises(RuntimeError):
        a + torch.tensor([2.0])


# ---- failures on nodes -----------------------------------------------------------------------------------------------


def line() -> int:
    import sys

    return sys._getframe(1).f_lineno


def not_positive(device: str = "node:1") -> torch.Tensor:
    return torch.linalg.cholesky(-torch.eye(3, device=device))


def out_of_range(device: str = "node:1") -> torch.Tensor:
    return torch.ones(3, device=device).gather(0, torch.tensor([7], device=device))


@pytest.mark.row("M19")
@pytest.mark.fault(10)
def test_a_failure_is_told_with_everything() -> None:
    y, n = torch.ones(3, device="node:1").gather(0, torch.tensor([7], device="node:1")), line()
    with pytest.raises(RuntimeError, match="out of bounds") as e:
        y.cpu()
    text = said(e.value)
    assert f"{__file__}:{n} in test_a_failure_is_told_with_everything" in text
    assert "aten::gather" in text
    assert "node 1" in text
    assert "traceback" not in text, "an operator has none of the user's lines"


FAILURES: dict[str, tuple[type[Exception], str, Callable[[torch.device], object]]] = {
    "gather": (RuntimeError, "gather", lambda d: torch.ones(3, device=d).gather(0, torch.tensor([7], device=d))),
    "embedding": (
        IndexError,
        "embedding|index_select",
        lambda d: F.embedding(torch.tensor([9], device=d), torch.ones(3, 2, device=d)),
    ),
    "cholesky": (torch.linalg.LinAlgError, "cholesky", lambda d: torch.linalg.cholesky(-torch.eye(3, device=d))),
    "inv": (torch.linalg.LinAlgError, "inv", lambda d: torch.linalg.inv(torch.zeros(2, 2, device=d))),
    "index": (IndexError, "index", lambda d: torch.ones(3, device=d)[torch.tensor([5], device=d)]),
    "nll": (
        IndexError,
        "nll_loss",
        lambda d: F.cross_entropy(torch.ones(2, 3, device=d), torch.tensor([0, 5], device=d)),
    ),
    "scatter": (
        RuntimeError,
        "scatter",
        lambda d: torch.zeros(3, device=d).scatter(0, torch.tensor([4], device=d), 1.0),
    ),
    "multinomial": (RuntimeError, "multinomial|prob", lambda d: torch.multinomial(torch.full((2,), -1.0, device=d), 1)),
    "bernoulli": (RuntimeError, "bernoulli|p_in", lambda d: torch.bernoulli(torch.full((2,), 2.0, device=d))),
    "division": (RuntimeError, "ZeroDivision|zero|div", lambda d: torch.ones(2, dtype=torch.int64, device=d) // 0),
    "dtype": (NotImplementedError, "bitwise_and", lambda d: torch.ones(2, device=d) & torch.ones(2, device=d)),
    "take": (IndexError, "take", lambda d: torch.ones(3, device=d).take(torch.tensor([4], device=d))),
}


@pytest.mark.fault(10)
@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("sync", ["cpu", "item", "synchronize", "print"])
def test_failures_have_their_own_type(name: str, sync: str) -> None:
    kind, text, program = FAILURES[name]
    with pytest.raises(kind):
        program(torch.device("cpu"))
    if sync == "print":
        try:
            y = program(torch.device("node:1"))
        except kind:
            return
        assert "..." in repr(y)
        with pytest.raises(kind):
            y.cpu()
        return
    with pytest.raises(kind, match=text) as e:  # noqa: PT012 - either line may raise
        y = program(torch.device("node:1"))
        if sync == "cpu":
            y.cpu()
        elif sync == "item":
            y.sum().item()
        else:
            dt.synchronize()
    assert "test_errors.py" in said(e.value)
    dt.synchronize()


@pytest.mark.fault(10)
def test_dependents_are_poisoned_and_others_are_exact() -> None:
    local = torch.randn(4, 4)
    x = local.to("node:1")
    bad = out_of_range()
    chain = [bad]
    for _ in range(3):
        chain.append(chain[-1] * 2 + 1)
    chain += [torch.cat([bad, x[0]]), (bad + x[0]).sum(), bad.view(1), torch.where(bad > 0, bad, bad), bad.max(0)[1]]
    good = x @ x + 1
    for c in chain:
        with pytest.raises(RuntimeError, match="aten::gather"):
            c.cpu()
    same(good, local @ local + 1)
    same(x, local)
    same(x @ x, local @ local)


def test_targets_of_a_failed_write_are_poisoned_with_their_aliases() -> None:
    x = torch.zeros(4, 3, device="node:1")
    row, flat, apart = x[1], x.view(-1), torch.zeros(3, device="node:1")
    alias = x.detach()
    x.index_add_(0, torch.tensor([9], device="node:1"), torch.ones(1, 3, device="node:1"))
    for t in (x, row, flat, alias, x[0], row + 1):
        with pytest.raises((IndexError, RuntimeError), match="index_add"):
            t.cpu()
    same(apart, torch.zeros(3))


def test_a_view_made_of_poison_is_poisoned_and_a_write_to_it_too() -> None:
    bad = out_of_range()
    view = bad[0:1]
    view.add_(1)
    other = torch.zeros(1, device="node:1")
    other.copy_(bad)
    for t in (view, other):
        with pytest.raises(RuntimeError, match="aten::gather"):
            t.cpu()


def test_overwriting_poison_does_not_heal_it_and_new_data_does() -> None:
    """A tensor in its place would not be the one that its views share."""
    bad = out_of_range()
    view = bad.view(1)
    bad.fill_(1)
    bad.zero_()
    bad.copy_(torch.ones(1))
    view.fill_(2)
    for t in (bad, view, bad + 1):
        with pytest.raises(RuntimeError, match="aten::gather"):
            t.cpu()
    bad.data = torch.full((1,), 3.0, device="node:1")
    same(bad + 1, torch.full((1,), 4.0))
    with pytest.raises(RuntimeError, match="aten::gather"):
        view.cpu()


def test_poison_travels_between_nodes() -> None:
    bad = out_of_range("node:0")
    moved = bad.to("node:1")
    here = moved + torch.ones(1, device="node:1")
    back = here.to("node:0")
    for t in (here, moved, back):
        with pytest.raises(RuntimeError, match=r"aten::gather on node 0"):
            t.cpu()
    with pytest.raises(RuntimeError, match="aten::gather"):
        here.sum().item()
    same(torch.ones(2, device="node:1") + 1, torch.full((2,), 2.0))


@pytest.mark.fault(11)
def test_the_first_of_several() -> None:
    first, second = out_of_range(), not_positive_ex()
    both = first.sum() + second.sum()
    with pytest.raises(RuntimeError, match="aten::gather"):
        both.item()


def not_positive_ex() -> torch.Tensor:
    """Fails on the node only, with no round trip."""
    return torch.zeros(3, device="node:1").scatter(0, torch.tensor([4], device="node:1"), 1.0)


@pytest.mark.fault(11)
def test_synchronize_raises_what_nobody_saw_once() -> None:
    out_of_range(), not_positive_ex()
    with pytest.raises(RuntimeError, match="aten::gather") as raised:
        dt.synchronize()
    assert "failure 2 of 2" in raised.value.__notes__[-1]
    assert "aten::scatter" in raised.value.__notes__[-1]
    dt.synchronize()
    bad = out_of_range()
    with pytest.raises(RuntimeError):
        bad.cpu()
    dt.synchronize()
    with pytest.raises(RuntimeError):  # whoever asks for it gets it again
        bad.cpu()


@pytest.mark.fault(11)
def test_many_failures_are_attached_and_the_rest_counted() -> None:
    for _ in range(12):
        out_of_range()
    with pytest.raises(RuntimeError) as raised:
        dt.synchronize()
    assert sum("failure" in note for note in raised.value.__notes__) == 9
    assert "3 more failures" in raised.value.__notes__[-1]


def test_synchronize_of_one_node_leaves_the_others_errors() -> None:
    out_of_range("node:0")
    dt.synchronize("node:1")
    with pytest.raises(RuntimeError, match="on node 0"):
        dt.synchronize("node:0")


def test_a_failure_in_backward_is_poison_in_the_gradient() -> None:
    w = torch.ones(3, device="node:1", requires_grad=True)
    (w * torch.ones(3, device="node:1")).sum().backward()  # asks the node how it multiplies what is expanded
    w.grad = None
    loss = (w * torch.ones(3, device="node:1").gather(0, torch.tensor([7, 0, 0], device="node:1"))).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="aten::gather"):
        w.grad.cpu()
    w.grad = None
    (w * 2).sum().backward()
    same(w.grad, torch.full((3,), 2.0))


def test_poison_is_freed() -> None:
    x = torch.ones(2, device="node:1")
    gc.collect()
    dt.synchronize()
    before = testing.usage(x)
    for _ in range(20):
        bad = out_of_range() + 1
        del bad
    with pytest.raises(RuntimeError):
        dt.synchronize()
    gc.collect()
    dt.synchronize()
    assert testing.usage(x) == before


def test_many_failures_leave_the_node_usable() -> None:
    for _ in range(300):
        out_of_range()
    with pytest.raises(RuntimeError, match="291 more"):
        dt.synchronize()
    same(torch.ones(2, device="node:1"), torch.ones(2))


def test_traceback_ends_at_the_users_line() -> None:
    with pytest.raises(RuntimeError) as e:
        torch.ones(2, 3, device="node:1") @ torch.ones(2, 3, device="node:1")
    assert e.traceback[0].path.name == "test_errors.py"


def test_using_tensors_of_an_ended_session(script: Callable[..., object]) -> None:
    done = script(
        """
import torch, disttensor as dt
with dt.init_master_worker(nodes=2, launcher="inproc"):
    x = torch.ones(3, device="node:1")
    x.sum().item()
zeros = lambda: torch.zeros(2, device="node:0")
for use in (lambda: x + 1, lambda: x.cpu(), zeros, lambda: dt.factories.zeros(2), dt.session.node_count):
    try:
        use()
    except dt.DisttensorError as e:
        print("refused:", "session" in str(e))
print(repr(x))
dt.init_master_worker(nodes=2, launcher="inproc")
print(torch.ones(2, device="node:1").sum().item())
try:
    x + torch.ones(3, device="node:1")
except Exception as e:
    print("old:", type(e).__name__)
torch.ones(3, device="node:0").gather(0, torch.tensor([7], device="node:0"))
"""
    )
    lines = done.stdout.splitlines()
    assert lines[:5] == ["refused: True"] * 5, done
    assert lines[5].startswith("tensor("), done
    assert "2.0" in lines[6:], done
    assert lines[-1].startswith("old: "), done
    assert done.returncode == 1, done  # an error that nobody asked about
    assert "out of bounds" in done.stderr, done
    assert "program.py:19" in done.stderr, done


WAYS_TO_FAIL: dict[str, Callable[[torch.Tensor], object]] = {
    "a mistake": lambda x: x @ torch.ones(3, 3, device=x.device),
    "a read": lambda x: x.gather(0, torch.full((1, 1), 9, device=x.device)).cpu(),
    "a wait": lambda x: (x.gather(0, torch.full((1, 1), 9, device=x.device)), dt.synchronize()),
    "a function": lambda x: dt.run(lambda y: y.view(3), x),
    "a submitted function": lambda x: dt.submit(lambda y: y.view(3), x).result(),
    "a map": lambda x: list(dt.map(lambda y: y.view(3), [x])),
    "a fetch": lambda x: dt.fetch(x.gather(0, torch.full((1, 1), 9, device=x.device))).result(),
}


@pytest.mark.parametrize("place", ["node", "mesh"])
@pytest.mark.parametrize("way", WAYS_TO_FAIL)
def test_an_error_that_is_gone_keeps_no_tensors(way: str, place: str) -> None:
    """Its frames are freed with it, and with them a user's tensors: no cycle waits for the collector."""
    device = dt.mesh(dp=2, nodes=[0, 1]).device if place == "mesh" else torch.device("node:1")
    refs = []

    def fail() -> None:
        x = torch.ones(7, 7, device=device)
        refs.append(weakref.ref(x))
        WAYS_TO_FAIL[way](x)

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(Exception):
            fail()
        assert refs[0]() is None
    finally:
        gc.enable()
