"""Host starters, one per way of launching: they give the root agents on hosts, as branches of its tree.

    class SshStarter(HostStarter):      one file per way, named in registry.py; the root imports only its launch spec's
        begin()                        starts agents, or listens for those that join: adds branches
        Branch.send_order(order)              whatever carries it: ssh's stdin, a ZeroMQ message

A host starter runs in the root's one thread. It watches its descriptors with ``root.loop`` and tells the root of
events: ``root.add(branch)``, ``root.hear(branch, wire)`` when an agent may have sent something, ``root.lost(branch,
...)`` once. Agents are not trusted: the root checks what they say before anybody uses it (agent_check.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ...host.launch_spec import LaunchSpec
from ...process.own_time import Unheard
from ...process.renamed import old_names
from ..tree.control import AgentHello, AgentNews, News, Order, Start
from ..tree.framed import FramedStream
from ..tree.loop import EventLoop


class Branch(ABC):
    """An agent, or the place of one that has not come yet: a host with slots, to which nodes are dealt."""

    def __init__(self, host: str, slots: int, first_rank: int = -1, expected: bool = True) -> None:
        """``expected``: the launch spec names it, so its loss is the loss of nodes, even of ones not asked for yet."""
        self.host = host  #: its name in messages to users
        self.slots = slots
        self.first_rank = first_rank  #: the rank of its first node, where something outside has assigned ranks; else -1
        self.expected = expected
        #: the place of its first node among those of its host, and their number; 0: the root counts
        self.place = 0, 0
        # the root's fields:
        self.what = "its agent has not come yet"  #: the state that its nodes are waiting on, for messages
        self.agent_hello: AgentHello | None = None
        self.ready = False  #: its fork server has imported what nodes need
        self.waiting: list[Start] = []  #: orders until it has said hello
        self.gone: tuple[str, int, tuple[str, ...]] | None = None  #: cause, code, last lines
        self.unheard = Unheard()  #: how long nothing has come from its agent
        self.owed = 0  #: bytes of its nodes' output that it was not told have been taken
        self.beats = 0  #: beats that its agent has not answered yet
        self.heard_at = 0.0  #: when its agent sent the latest answer, by the agent's clock
        self.looks = Counter[int]()  #: by node: the looks that its agent was asked for, and has not answered

    @abstractmethod
    def send_order(self, order: Order) -> None:
        """Sends an order to the agent, which has said hello. Never blocks, raises nothing."""

    def push(self) -> None:  # noqa: B027 - one without a wire of its own has nothing to send
        """Sends as many queued bytes as there is room for. The root calls it in each turn of its loop."""

    def refusal(self, hello: AgentHello) -> str:
        """Returns the reason for which the agent that says this hello is not let in; empty if it is."""
        return ""

    def let_in(self) -> None:  # noqa: B027 - most have nothing to do
        """Notes that its agent was let in."""

    def last_lines(self) -> Sequence[str]:
        """Returns the last lines of the program that leads to the agent, for the error when the agent is lost."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Ends the connection and processes that were started here for it, at once. Closing twice is fine."""


class RootPort(Protocol):
    """The root, as host starters see it."""

    loop: EventLoop
    spec: LaunchSpec

    def send_news(self, news: News) -> None:
        """Sends news to the master."""

    def add(self, branch: Branch) -> None:
        """Adds a branch: from now on nodes are dealt to it; its orders wait until it has said hello."""

    def hear(self, branch: Branch, wire: FramedStream[AgentNews]) -> None:
        """Handles the frames that have arrived from a branch's agent, each as ``heard`` does."""

    def heard(self, branch: Branch, news: AgentNews) -> None:
        """Handles a frame from a branch's agent; the first one is an AgentHello.

        Raises nothing: whatever is wrong with it, this branch is lost, and no other.
        """

    def remark(self, who: str, lines: Sequence[bytes]) -> None:
        """Shows the user output of a host, or of a program that has started something there.

        While nothing can be shown, its lines are counted and left out.
        """

    def reconsider(self) -> None:
        """Reports the status again: ``waiting`` has another text."""

    def give_up(self, why: str, tail: Sequence[str] = ()) -> None:
        """Ends the root: there won't be any node, or no node any more."""

    def report_status(self, branch: Branch, what: str) -> None:
        """Notes the state that a branch's nodes are waiting on, for error messages: "ssh has not connected yet"."""

    def lost(self, branch: Branch, cause: str, code: int, tail: Sequence[str]) -> None:
        """Closes a branch that is gone, or will never come: its nodes have ended for this cause. Twice is fine."""


class HostStarter(ABC):
    """Starts agents in one way. Made by the root when it has its launch spec.

    Raises StartError when the launch spec cannot work (``begin`` too).
    """

    def __init__(self, root: RootPort) -> None:
        self.root = root
        self.loop, self.spec = root.loop, root.spec

    @abstractmethod
    def begin(self) -> None:
        """Starts agents or lets them in; returns at once."""

    def waiting(self) -> str:
        """Returns the state that nodes without a branch are waiting on: "2 of 4 agents have come"."""
        return "no host has room for them"

    def awaits(self) -> bool:
        """Returns whether agents are on the way that have to be told of the end: a root that ends waits for those."""
        return False

    def end(self) -> None:  # noqa: B027 - most have nothing beyond their branches
        """Releases what the host starter itself has open or started: all branches are closed, and the root ends."""


if not TYPE_CHECKING:  # to type checkers, any name would be there
    __getattr__ = old_names(__name__, {"Boss": "RootPort", "Engine": "HostStarter"})
