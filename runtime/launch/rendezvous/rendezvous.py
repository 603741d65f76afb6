"""The rendezvous of a master and its nodes, as ``init_method`` names it, and what each side makes of that.

    env://              MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, as torch.distributed's scripts have them
    tcp://host:port     the same, in the call; nodes prove themselves by the user's secret file
    file:///path        a connection file, which the master writes and removes
    slurm://            the tasks of one srun, with a connection file of its own; slurm:///path: with that one
    torchrun            what env:// means under torchrun, which has a store of its own at that port

As in torch.distributed every process may run the same script: rank 0 is the master, the others are its nodes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qs, quote_from_bytes, unquote, urlsplit

import msgspec

from ...host import slurm_env
from .credentials import Invitation, derived, invite, read_connection_file, shared_secret

#: Forms of init_method, for messages.
FORMS = "'local://', 'env://', 'tcp://host:port', 'file:///path', 'slurm://'"


@dataclass(frozen=True)
class Rendezvous:
    """A rendezvous. ``rank`` and ``size`` count the processes of one script; None where nobody has said."""

    kind: str  #: "tcp", "file", "slurm" or "torchrun"
    host: str = ""
    port: int = 0
    path: str = ""
    run: str = ""  #: the name of torchrun's run, so that one run does not meet another
    rank: int | None = None
    size: int | None = None
    local_rank: int = -1  #: among the processes of its host, where something outside knows
    local_size: int = 0

    beside: bool = True  #: rank 0, the master, is on this host as well, where something outside knows
    interface: tuple[str, ...] = ()  #: where the master is to listen; empty: the other fields decide

    def __str__(self) -> str:
        return f"{self.kind}://{self.path}" if self.path else f"{self.kind}://{_bracketed(self.host)}:{self.port}"

    @property
    def options(self) -> dict[str, str]:
        """The options of the root's launch spec."""
        if self.path:
            return {"connection_file": self.path}
        found = {"host": self.host, "port": str(self.port), "rendezvous": self.name}
        if self.kind == "torchrun":  # which itself listens there
            found |= {"port": "0", "store": str(self.port)}
        return found

    @property
    def name(self) -> str:
        """The name for which keys are derived from the secret: the same at both ends, whatever they call the host."""
        return f"port {self.port} {self.run}".rstrip()

    @property
    def assigned(self) -> tuple[int, int, int]:
        """The rank of this process's node, its rank among those of its host, and their number (-1, 0: unknown)."""
        rank, master = (self.rank or 0) - 1, int(self.beside)
        return (rank, self.local_rank - master, self.local_size - master) if self.local_size else (rank, -1, 0)

    def invitation(self, timeout: float) -> Invitation:
        """Returns a joining agent's invitation; waits up to ``timeout`` seconds where the master has to make it first.

        Raises StartError when it is not there in time, or there is no secret.
        """
        if self.path:
            return read_connection_file(self.path, timeout)
        addresses: tuple[str, ...] = (f"tcp://{_bracketed(self.host)}:{self.port}",)
        if self.kind == "torchrun":
            from .torchrun import look_up

            addresses = look_up(self.host, self.port, self.name, timeout)
        made = invite(derived(shared_secret(), self.name), addresses)
        return msgspec.structs.replace(made, host="", pid=0, made="", place="")


