"""What a node is told when it starts."""

from __future__ import annotations

from disttensor.runtime.protocol.bundle import Bundle


def test_its_keys_are_not_shown() -> None:
    """Where it is printed, as in a traceback's locals or a log."""
    bundle = Bundle(job="job-7", rank=3, address="tcp://h:1", public_key="public", secret_key="never-to-be-seen")
    for text in (repr(bundle), str(bundle), f"{bundle}"):
        assert "never-to-be-seen" not in text
        assert "job-7" in text
