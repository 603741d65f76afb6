"""Switches as the script sets them, told to nodes in the order of issue: torch's (determinism, precision, kernels), and
whether nodes look at what they compute."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from ..runtime.master.link import Link
from ..runtime.master.node import Node
from ..runtime.master.route import route
from ..runtime.process import torch_switches
from ..runtime.protocol import commands as c
from ..runtime.protocol.finite import CHECK_FINITE, INF, NAN


class Switches:
    """The switches that the nodes of a session have been told."""

    def __init__(self, link: Link, shared: bool) -> None:
        """``shared``: the nodes are threads of this process, so that its switches are theirs."""
        self._link, self._shared = link, shared
        self._told = dict(torch_switches.UNTOUCHED)
        self._checks: list[bool] = []  #: those of finite numbers that are on: whether infinities count
        self._check = ""  #: what nodes have been told of them
        self._called: dict[str, torch_switches.Setting] = {}  #: what was set by the older interface for float32
        self.lock = threading.RLock()  #: held while nodes are told

    def follow(self, called: Mapping[str, torch_switches.Setting] | None = None) -> None:
        """Tells all nodes what has changed since they were told last. Called in the setters of torch (torch_patches).
        ``called``: as of ``torch_switches.changed``.

        The commands of all nodes that were issued before are computed under the old values, those that come next under
        the new ones. A recording has the change at its place as well: its replays do the same.
        """
        if self._shared:
            return
        with self.lock:
            now = torch_switches.present()
            changed = torch_switches.changed(self._told, now, called)
            self._told = now
            if not changed:
                return
            for name, value in (called or {}).items():
                self._called.pop(name, None)
                self._called[name] = value  # the last one is the last one set
            command = c.Switch(tuple(changed.items()))
            for node in self._link.there():
                node.outbox.put(command)
        recorder = route.get().recorder
        if recorder is not None:
            recorder.switch(command)

    def check_finite(self, infinities: bool, on: bool) -> None:
        """Begins or ends a check of whether what nodes compute is finite; ``infinities``: whether these count, beside
        NaN. What is issued until then is not looked at, and what comes next is; a graph as it is replayed."""
        with self.lock:
            if on:
                self._checks.append(infinities)
            else:
                self._checks.remove(infinities)
            check = INF if True in self._checks else NAN if self._checks else ""
            if check != self._check and not self._link.closed:
                self._check = check
                for node in self._link.there():
                    node.outbox.put(c.Switch(((CHECK_FINITE, check),)))

    def send_to_joined(self, nodes: Iterable[Node]) -> None:
        """Tells nodes that have joined the switches that the others have been told."""
        with self.lock:
            for node in nodes:
                for command in self.state():
                    node.outbox.put(command)

    def state(self) -> list[c.Command]:
        """Returns what tells a new process the switches that the nodes have been told."""
        with self.lock:
            changed = torch_switches.changed(torch_switches.UNTOUCHED, self._told, self._called)
            settings = () if self._shared else tuple(changed.items())
            settings += ((CHECK_FINITE, self._check),) if self._check else ()
            return [c.Switch(settings)] if settings else []
