"""A worker's bundle: all that it needs to start and to find its master. It holds the worker's secret key.

A bundle travels through an inherited pipe (or standard input, or a file of mode 0600), never through argv or the
environment. The pipe stays open after it: the pipe is the worker's life-line, and its end means that the master is
gone. The frame on the pipe: 4 bytes of length (big endian), then the bundle as JSON.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from .framing import PREFIX, length, prefixed

S = TypeVar("S", bound=msgspec.Struct)

#: The version of everything that crosses a process boundary. Raise it with every change of commands or replies.
PROTOCOL = 29

#: Seconds without an answer of another host's kernel after which it is gone for a node: the master's, where nothing
#: else tells, and that of a peer's data channel. Those of host/silence.py, for bundles that say nothing else.
SILENCE, DATA_SILENCE = 15.0, 30.0

#: disttensor's own version, which messages name.
VERSION = "0.1.0"


class ScriptPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The script of a node, for who looks at the node from a terminal of the node's host."""

    name: str  #: such as "train.py"
    host: str
    pid: int


class Bundle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The start of one worker. ``repr`` hides the secret."""

    job: str  #: the job's id
    rank: int
    address: str  #: the master's control address, such as tcp://127.0.0.1:41233
    server_key: str = ""  #: the master's CURVE public key (Z85); empty with security="none"
    public_key: str = ""  #: this worker's CURVE key pair (Z85)
    secret_key: str = ""
    #: the side channel: an address for each of the master's, in their order, and a key pair of its own; empty: none
    side_addresses: tuple[str, ...] = ()
    side_public_key: str = ""
    side_secret_key: str = ""
    backend: str = "tcp"  #: the data channel's name
    addresses: tuple[str, ...] = ()  #: more addresses of the master; the node takes the first that answers
    data_hosts: tuple[str, ...] = ()  #: where the data channel listens; empty: as ``addresses.interfaces_for`` says
    encrypt: bool | None = None  #: the protection of payloads, as in ``channel.base.Protection``
    trusted_network: bool = False
    checksum: bool = False
    nodes: int = 1  #: how many nodes the session begins with
    first: int = 0  #: the number of the first command: more than 0 for a worker in the place of a lost one
    local_rank: int = 0  #: the node's number among the nodes of its host
    local_size: int = 1  #: the number of nodes on its host
    simulate_cuda: int = 0  #: how many CUDA devices to simulate in CPU memory
    threads: int = 1  #: torch's intra-op threads; 0: the host's cores divided by its nodes
    bind: str = ""  #: the cores and GPUs that the process is bound to (see host/affinity.py)
    env: dict[str, str] = {}  #: environment variables to set
    allow_ops: tuple[str, ...] = ()  #: operators beyond aten and prims, such as "torchvision::*"
    silence: float = SILENCE  #: seconds without an answer of the master's kernel after which its host is gone
    data_silence: float = DATA_SILENCE  #: seconds without an answer of a peer's kernel after which that one is
    functions: str = "any"  #: which user functions may run: any, none
    protocol: int = PROTOCOL
    sys_path: tuple[str, ...] = ()  #: the master's import path, so that the user's modules import here too
    cwd: str = ""
    script: ScriptPlace | None = None  #: the script; None where nobody is to look at the job from other terminals
    program: tuple[str, ...] = ()  #: the program to become instead of a worker (see launch/torchrun_mode/everywhere.py)

    def __repr__(self) -> str:
        return f"<Bundle job={self.job} rank={self.rank} address={self.address}>"


def as_text(name: str) -> str:
    """Returns a name as the system has it, of a file or a variable, as text that crosses a wire: one whose bytes are no
    UTF-8 as their digits, behind a NUL, which no name has. ``as_name`` is the way back."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return "\0" + os.fsencode(name).hex()
    return name


def as_name(text: str) -> str:
    """Returns the name that ``as_text`` was given. Raises ValueError for what it never gives."""
    return os.fsdecode(bytes.fromhex(text[1:])) if text.startswith("\0") else text


def names_as_text(message: S) -> S:
    """Returns a message that has names of the system's anywhere, such as a launch spec, with all texts as ``as_text``
    has them, so that it crosses a wire. ``names_from_text`` is the way back."""
    return _texts(message, as_text)


def names_from_text(message: S) -> S:
    """Returns the message that ``names_as_text`` was given. Raises ValueError for what it never gives."""
    return _texts(message, as_name)


def _texts(message: S, change: Callable[[str], str]) -> S:
    def changed(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, dict):
            return {change(key): changed(each) for key, each in value.items()}
        return [changed(each) for each in value] if isinstance(value, (list, tuple)) else value

    return msgspec.convert(changed(msgspec.to_builtins(message)), type(message))


def write_bundle(fd: int, bundle: Bundle) -> None:
    """Writes the frame to ``fd`` and leaves it open."""
    data = prefixed(msgspec.json.encode(bundle))
    while data:
        data = data[os.write(fd, data) :]


def read_bundle(fd: int) -> Bundle:
    """Reads one frame from ``fd``. Raises EOFError on a cut pipe, ValueError on nonsense."""
    size = length(_read_exactly(fd, PREFIX))
    if size > 1 << 20:
        raise ValueError(f"a bundle of {size} bytes: this is not a disttensor life-line")
    try:
        return msgspec.json.decode(_read_exactly(fd, size), type=Bundle)
    except RecursionError as e:
        raise ValueError(f"what came is no bundle: {e}") from None


def _read_exactly(fd: int, n: int) -> bytes:
    out = b""
    while len(out) < n:
        piece = os.read(fd, n - len(out))
        if not piece:
            raise EOFError(f"the pipe ended after {len(out)} of {n} bytes")
        out += piece
    return out
