"""What importing the package costs and changes, in whatever order with torch. Each in a process without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG

pytestmark = pytest.mark.cold


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_run_is_callable_when_its_module_was_imported() -> None:
    program = "import disttensor.run, disttensor as dt; print(callable(dt.run))"
    assert python(program) == "True"


def test_importing_the_package_imports_no_torch() -> None:
    program = "import sys, disttensor as dt; dir(dt); print([m for m in ('torch', 'numpy', 'zmq') if m in sys.modules])"
    assert python(program) == "[]"


FIRST = [
    "import disttensor, torch",
    "import torch, disttensor",
    "from disttensor.collectives import functional; import torch",
    "import disttensor.collectives.functional; import torch",
    "from disttensor.runtime.channel import DataChannel; import torch",
    "from disttensor.testing import MessageLog; import torch",
    "import disttensor.run, torch",
    "from disttensor import *; import torch",
]


@pytest.mark.parametrize("first", FIRST)
def test_torch_knows_the_device_whatever_is_imported_first(first: str) -> None:
    assert python(f"{first}\nprint(torch.device('node:1'), torch.node.is_available())") == "node:1 False"


def test_an_import_of_torch_that_fails_is_no_end(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('this one is broken')")
    program = (
        f"import sys, disttensor\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "try:\n    import torch\nexcept ImportError: pass\n"
        "del sys.path[0]\nimport torch\nprint(torch.device('node'))"
    )
    assert python(program) == "node"


def test_torchs_module_looks_as_it_does_without_us() -> None:
    show = "print(type(torch.__loader__).__name__, type(torch.__spec__.loader).__name__)"
    assert python(f"import disttensor, torch; {show}") == python(f"import torch; {show}")
