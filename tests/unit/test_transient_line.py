"""The line that comes and goes: on a terminal below whatever stands there, in a cell on a row of its own."""

from __future__ import annotations

import os
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import pytest
from limits import HANG
from screen import Screen

from disttensor.runtime.launch.output.printer import Printer
from disttensor.runtime.launch.output.transient_line import CellLine, TerminalLine, transient_line

WAITS = "waiting 14 s at train.py:41"


@pytest.fixture
def screen() -> Iterator[Screen]:
    screen = Screen()
    yield screen
    screen.close()


@pytest.fixture
def out(screen: Screen) -> Iterator[TextIO]:
    """A stream to the terminal."""
    with open(screen.fd, "w", closefd=False, buffering=1) as stream:
        yield stream


@contextmanager
def printing_to(stream: TextIO) -> Iterator[None]:
    """The script's stdout and stderr are a stream, in a test itself: pytest sets its own after each fixture."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
            patch.setattr(sys, name, stream)
        yield


@pytest.mark.parametrize("above", [0, 3, 7, 20])
def test_the_line_stands_below_and_leaves_no_trace(screen: Screen, above: int) -> None:
    rows = [f"row {n}" for n in range(above)]
    screen.script("".join(f"{row}\n" for row in rows) + "loading ...")
    line = TerminalLine(screen.fd)
    for text in (WAITS, "shorter"):
        line.show(text)
        assert screen.look() == [*rows, "loading ...", text]
    line.erase()
    assert screen.look() == [*rows, "loading ..."]
    screen.script(" done\n")
    assert screen.look() == [*rows, "loading ... done"]


def test_a_text_takes_one_row_and_orders_nothing(screen: Screen) -> None:
    TerminalLine(screen.fd).show("\x1b[2J\u65e5" * 3 + "x" * 100)
    first, row = screen.look()
    assert first == ""
    assert row.replace("\ufffd", "").replace(" ", "") == "\u65e5" * 3 + "x" * 33


def test_what_the_script_prints_meanwhile_does_not_mix_with_it(screen: Screen, out: TextIO) -> None:
    line = TerminalLine(screen.fd)
    with printing_to(out):
        line.show(WAITS)
        print("epoch", end="", flush=True)
        assert screen.look() == ["epoch"]
        line.show(WAITS)
        assert screen.look() == ["epoch", WAITS]
        print(" 3\n  loss 1.2")
        assert screen.look() == ["epoch 3", "  loss 1.2"]
        line.show(WAITS)
        line.erase()
    assert "write" not in vars(out)


def test_what_a_program_has_put_in_the_place_of_write_is_put_back(screen: Screen, out: TextIO) -> None:
    written: list[str] = []
    vars(out)["write"] = theirs = written.append
    with printing_to(out):
        TerminalLine(screen.fd).show(WAITS)
        assert vars(out)["write"] is not theirs
        print("mine", end="")
    assert "".join(written) == "mine"
    assert vars(out)["write"] is theirs


def test_what_nodes_print_meanwhile_does_not_mix_with_it(screen: Screen) -> None:
    printer = Printer(fds=(screen.fd, screen.fd), environment={"TERM": "xterm", "NO_COLOR": "1"})
    screen.printers.append(printer)
    printer.begin_node(0)
    screen.script("step 3 of 9")
    line = TerminalLine(screen.fd)
    shown = []
    for n in range(9):
        line.show(f"waiting {n} s")
        printer.feed(0, 1, b"line %d\n" % n)
        printer.push()
        shown.append(f"[node 0] line {n}")
        assert [row for row in screen.look() if not row.startswith("waiting")] == [*shown, "step 3 of 9"]
    line.erase()
    assert screen.look() == [*shown, "step 3 of 9"]


def test_bars_of_tqdm_stay_whole(screen: Screen, out: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread of its own, which would be left
    line = TerminalLine(screen.fd)
    form = "{desc} {n_fmt}/{total_fmt}"
    with tqdm(total=3, desc="step", file=out, bar_format=form, mininterval=0, miniters=1) as bar:
        for n in (1, 2):
            line.show(WAITS)
            assert screen.look() == [f"step {n - 1}/3", WAITS]
            bar.update()
            assert screen.look() == [f"step {n}/3"]
        with tqdm(total=2, desc="part", file=out, bar_format=form, position=1, leave=False) as below:
            line.show(WAITS)
            assert screen.look() == ["step 2/3", "part 0/2"]
            below.update(2)
        bar.update()
        line.show(WAITS)
        line.erase()
    assert screen.look() == ["step 3/3"]


def test_a_terminal_that_is_stopped_holds_nobody_up(screen: Screen) -> None:
    line = TerminalLine(screen.fd)
    termios.tcflow(screen.fd, termios.TCOOFF)
    line.show(WAITS)
    termios.tcflow(screen.fd, termios.TCOON)
    assert screen.look() == []


def test_a_wait_that_is_over_is_not_shown(screen: Screen) -> None:
    line = TerminalLine(screen.fd)
    line.show(WAITS)
    line.show("later", holds=lambda: False)
    assert screen.look() == []


@pytest.mark.parametrize("what", ["the wait ends", "a thread prints"])
def test_what_comes_while_the_line_is_written(screen: Screen, out: TextIO, what: str) -> None:
    class Lock:
        """The line's lock, which tells when the thread has come to it."""

        def __init__(self) -> None:
            self._lock = threading.RLock()

        def __enter__(self) -> None:
            if threading.current_thread() is thread:
                come.set()
            self._lock.acquire()

        def __exit__(self, *exception: object) -> None:
            self._lock.release()

    class Line(TerminalLine):
        def _write(self, text: str) -> bool:
            written = super()._write(text)
            if text:
                thread.start()
                assert come.wait(HANG)
            return written

    def meanwhile() -> None:
        if what == "the wait ends":
            line.erase()
        else:
            print("a thread")
        come.set()

    come, line, thread = threading.Event(), Line(screen.fd), threading.Thread(target=meanwhile)
    line._lock = Lock()  # type: ignore[assignment]
    with printing_to(out):
        line.show(WAITS)
        thread.join()
    assert screen.look() == ([] if what == "the wait ends" else ["a thread"])
    assert "write" not in vars(out)


