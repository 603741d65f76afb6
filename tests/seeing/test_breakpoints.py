"""Breakpoints in functions on nodes: what their debuggers do, and what the script shows of it."""

from __future__ import annotations

import bdb
import builtins
import fcntl
import os
import pdb
import pty
import re
import select
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import ROOT
from fake_hub import FakeHub
from limits import HANG

import disttensor as dt
from disttensor.runtime.master.breakpoints import MAX_STOPS, MAX_UNSHOWN, StoppedFunction, StoppedFunctions
from disttensor.runtime.master.link_state import LinkState
from disttensor.runtime.master.side_channels import SideChannels
from disttensor.runtime.node.breakpoints import hook
from disttensor.runtime.node.debugger_talk import Talk
from disttensor.runtime.node.interruption import Interruption
from disttensor.runtime.protocol import codec, side
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.errors import ProtocolError
from disttensor.seeing import breakpoints
from disttensor.session import current

HERE = os.path.basename(__file__)

Answer = str | BaseException | Callable[[], str]


class User:
    """Who types at the script's terminal."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        sys.stdout.write(f"{prompt}\n")
        self.prompts.append(prompt)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer if isinstance(answer, str) else answer()


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> Iterator[User]:
    """At the terminal of a session whose nodes are threads."""
    made = User()
    monkeypatch.setattr(builtins, "input", made)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        yield made
    assert made.answers == []


def step(x: int, header: str | None = None) -> int:
    y = x + 1
    dt.seeing.breakpoint(header=header)
    z = y * 2
    return z


ENDED: list[type[BaseException] | None] = []


def notes_its_end() -> None:
    try:
        dt.seeing.breakpoint()
        time.monotonic()  # where it stops
    finally:
        ENDED.append(sys.exc_info()[0])


def raises_at_its_end(x: int) -> int:
    dt.seeing.breakpoint()
    raise ValueError(f"{x} is odd")


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def add(self, k: int) -> int:
        dt.seeing.breakpoint()
        self.n += k
        return self.n


def await_stops(count: int) -> None:
    """Waits, as no script waits for a node, until so many functions have stopped."""
    link, deadline = current.session().link, time.monotonic() + HANG
    while sum(stop.state == "asks" for node in link.nodes for stop in list(node.connection.stops.values())) < count:
        assert time.monotonic() < deadline
        link.replies.drain()


def test_a_function_is_stepped_through(user: User, capsys: pytest.CaptureFixture[str]) -> None:
    user.answers = ["p x, y", "n", "p z", "w", "!y = 5", "l", "s", "c"]
    assert dt.run(step, 20, "look here", node=1) == 42
    printed = capsys.readouterr().out
    line = step.__code__.co_firstlineno + 3
    assert printed.startswith(f"node 1 is at a breakpoint in step(), {HERE}:{line}\nlook here\n> {__file__}({line})")
    assert {*user.prompts} == {"(node 1 pdb) "}
    for text in ("(20, 21)", "-> z = y * 2", "-> return z", "42", "--Return--"):
        assert f"\n{text}" in printed or text in printed
    assert "runtime/node" not in printed  # the frames below the user's
    assert sys.gettrace() is None


@pytest.mark.parametrize("last", ["n", "s", "r", "unt"])
def test_nothing_after_the_function_is_stepped_into(user: User, last: str) -> None:
    user.answers = ["n", "n", last]
    assert dt.run(step, 20, node=1) == 42
    assert dt.run(pow, 2, 3, node=1) == 8


def test_an_error_is_the_functions(user: User) -> None:
    user.answers = ["n", "n", "n"]
    with pytest.raises(ValueError, match="7 is odd"):
        dt.run(raises_at_its_end, 7, node=0)


def test_quitting_is_an_error_that_names_the_line(user: User) -> None:
    user.answers = ["q"]
    with pytest.raises(Exception, match="BdbQuit") as e:
        dt.run(step, 1, node=0)
    notes = "\n".join(getattr(e.value, "__notes__", [])) + str(e.value)
    assert f'{HERE}", line {step.__code__.co_firstlineno + 3}, in step' in notes


def test_a_breakpoint_of_the_debuggers_own(user: User) -> None:
    user.answers = [f"b {step.__code__.co_firstlineno + 4}", "c", "p z", "c"]
    assert dt.run(step, 3, node=0) == 8
    assert dt.run(pow, 2, 2, node=0) == 4


def test_interact(user: User, capsys: pytest.CaptureFixture[str]) -> None:
    user.answers = ["interact", "print(y + 100)", "1 / 0", "def f(n):", "    return n * y", "", "f(3)", EOFError(), "c"]
    assert dt.run(step, 20, node=1) == 42
    printed = capsys.readouterr().out
    assert "121" in printed
    assert "ZeroDivisionError" in printed
    assert "63" in printed
    assert "the input has ended" not in printed
    assert user.prompts[1:] == ["(node 1) >>> "] * 3 + ["(node 1) ... "] * 2 + ["(node 1) >>> "] * 2 + ["(node 1 pdb) "]


def test_one_after_the_other(user: User, capsys: pytest.CaptureFixture[str]) -> None:
    user.answers = ["p x", "n", "c", "p x", "c"]
    works = [dt.submit(step, 10, node=0), dt.submit(step, 20, node=1)]
    await_stops(2)
    assert [work.result() for work in works] == [22, 42]
    first = user.prompts[0]
    assert user.prompts[:3] == [first] * 3
    assert user.prompts[3:] == [{"(node 0 pdb) ": "(node 1 pdb) "}.get(first, "(node 0 pdb) ")] * 2
    printed = capsys.readouterr().out
    assert re.match(rf"node \d is at .*; 1 more waits for its turn: node \d, {HERE}:\d+\n", printed)


def test_a_status_says_where(user: User) -> None:
    """With the line that has issued the function, however old what the node has said of its threads is."""
    rows: list[Any] = []

    def look() -> str:
        rows.append(dt.seeing.status(timeout=0))
        return "c"

    user.answers = [look]
    assert dt.run(step, 1, node=1) == 4
    row = rows[0].nodes[1]
    position = f"{HERE}:{step.__code__.co_firstlineno + 3}"
    assert (row.state, row.what, row.note) == ("at a breakpoint", "step()", position)
    assert row.line == f"{HERE}:{test_a_status_says_where.__code__.co_firstlineno + 9}"
    assert f"at a breakpoint, {position}, in step()" in repr(rows[0])
    assert dt.seeing.status(timeout=0).nodes[1].state != "at a breakpoint"


def test_errors_of_patience_name_it(user: User) -> None:
    at = rf"it is at a breakpoint in step\(\), {HERE}:\d+"

    def wait() -> None:  # in another thread, which asks nobody
        begin.wait(HANG)
        for late in (lambda: work.result(timeout=0.01), lambda: dt.synchronize(1, timeout=0.01)):
            try:
                late()
            except TimeoutError as e:
                said.append(str(e))

    said: list[str] = []
    begin, thread = threading.Event(), threading.Thread(target=wait)
    thread.start()
    work = dt.submit(step, 1, node=1)
    await_stops(1)
    begin.set()
    deadline = time.monotonic() + HANG
    while len(said) < 2:  # a join would be asked in
        assert time.monotonic() < deadline
    assert [bool(re.search(at, text)) for text in said] == [True, True], said
    user.answers = ["c"]
    assert work.result() == 4
    thread.join(HANG)


def test_ctrl_c_once_and_twice(user: User, capsys: pytest.CaptureFixture[str]) -> None:
    work = dt.submit(step, 1, node=0)
    user.answers = [KeyboardInterrupt(), "p y", KeyboardInterrupt(), KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        work.result()
    assert "--KeyboardInterrupt--" in capsys.readouterr().out
    user.answers = ["c"]
    assert work.result() == 4


@pytest.mark.parametrize("error", [EOFError(), OSError("no terminal"), RuntimeError("input(): lost sys.stdin")])
def test_the_end_of_the_input(user: User, error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    user.answers = ["b step", error]
    assert dt.run(step, 1, node=0) == 4
    assert capsys.readouterr().out.count("node 0 goes on from its breakpoint: the input has ended") == 1


def test_without_a_terminal_all_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        assert dt.run(step, 1, node=[0, 1]) == [4, 4]
        assert dt.run(step, 2, node=1) == 6
    (said,) = [record.getMessage() for record in caplog.records]
    assert re.match(rf"node \d goes on from its breakpoint at {HERE}:\d+: nobody can be asked", said)


def test_what_a_node_sends_is_only_shown(user: User, capsys: pytest.CaptureFixture[str]) -> None:
    """Escape sequences do nothing, a pickle is text, and no node asks in the name of another one."""
    user.answers = [
        r"!print('\x1b]0;owned\x07\x1b[2J' + chr(0x202e) + 'text\r\x08end')",
        r"!import os, pickle; print(pickle.dumps(os.getcwd, 0).decode())",
        "c",
    ]
    dt.run(step, 1, node=1)
    printed = capsys.readouterr().out
    assert "\ufffdtext\ufffd\ufffdend" in printed
    assert not {*"\x1b\x07\u202e\r\x08"} & {*printed}
    assert "cposix\ngetcwd\n" in printed
    link = current.session().link

    def hear(**other: Any) -> str:
        with link.lock:
            link.breakpoints.take_reply(1, link.nodes[1].connection.stops, said(stop=9, **other))
        return "c"

    hear()
    user.answers = [lambda: hear(state="over")]
    assert link.breakpoints.serve(lambda: False)
    assert user.prompts[-1] == "(node 1) (node 0 pdb) "


def said(**other: Any) -> c.AtBreakpoint:
    given = {"stop": 0, "state": "asks", "text": "> f()\n(node 0 pdb) ", "file": "a.py", "line": 1, "what": "f()"}
    return c.AtBreakpoint(**{**given, **other})


@pytest.mark.parametrize(
    "wrong",
    [
        said(stop=-1),
        said(line=-1),
        said(what="\x1b[2J"),
        said(what="x" * (codec.MAX_REASON + 1)),
        said(text="x" * (codec.MAX_DEBUGGED + 1)),
        said(file="x" * (codec.MAX_PATH + 1)),
    ],
)
def test_what_no_debugger_says(wrong: c.AtBreakpoint) -> None:
    with pytest.raises(ProtocolError):
        codec.check_reply(wrong)


def test_what_a_node_can_have_the_script_keep() -> None:
    taken, stops = StoppedFunctions(), dict[int, StoppedFunction]()
    for number in range(MAX_STOPS):
        taken.take_reply(0, stops, said(stop=number))
    with pytest.raises(ProtocolError, match="functions are at breakpoints"):
        taken.take_reply(0, stops, said(stop=MAX_STOPS))
    most = said(state="steps", text="x" * codec.MAX_DEBUGGED)
    for _ in range(MAX_UNSHOWN // codec.MAX_DEBUGGED - 1):
        taken.take_reply(0, stops, most)
    with pytest.raises(ProtocolError, match=f"more than {MAX_UNSHOWN}"):
        taken.take_reply(0, stops, most)


def test_what_was_typed_arrives_once_though_a_connection_ends() -> None:
    state, side_channels, beside = LinkState(FakeHub(), 2), SideChannels(), FakeHub()
    side_channels.hub = beside
    node, line = state.nodes[1], side.DebuggerLine(3, 1, "line", "n")
    side_channels.answer_debugger(node, line)
    beside.ended.append(1)
    side_channels.send_untold([node])
    assert [side.decode(word) for rank, word in beside.sent if rank == 1] == [line, line]
    side_channels.end_debugger(1, 3)
    beside.ended.append(1)
    side_channels.send_untold([node])
    assert len(beside.sent) == 2
    talk = Talk(1, 3, "f()", Interruption(), [].append)
    for word in (line, line, side.DebuggerLine(3, 2, "go on")):
        talk.take_word(word)
    assert [talk.readline(), talk.readline()] == ["n\n", ""]


def test_a_long_answer_is_cut(user: User, capsys: pytest.CaptureFixture[str]) -> None:
    user.answers = ["!print('x' * 300_000)", "p y", "c"]
    assert dt.run(step, 1, node=1) == 4
    printed = capsys.readouterr().out
    assert "more was printed, and is left out" in printed
    assert len(printed) < 300_000


def test_actors_and_functions_beside(user: User) -> None:
    user.answers = ["c", "p self.n, k", "n", "c"]
    counter = dt.actor(Counter, node=0)
    assert counter.add(2).result() == 2
    assert counter.add(3).result() == 5
    user.answers = ["n", "c"]
    assert dt.submit(step, 1, node=1, beside=True).result() == 4


def test_in_waits_that_are_none_for_nodes(user: User) -> None:
    """For a future, and for what the script holds for all."""
    user.answers = ["n", "c"]
    with dt.tasks.Executor() as executor:
        assert executor.submit(step, 1).result() == 4
    user.answers = ["c"]
    found = dt.tasks.Channel(name="found")

    def put(channel: Any) -> None:
        dt.seeing.breakpoint()
        channel.put(7)

    work = dt.submit(put, found, node=1)
    assert found.get() == 7
    work.result()


def test_a_script_that_does_not_wait_is_told_once(user: User, caplog: pytest.LogCaptureFixture) -> None:
    work, deadline = dt.submit(step, 1, node=1), time.monotonic() + HANG
    prompter = current.session().part(breakpoints.Prompter)
    while not caplog.records:
        assert time.monotonic() < deadline
        prompter.look()
    prompter.look()
    (text,) = [record.getMessage() for record in caplog.records]
    assert re.match(rf"node 1 is at a breakpoint in step\(\), {HERE}:\d+: it asks as soon as", text)
    assert user.prompts == []
    user.answers = ["c"]
    assert work.result() == 4


def test_the_sessions_end_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))

    def fails() -> None:
        with dt.init_master_worker(nodes=1, launcher="inproc"):
            dt.submit(notes_its_end, node=0)
            await_stops(1)
            raise LookupError

    with pytest.raises(LookupError):
        fails()
    assert [bdb.BdbQuit] == ENDED


def test_python_breakpointhook(monkeypatch: pytest.MonkeyPatch, user: User) -> None:
    """As on nodes that are processes: ``PYTHONBREAKPOINT=0`` leaves breakpoints out."""

    def stops() -> int:
        hook()
        return 1

    user.answers = ["c"]
    assert dt.run(stops, node=0) == 1
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    assert dt.run(stops, node=0) == dt.run(step, -1, node=0) + 1 == 1


def test_in_the_script_it_is_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[Any] = []
    monkeypatch.setattr(pdb.Pdb, "set_trace", lambda self, frame: stopped.append(frame))
    dt.seeing.breakpoint()
    assert stopped == [sys._getframe()]


# ---- at a terminal, with processes -----------------------------------------------------------------------------------

STORY = """
import os, sys, threading
import disttensor as dt


