"""``init_master_worker(verify=...)``: what is wrong on a node is found, and where; nothing else is."""

from __future__ import annotations

import gc
import linecache
import random
import re
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from checkout import ROOT
from seeded_defects import ALWAYS_FOUND, DEFECTS, NODE, kernel, off, ones

import disttensor as dt
from disttensor import testing
from disttensor.dispatch import dispatch, op_table
from disttensor.runtime.protocol.errors import GeometryError, VerifyError
from disttensor.session import current
from disttensor.session.transfers import Transfers
from disttensor.verify import selfcheck


def session(verify: float = 1.0, nodes: int = 2, simulate_cuda: int = 0) -> Any:
    return dt.init_master_worker(nodes=nodes, launcher="inproc", verify=verify, simulate_cuda=simulate_cuda)


@pytest.fixture(autouse=True)
def nothing_unread() -> Iterator[None]:
    """No comparison was given up in any session here but where a test says why."""
    yield
    assert not [why for why in selfcheck.counts().skipped if why.startswith("something")]


# ---- defects ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [family for family in DEFECTS if family not in ALWAYS_FOUND])
def test_a_defect_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    defect = DEFECTS[family]
    with session():
        defect.program()  # nothing to find: it is the defect that is found below
    defect.seed(monkeypatch)
    with session(), pytest.raises(VerifyError) as told:
        defect.program()
    error = told.value
    assert error.operator == defect.operator
    assert defect.says in str(error)
    assert f"computed: on node {error.node} cpu (host " in str(error)
    assert f"issued: {error.line}\n" in str(error)
    path, number = error.line.partition(" in ")[0].rsplit(":", 1)
    assert path == defect.program.__code__.co_filename
    first = defect.program.__code__.co_firstlineno
    if defect.line == "lambda: ":
        assert int(number) == first
    else:
        assert defect.line in linecache.getline(path, int(number))


