"""The precedence of settings: one table for ``init_master_worker``, dtrun and `dtrun worker`.

The first of these that has a value decides:

    1. the argument of ``init_master_worker``, or the option of `dtrun worker`
    2. the environment variable. dtrun sets it for its script where it was given the option, in place of the user's
    3. the LaunchSpec that dtrun hands to its script, which has the settings of hosts
    4. the default
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .launch_spec import LaunchSpec

#: The variable that names the file of the whole session's timeline: dtrun's --trace, which no argument is.
TRACE = "DISTTENSOR_TRACE"
#: The variable that names the address of the script's metrics: dtrun's --metrics, which no argument is.
METRICS = "DISTTENSOR_METRICS"


@dataclass(frozen=True)
class Setting:
    """A row of the table: one setting, and its name in each place."""

    argument: str  #: the argument of init_master_worker
    option: str = ""  #: the option of dtrun
    variable: str = ""  #: the environment variable
    spec: str = ""  #: the field of dtrun's LaunchSpec
    default: Any = None
    unsaid: Any = None  #: the argument's value that means that it was not given
    number: bool = False  #: the variable's text is a whole number
    worker: str = ""  #: the option of `dtrun worker`

    @property
    def dest(self) -> str:
        """The name of dtrun's option among its parsed options."""
        return {"-n": "nodes"}.get(self.option, self.option.lstrip("-").replace("-", "_"))


SETTINGS: tuple[Setting, ...] = (
    Setting("nodes", "-n", "DISTTENSOR_NODES", "least", number=True, worker="-n"),
    Setting("spares", "--spares", "DISTTENSOR_SPARES", default=0, number=True),
    Setting("backend", "--backend", "DISTTENSOR_BACKEND", default="auto", unsaid="auto"),
    Setting("simulate_cuda", "--simulate-cuda", "DISTTENSOR_SIMULATE_CUDA", default=0, number=True),
    Setting("bind", "--bind", "DISTTENSOR_BIND", default=""),
    Setting("trusted_network", "--trusted-network", "DISTTENSOR_TRUSTED_NETWORK", default=0, number=True),
    Setting("encrypt", "--encrypt", "DISTTENSOR_ENCRYPT", number=True),
    Setting("checksum", "--checksum", "DISTTENSOR_CHECKSUM", default=0, number=True),
    Setting("launcher", "--launcher", spec="launcher", default="auto", unsaid="auto"),
    Setting("hosts", "--hosts", spec="hosts", default=()),
    Setting("interface", "--interface", spec="interface", default=()),
    Setting("launcher_options", "--launcher-option", spec="options"),
    Setting("env", "--env", spec="env"),
    Setting("timeout", "--timeout", spec="timeout", default=LaunchSpec("").timeout, worker="--timeout"),
    Setting("silence", "--silence", spec="silence", default=LaunchSpec("").silence),
    Setting("log_dir", "--log-dir", spec="output", default="", unsaid=""),
    Setting("tee", "--tee", spec="output", default="", unsaid=""),
    Setting("redirects", "--redirects", spec="output", default="", unsaid=""),
    Setting("rank", "--node-rank", worker="--rank"),
)

_BY_ARGUMENT = {setting.argument: setting for setting in SETTINGS}


def setting(argument: str, given: Any, environment: Mapping[str, str], said: LaunchSpec | None = None) -> Any:
    """Returns the value of a setting: what was ``given`` as the argument, else by the table.

    Raises ValueError for a variable that is no number and has to be one.
    """
    row = _BY_ARGUMENT[argument]
    if given != row.unsaid:
        return given
    if text := environment.get(row.variable, "") if row.variable else "":
        if not row.number:
            return text
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{row.variable}={text!r} is not a number") from None
    if said is not None and row.spec:
        return getattr(said, row.spec) or row.default
    return row.default


def for_script(options: Any, spec: LaunchSpec) -> dict[str, str]:
    """Returns the environment variables by which dtrun passes its options on to its script.

    ``options``: dtrun's parsed options. The number of nodes is left to the LaunchSpec where that says it, as where `-n`
    counts those of each host.
    """
    told = {row.variable: getattr(options, row.dest) for row in SETTINGS if row.variable}
    told[TRACE] = options.trace and os.path.abspath(options.trace)
    told[METRICS] = options.metrics
    if spec.hosts or spec.most:
        del told["DISTTENSOR_NODES"]
    return {name: str(value) for name, value in told.items() if value is not None}
