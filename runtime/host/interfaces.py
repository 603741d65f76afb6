"""This machine's network interfaces, and the addresses that others mean by a name."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

_SIOCGIFCONF = 0x8912  # Linux's: all IPv4 addresses with their interfaces
_ENTRY = 40  # bytes of a struct ifreq
_LINK_LOCAL = 0x20  # scope, in /proc/net/if_inet6


def interfaces() -> dict[str, list[str]]:
    """Returns the addresses of each interface, without IPv6's link-local ones, which need more than a number."""
    found: dict[str, list[str]] = {}
    room = array.array("B", bytes(_ENTRY * 1024))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("iL", len(room), room.buffer_info()[0])
        size, _ = struct.unpack("iL", fcntl.ioctl(sock, _SIOCGIFCONF, request))
    data = room.tobytes()[:size]
    for entry in (data[at : at + _ENTRY] for at in range(0, size, _ENTRY)):
        name = entry[:16].split(b"\0")[0].decode().partition(":")[0]  # eth0:1 is another address of eth0
        found.setdefault(name, []).append(socket.inet_ntoa(entry[20:24]))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        number, _, _, scope, _, name = line.split()
        if int(scope, 16) != _LINK_LOCAL:
            found.setdefault(name, []).append(str(ipaddress.ip_address(bytes.fromhex(number))))
    return found


def addresses_of(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the addresses of this machine for names, each of which is an interface, an address or a host name.

    In the order of the names, but loopback ones last: other hosts have to reach the first one. Raises ValueError for
    a name that is not this machine's, with the machine's addresses.
    """
    out: dict[str, None] = {}
    for name in names:
        out.update(dict.fromkeys(interfaces().get(name) or listening_as(name)))
    return tuple(sorted(out, key=is_loopback))


def listening_as(host: str) -> tuple[str, ...]:
    """Returns the addresses to listen on for peers that know this machine as ``host``, a name or an address.

    A machine may know its own name as a loopback address (Debian's 127.0.1.1), where nobody else reaches it: then it is
    all its addresses. Raises ValueError for a name that does not resolve, or is another machine's.
    """
    try:
        found = dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except OSError as e:
        raise ValueError(f"{host!r} is no interface of this machine, and does not resolve ({e}); {_known()}") from e
    own = {address for addresses in interfaces().values() for address in addresses}
    mine = [address for address in found if address in own or is_loopback(address)]
    if not mine:
        raise ValueError(f"{host!r} is {', '.join(found)}, which is not this machine; {_known()}")
    if all(map(is_loopback, mine)) and not (host == "localhost" or host in mine):
        mine = [*sorted(address for address in own if not is_loopback(address)), *mine]  # others reach these
    return tuple(mine)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _known() -> str:
    return "it has " + ", ".join(f"{name} ({', '.join(found)})" for name, found in interfaces().items())
