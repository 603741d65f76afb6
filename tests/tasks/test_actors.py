"""Actors: what their methods return is what an object here returns, in order, beside all else; their ends; errors."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from aftermath import aftermath
from equal import same
from stream_kit import held, hold, meet, release, thread

import disttensor as dt


class Ledger:
    """State, tensors and random numbers, to be used here and on a node."""

    def __init__(self, start: float, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.lines = [start]
        self.weights = nn.Linear(3, 2)
        self.inside = 0

    def add(self, value: float) -> list[float]:
        assert self.inside == 0, "two calls at once"
        self.inside += 1
        self.lines.append(value)
        self.inside -= 1
        return list(self.lines)

    def apply(self, x: torch.Tensor, drop: bool = False) -> torch.Tensor:
        return F.dropout(self.weights(x), 0.5, drop).detach()

    def train(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        loss = self.weights(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in self.weights.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        return loss.detach(), {"weight": self.weights.weight, "lines": len(self.lines)}

    def state(self) -> torch.Tensor:
        return self.weights.weight

    def draw(self) -> list[torch.Tensor]:
        return [torch.rand(2), torch.randn(2), torch.randperm(5), torch.randint(9, (3,)), torch.empty(2).uniform_()]

    def fail(self) -> None:
        self.lines.append(-1.0)
        raise ValueError("so it is")

    def wait(self, name: str) -> bool:
        return hold(name)

    def wait_in_python(self, path: str) -> None:
        """Waits until it is interrupted, which in a lane's thread happens between two instructions of Python."""
        Path(path).touch()
        while True:
            time.sleep(0.001)

    def meet(self, name: str) -> bool:
        return meet(name)

    def total(self, x: torch.Tensor) -> float:
        return float(x.sum())

    def write(self, x: torch.Tensor) -> float:
        return float(x.mul_(2).sum())

    @staticmethod
    def double(x: float) -> float:
        return 2 * x

    @classmethod
    def name(cls) -> str:
        return cls.__name__

    def __call__(self, x: int) -> int:
        return x + 1

    async def later(self) -> None: ...

    @property
    def count(self) -> int:
        return len(self.lines)


# ---- results, and their order ----------------------------------------------------------------------------------------


def test_the_results_are_those_of_an_object_here(session: None) -> None:
    there, here = dt.actor(Ledger, 1.5, seed=3, node=1), Ledger(1.5, seed=3)
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.randn(4, 3, generator=g)
        same(there.apply(x.to("node:1")).result(), here.apply(x))
        same(there.apply(x.to("node:0"), drop=True).result(), here.apply(x, drop=True))  # sent from node to node
        loss, told = there.train(x).result()  # from here
        wanted, wanted_told = here.train(x)
        same(loss, wanted)
        assert told["lines"] == wanted_told["lines"]
        same(told["weight"], wanted_told["weight"].detach())
        for mine, its in zip(there.draw().result(), here.draw(), strict=True):
            same(mine, its)
        assert there.add(1.0).result() == here.add(1.0)
    assert there.double(4.0).result() == 8.0
    assert there.name().result() == "Ledger"
    assert there(3).result() == 4


class Told:
    """An object whose methods have much to say of themselves."""

    def take(self, k: int, *, by: float = 1.0) -> list[int]:
        """Takes so many."""
        return [k]

    @staticmethod
    def both(a: int, b: int) -> int:
        return a + b

    @classmethod
    def made(cls, k: int = 3) -> str:
        return cls.__name__ * k

    def plain(self, x):  # type: ignore[no-untyped-def]
        return x


class Later(Told):
    def take(self, k: int, *, by: float = 2.0) -> list[int]:
        return [k, k]


