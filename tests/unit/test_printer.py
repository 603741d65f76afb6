"""How nodes' output looks: prefixes, colours, progress bars, log files, and a terminal with something else on it."""

from __future__ import annotations

import errno
import os
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from output_kit import unfolded
from screen import Screen

from disttensor.runtime.host.output_options import Output, OutputChoice
from disttensor.runtime.launch.output import printer as module
from disttensor.runtime.launch.output.folding import OutputFolding
from disttensor.runtime.launch.output.lines import Lines, Tail, plain
from disttensor.runtime.launch.output.printer import Printer, spans

Make = Callable[..., Printer]


class Pipes:
    """What a printer has written to its stdout and stderr."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        self.into: list[int] = []
        for _ in range(2):
            out, into = os.pipe()
            os.set_blocking(out, False)
            self._ends.append(out)
            self.into.append(into)

    def read(self, stream: int = 1) -> str:
        try:
            return os.read(self._ends[stream - 1], 1 << 20).decode()
        except BlockingIOError:
            return ""

    def close(self) -> None:
        for fd in (*self._ends, *self.into):
            os.close(fd)


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    pipes = Pipes()
    yield pipes
    pipes.close()


@pytest.fixture
def make(pipes: Pipes) -> Iterator[Make]:
    """A printer of so many nodes into the pipes."""
    made: list[Printer] = []

    def make(nodes: int = 2, environment: dict[str, str] | None = None, **output: object) -> Printer:
        printer = Printer(Output(**output), (pipes.into[0], pipes.into[1]), environment or {})  # type: ignore[arg-type]
        printer._folder = OutputFolding(hold=0.5)  # this process may be kept from running for longer than HOLD
        for rank in range(nodes):
            printer.begin_node(rank)
        made.append(printer)
        return printer

    yield make
    for printer in made:
        printer.close()


def test_prefixes(make: Make, pipes: Pipes) -> None:
    printer = make(4)
    for rank in range(4):
        printer.feed(rank, 1, b"all\n")
    for rank in (0, 2, 3):
        printer.feed(rank, 1, b"some\n")
    printer.feed(1, 1, b"unfinis")
    printer.feed(1, 2, b"error\n")
    printer.feed(1, 1, b"hed\n")
    printer.flush()
    assert pipes.read(1) == "[4 nodes] all\n[nodes 0,2-3] some\n[node 1] unfinished\n"
    assert pipes.read(2) == "[node 1] error\n"


def test_a_line_leaves_by_itself_and_what_all_print_at_once(make: Make, pipes: Pipes) -> None:
    printer = make(2)
    printer.feed(0, 1, b"alone\n")
    printer.push()
    assert pipes.read() == ""
    assert printer.due is not None
    while printer.due is not None:
        printer.push()
    assert pipes.read() == "[node 0] alone\n"
    printer.feed(0, 1, b"both\n")
    printer.feed(1, 1, b"both\n")
    assert printer.due is None
    printer.push()
    assert pipes.read() == "[2 nodes] both\n"
    printer.end_node(1)
    printer.feed(0, 1, b"the only one left\n")
    assert printer.due is None


def test_what_a_node_leaves_unfinished_is_shown_at_its_end(make: Make, pipes: Pipes) -> None:
    printer = make(1)
    printer.feed(0, 1, b"the last words")
    printer.end_node(0)
    printer.push()
    assert pipes.read() == "[node 0] the last words\n"


def test_a_single_node(make: Make, pipes: Pipes) -> None:
    printer = make(1)
    printer.feed(0, 1, b"\n\nafter\n\n")
    printer.push()
    assert pipes.read() == "[node 0] \n[node 0] \n[node 0] after\n[node 0] \n"


def test_without_folding(make: Make, pipes: Pipes) -> None:
    printer = make(2, fold=False)
    printer.feed(0, 1, b"same\n")
    printer.feed(1, 1, b"same\n")
    printer.push()
    assert pipes.read() == "[node 0] same\n[node 1] same\n"


@pytest.mark.parametrize(("value", "coloured"), [("1", True), ("0", False), ("", False)])
def test_colours_on_demand(make: Make, pipes: Pipes, value: str, coloured: bool) -> None:
    printer = make(2, {"FORCE_COLOR": value})
    printer.feed(0, 1, b"a\n")
    printer.feed(1, 1, b"\x1b[31mb\n")
    for rank in (0, 1):
        printer.feed(rank, 1, b"c\n")
    printer.flush()
    if coloured:
        assert (
            pipes.read()
            == "\x1b[36m[node 0]\x1b[0m a\n\x1b[33m[node 1]\x1b[0m \x1b[31mb\x1b[0m\n\x1b[1m[2 nodes]\x1b[0m c\n"
        )
    else:
        assert pipes.read() == "[node 0] a\n[node 1] \x1b[31mb\n[2 nodes] c\n"


def test_progress_bars_of_nodes(make: Make, pipes: Pipes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tqdm writes them: the first state, one now and then, and the last."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    printer = make(1)
    for percent in range(100):
        printer.feed(0, 2, b"\r%3d%%|###" % percent)
        printer.push()
        now[0] += module.BAR / 40
    printer.feed(0, 2, b"\r100%|###\n")
    printer.feed(0, 2, b"done\n")
    printer.push()
    shown = pipes.read(2).splitlines()
    assert shown == [f"[node 0] {text}" for text in ("  0%|###", " 40%|###", " 80%|###", "100%|###", "done")]


def test_a_bar_that_stops_moving_shows_where(make: Make, pipes: Pipes, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    printer = make(1)
    printer.feed(0, 2, b"\r10%")
    printer.push()
    printer.feed(0, 2, b"\r20%")
    printer.push()
    assert pipes.read(2) == "[node 0] 10%\n"
    assert printer.due == 100 + module.BAR
    now[0] = printer.due
    printer.push()
    assert pipes.read(2) == "[node 0] 20%\n"
    assert printer.due is None


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a\nb", b"c\n"], [b"a", b"bc"]),
        ([b"windows\r\n", b"\r\n"], [b"windows", b""]),
        ([b"10%\r", b"20%\r", b"done\n"], [b"done"]),
        ([b"\r10%", b"\r20%", b"\n"], [b"20%"]),
        ([b"\r10%", b"\r   \r", b"done\n"], [b"done"]),
        ([b"\x08\x08\x081/3", b"\x08\x08\x082/3\n"], [b"2/3"]),
        ([b"\r10%\n\r20%\x1b[A", b"\n"], [b"10%", b"20%"]),
        ([b"\x1b[2J\x1b[31mred\x1b[0m\x1b]0;title\x07\n"], [b"\x1b[31mred\x1b[0m"]),
        ([b"x" * 70_000, b"y\n"], [b"x" * 70_000, b"y"]),
    ],
)
def test_lines(pieces: list[bytes], lines: list[bytes]) -> None:
    taker = Lines()
    assert [line for piece in pieces for line in taker.feed(piece)] == lines


def test_tails() -> None:
    tail = Tail()
    tail.add(1, b"".join(b"%d\n" % i for i in range(50)) + b"unfin")
    tail.add(2, b"\x1b[31merror\x1b[0m\n\r10%\r20%")
    tail.add(1, b"ished")
    assert tail.lines() == (*(str(i) for i in range(33, 50)), "error", "unfinished", "20%")
    one = Tail()
    for i in range(30):
        one.add(1, b"line %d\n" % i)
    assert one.lines() == tuple(f"line {i}" for i in range(10, 30))


def test_the_last_line_of_a_tail_is_read_without_an_end_to_it() -> None:
    tail = Tail()
    assert tail.last() == ""
    tail.add(1, b"\x1b[31mepoch 3\x1b[0m\n\n")
    assert tail.last() == "epoch 3"
    tail.add(2, b"10%\r20%")
    assert tail.last() == "20%"
    tail.add(2, b"\r30%\n")
    tail.add(2, b"disttensor: a remark\n")
    assert tail.last() == "30%"
    assert tail.lines() == ("epoch 3", "", "30%", "disttensor: a remark")


def test_tails_do_nothing_to_a_terminal() -> None:
    tail = Tail()
    tail.add(2, b"\x1b]0;t\x07a\x07b\xc2\x9b2J\xe2\x80\xaec\td\n")
    assert tail.lines() == ("a\ufffdb\ufffd2J\ufffdc\td",)
    assert plain("x" * 30, 20) == "x" * 20
    assert plain("two\nlines\ud800", 20) == "two\nlines\ufffd"


def test_tail_of_a_crash() -> None:
    """What comes before the traceback is the most useful of it."""
    tail = Tail()
    crash = (
        "Fatal Python error: Aborted",
        "",
        "Current thread 0x1 (most recent call first):",
        '  File "x.py", line 6 in f',
    )
    ours = [f'  File "/x/disttensor/runtime/launch/entry.py", line {i} in main' for i in range(17)]
    modules = "Extension modules: numpy, torch (total: 2)"
    tail.add(1, b"something is wrong\n")
    tail.add(2, "\n".join([*crash, *ours, "", modules, ""]).encode())
    assert tail.lines() == ("something is wrong", *crash, "")


def test_log_files(make: Make, pipes: Pipes, tmp_path: Path) -> None:
    printer = make(2, log_dir=str(tmp_path / "logs"))
    printer.feed(0, 1, b"out\rput\n")
    printer.feed(1, 2, b"unfinished")
    printer.end_node(1)
    printer.flush()
    assert pipes.read(1) == "[node 0] put\n"
    assert pipes.read(2) == "[node 1] unfinished\n"
    files = {str(p.relative_to(tmp_path / "logs")): p.read_bytes() for p in tmp_path.rglob("*.log")}
    assert files == {
        "0/stdout.log": b"out\rput\n", "0/stderr.log": b"", "1/stdout.log": b"", "1/stderr.log": b"unfinished",
    }  # fmt: skip
    printer.end_node(0)
    make(2, log_dir=str(tmp_path / "logs")).feed(1, 2, b", and more")
    assert (tmp_path / "logs/1/stderr.log").read_bytes() == b"unfinished, and more"


def test_log_files_are_one_jobs_at_a_time(make: Make, tmp_path: Path) -> None:
    """Who comes second is told which file it is, and by which argument to name others."""
    first = make(2, log_dir=str(tmp_path))
    first.feed(0, 1, b"mine\n")
    with pytest.raises(OSError, match=r"Another job writes to this file now: .*--log-dir.*/0/stdout\.log"):
        make(1, log_dir=str(tmp_path))
    first.feed(0, 1, b"still\n")
    assert (tmp_path / "0/stdout.log").read_text() == "mine\nstill\n"
    first.end_node(0)
    make(1, log_dir=str(tmp_path)).feed(0, 1, b"now mine\n")
    assert (tmp_path / "0/stdout.log").read_text() == "mine\nstill\nnow mine\n"


@pytest.mark.fault(40)
@pytest.mark.parametrize("umask", [0o022, 0o000, 0o777])
def test_log_files_are_nobody_elses(umask: int, make: Make, tmp_path: Path) -> None:
    """Nor are the folders that were made for them. What was there already stays as it was."""
    there = tmp_path / "there"
    (there / "logs" / "0").mkdir(parents=True)
    for path in (there, there / "logs", there / "logs" / "0"):
        path.chmod(0o755)
    (there / "logs" / "0" / "stdout.log").touch()
    (there / "logs" / "0" / "stdout.log").chmod(0o640)
    before = os.umask(umask)
    try:
        make(2, log_dir=str(tmp_path / "new" / "logs")).feed(0, 1, b"x\n")
        make(1, log_dir=str(there / "logs")).feed(0, 1, b"x\n")
    finally:
        os.umask(before)
    modes = {str(p.relative_to(tmp_path)): f"{p.stat().st_mode & 0o777:o}" for p in sorted(tmp_path.rglob("*"))}
    assert modes == {
        "new": "700", "new/logs": "700",
        **{f"new/logs/{k}": "700" for k in range(2)},
        **{f"new/logs/{k}/{name}.log": "600" for k in range(2) for name in ("stdout", "stderr")},
        "there": "755", "there/logs": "755", "there/logs/0": "755",
        "there/logs/0/stdout.log": "640", "there/logs/0/stderr.log": "600",
    }  # fmt: skip


def test_only_into_log_files(make: Make, pipes: Pipes, tmp_path: Path) -> None:
    printer = make(2, log_dir=str(tmp_path), redirects="0:3", tee="1:2")
    for rank in (0, 1):
        printer.feed(rank, 1, b"out\n")
        printer.feed(rank, 2, b"err\n")
    printer.flush()
    assert (pipes.read(1), pipes.read(2)) == ("[node 1] out\n", "[node 1] err\n")
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.log")) == [
        "0/stderr.log", "0/stdout.log", "1/stderr.log",
    ]  # fmt: skip


@pytest.mark.fault(44)
def test_log_file_that_cannot_be_written(
    make: Make, pipes: Pipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printer = make(1, log_dir=str(tmp_path), redirects="3")
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if fd in printer.fds():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        printer.feed(0, 1, b"one\n")
        printer.feed(0, 1, b"two\n")
        printer.flush()
    assert pipes.read(1) == "[node 0] one\n[node 0] two\n"
    assert pipes.read(2) == (
        "disttensor: no more output of node 0 goes to its stdout.log: [Errno 28] No space left on device\n"
    )


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("", []), ("0", []), ("1", [(0, 1), (1, 1)]), ("2", [(0, 2), (1, 2)]), ("3", [(0, 1), (0, 2), (1, 1), (1, 2)]),
        ("0:1,1:2", [(0, 1), (1, 2)]), ("1:3", [(1, 1), (1, 2)]),
    ],
)  # fmt: skip
def test_choices_as_torchrun_takes_them(text: str, has: list[tuple[int, int]]) -> None:
    choice = OutputChoice(text)
    assert [(rank, stream) for rank in (0, 1) for stream in (1, 2) if choice.has(rank, stream)] == has


@pytest.mark.parametrize("text", ["4", "x", "0:4", "0:", ":1", "0=1", "0:1;1:2"])
def test_choices_that_are_none(text: str) -> None:
    for field in ("tee", "redirects"):
        with pytest.raises(ValueError, match=r"names no streams|is neither"):
            Output(**{field: text})  # type: ignore[arg-type]


def test_names_of_several() -> None:
    assert spans([3, 0, 2, 7, 8]) == "0,2-3,7-8"
    assert unfolded(["[nodes 0,2-3] x"]) == ["[node 0] x", "[node 2] x", "[node 3] x"]


# ---- terminals -------------------------------------------------------------------------------------------------------


@pytest.fixture
def screen() -> Iterator[Screen]:
    screen = Screen()
    yield screen
    screen.close()


def on(screen: Screen, **environment: str) -> Printer:
    printer = Printer(fds=(screen.fd, screen.fd), environment={"TERM": "xterm", **environment})
    screen.printers.append(printer)
    printer.begin_node(0)
    return printer


@pytest.mark.parametrize("above", [0, 3, 7, 20])
def test_bars_and_prompts_of_the_script_stay_whole(screen: Screen, above: int) -> None:
    printer = on(screen)
    screen.script("".join(f"line {i}\r\n" for i in range(above)) + "\r 40%|####      |")
    printer.feed(0, 1, b"hello\n")
    printer.push()
    before = [f"line {i}" for i in range(above)]
    assert screen.look() == [*before, "[node 0] hello", " 40%|####      |"]
    assert screen.screen.cursor.x == 16
    screen.script("\r 50%|#####     |")
    printer.feed(0, 2, b"two\nlines\n")
    printer.push()
    assert screen.look() == [*before, "[node 0] hello", "[node 0] two", "[node 0] lines", " 50%|#####     |"]
    screen.script("\r100%|##########|\r\ndone\r\n>>> ")
    printer.feed(0, 1, b"bye\n")
    printer.push()
    assert screen.look()[-4:] == ["100%|##########|", "done", "[node 0] bye", ">>>"]
    assert screen.screen.cursor.x == 4


@pytest.mark.parametrize("text", ["x" * 31, "x" * 32, "x" * 100, "\u4f60" * 30, "e\u0301" * 31, "a\tb\tc\td\te\tf"])
def test_long_lines_on_a_terminal(screen: Screen, text: str) -> None:
    printer = on(screen)
    screen.script(">>> ")
    printer.feed(0, 1, text.encode() + b"\n")
    printer.push()
    lines = screen.look()
    assert lines[0].startswith("[node 0] ")
    assert lines[-1] == ">>>"
    assert screen.screen.cursor.x == 4
    assert "" not in lines


def test_more_than_the_terminal_has_rows(screen: Screen) -> None:
    printer = on(screen)
    screen.script(">>> ")
    printer.feed(0, 1, b"".join(b"%d\n" % i for i in range(50)))
    printer.push()
    assert screen.look() == [*(f"[node 0] {i}" for i in range(50)), ">>>"]


def test_a_line_longer_than_the_terminal_is_high(screen: Screen) -> None:
    printer = on(screen)
    printer.feed(0, 1, b"x" * 3000 + b"\nafter\n")
    printer.push(1)
    lines = screen.look()
    assert "".join(lines[:-1]) == "[node 0] " + "x" * 3000
    assert lines[-1] == "[node 0] after"


def test_colours_on_a_terminal(screen: Screen) -> None:
    for environment, colour in (({}, "cyan"), ({"NO_COLOR": "1"}, "default")):
        printer = on(screen, **environment)
        printer.feed(0, 1, b"x\n")
        printer.push()
        screen.look()
        row = screen.screen.cursor.y - 1
        assert screen.screen.buffer[row][1].fg == colour
        assert screen.screen.buffer[row][9].fg == "default"


@pytest.mark.parametrize(
    "environment", [{"TERM": "dumb"}, {"TERM": ""}, {"JPY_PARENT_PID": "1", "NO_COLOR": "1"}, {"CI": "true"}]
)
def test_what_is_no_real_terminal_gets_no_orders(screen: Screen, environment: dict[str, str]) -> None:
    printer = on(screen, **environment)
    printer.feed(0, 1, b"x\n")
    printer.push()
    assert os.read(screen._ours, 100) == b"[node 0] x\r\n"


def test_a_terminal_without_a_size_gets_no_orders(screen: Screen) -> None:
    termios.tcsetwinsize(screen.fd, (0, 0))
    printer = on(screen)
    printer.feed(0, 1, b"x\n")
    printer.push()
    assert os.read(screen._ours, 100) == b"[node 0] x\r\n"


def test_a_terminal_that_is_not_read(screen: Screen) -> None:
    """Output waits without an end of it getting lost, and nobody is blocked."""
    printer = on(screen)
    printer.feed(0, 1, b"".join(b"%d\n" % i for i in range(4000)))
    printer.push()
    assert printer.waiting
    for _ in range(10_000):
        screen.look()
        printer.push()
        if not printer.waiting:
            break
    assert screen.look()[-1] == "[node 0] 3999"
