"""Finds modules and names of the first level by their old names, for one release, with a warning that says the new
name."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

#: Old name -> new one, both below the package.
MOVED = {
    "functional": "collectives.functional",
    "selfcheck": "verify.selfcheck",
    "runtime.bundle": "runtime.protocol.bundle",
    "runtime.errors": "runtime.protocol.errors",
    "runtime.channel.check": "runtime.contracts.data_channel",
    "runtime.launch.base": "runtime.host.launcher",
    "runtime.launch.check": "runtime.contracts.launcher",
    "runtime.launch.lines": "runtime.launch.output.lines",
    "runtime.launch.printer": "runtime.launch.output.printer",
    "runtime.launch.process": "runtime.process.lifetime",
    "runtime.launch.relay": "runtime.launch.output.relay",
    "runtime.launch.spawn": "runtime.launch.tree.spawn",
    "runtime.worker": "runtime.node.worker",
}


#: Old name at the first level -> new one, below the package.
NAMES = {
    "BrokenError": "errors.BrokenError",
    "BusyError": "errors.BusyError",
    "ChannelError": "errors.ChannelError",
    "ClosedError": "errors.ClosedError",
    "Each": "tasks.Each",
    "ForkError": "errors.ForkError",
    "GraphError": "errors.GraphError",
    "Group": "collectives.Group",
    "Levels": "collectives.Levels",
    "ProtocolError": "errors.ProtocolError",
    "ReduceOp": "collectives.ReduceOp",
    "Reduced": "collectives.Reduced",
    "RemoteError": "errors.RemoteError",
    "Split": "collectives.Split",
    "StartError": "errors.StartError",
    "Way": "collectives.Way",
    "Work": "futures.Work",
    "all_gather_into_tensor": "collectives.all_gather_into_tensor",
    "all_gather_object": "collectives.all_gather_object",
    "all_to_all": "collectives.all_to_all",
    "arange": "factories.arange",
    "as_completed": "futures.as_completed",
    "barrier": "collectives.barrier",
    "broadcast_object": "collectives.broadcast_object",
    "check_data_channel": "channels.check_data_channel",
    "current_node": "session.current_node",
    "current_stream": "streams.current_stream",
    "default_stream": "streams.default_stream",
    "empty": "factories.empty",
    "eye": "factories.eye",
    "from_numpy": "factories.from_numpy",
    "full": "factories.full",
    "functional": "collectives.functional",
    "gather": "collectives.gather",
    "gather_object": "collectives.gather_object",
    "host_of": "collectives.host_of",
    "linspace": "factories.linspace",
    "logspace": "factories.logspace",
    "new_group": "collectives.new_group",
    "node_count": "session.node_count",
    "node_module": "torch_backend.device_module",
    "ones": "factories.ones",
    "prefetch": "data.prefetch",
    "rand": "factories.rand",
    "randint": "factories.randint",
    "randn": "factories.randn",
    "randperm": "factories.randperm",
    "recv": "collectives.recv",
    "reduce": "collectives.reduce",
    "register_channel": "channels.register_channel",
    "reset_stats": "channels.reset_stats",
    "scatter": "collectives.scatter",
    "scatter_object": "collectives.scatter_object",
    "selfcheck": "verify",
    "send": "collectives.send",
    "sendreceive": "collectives.sendreceive",
    "stats": "channels.stats",
    "tensor": "factories.tensor",
    "zeros": "factories.zeros",
}

#: Old name -> the new name that the warning says, where that is not below the package.
_CALLED = {"node_module": "torch.node"}


def name(old: str) -> Any:
    """Returns the object that the first level called ``old``, and warns the caller's caller of its new name."""
    import warnings

    new = NAMES[old]
    called = _CALLED.get(old, f"disttensor.{new}")
    warnings.warn(
        f"disttensor.{old} is {called} now; the old name goes with the next release", DeprecationWarning, stacklevel=3
    )
    module, _, attribute = new.rpartition(".")
    if not module or old in _CALLED:
        return import_module(f"disttensor.{new}")
    return getattr(import_module(f"disttensor.{module}"), attribute)


class _Finder:
    """The finder of old names. It is asked last, so that other imports cost nothing more."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != "disttensor" or name not in MOVED:
            return None
        import warnings

        new = f"disttensor.{MOVED[name]}"
        warnings.warn(
            f"{fullname} has moved: import {new} instead; the old name goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return ModuleSpec(fullname, _Alias(new))  # type: ignore[arg-type]


class _Alias:
    """The loader of an old name: it gives the new module."""

    def __init__(self, new: str) -> None:
        self._new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put the old name's spec there


def install() -> None:
    """Installs the finder of old names."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
