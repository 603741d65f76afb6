"""Tracebacks as they are shown: a user's own lines, and in the place of disttensor's frames a line that counts them.

    Traceback (most recent call last):
      File "train.py", line 8, in <module>
        print(picked.sum().item())
              ^^^^^^^^^^^^^^^^^^^
      [7 frames inside disttensor; DISTTENSOR_TRACEBACK=full shows them]
      failed: aten::embedding on node 1 (host vm, pid 3632)
      issued: train.py:7 in <module>
    IndexError: index out of range in self

Only what is shown folds, by ``sys.excepthook``, ``threading.excepthook`` and IPython: ``__traceback__``, ``__notes__``
and the text of an exception stay whole, for debuggers, loggers and ``raise ... from``. A hook that another
program has set before stays; one that it sets later takes the place of this one. Python itself shows exceptions without
a frame of disttensor's, and those with no other frames.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..runtime.process.cells import FRAME, cell_of, with_cells
from ..runtime.protocol.errors import LAST_COMMANDS, LAST_OUTPUT, DisttensorError

if TYPE_CHECKING:
    from traceback import StackSummary, TracebackException

_HERE = os.path.abspath(sys.modules["disttensor"].__path__[0])
_OURS = tuple({_HERE + os.sep, os.path.realpath(os.path.join(_HERE, "runtime")) + os.sep, "<disttensor "})
_STDLIB = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})


def install() -> None:
    """Has tracebacks fold in this process, where Python's own hooks show them, and in IPython where that runs.

    Does nothing in a process that entry.py runs: what a node prints of itself is for those who mend it.
    """
    if getattr(sys.modules.get("__main__"), "NAMES_NO_DEVICE", False):
        return
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _show_of_thread
    into_ipython()


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    text = _text_or_none(error, trace)
    if text is None or sys.stderr is None:
        sys.__excepthook__(kind, error, trace)
    else:
        sys.stderr.write(text)
        sys.stderr.flush()


def _show_of_thread(args: threading.ExceptHookArgs) -> None:
    error, stream = args.exc_value, sys.stderr
    text = None
    if error is not None and not isinstance(error, SystemExit):  # which ends a thread without a word
        text = _text_or_none(error, args.exc_traceback)
    if text is None or stream is None:
        threading.__excepthook__(args)
    else:
        name = args.thread.name if args.thread is not None else threading.get_ident()
        stream.write(f"Exception in thread {name}:\n{text}")
        stream.flush()


def _text_or_none(error: BaseException, trace: TracebackType | None) -> str | None:
    """Returns the folded traceback, colours included; None where Python is to show it: it is whole, or can't be had."""
    try:
        return text_of(error, trace, colours=True)
    except Exception:  # what an exception says of itself may raise anything, and it has to be shown
        return None


def text_of(error: BaseException, trace: TracebackType | None = None, colours: bool = False) -> str | None:
    """Returns the folded traceback of an exception and of those that it has come from; None where nothing folds."""
    import traceback

    if not _folds(error):
        return None
    with _shortened(error) as details:
        made = traceback.TracebackException(
            type(error), error, error.__traceback__ if trace is None else trace, compact=True
        )
        pairs = list(_pairs(made, error))
    for one, of in pairs:
        if one.stack:
            one.stack = _folded_stack(one.stack, details.get(id(of), ()))
        elif id(of) in details:  # sys.tracebacklimit has it so
            one.__notes__ = details[id(of)]
    return _with_hint("".join(made.format(**_colours() if colours else {})))


def _colours() -> dict[str, Any]:
    """Returns the option that has a traceback in colours, where Python itself would show it so."""
    try:
        from _colorize import can_colorize  # type: ignore[import-not-found, unused-ignore]
    except ImportError:  # before Python 3.13
        return {}
    try:
        return {"colorize": can_colorize(file=sys.stderr)}
    except TypeError:  # Python 3.13 looks at one stream only
        return {"colorize": can_colorize()}


# ----- what folds


def _folds(error: BaseException) -> bool:
    """Returns whether anything of an exception's traceback folds: it came from a line of the user's, and through
    disttensor."""
    if os.environ.get("DISTTENSOR_TRACEBACK", "").lower() == "full":
        return False
    return {OURS, USERS} <= {kind for one in _tree(error) for kind in _whose(one)}


def _whose(error: BaseException) -> set[int]:
    """Returns whose lines an exception came through: by its frames, or, where a worker of a DataLoader has sent it, by
    those of its text."""
    kinds = {_kind(frame.f_code.co_filename) for frame in _frames(error.__traceback__)}
    if isinstance(error, DisttensorError) and "\n" in (text := str(error)):
        kinds |= {_kind(found["file"]) for found in FRAME.finditer(text)}
    return kinds


def _frames(trace: TracebackType | None) -> Iterator[Any]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _tree(error: BaseException) -> list[BaseException]:
    """Returns an exception and all that are shown with it: those from which it has come, or which it groups."""
    found: dict[int, BaseException] = {}
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is None or id(one) in found:
            continue
        found[id(one)] = one
        todo.append(one.__cause__ or (None if one.__suppress_context__ else one.__context__))
        todo += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
    return list(found.values())


