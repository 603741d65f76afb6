"""The last lines of nodes, which `dtrun logs` asks for."""

from __future__ import annotations

import os
from pathlib import Path

from disttensor.runtime.host.output_options import Output
from disttensor.runtime.launch.output.kept import AT_ONCE, KEPT, KeptLine, KeptOutput
from disttensor.runtime.launch.output.printer import Printer


def test_lines_of_all_nodes_come_in_their_order() -> None:
    kept = KeptOutput()
    kept.add(1, [b"a", b"\x1b[31mb\x1b[0m"])
    kept.add(0, [b"c"])
    kept.add(1, [b"  d"])
    assert kept.after(0, (0, 1)) == (
        [KeptLine(1, 1, "a"), KeptLine(2, 1, "b"), KeptLine(3, 0, "c"), KeptLine(4, 1, "  d")], False,
    )  # fmt: skip
    assert kept.after(2, (0, 1))[0] == [KeptLine(3, 0, "c"), KeptLine(4, 1, "  d")]
    assert kept.after(0, (0,))[0] == [KeptLine(3, 0, "c")]
    assert kept.after(-2, (0, 1))[0] == [KeptLine(3, 0, "c"), KeptLine(4, 1, "  d")]
    assert kept.after(-2, (7,)) == ([], False)
    kept.clear()
    kept.add(0, [b"next"])
    assert kept.after(0, (0, 1)) == ([KeptLine(5, 0, "next")], False)


def test_the_oldest_lines_of_a_node_go_and_not_anothers() -> None:
    kept = KeptOutput()
    kept.add(0, [b"first"])
    kept.add(1, (b"%d" % i for i in range(KEPT + 5)))
    pages, after, more = [], 0, True
    while more:
        page, more = kept.after(after, (0, 1))
        assert len(page) <= AT_ONCE
        pages += page
        after = page[-1].number
    assert [line.text for line in pages] == ["first", *(str(i) for i in range(5, KEPT + 5))]


def test_a_long_line_is_cut() -> None:
    kept = KeptOutput()
    kept.add(0, [b"x" * 100_000])
    assert kept.after(0, (0,))[0] == [KeptLine(1, 0, "x" * 500)]


def test_a_printer_keeps_what_it_shows_and_what_goes_to_files(tmp_path: Path) -> None:
    """And the rest of a line that a node has not ended."""
    fds = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT), os.open(tmp_path / "err", os.O_WRONLY | os.O_CREAT)
    printer = Printer(Output(log_dir=str(tmp_path), redirects="0:3"), fds, {})
    try:
        for rank in (0, 1):
            printer.begin_node(rank)
            printer.feed(rank, 1, b"one\ntwo")
        assert [(line.rank, line.text) for line in printer.kept.after(0, (0, 1))[0]] == [(0, "one"), (1, "one")]
        printer.end_node(0)
        assert printer.kept.after(0, (0,))[0][-1].text == "two"
        printer.end_node(1)
        printer.flush()
        assert b"two" in (tmp_path / "out").read_bytes()
    finally:
        printer.close()
        for fd in fds:
            os.close(fd)
