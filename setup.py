"""Adds the engine to the packages where ``disttensor/runtime``, a link to ``runtime/``, is none, as in a zip.

All else is in setup.cfg, which finds the packages by the link where there is one.
"""

from pathlib import Path

from setuptools import find_packages, setup

if (Path(__file__).parent / "disttensor" / "runtime" / "__init__.py").exists():
    setup()
else:
    engine = ["disttensor.runtime", *(f"disttensor.runtime.{name}" for name in find_packages("runtime"))]
    setup(
        packages=[*find_packages(include=["disttensor", "disttensor.*"]), *engine],
        package_dir={"disttensor.runtime": "runtime"},
    )
