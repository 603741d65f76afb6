"""The folders of tests are those of the rooms: who knows a room's name knows where its tests lie."""

from __future__ import annotations

from collections.abc import Iterator

from checkout import ROOT
from sources import agree, below, product
from test_layers import room

#: The rooms that each folder has the tests of: a folder of the product's, with or without its neighbours.
FOLDERS = {
    "autograd": ["torch_backend"],
    "channels": ["runtime.channel", "channels"],
    "checkpoint": ["checkpoint"],
    "collectives": ["runtime.collective", "collectives"],
    "data": ["data"],
    "endpoints": ["runtime.endpoints"],
    "faults": ["errors", "runtime.process"],
    "graphs": ["graphs"],
    "launch": ["runtime.launch", "runtime.host", "startup", "cli"],
    "meshes": ["meshes"],
    "nn": ["nn"],
    "ops": ["dispatch", "proxy", "session", "storage", "torch_backend", "torch_patches"],
    "seeing": ["seeing"],
    "shared": ["runtime.shared"],
    "streams": ["streams", "futures"],
    "tasks": ["tasks"],
    "testing": ["testing"],
    "training": ["training"],
    "transport": ["runtime.transport", "runtime.protocol", "runtime.master", "runtime.node"],
    "unit": ["runtime.contracts"],
    "verify": ["verify"],
    "views": ["views"],
}

#: Folders of tests of all rooms, by what they do to them.
ACROSS = {"docs", "faults", "fuzz", "kit", "simcuda", "types", "unit"}

#: Files whose first word is a room's name, and that are about something else.
NAMESAKES = {
    "collectives/test_shared_pages.py": "pages of memory that the ranks of a host share",
    "collectives/test_views_being_written.py": "views as torch has them",
    "launch/test_process_group_ends.py": "process groups, as torch has them",
    "launch/test_process_group_programs.py": "process groups, as torch has them",
    "launch/test_process_groups.py": "process groups, as torch has them",
    "ops/test_views.py": "views as torch has them",
    "seeing/test_node_hosts.py": "what is seen on hosts where only nodes run",
    "tasks/test_nodes.py": "dt.nodes()",
    "training/test_data_parallel.py": "DataParallel",
}


def files() -> Iterator[tuple[str, str]]:
    """(folder, name) of each file of tests."""
    for file in below("tests"):
        folder, _, name = file.name.removeprefix("tests/").rpartition("/")
        if folder and name.startswith("test_"):
            yield folder, name


def folders_of(word: str) -> set[str]:
    """The folders of the tests of the rooms that a word names, in the singular or the plural."""
    forms = {word, f"{word}s", f"{word}es", word.removesuffix("s"), word.removesuffix("es")}
    return {folder for folder, rooms in FOLDERS.items() if any(each.rpartition(".")[2] in forms for each in rooms)}


def test_each_room_has_a_folder():
    rooms = {found for file in product() if (found := room(file.module)) not in ("", "runtime")}
    agree(rooms, {each for listed in FOLDERS.values() for each in listed}, "FOLDERS lists the rooms")


def test_each_folder_is_a_rooms():
    folders = {folder for folder, _ in files()}
    agree(folders, FOLDERS.keys() | ACROSS, "FOLDERS and ACROSS list the folders of tests")
    assert all((ROOT / "tests" / folder).is_dir() for folder in folders)


def test_what_is_named_for_a_room_lies_in_its_folder():
    astray = [
        f"{folder}/{name}"
        for folder, name in files()
        if folder not in ACROSS
        and (there := folders_of(name.removeprefix("test_").removesuffix(".py").partition("_")[0]))
        and folder not in there
    ]
    agree(
        astray, NAMESAKES, "a file that is named for a room lies in a folder of its tests (FOLDERS), or is a namesake"
    )
