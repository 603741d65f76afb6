"""Every bound of what crosses a wire is on a list, with the test that tries it, or why nothing of a user's meets it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from checkout import TESTS
from sources import Source, agree, below, refuse, source

#: The bounds that are one of a value's: its cases below try it.
_VALUES = "test_a_value_at_its_bound"
_SMALLER = "test_a_value_at_a_bound_that_is_lowered"
_KERNELS = "an option of a socket"
_OURS = "made here, of what has a length of its own"
_KEPT = "what is kept, and not what may come: more of it is dropped, or waits"

#: Every bound: the test that tries it, or why nothing of a user's meets it.
TABLE = {
    "disttensor/dispatch/op_plan.py": {"MAX_PLANS": _KEPT},
    "disttensor/dispatch/signature_forms.py": {"MOST": "what has no form takes the way that all calls took"},
    "disttensor/dispatch/trial.py": {"_MOST": "operands of a trial in the script"},
    "disttensor/errors/late_warnings.py": {"_MOST": _KEPT, "_LONGEST": "a warning that is given: longer ones are cut"},
    "disttensor/proxy/meta.py": {"MAX_METAS": _KEPT},
    "disttensor/session/waits.py": {"_MOST": _KEPT},
    "disttensor/seeing/asked_trace.py": {
        "LONGEST": "more is refused: tests/seeing/test_jobs_commands.py",
        "MOST_DATA": "says so: tests/seeing/test_jobs_commands.py",
    },
    "disttensor/seeing/recording.py": {"MOST_BYTES": _KEPT},
    "disttensor/seeing/shares.py": {"MOST": "lines of the script that are shown"},
    "disttensor/seeing/reading.py": {"MOST": "lines of the script, and queues, that are shown"},
    "disttensor/seeing/torch_trace.py": {
        "MOST": "says so: tests/seeing/test_torch_profile.py",
        "le=2.0 ** 53": "microseconds, which are 285 years",
        "le=2 ** 63 - 1": "nanoseconds since 1970, up to 2262",
    },
    "disttensor/session/places.py": {"MAX_SLOTS": "the script's own table of meshes, which refuses at the line"},
    "disttensor/tasks/mapping.py": {"MOST": "more items are another chunk", "MOST_ITEMS": "more are another chunk"},
    "runtime/channel/shm/cuda_ipc.py": {"MOST": _KEPT, "lt=1 << 62": _OURS},
    "runtime/channel/shm/segments.py": {"MOST_IDLE": _KEPT},
    "runtime/channel/tcp/dial.py": {
        "MOST_ADDRESSES": "test_a_node_offers_no_more_addresses_than_a_peer_takes",
        "_MOST_ASKED": _KERNELS,
    },
    "runtime/channel/tcp/frames.py": {"MOST_EXTRA": "words and descriptors of carriers: " + _OURS},
    "runtime/channel/tcp/kept.py": {"MOST": _KEPT, "MOST_OF_ONE": _KEPT},
    "runtime/collective/cut.py": {"_MOST": "how finely a tensor is cut, and not what may come"},
    "runtime/collective/exchange.py": {"_MOST_SENDS": _KEPT},
    "runtime/collective/shared_pages.py": {"MOST": "more ranks take another algorithm"},
    "runtime/endpoints/connection.py": {"MAX_TAG": "test_a_tag"},
    "runtime/endpoints/frames.py": {
        "MAX_HEAD": "above MAX_DATA by more than its tensors' shapes take",
        "MAX_FIRST": "test_a_tag",
        "MAX_BYTES": "test_a_message_of_more_bytes_than_may_be",
        "MAX_TENSORS": _VALUES,
        "lt=MAX_SIZE": _VALUES,
        "max_length=MAX_WORDS": "test_a_tag",
        "max_length=MAX_TENSOR_DIMS": _VALUES,
        "max_length=MAX_TENSORS": _VALUES,
    },
    "runtime/host/job_sockets.py": {
        "MOST_REQUEST": "numbers of nodes, of which no job has so many",
        "MOST_ANSWER": "a status of nodes, and 500 lines of output: " + _OURS,
    },
    "disttensor/seeing/metrics_server.py": {"MOST": "further connections are ended: tests/seeing/test_metrics.py"},
    "runtime/host/job_window.py": {"MOST": "further connections are ended: tests/seeing/test_job_window.py"},
    "runtime/launch/rendezvous/credentials.py": {"_MOST": "a file of ours"},
    "runtime/launch/tree/control.py": {"MAX_FRAME": "a start's bundles, and pieces of output: " + _OURS},
    "runtime/launch/tree/server.py": {"MAX_STACK": "is cut"},
    "runtime/master/breakpoints.py": {
        "MAX_STOPS": "a node has so many debuggers at most",
        "MAX_UNSHOWN": "a debugger says no more than MAX_DEBUGGED for each line that is typed",
    },
    "runtime/master/command_queue.py": {
        "MAX_BATCH": _KEPT,
        "MAX_DATA": "what is there leaves",
        "MAX_FREE": "more frees are several commands",
    },
    "runtime/master/failures.py": {"MAX_TRACES": _KEPT, "MAX_ATTACHED": _KEPT, "MAX_FAILURES": _KEPT},
    "runtime/process/flight.py": {
        "MOST": "a ring of a fixed size, and what is under way: an agent that tells more is refused"
    },
    "runtime/master/outbox.py": {
        "MAX_COMMANDS": _KEPT,
        "MAX_BYTES": _KEPT,
        "LONGEST": "a number",
        "MAX_JOINED": "more is several messages",
    },
    "runtime/node/breakpoints.py": {"MAX_TALKS": "further functions go on"},
    "runtime/node/chunks.py": {
        "MOST": "a chunk ends: test_what_has_not_begun_is_given_back",
        "LONGEST": "a chunk ends: test_what_has_not_begun_is_given_back",
    },
    "runtime/node/description.py": {"MOST": "devices and rows of transfers that a node tells of"},
    "runtime/node/readers.py": {"_MOST_WARNINGS": _KEPT},
    "runtime/node/user_functions.py": {
        "MAX_PICKLE": "tests/tasks/test_run.py: the script refuses it at the line",
        "MAX_KEPT": _KEPT,
    },
    "runtime/protocol/codec.py": {
        "MAX_MESSAGE": "test_a_call_that_no_message_carries",
        "MAX_DEVICES": "devices that a host has",
        "MAX_HOST": "DNS has no longer names",
        "MAX_ADDRESS": "test_a_node_offers_no_more_addresses_than_a_peer_takes",
        "MAX_DIMS": "a mesh of 64 dims has 2 ** 64 nodes, or dims of one: the script refuses more",
        "MAX_TENSOR_DIMS": _VALUES,
        "MAX_COPY": "test_a_copy_that_is_too_large",
        "MAX_REASON": "one_line cuts it",
        "MAX_DEBUGGED": "tests/seeing/test_breakpoints.py: test_a_long_answer_is_cut",
        "MAX_PATH": "is cut",
        "MAX_FIGURES": _OURS,
        "MAX_FIGURE": _OURS,
        "MAX_HELD": "the script says how many it wants",
        "MAX_WHAT": "is cut",
    },
    "runtime/protocol/failure_ids.py": {"MAX_TEXT": "is cut", "MAX_NAME": "is cut", "MAX_ARGS": "more are left out"},
    "runtime/protocol/rank_lists.py": {"MAX_RANKS": "ranks are nodes of the session, which has fewer"},
    "runtime/protocol/shared_objects.py": {
        "MAX_ITEM": "test_an_item_of_more_bytes_than_may_be",
        "MAX_WHOLE": "above MAX_ITEM by more than stands around an item",
        "MAX_TENSORS": _VALUES,
        "MAX_SELECTED": "test_select",
        "MAX_WORDS": "test_names_in_what_is_shared",
        "MAX_TENSOR_DIMS": _VALUES,
        "MAX_SIZE": _VALUES,
        "MAX_KEY": "test_a_key",
        "lt=MAX_SIZE": _VALUES,
        "max_length=1": _OURS,
        "max_length=MAX_WORDS": "test_names_in_what_is_shared",
        "max_length=MAX_KEY": "test_a_key",
        "max_length=MAX_TENSOR_DIMS": _VALUES,
        "max_length=MAX_TENSORS": _VALUES,
        "max_length=MAX_SELECTED": "test_select",
        "MAX_HANDLES": "test_handles_of_actors_in_a_call",
        "max_length=MAX_HANDLES": "test_handles_of_actors_in_a_call",
        "MAX_RAISED": "what a node tells of an error: " + _OURS,
        "le=WAIT": _OURS,
    },
    "runtime/node/warned.py": {"_MOST": _KEPT},
    "runtime/protocol/values/announced.py": {"MAX_ATTRIBUTES": "test_an_exception_with_attributes"},
    "runtime/protocol/values/arrays.py": {"_MOST": _VALUES},
    "runtime/protocol/values/form.py": {
        "MAX_DATA": _SMALLER,
        "MAX_BROUGHT": _SMALLER,
        "MAX_OBJECTS": _SMALLER,
        "MAX_CONTAINERS": _SMALLER,
        "MAX_DEPTH": _VALUES,
    },
    "runtime/protocol/values/plain_types.py": {"MAX_FRACTION": _VALUES},
    "runtime/shared/objects.py": {"MAX_HELD": _KEPT, "MAX_WAITING": _KEPT, "MAX_REQUESTS": _KEPT},
    "runtime/shared/service.py": {"MAX_UNREAD": "a client reads what it asks for"},
    "runtime/host/tcp_info.py": {"_MOST": _KERNELS, "_MOST_BETWEEN_TRIES": _KERNELS},
    "runtime/transport/spoke.py": {"_MOST_WAITS": "seconds"},
    "runtime/transport/sockets.py": {
        "_MOST_ASKED": _KERNELS,
        "MAX_MESSAGE": "test_a_call_that_no_message_carries",
        "FRAME_LIMIT": "MAX_MESSAGE, and what stands around it",
        "MOST_UNREAD": _KEPT,
    },
    "runtime/transport/zmq.py": {"MAX_UNFINISHED": "above what messages have"},
}

_NAME = re.compile(r"_?(MAX|MOST|LONGEST)(_|$)|.*_(MAX|MOST)$|FRAME_LIMIT$")


def bounds_of(file: Source) -> Iterator[str]:
    """The bounds that a file has: constants by their names, and constraints of what is decoded by their text."""
    for node in file.tree.body:
        for target in getattr(node, "targets", None) or [getattr(node, "target", None)]:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Name) and _NAME.match(each.id):
                    yield each.id
    for node in file.nodes(ast.Call):
        if isinstance(node.func, ast.Name | ast.Attribute) and _last(node.func).endswith("Meta"):
            yield from (f"{k.arg}={ast.unparse(k.value)}" for k in node.keywords if k.arg in ("le", "lt", "max_length"))


def _last(name: ast.Name | ast.Attribute) -> str:
    return name.attr if isinstance(name, ast.Attribute) else name.id


def test_the_table_is_whole() -> None:
    code = (f"{file.name} {bound}" for file in below("runtime", "disttensor") for bound in bounds_of(file))
    agree(code, (f"{name} {bound}" for name, bounds in TABLE.items() for bound in bounds), "TABLE has every bound")


def test_the_tests_of_bounds_are_there() -> None:
    tests = {where for bounds in TABLE.values() for where in bounds.values() if where.startswith("test_")}
    files = [source(TESTS / "transport" / name) for name in ("test_bounds.py", "test_lowered_bounds.py")]
    there = {node.name for file in files for node in file.tree.body if isinstance(node, ast.FunctionDef)}
    refuse(sorted(tests - there), "a bound's test is there")
