"""docs/dev/ROWS.md is what marks, mutants and its table say; tests of rows that no other file shows."""

from __future__ import annotations

import copy
import random
import re
import socket
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import rows
import torch
import torch.nn.functional as F
from checkout import ROOT
from equal import same
from marks import Proof, marked, unseen
from processes import alive_after
from sources import refuse
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from variants import variants

import disttensor as dt
from disttensor import testing

Script = Callable[..., subprocess.CompletedProcess[str]]


# ---- the document ----------------------------------------------------------------------------------------------------


def test_the_page_is_that_of_the_marks() -> None:
    assert rows.PAGE.read_text() == rows.current(), "PYTHONPATH=tests/kit python tests/kit/rows.py"


def test_every_row_is_there_once() -> None:
    table = rows.table()
    beyond = rows.said_beyond(table)
    assert [row.id for row in table] == rows.EVERY + beyond
    order = [(int(found[1]), found[2]) for found in map(rows.BEYOND.fullmatch, beyond) if found]
    assert order == sorted(set(order))
    assert all(row.what for row in table)


def test_each_mark_is_of_a_row_and_is_seen() -> None:
    there = {row.id for row in rows.table()}
    refuse((str(proof) for proof in marked("row") if not set(proof.rows) <= there), "a mark is of a row")
    refuse(unseen("row", Path(__file__)), "a mark stands where the scan looks, with a row")


def test_a_rows_mutant_turns_a_test_of_this_row_red() -> None:
    """And names rows that there are."""
    proofs = marked("row")
    shown = {row.id: {proof.name for proof in proofs if row.id in proof.rows} for row in rows.table()}
    vain = [(mutant.name, row) for mutant in rows.mutants() for row in mutant.rows if not mutant.red & shown[row]]
    refuse((f"{name}: {row}" for name, row in vain), "a row's mutant turns a test of this row red")


def test_every_working_row_has_a_mutant() -> None:
    """What no mutant breaks is not claimed."""
    refuse(rows.unbroken(rows.table(), marked("row"), rows.mutants()), "a row that works has a mutant")


#: Rows whose mutants can only be in the engine, and why. The list only shrinks: one that has another has to leave it.
INSIDE: dict[str, str] = {
    "T24": "memory goes back without a call of anybody's",
    "I32": "its test runs in Slurm's suite only, and the example has no other part than what other rows break",
    "P11": "what mpiexec makes of a hostfile and of variables is MPI's, and the engine reads what it has told",
}


def test_each_row_has_a_mutant_where_users_call_it() -> None:
    """Else its tests may be of the engine alone, and what users call may do nothing."""
    found = rows.inside(rows.mutants())
    assert sorted(found - set(INSIDE)) == [], "break the public function that the row's text names"
    assert sorted(set(INSIDE) - found) == [], "take these from the list"


def test_users_are_told_what_was_dropped() -> None:
    """On the page that a row names, in words that it quotes."""
    dropped = {row.id: row.told for row in rows.table() if row.dropped}
    assert dropped
    pages = {page: " ".join((ROOT / "docs" / page).read_text().split()) for page, _ in dropped.values()}
    assert [(id, page, words) for id, (page, words) in dropped.items() if words not in pages[page]] == []


def test_what_the_page_says_of_a_row() -> None:
    table = [
        rows.Row("T1", "starts", 'colours: nobody saw them (SLURM.md: "no colour")'),
        rows.Row("T2", "stops", missing="on Sundays"),
        rows.Row("T3", "waits"),
        rows.Row("T4", "is"),
    ]
    proofs = [Proof("a.py::test_a", ("T1", "T2"), frozenset()), Proof("a.py::test_b", ("T4",), frozenset({"ssh"}))]
    text = rows.page(table, proofs, [rows.Mutant("no-start", ("T1",), frozenset())])
    assert text.removeprefix(rows.HEAD) == SAMPLE
    assert rows.page(table[:1], proofs, [rows.Mutant("x", ("T1",), frozenset())]).count("##") == 1


