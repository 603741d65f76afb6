"""The settings of a session: the arguments of ``init_master_worker``, the environment and dtrun's launch spec in one
value.

``Settings.of`` starts nothing and waits for nothing. It reads nothing but its arguments, the names of launchers and,
for a relative ``log_dir``, the working directory. The order of precedence is a table, ``runtime/host/precedence.py``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..errors import argument_checks
from ..runtime.channel.base import Protection
from ..runtime.host import affinity
from ..runtime.host.copies import copies
from ..runtime.host.launch_spec import LaunchSpec
from ..runtime.host.output_options import Output
from ..runtime.host.precedence import setting
from ..runtime.host.silence import silence_of
from ..runtime.launch import LaunchMethod, launcher_names
from ..runtime.launch.hosts import parse_hosts
from ..runtime.launch.registry import BY_HOSTS, BY_JOINING, launch_method, starter_for_root
from ..runtime.launch.rendezvous.rendezvous import Rendezvous


@dataclass(frozen=True)
class Settings:
    """Everything that is decided before anything is started."""

    spec: LaunchSpec  #: the hosts of nodes, and the launcher that starts them
    method: LaunchMethod  #: the launcher's row
    nodes: int | tuple[int, int] | None  #: the number of nodes, or (to begin with, at most); None: as many as there are
    spares: int  #: how many places more are kept free, for those of lost nodes
    channel: str  #: the name of the session's own data channel
    simulate_cuda: int  #: simulated CUDA devices per node
    threads: int  #: torch's intra-op threads per node; 0: the node counts its host's cores
    bind: str  #: a kind of affinity; empty: the node's default
    env: Mapping[str, str]  #: environment variables of the nodes
    allow_ops: tuple[str, ...]
    functions: str
    security: str
    protection: Protection  #: of tensors on their way
    output: Output
    blocking: bool  #: whether every command is flushed and waited for

    def unheard(self, environment: Mapping[str, str]) -> str:
        """Returns, in words, the number of nodes that dtrun asks for where the script says another one, which counts;
        "" where they agree."""
        asked = setting("nodes", None, environment) or self.spec.least
        least, most = self.nodes if isinstance(self.nodes, tuple) else (self.nodes, self.nodes)
        if not asked or least is None or most is None or least <= asked <= most:
            return ""
        return (
            f"nodes={self.nodes} of the script counts, and not the {asked} that dtrun -n, or DISTTENSOR_NODES, asks "
            "for; leave nodes out to have that number"
        )

    @classmethod
    def of(
        cls,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        said: LaunchSpec | None,
        *,
        where: Rendezvous | None = None,
        automatic: str = "local",
        folder: str = "",
    ) -> Settings:
        """Returns the settings that follow from the ``arguments`` of init_master_worker, the ``environment``, and the
        LaunchSpec that the dtrun around this process has ``said``.

        Args:
            arguments: all of them, by name.
            environment: the environment variables, such as os.environ.
            said: dtrun's launch spec; None without dtrun.
            where: the rendezvous of nodes that come by themselves, if an init_method names one.
            automatic: the launcher that "auto" stands for without hosts and dtrun.
            folder: the folder of the script's own modules; empty if that is no folder of the user's.

        Raises TypeError or ValueError, which names the argument, its value and what is meant instead.
        """
        nodes = check(arguments)
        given = dict(arguments)
        spares = int(setting("spares", given["spares"], environment))
        spec = _spec(given, nodes, spares, environment, said, where, automatic, folder)
        method = launch_method(spec.launcher)
        if spares and method.no_restart:
            raise ValueError(f"spares={spares}: {method.no_restart}")
        if given["interface"] is not None and method.hosts == "here":
            raise ValueError(
                f"interface={given['interface']!r} is where nodes of other hosts reach this one, and all nodes of "
                f"launcher={spec.launcher!r} are here; leave it out, or name the hosts"
            )
        bind = setting("bind", given["bind"], environment)
        if bind not in ("", *affinity.KINDS):
            argument_checks.one_of("bind", bind, affinity.KINDS)
        if method.in_process:
            channel = "inproc" if given["backend"] == "auto" else given["backend"]
        else:
            channel = setting("backend", given["backend"], environment)
        return cls(
            spec=spec,
            method=method,
            nodes=setting("nodes", nodes, environment),
            spares=spares,
            channel=channel,
            simulate_cuda=int(setting("simulate_cuda", given["simulate_cuda"], environment)),
            threads=given["threads"] or 0,
            bind=bind,
            env={**spec.env, **(given["env"] or {})},
            allow_ops=tuple(given["allow_ops"]),
            functions=given["functions"],
            security=given["security"],
            protection=_protection(given, environment),
            output=_output(given, method),
            blocking=environment.get("DISTTENSOR_LAUNCH_BLOCKING", "0") not in ("", "0"),
        )


def check(arguments: Mapping[str, Any]) -> int | tuple[int, int] | None:
    """Raises TypeError or ValueError for arguments that are invalid by themselves; returns ``nodes``, which is a whole
    number, a pair of them, or None."""
    backend = arguments["backend"]
    if not isinstance(backend, str):
        meant = f"; did you mean nodes={backend!r}?" if isinstance(backend, (int, tuple)) else ""
        raise TypeError(f"backend is the name of a data channel, such as 'tcp', not {backend!r}{meant}")
    for name, least in (("spares", 0), ("simulate_cuda", 0), ("threads", 1)):
        if arguments[name] is not None:
            argument_checks.whole_number(name, arguments[name], least)
    for name in ("trusted_network", "encrypt", "checksum"):
        if arguments[name] is not None:
            argument_checks.flag(name, arguments[name])
    argument_checks.one_of("functions", arguments["functions"], ("any", "none"))
    argument_checks.one_of("security", arguments["security"], ("curve", "none"))
    argument_checks.texts("allow_ops", arguments["allow_ops"], "torchvision::*")
    for name, example in (("hosts", "a:4"), ("interface", "eth0")):
        if arguments[name] is not None and not isinstance(arguments[name], str):
            argument_checks.texts(name, arguments[name], example)
    for name in ("env", "launcher_options"):
        if arguments[name] is not None:
            argument_checks.mapping(name, arguments[name])
    if arguments["timeout"] is not None:
        argument_checks.seconds("timeout", arguments["timeout"])
    if arguments["silence"] is not None:
        silence_of(arguments["silence"])
    return None if arguments["nodes"] is None else argument_checks.span("nodes", arguments["nodes"])


def _protection(given: Mapping[str, Any], environment: Mapping[str, str]) -> Protection:
    encrypt = setting("encrypt", given["encrypt"], environment)
    return Protection(
        encrypt=None if encrypt is None else bool(encrypt),
        trusted=bool(setting("trusted_network", given["trusted_network"], environment)),
        checksum=bool(setting("checksum", given["checksum"], environment)),
    )


def _output(given: Mapping[str, Any], method: LaunchMethod) -> Output:
    log_dir, tee, redirects = given["log_dir"], given["tee"], given["redirects"]
    if (tee or redirects) and not log_dir:
        raise ValueError("tee and redirects need a log_dir, where the files are to be")
    if log_dir and method.in_process:
        raise ValueError(
            f"log_dir needs nodes that are processes: those of launcher={method.name!r} share this one's output"
        )
    return Output(log_dir=os.path.abspath(log_dir) if log_dir else "", tee=tee, redirects=redirects)


def _method(name: str) -> LaunchMethod:
    """Returns the row of a launcher that the script names. Raises ValueError for an unknown one."""
    if isinstance(name, str):
        with contextlib.suppress(ValueError):
            return launch_method(name)
    known = ["inproc", *launcher_names()]
    argument_checks.one_of("launcher", name, known)
    raise AssertionError(f"{name!r} is in {known}, and has no row")


def _spec(
    given: Mapping[str, Any],
    nodes: int | tuple[int, int] | None,
    spares: int,
    environment: Mapping[str, str],
    said: LaunchSpec | None,
    where: Rendezvous | None,
    automatic: str,
    folder: str,
) -> LaunchSpec:
    """Returns the launch spec: of a rendezvous, of the dtrun around this process, or of a launcher that the script
    names."""
    launcher, hosts, options = given["launcher"], given["hosts"], given["launcher_options"] or {}
    asked = None if launcher == "auto" else _method(launcher)
    if where is not None:
        if (asked is not None and asked.hosts != "joining") or hosts is not None:
            raise ValueError(f"with init_method {str(where)!r} nodes come by themselves; leave launcher and hosts out")
        spec, said = _spec_to_join(where, nodes, spares, folder), None
    elif asked is not None and asked.hosts == "joining" and (said is None or said.launcher != launcher):
        raise ValueError(
            f"launcher={launcher!r} needs an init_method, which says where nodes come to: 'tcp://host:port', ..."
        )
    elif said is not None and hosts is None and launcher in ("auto", said.launcher):
        spec = said
    else:
        if asked is None:
            if given["init_method"] is None and (found := copies(environment)) is not None:
                raise ValueError(
                    f"{found.by} has started {found.number} processes of this script, and each would start nodes of "
                    f"its own; {found.instead}. Start the script once, by `python` or `dtrun`, or say "
                    'init_method="local://" where each process is to have a session of its own'
                )
            asked = launch_method(automatic if hosts is None else BY_HOSTS)
        most = nodes[1] if isinstance(nodes, tuple) else nodes or 0
        spec = LaunchSpec(
            asked.name, most=most if asked.counted else 0, folder=folder, starter=starter_for_root(asked.name)
        )
        said = None
    method = launch_method(spec.launcher)
    changes: dict[str, Any] = {
        "timeout": setting("timeout", given["timeout"], environment, said),
        "silence": silence_of(setting("silence", given["silence"], environment, said)),
    }
    if hosts is not None:
        if method.hosts != "named":
            why = "starts nodes on this machine only" if method.hosts == "here" else "knows its hosts from elsewhere"
            raise ValueError(f"hosts={hosts!r}: launcher={spec.launcher!r} {why}")
        changes["hosts"] = tuple(parse_hosts(hosts if isinstance(hosts, str) else ",".join(hosts)))
    if (interface := given["interface"]) is not None:
        names: Sequence[str] = interface.split(",") if isinstance(interface, str) else interface
        changes["interface"] = tuple(name.strip() for name in names if name.strip())
    if options:
        method.check_options(name for name in options if not (name == "python" and method.python))
        changes["options"] = spec.options | {k: str(v) for k, v in options.items() if k != "python"}
        changes["python"] = options.get("python", spec.python)
    return msgspec.structs.replace(spec, **changes)


def _spec_to_join(where: Rendezvous, nodes: int | tuple[int, int] | None, spares: int, folder: str) -> LaunchSpec:
    least, most = nodes if isinstance(nodes, tuple) else (nodes, nodes)
    most = most + spares if most else (where.size or 1) - 1
    if not most:
        raise ValueError(f"how many nodes are to come to {where}? Give nodes, or rank and world_size")
    least = least or max(1, most - spares)
    return LaunchSpec(
        BY_JOINING, least=least, most=most, interface=where.interface, options=where.options, folder=folder
    )
