"""Ships modules that lie beside the user's script to hosts that don't see its directory.

    root: gather(folder) -> Sources, packed into one frame --> fork server of another host: import_shipped(frame)
                                                                 the same files lie there: nothing to do
                                                                 else: imports from that folder are served from memory

The nodes have the master's sys.path, so they look in the folder where Python would, and a path hook answers in place of
the file system. Tracebacks name the master's files and show their lines. Nothing is written on the other host, so
nothing is left there, however its processes end. Only sources are shipped: no data files, no compiled modules.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import os
import sys
import types
import zlib
from collections.abc import Iterator

import msgspec

from ...protocol.errors import UNDECODABLE, StartError

#: The most bytes of sources, and of these when packed: the frame that carries them may have twice as many.
LIMIT, PACKED = 16 << 20, 1 << 20
#: The most entries of directories that are looked at: the script may lie in somebody's home.
ENTRIES = 20_000


class TooMuch(ValueError):
    """The files are too many or too large to be the modules of one program; the message says what was too much."""


class Sources(msgspec.Struct, frozen=True):
    """The Python files below a folder, by their path in it."""

    folder: str
    files: dict[str, bytes]

    def digest(self) -> bytes:
        """Returns a digest that is the same for the same files."""
        it = hashlib.blake2b(digest_size=16)
        for name, data in sorted(self.files.items()):
            at = os.fsencode(name)
            it.update(b"%d %d " % (len(at), len(data)) + at + data)
        return it.digest()

    def pack(self) -> bytes:
        """Packs the sources for ``unpack``. Raises TooMuch, StartError for a name that is no UTF-8."""
        try:
            packed = zlib.compress(msgspec.msgpack.encode(self))
        except UnicodeEncodeError as e:
            raise StartError(
                f"{e.object!r:.200} can't go to the nodes' hosts with the program: its name is no UTF-8; rename it"
            ) from None
        if len(packed) > PACKED:
            raise TooMuch(f"more than {PACKED >> 20} MiB of sources when packed")
        return packed


def unpack(packed: bytes) -> Sources:
    """Unpacks sources. Raises ValueError for bytes that ``pack`` has not made."""
    unpacker = zlib.decompressobj()
    try:
        return msgspec.msgpack.decode(unpacker.decompress(packed, 2 * LIMIT), type=Sources)
    except (zlib.error, *UNDECODABLE) as e:
        raise ValueError(f"these are no packed modules: {e}") from e


def gather(folder: str) -> Sources:
    """Reads the modules that a program in this folder can import from it.

    Raises TooMuch; an unreadable file is left out.
    """
    files, total = {}, 0
    for path in _python_files(folder):
        try:
            with open(path, "rb") as file:
                data = file.read(LIMIT + 1)
        except OSError:
            continue
        total += len(data)
        if total > LIMIT:
            raise TooMuch(f"more than {LIMIT >> 20} MiB of sources")
        files[os.path.relpath(path, folder)] = data
    return Sources(folder, files)


def offer(folder: str) -> bytes:
    """Returns the packed sources of a script's folder; empty where that is too much, which is reported on stderr."""
    try:
        sources = gather(folder) if folder else Sources("", {})
        return sources.pack() if sources.files else b""
    except TooMuch as e:
        print(f"disttensor: modules beside the script are not sent to other hosts: {folder} has {e}", file=sys.stderr)
        return b""


def _python_files(folder: str) -> Iterator[str]:
    """Yields Python files, without environments, caches and hidden directories.

    A directory that several links lead to is seen once.
    """
    seen, entries = set(), 0
    for here, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(here)
        entries += 1 + len(folders) + len(files)
        if entries > ENTRIES:
            raise TooMuch(f"more than {ENTRIES} files and directories")
        if real in seen or (here != folder and "pyvenv.cfg" in files):
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(n for n in folders if not n.startswith(".") and n not in ("__pycache__", "site-packages"))
        yield from (os.path.join(here, name) for name in files if name.endswith(".py") and _is_text(here + name))


def _is_text(name: str) -> bool:
    """Returns whether a name is UTF-8: of another, Python makes half characters, which no frame carries."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def import_shipped(packed: bytes) -> bool:
    """Has this process, and those that it forks, import these modules; returns False when they lie here as well.

    Raises ValueError as ``unpack`` does.
    """
    sources = unpack(packed)
    try:
        if os.path.isdir(sources.folder) and gather(sources.folder).digest() == sources.digest():
            return False
    except TooMuch:
        pass  # so the files here are others
    _serve(sources)
    return True


def _serve(sources: Sources) -> None:
    folders = {sources.folder}
    for name in sources.files:
        while name := os.path.dirname(name):
            folders.add(os.path.join(sources.folder, name))

    def hook(path: str) -> _Finder:
        if path not in folders:
            raise ImportError(f"nothing was shipped for {path}")
        return _Finder(path, sources, folders)

    sys.path_hooks.insert(0, hook)
    for path in [p for p in sys.path_importer_cache if p == sources.folder or p.startswith(sources.folder + os.sep)]:
        del sys.path_importer_cache[path]


class _Finder(importlib.abc.PathEntryFinder):
    """Finds the modules that lie in one folder."""

    def __init__(self, path: str, sources: Sources, folders: set[str]) -> None:
        self._path = path
        self._sources = sources
        self._folders = folders

    def find_spec(self, fullname: str, target: types.ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        path = os.path.join(self._path, fullname.rpartition(".")[2])
        for file, locations in ((os.path.join(path, "__init__.py"), [path]), (path + ".py", None)):
            if os.path.relpath(file, self._sources.folder) in self._sources.files:
                loader = _Loader(fullname, file, self._sources)
                return importlib.util.spec_from_file_location(
                    fullname, file, loader=loader, submodule_search_locations=locations
                )
        if path not in self._folders:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)  # a portion of a namespace
        spec.submodule_search_locations = [path]
        return spec


class _Loader(importlib.abc.SourceLoader):
    def __init__(self, name: str, path: str, sources: Sources) -> None:
        self._name, self._path, self._sources = name, path, sources

    def get_filename(self, fullname: str) -> str:
        return self._path

    def exec_module(self, module: types.ModuleType) -> None:
        """Executes the module, and caches the lines that tracebacks show: another file may lie at the same path."""
        text = importlib.util.decode_source(self.get_data(self._path))
        linecache.cache[self._path] = len(text), None, text.splitlines(keepends=True), self._path
        super().exec_module(module)

    def get_data(self, path: str | bytes) -> bytes:
        """Returns a file's bytes. Raises OSError for a file that was not shipped, such as a cached compiled one."""
        try:
            return self._sources.files[os.path.relpath(os.fsdecode(path), self._sources.folder)]
        except KeyError:
            raise FileNotFoundError(path) from None