def test_a_method_of_a_handle_has_the_name_docstring_and_signature_of_the_classs(session: None) -> None:
    told = dt.actor(Told, node=0)
    assert (told.take.__name__, told.take.__qualname__, told.take.__doc__) == ("take", "Told.take", "Takes so many.")
    assert inspect.getdoc(told.take) == "Takes so many."
    assert str(inspect.signature(told.take)) == "(k: 'int', *, by: 'float' = 1.0) -> 'Submitted[list[int]]'"
    assert str(inspect.signature(told.both)) == "(a: 'int', b: 'int') -> 'Submitted[int]'"
    assert str(inspect.signature(told.made)) == "(k: 'int' = 3) -> 'Submitted[str]'"
    assert str(inspect.signature(told.plain)) == "(x)"
    assert told.plain.__doc__ is None
    assert (told.both(1, 2).result(), told.made().result(), told.take(4, by=0.5).result()) == (3, "Told" * 3, [4])


def test_a_method_is_called_by_that_of_the_class_too(session: None) -> None:
    told, later = dt.actor(Told, node=0), dt.actor(Later, node=1)
    assert told[Told.take](2, by=3.0).result() == [2]
    assert later[Told.take](2).result() == [2, 2]  # as of any object, that of its own class
    assert later[Later.take](k=1).result() == [1, 1]
    for other in (Later.take, Ledger.add, len, "take", 3):
        with pytest.raises(
            TypeError, match=r"<actor Told on node 0>\[\.\.\.\] takes a method of Told, and .* is not one"
        ):
            told[other]


def test_actors_without_a_node_are_spread(session: None) -> None:
    """Over those that have the fewest; a block says which."""
    nodes = len(dt.nodes())
    actors = [dt.actor(Ledger, k) for k in range(2 * nodes)]
    assert sorted(actor.node for actor in actors) == sorted([*range(nodes)] * 2)
    actors[3].close().wait()
    assert dt.actor(Ledger, 0).node == actors[3].node
    with dt.node(nodes - 1):
        assert [dt.actor(Ledger, k).node for k in range(2)] == [nodes - 1] * 2
    for actor in actors:
        actor.close().wait()


def test_calls_are_done_in_the_order_of_issue_and_one_at_a_time(session: None) -> None:
    actors = [dt.actor(Ledger, 0.0, node=node) for node in (0, 0, 1)]
    works = [[each.add(float(i)) for each in actors] for i in range(1, 30)]
    for i, row in enumerate(works, 1):
        assert [work.result() for work in row] == [[float(k) for k in range(i + 1)]] * 3


def test_calls_of_several_threads_are_all_done(session: None) -> None:
    actor = dt.actor(Ledger, 0.0, node=0)
    threads = [thread(lambda k: [actor.add(float(k)) for _ in range(10)], k) for k in (1, 2, 3)]
    for each in threads:
        each.join()
    assert sorted(actor.add(4.0).result()) == [0.0, *[1.0] * 10, *[2.0] * 10, *[3.0] * 10, 4.0]


def test_actors_of_a_node_run_side_by_side_and_beside_the_node(session: None) -> None:
    one, two = dt.actor(Ledger, 0.0, node=1), dt.actor(Ledger, 0.0, node=1)
    works = [one.meet("actors"), two.meet("actors")]  # each would wait for ever if it were alone
    assert [work.result() for work in works] == [True, True]
    first = one.meet("default")
    assert dt.run(meet, "default", node=1)
    assert first.result()


def test_the_node_computes_while_a_method_runs(session: None) -> None:
    actor = dt.actor(Ledger, 0.0, node=1)
    held_up = actor.wait("computes")
    dt.run(held, "computes", node=1)
    x = torch.arange(4.0, device="node:1")
    assert (x * 2).sum().item() == 12
    assert not held_up.is_completed()
    dt.run(release, "computes", node=1)
    assert held_up.result()


class Friend:
    """Reaches what other threads of its process wait for."""

    def held(self, name: str) -> bool:
        return held(name)

    def release(self, name: str) -> bool:
        return release(name)


def test_a_call_without_tensors_does_not_wait_for_the_node(session: None) -> None:
    actor, friend = dt.actor(Ledger, 0.0, node=1), dt.actor(Friend, node=1)
    x = torch.zeros(3, device="node:1")
    busy = thread(lambda: dt.run(hold, "busy", node=1))
    friend.held("busy").wait()
    x.add_(1)  # behind that
    late, early = dt.actor(Ledger, 0.0, node=1).total(x), actor.add(2.0)
    assert early.result() == [0.0, 2.0]
    assert not late.is_completed()
    friend.release("busy").wait()
    busy.join()
    assert late.result() == 3.0