def _pairs(made: TracebackException, error: BaseException) -> Iterator[tuple[TracebackException, BaseException]]:
    """Yields what ``traceback`` has made of an exception, and of those that it has come from, each with its own."""
    todo: list[tuple[TracebackException | None, BaseException | None]] = [(made, error)]
    while todo:
        one, of = todo.pop()
        if one is None or of is None:
            continue
        yield one, of
        todo += [(one.__cause__, of.__cause__), (one.__context__, of.__context__)]
        todo += zip(one.exceptions or (), of.exceptions if isinstance(of, BaseExceptionGroup) else (), strict=False)


OURS, LIBRARY, USERS = range(3)


def _kind(file: str) -> int:
    """Returns whose code a file is: disttensor's; Python's or torch's, which folds where disttensor has called it; or
    the user's, which all else is."""
    if file.startswith(_OURS):
        return OURS
    torch = sys.modules.get("torch")
    if torch is not None and file.startswith(tuple(path + os.sep for path in torch.__path__)):
        return LIBRARY
    if file.startswith("<frozen ") or (file.startswith(_STDLIB) and "-packages" + os.sep not in file):
        return LIBRARY
    return USERS


def _runs(files: Iterable[str]) -> list[tuple[int, int]]:
    """Returns the [begin, end) of what folds: frames of disttensor's, with those of libraries that come behind."""
    runs: list[tuple[int, int]] = []
    inside = False
    for at, kind in enumerate(map(_kind, files)):
        if kind == OURS and not inside:
            runs.append((at, at))
        inside = kind == OURS or (inside and kind == LIBRARY)
        if inside:
            runs[-1] = (runs[-1][0], at + 1)
    return runs


def _words(count: int) -> str:
    """Returns the words for frames that are left out."""
    return f"[{count} frame{'s' if count > 1 else ''} inside disttensor]"


def _with_hint(text: str) -> str:
    """Returns a text whose first words for frames that are left out say how to see them."""
    return text.replace("inside disttensor]", "inside disttensor; DISTTENSOR_TRACEBACK=full shows them]", 1)


@contextlib.contextmanager
def _shortened(error: BaseException) -> Iterator[dict[int, list[str]]]:
    """Has the exceptions that came through disttensor say their sentence alone, while they are formatted. Gives what
    else they have to say, by the exception's id: their notes, and what stands below their sentence."""
    before: list[tuple[BaseException, tuple[Any, ...], Any]] = []
    details: dict[int, list[str]] = {}
    try:
        for one in _tree(error):
            if OURS not in _whose(one):
                continue
            notes = getattr(one, "__notes__", ())
            notes = notes if isinstance(notes, Sequence) and not isinstance(notes, str) else (repr(notes),)
            before.append((one, one.args, getattr(one, "__notes__", None)))
            more: list[str] = []
            if isinstance(one, DisttensorError):
                text, more = _split(str(one))
                one.args = (_folded_text(text),)
            told = details[id(one)] = [_folded_text(str(note)) for note in (*more, *notes)]
            one.__notes__ = []
            if told:
                told[-1] = _without_sentence(told[-1], one)
        yield details
    finally:
        for one, args, kept in before:
            one.args = args
            if kept is not None:
                one.__notes__ = kept
            elif hasattr(one, "__notes__"):
                del one.__notes__


def _split(text: str) -> tuple[str, list[str]]:
    """Returns a text's sentence, and what stands below it: a node's last output, and its last commands."""
    sentence, more = text, list[str]()
    for heading in (LAST_COMMANDS, LAST_OUTPUT):
        sentence, found, rest = sentence.partition(f"\n{heading}\n")
        if found:
            more.insert(0, f"{heading}\n{rest}")
    return sentence, more


