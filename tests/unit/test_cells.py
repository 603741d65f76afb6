"""Frames of nodes as the script shows them: with the lines of code that only it has."""

from __future__ import annotations

from pathlib import Path

from disttensor.runtime.process.cells import with_cells


def test_a_line_that_only_this_process_has(tmp_path: Path) -> None:
    """A node without the file has sent the frame alone."""
    line = "    return 1 / 0"
    note = '--- traceback on node 0 ---\nTraceback (most recent call last):\n  File "{}", line 2, in f\nE'
    path = tmp_path / "there.py"
    path.write_text(f"def f():\n{line}\n")
    assert with_cells(note.format(path)) == note.format(path).replace("in f\n", "in f\n    return 1 / 0\n")
    assert with_cells(note.format("/nowhere.py")) == note.format("/nowhere.py")