# ---- tensors ---------------------------------------------------------------------------------------------------------


def test_an_argument_is_what_it_was_when_the_call_was_issued(session: None) -> None:
    actor = dt.actor(Ledger, 0.0, node=1)
    actor.wait("arguments")
    x = torch.zeros(4, device="node:1")
    elsewhere = torch.zeros(4, device="node:0")
    x.add_(1)
    x[1:].add_(1)
    elsewhere.add_(3)
    totals = [actor.total(x), actor.total(x[1:3]), actor.total(elsewhere)]
    x.fill_(100)
    elsewhere.fill_(100)
    dt.run(release, "arguments", node=1)
    assert [each.result() for each in totals] == [7.0, 4.0, 12.0]


def test_what_a_method_writes_is_its_own(session: None) -> None:
    actor = dt.actor(Ledger, 0.0, node=1)
    x, here = torch.ones(3, device="node:1"), torch.ones(3)
    assert actor.write(x).result() == 6.0
    assert actor.write(here).result() == 6.0
    same(x, torch.ones(3))
    assert torch.equal(here, torch.ones(3))


def test_a_result_does_not_change_with_the_actor(session: None) -> None:
    actor, here = dt.actor(Ledger, 0.0, seed=1, node=1), Ledger(0.0, seed=1)
    before = actor.state().result()
    actor.train(torch.ones(1, 3)).wait()
    same(before, here.state().detach())
    before.zero_()  # nor the actor with it
    here.train(torch.ones(1, 3))
    same(actor.state().result(), here.state().detach())


def test_a_result_is_an_argument_of_other_actors_without_the_script(session: None) -> None:
    one, two = dt.actor(Ledger, 0.0, seed=1, node=1), dt.actor(Ledger, 0.0, node=2)
    big = torch.ones(1000, 3, device="node:0")
    two.total(one.apply(big).result()).wait()
    dt.channels.reset_stats()
    out = one.apply(big).result()
    total = two.total(out).result()
    rows = dt.channels.stats()
    assert rows.received.bytes >= 1000 * 5 * 4
    assert not [row for row in rows if row.at == "master"]
    assert total == float(Ledger(0.0, seed=1).apply(torch.ones(1000, 3)).sum())


def test_a_tensor_of_a_mesh_is_the_nodes_own_shard(session: None) -> None:
    mesh = dt.mesh(dp=2, nodes=[0, 1])
    x = dt.shard(torch.arange(6.0), mesh, dp=0)
    assert dt.actor(Ledger, 0.0, node=1).total(x).result() == 12.0
    actor = dt.actor(Ledger, 0.0, node=2)  # which is not in the mesh
    assert actor.total(x.at(dp=1)).result() == 12.0
    with pytest.raises(RuntimeError, match="its ranks may differ"):
        actor.total(x)
    mesh.close()


# ---- random numbers --------------------------------------------------------------------------------------------------


class Dice:
    def roll(self) -> torch.Tensor:
        return torch.cat([torch.rand(3), F.dropout(torch.ones(8), 0.5), torch.empty(2).normal_()])