def test_a_forked_child_prints_as_ever(screen: Screen, out: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    line = TerminalLine(screen.fd)
    with printing_to(out):
        line.show(WAITS)
        monkeypatch.setattr(os, "getpid", lambda: 0)
        monkeypatch.setattr(line, "_lock", None)  # another thread of the parent may hold it
        print("child")
    assert "write" not in vars(out)


class Stream:
    """What ipykernel has in the place of stderr."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, text: str) -> int:
        self.texts.append(text)
        return len(text)

    def row(self) -> str:
        """What the cell shows in the end."""
        row = ""
        for piece in "".join(self.texts).split("\r"):
            row = piece + row[len(piece) :]
        return row.rstrip()


Stream.__module__ = "ipykernel.iostream"


def test_the_line_of_a_cell() -> None:
    stream = Stream()
    line = CellLine(stream)
    line.show(WAITS)
    assert stream.row() == WAITS
    line.show("shorter")
    assert stream.row() == "shorter"
    stream.write("a warning\n")
    assert stream.row() == "a warning"
    line.show(WAITS)
    line.erase()
    assert "".join(stream.texts).endswith("\r")
    assert "write" not in vars(stream)


def test_where_there_is_a_line(screen: Screen, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    xterm = {"TERM": "xterm"}
    monkeypatch.setattr(sys, "stderr", None)
    assert isinstance(transient_line(xterm, screen.fd), TerminalLine)
    assert transient_line({**xterm, "DISTTENSOR_PROGRESS": "0"}, screen.fd) is None
    assert transient_line({**xterm, "CI": "1"}, screen.fd) is None
    assert transient_line({"TERM": "dumb"}, screen.fd) is None
    with open(tmp_path / "log", "w") as log:
        assert transient_line(xterm, log.fileno()) is None
        monkeypatch.setattr(sys, "stderr", Stream())
        assert isinstance(transient_line({}, log.fileno()), CellLine)
