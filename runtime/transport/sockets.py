"""Makes all ZeroMQ contexts and sockets: the one place that does, so that no socket lacks one of these options."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import zmq
import zmq.backend

from ..host import descriptors
from ..host.silence import Silence

Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]

#: The largest message that ``send`` accepts. A larger one would not arrive: it would cut the connection, and take the
#: messages behind it along.
MAX_MESSAGE = 1 << 20

#: The largest frame that a socket takes in: a message and the bytes that CURVE adds. Without a limit a stranger's
#: "1 GiB hello" is given memory before any check.
FRAME_LIMIT = MAX_MESSAGE + 64

#: The most messages of one node that libzmq holds for the master, and of its side channel.
MOST_UNREAD, SIDE_UNREAD = 1024, 16

#: Connections that wait for libzmq to accept them: nodes come by the hundred, and on a busy host it comes late.
BACKLOG = 1024

#: The time for which ``close`` tries to send queued messages, in milliseconds.
FLUSH_MS = 500

#: A handshake that takes longer is cut off (libzmq's default is 30 s, in which silent strangers hold descriptors).
HANDSHAKE_MS = 2000

#: A reconnect that far off (a day, in milliseconds) doesn't happen: the socket is closed long before.
NEVER_MS = 24 * 3600 * 1000

#: Seconds without an answer of the other end's kernel after which a connection is given up.
SILENCE = Silence().lost
#: The number of vain probes by then, and the most that the kernel can be told.
_PROBES, _MOST_ASKED = 5, 127
#: The most seconds without a word after which the kernels ask.
_ASKS_AFTER = 5

#: Names the CURVE and plain listeners to the ZAP handler. It has to be set, or the handler is never asked.
ZAP_DOMAIN = b"disttensor"


class Curve(NamedTuple):
    """CURVE keys of one end, Z85 text. ``server`` is the listener's public key; None on the listener itself."""

    public: str
    secret: str
    server: str | None = None


#: Invariant 10: sockets of ZeroMQ are made in this module only.
def context() -> Context:
    """Makes a context for one owner: the ZAP handler is per context, and closing it ends its sockets and threads.

    Raises OSError where this process has too few file descriptors left: libzmq would end it.
    """
    descriptors.check_context()
    return zmq.Context(1)


def router(
    ctx: Context, endpoint: str, curve: Curve | None, unread: int = MOST_UNREAD, silence: float = SILENCE
) -> zmq.Socket[bytes]:
    """Makes the master's listening socket, to be bound to ``endpoint``. ``silence`` is as for ``dealer``."""
    sock = _tcp(ctx, zmq.ROUTER, endpoint, curve, silence)
    # libzmq stops to read from a node that is faster than the master: what is left waits on the node's host
    sock.setsockopt(zmq.RCVHWM, unread)
    sock.setsockopt(zmq.BACKLOG, BACKLOG)
    sock.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else a message that cannot be routed is dropped silently
    sock.setsockopt(zmq.ROUTER_HANDOVER, 0)  # else a second peer of the same name takes over the first's traffic
    sock.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a ZAP handler nobody gets in, instead of everybody
    return sock


def bind(sock: zmq.Socket[bytes], endpoint: str) -> str:
    """Listens on ``endpoint``, beside earlier ones; returns it with its port. Raises ZMQError."""
    _set_family(sock, endpoint)
    sock.bind(endpoint)
    return sock.getsockopt_string(zmq.LAST_ENDPOINT)


def dealer(
    ctx: Context, endpoint: str, curve: Curve | None, name: bytes, silence: float = SILENCE
) -> zmq.Socket[bytes]:
    """Makes a node's socket, to be connected to ``endpoint`` once: a cut connection has lost messages and stays cut.

    It is given up when the other end's kernel has not answered for ``silence`` seconds: that host is gone, or the
    network to it. The kernel of a stopped process answers, so nobody is lost by Ctrl-Z, as by heartbeats.
    """
    sock = _tcp(ctx, zmq.DEALER, endpoint, curve, silence)
    # where nothing is under way it counts from when something was heard last
    sock.setsockopt(zmq.TCP_MAXRT, int((silence + _idle(silence)) * 1000))
    sock.setsockopt(zmq.ROUTING_ID, name)
    # Never, in effect. The official "never" (-1) and IMMEDIATE both throw away, at the connection's end, the messages
    # that have arrived and were not read yet, such as the master's order to stop.
    sock.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
    return sock


def pair(ctx: Context) -> zmq.Socket[bytes]:
    """Makes a socket for a monitor's events. HWM 0: at a full queue libzmq would block its I/O thread."""
    return _plain(ctx, zmq.PAIR)


def rep(ctx: Context) -> zmq.Socket[bytes]:
    """Makes a socket that answers ZAP requests."""
    return _plain(ctx, zmq.REP)


class RawCalls(NamedTuple):
    """pyzmq's compiled methods, at half the cost of the Python ones around them. Flags and options are plain ints."""

    send: Callable[[bytes, int], object]
    recv: Callable[[int], bytes]
    recv_frame: Callable[[int, bool], zmq.Frame]  #: the second argument, ``copy``, is False
    getsockopt: Callable[[int], int]


def raw_calls(sock: zmq.Socket[bytes]) -> RawCalls:
    """Returns the calls of the hot path, bound to ``sock``."""
    base = zmq.backend.Socket
    recv = base.recv.__get__(sock)
    return RawCalls(base.send.__get__(sock), recv, recv, base.get.__get__(sock))


def _plain(ctx: Context, kind: int) -> zmq.Socket[bytes]:
    sock = ctx.socket(kind)
    sock.setsockopt(zmq.LINGER, 0)  # else an undeliverable message hangs the exit
    # The outbox's window limits what is in flight. A ZeroMQ limit for sending would drop (ROUTER, measured).
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    return sock


def _tcp(ctx: Context, kind: int, endpoint: str, curve: Curve | None, silence: float) -> zmq.Socket[bytes]:
    sock = _plain(ctx, kind)
    _set_family(sock, endpoint)
    sock.setsockopt(zmq.MAXMSGSIZE, FRAME_LIMIT)
    sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    # While nothing is under way the kernels ask each other. The limit counts from the first vain probe: when something
    # was heard last, the network was there still.
    interval = max(1, round(silence / _PROBES))
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sock.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _idle(silence))
    sock.setsockopt(zmq.TCP_KEEPALIVE_INTVL, interval)
    sock.setsockopt(zmq.TCP_KEEPALIVE_CNT, min(_MOST_ASKED, math.ceil(silence / interval)))
    if curve is not None:
        sock.setsockopt(zmq.CURVE_PUBLICKEY, curve.public.encode())
        sock.setsockopt(zmq.CURVE_SECRETKEY, curve.secret.encode())
        if curve.server is None:
            sock.setsockopt(zmq.CURVE_SERVER, 1)
        else:
            sock.setsockopt(zmq.CURVE_SERVERKEY, curve.server.encode())
    return sock


def _idle(silence: float) -> int:
    """Returns the seconds without a word after which the kernels ask: a connection may end so much later than after
    ``silence``, and never sooner."""
    return min(_ASKS_AFTER, max(1, round(silence / 10)))


def _set_family(sock: zmq.Socket[bytes], endpoint: str) -> None:
    """Sets the family of the next bind or connect: an IPv4 address would become an IPv6 one where both are allowed."""
    sock.setsockopt(zmq.IPV6, int("[" in endpoint))  # tcp://[::1]:1
