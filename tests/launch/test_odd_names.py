"""Scripts in folders whose names are no UTF-8, as the system allows: nodes import from there, and work there."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import search_path
from limits import HANG

from disttensor.errors import StartError
from disttensor.runtime.launch.tree.control import Ended
from disttensor.runtime.launch.tree.framed import frame
from disttensor.runtime.node.checkpoint_disk import began_of
from disttensor.runtime.process.lifetime import children

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


PLAIN = """
import disttensor as dt

if __name__ == "__main__":
    with dt.init_master_worker(nodes=1, threads=1):
        print(dt.run(int, 1, node=0))
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


def test_another_process_whose_name_is_no_text(tmp_path: Path) -> None:
    """It ended the fork server of each session on its host: who looks for children looks at all processes."""
    (tmp_path / "odd \udcff)").symlink_to("/bin/sleep")
    with subprocess.Popen([tmp_path / "odd \udcff)", "600"]) as other:
        try:
            assert other.pid in children()
            assert began_of(other.pid)
            (tmp_path / "job.py").write_text(PLAIN)
            done = subprocess.run(
                [sys.executable, "job.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": search_path()},
                capture_output=True, text=True, timeout=HANG, check=False,
            )  # fmt: skip
        finally:
            other.kill()
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


#: What programs that dtrun runs say of what they were told: by the script and its node, and by a node alone.
TOLD = """
import os, sys
VALUE, HERE, ARGUMENT = "\\udcfe", "\\udcfd", "\\udcfc"

def sees():
    return os.environ["ODD"] == VALUE, os.environ["HERE"] == HERE

if __name__ == "__main__":
    if "RANK" in os.environ:
        print(*sees(), sys.argv[1] == ARGUMENT)
    else:
        import disttensor as dt
        with dt.init_master_worker():
            print(*dt.run(sees, node=0), sys.argv[1] == ARGUMENT)
            dt.run(print, "on the node", node=0)
"""


#: Stands for ssh: says the address, or runs here what would run there.
SSH = """#!/bin/sh
case "$*" in
*" -G "*) echo hostname 127.0.0.1;;
*) for last; do :; done; exec sh -c "$last";;
esac
"""


@pytest.mark.parametrize(
    ("options", "prefix"),
    [(["--hosts", "elsewhere:1", "--python", "{python}"], ""), (["-n", "1", "--process-group"], "[node 0] ")],
    ids=["ssh", "process group"],
)
def test_dtrun_is_told_what_is_no_text(tmp_path: Path, options: list[str], prefix: str) -> None:
    """Values, the folders of the script and of logs, the interpreter elsewhere, and arguments."""
    folder, logs, python, ssh = (tmp_path / f"{name} \udcff" for name in ("odd", "logs", "python", "ssh"))
    folder.mkdir()
    (folder / "job.py").write_text(TOLD)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    ssh.write_text(SSH)
    for program in (python, ssh):
        program.chmod(0o700)
    command = [sys.executable, "-m", "dtrun", *(word.format(python=python) for word in options)]
    command += ["--env", "ODD=\udcfe", "--env", "HERE", "--log-dir", str(logs), "job.py", "\udcfc"]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": search_path(), "HERE": "\udcfd", "DISTTENSOR_SSH": shlex.quote(str(ssh))},
        cwd=folder, capture_output=True, text=True, errors="replace", timeout=HANG, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    log = (logs / "0" / "stdout.log").read_text()
    if prefix:
        assert (done.stdout, log) == (f"{prefix}True True True\n", "True True True\n")
    else:
        assert (sorted(done.stdout.splitlines()), log) == (["True True True", "[node 0] on the node"], "on the node\n")


def test_a_text_that_can_not_be_told_is_named() -> None:
    with pytest.raises(StartError, match=r"'\\udcff' can't be told to the processes of a job: it is no UTF-8"):
        frame(Ended(0, 1, 0, "\udcff", ()))
