"""A process group of torch's gloo: two peers that send each other large tensors, or the ranks of collectives.

It owns a thread or two, and a listening socket, of gloo's, until it is closed: a reference to the object, such as the
traceback of an error has, does not keep these.

When a connection ends, gloo tells every thread that waits for a message to come, but not one that waits for the message
that gloo was just reading, nor for one that it was to write: these would wait until their time limit ends, and keep a
thread and the listening socket. So peers wait for a small message, which comes after the large one.
"""

from __future__ import annotations

import ctypes
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d

from ..library_groups import Mailbox
from .store import MailboxStore, addresses_in, cut

c10d: Any = torch.distributed.distributed_c10d  # half of it is not in torch's stubs

#: The time limit of gloo's waits. A rank that waits for a peer that computes for long waits for long.
_PATIENCE = timedelta(minutes=30)
#: The interval at which a waiting thread checks whether the group is over, seconds.
_GLANCE = 0.1
#: The time that a call that was cut may take to come out, seconds.
_LAST_WORDS = 2.0
#: The time limit for events that have happened, as a later message has come, and are yet to be noted.
_MOMENT = timedelta(seconds=30)
#: Kinds of messages: a tensor, the small message behind it, and the answer that it has arrived.
_PAYLOAD, _THERE, _END = range(3)
#: The number of times that gloo tries to connect, each for all of its timeout, even to where nobody listens any more.
_TRIES = 5

Tensors = Sequence[torch.Tensor]


