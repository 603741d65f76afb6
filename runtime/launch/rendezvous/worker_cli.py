"""``dtrun worker``: nodes that join a job which did not start them.

    dtrun worker --connection-file F          torchrun --nproc-per-node 4 -m disttensor.run worker
        invitation --> tunnel (CURVE) --> an agent as any other, whose hello says how many nodes it is for

A script that finds itself to be a node (rank 1 and above of ``init_method``) becomes this command by ``execv``, so
that nothing of the script goes on in it; its invitation goes along in a file that is nowhere but in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import msgspec

from ...host import descriptors, slurm_env
from ...host.addresses import split
from ...host.affinity import OWN, gpus
from ...host.precedence import setting
from ...process.lifetime import name_process
from ...process.signals import Interrupts
from ...protocol.errors import BrokenError, ProtocolError, StartError
from ...transport.tunnel import TunnelClient
from ..tree.agent import Agent, agent_hello
from ..tree.control import LaunchFailed, Order
from ..tree.framed import FramedSocket, FramedStream
from ..tree.spawn import BOOT
from .credentials import Invitation, decode_invitation, secret_file
from .rendezvous import Rendezvous, find_rendezvous


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    it = _Parser(prog="dtrun worker", description="Join a job with nodes on this host.", allow_abbrev=False)

    def add(name: str, *names: str, **how: object) -> None:
        other = "--" + name[2:].replace("-", "_")
        it.add_argument(*names, name, *([other] if other != name else []), **how)  # type: ignore[arg-type]

    add("--nproc-per-node", "-n", dest="slots", metavar="N", type=int, default=1, help="how many nodes (default: 1)")
    add("--connection-file", metavar="FILE", help="which the job has written, or will write")
    add("--master-addr", metavar="HOST", help="where the job is, by name or address")
    add("--master-port", metavar="PORT", help="its port")
    add("--init-method", metavar="URL", help="the same as tcp://host:port or file:///path; env:// by the environment")
    add("--rank", metavar="R", type=int, help="which nodes these are, from R on (default: any)")
    add(
        "--timeout",
        metavar="S",
        type=float,
        default=setting("timeout", None, {}),
        help="seconds for the job to be there (default: 60)",
    )
    it.add_argument("--invitation-fd", type=int, help=argparse.SUPPRESS)
    it.add_argument("--local", type=int, nargs=2, default=(-1, 0), help=argparse.SUPPRESS)
    return it


def main(argv: Sequence[str] | None = None) -> int:
    """Joins a job, and returns the exit code when all its nodes have ended. Never raises for users' mistakes."""
    it = _parser()
    try:
        options = it.parse_args(argv)
        found = None if options.invitation_fd is not None else _where(options)
    except SystemExit as e:
        return int(e.code or 0)
    except ValueError as e:
        print(f"dtrun worker: error: {e}", file=sys.stderr)
        return 2
    rank, local = options.rank if options.rank is not None else -1, tuple(options.local)
    if found is not None and found.kind == "slurm" and options.slots == 1:
        _note_own()
    if found is not None and found.kind != "file" and options.rank is None and found.rank is not None:
        rank, local = found.rank, (found.local_rank, found.local_size)  # all ranks are nodes
    interrupts = Interrupts()  # so that a Ctrl-C is not lost where Python swallows it, as in an import's callbacks
    interrupts.look()
    try:
        invitation = _read_invitation(options.invitation_fd) if found is None else found.invitation(options.timeout)
        return join(invitation, options.timeout, options.slots, rank, *local, typed=found is not None)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except StartError as e:
        print(f"dtrun worker: error: {e}", file=sys.stderr)
        return 1
    finally:
        interrupts.restore()


def _where(options: argparse.Namespace) -> Rendezvous:
    if options.slots < 1:
        raise ValueError(f"--nproc-per-node {options.slots}: at least one is needed")
    told = [bool(options.connection_file), bool(options.master_addr or options.master_port), bool(options.init_method)]
    if sum(told) > 1:
        raise ValueError("--connection-file, --master-addr and --init-method say where the job is: give one of them")
    if options.connection_file:
        return Rendezvous("file", path=os.path.abspath(options.connection_file))
    if told[1]:
        if not (options.master_addr and options.master_port):
            raise ValueError("--master-addr and --master-port go together")
        host = f"[{options.master_addr}]" if ":" in options.master_addr else options.master_addr
        return find_rendezvous(f"tcp://{host}:{options.master_port}")  # type: ignore[return-value]
    if not options.init_method and "MASTER_ADDR" not in os.environ:
        raise ValueError("where is the job? Give --connection-file, --master-addr and --master-port, or --init-method")
    found = find_rendezvous(options.init_method or "env://")
    if found is not None and found.kind == "torchrun":
        found = replace(found, run="")  # all ranks are nodes here, and their master knows nothing of torchrun's runs
    if found is None:
        raise ValueError(f"--init-method {options.init_method}: nodes of this machine are started by dtrun itself")
    return found


