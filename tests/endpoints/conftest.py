"""What the files of tests of endpoints share: an endpoint of a session, and its connection file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from disttensor.tasks import Endpoint


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "job.connection"


@pytest.fixture
def endpoint(nodes: object, file: Path) -> Iterator[Endpoint]:
    with Endpoint(file) as made:
        yield made
