"""The server at which Prometheus asks a script for its figures, on an address of this machine alone.

    connection --> a thread of its own --> prometheus_client's application --> collector (metrics.py)

It says nothing but figures, to whoever of this machine asks, so who asks wrongly, silently or in crowds must cost
nothing: so many connections at once, so many seconds for each.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

#: The most connections at once; further ones are ended at once.
MOST = 8
#: Seconds that a connection may take, from its begin to its end.
SILENT = 5.0
#: Seconds that the end of a session waits for an answer that is under way.
_LAST = 5.0
#: Seconds until the next try to accept where no descriptors are left.
_PAUSE = 0.2

#: An application of WSGI's.
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


class _Listener(ThreadingMixIn, WSGIServer):
    """The listening socket, and the connections that are open."""

    timeout = 0.0
    request_queue_size = MOST

    def __init__(self, host: str, port: int, application: Application, wake: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._wake = wake
        #: by connection: its thread, and until when it may last
        self.under_way: dict[Any, tuple[threading.Thread, float]] = {}
        super().__init__((host, port), _Handler)
        self.socket.setblocking(False)
        self.set_app(application)

    def server_bind(self) -> None:
        """Binds the socket; asks no name server for its name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        """Accepts a connection; waits a moment first where no descriptors are left, as it stays there."""
        try:
            return super().get_request()
        except BlockingIOError:  # it is gone
            raise
        except OSError:
            pause = select.poll()
            pause.register(self._wake, select.POLLIN)
            pause.poll(1000 * _PAUSE)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Has a thread answer, unless so many are at it already."""
        if len(self.under_way) >= MOST:
            self.shutdown_request(request)
            return
        thread = threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name="disttensor-metrics-answer",
            daemon=True,
        )
        self.under_way[request] = thread, time.monotonic() + SILENT
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection, which is answered or not worth it."""
        self.under_way.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of who hangs up or takes too long: strangers may, as often as they like."""

    def cut(self, until: float) -> None:
        """Cuts connections that may last until then at most: their threads end."""
        for request, (_, last) in list(self.under_way.items()):
            if last <= until:
                with contextlib.suppress(OSError):  # its thread has closed it
                    request.shutdown(socket.SHUT_RDWR)


class MetricsServer:
    """The server of one session. Before ``open`` it does nothing."""

    def __init__(self) -> None:
        self._listener: _Listener | None = None
        self._thread: threading.Thread | None = None
        self._wake = -1

    def open(self, host: str, port: int, application: Application) -> None:
        """Listens at an address, and answers there from now on. Raises OSError."""
        wake = os.eventfd(0, os.EFD_CLOEXEC)
        listener: _Listener | None = None
        try:
            listener = _Listener(host, port, application, wake)
            thread = threading.Thread(
                target=self._serve, args=(listener, wake), name="disttensor-metrics", daemon=True
            )  # fmt: skip
            thread.start()
        except BaseException:
            if listener is not None:
                listener.server_close()
            os.close(wake)
            raise
        self._listener, self._thread, self._wake = listener, thread, wake

    def close(self) -> None:
        """Ends the server; an answer under way is cut off. Calling it twice is fine."""
        listener, thread = self._listener, self._thread
        self._listener = self._thread = None
        if listener is not None and thread is not None:
            os.eventfd_write(self._wake, 1)
            thread.join(_LAST)

    def forked(self) -> None:
        """Lets go of the server in a forked child, which does not answer for its parent."""
        listener, self._listener, self._thread = self._listener, None, None
        if listener is not None:
            for request in listener.under_way:
                request.close()
            listener.socket.close()
            os.close(self._wake)

    def _serve(self, listener: _Listener, wake: int) -> None:
        poller = select.poll()
        poller.register(listener, select.POLLIN)
        poller.register(wake, select.POLLIN)
        try:
            while True:
                until = min((last for _, last in list(listener.under_way.values())), default=None)
                left = None if until is None else 1000 * max(0.0, until - time.monotonic()) + 1
                ready = [fd for fd, _ in poller.poll(left)]
                if wake in ready:
                    return
                if ready:
                    listener.handle_request()
                listener.cut(time.monotonic())
        finally:
            threads = [thread for thread, _ in list(listener.under_way.values())]
            listener.cut(float("inf"))
            for thread in threads:
                thread.join(_LAST)
            listener.socket.close()
            os.close(wake)
