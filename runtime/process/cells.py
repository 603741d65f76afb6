"""Cells of IPython and of notebooks: the names by which people know them, and the lines of their code.

The file name of a cell's code is ``/tmp/ipykernel_20979/72005218.py``, or ``<ipython-input-3-...>``; IPython shows it
as ``Cell In[3]``. Its lines are in ``linecache`` of the process that the cell runs in, and nowhere else: a node that
runs a function of a cell has no file to read them from.
"""

from __future__ import annotations

import linecache
import os
import re
import sys

#: A frame of a formatted traceback: its indentation, file, line, and the name of its function after a comma.
FRAME = re.compile(r'(?P<indent> *)File "(?P<file>[^"\n]*)", line (?P<line>\d+)(?P<name>,? in .*)?')


#: Programs that run a notebook, and the variable by which Jupyter's server says which.
_KERNELS, _NOTEBOOK = ("ipykernel_launcher.py", "ipykernel"), "JPY_SESSION_NAME"


def script_name() -> str:
    """Returns the name of this process's script: "train.py"; of a notebook "train.ipynb" where Jupyter says that, else
    "notebook"; "python" for none."""
    name = os.path.basename(sys.argv[0])
    if name in _KERNELS:
        name = os.path.basename(os.environ.get(_NOTEBOOK, "")) or "notebook"
    return name.encode(errors="replace").decode() or "python"  # a name may be no UTF-8


def cell_of(file: str) -> str:
    """Returns the name of the cell whose code has this file name, such as "Cell In[3]"; "" where it is not a cell's."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    named = shell.compile.format_code_name(file) if shell is not None else None
    return " ".join(named) if named else ""


def position(file: str, line: int) -> str:
    """Returns a line as people know it: "train.py:12", or "Cell In[3], line 2"."""
    cell = cell_of(file)
    return f"{cell}, line {line}" if cell else f"{file}:{line}"


def source(file: str, line: int) -> str:
    """Returns a line of a cell's code; "" for a line of a file's."""
    return linecache.getline(file, line).strip() if cell_of(file) else ""


def with_cells(trace: str) -> str:
    """Returns a node's traceback with the names of cells, and with the lines of code that only this process has."""
    lines = trace.split("\n")
    made: list[str] = []
    for at, text in enumerate(lines):
        found = FRAME.fullmatch(text)
        if found is None:
            made.append(text)
            continue
        file, line, indent = found["file"], int(found["line"]), found["indent"]
        cell = cell_of(file)
        made.append(f"{indent}{cell}, line {line}{found['name'] or ''}" if cell else text)
        has_source = at + 1 < len(lines) and lines[at + 1].startswith(indent + "  ")
        is_python = (found["name"] or "").startswith(",")  # those of a crash have no sources
        if is_python and not has_source and (code := linecache.getline(file, line).strip()):
            made.append(f"{indent}  {code}")
    return "\n".join(made)
