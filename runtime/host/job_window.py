"""A job's window: a socket of this host at which programs of this user, and of root, ask the script how it is. On a
host where only nodes run, they ask the agent above these (launch/tree/host_window.py).

    connection --> a line of JSON (JobRequest) --> answer(request) --> the answer, and the end of the connection

One thread serves all connections, and sleeps while there are none. Who connects is what the kernel says; who says
nothing, or too much, is cut off.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from .job_sockets import MOST_REQUEST, JobAnswer, JobRequest, Refusal, may_ask, peer_of
from .socket_folder import bind_in_folder, remove_folder

#: The most connections at once; further ones are ended at once.
MOST = 16
#: Seconds that a connection may take, from its begin to its request, and from there to the end of its answer.
SILENT = 5.0
#: Seconds that the end of a session waits for an answer that is under way.
_LAST = 5.0
#: Seconds until the next try to accept where no descriptors are left.
_PAUSE = 0.2


class _Asker:
    """A connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.heard = b""
        self.answer = memoryview(b"")
        self.until = time.monotonic() + SILENT


class JobWindow:
    """The window of one session. Before ``open`` it does nothing."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._path = ""
        self._wake = -1
        self._thread: threading.Thread | None = None
        self._askers: dict[int, _Asker] = {}
        self._answer: Callable[[JobRequest], JobAnswer] = lambda request: Refusal("the session has ended")

    def open(self, answer: Callable[[JobRequest], JobAnswer], suffix: str = "") -> None:
        """Makes the socket, and the thread that answers there. ``suffix``: what stands behind this process's number in
        the socket's name. Raises OSError, NotOurs for a folder of others."""
        path = ""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            os.fchmod(listener.fileno(), 0o600)  # before it has a name, so that it never has another mode
            path = bind_in_folder(listener, f"{os.getpid()}{suffix}.sock")
            listener.listen(MOST)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC)
            self._socket, self._path, self._answer = listener, path, answer
            thread = threading.Thread(target=self._serve, name="disttensor-window", daemon=True)
            thread.start()
        except BaseException:
            listener.close()
            if self._wake >= 0:
                os.close(self._wake)
                self._socket, self._wake = None, -1
            if path:
                _remove(path)
            raise
        self._thread = thread

    def close(self) -> None:
        """Removes the socket and ends the thread. Calling it twice is fine."""
        thread, self._thread = self._thread, None
        if thread is not None:
            _remove(self._path)
            os.eventfd_write(self._wake, 1)
            thread.join(_LAST)

    def forked(self) -> None:
        """Lets go of the window in a forked child, which does not answer for its parent."""
        listener, self._socket, self._thread = self._socket, None, None
        if listener is not None:
            for asker in self._askers.values():
                asker.socket.close()
            listener.close()
            os.close(self._wake)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        listener, wake = self._socket, self._wake
        if listener is None:
            return
        poller = select.poll()
        poller.register(listener, select.POLLIN)
        poller.register(wake, select.POLLIN)
        try:
            while True:
                until = min((each.until for each in self._askers.values()), default=None)
                left = None if until is None else 1000 * max(0.0, until - time.monotonic()) + 1
                ready = [fd for fd, _ in poller.poll(left)]
                for fd in ready:
                    if fd == wake:
                        return
                    if fd == listener.fileno():
                        self._accept(poller, listener, wake)
                    elif fd in self._askers:
                        self._go_on(poller, self._askers[fd])
                now = time.monotonic()
                late = [each for fd, each in self._askers.items() if each.until <= now and fd not in ready]
                for asker in late:
                    self._hang_up(poller, asker)
        finally:
            for asker in list(self._askers.values()):
                self._hang_up(poller, asker)
            listener.close()
            os.close(wake)

    def _accept(self, poller: select.poll, listener: socket.socket, wake: int) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:  # it is gone
            return
        except OSError:  # no descriptors are left, and it is still there
            pause = select.poll()
            pause.register(wake, select.POLLIN)
            pause.poll(1000 * _PAUSE)
            return
        if len(self._askers) >= MOST or not may_ask(peer_of(connection)[1]):
            connection.close()
            return
        connection.setblocking(False)
        self._askers[connection.fileno()] = _Asker(connection)
        poller.register(connection, select.POLLIN)

    def _hang_up(self, poller: select.poll, asker: _Asker) -> None:
        poller.unregister(asker.socket)
        del self._askers[asker.socket.fileno()]
        asker.socket.close()

    def _go_on(self, poller: select.poll, asker: _Asker) -> None:
        """Takes in what has come of a request, or sends what there is room for of an answer."""
        try:
            if not asker.answer:
                piece = asker.socket.recv(MOST_REQUEST)
                asker.heard += piece
                if b"\n" not in asker.heard and piece and len(asker.heard) < MOST_REQUEST:
                    return
                asker.answer = memoryview(msgspec.json.encode(self._reply(asker.heard)))
                asker.until = time.monotonic() + SILENT
                poller.modify(asker.socket, select.POLLOUT)
            asker.answer = asker.answer[asker.socket.send(asker.answer) :]
        except BlockingIOError:
            return
        except OSError:
            asker.answer = memoryview(b"")
        if not asker.answer:
            self._hang_up(poller, asker)

    def _reply(self, heard: bytes) -> JobAnswer:
        line, end, rest = heard.partition(b"\n")
        if not end or rest:
            return Refusal("a request is one line of JSON")
        try:
            request = msgspec.json.decode(line, type=JobRequest)
        except (ValueError, RecursionError) as e:
            return Refusal(f"this is no request: {e}")
        try:
            return self._answer(request)
        except Exception as e:  # whatever it is: the script goes on, and who asks is told
            return Refusal(f"{type(e).__name__}: {e}")


def _remove(path: str) -> None:
    """Removes a socket's name, and the folder, if it was the last one there."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    remove_folder(os.path.dirname(path))