def step(x):
    y = x * 2
    breakpoint()
    return y + 1


def ending(path):
    try:
        breakpoint()
        os.getpid()  # where it stops
    finally:
        with open(path, "w") as file:
            file.write(sys.exc_info()[0].__name__)


def stopped():
    it = dt.seeing.status(timeout=10)
    return it if any(row.state == "at a breakpoint" for row in it.nodes) else None


def at_a_breakpoint(then):
    def run():
        while (it := stopped()) is None:
            pass
        then(it)

    threading.Thread(target=run).start()


def shown(it):
    row = it.nodes[1]
    print(f"seen: {row.state}, {row.note}, {row.what}, {row.line}", flush=True)


if __name__ == "__main__":
    ended = sys.argv[1]
    try:
        with dt.init_master_worker(nodes=2, threads=1):
            at_a_breakpoint(shown)
            print("value", dt.run(step, 20, node=1))
            print("value", dt.run(step, 1, node=0))
            try:
                dt.run(step, 2, node=1)
            except KeyboardInterrupt:
                print("interrupted")
            while stopped() is not None:  # it is cancelled, and may not have heard of that
                pass
            work = dt.submit(step, 3, node=1, beside=True)
            at_a_breakpoint(lambda it: work.cancel())
            try:
                work.result()
            except dt.errors.CancelledError as e:
                print("cancelled", e)
            print("value", dt.run(step, 4, node=0))
            at_a_breakpoint(lambda it: dt.kill(0))
            try:
                dt.run(step, 5, node=0)
            except dt.NodeLost as e:
                print("lost", e.rank)
            dt.submit(ending, ended, node=1)
            while stopped() is None:
                pass
            raise LookupError
    except LookupError:
        print("the end")