SAMPLE = """
## Working

| row | what | dropped, because | shown by | broken by |
|---|---|---|---|---|
| T1 | starts | colours: nobody saw them ([SLURM.md](../SLURM.md)) | `a.py::test_a` | no-start |
| T4 | is |  | `a.py::test_b` (ssh) |  |

## Partly

| row | what works | shown by | what is missing |
|---|---|---|---|
| T2 | stops | `a.py::test_a` | on Sundays |

## Not yet

| row | what |
|---|---|
| T3 | waits |

## No mutant yet

Nothing shows that the tests of these rows notice when it does nothing:
T4
"""


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.row("T2", "G2")
def test_start_and_stop() -> None:
    for n in (1, 3, 2):
        with dt.init_master_worker(nodes=n, launcher="inproc"):
            assert dt.session.is_initialized()
            assert dt.session.node_count() == torch.node.device_count() == len(dt.nodes()) == n
            assert (torch.ones(2, device=f"node:{n - 1}") + 1).tolist() == [2, 2]
        assert not dt.session.is_initialized()
    dt.shutdown()  # nothing to do
    with pytest.raises(dt.DisttensorError, match="init_master_worker"):
        dt.factories.zeros(1)


@pytest.mark.row("M7")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_elements_and_storages() -> None:
    local = torch.arange(12.0).view(3, 4)
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        remote = local.to("node:1")
        for x in (local, remote):
            x[1, 2] = -5
            x.t()[0, 2] += 0.5
            x.view(-1)[11] = x[0, 3]
        same(remote, local)
        assert remote[1, 2].item() == -5
        assert float(remote[2, 0]) == 8.5
        assert remote.tolist() == local.tolist()
        for x in (local, remote):
            assert x[1:].untyped_storage().nbytes() == 48
            assert x.untyped_storage().device == x.device
        for x in (local, remote):
            s, typed = x.untyped_storage(), x.storage()
            assert (typed[3], len(typed), s[0]) == (3.0, 12, 0)
            copied = s.clone()
            typed[0] = 7.0
            s[4:8].fill_(0)
            assert (x[0, 0].item(), x[0, 1].item()) == (7, 0)
            assert s.tolist() == [*x[:, :].cpu().contiguous().view(torch.uint8).flatten().tolist()]
            s.fill_(1)
            assert set(s.tolist()) == {1}
            s.copy_(copied)
            assert (x[0, 0].item(), x[0, 3].item()) == (0, 3.0)
            assert s.resize_(64) is s
            assert (s.nbytes(), x.shape) == (64, (3, 4))
            longer = torch.empty(0, device=x.device).set_(s, 0, (16,))
            longer[12:] = 9
            x[2, 3] = -1
            assert longer.tolist() == [*x.flatten().tolist()[:11], -1, 9, 9, 9, 9]
        same(remote, local)
        for x in (local, remote):
            s = x.untyped_storage().resize_(8)
            with pytest.raises(RuntimeError):
                x[1, 1].item()
            assert (s.nbytes(), s.tolist()) == (8, [0, 0, 0, 0, 0, 0, 128, 63])
        with pytest.raises(ValueError, match="at least 0 bytes, not -1"):
            remote.untyped_storage().resize_(-1)


@pytest.mark.row("P1")
def test_a_dict_from_node_to_node() -> None:
    def make() -> dict[str, object]:
        return {"a": 7, "b": 3.14, "c": [1, {"x": torch.arange(3)}], 5: ("t", None, True)}

    def look(d: dict[object, object]) -> tuple[object, ...]:
        x = d["c"][1].pop("x")
        return type(x) is torch.Tensor, x * 2, d

    with dt.init_master_worker(nodes=2, launcher="inproc"):
        d = dt.run(make, node=0)
        same(d["c"][1]["x"], torch.arange(3))
        assert d["c"][1]["x"].get_node() == 0
        local, doubled, rest = dt.run(look, d, node=1)
        assert local
        assert doubled.get_node() == 1
        same(doubled, torch.arange(3) * 2)
        assert rest == {"a": 7, "b": 3.14, "c": [1, {}], 5: ("t", None, True)}


