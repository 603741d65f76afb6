"""``Endpoint``: where other programs, which are no nodes, talk to the running job.

script: Endpoint == TunnelServer <-- CURVE, keys of the connection file --> TunnelClient == Connection: a program
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from ..errors.argument_checks import whole_number
from ..runtime.endpoints import frames
from ..runtime.endpoints.connection import Connection, check_tag
from ..runtime.endpoints.frames import Come, EndpointHello, Refused, Welcome
from ..runtime.endpoints.wires import Wire, Wires
from ..runtime.host.addresses import LOOPBACK
from ..runtime.host.interfaces import addresses_of
from ..runtime.launch.rendezvous.credentials import ConnectionFile, fresh, invite
from ..runtime.node import where
from ..runtime.protocol.codec import printable
from ..runtime.protocol.errors import BrokenError, ClosedError, DisttensorError, ProtocolError
from ..runtime.shared.waiting import check_timeout
from ..runtime.transport.tunnel import TunnelServer
from ..session import current

#: The most connections that have not said who they are, and the seconds that they have to.
_SILENT, _HELLO = 64, 10.0


class _Endpoints:
    """The part of a session that has its endpoints."""

    def __init__(self) -> None:
        self.all: list[Endpoint] = []  #: those that are open
        self._noted = False  #: the session closes them

    def add(self, endpoint: Endpoint, session: Any) -> None:
        if not self._noted:
            self._noted = True
            session.changes.callback(self.close)
        self.all.append(endpoint)

    def close(self) -> None:
        for endpoint in reversed(self.all.copy()):
            endpoint.close()

    def forked(self) -> None:
        for endpoint in self.all:
            endpoint._forked()


class Endpoint:
    """A place of the job to which other programs connect, by ``dt.tasks.connect``: monitors, servers, sources of data.

        >>> endpoint = dt.tasks.Endpoint("/home/me/job.connection")
        >>> for client in endpoint.clients(2):
        ...     client.send("hello")
        >>> client, value = endpoint.recv_any()

    It listens on loopback, or where ``interface`` says, on a free port. Who has read the connection file, which is
    yours alone (mode 0600), is let in, by an encrypted and authenticated connection; nobody else. It ends with the
    session.
    """

    def __init__(
        self,
        connection_file: str | os.PathLike[str],
        *,
        interface: Sequence[str] = (),
        port: int = 0,
        max_clients: int = 256,
    ) -> None:
        """
        Args:
            connection_file: a file to write, which is removed at the end.
            interface: interfaces or addresses of this machine to listen on; without one, loopback.
            port: 0 is any that is free.
            max_clients: how many may be connected at once, with those that are gone and have left messages.

        Raises DisttensorError without a session and in a function on a node, StartError where there is such a file,
        BrokenError for a port that is taken, ValueError for an address that is not this machine's.
        """
        if where.found() is not None:
            raise DisttensorError("an Endpoint is made by the script; functions on nodes may use dt.tasks.connect")
        session = current.session()
        whole_number("max_clients", max_clients, 1)
        whole_number("port", port)
        ways = addresses_of([interface] if isinstance(interface, str) else interface) if interface else (LOOPBACK,)
        keys = fresh()
        self._max = max_clients
        self._tunnel = TunnelServer(ways, port, keys.server, keys.guest[0])
        try:
            self._file = ConnectionFile(os.fspath(connection_file), invite(keys, self._tunnel.addresses))
        except BaseException:
            self._tunnel.close()
            raise
        self._clients: dict[int, Connection] = {}  #: by number, those that are gone as well until that was told
        #: those that have not said who they are, their addresses, and until when they have to
        self._silent: dict[Wire, tuple[str, float]] = {}
        self._count = 0
        self._over = False
        self._wires = Wires(self._heard, self._tunnel.arrivals, self._arrived)
        self._wires.start()  # only now: a program may have connected, which its thread tells this object
        self._part = session.part(_Endpoints)
        self._part.add(self, session)

    def __repr__(self) -> str:
        state = "closed" if self._over else f"clients={sorted(self._clients)}"
        return f"<Endpoint {self._file.path} {state}>"

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses on which it listens, such as tcp://127.0.0.1:41233."""
        return self._tunnel.addresses

    def clients(self, count: int = 0, timeout: float | None = None) -> list[Connection]:
        """Returns the clients that are connected, in the order in which they came; waits until there are ``count``.

        Raises TimeoutError after ``timeout`` seconds, which says how many there are, ClosedError.
        """
        check_timeout(timeout)
        with self._wires.cond:
            come = self._wires.wait(lambda: self._over or len(self._open()) >= count, timeout)
            self._check()
            if not come:
                raise TimeoutError(f"{len(self._open())} of {count} clients have connected in {timeout:g} s")
            return self._open()

    def send(self, client: int, value: Any, timeout: float | None = None) -> None:
        """Sends a value to the client of a number: see ``Connection.send``. Raises KeyError where there is none."""
        self._client(client).send(value, timeout)

    def recv(self, client: int, into: torch.Tensor | None = None, timeout: float | None = None) -> Any:
        """Returns the next message of the client of a number: see ``Connection.recv``. Raises KeyError."""
        return self._client(client).recv(into, timeout)

    def recv_any(self, timeout: float | None = None) -> tuple[Connection, Any]:
        """Returns the first message that has come, of whichever client, and its client; waits for one.

        Raises BrokenError for a client that was killed, or whose host or network is gone, once: the endpoint goes on.
        Raises ClosedError when all clients have closed and nothing is left, TimeoutError after ``timeout`` seconds.
        """
        check_timeout(timeout)
        wires = self._wires
        with wires.cond:
            if not wires.wait(lambda: self._over or self._ready() is not None or self._all_closed(), timeout):
                raise TimeoutError(f"none of {len(self._open())} clients has sent something in {timeout:g} s")
            self._check()
            client = self._ready()
            if client is None:
                raise ClosedError("all clients have closed, and nothing is left of what they have sent")
            if client._wire.inbox:
                return client, wires.take_message(client._wire)[1]
            del self._clients[client.id]
            raise client._wire.error()

    def broadcast(self, value: Any, tag: str | None = None, timeout: float | None = None) -> int:
        """Sends a value to all clients, or to those of a tag. Returns to how many.

        Raises BrokenError that names those which are gone, when the others have it; otherwise as ``Connection.send``.
        """
        if tag is not None:
            check_tag(tag)
        check_timeout(timeout)
        views, wires = frames.pack(value), self._wires
        with wires.cond:
            self._check()
            # one that was killed, and of whom nobody has been told, is told of here
            to = [c for c in self._clients.values() if not c._wire.closed and (tag is None or c.tag == tag)]
            sent, gone = [], []
            for client in to:
                try:
                    sent.append((client._wire, wires.queue(client._wire, views)))
                except ClosedError:
                    continue
                except BrokenError as e:
                    gone.append(str(e))
                    self._clients.pop(client.id)

            def slow() -> str:
                return ", ".join(w.name for w, s in sent if not (s.done or w.ended is not None or w.deaf))

            over = wires.wait(
                lambda: all(s.done or w.ended is not None or w.deaf for w, s in sent),
                timeout,
                lambda: (
                    f"a broadcast has not been taken by {slow()}, which reads nothing, or has too little time for it"
                ),
            )
            if not over:
                raise TimeoutError(f"not taken for {timeout:g} s, and still on its way: {slow()}")
            gone += [f"{w.name} {w.ended or 'reads nothing more'}" for w, s in sent if not s.done and not w.closed]
        if gone:
            raise BrokenError("; ".join(gone))
        return len(sent)

    def close(self) -> None:
        """Ends all connections, and the endpoint: what was sent arrives. Closing twice is fine."""
        with self._wires.cond:
            if self._over:
                return
            self._over = True
            self._wires.cond.notify_all()
        self._file.remove()
        self._wires.close()
        self._tunnel.close()
        self._part.all.remove(self)
        with self._wires.cond:  # what they have sent goes with it, except of clients that the script has in its hands
            self._clients.clear()
            self._silent.clear()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- under the lock ----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._over:
            raise ClosedError("this endpoint is closed")

    def _open(self) -> list[Connection]:
        return [client for client in self._clients.values() if not client.closed]

    def _ready(self) -> Connection | None:
        """Returns the client whose message came first, or else one that was killed."""
        heads = [(c._wire.inbox[0][0], c.id) for c in self._clients.values() if c._wire.inbox]
        if heads:
            return self._clients[min(heads)[1]]
        return next((c for c in self._clients.values() if c._wire.ended is not None and not c._wire.closed), None)

    def _all_closed(self) -> bool:
        return self._count > 0 and not self._silent and not self._open()

    def _client(self, id: int) -> Connection:
        with self._wires.cond:
            self._check()
            if id not in self._clients:
                raise KeyError(f"no client has the number {id}; there are {sorted(self._clients)}")
            return self._clients[id]

    # ---- called by the thread of wires -------------------------------------------------------------------------------

    def _arrived(self) -> None:
        while (found := self._tunnel.accept_peer()) is not None:
            sock, peer = found
            address = self._tunnel.came_from(peer)
            with self._wires.cond:
                for wire, (_, due) in list(self._silent.items()):
                    if wire.ended is not None or due < time.monotonic():
                        wire.dropping = wire.dropping or "has not said who it is"
                        del self._silent[wire]
                if len(self._silent) >= _SILENT or self._over:
                    sock.close()
                    continue
                wire = self._wires.add(sock)
                wire.name = f"a program at {address}"
                self._silent[wire] = address, time.monotonic() + _HELLO

    def _heard(self, wire: Wire, come: Come) -> None:
        hello, known = come.said, self._silent.pop(wire, None)
        if not isinstance(hello, EndpointHello) or known is None:
            raise ProtocolError(f"a {type(hello).__name__} out of place")
        self._drop_gone_clients()
        why = ""
        if hello.version != frames.VERSION:
            why = f"it speaks version {hello.version} of these messages, and this job version {frames.VERSION}"
        elif len(there := [c for c in self._clients.values() if not c.closed or c._wire.inbox]) >= self._max:
            gone = sum(c.closed for c in there)
            why = f"there are {self._max} clients already (max_clients=)"
            why += f", with {gone} that are gone and have left messages, which nobody has taken" if gone else ""
        if why:
            self._wires.queue(wire, [memoryview(frames.frame(Refused(why)))])
            wire.said_bye = wire.refused = True
            return
        id, tag = self._count, hello.tag
        self._count += 1
        host = printable(hello.host)
        wire.admit()
        wire.name = f"client {id} ({f'tag {printable(tag)!r}, ' if tag else ''}host {host}, pid {hello.pid})"
        self._clients[id] = Connection(self._wires, wire, id, tag, known[0] or host)
        self._wires.queue(wire, [memoryview(frames.frame(Welcome(frames.VERSION, id)))])

    def _drop_gone_clients(self) -> None:
        """Drops clients that are gone and have left nothing: those that have closed, and of those that were killed, of
        which nobody was told, the oldest."""
        gone = [c for c in self._clients.values() if c._wire.ended is not None and not c._wire.inbox]
        killed = [c for c in gone if not c._wire.closed]
        for old in (*(c for c in gone if c._wire.closed), *killed[: max(0, len(killed) - self._max)]):
            del self._clients[old.id]

    def _forked(self) -> None:
        if not self._over:
            self._over = True
            self._wires.forked()
            self._tunnel.forked()