"""


class Terminal:
    """A terminal on which a script runs."""

    def __init__(self, script: Path, *args: str) -> None:
        self._ours, self._theirs = pty.openpty()
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
        env.pop("PYTHONBREAKPOINT", None)
        self.text, self._seen = "", 0
        self.process = subprocess.Popen(
            [sys.executable, str(script), *args], env=env, preexec_fn=self._take,
            stdin=self._theirs, stdout=self._theirs, stderr=self._theirs,
        )  # fmt: skip

    def _take(self) -> None:
        os.setsid()
        fcntl.ioctl(self._theirs, termios.TIOCSCTTY, 0)

    def wait(self, *texts: str) -> None:
        """Waits until it shows these texts, each after what was waited for before."""
        deadline = time.monotonic() + HANG
        while any(text not in self.text[self._seen :] for text in texts):
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self._ours], [], [], left)[0], f"no {texts} in {self.text}"
            self.text += os.read(self._ours, 1 << 16).decode()
        self._seen = max(self.text.index(text, self._seen) + len(text) for text in texts)

    def type(self, keys: str) -> None:
        """Types once the script waits for it: a Ctrl-C between the prompt and the wait would be heard with the next
        key."""
        main, deadline = Path(f"/proc/{self.process.pid}/stat"), time.monotonic() + HANG
        while main.read_text().rpartition(") ")[2][0] != "S":
            assert time.monotonic() < deadline
        os.write(self._ours, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    script = tmp_path / "train.py"
    script.write_text(STORY)
    made = Terminal(script, str(tmp_path / "ended"))
    yield made
    made.close()


def test_at_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    it, one, two = terminal, "(node 0 pdb) ", "(node 1 pdb) "
    it.wait(two, "seen: at a breakpoint, train.py:9, step(), train.py:")
    it.type("p x, y\n")
    it.wait("(20, 40)", two)
    it.type("n\n")
    it.wait("--Return--", two)
    it.type("c\n")
    it.wait("value 41", "node 0 is at a breakpoint in step(), train.py:9", one)
    it.type("\x03")
    it.wait("--KeyboardInterrupt--", one)
    it.type("!import os, time; os.write(2, b'bu' + b'sy\\n'); time.sleep(600)\n")
    it.wait("busy")
    it.type("\x03")
    it.wait("KeyboardInterrupt", one)
    it.type("c\n")
    it.wait("value 3", two)
    it.type("\x03")
    it.wait("--KeyboardInterrupt--", two)
    it.type("\x03")
    it.wait("interrupted")
    it.wait("the function has ended, and its debugger with it", "cancelled step() was cancelled", one)
    it.type("\x04")
    it.wait("node 0 goes on from its breakpoint: the input has ended", "value 9")
    it.wait("node 0 is lost, and its debugger with it", "lost 0")
    it.wait("the end")
    assert it.process.wait(HANG) == 0
    assert (tmp_path / "ended").read_text() == "BdbQuit"
