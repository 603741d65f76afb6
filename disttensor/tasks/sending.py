"""Functions and their arguments on their way to nodes: pickled, their tensors as refs.

A function goes in pieces, and one that holds no tensors goes to a node once. Arguments travel with the command that
runs it; long ones go in pieces before it.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, Generic

import cloudpickle
import torch

from ..dispatch import seen_at
from ..dispatch.copies import move, upload
from ..dispatch.first_call import layout_of
from ..dispatch.lazy_views import materialise
from ..errors.missing import REMEDY, culprit
from ..futures.work import T_co, Work
from ..proxy.proxy import DistributedTensor
from ..runtime.node.user_functions import MAX_PICKLE, key_of
from ..runtime.process.signals import uninterrupted
from ..runtime.protocol import commands as c
from ..runtime.protocol.framing import pieces
from ..runtime.protocol.values import is_announcable
from ..session.current import session_of
from ..session.places import NodePlace, one_session
from ..session.session import Session
from . import by_name
from .announcing import arguments_within
from .kept_pickles import KeptPickles
from .plain import is_plain
from .reloaded_modules import ReloadedModules

#: The most bytes of the pickled arguments of an item that may be in a chunk.
SMALL_ITEM = 64 << 10
#: The most bytes of arguments that travel with the command.
SMALL_ARGUMENTS = 64 << 10
#: What cloudpickle names the file of all code.
_NO_FILE = "<dynamic-code>"


class NodeResult(Work[T_co]):
    """A Work whose result lies on a node, where other functions may use it."""

    def on_node(self, place: NodePlace) -> int:
        """Returns the ref of the result on the node of ``place``; 0 where it is none of that node's."""
        return 0


class SharedArgument(Generic[T_co]):
    """An object among arguments that a node is given once: see shared.py."""

    def reduce_for(self, place: NodePlace, beside: bool) -> tuple[Any, tuple[Any, ...]]:
        """Returns a function and its arguments that give the object on a node. ``beside``: they are for a function
        that does not wait for what the node is at."""
        raise NotImplementedError


class KeptAlive:
    """The tensors and results that a function and its arguments name; they have to live until it is queued."""

    def __init__(self, copies: bool = False) -> None:
        """``copies``: the arguments are copies, as of now, as those of an actor."""
        self.copies = copies
        self.tensors: list[DistributedTensor] = []
        self.results: dict[int, NodeResult[Any]] = {}  #: by ref
        self.classes: set[type] = set()  #: of users' objects among them that may come back
        self._copies: dict[int, tuple[Any, DistributedTensor]] = {}  #: by id: (the tensor, so that it stays, its copy)

    def __bool__(self) -> bool:
        return bool(self.tensors or self.results)

    def result(self, work: NodeResult[Any], place: NodePlace) -> int | None:
        """Keeps a result, and returns its ref; None where it is not of that node."""
        ref = work.on_node(place)
        if ref:
            self.results[ref] = work
        return (-ref if self.copies else ref) or None

    def copy(self, value: Any, tensor: DistributedTensor, place: NodePlace) -> DistributedTensor:
        """Returns a copy of a tensor that is on the node already, if it is to be one: of one that comes twice the same
        copy."""
        if not self.copies:
            return tensor
        if id(value) not in self._copies:
            mine = next(member for member in tensor._place.members if member.node == place.node)
            self._copies[id(value)] = value, seen_at.alias(tensor, mine).clone()
        return self._copies[id(value)][1]

    @property
    def refs(self) -> tuple[int, ...]:
        return (*(tensor._h.ref for tensor in self.tensors), *self.results)

    def clear(self) -> None:
        self.tensors.clear()
        self.results.clear()
        self._copies.clear()


class SentFunctions:
    """The functions that the nodes of a session have, and the order in which they get them."""

    def __init__(self) -> None:
        self.known: set[tuple[int, bytes]] = set()  #: (node, key)
        self.lock = threading.RLock()  #: held while the pieces of a function are queued, which has one key for all

    def returned(self, rank: int) -> None:
        """Forgets what a node had, in whose place another worker is."""
        self.known -= {each for each in list(self.known) if each[0] == rank}

    def forked(self) -> None:
        """Makes a new lock in a forked child: the thread that held the other one may not be there."""
        self.lock = threading.RLock()


def known_functions(session: Session) -> set[tuple[int, bytes]]:
    """Returns the (node, key) pairs of functions that nodes have. Bounded well below what a node keeps."""
    known = session.part(SentFunctions).known
    if len(known) > 512:
        known.clear()
    return known


