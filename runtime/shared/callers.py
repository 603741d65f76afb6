"""How a handle asks: in the script at once, in a function on a node by the node's own connection."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from queue import SimpleQueue

from ..node.own_bundle import own
from ..process.signals import uninterrupted
from ..protocol import shared_objects as s
from ..protocol.errors import ChannelError, DisttensorError, ProtocolError
from ..protocol.shared_objects import ObjectAnswer
from ..transport.spoke import ZmqSpoke
from .objects import SCRIPT, Objects
from .waiting import AnswerSlot

#: Bytes of answers after which the script is told that they were read.
_TOLD = 1 << 20
#: Bytes that a message counts beside its own, as in the service.
_AROUND = 64


def back(asked: s.Asking, taken: ObjectAnswer, call: int) -> s.Asking | None:
    """Returns the request that gives back what nobody is there to have; None where there is nothing."""
    match asked:
        case s.Take() if taken.said == s.OK and taken.item is not None:
            return s.Put(call, (taken.of,), taken.item, back=True)
        case s.Acquire() if taken.said == s.OK:
            return s.Release(call, asked.of, asked.holder, back=True)
        case s.Arrive() if taken.said == s.ACT:
            return s.Abort(call, asked.of, asked.who, "was interrupted", acting=asked.call)
        case s.Lease() if taken.said == s.OK:
            return s.Return(call, asked.of, asked.holder, lease=taken.count)
        case s.DictEntry(do=s.POP | s.POP_LAST) if taken.said == s.OK and len(taken.keys) == 2:
            shown, key = taken.keys  # where nobody has set it meanwhile
            return s.DictEntry(call, asked.of, s.SET_DEFAULT, key, shown, taken.item)
    return None


class Local:
    """Asks in the script's process. ``begin`` is called before it waits: what was issued is to be on its way; ``told``
    with the rank of a node of whose loss an answer tells; ``noting`` with what is waited for, and it waits therein."""

    def __init__(
        self,
        objects: Objects,
        begin: Callable[[], None],
        told: Callable[[int], object] = lambda rank: None,
        noting: Callable[[s.Asking], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.objects, self._begin, self._told, self._noting = objects, begin, told, noting
        self._later: SimpleQueue[s.Asking | None] = SimpleQueue()
        self._telling: threading.Thread | None = None  #: asks what finalizers have to tell
        self._starting = threading.Lock()

    def number(self) -> int:
        return next(self.objects.numbers)

    def ask(self, request: s.Asking, timeout: float | None = None) -> ObjectAnswer:
        slot = AnswerSlot(request)
        try:
            self.objects.ask(SCRIPT, request, slot.fill)
            if slot.answer is None:
                self._begin()
                with self._noting(request):
                    come = slot.wait(timeout)
                if come is None:
                    self.objects.withdraw(SCRIPT, request.call)
            answer: ObjectAnswer = slot.wait()  # type: ignore[assignment]
        except BaseException:
            self._abandon(slot)
            raise
        if answer.said == s.LOST:
            self._told(answer.count)
        return answer

    def ask_async(self, slot: AnswerSlot) -> None:
        self.objects.ask(SCRIPT, slot.request, slot.fill)

    def notify(self, request: s.Asking) -> None:
        self.objects.ask(SCRIPT, request, lambda _: None)

    def notify_later(self, request: s.Asking) -> None:
        self._later.put(request)

    def expect_later(self) -> None:
        """Has what ``notify_later`` gets be asked from now on."""
        with self._starting:
            if self._telling is None:
                thread = threading.Thread(target=self._send_later, name="disttensor-dropped", daemon=True)
                thread.start()  # raises where the system has none for it: the next one tries again
                self._telling = thread

    def close(self) -> None:
        """Ends the thread, if there is one."""
        self._later.put(None)

    def _send_later(self) -> None:
        while (request := self._later.get()) is not None:
            self.notify(request)

    @uninterrupted
    def _abandon(self, slot: AnswerSlot) -> None:
        self.objects.withdraw(SCRIPT, slot.request.call)
        if slot.answer is not None and (put := back(slot.request, slot.answer, self.number())) is not None:
            self.notify(put)


class Client:
    """Asks from a node. Two threads send and receive, so that an interrupt never splits a message."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        """``addresses``: the service's, in the order of the script's. Raises BrokenError."""
        bundle, at = own()
        self._spoke = ZmqSpoke(
            addresses[at], bundle.server_key, bundle.side_public_key, bundle.side_secret_key, bundle.rank,
            silence=bundle.silence,
        )  # fmt: skip
        self._numbers = count()
        self._slots: dict[int, AnswerSlot] = {}
        self._lock = threading.Lock()
        self._ended = ""
        self._out: SimpleQueue[bytes | s.Request | None] = SimpleQueue()
        for serve in (self._sending, self._receiving):
            threading.Thread(target=serve, name="disttensor-service", daemon=True).start()

    def number(self) -> int:
        return next(self._numbers)

    def ask(self, request: s.Asking, timeout: float | None = None) -> ObjectAnswer:
        slot = AnswerSlot(request)
        try:
            self.ask_async(slot)
            if slot.wait(timeout) is None:
                self._out.put(s.Withdraw(request.call))
            answer = slot.wait()
        except BaseException:
            self._abandon(slot)
            raise
        if answer is None or answer.said == s.ENDED:
            raise DisttensorError(self._ended or "the session has ended")
        return answer

    def ask_async(self, slot: AnswerSlot) -> None:
        own()  # a process that was forked has the connection, and nobody who uses it
        message = s.encode_request(slot.request)
        self._slots[slot.request.call] = slot
        self._out.put(message)
        if self._ended:
            raise DisttensorError(self._ended)

    def notify(self, request: s.Asking) -> None:
        self._out.put(s.encode_request(request))

    notify_later = notify  # a put takes no lock that a finalizer could wait for

    def expect_later(self) -> None:
        """Does nothing: a thread sends what it gets already."""

    def _abandon(self, slot: AnswerSlot) -> None:
        with self._lock:
            slot.abandoned = True
            answer = slot.answer
        if answer is None:
            self._out.put(s.Withdraw(slot.request.call))
        elif (put := back(slot.request, answer, self.number())) is not None:
            self._out.put(put)

    def _sending(self) -> None:
        while (request := self._out.get()) is not None:
            try:
                for piece in s.pieces(request if isinstance(request, bytes) else s.encode(request)):
                    self._spoke.send(piece)
            except ChannelError:
                return  # the receiving thread finds it out, too

    def _receiving(self) -> None:
        joining, read = s.Joining(), 0
        try:
            while True:
                piece = self._spoke.recv()
                if piece is None:
                    continue
                read += len(piece) + _AROUND
                if read >= _TOLD:
                    self._out.put(s.Read(read))
                    read = 0
                if (whole := joining.add(piece)) is not None:
                    self._answered(s.decode_answer(whole))
        except (ChannelError, ProtocolError) as e:
            self._ended = f"what the script holds for all can't be used here any more: {e}"
            if isinstance(e, ProtocolError):
                print(f"disttensor: {self._ended}", file=sys.stderr)
            self._out.put(None)
            for slot in list(self._slots.values()):
                self._fill(slot, ObjectAnswer(0, s.ENDED))

    def _answered(self, answer: ObjectAnswer) -> None:
        slot = self._slots.pop(answer.call, None)
        if slot is None or self._fill(slot, answer):
            return
        if (put := back(slot.request, answer, self.number())) is not None:
            self._out.put(put)

    def _fill(self, slot: AnswerSlot, answer: ObjectAnswer) -> bool:
        """Gives an answer to who waits; returns False where nobody does any more."""
        with self._lock:
            if slot.answer is None and not slot.abandoned:
                slot.fill(answer)
                return True
            return False


_client: list[Client] = []
_connecting = threading.Lock()


def client(addresses: tuple[str, ...]) -> Client:
    """Returns this node's connection, which the first call makes, to one of the service's addresses."""
    with _connecting:
        if not _client:
            _client.append(Client(addresses))
        return _client[0]