def test_an_actors_draws_depend_on_its_seed_only_and_change_no_others(session: None) -> None:
    mesh = dt.mesh(dp=2, nodes=[0, 1])

    def draws(beside: bool) -> list[torch.Tensor]:
        torch.manual_seed(5)
        dice = [dt.actor(Dice, node=0), dt.actor(Dice, node=1)] if beside else []
        found = []
        for _ in range(3):
            rolls = [each.roll() for each in dice]
            found += [torch.rand(4, device=mesh.device).cpu(), torch.rand(4, device="node:1").cpu()]
            if beside:
                rolled.append([roll.result().cpu() for roll in rolls])
        return found

    rolled: list[list[torch.Tensor]] = []
    alone, first, second = draws(False), draws(True), draws(True)
    for a, b, c in zip(alone, first, second, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    for a, b in zip(rolled[:3], rolled[3:], strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
        assert not torch.equal(a[0], a[1])
    assert not torch.equal(rolled[0][0], rolled[1][0])
    mesh.close()


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_of_a_method_does_not_end_the_actor(session: None) -> None:
    actor = dt.actor(Ledger, 0.0, node=1)
    failing = actor.fail()
    after = actor.add(1.0)
    with pytest.raises(ValueError, match="so it is") as told:
        failing.result()
    notes = "".join(told.value.__notes__)
    assert "Ledger.fail() on node 1" in notes
    assert "test_actors.py" in notes
    assert "in fail" in notes
    assert after.result() == [0.0, -1.0, 1.0]


class Unmakable:
    def __init__(self) -> None:
        raise KeyError("not today")

    def work(self) -> int:
        return 1


def test_an_error_of_init_is_told_by_ready_and_by_each_call(session: None) -> None:
    actor = dt.actor(Unmakable, node=1)
    for work in (actor.work(), actor.ready, actor.work(), actor.close()):
        with pytest.raises(KeyError, match="not today") as told:
            work.result()
        assert "Unmakable() on node 1" in "".join(told.value.__notes__)


def test_a_shape_that_does_not_fit_is_told_at_the_call(session: None) -> None:
    actor = dt.actor(Ledger, 0.0, node=1)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        actor.apply(torch.ones(4, 5, device="node:1")).result()
    assert actor.add(1.0).result() == [0.0, 1.0]


def test_a_method_that_its_class_gets_later_is_the_one_that_is_called(
    session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = dt.actor(Ledger, 0.0, node=1)
    assert actor.double(3).result() == 6
    monkeypatch.setattr(Ledger, "double", lambda self, x, y: x + y)
    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        actor.double(3)
    monkeypatch.delattr(Ledger, "double")
    with pytest.raises(AttributeError, match="no method 'double'"):
        actor.double(3)


def test_mistakes_are_told_at_the_line(session: None) -> None:
    actor = dt.actor(Ledger, 0.0, node=1)
    with pytest.raises(AttributeError, match="Ledger has no method 'ad'; did you mean 'add'"):
        actor.ad(1)
    with pytest.raises(AttributeError, match=r"Ledger\.count is not a method"):
        actor.count()
    with pytest.raises(TypeError, match=r"Ledger.add\(\): missing a required argument: 'value'"):
        actor.add()
    with pytest.raises(TypeError, match=r"Ledger.add\(\): .*unexpected keyword argument 'valu'"):
        actor.add(1.0, valu=1)
    with pytest.raises(TypeError, match=r"Ledger.later\(\) is async"):
        actor.later()
    with pytest.raises(TypeError, match=r"Ledger\(\): missing a required argument: 'start'"):
        dt.actor(Ledger, node=1)
    with pytest.raises(TypeError, match="a class and the arguments of its __init__"):
        dt.actor(Ledger(0.0), node=1)
    with pytest.raises(TypeError, match="takes one node"):
        dt.actor(Ledger, 0.0, node=[0, 1])
    with pytest.raises(ValueError, match="node 7"):
        dt.actor(Ledger, 0.0, node=7)
    with pytest.raises(TypeError, match=r"can't be pickled|can't be sent|cannot pickle"):
        actor.add(threading.Lock())
    with pytest.raises(TypeError, match="has no __call__"):
        dt.actor(Dice, node=1)()
    with pytest.raises(TypeError, match="has a 'ready'"):
        dt.actor(type("Mine", (), {"ready": lambda self: 1}), node=1)
    for use in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(dt.DisttensorError, match="can't be copied or saved: give it as an argument"):
            use(actor)
    graph = dt.Graph()
    with pytest.raises(dt.errors.GraphError), dt.graph(graph):
        actor.add(1.0)
    assert actor.add(1.0).result() == [0.0, 1.0]


def test_what_can_not_come_back_is_told(session: None) -> None:
    actor = dt.actor(nn.Linear, 2, 2, node=1)
    with pytest.raises(TypeError, match="returned a"):
        actor.parameters().result()
    assert sorted(actor.state_dict().result()) == ["bias", "weight"]


# ---- ends ------------------------------------------------------------------------------------------------------------


class Holder:
    """Much memory, and words about its end."""

    def __init__(self, path: str, fails: bool = False) -> None:
        self.path, self.fails = path, fails
        self.memory = torch.ones(16 << 20)  # 64 MiB

    def note(self, text: str) -> None:
        with open(self.path, "a") as file:
            file.write(text + "\n")

    def wait(self, name: str) -> None:
        hold(name)

    def close(self) -> None:
        self.note("close")
        if self.fails:
            raise OSError("not closed")

    def __del__(self) -> None:
        self.note("gone")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def told(path: Path, lines: list[str]) -> None:
    """Waits until a file has these lines."""
    pause = threading.Event()
    while not path.exists() or path.read_text().split() != lines:
        pause.wait(0.01)


@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_an_actor_ends_after_what_was_issued_and_its_memory_returns(session: None, tmp_path: Path, how: str) -> None:
    path = tmp_path / "said"
    with aftermath(1):
        before = dt.run(resident, node=1)
        actor = dt.actor(Holder, str(path), node=1)
        actor.ready.wait()
        assert dt.run(resident, node=1) > before + (60 << 20)
        name = f"ends-{how}"
        actor.wait(name)
        actor.note("call")
        if how == "with":
            with actor:
                dt.run(release, name, node=1)
        else:
            if how == "close":
                closing = actor.close()
                assert actor.close() is closing
                with pytest.raises(dt.DisttensorError, match="is closed"):
                    actor.note("late")
            del actor
            gc.collect()
            torch.ones(1, device="node:1").item()  # what is dropped goes with the next commands
            dt.run(release, name, node=1)
            if how == "close":
                assert closing.wait()
        told(path, ["call", "close", "gone"])
        pause = threading.Event()
        while dt.run(resident, node=1) > before + (16 << 20):
            pause.wait(0.01)


def test_an_error_of_close_is_told(session: None, tmp_path: Path) -> None:
    actor = dt.actor(Holder, str(tmp_path / "said"), fails=True, node=1)
    with pytest.raises(OSError, match="not closed"):
        actor.close().wait()
    with pytest.raises(OSError, match="not closed"), dt.actor(Holder, str(tmp_path / "said"), fails=True, node=1):
        pass


def test_a_call_is_cancelled_and_the_actor_goes_on(session: None, tmp_path: Path) -> None:
    actor, began = dt.actor(Ledger, 0.0, node=1), tmp_path / "began"
    running, queued, after = actor.wait_in_python(str(began)), actor.add(1.0), actor.add(2.0)
    while not began.exists():
        assert not running.is_completed()
    assert queued.cancel()
    assert running.cancel()
    for work in (running, queued):
        with pytest.raises(dt.errors.CancelledError):
            work.result()
    assert after.result() == [0.0, 2.0]


def test_await(session: None) -> None:
    async def main() -> list[Any]:
        actor = dt.actor(Ledger, 0.0, node=1)
        await actor.ready
        got = await asyncio.gather(actor.add(1.0), actor.add(2.0))
        with pytest.raises(ValueError, match="so it is"):
            await actor.fail()
        return got

    assert asyncio.run(main()) == [[0.0, 1.0], [0.0, 1.0, 2.0]]


def test_a_stopped_node_goes_on_where_it_was(session: None) -> None:
    actor = dt.actor(Ledger, 0.0, node=2)
    actor.ready.wait()
    pid = int(dt.nodes()[2]["pid"])
    os.kill(pid, signal.SIGSTOP)
    try:
        works = [actor.add(float(i)) for i in range(1, 4)]
        with pytest.raises(TimeoutError):
            works[0].wait(timeout=0.05)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert works[-1].result() == [0.0, 1.0, 2.0, 3.0]
