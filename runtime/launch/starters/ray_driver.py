"""The process beside the root that talks with Ray: has it place nodes, and starts an agent on each of its hosts.

    root  -- {"nodes": 4, "num_cpus": 1, ...} -----> ray.init, a placement group, an actor per node
          <- {"doing": "..."} ----------------------
          <- {"hosts": [{"key", "slots"}, ...]} ----    an actor of each host has made the key pair of its agent
          -- [{"invitation", ...}, ...] -----------> these actors start agents, whose life-line is a pipe of theirs
          <- {"ended": 0, "code", "tail"} ----------    the agent of the first host has ended, or that host
          <- {"error": "..."} ----------------------    no node can be started

JSON, a line each, over stdin and stdout. The end of stdin is the end: Ray ends the actors of a driver that is gone.

A process of its own, run by its path: Ray takes its time, sets handlers, prints, and unpickles what actors return, all
of which the root must not. Nothing of disttensor is imported. Ray's own connections carry public keys only.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

#: The number of last lines of an agent that ends, for the error.
_TAIL = 20
#: Seconds after which a wait for Ray is reported.
_PATIENCE = 1.0
#: Seconds for Ray's port to answer.
_REACH = 10.0
#: Seconds for Ray to release its resources.
_LEAVE = 3.0


class NodeActor:
    """The actor that holds Ray's resources for one node. The first one on a host runs that host's agent."""

    def __init__(self) -> None:
        self._secret = ""

    def where(self) -> dict[str, Any]:
        """Returns the host where Ray has put it, the GPUs that are for it, and the public half of a new key pair."""
        import ray
        import zmq

        public, secret = zmq.curve_keypair()
        self._secret = secret.decode()
        return {
            "place": ray.get_runtime_context().get_node_id(),
            "name": socket.gethostname(),
            "gpus": [str(gpu) for gpu in ray.get_gpu_ids()],
            "key": public.decode(),
        }

    def serve(self, told: dict[str, Any], python: str, gpus: list[str]) -> tuple[int, list[str]]:
        """Runs the agent; returns its exit code and last lines.

        ``gpus``: those of all actors of the host; without any, the agent sees what Ray has set for this actor.
        """
        agent = subprocess.Popen(
            [python or sys.executable, "-P", "-m", "dtrun", "ray-agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})},
        )
        told["invitation"]["secret_key"] = self._secret
        with agent:
            if agent.stdin is not None and agent.stdout is not None:
                print(json.dumps(told), file=agent.stdin, flush=True)
                tail = list(deque((line.rstrip("\n") for line in agent.stdout), _TAIL))
        return agent.returncode, tail


class Driver:
    """Talks with Ray, in this process's main thread."""

    def __init__(self, spec: dict[str, Any], tell: Callable[..., None]) -> None:
        self._plan = spec
        self._tell = tell
        self._actors: list[Any] = []
        self._hosts: list[dict[str, Any]] = []  #: hosts with the actor that has the agent, and all GPUs

    def place(self) -> None:
        """Has Ray place the nodes, and reports where they are. Raises Ray's errors."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        spec = self._plan
        self._tell(doing=f"Ray at {spec['address']!r} has not answered yet")
        _reach(spec["address"])
        ray.init(address=spec["address"], log_to_driver=False, logging_level="ERROR", configure_logging=False)
        each = self._each(ray.cluster_resources())
        bundles = [{name: number for name, number in each.items() if number}] * spec["nodes"]
        group = placement_group(bundles, strategy=spec["strategy"], name="disttensor")
        while not group.wait(_PATIENCE):
            room = {name: n for name, n in ray.available_resources().items() if name in each}
            wanted = f"{len(bundles)} x {bundles[0]} ({spec['strategy']})"
            self._tell(doing=f"Ray has no room for {wanted} yet; now there is {room}")
        actors = []
        for index, bundle in enumerate(bundles):
            where = PlacementGroupSchedulingStrategy(group, index)
            kind = ray.remote(num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0))(NodeActor)
            actors.append(kind.options(scheduling_strategy=where).remote())
        self._tell(doing="Ray has not started its actors yet")
        self._meet(actors, ray.get([actor.where.remote() for actor in actors]))

    def _each(self, whole: dict[str, float]) -> dict[str, float]:
        """Returns the resources that one node needs."""
        gpus = self._plan["num_gpus"]
        if gpus is None:  # a GPU for each node where there are enough
            gpus = 1 if whole.get("GPU", 0) >= self._plan["nodes"] else 0
        return {"CPU": self._plan["num_cpus"], "GPU": gpus}

    def _meet(self, actors: list[Any], cards: list[dict[str, Any]]) -> None:
        hosts: dict[str, dict[str, Any]] = {}
        for actor, card in zip(actors, cards, strict=True):
            host = hosts.setdefault(card["place"], {**card, "gpus": [], "slots": 0, "actor": actor})
            host["slots"] += 1
            host["gpus"] += [gpu for gpu in card["gpus"] if gpu not in host["gpus"]]  # two may have half of one each
        self._actors = actors  # Ray ends an actor that nobody can call any more
        self._hosts = list(hosts.values())
        self._tell(hosts=[{name: host[name] for name in ("name", "slots", "key")} for host in self._hosts])

    def run_agents(self, told: list[dict[str, Any]]) -> None:
        """Starts the agents and reports how they end. Returns when all have."""
        import ray

        waiting: dict[Any, int] = {}
        for number, (host, it) in enumerate(zip(self._hosts, told, strict=True)):
            waiting[host["actor"].serve.remote(it, self._plan["python"], host["gpus"])] = number
        while waiting:
            for ref in ray.wait(list(waiting))[0]:
                number = waiting.pop(ref)
                try:
                    code, tail = ray.get(ref)
                except Exception as e:
                    code, tail = 1, [str(e)]
                self._tell(ended=number, code=code, tail=tail)


def _reach(address: str) -> None:
    """Raises OSError where nothing answers: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal() and "//" not in host:
            socket.create_connection((host.strip("[]"), int(port)), _REACH).close()
    except OSError as e:
        raise OSError(f"no Ray cluster answers at {address}: {e.strerror or e}") from e


def main() -> None:
    news = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of other code goes beside the frames

    def tell(**what: Any) -> None:
        try:
            print(json.dumps(what), file=news, flush=True)
        except BrokenPipeError:
            _leave()

    orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    try:
        driver = Driver(orders.get(), tell)
        driver.place()
        driver.run_agents(orders.get())
        orders.get()  # nothing more comes: `_listen` ends this process
    except ImportError as e:
        tell(error=f"{e} (pip install 'disttensor[ray]')")
    except Exception as e:
        tell(error=f"{type(e).__name__}: {e}")
    _leave()


def _listen(orders: queue.SimpleQueue[Any]) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    _leave()


def _leave() -> None:
    """Releases Ray's resources, and ends this process, whatever Ray is doing."""
    threading.Timer(_LEAVE, os._exit, [1]).start()
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
