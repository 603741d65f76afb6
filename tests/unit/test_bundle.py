"""What a node is told when it starts."""

from __future__ import annotations

import msgspec
import pytest

from disttensor.runtime.host.launch_spec import PLAN, Host, LaunchSpec, spec_of_dtrun, text_of
from disttensor.runtime.host.output_options import Output
from disttensor.runtime.host.silence import Silence
from disttensor.runtime.launch.tree.framed import frame
from disttensor.runtime.protocol.bundle import Bundle, as_name, as_text, names_as_text, names_from_text


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


#: A launch spec with a name that is not text wherever one can be.
ODD = LaunchSpec(
    "ssh", hosts=(Host("a\udcff", 2),), least=2, python="/py \udcff", interface=("eth\udcff",),
    env={"X\udcff": "\udcfe", "HOME": "/home/Zoë"}, timeout=7.5, options={"ssh_options": "-i \udcff"},
    output=Output(log_dir="/logs \udcff", tee="1"), silence=Silence(lost=40.0), folder="/f\udcff",
)  # fmt: skip


def test_what_dtrun_has_told_is_what_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script by its environment, which takes text only, and the root by a frame."""
    monkeypatch.setenv(PLAN, text_of(ODD))
    assert spec_of_dtrun() == ODD
    assert names_from_text(msgspec.msgpack.decode(frame(names_as_text(ODD))[4:], type=LaunchSpec)) == ODD
    assert names_as_text(Output(log_dir="/plain")) == Output(log_dir="/plain")
    monkeypatch.setenv(PLAN, msgspec.json.encode(LaunchSpec("ssh", folder="\0no digits")).decode())
    with pytest.raises(ValueError, match=f"{PLAN}=.* is not a plan of dtrun's: .*hex"):
        spec_of_dtrun()


def test_what_is_no_name() -> None:
    with pytest.raises(ValueError, match="hex"):
        as_name("\0no digits")
