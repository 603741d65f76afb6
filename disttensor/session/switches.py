"""Torch's switches (determinism, precision, kernels) as the script sets them, told to nodes in the order of issue."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from ..runtime.master.link import Link
from ..runtime.master.node import Node
from ..runtime.master.route import route
from ..runtime.process import torch_switches
from ..runtime.protocol import commands as c


class Switches:
    """The switches that the nodes of a session have been told."""

    def __init__(self, link: Link, shared: bool) -> None:
        """``shared``: the nodes are threads of this process, so that its switches are theirs."""
        self._link, self._shared = link, shared
        self._told = dict(torch_switches.UNTOUCHED)
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
            return [c.Switch(tuple(changed.items()))] if changed and not self._shared else []
