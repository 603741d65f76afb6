"""What a root asks of a way of launching: agents on hosts, as branches of its tree.

    class SshEngine(Engine):           one file per way, named in registry.py; the root imports only its plan's
        begin()                        starts agents, or listens for those that join: adds branches
        Branch.say(order)              whatever carries it: ssh's stdin, a ZeroMQ message

An engine runs in the root's one thread. It watches its descriptors with ``root.loop`` and tells the root what happens:
``root.add(branch)``, ``root.heard(branch, news)`` for every frame of an agent's, ``root.lost(branch, ...)`` once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from ...host.launch_spec import Plan
from ..tree.control import Knock, News, Order, Start
from ..tree.loop import Loop


class Branch(ABC):
    """An agent, or the place of one that has not come yet: a host with slots, where nodes are dealt to."""

    def __init__(self, host: str, slots: int, wish: int = -1, expected: bool = True) -> None:
        """``expected``: it is of the plan, so its loss is the loss of nodes, even of such as were not asked for yet."""
        self.host = host  #: its name in messages to users
        self.slots = slots
        self.wish = wish  #: the rank of its first node, where something outside has dealt them; else -1
        self.expected = expected
        self.place = 0, 0  #: of its first node among those of its host, and how many these are; 0: the root counts
        # the root's:
        self.what = "its agent has not come yet"  #: what its nodes are waiting for
        self.knock: Knock | None = None
        self.waiting: list[Start] = []  #: until it has knocked
        self.gone: tuple[str, int, tuple[str, ...]] | None = None  #: cause, code, last lines

    @abstractmethod
    def say(self, order: Order) -> None:
        """To the agent, which has knocked. Never blocks, raises nothing."""

    def push(self) -> None:  # noqa: B027 - one without a wire of its own has nothing to send
        """Sends on of what was said as much as there is room for. The root calls it in each turn of its loop."""

    @abstractmethod
    def close(self) -> None:
        """Ends the connection and what was started here for it, at once. Twice is fine."""


class Boss(Protocol):
    """The root, as engines see it."""

    loop: Loop
    plan: Plan

    def tell(self, news: News) -> None:
        """To the master."""

    def add(self, branch: Branch) -> None:
        """From now on nodes are dealt to it; what it is told waits until it has knocked."""

    def heard(self, branch: Branch, news: News) -> None:
        """Every frame from its agent, of which a Knock is the first."""

    def remark(self, who: str, lines: Sequence[bytes]) -> None:
        """What a host, or what has started something there, has to say to the user."""

    def reconsider(self) -> None:
        """``waiting`` has something else to say."""

    def give_up(self, why: str, tail: Sequence[str] = ()) -> None:
        """There won't be any node, or no node any more: the root ends."""

    def doing(self, branch: Branch, what: str) -> None:
        """What its nodes are waiting for, for error messages: "ssh has not connected yet"."""

    def lost(self, branch: Branch, cause: str, code: int, tail: Sequence[str]) -> None:
        """It is gone, or will never come: its nodes have ended for this cause. Closes it. Twice is fine."""


class Engine(ABC):
    """Made by the root when it has its plan. Raises StartError when the plan cannot work (``begin`` too)."""

    def __init__(self, boss: Boss) -> None:
        self.boss = boss
        self.loop, self.plan = boss.loop, boss.plan

    @abstractmethod
    def begin(self) -> None:
        """Starts agents or lets them in; returns at once."""

    def waiting(self) -> str:
        """What nodes that no branch has taken are waiting for: "2 of 4 agents have come"."""
        return "no host has room for them"

    def awaits(self) -> bool:
        """Whether somebody is on the way who has to be told that it is over: a root that ends waits for those."""
        return False

    def end(self) -> None:  # noqa: B027 - most have nothing beyond their branches
        """All branches are closed, and the root ends: what the engine itself has open or started is given back."""
