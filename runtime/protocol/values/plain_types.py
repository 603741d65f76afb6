"""Types of Python's and torch's own whose values cross a wire as numbers, texts and bytes: dates, paths, decimals.

Each has a code, what its values are made of, and what makes them of it again: constructors that run no code but
Python's own, whatever they are given.
"""

from __future__ import annotations

import datetime as dates
import decimal
import fractions
import pathlib
import re
import uuid
from collections.abc import Callable
from typing import Any

import torch

from ..dtypes import DTYPES, IDS
from ..failure_ids import attempt

#: The most bytes of a Fraction's numerator, and of its denominator: what is longer takes long to make.
MAX_FRACTION = 4096

Pack = Callable[[Any], Any]  #: raises TypeError, ValueError in words
Unpack = Callable[[Any], Any]  #: raises ValueError, TypeError, ArithmeticError, KeyError, AttributeError

_MICROSECOND = dates.timedelta(microseconds=1)
_PATHS: tuple[type[pathlib.PurePath], ...] = (
    pathlib.PurePosixPath,
    pathlib.PureWindowsPath,
    type(pathlib.Path()),
)
_DECIMAL = re.compile(r"-?(\d+(\.\d*)?|\.\d+)(E[+-]?\d{1,19})?|-?(Infinity|s?NaN\d*)", re.ASCII)


def pack_int(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _int(data: bytes) -> int:
    return int.from_bytes(_bytes(data), "little", signed=True)


def pack_text(value: str) -> bytes:
    """Returns a text as bytes, those with halves of surrogate pairs too, as names of files that are no UTF-8 have."""
    return value.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return str(_bytes(data), "utf-8", "surrogatepass")


def _bytes(data: Any) -> bytes:
    if type(data) is not bytes:
        raise TypeError(f"bytes were to come, not {data!r:.100}")
    return data


def _pack_path(path: pathlib.PurePath) -> list[Any]:
    return [_PATHS.index(type(path)), pack_text(str(path))]


def _path(parts: Any) -> pathlib.PurePath:
    kind, text = parts
    return _PATHS[_small(kind, len(_PATHS))](_text(text))


def _small(number: Any, below: int) -> int:
    if type(number) is not int or not 0 <= number < below:
        raise ValueError(f"{number!r:.100} is no number from 0 to {below - 1}")
    return number


def _numbers(parts: Any) -> list[int]:
    if not all(type(part) is int for part in parts):
        raise TypeError(f"whole numbers were to come, not {parts!r:.100}")
    return list(parts)


def _pack_zone(zone: Any) -> list[Any] | None:
    if zone is None:
        return None
    if type(zone) is not dates.timezone:
        raise TypeError(
            f"time zones other than datetime.timezone's can't cross, and this is "
            f"{attempt(lambda: repr(zone), 'a zone'):.100}; for x return "
            "x.astimezone(datetime.timezone.utc)"
        )
    offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
    return [offset // _MICROSECOND, *map(pack_text, name)]


def _zone(parts: Any) -> dates.timezone | None:
    if parts is None:
        return None
    offset, *name = parts
    moved = dates.timedelta(microseconds=_numbers([offset])[0])
    return dates.timezone(moved, *map(_text, name)) if name or moved else dates.UTC


def _pack_clock(value: dates.datetime | dates.time) -> list[Any]:
    return [value.hour, value.minute, value.second, value.microsecond, value.fold, _pack_zone(value.tzinfo)]


def _clock(parts: Any) -> dates.time:
    *numbers, fold, zone = parts
    hour, minute, second, microsecond = _numbers(numbers)
    return dates.time(hour, minute, second, microsecond, _zone(zone), fold=_small(fold, 2))


def _datetime(parts: Any) -> dates.datetime:
    year, month, day, *rest = parts
    return dates.datetime.combine(dates.date(*_numbers([year, month, day])), _clock(rest))


def _decimal(text: Any) -> decimal.Decimal:
    if not _DECIMAL.fullmatch(text):
        raise ValueError(f"{text!r:.100} is no Decimal")
    return decimal.Decimal(text)


def _pack_fraction(value: fractions.Fraction) -> list[bytes]:
    parts = [pack_int(value.numerator), pack_int(value.denominator)]
    if max(map(len, parts)) > MAX_FRACTION:
        raise ValueError(f"a Fraction of numbers of more than {MAX_FRACTION} bytes can't cross; return the two numbers")
    return parts


def _fraction(parts: Any) -> fractions.Fraction:
    above, below = parts
    if max(len(above), len(below)) > MAX_FRACTION:
        raise ValueError(f"a Fraction's numbers have {MAX_FRACTION} bytes at most")
    return fractions.Fraction(_int(above), _int(below))


def _complex(parts: Any) -> complex:
    real, imag = parts
    if not type(real) is type(imag) is float:
        raise TypeError(f"{parts!r:.100} are no parts of a complex number")
    return complex(real, imag)


def _dtype(number: Any) -> torch.dtype:
    return DTYPES[number]


#: Codes are for good: a new type gets another one.
PACK: dict[type, tuple[int, Pack]] = {
    int: (32, pack_int),  # of more than 64 bits
    str: (33, pack_text),  # that is no UTF-8
    complex: (34, lambda z: [z.real, z.imag]),
    bytearray: (35, bytes),
    range: (36, lambda r: [pack_int(n) for n in (r.start, r.stop, r.step)]),
    torch.dtype: (37, lambda dtype: IDS[dtype]),
    torch.Size: (38, list),
    **dict.fromkeys(_PATHS, (39, _pack_path)),
    dates.date: (40, lambda d: [d.year, d.month, d.day]),
    dates.time: (41, _pack_clock),
    dates.datetime: (42, lambda d: [d.year, d.month, d.day, *_pack_clock(d)]),
    dates.timedelta: (43, lambda t: [t.days, t.seconds, t.microseconds]),
    dates.timezone: (44, _pack_zone),
    decimal.Decimal: (45, str),
    fractions.Fraction: (46, _pack_fraction),
    uuid.UUID: (47, lambda u: u.bytes),
}
UNPACK: dict[int, Unpack] = {
    32: _int,
    33: _text,
    34: _complex,
    35: lambda data: bytearray(_bytes(data)),
    36: lambda parts: range(*map(_int, parts)),
    37: _dtype,
    38: lambda sizes: torch.Size(_numbers(sizes)),
    39: _path,
    40: lambda parts: dates.date(*_numbers(parts)),
    41: _clock,
    42: _datetime,
    43: lambda parts: dates.timedelta(*_numbers(parts)),
    44: _zone,
    45: _decimal,
    46: _fraction,
    47: lambda data: uuid.UUID(bytes=_bytes(data)),
}
