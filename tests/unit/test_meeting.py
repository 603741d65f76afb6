"""How long the script waits for nodes that start: from the last sign that any of them gets on."""

from __future__ import annotations

from collections.abc import Callable
from platform import python_version
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from disttensor.runtime.protocol.bundle import PROTOCOL
from disttensor.runtime.protocol.errors import StartError
from disttensor.session import meeting

HELLO = SimpleNamespace(protocol=PROTOCOL, job="a job", torch=torch.__version__, python=python_version(), host="a")


class Starting:
    """Nodes that start by a clock of their own, each at its second; of the others the launcher says ``state(now)``."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        comes: dict[int, float],
        nodes: int,
        state: Callable[[float], str] = lambda now: "it is on its way",
    ) -> None:
        self.now, self._comes, self._state = 1000.0, comes, state
        self._nodes = [SimpleNamespace(said_hello=None, hello=HELLO) for _ in range(nodes)]
        link = SimpleNamespace(
            nodes=self._nodes,
            losses=SimpleNamespace(errors=[]),
            replies=SimpleNamespace(drain=lambda: None),
            waiting=SimpleNamespace(pause=self._pause),
        )
        launcher = SimpleNamespace(missing=lambda ranks: state(self.now - 1000.0))
        self.session: Any = SimpleNamespace(link=link, job="a job", launcher=launcher)
        monkeypatch.setattr(meeting.time, "monotonic", lambda: self.now)

    def _pause(self, seconds: float) -> None:
        self.now += 1.0
        for rank, second in self._comes.items():
            if self.now - 1000.0 >= second:
                self._nodes[rank].said_hello = cast(Any, HELLO)

    def meet(self, timeout: float) -> float:
        """Returns the seconds that it took."""
        meeting.meet(self.session, range(len(self._nodes)), timeout)
        return self.now - 1000.0


def test_nodes_that_come_one_after_the_other_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 128 of them on a busy host: together they take much longer than the limit."""
    assert Starting(monkeypatch, {rank: 10.0 * rank for rank in range(128)}, 128).meet(60.0) >= 1270


def test_what_the_launcher_says_of_them_is_a_sign_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Starting(monkeypatch, {0: 500.0}, 1, lambda now: f"step {now // 50}").meet(60.0) >= 500


@pytest.mark.parametrize(("comes", "seconds"), [({0: 5.0}, 65), ({0: 5.0, 1: 50.0}, 110)])
def test_one_that_does_not_get_on_is_late_from_the_last_sign_on(
    monkeypatch: pytest.MonkeyPatch, comes: dict[int, float], seconds: float
) -> None:
    starting = Starting(monkeypatch, comes, 3)
    missing = [rank for rank in range(3) if rank not in comes]
    with pytest.raises(StartError) as late:
        starting.meet(60.0)
    assert str(late.value) == (
        f"nodes {missing} of 3 have not answered within 60.0 s:\nit is on its way\n"
        "(counted from the last sign that any of them got on)"
    )
    assert seconds <= starting.now - 1000.0 <= seconds + 3


def test_none_that_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    starting = Starting(monkeypatch, {}, 2)
    with pytest.raises(StartError, match=r"^nodes \[0, 1\] of 2 have not answered within 60.0 s:\nit is on its way$"):
        starting.meet(60.0)
    assert 60 <= starting.now - 1000.0 <= 63