@pytest.mark.row("I18")
def test_walking_nested_values() -> None:
    """torch-ipc's walkTable is torch's own tree_map: proxies are leaves, wherever they are."""
    Pair = namedtuple("Pair", "a b")
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        x, y = torch.ones(2, device="node:0"), torch.arange(3.0, device="node:1")
        value = {"w": [x, (y, 5)], "p": Pair(y, None), "s": "text", "same": x}
        seen: list[object] = []
        doubled = tree_map_only(torch.Tensor, lambda t: seen.append(t) or t * 2, value)
        assert [id(t) for t in seen] == [id(t) for t in (x, y, y, x)]
        assert (doubled["w"][1][1], doubled["p"].b, doubled["s"], type(doubled["p"])) == (5, None, "text", Pair)
        assert [t.get_node() for t in (doubled["w"][0], doubled["w"][1][0], doubled["p"].a)] == [0, 1, 1]
        assert (doubled["same"].tolist(), doubled["p"].a.tolist()) == ([2, 2], [0, 2, 4])
        leaves, spec = tree_flatten(value)
        assert tree_unflatten(leaves, spec) == value
        for node, there in enumerate(dt.collectives.broadcast_object(value)):
            assert [t.get_node() for t in tree_leaves(there) if isinstance(t, torch.Tensor)] == [node] * 4
            assert (there["w"][1][1], there["p"].b, there["s"], type(there["p"])) == (5, None, "text", Pair)
            assert (there["same"].tolist(), there["p"].a.tolist()) == ([1, 1], [0, 1, 2])


@pytest.mark.row("T30")
def test_default_levels_of_nodes_without_cuda() -> None:
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        levels = dt.collectives.new_group([1, 0]).levels()
        assert {key: group.nodes for key, group in levels["cuda"].items()} == {(socket.gethostname(), False): (1, 0)}


# ---- what the ancestors' pages say beyond the rows of any of them ----------------------------------------------------


def fitted(step: Callable[[int], torch.Tensor], model: nn.Module, steps: int) -> list[torch.Tensor]:
    """The losses of some steps of training, and the parameters afterwards."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for i in range(steps):
        optimizer.zero_grad()
        losses.append(step(i).detach())
        optimizer.step()
    return losses + [p.detach() for p in model.parameters()]


def close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-12, atol=1e-12, msg=lambda text, i=i: f"{i}: {text}")


def two_layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()


@pytest.mark.row("S11")
def test_a_pipeline_of_stages_that_are_data_and_tensor_parallel() -> None:
    """Eight nodes, one mesh: a batch is cut along "dp", layers along "tp", and the stages lie along "pp"."""
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(4, 12, 6, dtype=torch.float64, generator=draw) for _ in range(2))
    local = nn.Sequential(*(two_layers(k) for k in range(2)))

    def local_step(i: int) -> torch.Tensor:
        loss = F.mse_loss(local(x[i]), y[i])
        loss.backward()
        return loss

    with dt.init_master_worker(nodes=8, launcher="inproc"):
        mesh = dt.mesh(pp=2, dp=2, tp=2)
        stages, places = [], [mesh.slice(pp=k) for k in range(2)]
        for k, place in enumerate(places):
            up, act, down = two_layers(k)
            wide = dt.nn.ColumnParallelLinear.from_plain(up, place, gather_output=False)
            stages.append(
                nn.Sequential(wide, act, dt.nn.RowParallelLinear.from_plain(down, place, input_is_parallel=True))
            )
            assert [part.shape for part in stages[-1][0].weight.detach().shards()] == [(4, 6)] * 4
        pipeline = dt.training.Pipeline(stages, places, microbatches=3)
        with testing.MessageLog() as log:
            found = fitted(lambda i: pipeline.step(x[i], y[i], F.mse_loss), pipeline, 4)
        assert all(log[node].commands for node in range(8))
        wanted = fitted(local_step, local, 4)
        close(found[:4], wanted[:4])
        state = {name: value.cpu() for name, value in pipeline.state_dict().items()}
        close(list(state.values()), [p.detach() for p in local.parameters()])


class AnyOrder(nn.Module):
    """Layers that are used in another order each time, and not all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for i in order:
            x = x + self.layers[i](x).tanh()
        return x


