"""Nodes on a Ray cluster that runs already: Ray finds the resources, and starts an agent there.

    master --> root: RayStarter --stdin, stdout--> ray_driver.py --Ray--> an actor per node, in a placement group
                       ^                                                   | the first of a host: a pipe, as life-line
                       +--- TunnelServer (CURVE) <--- as any that joins --- ray_agent.py --> fork server --> nodes

Each agent has a key pair of its own, which its actor has made, and only these are let in.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Any

import msgspec

from ...host.addresses import way_to
from ...host.interfaces import addresses_of
from ...host.launch_spec import LaunchSpec, spec_of_dtrun
from ...process.lifetime import describe_exit, die_with_parent
from ...protocol.errors import UNDECODABLE, StartError
from ...protocol.keys import curve_pair
from ..output.lines import TAIL_LINES, TAIL_WIDTH, plain
from ..rendezvous.credentials import Invitation
from ..tree.agent_check import NAME, REASON
from ..tree.control import Order
from ..tree.host_starter import Branch
from ..tree.stderr_tail import StderrTail
from .join import JoinStarter
from .ray_agent import RayAgentStart
from .root_launcher import RootLauncher

_DRIVER = os.path.join(os.path.dirname(__file__), "ray_driver.py")

#: The file where Ray itself notes which cluster runs on this host.
_CURRENT = "/tmp/ray/ray_current_cluster"

#: Seconds for Ray to release its resources.
_PATIENCE = 4.0

#: The strategies that an option of the launch spec names: see docs/RAY.md.
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


def cluster(spec: LaunchSpec) -> str:
    """Returns the address of the cluster that is meant, such as 10.0.0.1:6379. Raises StartError when there is none."""
    found = spec.options.get("address") or os.environ.get("RAY_ADDRESS", "auto")
    if found == "auto":
        found = ""
        with contextlib.suppress(OSError), open(_CURRENT) as file:
            if (owner := os.fstat(file.fileno()).st_uid) not in (0, os.geteuid()):
                raise StartError(
                    f"{_CURRENT} names a Ray cluster and belongs to user {owner}, and this process to {os.geteuid()}: "
                    "RAY_ADDRESS, or the launcher's option address, names the one that you mean"
                )
            found = file.read().strip()
    if not found:
        raise StartError(
            "no Ray cluster runs on this host (`ray start --head`); RAY_ADDRESS, or the launcher's option address, "
            "names one elsewhere"
        )
    return found


def listening(spec: LaunchSpec) -> tuple[str, ...]:
    """Returns the addresses of this host at which nodes on the cluster reach it. Raises StartError, ValueError."""
    if spec.interface:
        return addresses_of(spec.interface)
    address = cluster(spec)
    try:
        return (way_to(address.rpartition("//")[2].rpartition(":")[0].strip("[]")),)
    except OSError as e:
        raise StartError(f"there is no way to the Ray cluster at {address}: {e}") from e


def request(spec: LaunchSpec) -> dict[str, Any]:
    """Returns the driver's order. Raises ValueError for bad options, StartError without a cluster."""
    if not spec.most:
        raise ValueError("launcher='ray' has to know how many nodes: nodes=4, or dtrun -n 4")
    strategy = spec.options.get("strategy", "PACK").upper()
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is none of Ray's (known: {', '.join(_STRATEGIES)})")
    numbers: dict[str, float | None] = {"num_cpus": 1.0, "num_gpus": None}  # None: one if there are as many
    for name in numbers:
        with contextlib.suppress(KeyError):
            text = spec.options[name]
            try:
                numbers[name] = float(text)
            except ValueError:
                raise ValueError(f"{name}={text!r} is no number") from None
    return {"nodes": spec.most, "address": cluster(spec), "strategy": strategy, "python": spec.python, **numbers}


class RayLauncher(RootLauncher):
    """Has Ray place nodes, on the cluster that this script is connected to, if it is.

    Raises StartError without a cluster, ValueError for bad options.
    """

    unfit = "Ray can start no node"

    def __init__(self, spec: LaunchSpec) -> None:
        ray = sys.modules.get("ray")
        if "address" not in spec.options and spec_of_dtrun() is None and ray is not None and ray.is_initialized():
            address = str(ray.get_runtime_context().gcs_address)
            spec = msgspec.structs.replace(spec, options={**spec.options, "address": address})
        request(spec)
        super().__init__(spec)

    def ways(self) -> tuple[str, ...]:
        return listening(self.spec)

    def too_many(self, count: int) -> str:
        return f"Ray was asked for {self.capacity}"


