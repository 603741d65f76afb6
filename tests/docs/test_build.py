"""The wheel has every module, whatever a tool has made of the link disttensor/runtime: kept it, lost it, copied it. The
sdist has what a clone has. What an index shows of both is whole, and has no link that leads nowhere there."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from checkout import ROOT
from limits import HANG

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: What git leaves out.
IGNORED = (".git", *(name.strip("/") for name in (ROOT / ".gitignore").read_text().split()))
#: What no wheel is made of.
BESIDE = ("docs", "examples", "tests", "tools")
#: What setuptools adds to an sdist. It writes a setup.cfg, too.
ADDED = r"PKG-INFO|disttensor\.egg-info/\S+"
MODULES = {
    *(path.relative_to(ROOT).as_posix() for path in (ROOT / "disttensor").rglob("*.py")),
    *(f"disttensor/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "runtime").rglob("*.py")),
    "dtrun.py",
    "disttensor/py.typed",
    "disttensor/seeing/report.html",
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
    """As a clone has them, without what a wheel needs not."""
    ignored = shutil.ignore_patterns(*IGNORED, *BESIDE)
    return shutil.copytree(ROOT, tmp_path / "sources", symlinks=True, ignore=ignored)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """All of them."""
    return shutil.copytree(ROOT, tmp_path / "clone", symlinks=True, ignore=shutil.ignore_patterns(*IGNORED))


def files(folder: Path) -> set[str]:
    """All files and links below a folder, by their paths in it."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in found}


def metadata(wheel: Path) -> Message:
    """What an index shows of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def dead(description: str) -> list[str]:
    """Targets of a description's links that lead nowhere on a page of their own."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", description) if "://" not in target]


def contents(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_from_a_clone(sources: Path) -> None:
    assert (sources / "disttensor" / "runtime").is_symlink()
    wheel = build("wheel", sources)
    assert contents(wheel) == MODULES
    shown = metadata(wheel)
    description = shown.get_payload(decode=True).decode()
    assert shown["Description-Content-Type"] == "text/markdown"
    assert description.startswith("# disttensor")
    assert "docs/REFERENCE.md" in description
    assert dead(description) == []
    assert dead((ROOT / "README.md").read_text()) != []  # so that there was something to rewrite
    assert [shown[name] for name in ("License-Expression", "Requires-Python", "Author", "Maintainer")] == [
        PROJECT["license"],
        PROJECT["requires-python"],
        *[PROJECT[name][0]["name"] for name in ("authors", "maintainers")],
    ]
    assert shown["Keywords"].split(",") == PROJECT["keywords"]
    assert shown.get_all("Classifier") == PROJECT["classifiers"]
    assert shown.get_all("Provides-Extra") == list(PROJECT["optional-dependencies"])


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


def test_from_an_sdist(clone: Path, tmp_path: Path) -> None:
    """It has all that the clone has, and the link as one, so that its tests run as well."""
    cloned = files(clone)
    with tarfile.open(build("sdist", clone)) as archive:
        archive.extractall(tmp_path / "sdist", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = (tmp_path / "sdist").iterdir()
    assert {name for name in files(unpacked) if not re.fullmatch(ADDED, name)} == cloned
    assert (unpacked / "disttensor" / "runtime").is_symlink()
    assert contents(build("wheel", unpacked)) == MODULES


def test_all_has_every_extra_of_users() -> None:
    """Each but those with which one works on disttensor itself."""
    extras = PROJECT["optional-dependencies"]
    (whole,) = extras["all"]
    assert set(re.findall(r"[\w-]+", whole)) - {"disttensor"} == set(extras) - {"all", "docs", "dev"}


def test_each_extra_of_users_is_named_where_it_is_needed() -> None:
    """By a page, as an argument of pip's."""
    named = {
        extra
        for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
        for extras in re.findall(r"disttensor\[([\w,]+)\]", page.read_text())
        for extra in extras.split(",")
    }
    assert set(PROJECT["optional-dependencies"]) - named == set()