@pytest.mark.parametrize("family", ALWAYS_FOUND)
def test_another_geometry_is_found_without(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    DEFECTS[family].seed(monkeypatch)
    with session(verify=0), pytest.raises(GeometryError, match=f"{DEFECTS[family].operator} gave a tensor"):
        DEFECTS[family].program().cpu()


@pytest.mark.parametrize("family", ["elementwise", "collective", "copy to a node", "composite"])
def test_without_verify_it_is_not(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    DEFECTS[family].seed(monkeypatch)
    with session(verify=0):
        DEFECTS[family].program()


# ---- what it leaves as it is -----------------------------------------------------------------------------------------


def ways() -> list[bool]:
    """Whether something is in the ways that an operation can take."""
    here = current.session()
    return [
        all(op_table.front[key] is entry for key, entry in op_table.entries.items()),
        any(op_table.front[key] is entry for key, entry in op_table.entries.items()),
        op_table.factory == [dispatch.run],
        here.check is None,
        type(here.transfers) is Transfers,
    ]


def test_nothing_stands_in_the_way_without_it() -> None:
    with session(verify=0):
        assert all(ways())
    with session(verify=0.5):
        torch.ones(2, device="node:0").add(1).cpu()
        torch.special.entr(torch.ones(2, device="node:0"))  # an operator that is new to the table
        assert not any(ways())
    with session(verify=0):
        assert all(ways())


def test_composites_are_torchs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with session():
        pass
    calls: list[str] = []

    def note(*args: Any) -> bool:
        calls.append("operation")
        return False

    monkeypatch.setattr(selfcheck.SelfCheck, "_chosen", note)
    x = torch.rand(1, 1, 4, 8)
    with session(verify=0):
        y = x.to(NODE)
        assert torch.allclose(
            F.scaled_dot_product_attention(y, y, y).cpu(), F.scaled_dot_product_attention(x, x, x), atol=1e-6
        )
        torch.linalg.svdvals(y)
    assert calls == []
    with session(verify=1):
        torch.linalg.svdvals(x.to(NODE))
    assert calls


def test_a_session_is_nobodys_after_its_end() -> None:
    """Torch keeps what is registered with it, and what that holds, beyond what takes its place."""
    with session():
        torch.linalg.svdvals(torch.rand(3, 3).to(NODE))
        held = weakref.ref(current.session())
    gc.collect()
    assert held() is None


def step(where: str) -> list[Any]:
    """A program whose numbers depend on all generators."""
    torch.manual_seed(3)  # nodes that are threads here seed the one generator that there is
    dt.synchronize()
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.ReLU(), nn.Linear(8, 2)).to(where)
    torch.manual_seed(4)
    dt.synchronize()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found: list[Any] = []
    for _ in range(3):
        x = torch.randn(5, 6, device=where)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return [*found, torch.rand(3).tolist(), random.random(), torch.rand(3, device=where).cpu().tolist()]


@pytest.mark.parametrize("launcher", ["inproc", pytest.param("local", marks=pytest.mark.slow)])
def test_numbers_and_generators_are_as_without(launcher: str) -> None:
    found = []
    for verify in (0, 0.3, 1.0):
        with dt.init_master_worker(nodes=2, launcher=launcher, verify=verify, threads=1):
            random.seed(5)
            found.append(step(NODE))
    assert found[0] == found[1] == found[2]
    assert sum(selfcheck.counts().compared.values()) > 100


def test_what_fails_fails_as_without() -> None:
    told = []
    for verify in (0, 1.0):
        with session(verify):
            with pytest.raises(RuntimeError) as here:
                ones(2, 3) @ ones(2, 3)
            picked = F.embedding(torch.tensor([5]).to(NODE), ones(2, 3))  # on the node, later
            after = picked.sum()
            assert (ones(2) * 2).cpu().tolist() == [2, 4]
            with pytest.raises(IndexError) as there:
                after.item()
            F.embedding(torch.tensor([6]).to(NODE), ones(2, 3))
            with pytest.raises(IndexError) as unasked:
                dt.synchronize()
            told.append([str(error.value).splitlines() for error in (here, there, unasked)])
    assert told[0] == told[1]
    skipped = selfcheck.counts().skipped
    assert skipped.pop("something that has failed (IndexError)") >= 3
    assert not skipped
    with session():
        pass


# ---- which operations ------------------------------------------------------------------------------------------------


def test_a_share_is_chosen_and_always_the_same() -> None:
    counts = []
    for _ in range(2):
        with session(verify=0.1):
            x = ones(3)
            for _ in range(1000):
                x * 2
            counts.append(selfcheck.counts())
    assert counts[0] == counts[1]
    assert counts[0].operations == 1001
    assert 60 < counts[0].compared["aten::mul.Tensor"] < 140


@pytest.mark.parametrize("verify", [-0.1, 1.01, float("nan"), float("inf")])
def test_a_share_is_between_0_and_1(verify: float) -> None:
    with pytest.raises(
        ValueError, match=r"verify=.* is not a share: 0 compares nothing, 0.01 one operation of 100, 1 all"
    ):
        session(verify)
    assert not dt.session.is_initialized()


@pytest.mark.parametrize("verify", [True, "0.5", None, 1j])
def test_a_share_is_a_number(verify: Any) -> None:
    with pytest.raises(TypeError, match=r"verify=.* is not a number"):
        session(verify)


def test_what_is_not_compared_is_counted() -> None:
    with session(simulate_cuda=1):
        x = ones(3)
        torch.empty_like(x)
        dt.collectives.barrier()
        with dt.graph(g := dt.Graph()):
            x * 3
        g.replay()
        counts = selfcheck.counts()
    assert counts.partly == {"memory that nothing has written": 1}
    assert counts.skipped == {"a barrier has no values": 1, "nothing runs while a graph is recorded": 1}


def test_streams_and_threads() -> None:
    found: list[float] = []

    def work(k: int) -> None:
        with dt.stream(dt.Stream(node=k)):
            x = torch.full((4,), float(k), device=f"node:{k}")
            for _ in range(5):
                x = x * 2 + 1
            found.append(x.sum().item())

    with session():
        threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == [124.0, 252.0]
    assert selfcheck.counts().compared["aten::mul.Tensor"] == 10


def test_what_has_no_memory_is_no_failure() -> None:
    """Autograd's own zeros; and composites in inference mode, whose parts are compared."""
    with session():
        x = ones(3).requires_grad_()
        torch.autograd.functional.jacobian(lambda y: torch.stack([y.sum(), (y * 2).prod()]), x, create_graph=True)
        torch.ops.aten._efficientzerotensor.default([3], device=x.device) * 2
        with torch.inference_mode():
            torch.fft.hfft(torch.randn(4, 5, dtype=torch.complex64).to(NODE))
            F.linear(ones(2, 3), ones(4, 3))
        dt.synchronize()
        counts = selfcheck.counts()
    assert counts.skipped.pop("a zero of autograd's own, which has no memory") >= 1
    assert counts.skipped.pop("a composite in inference mode; its parts are compared") >= 1
    assert not counts.skipped


COLLECTIVES: list[Callable[[list[torch.Tensor]], Any]] = [
    lambda xs: [
        dt.all_reduce(xs, op)
        for op in (
            dt.collectives.ReduceOp.SUM,
            dt.collectives.ReduceOp.AVG,
            dt.collectives.ReduceOp.MAX,
            dt.collectives.ReduceOp.PRODUCT,
        )
    ],
    lambda xs: dt.all_reduce(xs, transport=torch.bfloat16),
    lambda xs: dt.all_reduce(xs, async_op=True).result(),
    lambda xs: dt.all_reduce([*xs, xs[0] * 3]),
    lambda xs: dt.collectives.reduce(xs, dst=2),
    lambda xs: dt.broadcast(xs, src=1),
    lambda xs: dt.all_gather([[torch.empty_like(x) for _ in xs] for x in xs], xs),
    lambda xs: dt.collectives.all_gather_into_tensor([torch.empty_like(x) for x in xs], xs),
    lambda xs: dt.collectives.gather(xs, [torch.empty_like(xs[1]) for _ in xs], dst=1),
    lambda xs: dt.collectives.scatter(xs, [xs[2] * k for k in range(3)], src=2),
    lambda xs: dt.collectives.reduce_scatter(xs, [[x * k for k in range(3)] for x in xs]),
    lambda xs: dt.collectives.all_to_all(
        [[torch.empty_like(x) for _ in xs] for x in xs], [[x * k for k in range(3)] for x in xs]
    ),
    lambda xs: dt.collectives.sendreceive(xs, 2),
    lambda xs: dt.collectives.send(xs[0], xs[2]),
]


def test_collectives() -> None:
    with session(nodes=3):
        for k, run in enumerate(COLLECTIVES):
            run([torch.randn(4, 2, device=f"node:{node}") * 10**k for node in range(3)])
        counts = selfcheck.counts()
    assert counts.skipped == {}
    kinds = {
        "all_reduce",
        "reduce",
        "broadcast",
        "all_gather",
        "gather",
        "scatter",
        "reduce_scatter",
        "all_to_all",
        "shift",
    }
    assert kinds <= counts.compared.keys()


# ---- whole programs --------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """An embedding, a layer under test, and a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.kind = kind
        if kind == "transformer":
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
            self.body: nn.Module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        elif kind == "lstm":
            self.body = nn.LSTM(16, 16, num_layers=2, dropout=0.1, batch_first=True, bidirectional=True)
        else:
            self.body = nn.Sequential(
                nn.Conv2d(1, 4, 3, padding=1),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Dropout(0.2),
                nn.Flatten(),
            )
        self.head = nn.Linear({"transformer": 16, "lstm": 32}.get(kind, 4 * 4 * 8), 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.kind == "cnn":
            return self.head(self.body(x[:, None]))
        x = self.body(x)
        return self.head((x[0] if self.kind == "lstm" else x).mean(1))


def losses(kind: str, verify: float, steps: int) -> list[float]:
    with dt.init_master_worker(nodes=2, launcher="inproc", verify=verify):
        torch.manual_seed(0)
        dt.synchronize()
        model = Model(kind).to(NODE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(1)
        dt.synchronize()
        found = []
        for _ in range(steps):
            tokens, label = torch.randint(0, 11, (6, 8)).to(NODE), torch.randint(0, 3, (6,)).to(NODE)
            loss = F.cross_entropy(model(tokens), label)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", ["cnn", "transformer", "lstm"])
@pytest.mark.parametrize("steps", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_training(kind: str, steps: int) -> None:
    assert losses(kind, 1.0, steps) == losses(kind, 0, steps)
    counts = selfcheck.counts()
    assert sum(counts.compared.values()) > 50 * steps
    assert set(counts.skipped) <= {"a proxy seen as a CPU tensor, which sends nothing"}
    assert set(counts.partly) <= {"memory that nothing has written"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cnn", "transformer", "lstm"])
def test_training_on_nodes_with_threads_of_their_own(kind: str) -> None:
    """A node that sums in another order differs by roundings only."""
    with dt.init_master_worker(nodes=2, threads=2, verify=1.0):
        torch.manual_seed(0)
        model = Model(kind).to(NODE)
        for _ in range(5):
            F.cross_entropy(
                model(torch.randint(0, 11, (6, 8)).to(NODE)), torch.zeros(6, dtype=torch.long, device=NODE)
            ).backward()
    assert sum(selfcheck.counts().compared.values()) > 100


def test_the_page_shows_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    program = '\n\n\nx = torch.arange(1.0, 7).view(2, 3).to("node:1")\n\ny = x * 2'
    kernel("aten::mul.Tensor", off)(monkeypatch)
    with session(), pytest.raises(VerifyError) as told:
        exec(compile(program, "train.py", "exec"), {"torch": torch})
    text = re.sub(r"host \S+, pid \d+", "host HOST, pid PID", f"VerifyError: {told.value}")
    assert textwrap.indent(text, "    ") in (ROOT / "docs" / "VERIFYING.md").read_text()


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def test_what_a_gpu_may_do_otherwise() -> None:
    """With a stand-in for one: what it draws, and which of several answers it gives, is its own."""
    with session(simulate_cuda=1):
        x = torch.rand(8, 8, device=NODE)
        before = selfcheck.counts()
        with testing.as_cuda(NODE):
            (x * 2).normal_()
            x.sort()
            torch.linalg.svd(x)
            (x @ x).sum()
        counts = selfcheck.counts()
    assert before.partly == {}
    assert counts.partly == {
        "drawn by a GPU, whose generator draws other numbers": 1,
        "several right answers, and a GPU may give another": 2,
    }
    assert counts.skipped == {}
