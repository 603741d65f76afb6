"""The thread that answers nodes' requests, by connections of their own to a hub of its own.

node: Client --pieces--> hub --> Service --> Objects.ask
             <--pieces-- hub <-- Service <-- answer: by whichever thread has put, taken, or lost something

A connection that has ended has lost requests and answers, and nobody knows which: its node is lost. Else the lock of a
function that goes on there would be given to another one, and a wait for what that node puts would not end.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from ..process.clock import CLOCK, Clock
from ..protocol import shared_objects as s
from ..protocol.errors import BrokenError, ProtocolError
from ..transport.base import Hub
from .objects import Objects

#: Bytes of answers that a node has not read, up to which it is sent more.
WINDOW = 8 << 20
#: The most answers that wait for a node to read.
MAX_UNREAD = 8192
#: Bytes that a message counts beside its own.
_AROUND = 64
#: Why a node is lost.
_ENDED = "its connection for what the script holds for all, such as channels and locks, has ended"
_SILENT = "its host, or the network to it, has not answered to what the script holds for all"
#: Seconds between two looks at what must not be.
_LOOK = 1.0


class _Peer:
    """A node's connection."""

    def __init__(self) -> None:
        self.joining = s.Joining()
        self.answers: deque[s.ObjectAnswer] = deque()  #: not sent yet
        self.pieces: deque[bytes] = deque()  #: of the answer that is being sent
        self.unread = 0


class Service:
    """The thread, and the hub, which it alone uses."""

    def __init__(self, hub: Hub, objects: Objects, lose: Callable[[int, str, int], None], clock: Clock = CLOCK) -> None:
        """``lose`` declares a node lost, says why, as its connection has ended, and whose that was: the incarnation.
        The node may be lost, or ending, already, and another worker in its place. It holds what it has until
        ``Objects.lost``."""
        self._hub, self._objects, self._lose, self._clock = hub, objects, lose, clock
        self._incarnations: dict[int, int] = {}  #: by node: that of the worker whose connection it has
        self._peers: dict[int, _Peer] = {}
        self._ready: deque[int] = deque()  #: nodes for which there are answers
        #: workers in the places of lost nodes: rank, key, incarnation, and what is set when they may come
        self._returning: deque[tuple[int, str, int, threading.Event]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="disttensor-service", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Service {self._hub!r} {self._objects!r}>"

    def admit(self, keys: Mapping[int, str], known: set[int], incarnation: Callable[[int], int]) -> None:
        """Lets in further nodes, by their public keys; ``known`` are in already. ``incarnation``: that of a node."""
        for rank, key in list(keys.items()):
            self._incarnations.setdefault(rank, incarnation(rank))
            if rank not in known:
                known.add(rank)
                self._hub.admit(rank, key)

    def readmit(self, rank: int, key: str, incarnation: int) -> None:
        """Lets in another worker in the place of a lost node, by its public key, unless it has been let in already.
        Waits for this service's thread."""
        if self._incarnations.get(rank) == incarnation:
            return
        done = threading.Event()
        self._returning.append((rank, key, incarnation, done))
        os.eventfd_write(self._wake, 1)
        while not (done.wait(_LOOK) or self._closed):
            pass

    def _take_back(self) -> None:
        while self._returning:
            rank, key, incarnation, done = self._returning.popleft()
            self._peers.pop(rank, None)
            self._hub.readmit(rank, key)
            self._incarnations[rank] = incarnation
            done.set()

    def close(self) -> None:
        """Ends the thread, and the connections."""
        if not self._closed:
            self._closed = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)
            self._hub.close()

    def forked(self) -> None:
        """Closes a forked child's copy of the connections."""
        if not self._closed:
            self._closed = True
            os.close(self._wake)
            self._hub.forked()

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.register(self._hub.fileno(), select.POLLIN)
        looked = self._clock.now()
        while not self._closed:
            self._clock.poll(poller, _LOOK)
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            self._take_back()
            # until there is nothing more: a send may have consumed what makes the hub readable
            while self._turn() and not self._closed:
                pass
            if self._clock.now() - looked >= _LOOK:
                looked = self._clock.now()
                for rank in self._hub.cut_deaf():
                    self._drop_peer(rank, _SILENT)
                self._hub.cut_endless()

    def _turn(self) -> bool:
        """Takes what has come, and sends what can be sent. Returns whether there was something."""
        messages = self._hub.drain()
        for rank, message in messages:
            try:
                self._handle_message(rank, message)
            except ProtocolError as e:
                self._drop_peer(rank, f"broke the protocol of what the script holds for all: {e}")
                self._hub.cut(rank)
        for rank in self._hub.gone():
            self._drop_peer(rank, _ENDED)
        sent = False
        while self._ready:
            sent = True
            rank = self._ready.popleft()
            if (peer := self._peers.get(rank)) is not None:
                self._send(rank, peer)
        return bool(messages) or sent

    def _handle_message(self, rank: int, message: bytes) -> None:
        peer = self._peers.setdefault(rank, _Peer())
        whole = peer.joining.add(message)
        if whole is None:
            return
        match request := s.decode_request(whole):
            case s.Withdraw():
                self._objects.withdraw(rank, request.call)
            case s.Read():
                peer.unread = max(0, peer.unread - request.nbytes)
                self._send(rank, peer)
            case _:
                if len(peer.answers) >= MAX_UNREAD:
                    raise ProtocolError(f"it has not read {len(peer.answers)} answers")

                def answer(said: s.ObjectAnswer) -> None:
                    peer.answers.append(said)
                    self._ready.append(rank)
                    if threading.get_ident() != self._thread.ident and not self._closed:
                        os.eventfd_write(self._wake, 1)

                self._objects.ask(rank, request, answer)

    def _send(self, rank: int, peer: _Peer) -> None:
        with suppress(BrokenError):
            while peer.unread < WINDOW and (peer.pieces or peer.answers):
                if not peer.pieces:
                    peer.pieces.extend(s.pieces(s.encode(peer.answers.popleft())))
                piece = peer.pieces.popleft()
                peer.unread += len(piece) + _AROUND
                self._hub.send(rank, piece)

    def _drop_peer(self, rank: int, why: str) -> None:
        self._peers.pop(rank, None)
        self._lose(rank, why, self._incarnations.get(rank, 0))
