"""Options of the output of nodes, which dtrun's flags and ``init_master_worker`` set."""

from __future__ import annotations

import msgspec

#: The two streams of a node, by their numbers as descriptors, and the names of their log files.
STREAMS = {1: "stdout.log", 2: "stderr.log"}


class Output(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """How to show the output of nodes that are started after this order. Without one all is shown.

    ``tee`` and ``redirects`` are written as torchrun takes them: "3", or "0:1,1:2" (1 stdout, 2 stderr, 3 both).
    """

    upward: bool = False  #: send output up the wire (``NodeOutput``), not to this process's own stdout and stderr
    log_dir: str = ""  #: an absolute path; node 1's output is in 1/stdout.log and 1/stderr.log there
    tee: str = ""  #: streams that go to their log files and are shown as well; all, if neither is given
    redirects: str = ""  #: streams that go to their log files only
    fold: bool = True  #: a line that several nodes print at about the same time is shown once

    def __post_init__(self) -> None:
        """Raises ValueError for a text that torchrun would not take."""
        for text in (self.tee, self.redirects):
            OutputChoice(text)


class OutputChoice:
    """A choice of streams of nodes. Raises ValueError for a text that is neither of the two forms."""

    def __init__(self, text: str) -> None:
        self._every = 0  #: bits: 1 stdout, 2 stderr
        self._of: dict[int, int] = {}
        if text.strip().isdecimal():
            self._every = _streams(text)
        elif text.strip():
            for item in text.split(","):
                rank, colon, streams = item.partition(":")
                if not colon or not rank.strip().isdecimal():
                    raise ValueError(f"{text!r} is neither a number from 0 to 3 nor a list such as 0:1,1:3")
                self._of[int(rank)] = _streams(streams)

    def has(self, rank: int, stream: int) -> bool:
        """Returns whether the choice has stream 1 (stdout) or 2 (stderr) of this node."""
        return bool(self._of.get(rank, self._every) & stream)


def _streams(text: str) -> int:
    if text.strip() not in {"0", "1", "2", "3"}:
        raise ValueError(f"{text.strip()!r} names no streams: 0 is none, 1 stdout, 2 stderr, 3 both")
    return int(text)