@pytest.mark.row("S14")
@pytest.mark.parametrize("bucket_mb", [25, 4e-4])
def test_layers_in_any_order_train_alike(bucket_mb: float) -> None:
    """No rank has to agree with the others on an order: the script's is that of all. In one bucket, and in several."""
    torch.manual_seed(0)
    local = AnyOrder().double()
    x, chance = torch.randn(5, 6, 5, dtype=torch.float64), random.Random(3)
    orders = [chance.sample(range(6), k) for k in (6, 6, 6, 4, 5)]
    assert len({order.index(0) < order.index(5) for order in orders[:3]}) == 2
    with dt.init_master_worker(nodes=3, launcher="inproc"):
        mesh = dt.mesh(dp=3)
        model = dt.DataParallel(copy.deepcopy(local).to(mesh.device), mesh, bucket_mb=bucket_mb)

        def step(net: nn.Module, i: int) -> torch.Tensor:
            loss = net(x[i], orders[i]).square().mean()
            loss.backward()
            return dt.all_reduce(loss.detach(), "avg", over="dp") if net is model else loss

        found = fitted(lambda i: step(model, i), model, 5)
        for p in model.parameters():
            first, *others = [part.cpu() for part in p.detach().shards()]
            assert all(torch.equal(first, other) for other in others)
        close(found, fitted(lambda i: step(local, i), local, 5))


