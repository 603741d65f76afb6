"""The checks of ``check_launcher`` of ends: of the launcher, of processes that it has started, and of the master."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from ..host.launcher import Exited, Started
from ..launch.starters.server_launcher import WORKER
from ..process.lifetime import children
from ..protocol import codec
from ..protocol import commands as c
from ..protocol.bundle import Bundle
from ..protocol.errors import StartError
from ..protocol.keys import curve_pair
from ..transport.zmq import ZmqHub
from .conformance import need, raises
from .launcher_stage import LIMIT, MOMENT, LauncherStage, Make, Master, nothing_left, open_resources

#: Seconds that ``stop`` may take beyond the grace.
STOP = 10.0


def check_stop(make: Make) -> None:
    """Checks that ``stop`` leaves workers the time to end by themselves, and takes no longer. Twice is fine."""
    with nothing_left(), LauncherStage(make) as stage:
        ended, slow, last = stage.start(3)
        ended.ask("exit", 0)
        stage.gone([ended], "it was told to exit")
        slow.send_order("exit", 0, 0.3)
        last.send_order("exit", 7, 0.6)
        seconds = stage.stop(LIMIT)
        stage.gone([slow, last], "stop() has returned", MOMENT)
        need(
            slow.answers == last.answers == ["bye"], f"stop({LIMIT:g}) did not wait for workers that end by themselves"
        )
        need(seconds < STOP, f"stop({LIMIT:g}) took {seconds:.1f} s; the last worker had ended by itself after 0.6 s")
        again = stage.stop(LIMIT)
        need(again < MOMENT, f"a second stop() took {again:.1f} s")
        with raises(StartError):
            stage.launcher.start(stage.bundles)


def check_stop_by_force(make: Make) -> None:
    """Checks that after ``stop`` no started process is alive, whatever it ignores, nor a child of its process group."""
    with nothing_left(MOMENT), LauncherStage(make) as stage:
        stubborn, quiet, prints = workers = stage.start(3)
        stubborn.ask("stubborn", True)
        quiet.ask("quiet")
        prints.send_order("show", "stdout", "what nobody reads\n" * 20_000)
        seconds = stage.stop(0.1)
        stage.gone(workers, "stop() has returned", MOMENT)
        need(seconds < STOP, f"stop(0.1) took {seconds:.1f} s")


def check_stop_early(make: Make) -> None:
    """Checks that ``stop`` works at any time: before anything was asked for, and while workers start."""
    for asks in (0, 3):
        with nothing_left(), LauncherStage(make) as stage:
            if asks:
                stage.ask(asks)
            seconds = stage.stop(0)
            need(seconds < STOP, f"stop(0) took {seconds:.1f} s")


def check_nothing_held(make: Make) -> None:
    """Checks that a stopped launcher has released everything: descriptors, threads, processes."""
    with nothing_left():
        before = open_resources()
        for turn in range(2):
            with LauncherStage(make) as stage:
                stage.start(2)
            descriptors, threads = open_resources()
            if turn == 0:
                before = descriptors, threads  # with descriptors that are opened once for good
        need(len(descriptors) <= len(before[0]), f"{len(descriptors - before[0])} more descriptors are open")
        need(threads <= before[1], f"these threads are left: {threads - before[1]}")


def check_helpers_killed(make: Make) -> None:
    """Checks that ``events`` raises StartError when the launcher's own processes are killed, and no worker is left."""
    before = set(children())
    with nothing_left(STOP), LauncherStage(make) as stage:
        workers = stage.start(2)
        helpers = set(children()) - before - {worker.pid for worker in workers}
        for pid in helpers:
            os.kill(pid, signal.SIGKILL)
        if helpers:
            with raises(StartError):
                stage.until(lambda: False, "events() should raise StartError: the launcher's processes were killed")
            stage.over = True
            stage.gone(workers, "the launcher's own processes were killed")


def _check_master(number: signal.Signals, make: Make) -> None:
    with nothing_left(STOP), Master(make, 3) as master:
        workers = master.workers(3)
        workers[1].ask("stubborn", False)
        workers[2].ask("quiet")
        master.signal(number)
        os.waitpid(master.pid, 0)
        master.gone(workers, f"the master was ended by {number.name}", STOP)


def check_master_killed(make: Make) -> None:
    """Checks that nothing that the master has started is left when it is killed, however stubborn."""
    _check_master(signal.SIGKILL, make)


def check_master_terminated(make: Make) -> None:
    """Checks the same for a master ended by SIGTERM."""
    _check_master(signal.SIGTERM, make)


def check_master_hung_up(make: Make) -> None:
    """Checks the same for SIGHUP, as the end of a terminal sends to all of the master's process group."""
    _check_master(signal.SIGHUP, make)


def check_ctrl_c(make: Make) -> None:
    """Checks that Ctrl-C on the terminal is for the master: the launcher and its workers go on."""
    with nothing_left(STOP), Master(make, 3) as master:
        first, second, third = workers = master.workers(3)
        master.signal(signal.SIGINT)
        for worker in workers:
            worker.ask("show", "stdout", "")
        second.send_order("exit", 0)
        master.until(lambda: master.exited == [1], "after Ctrl-C events() should tell of the one worker that ended")
        for worker in (first, third):
            worker.ask("show", "stdout", "")


def check_real_worker(make: Make) -> None:
    """Checks that a real worker, which imports torch, reaches its master with its own key, and ends on its order."""
    with nothing_left(), LauncherStage(make, WORKER) as stage:
        server, [(public, secret)] = curve_pair(), stage.launcher.key_pairs(1)
        hub = ZmqHub(stage.launcher.listen, server_keys=server, node_keys={0: public})
        with contextlib.closing(hub):
            bundle = Bundle(
                job=stage.door.job, rank=0, address=hub.address, addresses=hub.addresses[1:], server_key=server[0],
                public_key=public, secret_key=secret, sys_path=tuple(map(os.path.abspath, sys.path)), cwd=os.getcwd(),
            )  # fmt: skip
            stage.launcher.start([bundle])
            heard: list[c.Reply] = []

            def says_hello() -> bool:
                for _, message in hub.drain():
                    heard.extend(codec.decode_report(message).replies)
                ended = [event for event in stage.events if isinstance(event, Exited)]
                need(not ended, f"the worker has ended: {ended}")
                # the two come by different ways, in any order
                return bool(heard) and any(isinstance(event, Started) for event in stage.events)

            stage.until(says_hello, "a real worker should say hello, and its launcher that it has started")
            hello, [started] = heard[0], [event for event in stage.events if isinstance(event, Started)]
            need(isinstance(hello, c.Hello) and hello.job == bundle.job, f"what it says is {hello}")
            need(started.pid == getattr(hello, "pid", 0), f"Started names process {started.pid}, and it is {hello}")
            hub.send(0, codec.encode(c.Batch(0, (c.StopNode(),))))
            seconds = stage.stop(LIMIT)
            need(seconds < STOP, f"stop({LIMIT:g}) took {seconds:.1f} s, though the worker was told to end")
