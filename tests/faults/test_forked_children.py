"""Processes that a user's function forks on a node, and that come out of it as the node does: they end there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import disttensor as dt

#: The exit code of a child that has come out of the function that has forked it.
ENDED = 70


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=2, threads=1):
        works()  # opens what is opened when it is first needed, and these do that of the script's own data connections
        for node in range(2):
            torch.ones(1 << 14, device=f"node:{node}").cpu()
        dt.run(len, dt.tasks.SharedDict(), node=1)
        dt.run(fork_nothing, node=dt.mesh(dp=2), distributed=True)
        yield


def fork_nothing() -> None:
    pass


def fork(*_: Any) -> int:
    return os.fork()


def fork_and_raise(found: dt.tasks.SharedDict) -> int:
    pid = os.fork()
    if pid:
        found["child"] = pid
    raise ValueError("both raise")


def fork_and_exit() -> int:
    pid = os.fork()
    if not pid:
        os._exit(5)
    return pid


def code_of(pid: int) -> int:
    """The exit code of a child of this node, when it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Forking:
    """Forks where it is unpickled, where its method is called, and where the result is encoded."""

    def __init__(self, child: int = -1) -> None:
        self.child = child

    def __reduce__(self) -> Any:
        return made, ()

    def fork(self) -> int:
        return os.fork()


def made() -> Forking:
    return Forking(os.fork())


def child_of(found: Forking) -> int:
    return found.child


def of_an_actor() -> int:
    actor = dt.tasks.actor(Forking, node=1)
    return int(actor.fork().result())


WAYS: dict[str, Callable[[], Any]] = {
    "run": lambda: dt.run(fork, node=1),
    "submit": lambda: dt.submit(fork, node=1).result(),
    "map": lambda: next(iter(dt.map(fork, [1], nodes=[1]))),
    "unpickled": lambda: dt.run(child_of, Forking(), node=1),
    "an actor": of_an_actor,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_child_that_comes_out_of_its_function_ends(way: str) -> None:
    child = WAYS[way]()
    assert child > 0
    assert dt.run(code_of, child, node=1) == ENDED
    works()


def test_one_that_raises_ends() -> None:
    found = dt.tasks.SharedDict()
    with pytest.raises(ValueError, match="both raise"):
        dt.run(fork_and_raise, found, node=1)
    assert dt.run(code_of, found["child"], node=1) == ENDED
    works()


def test_one_that_ends_by_itself_has_its_own_code() -> None:
    assert dt.run(code_of, dt.run(fork_and_exit, node=1), node=1) == 5
    works()


def test_ranks_of_a_process_group() -> None:
    children = dt.run(fork, node=dt.mesh(dp=2), distributed=True)
    for node, child in enumerate(children):
        assert dt.run(code_of, child, node=node) == ENDED
    works()


class Samples:
    """A dataset that forks in a sample."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> torch.Tensor:
        child = os.fork() if i == 2 else 0
        return torch.tensor([i, code_of(child) if child else 0])


def test_samples() -> None:
    """A worker that reads them knows its child's end before it goes on."""
    found = [x.tolist() for x in dt.data.distribute(Samples(), 1, batch_size=2, at="node")]
    assert found == [[[0, 0], [1, 0]], [[2, ENDED], [3, 0]]]


def works() -> None:
    """Nobody else has used the node's connections."""
    for _ in range(3):
        assert torch.ones(1000).to("node:1").to("node:0").to("node:1").sum().item() == 1000
    assert dt.run(partial(len, "abc"), node=1) == 3
