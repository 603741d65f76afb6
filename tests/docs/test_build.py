"""The wheel has every module, whatever a tool has made of the link disttensor/runtime: kept it, lost it, copied it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from checkout import ROOT
from limits import HANG

NEEDED = ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE", "dtrun.py")
MODULES = {
    *(path.relative_to(ROOT).as_posix() for path in (ROOT / "disttensor").rglob("*.py")),
    *(f"disttensor/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "runtime").rglob("*.py")),
    "dtrun.py",
    "disttensor/py.typed",
}


def build(what: str, folder: Path) -> Path:
    """A "wheel" or "sdist" of the sources in ``folder``, as pip has them built."""
    program = f"from setuptools import build_meta\nprint(build_meta.build_{what}('out'))"
    (folder / "out").mkdir()
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    return folder / "out" / done.stdout.splitlines()[-1]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """As a clone has them."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in NEEDED:
        shutil.copy(ROOT / name, folder)
    nothing_made = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "runtime", folder / "runtime", ignore=nothing_made)
    shutil.copytree(ROOT / "disttensor", folder / "disttensor", symlinks=True, ignore=nothing_made)
    return folder


def contents(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_from_a_clone(sources: Path) -> None:
    assert (sources / "disttensor" / "runtime").is_symlink()
    assert contents(build("wheel", sources)) == MODULES


def test_from_a_zip_without_links(sources: Path) -> None:
    link = sources / "disttensor" / "runtime"
    link.unlink()
    link.write_text("../runtime")  # what a zip has, where nothing makes a link of it
    assert contents(build("wheel", sources)) == MODULES


def test_from_a_copy_that_has_followed_the_link(sources: Path) -> None:
    link = sources / "disttensor" / "runtime"
    link.unlink()
    shutil.copytree(sources / "runtime", link)
    assert contents(build("wheel", sources)) == MODULES


def test_from_an_sdist(sources: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", sources)) as archive:
        archive.extractall(tmp_path / "sdist", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = (tmp_path / "sdist").iterdir()
    assert contents(build("wheel", unpacked)) == MODULES
