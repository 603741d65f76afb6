"""Bytes that come from elsewhere: a decoder understands them or raises the error that it documents, nothing else."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from decoders import DECODERS, USES_WITHOUT, Decoder
from fuzzing import SEEDS, fuzz, spoilt
from sources import Source, agree, product

#: Messages that were once decoded wrongly, in a folder for each decoder.
CORPUS = Path(__file__).parent / "corpus"
KEPT = sorted(path.relative_to(CORPUS) for path in CORPUS.glob("*/*"))
BY_FOLDER = {decoder.folder: decoder for decoder in DECODERS}


def decode(decoder: Decoder, data: bytes) -> None:
    try:
        decoder.decode(data)
    except decoder.allowed as error:
        str(error)


@pytest.mark.fault(35)
@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS.keys())
@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)
def test_whatever_comes_is_understood_or_refused(decoder: Decoder, seed: int) -> None:
    fuzz(seed, decoder.examples, lambda data: decode(decoder, data), spoilt(decoder.valid))


@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_what_was_once_decoded_wrongly(kept: Path) -> None:
    """Each of these is refused, but where nonsense is nothing to the decoder."""
    decoder = BY_FOLDER[kept.parts[0]]
    with pytest.raises(decoder.allowed) if decoder.allowed else contextlib.nullcontext():
        decoder.decode((CORPUS / kept).read_bytes())


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)
def test_valid_messages_are_understood(decoder: Decoder) -> None:
    """Or nothing would be fuzzed behind the first check."""
    understood = 0

    def count(data: bytes) -> None:
        nonlocal understood
        try:
            decoder.decode(data)
        except decoder.allowed:
            return
        understood += 1

    fuzz(1, 40, count, decoder.valid)
    assert understood or decoder.name in NEVER_UNDERSTOOD


#: Decoders whose messages end in an error whatever they are: why.
NEVER_UNDERSTOOD = {
    "connection of a peer": "it is read until its end, which is an error",
    "connection with checksums": "the same",
    "encrypted connection": "the same",
    "handshake's verdict": "a proof needs the nonce of the other side",
    "addresses to join": "nobody is there",
}


# ---- no decoder is forgotten -----------------------------------------------------------------------------------------

#: Functions and methods that make something of bytes or text.
DECODES = {
    "Decoder", "Unpickler", "b64decode", "convert", "decode", "decompress", "from_bytes", "fromhex", "iter_unpack",
    "literal_eval", "loads", "unpack", "unpack_from",
}  # fmt: skip


def uses(file: Source) -> Iterator[str]:
    """Functions of a module that decode. Text of bytes with ``errors=`` can't go wrong, and does not count."""
    for node in file.nodes(ast.Call):
        called = node.func.value if isinstance(node.func, ast.Subscript) else node.func  # of ``Decoder[Kind](...)``
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        of_json = name == "load" and ast.unparse(node.func) == "json.load"
        replaces = any(keyword.arg == "errors" for keyword in node.keywords) or (
            name == "decode" and len(node.args) == 2
        )
        if (name in DECODES or of_json) and not replaces:
            yield ".".join(file.around(node))


@cache
def found() -> set[str]:
    return {f"{file.name}:{use}" for file in product() for use in uses(file)}


def test_every_decoder_is_registered() -> None:
    covered = [place for decoder in DECODERS for place in decoder.covers]
    agree(found(), {*covered, *USES_WITHOUT}, "what decodes is fuzzed, and has a line in decoders.py")
    assert set(covered).isdisjoint(USES_WITHOUT)


def test_the_scan_sees_what_decodes() -> None:
    text = """
import msgspec, struct
decoder = msgspec.msgpack.Decoder(int)
other = Decoder[int](int)
class Wire:
    def hear(self, data):
        return [struct.unpack("<I", piece) for piece in data], data.decode(errors="replace")
    def plain(self, data):
        return data.decode("ascii", "replace")
"""
    assert sorted(uses(Source("wire.py", text))) == ["", "", "Wire.hear"]
    assert len(found()) > 40
