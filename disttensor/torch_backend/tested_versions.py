"""The versions of torch on which all tests of operators have run: the complete ones of docs/COMPATIBILITY.md."""

from __future__ import annotations

import os
import sys

import torch

#: The tested releases. A release stands for all its patches: "2.13" for 2.13.1.
TORCH = ("2.11", "2.13", "2.15")


def untested(version: str) -> str:
    """Returns the message for an untested version of torch; "" for a tested one."""
    if ".".join(version.split(".")[:2]) in TORCH:
        return ""
    return (
        f"disttensor: torch {version} is not among those that its tests have run on ({', '.join(TORCH)}); "
        "`make versions` runs them, DISTTENSOR_UNTESTED=1 says that you know"
    )


def print_untested() -> None:
    """Prints one line to stderr for an untested torch. It is no warning, as programs turn warnings into errors."""
    told = untested(str(torch.__version__))
    if told and os.environ.get("DISTTENSOR_UNTESTED", "0") in ("", "0"):
        print(told, file=sys.stderr, flush=True)