def find_rendezvous(
    init_method: str,
    rank: int | None = None,
    size: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Rendezvous | None:
    """Parses an ``init_method``; None for "local://". Raises ValueError for one that says too little or is unknown."""
    url = urlsplit(init_method)
    query = {name: values[0] for name, values in parse_qs(url.query).items()}
    rank = _number(query, "rank", init_method) if rank is None else rank
    size = _number(query, "world_size", init_method) if size is None else size
    match url.scheme:
        case "local":
            found = None
        case "env":
            found = _of_environment(environ, rank, size)
        case "tcp" | "torchrun":
            try:
                host, port = url.hostname or "", url.port or 0
            except ValueError:
                host, port = "", 0
            if host and url.netloc.endswith(":0"):
                raise ValueError(
                    f"init_method {init_method!r}: port 0 is any that is free, and here all processes have to know "
                    "which: name one, as in tcp://node1:29500"
                )
            if not host or not port:
                raise ValueError(f"init_method {init_method!r} names no host and port, as in tcp://node1:29500")
            found = Rendezvous(url.scheme, host, port, rank=rank, size=size)
        case "file":
            path = _path_of(url)
            if not os.path.isabs(path):
                raise ValueError(f"init_method {init_method!r} names no absolute path, as in file:///home/me/job")
            found = Rendezvous("file", path=path, rank=rank, size=size)
        case "slurm":
            found = of_slurm(environ, _path_of(url), rank, size)
        case _:
            raise ValueError(f"init_method {init_method!r} is unknown; it is one of {FORMS}")
    if found is not None:
        _check(found, init_method)
    return found


def url_of(scheme: str, path: str) -> str:
    """Returns the ``init_method`` that names a file, whatever its name is made of."""
    return f"{scheme}://{quote_from_bytes(os.fsencode(path))}"


def _path_of(url: SplitResult) -> str:
    return unquote(url.netloc + url.path, errors="surrogateescape")  # as the system's names have what is no UTF-8


def _of_environment(environ: Mapping[str, str], rank: int | None, size: int | None) -> Rendezvous:
    named = ["MASTER_ADDR", "MASTER_PORT"] + ["RANK"] * (rank is None) + ["WORLD_SIZE"] * (size is None)
    if missing := [name for name in named if not environ.get(name)]:
        raise ValueError(f"init_method 'env://' needs {' and '.join(missing)} in the environment")
    under_torchrun = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Rendezvous(
        "torchrun" if under_torchrun else "tcp",
        environ["MASTER_ADDR"],
        _number(environ, "MASTER_PORT", "env://") or 0,
        run=f"{environ.get('TORCHELASTIC_RUN_ID', '')} {environ.get('TORCHELASTIC_RESTART_COUNT', '')}".strip()
        if under_torchrun
        else "",
        rank=_number(environ, "RANK", "env://") if rank is None else rank,
        size=_number(environ, "WORLD_SIZE", "env://") if size is None else size,
        local_rank=_number(environ, "LOCAL_RANK", "env://", -1) or 0,
        local_size=_number(environ, "LOCAL_WORLD_SIZE", "env://", 0) or 0,
        beside=environ.get("GROUP_RANK", "0") == "0",
    )


def of_slurm(
    environ: Mapping[str, str] = os.environ, path: str = "", rank: int | None = None, size: int | None = None
) -> Rendezvous:
    """Returns the rendezvous of the tasks of one srun. Raises ValueError in a process that is not a task."""
    task = slurm_env.task(environ)
    if task is None:
        raise ValueError("init_method 'slurm://' needs the tasks of one srun: srun -n 5 python script.py")
    return Rendezvous(
        "slurm",
        path=path or slurm_env.connection_file(task.name, environ),
        interface=slurm_env.own_addresses(environ) if task.hosts > 1 else (),
        rank=task.rank if rank is None else rank,
        size=task.size if size is None else size,
        local_rank=task.local_rank,
        local_size=task.local_size,
        beside=task.host == 0,
    )


def _number(source: Mapping[str, str], name: str, of: str, default: int | None = None) -> int | None:
    text = source.get(name)
    try:
        return default if text is None else int(text)
    except ValueError:
        raise ValueError(f"init_method {of!r}: {name} is {text!r}, which is no number") from None


def _check(found: Rendezvous, init_method: str) -> None:
    if found.rank is not None and (found.rank < 0 or found.rank >= (found.size or sys.maxsize)):
        raise ValueError(f"init_method {init_method!r}: rank={found.rank} with world_size={found.size}")
    if found.rank and found.size is None:
        raise ValueError(f"init_method {init_method!r}: rank={found.rank} without world_size")
    if not 0 <= found.port < 1 << 16:
        raise ValueError(f"init_method {init_method!r}: {found.port} is no port")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
