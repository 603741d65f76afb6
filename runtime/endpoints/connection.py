"""A connection between a job and another program: what each end has of it."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from ..launch.rendezvous.credentials import read_connection_file
from ..process.spelling import shown
from ..protocol.codec import printable
from ..protocol.errors import BrokenError, ProtocolError
from ..shared.waiting import check_timeout
from ..transport.tunnel import TunnelClient
from . import frames
from .frames import Come, EndpointHello, Refused, Welcome
from .wires import Wire, Wires

#: Seconds in which a close waits for the other end to take what was sent.
_CLOSE = 30.0
#: The most characters of a tag.
MAX_TAG = 200


class Connection:
    """One end of a connection between a job and another program.

    Messages are plain data, arrays of numpy and tensors (a tensor on a node is fetched), which are copied; they come
    in order. ``dt.tasks.connect`` makes the program's end, an ``Endpoint`` has the job's.
    """

    def __init__(
        self, wires: Wires, wire: Wire, id: int, tag: str, address: str, end: Callable[[], None] | None = None
    ) -> None:
        self._wires, self._wire, self._end = wires, wire, end
        self._id, self._address = id, address
        #: A name that several clients may have; ``Endpoint.broadcast`` can be for those of one. Either end may set its
        #: own, which the other one does not hear.
        self.tag = tag

    @property
    def id(self) -> int:
        """The client's number: clients are numbered from 0 on, in the order in which they came."""
        return self._id

    @property
    def address(self) -> str:
        """The address of the other end."""
        return self._address

    @property
    def closed(self) -> bool:
        """True once the connection has ended, by either end's ``close``, or because the other program is gone."""
        return self._wire.ended is not None or self._wire.said_bye

    def __repr__(self) -> str:
        return f"<Connection id={self.id} tag={self.tag!r} {self.address}{' closed' if self.closed else ''}>"

    def send(self, value: Any, timeout: float | None = None) -> None:
        """Sends a value; waits until its bytes have left, or fit into the window of what is on its way.

        In a callback of ``recv_async`` it does not wait. Raises TypeError and ValueError for what can't cross,
        ClosedError once either end was closed, BrokenError when the other program is gone, TimeoutError after
        ``timeout`` seconds: it still leaves then, when there is room.
        """
        check_timeout(timeout)
        views = frames.pack(value)
        wires, wire = self._wires, self._wire
        with wires.cond:
            sending = wires.queue(wire, views)
            if wires.is_own_thread():
                return  # which is to write it
            over = wires.wait(
                lambda: sending.done or wire.ended is not None or (wire.deaf and wire.full),
                timeout,
                lambda: f"{wire.name} has not taken a message; it reads nothing, or has too little time for it",
            )
            if not over:
                raise TimeoutError(f"{wire.name} has not taken a message for {timeout:g} s; it is still on its way")
            if not sending.done:
                raise wire.error() if wire.ended is not None else BrokenError(f"{wire.name} reads nothing more")

    def recv(self, into: torch.Tensor | None = None, timeout: float | None = None) -> Any:
        """Returns the next message; waits for it, ``timeout`` seconds at most (0: not at all).

        With ``into`` it has to be a tensor of the same shape and dtype, and is copied there, strided or on a node as
        that may be; ``into`` is returned. Raises ValueError where it is not, TimeoutError, ClosedError once all was
        received and either end was closed, BrokenError when the other program is gone. None of them loses a message.
        """
        check_timeout(timeout)
        wires, wire = self._wires, self._wire
        with wires.cond:
            if not wires.wait(lambda: bool(wire.inbox) or wire.ended is not None, timeout):
                raise TimeoutError(f"{wire.name} has sent nothing for {timeout:g} s")
            if not wire.inbox:
                raise wire.error()
            entry = wires.take_message(wire)
            if into is None:
                return entry[1]
            if (why := _unfit(entry[1], into)) is not None:
                wires.put_back(wire, entry)
                raise ValueError(f"recv(into=) has {_of(into)}, and {wire.name} has sent {why}; recv() gets that")
        with torch.no_grad():
            return into.copy_(entry[1])

    def recv_async(self) -> Future[Any]:
        """Returns a Future of the next message; of several, the first one's is the first message. Raises nothing:
        the Future does, as ``recv``."""
        future: Future[Any] = Future()
        wires, wire = self._wires, self._wire
        with wires.cond:
            if wire.inbox:
                value = wires.take_message(wire)[1]
            elif wire.ended is None:
                wire.waiting.append(future)
                return future
            else:
                future.set_exception(wire.error())
                return future
        future.set_result(value)
        return future

    def poll(self, timeout: float | None = 0) -> bool:
        """Returns whether ``recv`` has something, a message or an end; waits for it, ``timeout`` seconds at most."""
        check_timeout(timeout)
        with self._wires.cond:
            return self._wires.wait(lambda: bool(self._wire.inbox) or self._wire.ended is not None, timeout)

    def close(self) -> None:
        """Ends the connection: what was sent arrives, and then the other end hears of it. Waits for that, 30 s at most.
        Closing twice is fine."""
        with self._wires.cond:
            self._wires.leave([self._wire], _CLOSE)
        if self._end is not None:
            end, self._end = self._end, None
            end()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(connection_file: str | os.PathLike[str], *, tag: str = "", timeout: float = 60.0) -> Connection:
    """Connects this program to an ``Endpoint`` of a running job. It may be any program, and needs no session.

        >>> job = dt.tasks.connect("/home/me/job.connection")
        >>> job.send({"ready": True})
        >>> weights = job.recv()

    Tries again until the endpoint is there, for ``timeout`` seconds: the job may be started later.

    Args:
        connection_file: the file that the endpoint has written; only its owner may read it.
        tag: a name for the endpoint, by which it can broadcast to some.
        timeout: seconds.

    Raises StartError for a file that is not there, or can be read by others, BrokenError when the endpoint can't be
    reached, or does not let this program in, OSError when this program has too few file descriptors left.
    """
    check_tag(tag)
    check_timeout(timeout)
    invitation = read_connection_file(os.fspath(connection_file), timeout)
    keys = invitation.public_key, invitation.secret_key
    try:
        tunnel = TunnelClient(invitation.addresses, keys, invitation.server_key, timeout)
    except BrokenError as e:
        raise BrokenError(f"the endpoint of {connection_file} can't be reached: {e}") from None
    answers: list[Welcome | Refused] = []

    def heard(wire: Wire, come: Come) -> None:
        if answers or not isinstance(come.said, Welcome | Refused):
            raise ProtocolError(f"a {type(come.said).__name__} out of place")
        answers.append(come.said)
        wire.admit()

    wires = Wires(heard)
    wires.start()

    def end() -> None:
        atexit.unregister(end)
        wires.close()
        tunnel.close()

    atexit.register(end)  # a program that ends has closed

    try:
        hello = EndpointHello(frames.VERSION, socket.gethostname()[:200], os.getpid(), tag)
        with wires.cond:
            wire = wires.add(tunnel.socket)
            wire.name = f"the endpoint of {connection_file} ({invitation.whose()})"
            wires.queue(wire, [memoryview(frames.frame(hello))])
            come = wires.wait(lambda: bool(answers) or wire.ended is not None, timeout)
        if not answers:
            why = wire.ended if come else f"has not answered for {timeout:g} s"
            raise BrokenError(f"{wire.name} {why}; is that file an Endpoint's, of this version of disttensor?")
        if isinstance(answers[0], Refused):
            raise BrokenError(f"{wire.name} refuses: {printable(answers[0].why)}")
    except BaseException:
        end()
        raise
    return Connection(wires, wire, answers[0].id, tag, invitation.addresses[0], end)


def check_tag(tag: str) -> None:
    if not isinstance(tag, str):
        raise TypeError(f"tag={shown(tag)} is not a text")
    if len(tag) > MAX_TAG:
        raise ValueError(f"a tag has {len(tag)} characters, and may have {MAX_TAG}")


def _unfit(value: Any, into: torch.Tensor) -> str | None:
    """Returns what a value is, if it is no tensor like ``into``."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return None if value.shape == into.shape and value.dtype == into.dtype else _of(value)


def _of(x: torch.Tensor) -> str:
    return f"a tensor of shape {tuple(x.shape)} and {x.dtype}"
