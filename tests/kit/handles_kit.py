"""For tests of actors whose handles travel: a server, clients that have its handle, and the signs of their end."""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stream_kit import arrive, hold, release

import disttensor as dt


class Server:
    """What others call; its end is written down."""

    def __init__(self, path: str = "") -> None:
        self.path, self.said, self.inside = path, list[Any](), 0

    def say(self, who: Any, k: int) -> int:
        assert self.inside == 0, "two calls at once"
        self.inside += 1
        self.said.append((who, k))
        self.inside -= 1
        return len(self.said)

    def all(self) -> list[Any]:
        return self.said

    def double(self, x: Any, *, times: int = 2) -> Any:
        return {"x": [part * times for part in x["x"]]}

    def hold(self, name: str) -> bool:
        return hold(name)

    def fail(self, key: str) -> None:
        raise KeyError(key)

    def itself(self, other: Any) -> Any:
        return other

    def thing(self) -> Any:
        return threading.Lock()

    def put(self, channel: Any, value: int) -> None:
        channel.put(value)

    async def later(self) -> None: ...

    def close(self) -> None:
        if self.path:
            with open(self.path, "a") as file:
                file.write("closed\n")


class Client:
    """An actor that has a handle of another one."""

    def __init__(self, box: Any = None, path: str = "") -> None:
        self.box, self.path = box, path

    def keep(self, box: Any) -> None:
        self.box = box

    def say(self, who: str, times: int) -> list[int]:
        return [self.box["server"].say(who, k).result() for k in range(times)]

    def hold(self, name: str) -> bool:
        return bool(self.box["server"].hold(name).result())

    def give(self, other: Any) -> None:
        other.keep(self.box).wait()

    def ask(self) -> Any:
        return self.box["server"].ask().result()

    def answer(self) -> int:
        return 7

    def ask_later(self) -> None:
        self.box = {"server": self.box["server"], "work": self.box["server"].answer()}

    def ask_found(self, name: str) -> Any:
        """Waits for ``release``, and asks what ``find`` has put there."""
        hold(name)
        return _found.pop(name).answer().result()

    def answer_of(self, name: str) -> Any:
        work = self.box["server"].answer()
        arrive(name)
        return work.result()

    def heard(self) -> Any:
        work = self.box["work"]
        return work.result() if work.is_completed() else None

    def close(self) -> None:
        if self.path:
            with open(self.path, "a") as file:
                file.write("closed\n")


class Asks:
    """An actor whose ``__init__`` asks another one, once it is let go if ``held_by`` says so."""

    def __init__(self, other: Any, name: str, held_by: str = "") -> None:
        if held_by:
            hold(held_by)
        work = other.answer()
        arrive(name)
        self.found = work.result()

    def answer(self) -> Any:
        return self.found


_found: dict[str, Any] = {}


def find(name: str, handle: Any) -> None:
    _found[name] = handle


@dataclass
class Kept:
    """What a handle may lie in."""

    server: Any
    other: int = 0


def say(server: Any, who: Any, times: int) -> list[int]:
    works = [server.say(who, k) for k in range(times)]
    return [work.result() for work in works]


def closed(path: Path) -> None:
    """Waits until an actor has been closed."""
    pause = threading.Event()
    while not path.exists() or not path.read_text():  # it is made before it is written
        pause.wait(0.01)
    assert path.read_text() == "closed\n"


def later() -> None:
    """Gives what must not happen the time to happen: what nodes and the script drop has been told by then."""
    gc.collect()
    for _ in range(2):
        for node in [node for node in dt.nodes() if node["alive"]]:
            dt.run(gc.collect, node=node["rank"])


def let_go(name: str) -> None:
    dt.submit(release, name, node=0, beside=True).wait()
