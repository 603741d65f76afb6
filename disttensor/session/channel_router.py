"""Which data channel carries what: a session's channels, and the rules by which one of them is chosen.

The master chooses, as it knows both ends and the size, and names the number of the channel in the commands for both: so
they can't disagree. Channel 0 is the session's own; another is opened, on all nodes, when it is needed first.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from ..runtime.channel import get_channel, name_for_nodes
from ..runtime.channel.base import MASTER, Capabilities, DataChannel
from ..runtime.channel.opened import Channels
from ..runtime.channel.registry import usable_channel, why_unusable
from ..runtime.collective import Way
from ..runtime.master.failures import Site
from ..runtime.master.link import Link
from ..runtime.master.requests import Request
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import DisttensorError, NodeLost
from ..runtime.protocol.keys import pair_key
from .places import Place

_log = logging.getLogger("disttensor")

#: From master to node, back, and between nodes.
COPIES = ("upload", "download", "send")
#: The collectives, as users call them.
COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all",
    "sendreceive", "barrier",
)  # fmt: skip
#: What "auto" takes for collectives of GPUs, where it can be used.
BEST = "nccl"
OPS = (*COPIES, *COLLECTIVES)


@dataclass(frozen=True)
class Rule:
    """What ``select`` has said. ``channel``: a number, None for whichever it would be. Bytes from ``least`` on, and
    below ``most`` if that is not None. ``way``: of collectives that name no algorithm."""

    op: str
    device: str | None
    least: int
    most: int | None
    channel: int | None
    name: str
    way: Way | None

    def fits(self, op: str, device: str, nbytes: int) -> bool:
        return (
            self.op in ("*", op)
            and self.device in (None, device)
            and self.least <= nbytes
            and (self.most is None or nbytes < self.most)
        )


class ChannelRouter:
    """Routes each copy and collective of a session to one of its data channels, and opens those that are asked for.

    ``threads``: nodes are threads of this process. ``failure`` gives the exception for what failed at a node's command.
    """

    def __init__(
        self,
        link: Link,
        channels: Channels,
        job: str,
        secret: bytes,
        name: str,
        *,
        trusted: bool,
        threads: bool,
        failure: Callable[[int, int], Exception],
    ) -> None:
        self.rules: tuple[Rule, ...] = ()  #: the latest first
        self.trusted = trusted  #: whether the user has said that of the network
        self.data: dict[int, DataChannel] = channels.data  #: by number
        self.automatic = False  #: "auto" has a choice for collectives
        self.numbers: dict[str, int] = {name: 0}
        self._link, self._channels, self._job, self._secret = link, channels, job, secret
        self._threads, self._failure = threads, failure
        self._attempts: dict[str, int] = {}
        self._addresses: dict[int, dict[int, str]] = {}  #: of a channel, of everybody who has it
        self._lock = threading.RLock()
        self._unusable: dict[str, str] = {}
        self._best: int | None = None  #: of the channel BEST, 0 if it can't be used

    # ---- choosing --------------------------------------------------------------------------------------------------

    def selected(self, op: str, device: str, nbytes: int) -> int | None:
        """The number of the channel that was selected for an ``op`` (of OPS) of so many bytes between devices of a
        type; None if none was."""
        for rule in self.rules:
            if rule.channel is not None and rule.fits(op, device, nbytes):
                return rule.channel
        return None

    def choose(self, op: str, device: str, nbytes: int) -> int:
        """The number of the channel for a copy."""
        return self.selected(op, device, nbytes) or 0

    def way(self, op: str, device: str, nbytes: int) -> Way | None:
        """The algorithm that was selected for a collective, if one was."""
        for rule in self.rules:
            if rule.way is not None and rule.fits(op, device, nbytes):
                return rule.way
        return None

    def best(self, places: Iterable[Place]) -> int:
        """What "auto" takes for a collective between these places: NCCL where each is a GPU of its own."""
        hellos, places = self._link.hellos, list(places)
        gpus = {_gpu(hellos[place.node], place) for place in places if place.kernels == "cuda"}
        if len(gpus) < max(2, len(places)):
            return 0
        if self._best is None:
            self._best = self._try(BEST)
        return self._best

    def _try(self, name: str) -> int:
        """Its number, or 0 if it can't be used."""
        if self.unusable(name):
            return 0
        try:
            return self.open(name, None)
        except (DisttensorError, ValueError, ImportError) as error:
            _log.warning("the data channel %r can't be used, and 'auto' does without: %s", name, error)
            return 0

    # ---- opening ---------------------------------------------------------------------------------------------------

    def open(self, name: str, site: Site | None) -> int:
        """The number of the channel ``name``, which all nodes have opened by now. Waits for them.

        Raises ValueError for an unknown name or a channel that these nodes must not use, ImportError without its
        library, DisttensorError (or what a node raised) where it doesn't work. Nothing has changed then.
        """
        with self._lock:
            number = self.numbers.get(name)
            if number is None:
                self.check(name)
                usable_channel(name, MASTER)
                number = self._attempts.setdefault(name, len(self._attempts) + 1)
                self._open(number, name, site)
                self.numbers[name] = number
            return number

    def begin(self) -> None:
        """After all hellos. Raises as ``check``, for the session's own channel."""
        name = next(iter(self.numbers))
        self.check(name)
        hellos = self._link.hellos.values()
        self.automatic = name == "auto" and any(len(hello.devices) > 1 and not hello.simulated for hello in hellos)

    def introduce(self, number: int, come: dict[int, str], master: str) -> None:
        """Tells everybody who has a channel where it is with those who have ``come``, and them where it is with all."""
        job, known = self._job, self._addresses.setdefault(number, {MASTER: master})
        outboxes = self._link.outboxes
        for rank, address in come.items():
            self._channels.connect(number, rank, address, pair_key(self._secret, job, MASTER, rank))
        known.update(come)
        there = {rank: address for rank, address in known.items() if rank == MASTER or outboxes[rank].lost is None}
        for one in there:
            for other, address in there.items():
                if one not in (other, MASTER) and (one in come or other in come):
                    outboxes[one].add(c.Peer(other, address, pair_key(self._secret, job, one, other), number))

    def welcome(self, come: dict[int, str]) -> None:
        """Nodes that have come later, with their addresses in the session's own channel, get all that there is.

        Raises ValueError for a channel that must not be used with them, and what opening one raises there.
        """
        with self._lock:
            self._unusable.clear()  # they may lack something
            names = {number: name for name, number in self.numbers.items()}
            for name in names.values():
                self.check(name)
            self.introduce(0, come, "")
            for number in [n for n in names if n]:
                self._open(number, names[number], None, come)

    def check(self, name: str) -> None:
        """Raises ValueError for a channel that must not be used between the nodes that there are."""
        why = self.forbidden(get_channel(name).capabilities)
        if why:
            raise ValueError(f"the data channel {name!r} must not be used here: {why}")

    def forbidden(self, capabilities: Capabilities) -> str:
        """Why such a channel must not be used between the nodes that there are; empty if it may."""
        hellos = self._link.hellos.values()
        hosts = sorted({socket.gethostname(), *(hello.host for hello in hellos)})
        if capabilities.same_process and not self._threads:
            return "it is for nodes that are threads of one process (launcher='inproc')"
        if len(hosts) == 1:
            return ""
        there = f"{', '.join(hosts[:4])}{' and others' if len(hosts) > 4 else ''}"
        if capabilities.same_host:
            return f"it is for processes of one host, and these are on {there}; 'auto' uses it within each"
        if not capabilities.authenticated and not self.trusted:
            return (
                f"it authenticates nobody, and the nodes are on {there}. If nobody else can use the network between "
                "them, say so: init_master_worker(trusted_network=True), or dtrun --trusted-network"
            )
        return ""

    def _open(self, number: int, name: str, site: Site | None, ranks: Collection[int] | None = None) -> None:
        """On these nodes, or on all."""
        replies = self._ask(lambda request: c.Open(request, number, name_for_nodes(name)), site, ranks)
        mine = self._channels.open(number, name)
        self.introduce(number, {rank: str(reply.value) for rank, reply in replies.items()}, mine)
        # One that is busy before it has heard of its peers would refuse their calls, after some seconds for good.
        self._ask(lambda request: c.Usable(request, ()), site)

    def _ask(
        self, command: Callable[[int], c.Command], site: Site | None, ranks: Collection[int] | None = None
    ) -> dict[int, c.Answer]:
        """Asks these nodes, or all that there are; gives what they answer. Raises what the first has failed with."""
        link = self._link
        asked: dict[int, Request] = {}
        for outbox in link.outboxes:
            if outbox.lost is None and (ranks is None or outbox.rank in ranks):
                request = asked[outbox.rank] = link.request(outbox.rank, c.Answer)
                outbox.add(command(request.id), site)
        link.flush_all()
        replies: dict[int, c.Answer] = {}
        errors: list[Exception] = []
        for rank, request in asked.items():
            try:
                reply = link.wait(request)
            except NodeLost:  # whoever uses it hears of it
                continue
            if isinstance(reply, c.Poisoned):
                errors.append(self._failure(reply.rank, reply.seq))
            elif isinstance(reply, c.Answer):
                replies[rank] = reply
        if errors:
            raise errors[0]
        return replies

    def unusable(self, name: str) -> str:
        """Why a channel can't be used here, or an empty text. Asks the nodes."""
        known = self._unusable.get(name)
        if known is None:
            self.look([name])
            known = self._unusable[name]
        return known

    def look(self, names: list[str]) -> None:
        """Finds out ``unusable`` of many at once: one round trip, which waits for the nodes."""
        wanted = [name for name in names if name not in self._unusable]
        texts: dict[str, str] = {}
        for name in wanted:
            try:
                texts[name] = name_for_nodes(name)
            except ValueError as error:
                self._unusable[name] = str(error)
        if not texts:
            return
        replies = self._ask(lambda request: c.Usable(request, tuple(texts.values())), None)
        said = {rank: dict(zip(texts, str(reply.value).split("\n"), strict=False)) for rank, reply in replies.items()}
        for name in texts:
            why = why_unusable(name, MASTER)
            if not why:
                why = next((f"node {rank}: {whys[name]}" for rank, whys in said.items() if whys.get(name)), "")
            if not why:
                why = self.forbidden(get_channel(name).capabilities)
            self._unusable[name] = why

    # ---- the end ---------------------------------------------------------------------------------------------------

    def forget(self, rank: int, why: str) -> None:
        """A node is lost."""
        self._channels.forget(rank, why)

    def forked(self) -> None:
        """In a forked child: a thread that isn't here may have held the lock."""
        self._lock = threading.RLock()

    def close(self) -> None:
        """Closes all channels."""
        self._channels.close()


def _gpu(hello: c.Hello, place: Place) -> tuple[str, str]:
    """Which one it is. Each node has a cuda:0, and they may be one."""
    return hello.host, hello.gpus[place.index] if place.index < len(hello.gpus) else place.name