def pickled_function(fn: Any, session: Session, place: NodePlace, keep: KeptAlive, what: str) -> tuple[bytes, bytes]:
    """Returns the pickle of a function, and its key; ``keep`` gets what is behind refs in it, and the classes of
    arguments within it. It is pickled once while all that it refers to is the same. Raises as ``pickled``."""
    modules, pickles = _modules(session), session.part(KeptPickles)
    as_imported, by_value = not modules.stale(), cloudpickle.list_registry_pickle_by_value()
    if as_imported and (kept := pickles.find(fn, by_value)) is not None:
        keep.classes |= kept.classes
        return kept.data, kept.key
    parts = None
    if as_imported:
        parts = pickles.parts_to_keep(fn, _Noting(io.BytesIO(), modules).reducer_override, by_value)
    data = pickled(fn, place, keep, what)
    if not arguments_within(fn):
        keep.classes.clear()
    key = key_of(data)
    if parts is not None and not keep:
        pickles.keep(fn, data, key, keep.classes, parts)
    return data, key


def pickled_arguments(args: tuple[Any, ...], kwargs: Any, place: NodePlace, keep: KeptAlive, what: str) -> bytes:
    """Pickles arguments as ``pickled`` does; those of plain data by Python's own pickler, which makes the same of
    them."""
    if is_plain(args) and is_plain(kwargs):
        return _within_limit(cloudpickle.pickle.dumps((args, kwargs), cloudpickle.DEFAULT_PROTOCOL))
    return pickled((args, kwargs), place, keep, what)


def pickled_item(args: tuple[Any, ...]) -> bytes:
    """Returns the pickle of a call's arguments if they are small plain data, which needs nothing but its bytes; else
    none."""
    data: bytes = cloudpickle.pickle.dumps((args, {}), cloudpickle.DEFAULT_PROTOCOL) if is_plain(args) else b""
    return data if len(data) <= SMALL_ITEM else b""


def pickled_items(items: Sequence[bytes]) -> bytes:
    """Returns the arguments of a call for several items. Each has a pickle of its own: the function may change what it
    gets, which two of them may share here."""
    data: bytes = cloudpickle.pickle.dumps(list(items), cloudpickle.DEFAULT_PROTOCOL)
    return data


def pickled(value: Any, place: NodePlace, keep: KeptAlive, what: str) -> bytes:
    """Pickles a value with its tensors, and what functions of the node have returned, replaced by refs; ``keep`` gets
    what is behind them.

    Raises TypeError that names the part that can't be pickled, ValueError for a pickle above MAX_PICKLE bytes.
    """
    buffer, modules = io.BytesIO(), _modules(session_of(place))
    try:
        _dump(_Pickler(buffer, place, keep, modules), value, modules)
    except (TypeError, cloudpickle.pickle.PicklingError) as e:
        if (found := culprit(value, what, partial(_fails, _Dry))) is not None:
            e.args = (f"{what} can't be sent to node {place.node}: {found} ({e}); {REMEDY}",)
        raise
    return _within_limit(buffer.getvalue())


def _within_limit(data: bytes) -> bytes:
    if len(data) > MAX_PICKLE:
        raise ValueError(
            f"arguments of {len(data)} bytes exceed {MAX_PICKLE >> 20} MiB when pickled; pass them as tensors"
        )
    return data


def pickled_alone(value: Any, session: Session, what: str) -> bytes:
    """Pickles a value for whichever node of a session, with its tensors, which are local.

    Raises TypeError that names the part that can't be pickled, one with a tensor on a node among them.
    """
    buffer, modules = io.BytesIO(), _modules(session)
    try:
        _dump(_Alone(buffer, modules), value, modules)
    except (TypeError, cloudpickle.pickle.PicklingError) as e:
        found = culprit(value, what, partial(_fails, partial(_Alone, modules=modules)))
        why = f"{found} ({e})" if found is not None else str(e)
        raise TypeError(f"{what} can't be sent to whichever node takes it: {why}") from None
    return buffer.getvalue()


def _dump(pickler: _Noting, value: Any, modules: ReloadedModules) -> None:
    with _by_value(stale) if (stale := modules.stale()) else contextlib.nullcontext():
        pickler.dump(value)


def _modules(session: Session) -> ReloadedModules:
    """Returns the user's modules that the nodes of this session have, or may have."""
    return session.part(ReloadedModules)