def calls_of(function: Callable[[], None]) -> int:
    """The calls of disttensor's functions that a call costs this thread."""
    calls = 0

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(dt.__path__[0])

    sys.setprofile(called)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def training(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Ten steps."""
    optimizer = torch.optim.Adam(model.parameters())

    def steps() -> None:
        for _ in range(10):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    steps()  # plans and templates exist
    return steps


def cost(nodes: int) -> tuple[set[tuple[str, ...]], int]:
    """What ten steps of data-parallel training cost: the commands of each node, and the calls that issue them."""
    with dt.init_master_worker(nodes=nodes, launcher="inproc"):
        mesh = dt.mesh(dp=nodes)
        model = dt.DataParallel(two_layers(0).to(mesh.device), mesh, bucket_mb=1e-4)
        steps = training(model, dt.shard(torch.ones(2 * nodes, 6, dtype=torch.float64), mesh, dp=0))
        with testing.MessageLog() as log:
            calls = calls_of(steps)
        assert log.questions == []
        assert {*log.replies} <= {"TookPart"}  # the ends of asynchronous collectives
        return {tuple(name for name in log[k].commands if name != "Free") for k in range(nodes)}, calls


@pytest.mark.row("S16", "S17")
def test_what_a_step_costs_with_eight_times_the_nodes() -> None:
    """Rates depend on the machine, and on what else runs there; what they are made of does not. Each node has the same
    commands, however many there are, and no reply is waited for. The script does a little more for each node."""
    (commands,), calls = cost(2)
    (of_more,), more = cost(16)
    assert len(commands) > 200
    assert of_more == commands
    assert more < 2 * calls
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        one = calls_of(training(two_layers(0).to("node:1"), torch.ones(2, 6, dtype=torch.float64, device="node:1")))
    assert 16 * one > 4 * more, "as many replicas one by one, even without collectives"


@pytest.mark.row("I28", "I29", "I30")
def test_processes_and_locks_on_a_node(script: Script) -> None:
    done = script("""
import fcntl, os, subprocess, threading, time
import disttensor as dt

def program():
    said = subprocess.run(["cat"], input="a b", capture_output=True, text=True).stdout
    code = subprocess.run(["sh", "-c", "exit 7"]).returncode
    sleeper = subprocess.Popen(["sleep", "100"])
    sleeper.terminate()
    child = os.fork()
    if child == 0:
        os._exit(3)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as echo:
        echo.stdin.write("a line\\n")
        line = echo.stdout.readline()
        echo.stdin.close()
    ready, held = os.pipe()
    owner = os.fork()
    if owner == 0:
        kept = open("orphan", "w")
        fcntl.flock(kept, fcntl.LOCK_EX)
        os.write(held, b"!")
        time.sleep(100)
    os.read(ready, 1)
    with open("orphan", "w") as mine:
        try:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            status += 1000
        os.kill(owner, 9)
        os.waitpid(owner, 0)
        fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its owner is dead
    with open("lock", "w") as mine, open("lock", "w") as theirs:
        fcntl.flock(mine, fcntl.LOCK_EX)
        try:
            fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            status += 100
        fcntl.flock(mine, fcntl.LOCK_UN)
        fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
    family = os.getppid() == int(open("/proc/self/stat").read().rpartition(")")[2].split()[1])
    return said, line, code, sleeper.wait(), status, family, os.getpid(), threading.get_native_id()

with dt.init_master_worker(nodes=1):
    *results, pid, thread = dt.run(program)
    print(results, pid == thread == dt.nodes()[0]["pid"] != os.getpid())
""")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "['a b', 'a line\\n', 7, -15, 1103, True] True\n"


@pytest.mark.row("M1")
def test_nodes_do_not_run_the_script(script: Script) -> None:
    """There is no `if __name__ == "__main__"`, and none is needed."""
    done = script("""
import os, sys
import disttensor as dt
print("the script, in", os.getpid())
dt.init_master_worker(nodes=2)
def seen():
    script = os.path.join(os.getcwd(), "program.py")
    return [m for m in sys.modules.values() if getattr(m, "__file__", "") == script] == []
print(dt.run(seen, node=0), dt.run(seen, node=1))
""")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"the script, in \d+\nTrue True\n", done.stdout)


ENDS = [("os.kill(os.getpid(), signal.SIGINT)", -2), ("1 / 0", 1)]


@pytest.mark.row("M20")
@pytest.mark.parametrize(("end", "code"), variants(ENDS))
def test_nodes_end_with_the_script(script: Script, end: str, code: int) -> None:
    done = script(f"""
import os, signal, torch
import disttensor as dt
dt.init_master_worker(nodes=2)
x = torch.ones(300, 300, device="node:1")
print(*[n["pid"] for n in dt.nodes()], flush=True)
for _ in range(500):
    x = x @ x / 300
{end}
x.sum().item()
""")
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert alive_after(3, pids) == []
    assert done.returncode == code, done.stderr


CHANNEL = """
from disttensor.runtime.channel import get_channel

class Mine(get_channel("tcp")):
    name = "mine"

    def isend(self, tensor, peer, transfer):
        print("my channel carries", tensor.numel(), "to", peer, flush=True)
        return super().isend(tensor, peer, transfer)
"""
SENDING = """
import torch
import disttensor as dt
with dt.init_master_worker("mine", nodes=2):
    x = torch.arange(10_000).to("node:0").to("node:1")
    print(x.sum().item())
"""
CARRIED = ["49995000", "[node 0] my channel carries 10000 to 1", "my channel carries 10000 to 0"]


@pytest.mark.slow
def test_a_channel_of_an_installed_package(script: Script, tmp_path: Path) -> None:
    (tmp_path / "my_channel.py").write_text(CHANNEL)
    info = tmp_path / "my_channel-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-channel\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[disttensor.channels]\nmine = my_channel:Mine\n")
    done = script(SENDING)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == CARRIED


@pytest.mark.row("M21")
def test_a_channel_that_the_script_registers(script: Script, tmp_path: Path) -> None:
    (tmp_path / "my_channel.py").write_text(CHANNEL)
    registers = "from my_channel import Mine\nimport disttensor as dt\ndt.channels.register_channel('mine', Mine)\n"
    done = script(registers + SENDING)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == CARRIED
