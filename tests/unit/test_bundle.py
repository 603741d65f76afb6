"""What a node is told when it starts."""

from __future__ import annotations

import msgspec
import pytest

from disttensor.runtime.protocol.bundle import Bundle, as_name, as_text


def test_its_keys_are_not_shown() -> None:
    """Where it is printed, as in a traceback's locals or a log."""
    bundle = Bundle(job="job-7", rank=3, address="tcp://h:1", public_key="public", secret_key="never-to-be-seen")
    for text in (repr(bundle), str(bundle), f"{bundle}"):
        assert "never-to-be-seen" not in text
        assert "job-7" in text


@pytest.mark.parametrize("name", ["", "/tmp/x", "/home/Zoë/\u20ac", "/tmp/\udcff\udc80 x", "\udcff", "a\nb\udcfe"])
def test_names_of_the_system_cross_as_they_are(name: str) -> None:
    """Also those whose bytes are no UTF-8, which no wire here takes as text."""
    text = as_text(name)
    assert (
        as_name(msgspec.json.decode(msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.json.encode(text))))) == name
    )
    assert as_text(text) == text  # once is enough
    assert (text == name) is (name.isprintable() or name.isascii() or "\u20ac" in name)


def test_what_is_no_name() -> None:
    with pytest.raises(ValueError, match="hex"):
        as_name("\0no digits")
