"""The registry of data channels, by name.

Three sources, the first that knows a name wins: ``register_channel``, the channels that come with disttensor (one line
each in protocol/channel_names.py), and the entry points ``disttensor.channels`` of installed packages. A channel's
module is imported when it is asked for, so one that needs a library (mpi4py, NCCL) costs nobody else anything.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from ..process.spelling import did_you_mean, shown
from ..protocol.channel_names import BUILTIN as _BUILTIN
from ..protocol.channel_names import ENTRY_POINTS, names
from ..protocol.errors import DisttensorError
from .base import Capabilities, DataChannel, Protection
from .cipher import no_cipher

#: The extra that a package whose import failed comes with: `pip install 'disttensor[NAME]'`.
_EXTRAS = {"mpi4py": "mpi"}

_registered: dict[str, type[DataChannel]] = {}


def register_channel(name: str, cls: type[DataChannel]) -> None:
    """Registers ``cls`` as the data channel ``name`` in this process, for ``init_master_worker(backend=name)``.

    Nodes import the class by its module and name. Raises TypeError for something that isn't a DataChannel, ValueError
    for a name that is taken by another class.
    """
    if not (isinstance(cls, type) and issubclass(cls, DataChannel)):
        raise TypeError(f"channel {shown(name)} has to be a subclass of DataChannel, not {shown(cls)}")
    if name in _BUILTIN or _registered.get(name, cls) is not cls:
        raise ValueError(f"the channel name {name!r} is taken; known channels: {', '.join(channel_names())}")
    _registered[name] = cls


def name_for_nodes(name: str) -> str:
    """Returns the name by which ``get_channel`` finds the same class in another process.

    For a class that this process has registered, that is "module:class". Raises ValueError for a class that nodes can't
    import, because it is defined in the script itself.
    """
    cls = _registered.get(name)
    if cls is None:
        return name
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise ValueError(
            f"nodes can't import the channel {name!r} from {cls.__module__}:{cls.__qualname__}; "
            "define the class at the top of a module of its own and import it in the script"
        )
    return f"{cls.__module__}:{cls.__qualname__}"


def get_channel(name: str) -> type[DataChannel]:
    """Returns the class of the channel ``name``, which may also be "module:class".

    Raises ValueError for an unknown name (it lists the known ones), TypeError for an entry point that isn't a
    DataChannel, ImportError when the channel's library is missing (it says which).
    """
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        missing = (error.name or str(error)).partition(".")[0]
        package = f"disttensor[{_EXTRAS[missing]}]" if missing in _EXTRAS else missing
        raise ImportError(
            f"the data channel {name!r} needs {missing}, which is not installed: pip install '{package}'"
        ) from error


def usable_channel(name: str, rank: int) -> type[DataChannel]:
    """Returns the class of a channel that can be used in this process.

    Raises as ``get_channel``, and DisttensorError, which says why the channel can't be used.
    """
    cls = get_channel(name)
    if why := cls.unavailable(rank):
        raise DisttensorError(f"the data channel {cls.name!r} can't be used here: {why}")
    return cls


def check_protection(name: str, capabilities: Capabilities, protection: Protection) -> None:
    """Raises ValueError for a channel that cannot protect tensors as asked, ImportError where this process lacks the
    package for it. Asks this process only."""
    if why := protection.missing(capabilities):
        raise ValueError(f"the data channel {name!r} must not be used here: {why}")
    if protection.encrypt and not capabilities.same_process and no_cipher():
        why = no_cipher().replace(" there", "")
        raise ImportError(f"encrypt=True: {why}")


def why_unusable(name: str, rank: int) -> str:
    """Returns the reason why a channel can't be used in this process, by ``rank``; one line, empty if it can."""
    try:
        return " ".join(get_channel(name).unavailable(rank).split())
    except Exception as error:
        return " ".join(str(error).split()) or type(error).__name__


def _load(name: str) -> type[DataChannel]:
    if name in _registered:
        return _registered[name]
    if name in _BUILTIN:
        module, _, attribute = _BUILTIN[name].partition(":")
        found: object = getattr(import_module(module, __package__), attribute)
    elif ":" in name:
        module, _, attribute = name.partition(":")
        found = getattr(import_module(module), attribute)
    else:
        for point in entry_points(group=ENTRY_POINTS, name=name):
            found = point.load()
            break
        else:
            known = channel_names()
            raise ValueError(
                f"unknown data channel {name!r}; known channels: {', '.join(known)}{did_you_mean(name, known)}"
            )
    if not (isinstance(found, type) and issubclass(found, DataChannel)):
        raise TypeError(f"data channel {name!r} is {found!r}, which is not a subclass of DataChannel")
    return found


def channel_names() -> list[str]:
    """Returns the known names, sorted; nothing is imported."""
    return sorted({*_registered, *names()})
