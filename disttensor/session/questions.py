"""Round trips: a command, and the wait for its reply; and the errors that replies and failures stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from ..errors import late_warnings
from ..runtime.master.failures import Failure, Site
from ..runtime.master.link import Link
from ..runtime.master.losses import EXIT_CAUSE_TIMEOUT
from ..runtime.master.requests import Request
from ..runtime.master.route import waits
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import DisttensorError, NonFiniteError
from ..runtime.protocol.failure_ids import position
from . import holdings
from .agreement import agreed
from .places import MeshPlace, Place, R

#: Replies that a line of the script waits for because it asks for a value.
_VALUES = (c.Answer, c.Shapes, c.Downloaded)


class Questions:
    """The questions of a session to its nodes."""

    def __init__(self, link: Link) -> None:
        self._link = link
        #: says which of a mesh's ranks a node is; "" for one that is in none
        self.coordinates: Callable[[int], str] = lambda rank: ""

    def ask(
        self,
        place: Place,
        kind: type[R],
        command: Callable[[int], c.Command],
        site: Site | None,
        due: int = 0,
        what: str = "this operation",
    ) -> R:
        """Sends everything that is queued anywhere, then a request; waits for the reply, which is of this ``kind``, and
        has ``due`` reasons if it is Unusable. ``what``: the operation, for errors.

        ``command`` makes the command from the request's id. Raises the error that made an operand fail, NodeLost,
        GraphError while a graph is recorded.
        """
        waits(what)
        if late_warnings.pending:
            late_warnings.show_warnings()
        return self.ask_now(place, kind, command, site, due)

    def ask_now(
        self, place: Place, kind: type[R], command: Callable[[int], c.Command], site: Site | None, due: int
    ) -> R:
        """Does what ``ask`` does, where it may."""
        link = self._link
        # a mesh's nodes are asked by one command, and have to give one reply
        if isinstance(place, MeshPlace):
            return self._ask_all(place, kind, command, site, due)
        request = link.requests.new(place.node, kind, due)
        if kind in _VALUES:
            request.counted, request.site = True, site
        commands = place.outbox.commands
        commands += (command(request.id), site)
        reply = link.sender.exchange(place.outbox, request, None)
        if isinstance(reply, c.Poisoned):
            raise self.failure(reply.rank, reply.seq, place.node)
        return reply  # type: ignore[return-value]  # the link has looked

    def _ask_all(
        self, place: MeshPlace, kind: type[R], command: Callable[[int], c.Command], site: Site | None, due: int
    ) -> R:
        """Asks all nodes of a mesh by one command, and returns the reply that they all give.

        Raises RanksDiffer where they give different ones, else as ``ask``.
        """
        link = self._link
        request = link.requests.new_to_all(place.outbox, kind, due)
        if kind in _VALUES:
            request.counted, request.site = True, site
        commands = place.outbox.commands
        commands += (command(request.id), site)
        link.sender.exchange(place.outbox, request, None)
        replies = list(map(request.replies.__getitem__, place.ranks))
        if c.Poisoned in {*map(type, replies)}:
            self.raise_failures(place, [r if isinstance(r, c.Poisoned) else None for r in replies])
        return agreed(place, replies)  # type: ignore[return-value]

    def raise_failures(self, place: MeshPlace, causes: Sequence[c.Poisoned | None]) -> None:
        """Raises the error of the first member that has failed, if one has; ``causes``: what each has said."""
        failed = [i for i, cause in enumerate(causes) if cause is not None]
        if not failed:
            return
        errors: dict[str, tuple[Exception, list[int]]] = {}
        for i in failed:
            cause = causes[i]
            assert cause is not None
            error = self.failure(cause.rank, cause.seq, place.ranks[i])
            errors.setdefault(f"{type(error)}{error}", (error, []))[1].append(i)
        (first, at), *others = errors.values()
        first.add_note(self._among(place, at))
        for other, at in others[:3]:
            first.add_note(f"{type(other).__name__}: {str(other).splitlines()[0]}\n{self._among(place, at)}")
        try:
            raise first
        finally:
            del error, errors, first, others  # as in raise_pending_error

    @staticmethod
    def _among(place: MeshPlace, at: list[int]) -> str:
        shown = ", ".join(f"node {place.ranks[i]} ({place.where(i)})" for i in at[:3])
        return f"  on {shown}{', ...' if len(at) > 3 else ''}: {len(at)} of {len(place.ranks)} ranks"

    def failure(self, rank: int, seq: int, says: int | None = None) -> Exception:
        """Returns the exception for the failure of command ``seq`` of node ``rank``. Waits for the node if the failure
        has not been reported yet. ``says``: the node that has named it as its cause."""
        link = self._link
        found = link.failures.get((rank, seq))
        if found is None and 0 <= rank < len(link.nodes) and position(seq)[0] >= link.nodes[rank].connection.first:
            self.sync(rank, None)
            found = link.failures.get((rank, seq))
        if found is None:
            if says not in (None, rank):
                return DisttensorError(
                    f"node {says} says that command {seq} of node {rank} failed; that one has not said so"
                )
            return DisttensorError(f"command {seq} of node {rank} failed, and why is not known")
        return self.exception(found)

    def exception(
        self, failure: Failure, others: Sequence[Failure] = (), timeout: float = EXIT_CAUSE_TIMEOUT
    ) -> Exception:
        """Makes the exception for a failure, with ``others`` as its notes. Where a node's loss is said to be the reason
        it waits, ``timeout`` seconds at most, until it is known whether that node is lost."""
        link, lost = self._link, failure.told.lost
        if lost < 0 or failure.of_a_group:
            told = failure.told.holdings
            held = "" if told is None else holdings.memory_note(told, failure.rank, failure.makers)
            error = failure.exception(others, held=held)
            if isinstance(error, NonFiniteError) and (where := self.coordinates(failure.rank)):
                error.add_note(f"  node {failure.rank} is {where}")
            return error
        node = link.nodes[lost]
        if node.connection.number == failure.incarnation:
            with suppress(DisttensorError, TimeoutError), link.unheard():
                self.sync(lost, timeout)  # a peer may see the end of its connection before this process does
        loss = node.incarnation(failure.incarnation).lost
        if loss is not None and loss is node.lost:
            link.told_losses.add(lost)
        return failure.exception(others, loss)

    def unobserved(self) -> list[Failure]:
        """Returns the failures that are news to the script, the earliest first: nothing has raised them yet, nor the
        loss of a node by which they came."""
        told = self._link.told_losses
        return [f for f in list(self._link.failures.values()) if not f.observed and f.told.lost not in told]

    def raise_pending_error(self, node: int | None = None) -> None:
        """Raises the earliest error of a node (None: of all nodes) that was not raised yet; later ones become its
        notes."""
        left = [f for f in self.unobserved() if node is None or f.rank == node]
        if left:
            error = self.exception(left[0], left[1:])
            for f in left:
                f.observed = True
            try:
                raise error
            finally:
                del error  # its frames would have it, and keep a user's tensors until the collector comes

    def ask_sync(self, rank: int) -> Request:
        """Asks a node to answer when it has done everything so far, transfers included; does not wait."""
        request = self._link.requests.new(rank)
        outbox = self._link.nodes[rank].outbox
        outbox.add(c.Sync(request.id))
        self._link.sender.flush(outbox, wait=False)  # the caller waits for the reply instead, with its own timeout
        return request

    def sync(self, rank: int, timeout: float | None) -> None:
        """Waits until a node has done everything so far. Raises NodeLost, TimeoutError after ``timeout`` seconds."""
        self._link.waiting.wait(self.ask_sync(rank), timeout)

    def sync_all(self) -> None:
        """Waits until all nodes have done everything so far, and raises nothing."""
        self._link.sender.flush_all()
        for node in self._link.there():
            with suppress(DisttensorError), self._link.unheard():
                self.sync(node.rank, None)
