"""A model of the folder of a checkpoint: saves, their nodes and readers in one folder, whose calls to the file system
come in any order, any of which may be a process's last. The code is the product's, the file system the kernel's. The
seam is ``Disk``, of whose methods each is a step.

``python tests/kit/folder_model.py 10000 [SEED]`` tries so many orders.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.storage import WriteResult

from disttensor.checkpoint.folder import Folder, read_checkpoint
from disttensor.runtime.node import checkpoint_files as files
from disttensor.runtime.node.checkpoint_disk import Disk, Process
from disttensor.runtime.node.checkpoint_files import FileItem, Shard, Written

#: What locks are: for all, nowhere, each host's own, on one host only; "void": whoever asks has the lock, so that what
#: keeps the last complete checkpoint is the folder alone.
LOCKS = ("shared", "none", "own", "mixed", "void")
LOOSE = ("own", "mixed", "void")

#: What is promised: seconds between two touches, and those after which one that does not touch has lost its turn.
TOUCH, OLD = 5.0, 60.0

STEPS = [name for name in vars(Disk) if not name.startswith("_")]
#: Those that no other process can see, or that are made of others.
_UNSEEN = {"process", "lives", "clock", "read_file", "write_all", "repeat", "readable", "shared", "unlock", "is_folder"}


class Killed(BaseException):
    """The process is gone: what it would do now is done by nobody."""


class Actor:
    """A process, or a thread of one, which takes a step when it is its turn."""

    def __init__(self, world: World, name: str, process: Process, work: Callable[[Actor], None]) -> None:
        self.world, self.name, self.process, self.work = world, name, process, work
        self.disk = ModelDisk(self)
        self.dead = self.done = False
        self.wakes = 0.0  #: when it goes on
        self.stood = 0.0  #: until when it stood still for long
        self.saves = 0
        self.tender = 0  #: steps in which it is likely that something happens to it
        self.timers: list[Callable[[], None]] = []
        self.open: set[int] = set()
        self.error: BaseException | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self.dead:
                self.work(self)
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        for descriptor in list(self.open):  # as the kernel does
            self.closed(descriptor)
        self.done = True
        self._back.release()

    def closed(self, descriptor: int) -> None:
        """Closes a file, which ends its lock."""
        self.open.discard(descriptor)
        held = self.world.held
        for key in [key for key, of in held.items() if of == (self, descriptor)]:
            del held[key]
        os.close(descriptor)

    def go(self) -> None:
        """Lets it take its next step."""
        self._go.release()
        self._back.acquire()

    def kill(self) -> None:
        self.dead = True
        self.go()

    def step(self) -> None:
        if threading.current_thread() is self.thread and not self.dead:
            self._back.release()
            self._go.acquire()
        if self.dead:
            raise Killed


class ModelDisk(Disk):
    """The disk of one actor: each call is a step, and its times are the world's."""

    def __init__(self, actor: Actor) -> None:
        self._actor, self._world = actor, actor.world

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        descriptor = super().open(path, flags, mode)
        self._actor.open.add(descriptor)
        if flags & os.O_CREAT:
            self._now(descriptor)
        return descriptor

    def _now(self, file: int | str) -> None:
        os.utime(file, (self._world.now, self._world.now))

    def close(self, descriptor: int) -> None:
        self._actor.closed(descriptor)

    def write(self, descriptor: int, data: Any) -> int:
        half = max(1, len(data) // 2) if self._world.chance.random() < 0.1 else len(data)
        done = super().write(descriptor, memoryview(data)[:half])
        self._now(descriptor)
        return done

    def fsync(self, descriptor: int) -> None:
        pass  # what is written is seen by all, and no machine loses its power here

    def sync_folder(self, path: str) -> None:
        pass

    def truncate(self, descriptor: int) -> None:
        super().truncate(descriptor)
        self._now(descriptor)

    def touch(self, path: str) -> None:
        self._now(path)

    def rename(self, path: str, to: str) -> None:
        super().rename(path, to)
        if to.endswith("/.metadata"):
            self._world.became(self._actor)
        self._world.check(f"{self._actor.name} has renamed {path} to {to}")

    def unlink(self, path: str) -> None:
        super().unlink(path)
        if "/.saver/" in path:
            self._world.having.pop(self._actor, None)
        self._world.check(f"{self._actor.name} has removed {path}")

    def lock(self, descriptor: int) -> bool | None:
        world, host = self._world, self._actor.process.host
        if world.locks == "none" or (world.locks == "mixed" and host != "a"):
            return None
        if world.locks == "void":
            return True
        if world.locks != "own":
            return super().lock(descriptor)
        key = (host, os.fstat(descriptor).st_ino)  # nobody sees those of other hosts
        if key in world.held:
            return False
        world.held[key] = (self._actor, descriptor)
        return True

    def unlock(self, descriptor: int) -> None:
        self._world.having.pop(self._actor, None)  # it is closed at once

    def clock(self) -> float:
        return self._world.now + (500.0 if self._actor.process.host == "a" else 0.0)  # each host has its own

    def sleep(self, seconds: float) -> None:
        self._actor.wakes = self._world.now + seconds

    def repeat(self, seconds: float, action: Callable[[], None]) -> Callable[[], None]:
        self._actor.timers.append(action)
        return self._actor.timers.clear

    def process(self) -> Process:
        return self._actor.process

    def lives(self, process: Process) -> bool:
        return any(a.process == process and not a.dead and not a.done for a in self._world.actors)


def _stepping(name: str) -> Callable[..., Any]:
    call = vars(ModelDisk).get(name) or vars(Disk)[name]

    def stepping(self: ModelDisk, *args: Any) -> Any:
        if self._actor.dead and name == "close":
            return call(self, *args)
        if name == "sleep":
            call(self, *args)
        self._actor.step()
        if name in ("rename", "lock", "open", "unlink"):
            self._actor.tender = 3
        return None if name == "sleep" else call(self, *args)

    return stepping


for _name in STEPS:
    if _name not in _UNSEEN:
        setattr(ModelDisk, _name, _stepping(_name))


class World:
    """A folder, its actors and one order of their steps, which the seed decides."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.path, self.chance = folder / "c", random.Random(seed)
        self.locks = LOCKS[seed % len(LOCKS)]
        self.now = 1_000_000.0
        self.calm = True  #: nobody is killed, or stands still
        self.actors: list[Actor] = []
        self.held: dict[tuple[str, int], tuple[Actor, int]] = {}
        self.history: list[str] = []  #: the numbers of the saves that have become the checkpoint
        self.having: dict[Actor, str] = {}  #: who has its turn
        self.parts: dict[str, dict[str, str]] = {}  #: by number: the hash of each file
        self.kills = self.stops = self.lost = self.refused = self.saved = self.read = 0
        self.log: list[str] = []
        self._pid = 0

    def process(self, host: str) -> Process:
        self._pid += 1
        return Process(host, f"boot-of-{host} 1", self._pid, "began")

    # ---- what the actors do ------------------------------------------------------------------------------------------

    def saves(self, count: int) -> Callable[[Actor], None]:
        def work(actor: Actor) -> None:
            for _ in range(3 * count):
                saved = self.saved
                self.save(actor)
                if self.saved > saved:
                    actor.saves += 1
                if actor.saves == count or self.calm:
                    return
                actor.disk.sleep(self.chance.choice((0.0, 0.001, 0.1)))

        return work

    def save(self, actor: Actor) -> None:
        actor.stood = 0.0
        folder = Folder(self.path, actor.disk)
        number = folder.claim.removeprefix(".saving_")
        try:
            folder.begin()
            self.enter(actor, number)
            said: dict[int | None, list[Written]] = {}
            node = self.add(f"node of {actor.name}", actor.process, lambda a: self.write(a, folder, 0, said))
            node.process = self.process(actor.process.host)
            self.write(actor, folder, None, said)
            while not node.done:
                actor.disk.sleep(0.001)
            if node.error is not None:
                raise node.error
            if node.dead or len(said) < 2:
                raise folder.lost() if not folder.has_claim() else OSError(errno.EIO, "the node is gone")
            written = {item: each for item, (each,) in zip(("n", "s"), (said[0], said[None]), strict=True)}
            metadata, results = metadata_of(written)
            folder.commit(metadata, results, [Shard(FileItem(n, None, None).key, *w) for n, w in written.items()])
            self.saved += 1
        except BaseException as error:
            self.having.pop(actor, None)
            self.log.append(f"{actor.name}: {error!r} at {self.now}")
            folder.abort()
            if not isinstance(error, OSError) or error.errno not in (errno.EBUSY, errno.EIO):
                raise
            if "has lost its turn" in str(error):
                self.lost += 1
                if self.locks not in LOOSE and not (self.locks == "none" and actor.stood):
                    raise AssertionError("it has lost its turn, and had not stood still") from error
            elif error.errno == errno.EBUSY:
                self.refused += 1
                if "is being saved to by" not in str(error):
                    raise
        finally:
            self.having.pop(actor, None)

    def write(self, actor: Actor, folder: Folder, node: int | None, said: dict[int | None, list[Written]]) -> None:
        name = "s" if node is None else "n"
        data = f"{folder.claim} {name}".encode()
        found = files.write(
            str(self.path),
            folder.claim,
            folder.prefix(node),
            [FileItem(name, None, None)],
            [io.BytesIO(data)],
            actor.disk,
        )
        if not isinstance(found, str):
            said[node] = [Written(*each) for each in found]

    def enter(self, actor: Actor, number: str) -> None:
        """Notes who has its turn: nobody else has, but for one that stood still where there are no locks."""
        if not (self.path / f".saving_{number}").exists():
            return  # it has lost its turn meanwhile, and is going to be told
        for other in list(self.having):
            assert other.dead or self.locks in LOOSE or (self.locks == "none" and other.stood), (
                f"{actor.name} and {other.name} save at once"
            )
            del self.having[other]
        self.having[actor] = number

    def reads(self, count: int) -> Callable[[Actor], None]:
        def work(actor: Actor) -> None:
            for _ in range(count):
                before = len(self.history)
                found = read_checkpoint(self.path, lambda metadata, hashes: whole(self, metadata, hashes, actor.disk))
                assert found in self.history[before - 1 :], "what was read was not the checkpoint meanwhile"
                self.read += 1

        return work

    # ---- what happens ------------------------------------------------------------------------------------------------

    def add(self, name: str, process: Process, work: Callable[[Actor], None]) -> Actor:
        actor = Actor(self, f"{name} {len(self.actors)}", process, work)
        self.actors.append(actor)
        return actor

    def became(self, actor: Actor) -> None:
        assert actor in self.having or self.locks in LOOSE, f"{actor.name} became the checkpoint, and had lost its turn"
        data = (self.path / ".metadata").read_bytes()
        found = re.search(rb"disttensor-([0-9a-f]{8})", data)
        assert found is not None
        self.history.append(number := found[1].decode())
        mine = {name for name in os.listdir(self.path) if number in name and not name.startswith(".")}
        self.parts[number] = {n: hashlib.sha256((self.path / n).read_bytes()).hexdigest() for n in mine}
        assert len(mine) == 3, f"{number} became the checkpoint with {mine}"

    def check(self, what: str) -> None:
        """The last complete checkpoint is there, whole."""
        self.log.append(what)
        if self.history:
            number = self.history[-1]
            data = (self.path / ".metadata").read_bytes()
            assert number.encode() in data, f"{what}: {number} is not the checkpoint any more"
            for name in self.parts[number]:
                assert (self.path / name).exists(), f"{what}: {name} of the last complete checkpoint is gone"

    def run(self) -> None:
        """Has the actors take their steps until all are done."""
        while True:
            left = [actor for actor in self.actors if not actor.done]
            if not left:
                break
            ready = [actor for actor in left if actor.wakes <= self.now]
            if not ready:
                self.pass_time(min(actor.wakes for actor in left) - self.now)
                continue
            actor = self.chance.choice(ready)
            chance = self.chance.random() / (5 if actor.tender > 0 else 1)
            actor.tender -= 1
            if self.calm:
                actor.go()
            elif chance < 0.002 and "reader" not in actor.name:
                self.kills += 1
                self.log.append(f"{actor.name} is killed")
                actor.kill()
                self.having.pop(actor, None)
            elif chance < 0.006:
                self.stops += 1
                actor.stood = actor.wakes = self.now + self.chance.choice((TOUCH * 2, OLD + 20))
                self.log.append(f"{actor.name} stands still")
            else:
                actor.go()
            if self.chance.random() < 0.01 and not self.calm:
                self.pass_time(self.chance.choice((0.3, TOUCH, 2 * TOUCH, OLD + 10)))
            if actor.error is not None:
                raise actor.error

    def pass_time(self, seconds: float) -> None:
        """Time passes; those who run touch what they have to touch."""
        until = self.now + seconds
        for actor in self.actors:
            if seconds > OLD and not actor.timers:
                actor.stood = until  # where it is about to begin to touch
        while self.now < until:
            self.now = min(until, self.now + TOUCH)
            for actor in self.actors:
                if not actor.done and not actor.dead and actor.stood <= self.now:
                    for action in list(actor.timers):
                        self.touching(actor, action)

    @staticmethod
    def touching(actor: Actor, action: Callable[[], None]) -> None:
        action()  # the thread is none of the actor's: it takes no step of its

    def end(self) -> None:
        """Ends the threads that are left."""
        for actor in self.actors:
            while not actor.done:
                actor.kill()
            actor.thread.join()


def metadata_of(written: dict[str, Written]) -> tuple[Metadata, list[WriteResult]]:
    """torch's metadata of values with these names, and where they were written."""
    results = [
        WriteResult(FileItem(name, None, None).key, each.length, _StorageInfo(each.file, each.offset, each.length))
        for name, each in written.items()
    ]
    return Metadata({name: BytesStorageMetadata() for name in written}), results


def whole(world: World, metadata: Metadata, hashes: Any, disk: Disk) -> str:
    """The number of the checkpoint that was read, all of whose bytes are right."""
    numbers = set()
    for info in metadata.storage_data.values():
        data = disk.read_file(str(world.path / info.relative_path))
        length, sha256 = hashes[info.relative_path, info.offset]
        assert hashlib.sha256(data[info.offset : info.offset + length]).hexdigest() == sha256
        numbers.add(info.relative_path.split("_")[3])
    assert len(numbers) == 1, numbers
    return str(numbers.pop())


def one(seed: int, folder: Path) -> World:
    """Tries one order, on a folder that is not there yet; returns the world, which has counted what happened.

    Raises AssertionError, with the seed and what was done as its notes.
    """
    world = World(folder, seed)
    try:
        world.add("last", world.process("a"), world.saves(1))
        world.run()
        assert world.saved == 1
        world.calm = False
        for k in range(world.chance.choice((2, 2, 3))):
            host = world.chance.choice("ab") if world.locks != "shared" else "a"
            world.add(f"saver {k}", world.process(host), world.saves(2))
        for _ in range(world.chance.choice((0, 1))):
            world.add("reader", world.process("b"), world.reads(3))
        world.run()
        # what those have left that were killed, and their nodes, which went on: the next two saves work and remove it
        before, world.calm, world.now = world.saved, True, world.now + 1
        for _ in range(2):
            began = world.now
            world.add("last", world.process(world.chance.choice("ab")), world.saves(1))
            world.run()
            assert world.now - began < OLD + 2, "a save after the kills waited for more than a minute"
        assert world.saved == before + 2, "a save after the kills was refused"
        number = world.history[-1]
        left = set(os.listdir(world.path)) - {".metadata", *world.parts[number]}
        assert not left, f"it is left: {left}"
        assert read_checkpoint(world.path, lambda m, h: whole(world, m, h, Disk())) == number
    except BaseException as error:
        error.add_note(f"seed {seed}, locks {world.locks}")
        error.add_note("\n".join(world.log[-40:]))
        raise
    finally:
        world.end()
    return world


def orders(seeds: range) -> dict[str, int]:
    """Tries an order for each seed; returns what has happened in them."""
    counts = dict.fromkeys(("saved", "refused", "lost", "read", "kills", "stops"), 0)
    for seed in seeds:
        folder = Path(tempfile.mkdtemp(prefix="folder_model_", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        try:
            world = one(seed, folder)
        finally:
            shutil.rmtree(folder)
        for name in counts:
            counts[name] += getattr(world, name)
    return counts


if __name__ == "__main__":
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    print(orders(range(first, first + int(sys.argv[1]))))
