"""Scripts in folders whose names are no UTF-8, as the system allows: nodes import from there, and work there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import search_path
from limits import HANG

from disttensor.errors import StartError
from disttensor.runtime.launch.tree.control import Ended
from disttensor.runtime.launch.tree.framed import frame

SCRIPT = """
import os, beside
import disttensor as dt

def sees():
    import beside
    return os.getcwd() == beside.WHERE, os.environ["ODD\\udcff"] == "\\udcfe", beside.__file__

if __name__ == "__main__":
    with dt.init_master_worker(nodes=1, threads=1, env={"ODD\\udcff": "\\udcfe"}):
        print(dt.run(sees, node=0) == (True, True, beside.__file__))
"""


def test_a_folder_that_is_no_text(tmp_path: Path) -> None:
    folder = tmp_path / "odd \udcff"
    folder.mkdir()
    (folder / "job.py").write_text(SCRIPT)
    (folder / "beside.py").write_text("import os\nWHERE = os.path.dirname(os.path.abspath(__file__))\n")
    done = subprocess.run(
        [sys.executable, "job.py"], cwd=folder, env={**os.environ, "PYTHONPATH": search_path()}, capture_output=True,
        text=True, errors="replace", timeout=HANG, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_text_that_can_not_be_told_is_named() -> None:
    with pytest.raises(StartError, match=r"'\\udcff' can't be told to the processes of a job: it is no UTF-8"):
        frame(Ended(0, 1, 0, "\udcff", ()))
