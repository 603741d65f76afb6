"""The versions of torch that all tests of operators have run on: the complete ones of docs/COMPATIBILITY.md."""

from __future__ import annotations

import os
import sys

import torch

#: A release counts with all its patches: "2.13" for 2.13.1.
TORCH = ("2.11", "2.13", "2.15")


def untested(version: str) -> str:
    """What is to be said of a version of torch: nothing of a tested one."""
    if ".".join(version.split(".")[:2]) in TORCH:
        return ""
    return (
        f"disttensor: torch {version} is not among those that its tests have run on ({', '.join(TORCH)}); "
        "`make versions` runs them, DISTTENSOR_UNTESTED=1 says that you know"
    )


def say() -> None:
    """One line on stderr for an untested torch. No warning, as programs make errors of those."""
    told = untested(str(torch.__version__))
    if told and os.environ.get("DISTTENSOR_UNTESTED", "0") in ("", "0"):
        print(told, file=sys.stderr, flush=True)