class GlooGroup:
    """A gloo process group.

    ``hosts`` are the IP addresses of the members, in the group's order; this one is number ``me``. ``over`` returns the
    reason why the group can't be used any more, or None: asked while the others are looked for, when the mailbox wakes.
    """

    def __init__(
        self,
        name: str,
        hosts: Sequence[str],
        me: int,
        mailbox: Mailbox,
        tell: Callable[[str, bytes], None],
        over: Callable[[], Exception | None],
        limit: float,
    ) -> None:
        """Connects the members; returns when all have come, however long they compute before.

        Raises the error that ``over`` returns, and RuntimeError of gloo's: when a member has not connected within
        ``limit`` seconds since it is known where all are.
        """
        self.size, self.me = len(hosts), me
        self._ours: set[tuple[str, int]] = set()  #: the addresses on which this member listens
        self._theirs: set[tuple[str, int]] = set()
        self._cut, self._over = False, over
        self._lock = threading.RLock()
        self._calls: set[threading.Thread] = set()  #: threads that are in gloo
        self._out = threading.Condition(self._lock)  #: notified when one of them has left
        self._ending: threading.Thread | None = None
        self._word: Any = None  #: the last small message that nobody waits for: gloo sends it as long as it is held
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=hosts[me])]
        options._timeout = timedelta(seconds=limit / _TRIES)
        options._threads = 1
        store = MailboxStore(name, mailbox, tell, over)
        try:
            self._group: Any = c10d.ProcessGroupGloo(store, me, self.size, options)
        finally:
            del options  # it holds the listening socket, and an error holds this frame
            mailbox.clear(f"{name}/")
        self._ours = addresses_in(store.told, [hosts[me]])
        self._theirs = addresses_in(store.heard, list(dict.fromkeys(hosts))) - self._ours

    def cut(self) -> None:
        """Has every thread that waits in the group come out with an error. In any thread, any number of times."""
        with self._lock:
            first, self._cut = not self._cut, True
        if first:
            cut(self._ours, self._theirs)

    def close(self) -> None:
        """Releases gloo's threads and sockets, in the background: gloo waits for operations in the group.

        Calls that are under way are cut. In any thread, any number of times.
        """
        with self._lock:
            last, self._group = [self._group], None
            if self._calls:
                self.cut()
            if last[0] is not None:
                ending = threading.Thread(target=self._give_back, args=(last,), name="disttensor-gloo", daemon=True)
                ending.start()
                self._ending = ending

    def _give_back(self, last: list[Any]) -> None:
        # gloo forgets threads that wait in a group that is destroyed before it has seen the connection's end
        with self._out:
            self._out.wait_for(lambda: not self._calls, _LAST_WORDS)
            self._word = None
        last.clear()

    def join(self, seconds: float) -> None:
        """Waits until the resources that ``close`` releases are released."""
        if self._ending is not None:
            self._ending.join(seconds)

    def leave_alone(self) -> None:
        """Keeps gloo's objects from ever being destroyed, in a forked child."""
        for held in (self._group, self._word):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))

    # The calls below block, and raise RuntimeError of gloo's when a connection ended, and the error that ``over``
    # returns. An error keeps the variables of the functions that it left: nothing of gloo's may be in them.

    def send(self, payload: torch.Tensor, to: int) -> None:
        """Sends a tensor; returns when it has arrived, so that a close afterwards cuts nothing off."""

        def call() -> None:
            there = self._group.recv([torch.empty(1)], to, _THERE)
            works = [self._group.send([payload], to, _PAYLOAD), self._group.send([torch.zeros(1)], to, _END)]
            there.wait(_PATIENCE)
            for work in works:
                work.wait(_MOMENT)

        self._apart(call)

    def recv(self, payload: torch.Tensor, source: int) -> None:
        def call() -> None:
            works = [self._group.recv([payload], source, _PAYLOAD), self._group.recv([torch.empty(1)], source, _END)]
            works.pop().wait(_PATIENCE)
            works.pop().wait(_MOMENT)
            with suppress(RuntimeError):  # the peer may be gone by now
                self._word = self._group.send([torch.zeros(1)], source, _THERE)

        self._apart(call)

    def _apart(self, call: Callable[[], object]) -> None:
        """Runs ``call`` in another thread, which is left alone if it does not come back."""
        done, errors = threading.Event(), list[Exception]()

        def thread() -> None:
            try:
                call()
            except Exception as error:
                traceback.clear_frames(error.__traceback__)
                errors.append(error)
            finally:
                with self._out:
                    self._calls.discard(threading.current_thread())
                    self._out.notify()
                done.set()

        with self._lock:
            apart = threading.Thread(target=thread, name="disttensor-gloo", daemon=True)
            apart.start()
            self._calls.add(apart)
        self._until(done)
        if errors:
            raise errors[0]

    def _wait(self, start: Callable[[], Any]) -> None:
        """Starts a collective and waits for it.

        (Not all collectives have a future, and none says when it is completed before it is waited for.)
        """
        work = [start()]  # started here, as the tensors may be made in this thread's inference mode
        self._apart(lambda: work.pop().wait())

    def _until(self, done: threading.Event) -> None:
        """Waits for ``done``, and checks ``over``: gloo misses the end of a connection in the middle of a message."""
        while not done.wait(_GLANCE):
            if (error := self._over()) is not None:
                if done.wait(_GLANCE):  # a peer that hangs up may have sent all before
                    return
                self.cut()
                self.close()
                raise error

    def run(self, kind: str, inputs: Tensors, outs: Tensors, op: str, root: int) -> None:
        """Does this rank's part of a collective (``DataChannel.collective``).

        All tensors have one length, which is not 0.
        """
        if kind == "all_reduce":
            outs[0].copy_(inputs[0])
            self._wait(
                lambda: self._group.allreduce([outs[0]], _with(c10d.AllreduceOptions(), reduceOp=_reduction(op)))
            )
            self._average(op, outs[0])
        elif kind == "reduce":
            total = outs[0].copy_(inputs[0]) if outs else inputs[0].clone()
            self._wait(
                lambda: self._group.reduce([total], _with(c10d.ReduceOptions(), reduceOp=_reduction(op), rootRank=root))
            )
            if outs:
                self._average(op, total)
        elif kind == "reduce_scatter":
            result = torch.empty_like(outs[0])  # the output may be one of the inputs
            options = _with(c10d.ReduceScatterOptions(), reduceOp=_reduction(op))
            self._wait(lambda: self._group.reduce_scatter([result], [list(inputs)], options))
            self._average(op, result)
            outs[0].copy_(result)
        else:
            self._move(kind, [_raw(x) for x in inputs], [_raw(x) for x in outs], root)

    def _move(self, kind: str, inputs: list[torch.Tensor], outs: list[torch.Tensor], root: int) -> None:
        """Does a collective that only moves data, as bytes: gloo does not know all dtypes."""
        if kind == "broadcast":
            self._wait(
                lambda: self._group.broadcast((inputs or outs)[:1], _with(c10d.BroadcastOptions(), rootRank=root))
            )
        elif kind == "all_gather":
            given = inputs[0].clone()
            self._wait(lambda: self._group.allgather([outs], [given], _with(c10d.AllgatherOptions())))
        elif kind == "gather":
            given = inputs[0].clone()
            self._wait(
                lambda: self._group.gather([outs] if outs else [], [given], _with(c10d.GatherOptions(), rootRank=root))
            )
        elif kind == "scatter":
            result = torch.empty_like(outs[0])
            self._wait(
                lambda: self._group.scatter(
                    [result], [inputs] if inputs else [], _with(c10d.ScatterOptions(), rootRank=root)
                )
            )
            outs[0].copy_(result)
        elif kind == "all_to_all":
            given = torch.cat(inputs)
            result, sizes = torch.empty_like(given), [x.numel() for x in inputs]
            self._wait(lambda: self._group.alltoall_base(result, given, sizes, sizes, _with(c10d.AllToAllOptions())))
            for out, part in zip(outs, result.split(sizes), strict=True):
                out.copy_(part)
        else:
            raise NotImplementedError(f"gloo has no {kind}")

    def _average(self, op: str, total: torch.Tensor) -> None:
        if op == "AVG":
            total.div_(self.size)


def _with(options: Any, **fields: Any) -> Any:
    options.timeout = _PATIENCE
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def _reduction(op: str) -> Any:
    return getattr(c10d.ReduceOp, "SUM" if op == "AVG" else op)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
