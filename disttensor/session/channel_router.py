"""Routes copies and collectives over a session's data channels, by rules that choose one of them.

The master chooses, because it knows both ends and the size, and names the number of the channel in the commands for
both: so they can't disagree. Channel 0 is the session's own; another one is opened, on all nodes, when it is first
needed.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

from ..runtime.channel import get_channel, name_for_nodes
from ..runtime.channel.base import MASTER, Capabilities, DataChannel, Protection
from ..runtime.channel.cipher import no_cipher
from ..runtime.channel.opened import Channels
from ..runtime.channel.registry import usable_channel, why_unusable
from ..runtime.collective import Way
from ..runtime.collective.pairs import pairs
from ..runtime.host.interfaces import is_loopback
from ..runtime.master.failures import Site
from ..runtime.master.link import Link
from ..runtime.master.node import Node
from ..runtime.master.requests import Request
from ..runtime.process.signals import uninterrupted
from ..runtime.protocol import commands as c
from ..runtime.protocol.arguments import Addresses
from ..runtime.protocol.collective_kinds import ALGORITHMS
from ..runtime.protocol.errors import DisttensorError, NodeLost
from ..runtime.protocol.keys import pair_key
from .places import NodePlace, Place, R

_log = logging.getLogger("disttensor")

#: The most groups of which the router keeps in mind that their pairs know each other.
_GROUPS = 4096

#: The copies: from master to node, back, and between nodes.
COPIES = ("upload", "download", "send")
#: The collectives, as users call them.
COLLECTIVES = tuple(ALGORITHMS)
#: The channel that "auto" takes for collectives of GPUs, where it can be used.
BEST = "nccl"
#: The end of errors about a network.
_TRUST = (
    "If nobody else can use the network between them, say so: init_master_worker(trusted_network=True), or dtrun "
    "--trusted-network"
)
OPS = (*COPIES, *COLLECTIVES)
#: Whether the processes that take part in an operation are on one host, or on several.
SPANS = ("host", "hosts")


@dataclass(frozen=True)
class Rule:
    """A rule that ``select`` has made: for which operations, devices and sizes it is, and what it selects for them.

    ``device``: "cpu", "cuda", or None for both. ``least`` and ``most`` are bytes: from ``least`` on, and below ``most``
    if that is not None. ``channel``: a number, None to leave the channel as it is; ``name`` is its name. ``way``: the
    algorithm of collectives whose call names none. ``span``: of SPANS, or None for both. ``async_op``: of which
    collectives, None for both and for copies.
    """

    op: str
    device: str | None
    least: int
    most: int | None
    channel: int | None
    name: str
    way: Way | None
    span: str | None = None
    async_op: bool | None = None

    def fits(self, op: str, device: str, nbytes: int, span: Callable[[], str], async_op: bool | None) -> bool:
        """Returns whether the rule is about an operation of so many bytes on devices of this type, between processes of
        one host or of several; a copy is neither asynchronous nor not (None)."""
        return (
            self.op in ("*", op)
            and self.device in (None, device)
            and self.least <= nbytes
            and (self.most is None or nbytes < self.most)
            and self.async_op in (None, async_op)
            and (self.span is None or self.span == span())
        )


class ChannelRouter:
    """Routes each copy and collective of a session to one of its data channels, and opens channels on request.

    ``name`` is that of channel 0. ``protection`` is that of tensors on their way. ``threads``: nodes are threads of
    this process. ``failure(rank, seq)`` returns the exception for a failed command of a node.
    """

    def __init__(
        self,
        link: Link,
        channels: Channels,
        job: str,
        secret: bytes,
        name: str,
        *,
        protection: Protection,
        threads: bool,
        failure: Callable[[int, int], Exception],
    ) -> None:
        self.rules: tuple[Rule, ...] = ()  #: the latest first
        self.protection = protection
        self.data: dict[int, DataChannel] = channels.data  #: by number
        self.automatic = False  #: whether "auto" has a choice for collectives
        self.numbers: dict[str, int] = {name: 0}
        self._link, self._channels, self._job, self._secret = link, channels, job, secret
        self._threads, self._failure = threads, failure
        self._attempts: dict[str, int] = {}
        self._own: dict[int, Addresses] = {}  #: the master's addresses, by the channel's number
        #: pairs that have been told of each other: the channel's number, the lower rank, the higher one
        self._introduced: set[tuple[int, int, int]] = set()
        self._former: set[tuple[int, int, int]] = set()  #: pairs that were, of nodes in whose places others have come
        self._groups: set[tuple[object, ...]] = set()  #: the groups of collectives whose pairs have been
        self._lock = threading.RLock()
        self._unusable: dict[str, str] = {}
        self._best: int | None = None  #: the number of the channel BEST, 0 if it can't be used

    # ---- choosing --------------------------------------------------------------------------------------------------

    def selected(
        self, op: str, device: str, nbytes: int, ranks: Sequence[int], async_op: bool | None = None
    ) -> int | None:
        """Returns the number of the channel that was selected for an ``op`` (of OPS) of so many bytes between devices
        of a type, which are these processes'; None if none was."""
        for rule in self.rules:
            if rule.channel is not None and rule.fits(op, device, nbytes, partial(self._span, ranks), async_op):
                return rule.channel
        return None

    def choose(self, op: str, device: str, nbytes: int, ranks: Sequence[int]) -> int:
        """Returns the number of the channel for a copy."""
        return self.selected(op, device, nbytes, ranks) or 0

    def way(self, op: str, device: str, nbytes: int, ranks: Sequence[int], async_op: bool) -> Way | None:
        """Returns the algorithm that was selected for a collective; None if none was."""
        for rule in self.rules:
            if rule.way is not None and rule.fits(op, device, nbytes, partial(self._span, ranks), async_op):
                return rule.way
        return None

    def _span(self, ranks: Sequence[int]) -> str:
        """Returns whether processes are on one host or on several, by the names of these."""
        names = {socket.gethostname() if rank < 0 else self._link.nodes[rank].hello.host for rank in ranks}
        return SPANS[len(names) > 1]

    def best(self, places: Iterable[Place], groups: Sequence[Sequence[int]]) -> int:
        """Returns the number of the channel that "auto" takes for a collective of these groups of nodes, with tensors
        in these places: NCCL's where each has, in its group, a GPU of its own, else 0. The first time it waits until
        all nodes have opened it."""
        members = {member for place in places for member in place.members}
        number = {node: i for i, group in enumerate(groups) for node in group}
        gpus = {(number[member.node], *_gpu(member)) for member in members if member.kernels == "cuda"}
        if len(gpus) < max(2 * len(groups), len(members)):
            return 0
        if self._best is None:
            self._best = self._try(BEST)
        return self._best

    def _try(self, name: str) -> int:
        """Opens a channel and returns its number, or 0 if it can't be used."""
        if self.unusable(name):
            return 0
        try:
            return self.open(name, None)
        except (DisttensorError, ValueError, ImportError) as error:
            _log.warning("the data channel %r can't be used, and 'auto' does without: %s", name, error)
            return 0

    # ---- opening ---------------------------------------------------------------------------------------------------

    def open(self, name: str, site: Site | None) -> int:
        """Returns the number of the channel ``name`` once all nodes have opened it. Waits for them.

        Raises ValueError for an unknown name or a channel that these nodes must not use, ImportError without its
        library, DisttensorError (or the error that a node raised) where it doesn't work. Nothing has changed then.
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
        """Checks the session's own channel, and whether "auto" has a choice for collectives. Called after all hellos.

        Raises as ``check``.
        """
        name = next(iter(self.numbers))
        self.check(name)
        self.automatic = name == "auto" and any(
            len(node.devices) > 1 and not node.hello.simulated for node in self._link.nodes
        )

    def take_addresses(self, number: int, come: Mapping[int, Addresses], master: Addresses) -> None:
        """Notes the addresses of nodes (by rank) and of the master in channel ``number``. Nobody is told of them yet:
        see ``introduce``."""
        self._own.setdefault(number, master)
        for rank, addresses in come.items():
            self._link.nodes[rank].connection.addresses[number] = addresses

    # ---- introductions -----------------------------------------------------------------------------------------------

    def introduce(self, channel: int, a: int, b: int) -> bool:
        """Has two peers know each other in a channel, unless they do. To be called before commands are queued by which
        they exchange messages.

        Each is told the other's addresses and their key by a command, in its turn: so this costs two commands at a
        pair's first use, and nothing is waited for. One that is called by a peer of which it has not heard lets it
        wait. Returns whether they can be: False where a node was lost before it had the channel, as its users learn.
        """
        pair = (channel, a, b) if a < b else (channel, b, a)
        return pair in self._introduced or self._introduce(*pair)

    def introduce_all(self, channel: int, ranks: Sequence[int]) -> None:
        """Has all pairs of these peers know each other in a channel."""
        if (group := (channel, ranks)) not in self._groups:
            self._note_group(group, [self.introduce(channel, a, b) for a, b in combinations(ranks, 2)])

    def introduce_groups(
        self,
        channel: int,
        kind: str,
        way: Way,
        root: int,
        groups: tuple[tuple[int, ...], ...],
        hosts: tuple[int, ...],
        carries_less: bool,
    ) -> None:
        """Has those ranks of each group know each other that exchange messages in a collective.

        ``kind`` to ``hosts`` are those of its command. ``carries_less``: tensors travel in another dtype.
        """
        group = (channel, kind, way.algorithm, way.base, root, groups, hosts, carries_less)
        if group in self._groups:
            return
        pages = not carries_less and not hosts and self.data[channel].capabilities.shared_memory
        known = [
            self.introduce(channel, ranks[a], ranks[b])
            for ranks in groups
            for a, b in pairs(kind, way.algorithm, way.base, len(ranks), root, hosts, pages)
        ]
        self._note_group(group, known)

    def _note_group(self, group: tuple[object, ...], known: list[bool]) -> None:
        if len(self._groups) >= _GROUPS:
            self._groups.clear()
        if all(known):
            self._groups.add(group)

    @uninterrupted
    def _introduce(self, channel: int, a: int, b: int) -> bool:
        # Under the link's lock a loss comes before both, or after both: ``Losses.lose`` tells those that know the node.
        with self._link.lock:
            key = self._key(a, b)
            known = [self._announce_peer(channel, a, b, key), self._announce_peer(channel, b, a, key)]
            if all(known):
                self._introduced.add((channel, a, b))
            return all(known)

    def _announce_peer(self, channel: int, one: int, other: int, key: bytes) -> bool:
        """Tells one peer of another one; of a lost one, also that it is. Returns whether that one has addresses."""
        nodes = self._link.nodes
        addresses = self._own[channel] if other == MASTER else nodes[other].connection.addresses.get(channel)
        if addresses is None:
            return False
        if one == MASTER:
            self._channels.connect(channel, other, addresses, key)
        elif nodes[one].lost is None:
            outbox = nodes[one].outbox
            outbox.put(c.Peer(other, addresses, key, channel))
            if other != MASTER:
                nodes[other].connection.knowing.add(one)
                if (lost := nodes[other].lost) is not None:
                    outbox.put(c.Lost(other, lost.cause))
        return True

    # ---- more nodes --------------------------------------------------------------------------------------------------

    def add_peers(self, come: Mapping[int, Addresses]) -> None:
        """Takes in nodes that have joined, and opens on them all channels of the session. Waits for them. A
        worker in a lost node's place is introduced to the nodes that knew the one before.

        ``come``: their addresses in the session's own channel, by rank. Raises ValueError for a channel that must not
        be used with them, and the error that opening a channel raises there.
        """
        with self._lock:
            self._unusable.clear()  # the new nodes may lack something
            names = {number: name for name, number in self.numbers.items()}
            for name in names.values():
                self.check(name)
            self.take_addresses(0, come, self._own[0])
            for number in [n for n in names if n]:
                self._open(number, names[number], None, come)
            again = {pair for pair in self._former if come.keys() & pair[1:]}
            self._former -= again
            for pair in again:  # a graph that was recorded before has commands for these two
                self.introduce(*pair)

    def _key(self, a: int, b: int) -> bytes:
        """Returns the key of two peers, which is another one for each worker in a node's place."""
        nodes = self._link.nodes
        first, second = (0 if rank == MASTER else nodes[rank].connection.number for rank in (a, b))
        return pair_key(self._secret, self._job, a, b, (first, second))

    def forgive(self, node: Node) -> None:
        """Forgets a node's loss, as another worker is in its place. ``add_peers`` introduces it to those that knew the
        one before."""
        self._channels.forgive(node.rank, node.connection.number)
        with self._link.lock:
            former = {pair for pair in self._introduced if node.rank in pair[1:]}
            self._introduced -= former
            self._former |= former
            self._groups.clear()

    def check(self, name: str) -> None:
        """Raises ValueError for a channel that must not be used between the session's nodes."""
        why = self.forbidden(get_channel(name).capabilities)
        if why:
            raise ValueError(f"the data channel {name!r} must not be used here: {why}")

    def forbidden(self, capabilities: Capabilities) -> str:
        """Returns the reason why such a channel must not be used between the session's nodes; empty if it may."""
        if capabilities.same_process and not self._threads:
            return "it is for nodes that are threads of one process (launcher='inproc')"
        if why := self.protection.missing(capabilities):
            return why
        hosts = self._hosts()
        there = f"{', '.join(hosts[:4])}{' and others' if len(hosts) > 4 else ''}"
        apart = len(hosts) > 1
        if apart and capabilities.same_host:
            return f"it is for processes of one host, and these are on {there}; 'auto' uses it within each"
        if apart and not capabilities.authenticated and not self.protection.trusted:
            return f"it authenticates nobody, and the nodes are on {there}. {_TRUST}"
        if capabilities.same_process:  # nothing leaves the process
            return ""
        if self.protection.forbids(apart):
            return (
                f"what it carries between {there} would be in clear, as encrypt=False was asked for. Leave that out, "
                f"or say encrypt=True. {_TRUST}"
            )
        if self.protection.encrypts(apart):
            return self._unencrypted(capabilities, f"between {there} " if apart else "")
        return ""

    def _unencrypted(self, capabilities: Capabilities, where: str) -> str:
        """Returns the reason why what such a channel carries can't be encrypted; empty if it can."""
        if not capabilities.encrypted:
            return f"what it carries {where}would be in clear, and it cannot encrypt. Take 'auto' or 'tcp'. {_TRUST}"
        lacking = [("this process", no_cipher())]
        lacking += [(f"node {node.rank} ({hello.host})", hello.no_cipher) for node, hello in self._hellos()]
        for who, why in lacking:
            if why:
                why = why.replace(" there", " here") if who == "this process" else why
                return (
                    f"what it carries {where}has to be encrypted, and {who} cannot: {why}. Have it installed "
                    f"everywhere (with encrypt=True connections within a host are encrypted, too). {_TRUST}"
                )
        return ""

    def _hellos(self) -> list[tuple[Node, c.Hello]]:
        """Returns the nodes that have said hello, with what they have said."""
        return [(node, node.said_hello) for node in self._link.nodes if node.said_hello is not None]

    def _hosts(self) -> list[str]:
        """Returns the hosts of all processes, a text for each: its name, with its addresses if names come twice.

        Hosts are different if their names are, or if their data channels have no address in common: two may have one
        name, as machines that were cloned.
        """
        found: dict[str, list[frozenset[str]]] = {}
        mine = socket.gethostname(), Addresses(self.data[0].address())
        for name, addresses in [mine, *((hello.host, hello.addresses) for _, hello in self._hellos())]:
            ips, known = _ips(addresses.transfers), found.setdefault(name, [])
            if not any(ips == one or ips & one for one in known):
                known.append(ips)
        return sorted(
            name if len(known) == 1 else f"{name} ({' '.join(sorted(ips))})"
            for name, known in found.items()
            for ips in known
        )

    def _open(self, number: int, name: str, site: Site | None, ranks: Collection[int] | None = None) -> None:
        """Opens a channel on these nodes (None: on all) and on the master, and notes their addresses."""
        replies = self._ask(c.Opened, lambda request: c.Open(request, number, name_for_nodes(name)), site, ranks)
        mine = self._channels.open(number, name)
        self.take_addresses(number, {rank: reply.addresses for rank, reply in replies.items()}, mine)

    def _ask(
        self,
        kind: type[R],
        command: Callable[[int], c.Command],
        site: Site | None,
        ranks: Collection[int] | None = None,
        due: int = 0,
    ) -> dict[int, R]:
        """Asks these nodes (None: all) and returns their replies by rank, which have ``due`` reasons if they are
        Unusable. Raises the error of the first node that failed."""
        link = self._link
        asked: dict[int, Request] = {}
        for node in link.there():
            if ranks is None or node.rank in ranks:
                request = asked[node.rank] = link.requests.new(node.rank, kind, due)
                node.outbox.add(command(request.id), site)
        link.sender.flush_all()
        replies: dict[int, R] = {}
        errors: list[Exception] = []
        for rank, request in asked.items():
            try:
                with link.unheard():
                    reply = link.waiting.wait(request)
            except NodeLost:  # raised to the next user of that node
                continue
            if isinstance(reply, c.Poisoned):
                errors.append(self._failure(reply.rank, reply.seq))
            elif isinstance(reply, kind):
                replies[rank] = reply
        if errors:
            raise errors[0]
        return replies

    def unusable(self, name: str) -> str:
        """Returns the reason why a channel can't be used here; empty if it can. Asks the nodes, once for each name."""
        known = self._unusable.get(name)
        if known is None:
            self.look([name])
            known = self._unusable[name]
        return known

    def look(self, names: list[str]) -> None:
        """Finds out ``unusable`` for several channels at once: one round trip, which waits for the nodes."""
        wanted = [name for name in names if name not in self._unusable]
        texts: dict[str, str] = {}
        for name in wanted:
            try:
                texts[name] = name_for_nodes(name)
            except ValueError as error:
                self._unusable[name] = str(error)
        if not texts:
            return
        asked = tuple(texts.values())
        replies = self._ask(c.Unusable, lambda request: c.Usable(request, asked), None, due=len(asked))
        said = {rank: dict(zip(texts, reply.reasons, strict=True)) for rank, reply in replies.items()}
        for name in texts:
            why = why_unusable(name, MASTER)
            if not why:
                why = next((f"node {rank}: {whys[name]}" for rank, whys in said.items() if whys.get(name)), "")
            if not why:
                why = self.forbidden(get_channel(name).capabilities)
            self._unusable[name] = why

    # ---- the end ---------------------------------------------------------------------------------------------------

    def mark_lost(self, rank: int, why: str) -> None:
        """Tells all channels that a node is lost."""
        self._channels.mark_lost(rank, why)

    def forked(self) -> None:
        """Replaces the lock, in a forked child: a thread of the parent may have held it."""
        self._lock = threading.RLock()

    def close(self) -> None:
        """Closes all channels."""
        self._channels.close()


def _ips(address: str) -> frozenset[str]:
    """Returns the IP addresses of a data channel's address. All of loopback is one; what is no host:port has none."""
    hosts = [one.rpartition(":")[0].strip("[]") for one in address.split(",")]
    try:
        return frozenset("loopback" if is_loopback(host) else host for host in hosts)
    except ValueError:
        return frozenset()


def _gpu(place: NodePlace) -> tuple[str, str]:
    """Returns a GPU's identity: its host, and its name there. Each node has a cuda:0, and these may be one GPU."""
    hello = place.hello
    return hello.host, hello.gpus[place.index] if place.index < len(hello.gpus) else place.name
