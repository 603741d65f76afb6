"""Fuzzing by hypothesis whose runs can be repeated: seeds that are told, valid messages, and ways to spoil them."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import subprocess
from collections.abc import Callable
from typing import Any

import hypothesis
import msgspec
from checkout import ROOT
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from quick import inputs
from wire_values import of_type

from disttensor.runtime.protocol.bundle import VERSION

#: Seeds of every run.
FIXED = (1, 2, 3, 4, 5)
#: Examples of each test of each seed in `make test`; `make fuzz` sets the variable.
EXAMPLES = int(os.environ.get("DISTTENSOR_FUZZ_EXAMPLES", "0"))


def _commit() -> str:
    """This commit's hash; the version in a copy of the tree that is no checkout."""
    told = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return told.stdout.strip() or VERSION


def seeds() -> dict[str, int]:
    """The seeds of this run by their names, which are parts of the tests' names.

    Five are fixed, five are this commit's, so that each commit tries others. DISTTENSOR_FUZZ_SEEDS names others
    instead: with those of a failure, it comes again.
    """
    if told := os.environ.get("DISTTENSOR_FUZZ_SEEDS"):
        return {f"seed{number}": int(number) for number in told.split(",")}
    commit = _commit()
    hashes = (hashlib.sha256(f"{commit} {i}".encode()).digest() for i in range(5))
    more = [int.from_bytes(digest[:4], "big") for digest in hashes]
    return {f"seed{number}": number for number in FIXED} | {f"commit-seed{number}": number for number in more}


SEEDS = seeds()


def fuzz(seed: int, examples: int, test: Callable[..., None], *strategies: st.SearchStrategy[Any]) -> None:
    """Calls ``test`` with so many examples (or as many as DISTTENSOR_FUZZ_EXAMPLES says), the same for a seed."""
    settings = hypothesis.settings(
        max_examples=EXAMPLES or inputs(examples),
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
    )
    hypothesis.seed(seed)(settings(hypothesis.given(*strategies)(test)))()


# ---- messages --------------------------------------------------------------------------------------------------------

MSGPACK, JSON = msgspec.msgpack, msgspec.json

