"""What pyproject.toml can't say: the packages, a link in the sdist, and a long description without dead links.

``disttensor/runtime`` is a link to ``runtime/``. A zip has made a file of it, and then the packages are named here.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist

HERE = Path(__file__).parent


def packages() -> dict[str, object]:
    """The arguments of ``setup`` that say where each package is."""
    found = find_packages(include=["disttensor", "disttensor.*"])
    if "disttensor.runtime" in found:
        return {"packages": found}
    engine = ["disttensor.runtime", *(f"disttensor.runtime.{name}" for name in find_packages("runtime"))]
    return {"packages": [*found, *engine], "package_dir": {"disttensor.runtime": "runtime"}}


def without_links(text: str) -> str:
    """Markdown whose links into the repository are names of files: an index's page has nothing that they lead to."""

    def plain(link: re.Match[str]) -> str:
        label, target = link.groups()
        if not target or target.endswith(label.strip("`")):
            return target or label
        return f"{label} ({target})"

    return re.sub(r"!?\[([^\]]+)\]\((?!\w+:)([^)#\s]*)(?:#[^)\s]*)?\)", plain, text)


class Sdist(sdist):
    """A source distribution that has the link as a clone has it, and so the engine once."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Writes the tree that becomes the archive."""
        link = Path("disttensor", "runtime")
        inside = f"{link}/"
        super().make_release_tree(
            base_dir, [name for name in files if not name.startswith(inside) and name != str(link)]
        )
        (base_dir / link).symlink_to(Path("..", "runtime"))


setup(
    **packages(),
    cmdclass={"sdist": Sdist},
    long_description=without_links((HERE / "README.md").read_text()),
    long_description_content_type="text/markdown",
)
