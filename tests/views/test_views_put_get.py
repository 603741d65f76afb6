"""``dt.views.put``, ``get`` and ``accumulate`` beside the same copies of local tensors."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from checkout import ROOT
from mesh_kit import connected
from printed import as_shown

import disttensor as dt
from disttensor import testing

put, get, accumulate = dt.views.put, dt.views.get, dt.views.accumulate


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(2):
        yield


def table(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(24).view(4, 6).to(dtype)


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "row": lambda t: t[2],
    "column": lambda t: t[:, 3],
    "strided": lambda t: t[1::2, ::3],
    "transposed": lambda t: t.t()[1:4],
    "element": lambda t: t[1, 1],
    "empty": lambda t: t[2:2],
    "diagonal": lambda t: t.diagonal(1),
}
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.complex64, torch.bool)


def there(t: torch.Tensor, where: str) -> torch.Tensor:
    return t if where == "here" else t.to(where)


@pytest.mark.row("S2")
@pytest.mark.parametrize("where", ["here", "node:0", "node:1"])
@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_written_and_read(name: str, where: str) -> None:
    """From and into local memory, the same node, and another one."""
    part = PARTS[name]
    local, remote = table(), table().to("node:1")
    value = -(table() + 1) * 0.5
    part(local).copy_(part(value))
    work = put(part(remote), part(there(value, where)), async_op=where != "here")
    assert work is None or torch.equal(work.result().cpu(), part(local))
    assert torch.equal(remote.cpu(), local)
    whole = torch.zeros(4, 6)
    into = there(whole, where)
    assert get(part(remote), into=part(into)) is not None
    part(whole).copy_(part(local))
    assert torch.equal(into.cpu(), whole)
    at = {} if where == "here" else {"node": where}
    for async_op in (False, True):
        got: Any = get(part(remote), async_op=async_op, **at)
        got = got.result() if async_op else got
        assert got.device == torch.device("cpu" if where == "here" else where)
        assert torch.equal(got.cpu(), part(local))


OPS = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}


@pytest.mark.row("S2")
@pytest.mark.parametrize("where", ["here", "node:0", "node:1"])
@pytest.mark.parametrize("op", OPS)
def test_a_part_is_added_to(op: str, where: str) -> None:
    for name, part in PARTS.items():
        local, remote = table(), table().to("node:1")
        value = 30 - table() * 2.5
        part(local).copy_(OPS[op](part(local).clone(), part(value)))
        work = accumulate(part(remote), part(there(value, where)), op, async_op=where == "node:0")
        assert work is None or torch.equal(work.result().cpu(), part(local))
        assert torch.equal(remote.cpu(), local), name
    counts = torch.tensor([[5, 6], [7, 8]], device="node:1")
    accumulate(counts, [1.75, -2], op)  # converted and expanded, as by put
    expected = OPS[op](torch.tensor([[5, 6], [7, 8]]), torch.tensor([[1, -2], [1, -2]]))
    assert torch.equal(counts.cpu(), expected)
    x = torch.arange(5.0)
    on_node = x.to("node:1")
    accumulate(on_node[1:], on_node[:-1], op)  # values from before
    assert on_node.tolist() == [0.0, *OPS[op](x[1:], x[:-1]).tolist()]


@pytest.mark.row("S2")
def test_none_of_many_that_accumulate_is_lost() -> None:
    """From both nodes, the script and several threads at once."""
    total = torch.zeros(3, dtype=torch.int64, device="node:1")
    ones = [torch.ones(3, dtype=torch.int64, device=f"node:{k}") for k in range(2)] + [torch.ones(3, dtype=torch.int64)]

    def many(one: torch.Tensor) -> None:
        for _ in range(50):
            accumulate(total, one)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(many, ones))
    assert total.tolist() == [150] * 3


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_values_are_converted_as_copy_does_it(source: torch.dtype, target: torch.dtype) -> None:
    local = table(target)
    local[1::2].copy_(table(source)[::2])
    for value in (table(source)[::2], table(source).to("node:0")[::2], table(source).to("node:1")[::2]):
        remote = table(target).to("node:1")
        put(remote[1::2], value)
        assert torch.equal(remote.cpu(), local)
    into = torch.zeros(4, 6, dtype=target)
    get(table(source).to("node:1"), into=into)
    assert torch.equal(into, torch.zeros(4, 6, dtype=target).copy_(table(source)))


def test_what_overlaps_has_the_values_from_before() -> None:
    for shift in (1, -1):
        local, remote = torch.arange(1000.0), torch.arange(1000.0, device="node:1")
        a, b = (slice(1, None), slice(None, -1))[::shift]
        before = local.clone()
        local[a] = before[b]
        put(remote[a], remote[b])
        assert torch.equal(remote.cpu(), local)
        again = torch.arange(1000.0, device="node:1")
        get(again[b], into=again[a])
        assert torch.equal(again.cpu(), local)


def test_the_order_is_that_of_the_script() -> None:
    x = torch.zeros(3, device="node:1")
    y = torch.ones(3, device="node:0")
    seen = []
    for k in range(20):
        put(x[k % 3 : k % 3 + 1], y[:1] * k)
        x += 1
        seen.append(get(x, async_op=True))
        put(x[0], 100)
        x[0] -= 100
    expected, local = [], torch.zeros(3)
    for k in range(20):
        local[k % 3] = k
        local += 1
        expected.append(local.clone())
        local[0] = 0
    assert [work.result().tolist() for work in seen] == [one.tolist() for one in expected]


def test_a_value_may_be_changed_at_once_and_a_get_is_of_its_moment() -> None:
    x, value = torch.zeros(1 << 18, device="node:1"), torch.ones(1 << 18)
    put(x, value, async_op=True)
    value.zero_()
    work = get(x, async_op=True)
    into = torch.zeros(1 << 18)
    late = get(x, into=into, async_op=True)
    x.zero_()
    assert work.result().sum().item() == 1 << 18
    assert late.result() is into
    assert into.sum().item() == 1 << 18


def test_no_bytes_pass_the_script_between_nodes() -> None:
    x, y = torch.zeros(1 << 16, device="node:1"), torch.ones(1 << 16, device="node:0")
    dt.synchronize()
    dt.channels.reset_stats()
    put(x[::2], y[::2])
    get(x, node=0)
    get(x, into=y)
    put(x, y, async_op=True).wait()
    dt.synchronize()
    stats = dt.channels.stats()
    assert sum(row.sent.bytes + row.received.bytes for row in stats if row.at == "master") <= 64, stats
    assert sum(row.sent.bytes for row in stats if row.at != "master") >= 3 << 18


def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    part = (ROOT / "docs" / "TRANSFERS.md").read_text().partition("## Into and from a part")[2]
    program, shown = re.search(r"```python\n(.*?)```\n\n((?: {4}[^\n]*\n)+)", part, re.DOTALL).groups()  # type: ignore[union-attr]
    exec(program, {"torch": torch, "dt": dt})
    shown = textwrap.dedent(shown)
    assert as_shown(capsys.readouterr().out, shown) == shown


def test_gradients_are_left_alone() -> None:
    p = torch.ones(3, device="node:1", requires_grad=True)
    put(p[:1], 5)
    assert p.tolist() == [5.0, 1.0, 1.0]
    assert p.is_leaf
    assert not get(p).requires_grad
    (p * 2).sum().backward()
    assert p.grad is not None
    assert p.grad.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: put(torch.ones(3), x), TypeError, "put: the view has to be a tensor on a node, not a local tensor"),
        (lambda x: get([1]), TypeError, "get: the view has to be a tensor on a node, not list"),
        (lambda x: put(x, torch.ones(4)), RuntimeError, "4"),
        (lambda x: put(x[:1].expand(3), torch.ones(3)), RuntimeError, "single memory location"),
        (lambda x: get(x, into=torch.ones(2)), RuntimeError, "2"),
        (lambda x: get(x, into=torch.ones(1)), RuntimeError, r"the view has the shape \(3,\), into \(1,\)"),
        (lambda x: get(x, into=[0]), TypeError, "into is a tensor, not a list"),
        (lambda x: get(x, into=torch.ones(3), node=0), TypeError, "into= or node="),
        (lambda x: get(x, node=7), ValueError, "node 7"),
        (lambda x: put(x, 1, async_op="yes"), TypeError, "async_op"),
        (lambda x: put(x, 1, asyncop=True), TypeError, "async_op="),
        (lambda x: put(x, object()), (TypeError, RuntimeError), "object"),
        (lambda x: accumulate(torch.ones(3), x), TypeError, "accumulate: the view has to be a tensor on a node"),
        (lambda x: accumulate(x, torch.ones(4)), RuntimeError, "4"),
        (lambda x: accumulate(x, torch.ones(2, 3), "max"), RuntimeError, "3"),
        (lambda x: accumulate(x[:1].expand(3), torch.ones(3)), RuntimeError, "single memory location"),
        (lambda x: accumulate(x[:1].expand(3), torch.ones(3), "max"), RuntimeError, "single memory location"),
        (lambda x: accumulate(x, 1, "mean"), ValueError, "op 'mean' is unknown .*'sum', 'product', 'min', 'max'"),
    ],
)
def test_mistakes_are_told_at_once_and_write_nothing(call: Any, error: Any, words: str) -> None:
    x = torch.zeros(3, device="node:1")
    with pytest.raises(error, match=words):
        call(x)
    assert x.tolist() == [0.0, 0.0, 0.0]


def test_what_has_failed_is_raised_by_the_work() -> None:
    bad = torch.zeros(2, device="node:0")[torch.tensor([5], device="node:0")]
    x = torch.zeros(3, device="node:1")
    work = put(x, bad, async_op=True)
    with pytest.raises(IndexError):
        work.wait()
    with pytest.raises(IndexError):
        get(x)
    assert get(torch.ones(2, device="node:1")).tolist() == [1.0, 1.0]


def test_a_lost_node_ends_the_waiting() -> None:
    """The last test: the module's session has one node less afterwards."""
    x, y = torch.zeros(3, device="node:1"), torch.ones(3, device="node:0")
    testing.stop(1)
    works = [put(x, y, async_op=True), get(x, async_op=True), get(x, node=0, async_op=True)]
    testing.kill(1)
    for work in works:
        with pytest.raises(dt.NodeLost, match="node 1"):
            work.wait(60)
    assert get(y).tolist() == [1.0, 1.0, 1.0]
