"""The lane of `make unit`, whose tests start no process and no session, so that they can run at every edit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from fake_hub import FakeHub

from disttensor.session import session


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that starts a process or a session."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        pytest.fail("a unit test starts no process and no session: its place is another folder of tests/")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(session.Session, "__init__", refuse)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """A hub without nodes."""
    made = FakeHub()
    yield made
    made.close()
