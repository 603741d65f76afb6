"""Folders for the sockets of jobs, in which no other test's jobs are."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from disttensor.runtime.host import socket_folder


@contextmanager
def job_folder() -> Iterator[Path]:
    """A folder of this user's, as systemd makes one, for jobs of this process and of those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        folder = Path(tempfile.mkdtemp(prefix="see-"))
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.setattr(socket_folder, "_TMP", str(folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder)
