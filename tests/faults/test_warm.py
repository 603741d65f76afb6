"""What a first session does while its nodes start."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Script = Callable[..., subprocess.CompletedProcess[str]]


TELLING = """
import os, signal, threading
from disttensor.dispatch import meta_inference as infer

begun, pressed, seen = threading.Event(), threading.Event(), []

def tell():
    begun.set()
    pressed.wait(30)
    seen.append("told")

def press():
    begun.wait(30)
    os.kill(os.getpid(), signal.SIGINT)
    pressed.set()

threading.Thread(target=press).start()
try:
    infer.warm(tell)
except KeyboardInterrupt:
    seen.append("interrupted")
infer.warm(tell)
print(seen)
"""


@pytest.mark.cold
def test_ctrl_c_while_torch_is_told_of_the_device(script: Script) -> None:
    """Which is not broken off."""
    done = script(TELLING)
    assert (done.stdout, done.returncode) == ("['told', 'interrupted']\n", 0), done.stderr


@pytest.mark.cold
def test_what_an_import_of_torchs_fails_by_is_the_error(script: Script) -> None:
    """And not what torch says of the half that was imported: here no file can be written."""
    done = script("""
import os, resource
from disttensor.dispatch import meta_inference as infer

os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch looks for a folder of its own
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    infer.warm(lambda: None)
except Exception as e:
    print(type(e).__name__, e)
""")
    assert done.stdout.startswith("FileNotFoundError [Errno 2] No usable temporary directory found"), done.stderr
