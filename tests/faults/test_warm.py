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