_registering = threading.RLock()


@contextlib.contextmanager
def _by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Has the functions and classes of these modules pickled by value, as those of a script or a notebook, because
    nodes have older versions."""
    with _registering:
        new = [module for module in modules if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
        for module in new:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        except (TypeError, cloudpickle.pickle.PicklingError) as e:
            names = ", ".join(module.__name__ for module in modules)
            e.add_note(
                f"nodes get {names} by value, as it has changed since they imported it; a new session imports it"
            )
            raise
        finally:
            for module in new:
                cloudpickle.unregister_pickle_by_value(module)


def _fails(pickler: Callable[[io.BytesIO], Any], value: Any) -> bool:
    """Returns whether a value can't be pickled."""
    try:
        pickler(io.BytesIO()).dump(value)
    except Exception:
        return True
    return False


def _code(code: CodeType) -> tuple[Any, tuple[Any, ...]]:
    """Reduces code as cloudpickle does, and names its file, which cloudpickle leaves out, for tracebacks of nodes."""
    make, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    file = "".join(list(code.co_filename))  # an object of its own, so that pickles of one function are alike
    return make, tuple(file if type(arg) is str and arg == _NO_FILE else arg for arg in args)


class _ByName(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that sends objects by name which torch has in the place of modules, and no open files: cloudpickle
    would send a copy of what a file holds."""

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _code}, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, io.TextIOWrapper) and value not in (sys.stdout, sys.stderr):
            raise TypeError("a file is open in this process only: pass its path, or what it holds")
        return by_name.reduced(value) or super().reducer_override(value)


class _Dry(_ByName):
    """A pickler that sends no tensors, to try values out."""

    def persistent_id(self, value: Any) -> int | None:
        return 0 if isinstance(value, torch.Tensor) else None


class _Noting(_ByName):
    """A pickler that notes of which of the user's modules nodes have something."""

    def __init__(self, file: io.BytesIO, modules: ReloadedModules) -> None:
        super().__init__(file)
        self._modules = modules

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (FunctionType, type, ModuleType)):
            self._modules.note_modules_of(value)
        return super().reducer_override(value)


class _Alone(_Noting):
    """A pickler of what goes to no node in particular."""

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, DistributedTensor | SharedArgument | Work):
            raise TypeError(f"a {type(value).__name__} is on a node; give it to the workers as an argument")


class _Pickler(_Noting):
    def __init__(self, file: io.BytesIO, place: NodePlace, keep: KeptAlive, modules: ReloadedModules) -> None:
        super().__init__(file, modules)
        self._place = place
        self._keep = keep

    def reducer_override(self, value: Any) -> Any:
        kind = value if isinstance(value, type) else type(value)
        if is_announcable(kind):
            self._keep.classes.add(kind)
        if isinstance(value, SharedArgument):
            return value.reduce_for(self._place, self._keep.copies)
        if isinstance(value, Work):  # of another node, or a copy to the script: as what it gives
            return itemgetter(0), ((value.result(),),)
        return super().reducer_override(value)

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return self._keep.result(value, self._place) if isinstance(value, NodeResult) else None
        if not isinstance(value, DistributedTensor) and layout_of(value) is not torch.strided:
            return None  # by value: there are no proxies of such layouts
        tensor: Any = value.detach()
        if not isinstance(tensor, DistributedTensor):
            tensor = upload(tensor, self._place)
        elif self._place.node not in tensor._place.ranks:  # of a mesh that the node is in it gets its own shard
            check = self._place.session.check
            tensor = (move if check is None else check.move)(tensor, self._place)
        else:
            one_session(tensor._place, self._place)
            tensor = self._keep.copy(value, tensor, self._place)
        self._keep.tensors.append(tensor)
        return int(tensor._h.ref or materialise(tensor._h))


@uninterrupted
def send_function(place: NodePlace, key: bytes, data: bytes, site: Any) -> None:
    """Queues a function, unless the node has it."""
    held = session_of(place).part(SentFunctions)
    with held.lock:
        if (place.node, key) not in held.known:
            send_once(place, key, data, site)
            held.known.add((place.node, key))


@uninterrupted
def send_once(place: NodePlace, key: bytes, data: bytes, site: Any) -> None:
    """Queues a function or arguments whose key no others have."""
    for piece, last in pieces(data):
        place.outbox.add(c.Piece(key, piece, last), site)
