"""The idle flush: one small thread sends what was left in queues, and looks after what nobody waits for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ..process.own_time import Standstill
from ..protocol.errors import ClosedError
from .command_queue import CommandQueue
from .link_state import LinkState
from .losses import HEARD, Losses
from .outbox import MARKED
from .replies import Replies
from .requests import Requests
from .sender import Sender
from .side_channels import SideChannels

#: Commands that nobody flushed leave after about this long (seconds).
IDLE = 0.002
#: The rounds in a row with nothing to do after which the thread rests, and no longer looks at a queue.
ROUNDS = 10
#: Seconds for which the thread rests at most, when for a while nothing was left; and those between two looks at queues
#: that were used before, as what is dead rouses none.
REST = 0.5
#: Seconds between two looks for connections whose other end does not answer.
DEAF = 1.0
#: Seconds for which this process stood still after which that is said.
STILL = 5.0

#: The cause of a loss that no process has told of.
_SILENT = "nothing that it was sent has arrived for long: its host is gone, or the network to it is"
#: The cause of a node's loss that sends a message without an end.
_ENDLESS = "broke the protocol: a message that never ends"

_log = logging.getLogger("disttensor")


class IdleFlush:
    """The thread that flushes after a short idle.

    It looks at the queues that are awake only, so that a node that the script does not use costs nothing.
    """

    __slots__ = (
        "_awake", "_losses", "_marked", "_replies", "_requests", "_sender", "_side", "_state", "_swept", "_thread",
        "looks",
    )  # fmt: skip

    def __init__(
        self,
        state: LinkState,
        requests: Requests,
        losses: Losses,
        replies: Replies,
        sender: Sender,
        side: SideChannels,
    ) -> None:
        self._state, self._requests, self._losses = state, requests, losses
        self._replies, self._sender, self._side = replies, sender, side
        #: the queues that are looked at, with the number of rounds in a row in which nothing was to be done for each
        self._awake: dict[CommandQueue, int] = {}
        self._swept = 0.0  #: when the others were looked at last
        self._marked = 0.0  #: when it was noted last how much has been sent
        self.looks: list[Callable[[], object]] = []  #: are called in each round; each looks by its own clock
        self._thread = threading.Thread(target=self._run, name="disttensor-flush", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits until the thread has ended, as it does when the link is closed."""
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def _run(self) -> None:
        """Sends what an issuing thread left behind, so that nodes work while the script does something else."""
        quiet, said, looked, standstill = 0, False, 0.0, Standstill()
        try:
            while not self._state.closed:
                try:
                    looked = self._look_at_time(standstill, looked)
                    quiet = self._look_about(quiet)
                except ClosedError:  # from the hub: a Ctrl-C came while the session was made
                    return
                except Exception:  # without this thread nothing would leave by itself any more
                    if not said:
                        _log.exception("what flushes behind the script's back failed; it goes on")
                    said = True
        finally:
            self._report_standstill(standstill.look())  # of a script that ends as soon as it goes on
            standstill.close()

    def _look_at_time(self, standstill: Standstill, looked: float) -> float:
        """Does what is due now and then: has deaf connections cut, tells nodes what they could not be told before, says
        which functions go on although they were cancelled, and logs that this process stood still between two rounds.

        ``looked``: when connections were looked at. Returns that for the next call.
        """
        now, stood = self._state.clock.now(), standstill.look()
        if now - looked > DEAF:
            looked = now
            self._cut_off()
            with self._state.lock:
                if not self._state.closed:
                    self._side.cut_endless()
                    if self._side.behind:
                        self._side.send_untold(self._state.there())
        for request, cancelled in list(self._side.cancelled.items()):
            if not self._requests.is_under_way(cancelled.node, request) or cancelled.look(self._losses.look):
                del self._side.cancelled[request]
        self._report_standstill(stood)
        for look in self.looks:
            look()
        return looked

    def _mark(self, queue: CommandQueue, now: float) -> None:
        """Notes how much its nodes have been sent by now."""
        for rank in queue.ranks:
            self._state.nodes[rank].outbox.mark(now)

    def _report_standstill(self, seconds: float) -> None:
        if seconds > STILL:
            _log.warning(
                "this script stood still for %.0f s (stopped by Ctrl-Z or a debugger, or its host was): nodes have "
                "waited meanwhile, and those of this host are all there",
                seconds,
            )

    def _cut_off(self) -> None:
        """Cuts the connections that are of no use any more, and marks their nodes as lost.

        At once: that they end then, as the launcher will say, is not why they are lost.
        """
        with self._state.lock:
            for ranks, why in ((self._state.hub.cut_deaf(), _SILENT), (self._state.hub.cut_endless(), _ENDLESS)):
                for rank in ranks:
                    self._losses.lose(rank, why)

    def _look_about(self, quiet: int) -> int:
        """Does one round of the idle flush; returns the new count.

        ``quiet``: the number of rounds in a row that have found nothing to do.
        """
        state, awake = self._state, self._awake
        if quiet > ROUNDS and not awake:
            state.wake.clear()
            state.parked = True
            if not state.roused:
                state.clock.wait(state.wake, REST)
            state.parked = False
            quiet = 0
        now = state.clock.now()
        if now - self._swept >= REST:
            self._swept = now
            state.rouse_unissued()
            for queue in state.used:
                if queue.asleep and queue.has_rest:
                    state.rouse(queue)
        while state.roused:
            awake[state.roused.popleft()] = 0
        before = [(queue, queue.moved, len(queue.queue)) for queue in awake]
        state.clock.sleep(IDLE)
        if state.closed:
            return 0
        quiet += 1
        state.interrupts.remind()
        for queue, moved, queued in before:
            left = queue.left
            awake[queue] += 1
            if queue.moved != moved and not left:
                awake[queue] = quiet = 0
            elif (queued or queue.dead or left or queue.unheld) and queue.there:
                awake[queue] = quiet = 0
                with state.lock:
                    if not state.closed and (left or not queue.full):
                        self._sender.pack_and_send(queue)
            elif awake[queue] > ROUNDS:
                with state.lock:
                    if queue.sleep():
                        del awake[queue]
                        self._mark(queue, now)
        if now - self._marked >= MARKED:
            self._marked = now
            for queue in awake:
                self._mark(queue, now)
        if self._losses.launcher is not None and not self._losses.ask_launcher():
            self._losses.give_up_late(HEARD)
        if self._losses.launcher is not None or quiet == 1:
            self._replies.lock_and_take_in()
        return quiet
