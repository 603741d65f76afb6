"""Modules beside the script, on hosts that don't have them: what is gathered, and how it is imported there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from checkout import KIT
from limits import HANG
from test_launch import STUBS, bundles, collect

from disttensor.runtime.launch import Exited
from disttensor.runtime.launch.starters.local import LocalLauncher
from disttensor.runtime.launch.tree import shipping
from disttensor.runtime.launch.tree.control import Modules
from disttensor.runtime.launch.tree.shipping import Sources, TooMuch, gather, offer, unpack

pytestmark = pytest.mark.cold  # stubs import no torch, and some of this is about imports


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    files = {
        "train.py": "",
        "beside.py": "import package.inner\nname = 'beside'\ndef fail():\n    raise KeyError('on line 4')\n",
        "package/__init__.py": "from . import inner\n",
        "package/inner.py": "from .deep.lowest import value\n",
        "package/deep/lowest.py": "value = 7\n",  # a namespace: no __init__.py
        "umlaut.py": "# coding: latin-1\nname = 'ä'\n",
        "data.json": "{}",
        ".hidden/x.py": "",
        "env/pyvenv.cfg": "",
        "env/lib/torch.py": "",
        "__pycache__/y.py": "",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="latin-1")
    return folder


def test_what_is_gathered(project: Path) -> None:
    (project / "package" / "again").symlink_to(project / "package")
    (project / "gone.py").symlink_to(project / "nowhere")
    found = gather(str(project))
    assert sorted(found.files) == [
        *("beside.py", "package/__init__.py", "package/deep/lowest.py", "package/inner.py", "train.py", "umlaut.py"),
    ]
    assert unpack(found.pack()) == found
    assert gather(str(project)).digest() == found.digest()
    (project / "beside.py").write_text("name = 'other'")
    assert gather(str(project)).digest() != found.digest()


def test_limits(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TooMuch, match="1 MiB of sources when packed"):
        Sources("/x", {"x.py": os.urandom(shipping.PACKED)}).pack()
    monkeypatch.setattr(shipping, "LIMIT", 64)
    with pytest.raises(TooMuch, match="MiB of sources"):
        gather(str(project))
    monkeypatch.setattr(shipping, "ENTRIES", 3)
    with pytest.raises(TooMuch, match="3 files and directories"):
        gather(str(project))


def test_a_name_that_is_no_text_is_no_modules(project: Path) -> None:
    before = gather(str(project))
    (project / os.fsdecode(b"\xff.py")).write_text("")
    assert gather(str(project)) == before
    assert unpack(before.pack()) == before


@pytest.mark.parametrize(
    "data",
    [
        b"", b"nonsense", b"x\x9c\x03\x00\x00\x00\x00\x01", zlib.compress(b"\x82\xa6folder\xa1\xff\xa5files\x80"),
        zlib.compress(b"\x82\xa6folder\xa1x\xa1y" + b"\x91" * 100_000),
    ],
)  # fmt: skip
def test_nonsense(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        unpack(data)


USE = """
import inspect, json, sys, traceback
from disttensor.runtime.launch.tree.shipping import import_shipped
folder, packed = sys.argv[1:]
sys.path.insert(0, folder)
try:
    import absent  # as on a host that has looked there before
except ImportError: pass
took = import_shipped(open(packed, "rb").read())
import beside, umlaut, package.deep.lowest
try:
    beside.fail()
except KeyError:
    trace = traceback.format_exc()
try:
    import absent
except ModuleNotFoundError as e:
    absent = str(e)
print(json.dumps([took, beside.package.inner.value, beside.__file__, inspect.getsource(beside.fail), trace, absent,
    package.__path__, umlaut.name]))
"""


@pytest.mark.parametrize("there", ["the same", "other", "nothing"])
def test_where_they_are_imported(project: Path, tmp_path: Path, there: str) -> None:
    packed = tmp_path / "packed"
    packed.write_bytes(gather(str(project)).pack())
    if there == "other":
        (project / "package" / "deep" / "lowest.py").write_text("value = 8\n")
        (project / "beside.py").write_text("other = 'lines'\n" * 9)
    elif there == "nothing":
        project.rename(tmp_path / "away")
    done = subprocess.run(
        [sys.executable, "-c", USE, str(project), str(packed)],
        capture_output=True,
        text=True,
        timeout=HANG,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(KIT), *filter(None, sys.path)])},
    )
    assert done.returncode == 0, done.stderr
    took, value, file, source, trace, absent, path, umlaut = json.loads(done.stdout)
    assert took == (there != "the same")
    assert (value, umlaut, absent) == (7, "ä", "No module named 'absent'")
    assert file == str(project / "beside.py")
    assert path == [str(project / "package")]
    assert source == "def fail():\n    raise KeyError('on line 4')\n"
    assert f'File "{project}/beside.py", line 4, in fail\n    raise KeyError(' in trace
    assert not list(tmp_path.glob("**/__pycache__/*.pyc")) or there == "the same"


def test_nodes_import_them() -> None:
    launcher = LocalLauncher("stub_workers:act", STUBS)
    launcher._wire.send_message(Modules(Sources("/nowhere/project", {"lent.py": b"value = 5"}).pack()))
    launcher.start(bundles("borrow"))
    ended = [e for e in collect(launcher, 2) if isinstance(e, Exited)]
    launcher.stop(0)
    assert [(e.code, e.tail) for e in ended] == [(0, ("5 /nowhere/project/lent.py",))]


def test_too_much_is_said(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert unpack(offer(str(project))) == gather(str(project))
    assert offer("") == b""
    monkeypatch.setattr(shipping, "LIMIT", 64)
    assert offer(str(project)) == b""
    assert "modules beside the script are not sent to other hosts" in capsys.readouterr().err
