"""``dt.seeing.profile("t.json.gz")``: a timeline of what the script and the nodes do in a ``with`` block, and
``dt.seeing.report("run.html")``: a page about it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from .. import torch_patches
from ..dispatch.call_site import here
from ..runtime.master.failures import short_line
from ..runtime.protocol.bundle import VERSION
from ..runtime.protocol.errors import DisttensorError
from ..session import current
from ..session.session import Session
from .chrome_trace import ChromeTrace, encode, write
from .recording import ProfileRecord, Recording
from .report_page import page_of
from .run_report import RunReport, RunSeen
from .run_watch import RunWatch
from .shares import table
from .torch_profilers import TorchOptions, TorchProfilers, file_of_node, torch_options
from .torch_trace import TorchTrace, plain
from .watch_place import WatchPlace

if TYPE_CHECKING:
    from torch.profiler import ProfilerActivity

#: How the name of a page ends.
PAGE = ".html"


class Profile:
    """A profile. It records inside of its ``with`` block, at whose end it waits for what was issued there, and writes
    its file."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        torch_options: TorchOptions | None = None,
        is_page: bool = False,
    ) -> None:
        """``torch_options``: what torch's profiler is to record on nodes; None: it is not on there. ``is_page``: the
        file is a page, as that of every name which ends in ".html"."""
        self._path = "" if path is None else os.fspath(path)
        self._is_page = is_page or self._path.endswith(PAGE)
        self._torch_options = torch_options
        self._torch: TorchProfilers | None = None
        self._torch_traces: list[TorchTrace] = []
        self._session: Session | None = None
        self._recording: Recording | None = None
        self._record: ProfileRecord | None = None
        self._watch: RunWatch | None = None
        self._seen = RunSeen()
        self._steps, self._stepped = 0, 0.0

    def __repr__(self) -> str:
        state = "recorded" if self._record else "recording" if self._recording else "not begun"
        return f"<disttensor.seeing.Profile {self._path!r} {state}>"

    def __enter__(self) -> Profile:
        self.begin_recording(f"at {short_line(here()) or 'an unknown line'}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_recording(wait=kind is None)

    def begin_recording(self, begun: str) -> None:
        """Begins to record. ``begun``: where that is, or by what, such as "at train.py:12".

        Raises DisttensorError without a session, where a profile is recorded already, and for nodes that are threads of
        the script; OSError for a file that can't be written.
        """
        session = current.session()
        place, recording, watch = session.part(WatchPlace), Recording(session.link), RunWatch(session)
        torch_patches.install(torch_patches.PROFILING)
        place.enter(begun)
        profilers = self._profilers(session)
        try:
            if self._path:
                write(b"", self._path, begins=True)  # raises now what it would raise when all is recorded
            if profilers is not None:
                profilers.begin()
            recording.begin()
            watch.begin()
        except BaseException:
            watch.stop()
            recording.end()
            if profilers is not None:
                profilers.end()
            place.leave()
            raise
        self._torch, self._torch_traces = profilers, []
        self._session, self._recording, self._record, self._watch = session, recording, None, watch
        self._steps, self._stepped = 0, session.link.clock.now()

    def step(self) -> None:
        """Ends a step of the script: the timeline has each from the one before, as torch's profiler names them. Does
        nothing outside of the block."""
        if self._recording is not None and self._session is not None:
            self._stepped = self._recording.note_region(self._stepped, f"ProfilerStep#{self._steps}")
            self._steps += 1

    def end_recording(self, wait: bool = True) -> None:
        """Ends the recording and writes the file. ``wait``: for what was issued and is not done, first.

        What can't be had of a node, as it is lost, is missing, and the file says so.
        """
        session, recording, watch = self._session, self._recording, self._watch
        if session is None or recording is None or watch is None or session.link.is_forked:
            return
        is_done = False
        try:
            if wait and not session.link.closed:
                session.questions.sync_all()
                is_done = True
        finally:  # Ctrl-C ends that wait, and what is recorded is written all the same
            try:
                recording.stop()
                recording.collect()
                if self._torch is not None:
                    self._torch.collect(is_done)
            finally:
                recording.end()
                if self._torch is not None:
                    self._torch.end()
                    self._torch_traces, self._torch = self._torch.traces(), None
                self._record, self._recording = recording.record(), None
                session.part(WatchPlace).leave()
                try:
                    self._seen = watch.seen(is_done)
                finally:
                    if self._path:
                        self._write_files()

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes a page about what was recorded, as ``dt.seeing.report`` does. Raises DisttensorError before the end,
        OSError for a file that can't be written."""
        write(self.to_page(), os.fspath(path))

    def to_page(self) -> bytes:
        """Returns what such a page has. Raises DisttensorError before the end."""
        _, record = self._recorded()
        title = os.path.basename(sys.argv[0]) or "python"
        return page_of(RunReport(record, self._seen).to_dict(title, VERSION))

    def _profilers(self, session: Session) -> TorchProfilers | None:
        return None if self._torch_options is None else TorchProfilers(session, self._torch_options, here())

    def _write_files(self) -> None:
        """Writes the file of all, and of each node what torch's profiler has written there."""
        write(self.to_page() if self._is_page else encode(self.to_dict(), self._path), self._path)
        for it in self._torch_traces:
            if it.data:
                write(it.data if self._path.endswith(".gz") else plain(it.data), file_of_node(self._path, it.rank))

    def table(self) -> str:
        """Returns tables: for how long each node was busy, waited for the script, waited for nodes, or was idle while
        the script waited; and the lines of the script with whose commands nodes spent most time.

        Raises DisttensorError before the end.
        """
        return table(self._recorded()[1])

    def to_dict(self) -> dict[str, object]:
        """Returns what the file has, as JSON has it. Raises DisttensorError before the end."""
        session, record = self._recorded()
        return ChromeTrace(record, self._torch_traces).to_dict(
            len(session.nodes), session.channel.name, {"version": VERSION}
        )

    def _recorded(self) -> tuple[Session, ProfileRecord]:
        if self._record is None or self._session is None:
            raise DisttensorError("nothing is recorded yet: a profile has its timeline after its `with` block")
        return self._session, self._record


def profile(
    path: str | os.PathLike[str] | None = None,
    torch: bool = False,
    *,
    activities: Iterable[ProfilerActivity] | None = None,
    record_shapes: bool = False,
    profile_memory: bool = False,
    with_stack: bool = False,
    with_flops: bool = False,
) -> Profile:
    """Records a timeline of a ``with`` block: what the script issues and waits for, what each node does, what travels
    between them, and which of it belongs together.

    The file opens in Perfetto (https://ui.perfetto.dev), chrome://tracing and TensorBoard. The last million commands
    are kept, and of all else the last 100,000 events of each process. At its end the block waits until the nodes have
    done what was issued, unless it ends by an error.

    Args:
        path: the file; compressed if the name ends in ``.gz``, and a page as that of ``dt.seeing.report`` if it ends in
            ``.html``. None: no file.
        torch: whether torch.profiler is on at each node, too, on all of its threads. The file has what it has seen, and
            beside it is one for each node, as torch writes it: ``t.node0.json.gz`` of ``t.json.gz``.
        activities, record_shapes, profile_memory, with_stack, with_flops: as of torch.profiler.profile, for nodes. An
            activity that a node can't have is left out there.

    Raises, when the block begins, DisttensorError where a profile is recorded already, nodes are threads of the script,
    or torch.profiler can't start on a node; OSError for a file that can't be written. Raises at once ValueError for
    options of torch.profiler without ``torch=True``.
    """
    flags = {
        "record_shapes": record_shapes, "profile_memory": profile_memory, "with_stack": with_stack,
        "with_flops": with_flops,
    }  # fmt: skip
    if torch:
        return Profile(path, torch_options(activities, **flags))
    if given := ["activities"] * (activities is not None) + [name for name, value in flags.items() if value]:
        raise ValueError(f"{given[0]} is an option of torch's profiler, which is off: torch=True")
    return Profile(path)


def report(path: str | os.PathLike[str]) -> Profile:
    """Records a ``with`` block as ``dt.seeing.profile`` does, and writes a page about it: what each node did over time,
    who sent whom how much, which lines cost most, what memory was held. Any browser opens it, without a network.

    The page stays small however long the block was. ``prof.report(path)`` writes one of any recorded profile.

    Args:
        path: the file, of HTML.

    Raises what ``dt.seeing.profile`` does.
    """
    return Profile(path, is_page=True)
