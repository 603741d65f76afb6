"""Tables: columns, and what rich makes of those that are wider than a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from disttensor.runtime.process import tables

HEAD = ("host", "what to do")
ROWS = [HEAD, ("a", "nothing"), ("long-name", "look for a [firewall] between the hosts")]
PLAIN = """\
host       what to do
a          nothing
long-name  look for a [firewall] between the hosts
"""


class Terminal(io.StringIO):
    """What stands for one."""

    def isatty(self) -> bool:
        return True


def shown_at(width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a terminal of so many columns shows; without colours, so that it can be compared."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    tables.show(ROWS)
    return [line.rstrip() for line in terminal.getvalue().splitlines()]


def test_columns_stand_below_each_other() -> None:
    assert tables.columns(ROWS) + "\n" == PLAIN
    assert tables.columns([("n", "x"), ("10", "y")], [str.rjust, str.ljust]) == " n  x\n10  y"


def test_a_file_gets_whole_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever COLUMNS says: programs read them."""
    monkeypatch.setenv("COLUMNS", "20")
    tables.show(ROWS)
    assert capsys.readouterr().out == PLAIN


def test_rich_folds_cells_at_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No text is lost, and none of it is markup."""
    assert shown_at(40, monkeypatch) == [
        "host       what to do",
        "a          nothing",
        "long-name  look for a [firewall] between",
        "           the hosts",
    ]


@pytest.mark.parametrize(("width", "rich"), [(80, "there"), (40, "missing")])
def test_else_lines_are_whole(width: int, rich: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is room for them, and where rich is not installed."""
    if rich == "missing":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    assert shown_at(width, monkeypatch) == PLAIN.splitlines()
