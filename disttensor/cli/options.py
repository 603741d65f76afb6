"""The options of dtrun: torchrun's where torchrun has one, in both spellings (--node-rank, --node_rank), and its
own."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from typing import Any, NoReturn

from ..runtime.host.addresses import own_address
from ..runtime.host.affinity import KINDS as BINDINGS
from ..runtime.host.affinity import gpus
from ..runtime.host.silence import Silence, silence_of
from ..runtime.process.spelling import did_you_mean

_EXAMPLES = """\
examples:
  dtrun -n 4 train.py --epochs 3             four nodes on this machine
  dtrun -n 2 --simulate-cuda 2 train.py      two nodes with two simulated CUDA devices each
  dtrun -n 2 --backend tcp -m package.train  a module, as with python -m
  dtrun --hosts a:4,b:4 train.py             four nodes on each of two hosts, by ssh
  dtrun --nnodes 2 -n 4 --master-addr a --master-port 29500 train.py    the same command on a and on b, without ssh
  dtrun worker --connection-file FILE        one node, by hand
  dtrun --launcher ray -n 4 train.py         four nodes, where Ray has room for them
  srun -n 5 dtrun train.py                   a master and four nodes, started by Slurm
  mpiexec -n 5 dtrun train.py                a master and four nodes, started by MPI's mpiexec

jobs that run already, on this host (dtrun ps --help, ...):
  dtrun ps                                   list them
  dtrun status [JOB] [--json]                what the script and each node are at
  dtrun top [JOB]                            the same, redrawn
  dtrun stack [JOB] [-n 1,3] [--native]      the stacks of their threads
  dtrun logs [JOB] [-n 2] [-f]               what nodes have printed last
  dtrun trace [JOB] -o t.json.gz             record a timeline of it, for 10 s
  dtrun kill [JOB] [-n 2]                    end it, or nodes of it

The exit code is the script's, or 128 + the signal that killed it.
"""


#: Options of other launchers -> dtrun's options.
_ELSEWHERE = {
    "--nodes": "-n",
    "--np": "-n",
    "--nprocs": "-n",
    "--ntasks": "-n",
    "--num-nodes": "--nnodes",
    "-H": "--hosts",
    "--join": "dtrun worker --connection-file FILE",
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the option that may be meant."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.match(r"unrecognized arguments: (--?[\w-]+)", message):
            shown = [option for a in self._actions if a.help is not argparse.SUPPRESS for option in a.option_strings]
            found = _ELSEWHERE.get(unknown[1])
            message += f"; did you mean {found}?" if found else did_you_mean(unknown[1], shown, "{}")
        elif choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            message += did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2]))
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    """The option that prints versions, which are looked up when it is given."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from .versions import main

        parser.exit(main())


def both(group: argparse._ActionsContainer, *names: str, **how: Any) -> None:
    """Adds an option that also has torchrun's other spelling, which the help does not show."""
    dest = group.add_argument(*names, **how).dest
    if other := [spelling for name in names if (spelling := "--" + name[2:].replace("-", "_")) != name and name[2:]]:
        group.add_argument(*other, **{**how, "dest": dest, "help": argparse.SUPPRESS})


def at_least(least: int) -> Callable[[str], int]:
    """Returns a function that converts an argument to a number of at least ``least``."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"a whole number of at least {least} is needed, not {text!r}")
        return int(text)

    return number


def _processes(text: str) -> int | None:
    """Converts a number, or torchrun's words for one. None stands for dtrun's default."""
    if text == "gpu" and not gpus():
        raise argparse.ArgumentTypeError("this machine has no GPU")
    if text == "p":
        raise argparse.ArgumentTypeError("-np is mpiexec's; did you mean -n?")
    words = {"auto": None, "gpu": len(gpus()), "cpu": len(os.sched_getaffinity(0))}
    return words[text] if text in words else at_least(1)(text)


def _span(text: str) -> tuple[int, int]:
    """Converts a range such as 2 or 2:4 to (least, most)."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"a number of hosts or MIN:MAX is needed, not {text!r}")
    return least, most