def join(
    invitation: Invitation,
    timeout: float,
    slots: int = 1,
    rank: int = -1,
    local_rank: int = -1,
    local_size: int = 0,
    *,
    typed: bool = False,
) -> int:
    """Makes this process an agent of the job with so many nodes; returns its exit code when they have ended.

    Args:
        invitation: the job's addresses and keys.
        timeout: seconds to reach the job.
        slots: the number of nodes.
        rank: the rank of the first one; -1 for any.
        local_rank: its place among the nodes of its host; -1 for not known.
        local_size: the number of nodes of its host; 0 for not known.
        typed: started by a user, whose Ctrl-C is meant for it and not for the master.

    Raises StartError when the job cannot be reached in ``timeout`` seconds or does not let this process in, or this
    process may have too few descriptors.
    """
    if why := descriptors.shortage_of_agent(slots):
        raise StartError(why)
    name_process("dt-worker")
    try:
        keys = invitation.public_key, invitation.secret_key
        tunnel = TunnelClient(invitation.addresses, keys, invitation.server_key, timeout)
    except BrokenError as e:
        raise StartError(f"the job cannot be joined: {e}{_hint(invitation)}") from None
    except OSError as e:
        raise StartError(f"the job cannot be joined: {e.strerror}") from None
    up: FramedStream[Order] = FramedSocket(Order, tunnel.socket.detach())
    try:
        agent = Agent(up, agent_hello(slots, rank, local_rank, local_size))
        if typed:
            signal.signal(signal.SIGINT, lambda *_: None)
        return agent.run()
    except StartError as e:
        up.send_message(LaunchFailed(str(e)))
        up.push(1.0)
        raise
    except ProtocolError as e:
        raise StartError(f"what answers there is no disttensor of this version: {e}") from None
    finally:
        up.close()
        tunnel.close()


def _hint(invitation: Invitation) -> str:
    if not invitation.host:
        return f". Are the port free to reach, and the secret ({secret_file()}) the same on both hosts?"
    hint = f". It was invited by {invitation.whose()}"
    with contextlib.suppress(ValueError):
        if all(ipaddress.ip_address(split(address)[0]).is_loopback for address in invitation.addresses):
            hint += ", which listens to its own host only: give it --interface for others"
    return hint


# ---- scripts that are nodes ------------------------------------------------------------------------------------------


def become_node(where: Rendezvous, timeout: float) -> NoReturn:
    """Turns this process, which runs the user's script, into the node that it is by its rank.

    Raises StartError when the invitation is not there within ``timeout`` seconds.
    """
    rank, *local = where.assigned
    if where.kind == "slurm":
        _note_own()
    told = os.memfd_create("invitation", 0)
    os.write(told, msgspec.json.encode(where.invitation(timeout)))
    os.lseek(told, 0, os.SEEK_SET)
    os.set_inheritable(told, True)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    command = worker_command("--invitation-fd", str(told), "--rank", str(rank), "--timeout", str(timeout))
    os.execv(command[0], [*command, "--local", *map(str, local)])


def worker_command(*arguments: str) -> list[str]:
    """Returns the command line of ``dtrun worker`` with this interpreter and this process's path of modules."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    path = json.dumps([p for p in sys.path if isinstance(p, str)])
    return [sys.executable, *flags, "-P", BOOT, "worker", path, *arguments]


def _note_own() -> None:
    """Notes in the environment the GPUs and cores that are this task's own. For a task that is one node."""
    os.environ[OWN] = slurm_env.divided(len(gpus()), len(os.sched_getaffinity(0)))


def _read_invitation(fd: int) -> Invitation:
    with open(fd, "rb") as file:
        try:
            return decode_invitation(file.read())
        except ValueError as e:
            raise StartError(f"--invitation-fd {fd} is no invitation: {e}") from None
