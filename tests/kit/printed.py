"""What a program prints against what a page shows: text as it stands, fractions by their values.

Kernels of torch, MKL and oneDNN add in an order that depends on the CPU, so the last digit of a fraction does, too. All
else is the same everywhere: words, whole numbers, how many numbers there are and to how many decimals they are rounded.
"""

from __future__ import annotations

import re

#: A fraction, with no part of a name or a version around it.
FRACTION = re.compile(r"(?<![\w.])-?\d+\.\d+(?:e[+-]\d+)?(?!\.?\w)")

#: From so many decimals on, the last one may be rounded otherwise; what has fewer is short because it is exact.
ROUNDED = 3

#: With so many decimals a number is as ``repr`` gives it, and has as many as its value needs.
WHOLE = 7

#: How much of a float32 the order of a sum changes at most, after the steps of training that pages have.
RELATIVE = 1e-5


def as_shown(printed: str, shown: str) -> str:
    """``printed`` with the fractions of ``shown`` where both are one value, to be compared with ``shown``."""
    wanted = FRACTION.findall(shown)
    if len(wanted) != len(FRACTION.findall(printed)):
        return printed
    left = iter(wanted)
    return FRACTION.sub(lambda found: _one(found[0], next(left)), printed)


def _one(printed: str, shown: str) -> str:
    decimals = {min(_decimals(text), WHOLE) for text in (printed, shown)}
    return shown if len(decimals) == 1 and _same(printed, shown) else printed


def _same(printed: str, shown: str) -> bool:
    difference = abs(float(printed) - float(shown))
    unit = _unit(shown) if _decimals(shown) >= ROUNDED else 0.0
    return difference <= max(1.001 * unit, RELATIVE * abs(float(shown)))


def _decimals(text: str) -> int:
    return len(text.partition("e")[0].partition(".")[2])


def _unit(text: str) -> float:
    """What one more of the last digit is worth."""
    exponent = text.partition("e")[2]
    return 10.0 ** (int(exponent or 0) - _decimals(text))