def _silence(text: str) -> Silence:
    try:
        return silence_of(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _own_address(text: str) -> str:
    try:
        own_address(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
    return text


def _variable(text: str) -> str:
    name = text.partition("=")[0]
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise argparse.ArgumentTypeError(f"NAME or NAME=VALUE is needed, not {text!r}")
    return text


def parser() -> Parser:
    """Returns the parser of all options. It checks each option by itself: see ``parse`` for the rest."""
    it = Parser(
        prog="dtrun",
        usage="dtrun [options] [-m] script [arguments of the script]",
        description="Run a disttensor script with its nodes, here or on other hosts.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    it.add_argument("--version", action=_Version, nargs=0, help="print the versions of disttensor and its libraries")
    it.add_argument("-m", "--module", action="store_true", help="script is a module's name, as with python -m")
    both(it, "--no-python", action="store_true", help="script is a program that is run as it is, without python")
    it.add_argument("script", nargs="?", help="the program that drives the nodes")
    it.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    nodes = it.add_argument_group("nodes")
    both(
        nodes, "-n", "--nproc-per-node", dest="nodes", metavar="N", type=_processes,
        help="how many nodes to start on each host, or gpu or cpu: one for each (default: one per GPU, at least 2)",
    )  # fmt: skip
    both(
        nodes, "--spares", metavar="N", type=at_least(0),
        help="keep places for N nodes more free, on all hosts together, for those of lost ones",
    )  # fmt: skip
    both(
        nodes, "--simulate-cuda", metavar="K", type=at_least(0),
        help="give each node K simulated CUDA devices (CPU memory)",
    )  # fmt: skip
    both(nodes, "--backend", metavar="NAME", help="the data channel that carries tensors, such as tcp")
    both(
        nodes, "--bind", choices=BINDINGS,
        help="what a node keeps to: a GPU by its local rank (default), also a share of the cores, also of one socket",
    )  # fmt: skip
    both(
        nodes, "--env", metavar="NAME[=VALUE]", action="append", type=_variable,
        help="set an environment variable on all nodes, or give them this process's value; may be repeated",
    )  # fmt: skip
    both(
        nodes, "--process-group", action="store_true",
        help="run script on every node, as an ordinary program of torch.distributed, and not as master",
    )  # fmt: skip

    hosts = it.add_argument_group("hosts")
    which = hosts.add_mutually_exclusive_group()
    which.add_argument("--hosts", metavar="a:4,b:4", help="hosts and the nodes that each may have (also a*4), by ssh")
    which.add_argument("--hostfile", metavar="FILE", help="the same in a file as mpirun has: `a slots=4` or `a:4`")
    both(
        hosts, "--launcher", metavar="NAME", default="auto",
        help="where nodes come from: local, ssh, join, slurm, mpi, ray, or what a package brings (default: ssh with "
        "--hosts, join with --nnodes, slurm or mpi where one of these has started dtrun, else local)",
    )  # fmt: skip
    both(
        hosts, "--launcher-option", metavar="NAME=VALUE", action="append", type=_variable, default=[],
        help="what only one launcher knows, see its page in docs/; may be repeated",
    )  # fmt: skip
    both(hosts, "--python", metavar="PATH", help="python on the other hosts (default: the path that it has here)")
    both(hosts, "--ssh-options", metavar="TEXT", help="further options of ssh's: --ssh-options='-p 2222'")
    both(
        hosts, "--interface", metavar="NAMES",
        help="where the master listens for other hosts: names of interfaces or addresses, such as eth0,10.0.0.1",
    )  # fmt: skip
    both(
        hosts, "--trusted-network", action="store_const", const=1,
        help="nobody else can use the network between the hosts: tensors may cross it in clear, by gloo, mpi and nccl "
        "too",
    )  # fmt: skip
    both(
        hosts, "--encrypt", action="store_const", const=1,
        help="encrypt tensors between all processes (default: between hosts, unless the network is trusted); needs "
        "pip install 'disttensor[encrypt]' on all hosts",
    )  # fmt: skip
    both(
        hosts, "--checksum", action="store_const", const=1,
        help="have receivers compare a checksum of each tensor that is not encrypted",
    )  # fmt: skip
    both(
        hosts, "--check", action="store_true",
        help="run nothing: ask each of --hosts for its versions, its clock, and whether they reach each other",
    )  # fmt: skip
    both(hosts, "--timeout", metavar="S", type=at_least(1), help="seconds for all nodes to come (default: 60)")

    both(
        hosts, "--silence", metavar="S,S,S", type=_silence,
        help="seconds without a word after which a host's nodes pause, are lost, and end (default: 10,15,60)",
    )  # fmt: skip

    joining = it.add_argument_group("dtrun on every host, as torchrun")
    both(
        joining, "--nnodes", metavar="N|MIN:MAX", type=_span, default=(1, 1),
        help="how many hosts there are, each with --nproc-per-node nodes; from MIN on the script starts",
    )  # fmt: skip
    both(joining, "--node-rank", metavar="K", type=at_least(0), help="which host this is; the script runs on host 0")
    both(joining, "--master-addr", metavar="HOST", help="host 0, by name or address")
    both(joining, "--master-port", metavar="PORT", type=at_least(1), help="its port, the same on all hosts")
    both(joining, "--rdzv-endpoint", metavar="HOST:PORT", help="the same as --master-addr and --master-port")
    both(joining, "--standalone", action="store_true", help="this machine only (the default)")
    both(
        joining, "--connection-file", metavar="FILE",
        help="write what `dtrun worker --connection-file FILE` needs to join, readable by you only",
    )  # fmt: skip

    output = it.add_argument_group("output")
    both(output, "--log-dir", metavar="DIR", default="", help="also write what node 1 prints to DIR/1/stdout.log, ...")
    both(
        output, "-t", "--tee", metavar="WHICH", default="",
        help="only this goes to files: 1 stdout, 2 stderr, 3 both, or for some nodes: 0:3,1:1",
    )  # fmt: skip
    both(
        output, "--trace", metavar="FILE",
        help="record a timeline of the whole session, which Perfetto opens; compressed if the name ends in .gz, a page "
        "for people if in .html",
    )  # fmt: skip
    both(
        output, "--metrics", metavar="ADDRESS", type=_own_address,
        help="serve the job's figures for Prometheus at an address of this machine alone, such as 127.0.0.1:9400; "
        "needs pip install 'disttensor[metrics]'",
    )  # fmt: skip
    both(output, "-r", "--redirects", metavar="WHICH", default="", help="this goes to files and not here")
    return it