class RayStarter(JoinStarter):
    """Has the driver place nodes, and lets in the agents that it starts."""

    _driver: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        self._doing = "Ray has not answered yet"
        self._hosts: list[_Host] = []
        asked, me = request(self.spec), os.getpid()
        try:
            self._driver = driver = subprocess.Popen(
                [sys.executable, "-P", _DRIVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(me),
            )
        except OSError as e:
            raise StartError(f"a process for Ray could not be started: {e}") from e
        self._send_to_driver(asked)
        streams = driver.stdout, driver.stderr
        out, err = (os.dup(stream.fileno()) for stream in streams if stream is not None)
        StderrTail(self.loop, out, self._hear)
        self._reasons = StderrTail(self.loop, err, lambda lines: None)
        self._pidfd = os.pidfd_open(driver.pid)
        self.loop.watch(self._pidfd, self._reap)

    def waiting(self) -> str:
        return self._doing

    def end(self) -> None:
        super().end()
        if self._driver is None:
            return
        self._send_to_driver(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._driver.wait(_PATIENCE)

    def _send_to_driver(self, order: object) -> None:
        """Sends the driver an order; None: that there is no more."""
        stdin = self._driver.stdin if self._driver is not None else None
        with contextlib.suppress(OSError):
            if stdin is not None and not stdin.closed:
                # a path that is not UTF-8 has a form in Python's JSON only, which the driver reads
                text = json.dumps(msgspec.to_builtins(order)).encode()
                stdin.close() if order is None else stdin.write(text + b"\n")
                stdin.closed or stdin.flush()

    def _hear(self, lines: list[bytes]) -> None:
        for line in lines:
            try:
                self._handle_news(msgspec.json.decode(line, type=_News))
            except (*UNDECODABLE, IndexError) as e:
                why = f"what came was not said by the process that talks with Ray: {e}"
                self.root.give_up(plain(why, REASON), self._reasons.lines)
                return

    def _handle_news(self, news: _News) -> None:
        if news.doing:
            self._doing = plain(news.doing, REASON)
            self.root.reconsider()
        elif news.error:
            self.root.give_up(plain(news.error, REASON))
        elif news.hosts:
            self._invite(news.hosts)
        else:
            self._note_agent_end(self._hosts[news.ended], news)

    def _invite(self, hosts: list[_Host]) -> None:
        self._doing = "its agent has not come yet"
        self._hosts = hosts
        keys = curve_pair()
        addresses = self.open(listening(self.spec), 0, keys, *(host.key for host in hosts))
        first, told = 0, []
        for host in hosts:
            host.first = first
            first += host.slots
            told.append(RayAgentStart(Invitation(addresses, keys[0], host.key, ""), host.slots, host.first))
        self._send_to_driver(told)
        self.root.reconsider()

    def _note_agent_end(self, host: _Host, news: _News) -> None:
        """Notes that an agent's process is over, which its connection does not always tell, and never why."""
        branch = next((agent for agent in self.agents if agent.first_rank == host.first), None) or _Absent(host)
        if isinstance(branch, _Absent):
            self.root.add(branch)
        tail = [plain(line, TAIL_WIDTH) for line in news.tail[-TAIL_LINES:]]
        self.root.lost(branch, f"its agent has ended ({describe_exit(news.code)})", news.code or 1, tail)

    def _reap(self) -> None:
        self.loop.unwatch(self._pidfd)
        os.close(self._pidfd)
        assert self._driver is not None
        how = describe_exit(self._driver.wait())
        self.root.give_up(f"the process that talks with Ray has ended ({how})", self._reasons.lines)


class _Host(msgspec.Struct):
    """One of Ray's hosts, as the driver describes it."""

    name: str
    slots: int
    key: str
    first: int = 0  #: the rank of its first node


class _News(msgspec.Struct):
    """One line of the driver's."""

    doing: str = ""
    error: str = ""
    hosts: list[_Host] = []
    ended: int = 0
    code: int = 0
    tail: list[str] = []


class _Absent(Branch):
    """A host whose agent has never come."""

    def __init__(self, host: _Host) -> None:
        super().__init__(plain(host.name, NAME), host.slots, host.first)

    def send_order(self, order: Order) -> None:
        pass

    def close(self) -> None:
        pass