def _without_sentence(note: str, error: BaseException) -> str:
    """Returns a note without the exception's sentence at its end, as that follows: it is a node's traceback."""
    kind, text = type(error), str(error)
    for name in (kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"):
        note = note.removesuffix(f"\n{name}: {text}" if text else f"\n{name}")
    return note


def _folded_text(text: str) -> str:
    """Returns a text in which tracebacks are folded, where these have lines of the user's as well."""
    text = with_cells(text)
    stacks: list[list[tuple[str, list[str]]]] = [[]]  #: of frames, each with its file, and texts between them
    indent = -1
    for line in text.split("\n"):
        if (found := FRAME.fullmatch(line)) is not None:
            indent = len(found["indent"])
            stacks[-1].append((found["file"], [line]))
        elif indent >= 0 and line.startswith(" " * (indent + 1)):
            stacks[-1][-1][1].append(line)
        else:
            indent = -1
            stacks += [[("", [line])], []]
    kinds = {_kind(file) for stack in stacks for file, _ in stack if file}
    # without the user's frames it is a mistake of disttensor's, except in the stacks of a crash
    if USERS not in kinds and "(most recent call first)" not in text:
        return text
    made: list[str] = []
    for stack in stacks:
        at = 0
        for begin, end in _runs(file for file, _ in stack):
            first = stack[begin][1][0]
            made += [line for _, lines in stack[at:begin] for line in lines]
            made.append(first[: len(first) - len(first.lstrip())] + _words(end - begin))
            at = end
        made += [line for _, lines in stack[at:] for line in lines]
    return "\n".join(made)


def _folded_stack(stack: StackSummary, details: Sequence[str]) -> StackSummary:
    """Returns the frames of an exception as they are shown, and below them what else it has to say."""
    from traceback import FrameSummary, StackSummary

    class Words(FrameSummary):
        """Lines that stand in the place of frames."""

        text = ""

    class Folded(StackSummary):
        """Frames and words; the frames of cells have the cells' names."""

        def format_frame_summary(self, frame_summary: FrameSummary, **how: Any) -> str:
            if isinstance(frame_summary, Words):
                return frame_summary.text
            text = super().format_frame_summary(frame_summary, **how)
            if cell := cell_of(frame_summary.filename):
                text = text.replace("File ", "", 1).replace(f'"{frame_summary.filename}"', cell, 1)
            return text

    made, at = Folded(), 0

    def say(text: str) -> None:
        words = Words("", len(made), "", lookup_line=False, line="")
        words.text = f"{text}\n"
        made.append(words)

    for begin, end in _runs(frame.filename for frame in stack):
        made += stack[at:begin]
        say(f"  {_words(end - begin)}")
        at = end
    made += stack[at:]
    for text in details:
        say(text)
    return made


# ----- IPython


def into_ipython() -> None:
    """Has IPython's tracebacks fold, where this process runs IPython. One that somebody has replaced stays as it is."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or hasattr(shell.InteractiveTB, "_disttensor"):
        return
    formats: Any = shell.InteractiveTB
    formats._disttensor = True
    formats.structured_traceback = _ForIPython(formats.structured_traceback)
    shell.showtraceback = _Groups(shell)


class _ForIPython:
    """IPython's own way of formatting an exception, given one that is folded."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __call__(
        self, kind: Any, error: BaseException | None, trace: Any = None, *args: Any, **kwargs: Any
    ) -> list[str]:
        with contextlib.suppress(Exception):  # what an exception says of itself may raise anything
            if error is not None and isinstance(trace, TracebackType) and _folds(error):
                return self._folded(kind, error, trace, *args, **kwargs)
        return list(self._original(kind, error, trace, *args, **kwargs))

    def _folded(self, kind: Any, error: BaseException, trace: TracebackType, *args: Any, **kwargs: Any) -> list[str]:
        formats = self._original.__self__
        whole: list[tuple[BaseException, TracebackType | None]] = []
        with _shortened(error) as details:
            try:
                said = {}
                for one in _tree(error):
                    if id(one) in details:
                        folded, words = _folded_trace(one.__traceback__)
                        said[id(one)] = [*words, *details[id(one)]]
                        whole.append((one, one.__traceback__))
                        one.__traceback__ = folded
                        if one is not error:  # its sentence is not the last one
                            one.__notes__ = said[id(one)]
                lines = list(self._original(kind, error, _folded_trace(trace)[0], *args, **kwargs))
            finally:
                for one, kept in whole:
                    one.__traceback__ = kept
                formats.tb = trace  # for %debug
        end = "" if formats.tb_join_char else "\n"
        lines[-1:-1] = [text + end for text in said.get(id(error), ())]
        first = next((at for at, line in enumerate(lines) if _with_hint(line) != line), None)
        if first is not None:
            lines[first] = _with_hint(lines[first])
        return lines


class _Groups:
    """IPython's way of showing an exception, which leaves groups of exceptions to Python."""

    def __init__(self, shell: Any) -> None:
        self._shell, self._original = shell, shell.showtraceback

    def __call__(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        error = sys.exc_info()[1] if exc_tuple is None else exc_tuple[1]
        if isinstance(error, BaseException) and any(isinstance(one, BaseExceptionGroup) for one in _tree(error)):
            text = _text_or_none(error, error.__traceback__)
            if text is not None:
                self._shell._get_exc_info(exc_tuple)  # for %debug
                print(text, end="", file=sys.stderr)
                return
        self._original(exc_tuple, *args, **kwargs)


def _folded_trace(trace: TracebackType | None) -> tuple[TracebackType | None, list[str]]:
    """Returns a traceback without the frames that fold, and the words for these."""
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    runs = _runs(each.tb_frame.f_code.co_filename for each in frames)
    left_out = {at for begin, end in runs for at in range(begin, end)}
    folded: TracebackType | None = None
    for at in reversed(range(len(frames))):
        if at not in left_out:
            each = frames[at]
            folded = TracebackType(folded, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return folded, [_words(len(left_out))] if left_out else []