#: What may stand in a message in place of a value: other types, sizes that lie, text that is no UTF-8, deep nests.
_FOREIGN: dict[Any, list[Any]] = {
    MSGPACK: [
        *(None, True, -1, 0, 2**63, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf"), "", "x" * 300),
        *(b"\xff", [], {}),
        *map(
            msgspec.Raw,
            [
                b"\xdd\xff\xff\xff\xff",  # a list of 2**32 items
                b"\xdf\xff\xff\xff\xff",
                b"\xdb\xff\xff\xff\xff",
                b"\xc6\xff\xff\xff\xff",
                b"\xc1",
                b"\xd4\x01\x00",
                b"\x91" * 3000,
                b"\x81\xa1x" * 3000,
                b"\xd6\xff\x00\x00\x00\x00",  # a time
            ],
        ),
    ],
    JSON: [
        *(None, True, -1, 0, 2**63, 2**64 - 1, 10**30, 1.5, "", "x" * 300, [], {}),
        *map(
            msgspec.Raw,
            [b"[" * 3000, b'{"x":' * 3000, b'"\\ud800"', b"1e999", b"9" * 5000, b"NaN", b'"', b"-"],
        ),
    ],
}  # fmt: skip


#: Text that is no UTF-8.
_NO_TEXT = {MSGPACK: msgspec.Raw(b"\xa2\xff\xfe"), JSON: msgspec.Raw(b'"\xff\xfe"')}


def _replace(tree: Any, at: int, value: Any) -> tuple[Any, int]:
    """Returns the tree with node ``at`` (in the order of a walk) replaced, and how many nodes are left to go."""
    if at == 0:
        return value, -1
    at -= 1
    if isinstance(tree, list):
        made = []
        for item in tree:
            new, at = _replace(item, at, value) if at >= 0 else (item, at)
            made.append(new)
        return made, at
    if isinstance(tree, dict):
        changed = {}
        for key, item in tree.items():
            changed[key], at = _replace(item, at, value) if at >= 0 else (item, at)
        return changed, at
    return tree, at


def _nodes(tree: Any) -> list[Any]:
    """All nodes of a tree in the order of a walk, itself first."""
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [tree, *itertools.chain.from_iterable(map(_nodes, items))]


@st.composite
def messages(draw: st.DrawFn, form: Any, values: st.SearchStrategy[Any]) -> bytes:
    """Encoded values, of which some have something foreign in place of a part, a field more, or one less."""
    data: bytes = form.encode(draw(values))
    change = draw(st.integers(0, 7))
    if change > 3:
        return data
    tree = form.decode(data)
    nodes = _nodes(tree)
    place = draw(st.integers(0, 2**16))
    texts = [at for at, node in enumerate(nodes) if isinstance(node, str)]
    if change == 1 and isinstance(tree, dict):
        tree["unknown"] = draw(st.sampled_from(_FOREIGN[form]))
    elif change == 2 and isinstance(tree, list) and tree:
        del tree[place % len(tree)]
    elif change == 3 and texts:
        tree, _ = _replace(tree, texts[place % len(texts)], _NO_TEXT[form])
    else:
        tree, _ = _replace(tree, place % len(nodes), draw(st.sampled_from(_FOREIGN[form])))
    return form.encode(tree)  # type: ignore[no-any-return]


def packed(kind: Any, *known: Any) -> st.SearchStrategy[bytes]:
    """Messages of msgpack: of a type, and those that are ``known``."""
    return messages(MSGPACK, st.one_of(st.sampled_from(known), of_type(kind)) if known else of_type(kind))


def jsons(kind: Any, *known: Any) -> st.SearchStrategy[bytes]:
    """The same for messages of JSON."""
    return messages(JSON, st.one_of(st.sampled_from(known), of_type(kind)) if known else of_type(kind))


# ---- bytes -----------------------------------------------------------------------------------------------------------

_TOKENS = [
    b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\x00", b"\x1b[2J", b"\r", b"\n", b"%", b"..", b"/", b",", b":", b"=",
    b"-1", b"99999999999", b"9" * 5000, b"nan", b"[", b"]", b"(x9999999999)", b"\xdb\xff\xff\xff\xff",
    b"\xcf" + b"\xff" * 8,
    "\u0661".encode(), "\u2028".encode(), b"\xc1", b"\x91" * 2000, b"[" * 2000,
]  # fmt: skip

#: One change of a message: what, where, how much, and with which random numbers.
_CHANGE = st.tuples(st.integers(0, 7), st.integers(0, 2**16 - 1), st.integers(1, 16), st.integers(0, 255))


def _spoil(message: bytearray, change: tuple[int, int, int, int]) -> None:
    what, where, length, number = change
    at = where % (len(message) + 1)
    match what:
        case 0 if at < len(message):
            message[at] ^= 1 << number % 8
        case 1 if at < len(message):
            message[at] |= 0x80  # text is no UTF-8 then, mostly
        case 2 if at < len(message):
            message[at] = number
        case 3:
            del message[at : at + length]
        case 4:
            message[at:at] = random.Random(number).randbytes(length)
        case 5:
            message[at:at] = _TOKENS[number % len(_TOKENS)]
        case 6:
            message[at:at] = message[number % (len(message) + 1) :][: 4 * length]
        case 7:
            del message[at:]


@st.composite
def spoilt(draw: st.DrawFn, valid: st.SearchStrategy[bytes]) -> bytes:
    """Messages as they are, with a few changes, and bytes that never were one."""
    how = draw(st.integers(0, 9))
    if how == 9:
        return draw(st.binary(max_size=200))
    message = bytearray(draw(valid))
    if how > 2:
        for change in draw(st.lists(_CHANGE, min_size=1, max_size=4)):
            _spoil(message, change)
    return bytes(message)
