"""The launchers that the contract (``check_launcher``) is shown for, in this process and in others.

`dtrun OPTIONS contract_kit.py CHECK...` runs it on the launcher of dtrun's plan; between its sessions everything stays
that has imported torch. It prints a line for each check: its name and what was wrong, as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from disttensor.runtime.contracts.launcher import CHECKS, Make, run_check
from disttensor.runtime.host.launch_spec import Host, LaunchSpec, spec_of_dtrun
from disttensor.runtime.launch import Launcher, get_launcher, registry
from disttensor.runtime.launch.starters.join import JoinLauncher
from disttensor.runtime.launch.starters.local import LocalLauncher
from disttensor.runtime.launch.starters.root_launcher import RootLauncher

#: What the workers of the checks need, in place of torch.
PRELOAD = ("disttensor.runtime.contracts.launcher_worker",)


def local(entry: str) -> LocalLauncher:
    """Nodes of this machine."""
    return LocalLauncher(entry, PRELOAD)


def nearby(entry: str) -> RootLauncher:
    """A root with two agents."""
    hosts = Host("a", 2), Host("b", 1)
    return RootLauncher(LaunchSpec("nearby", hosts=hosts, options={"preload": " ".join(PRELOAD)}), entry)


#: `dtrun worker`, but for torch.
_WORKER = f"""
import sys
from functools import partial
from disttensor.runtime.launch.rendezvous import worker_cli as guest
guest.Agent = partial(guest.Agent, preload={PRELOAD})
sys.exit(guest.main(sys.argv[1:]))
"""


class Joined(JoinLauncher):
    """Two agents join, which were started by hand: here, and waited for here."""

    def __init__(self, entry: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        file = str(Path(self._folder.name) / "job")
        super().__init__(LaunchSpec("join", most=3, options={"connection_file": file, "all_come": "yes"}))
        self.entry = entry
        self._agents = [
            subprocess.Popen(
                [sys.executable, "-c", _WORKER, "--connection-file", file, *words],
                start_new_session=True,  # another terminal's
            )
            for words in (("-n", "2", "--rank", "0"), ("--rank", "2"))
        ]

    def stop(self, grace: float) -> None:
        super().stop(grace)
        for agent in self._agents:
            agent.wait(10)
        self._folder.cleanup()


#: This file, for dtrun.
CONTRACT = __file__

#: In this process.
LAUNCHERS: dict[str, Make] = {"local": local, "nearby": nearby, "join": Joined}

#: dtrun's own process shows what nodes print, and is no child; its end has tests of its own.
BESIDE_DTRUN = {"output", "flush", "helpers_killed", "ctrl_c", "master_terminated", "master_hung_up"}
#: With all that is on other hosts.
UNDER_DTRUN = [name for name in CHECKS if name not in BESIDE_DTRUN]


def served(entry: str) -> Launcher:
    """What dtrun, or mpiexec, has started for this script."""
    spec = spec_of_dtrun() or LaunchSpec(registry.automatic)
    launcher = get_launcher(spec.launcher).of(spec)
    launcher.entry = entry  # type: ignore[attr-defined]
    return launcher


def results(out: str) -> dict[str, str]:
    """What was wrong, by the names of the checks; nothing where all was well."""
    return dict(json.loads(line) for line in out.splitlines() if line.startswith('["'))


def main(*names: str) -> None:
    for name in names:
        wrong = ""
        try:
            run_check(name, served)
        except AssertionError as error:
            wrong = "\n".join([str(error), *getattr(error, "__notes__", [])])
        print(json.dumps([name, wrong]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
