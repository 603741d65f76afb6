"""The scan of a node's last commands, as the script has kept them (master/history.py): it finds what they have made,
written and read.

The outbox of a node keeps its last commands as encoded messages, for the errors that tell of its end. They are decoded
and gone through when somebody asks where a tensor comes from, so that an operation costs nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..runtime.channel.base import MASTER
from ..runtime.master.failures import Failure, Replayed, Site
from ..runtime.master.history import name_of
from ..runtime.master.node import Node
from ..runtime.node.template import Template
from ..runtime.protocol import commands as c
from ..runtime.protocol.allow_list import AllowList
from ..runtime.protocol.failure_ids import position
from ..runtime.protocol.traits import TRAITS, without_stream


class PastCommand(NamedTuple):
    """A command that has made a tensor, written it, or had it."""

    number: int  #: among the node's commands
    at: int  #: for one that a graph has recorded: which one; else -1
    name: str
    site: Site | None  #: where it was issued; of a graph's: recorded
    replayed: Site | None = None
    peer: int = MASTER  #: for a receive from another node: that node, and the number of the transfer
    transfer: int = -1
    arrives: bool = False  #: whether it is done before its tensor is there, as a receive is


class CommandScan:
    """The effects of a node's last commands on its tensors."""

    def __init__(
        self,
        node: Node,
        allow: AllowList,
        failures: Mapping[tuple[int, int], Failure],
        spoilt: Mapping[int, Failure],
        within: CommandScan | None = None,
    ) -> None:
        """``failures``: by the command's number, and its index in a graph; ``spoilt``: of transfers by which no tensor
        has come; ``within``: for a graph, what the commands before its replay have done."""
        self.node = node
        self.first = node.outbox.sent  #: the number of the first command that is known
        self.made: dict[int, PastCommand] = {}  #: by ref
        self.written: dict[int, PastCommand] = {}  #: by the ref of the tensor whose memory was written
        self.had: dict[int, PastCommand] = {}  #: the same, of functions, which may have written it
        self.read: dict[int, int] = {}  #: the last command that has read it
        self.sends: dict[int, PastCommand | None] = {}  #: by transfer: what has made, or last written, what is sent
        self.unsent: dict[int, Failure] = {}  #: by transfer: why there was nothing to send
        self._views: dict[int, int] = {}  #: ref of a view -> ref of the tensor that it is a view of
        self._spoilt: dict[int, Failure] = {}
        self._runs: dict[int, PastCommand] = {}
        self._allow, self._failures, self._arrivals, self._within = allow, failures, spoilt, within
        self._templates: dict[int, Template | None] = {} if within is None else within._templates
        self._programs: dict[int, CommandScan] = {}

    def read_history(self) -> None:
        """Goes through all that is kept. The caller holds the link's lock, and has sent what was queued."""
        for first, commands in reversed([*self.node.outbox.last_messages()]):
            self.first = min(self.first, first)
            for number, (command, site) in enumerate(commands, first):
                self.take_command(number, command, site)
        for key, standing in list(self.node.standing.items()):
            if isinstance(key, tuple) and key[0] == "graph":  # one that was not replayed of late, or never
                self._take_recorded(self._program(key[1], standing), ())

    def read_recording(self, commands: Iterable[c.Command], sites: Sequence[Site | None]) -> None:
        """Goes through what a graph has recorded so far, of which nothing has run."""
        done = CommandScan(self.node, self._allow, {}, {}, self)
        for at, command in enumerate(commands):
            done.take_command(-1, command, None, at)
        self._take_recorded(done, sites)

    def _take_recorded(self, done: CommandScan, sites: Sequence[Site | None]) -> None:
        sent = self.node.outbox.sent
        for ref, event in done.made.items():
            site = sites[event.at] if event.at < len(sites) else None
            self.made.setdefault(ref, event._replace(number=sent, site=site))
        for ref, base in done._views.items():
            self._views.setdefault(ref, base)

    def memory(self, ref: int) -> int:
        """Returns the ref of the tensor in whose memory one lies, as far as that is known: perhaps its own."""
        while ref in self._views:
            ref = self._views[ref]
        return ref

    def last(self, base: int) -> PastCommand | None:
        """Returns what has made a tensor, or written it last; None for one that is older than all that is kept."""
        found = [event for event in (self.made.get(base), self.written.get(base)) if event is not None]
        return max(found, key=lambda event: event[:2], default=None)

    def failure(self, ref: int) -> Failure | None:
        """Returns the failure that has left a tensor without a value."""
        found = self._spoilt.get(ref) or self._spoilt.get(self.memory(ref))
        return found if found is not None or self._within is None else self._within.failure(ref)

    def take_command(self, number: int, command: c.Command, site: Site | None, at: int = -1) -> None:
        """Takes the next command; ``at``: its index in a graph."""
        inner = without_stream(command)
        call = inner.call if isinstance(inner, c.Ask) else inner
        if isinstance(inner, c.Replay):
            self._replay(number, inner, site)
            return
        template = self._template(call.template) if isinstance(call, c.Call) else None
        traits, event = TRAITS[type(inner)], PastCommand(number, at, name_of(inner, self.node.defined), site)
        try:
            known = template is not None or not isinstance(call, c.Call)
            reads, writes, makes = (
                (list(refs(inner, template)) for refs in (traits.reads, traits.writes, traits.makes))
                if known
                else ((), (), (call.out,))  # type: ignore[union-attr]
            )
        except IndexError:  # a long command, which is kept without its arguments
            reads, writes, makes = (), (), (call.out,)  # type: ignore[union-attr]
        match inner:
            case c.Upload():
                event = event._replace(name="an upload")
            case c.Download():
                event = event._replace(name="a download")
            case c.Recv(peer=peer, transfer=transfer):
                name = "an upload" if peer == MASTER else f"a copy from node {peer}"
                event = event._replace(name=name, peer=peer, transfer=transfer, arrives=True)
            case c.Send(transfer=transfer, ref=ref):
                self.sends[transfer] = self.last(self.memory(ref))
            case c.Run(request=request):
                self._runs[request] = event
            case c.Adopt(request=request):
                event = self._runs.get(request, event)
        cause = self._cause(number, at, reads) or self._arrivals.get(event.transfer)
        if cause is not None and isinstance(inner, c.Send):
            self.unsent[inner.transfer] = cause
        for ref in makes:
            self.made[ref] = event
            if template is not None and template.views and reads:
                self._views[ref] = reads[0]
            if cause is not None:
                self._spoilt[ref] = cause
        for ref in writes:
            self.written[self.memory(ref)] = event
            if cause is not None and not isinstance(inner, c.Ask):  # its line has raised the error
                self._spoilt[self.memory(ref)] = cause
        for ref in reads:
            self.read[self.memory(ref)] = number
            if isinstance(inner, c.Run) and not inner.holds:
                self.had[self.memory(ref)] = event

    def _cause(self, number: int, at: int, reads: Iterable[int]) -> Failure | None:
        if not self._failures and not self._spoilt and self._within is None:
            return None
        own = self._failures.get((number, at))
        return own or next((found for ref in reads if (found := self.failure(ref)) is not None), None)

    def _template(self, number: int) -> Template | None:
        """Returns a template that the node knows; None for one that was forgotten since."""
        if number not in self._templates:
            define = self.node.defined.get(number)
            made = None if define is None else Template(define, self._allow, {}, str)  # type: ignore[arg-type]
            self._templates[number] = made
        return self._templates[number]

    # ---- graphs ------------------------------------------------------------------------------------------------------

    def _replay(self, number: int, command: c.Replay, site: Site | None) -> None:
        """Takes what the commands of a graph have done, with the refs of this replay."""
        standing = self.node.standing.get(("graph", command.graph))
        if standing is None:
            return  # it was reset since
        if self._failures:
            done = self._done(standing, {(-1, at): f for (n, at), f in self._failures.items() if n == number}, self)
        else:
            done = self._program(command.graph, standing)
        end = next(part for part in standing if isinstance(part, c.EndGraph))
        renamed = zip((*end.inputs, *end.returned), (*command.inputs, *command.outputs), strict=False)
        names = {recorded: now for recorded, now in renamed if recorded}
        sites = site.recorded.get(self.node.rank, ()) if isinstance(site, Replayed) else ()

        def here(event: PastCommand) -> PastCommand:
            recorded = sites[event.at] if event.at < len(sites) else None
            return event._replace(number=number, site=recorded, replayed=site)

        for ref, event in done.made.items():
            self.made[names.get(ref, ref)] = here(event)
        for ref, base in done._views.items():
            self._views[names.get(ref, ref)] = names.get(base, base)
        for ref, event in done.written.items():
            self.written[self.memory(names.get(ref, ref))] = here(event)
        for ref in done.read:
            self.read[self.memory(names.get(ref, ref))] = number
        for ref, failure in done._spoilt.items():
            self._spoilt[names.get(ref, ref)] = failure

    def _program(self, graph: int, standing: Sequence[c.Command]) -> CommandScan:
        """Returns what a graph's commands do, with the refs of the recording."""
        if graph not in self._programs:
            self._programs[graph] = self._done(standing, {}, None)
        return self._programs[graph]

    def _done(
        self, standing: Sequence[c.Command], failures: Mapping[tuple[int, int], Failure], within: CommandScan | None
    ) -> CommandScan:
        done = CommandScan(self.node, self._allow, failures, {}, within)
        parts = [part.commands for part in standing if isinstance(part, c.GraphPart)]
        for at, command in enumerate(each for commands in parts for each in commands):
            done.take_command(-1, command, None, at)
        return done


def by_position(failures: Iterable[Failure], rank: int, since: int) -> dict[tuple[int, int], Failure]:
    """Returns a node's failures by the command's number, and its index in a graph; from command ``since`` on."""
    found = {position(each.seq): each for each in failures if each.rank == rank}
    return {at: each for at, each in found.items() if at[0] >= since}
