"""The rows of commands (runtime/protocol/traits.py): none is missing, and each says what its command does."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from dataclasses import fields
from typing import get_args

import pytest

from disttensor.runtime.channel.tcp import handshake
from disttensor.runtime.endpoints import frames
from disttensor.runtime.node.executor import CommandExecutor
from disttensor.runtime.node.state import NodeState
from disttensor.runtime.node.streams.scheduler import Scheduler
from disttensor.runtime.protocol import arguments, codec, shared_objects, side
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.traits import TRAITS, Traits, kinds, request_of

COMMANDS = get_args(c.Command)
#: Fields of commands that are refs of tensors, of one or of several.
REFS = {"ref", "out", "refs", "inputs", "outs"}


class Operator:
    """The template of a call with one tensor that it reads, one that it writes, and two results."""

    def operands(self, out: int, args: tuple[c.Plain, ...]) -> list[int]:
        return [out - 1, out - 2]

    def written(self, out: int, args: tuple[c.Plain, ...]) -> list[int]:
        return [out - 2]

    def results(self, out: int, args: tuple[c.Plain, ...]) -> list[int]:
        return [out, out - 3]


def example(kind: type[c.Command], **more: object) -> c.Command:
    """A command whose fields named in REFS hold 100, 101, ..."""
    given: dict[str, object] = {}
    for i, (name, annotation) in enumerate(kind.__annotations__.items()):
        text = str(annotation)
        if name in REFS:
            given[name] = (100 + 2 * i, 101 + 2 * i) if text.startswith("tuple") else 100 + 2 * i
        elif text.startswith("tuple"):
            given[name] = ()
        elif text == "str":
            given[name] = ""
        elif text == "bytes":
            given[name] = b""
        elif text == "bool":
            given[name] = False
        else:
            given[name] = 0
    return kind(**{**given, **more})  # type: ignore[arg-type]


def refs_of(command: c.Command) -> set[int]:
    found: set[int] = set()
    for name in REFS & set(type(command).__struct_fields__):
        value = getattr(command, name)
        found |= set(value) if isinstance(value, tuple) else {value}
    return found


def cases_of(function: object) -> set[str]:
    """The commands that a function's ``match`` has a case for."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))  # type: ignore[arg-type]
    return {ast.unparse(node.cls).removeprefix("c.") for node in ast.walk(tree) if isinstance(node, ast.MatchClass)}


def test_every_command_has_a_row() -> None:
    assert set(COMMANDS) == set(TRAITS)


def test_the_executor_does_every_command() -> None:
    assert cases_of(CommandExecutor.other) == {kind.__name__ for kind in COMMANDS} - {"First"}  # it is a Call


def test_what_needs_its_operands_only_has_an_effect() -> None:
    assert cases_of(NodeState.effect) == {kind.__name__ for kind in kinds("anywhere")}


def test_lanes_do_what_may_stand_on_a_stream() -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(Scheduler.__init__)))
    (table,) = (node for node in ast.walk(tree) if isinstance(node, ast.Dict) and None in node.keys)
    named = {ast.unparse(key).removeprefix("c.") for key in table.keys if key is not None}
    assert named | {kind.__name__ for kind in kinds("anywhere")} == {kind.__name__ for kind in kinds("on_stream")}


def test_a_stream_takes_what_may_stand_on_it() -> None:
    (union,) = (
        get_args(hint) for name, hint in inspect.get_annotations(c.On, eval_str=True).items() if name == "command"
    )
    assert set(union) == kinds("on_stream")


def test_a_graph_takes_what_it_can_hold() -> None:
    commands = inspect.get_annotations(c.GraphPart, eval_str=True)["commands"]
    assert set(get_args(get_args(commands)[0])) == kinds("recordable")


@pytest.mark.parametrize(
    "kind", sorted(kinds("on_stream"), key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__
)
def test_a_row_names_all_tensors(kind: type[c.Command]) -> None:
    """What a command for a stream names is read or made: a graph would free it too early, poison would miss it."""
    if kind in (c.Call, c.First, c.Ask):
        call = c.Call(0, 100, ())
        command = {c.Call: call, c.Ask: c.Ask(1, call), c.First: c.First(0, 100, (), (), (), ())}[kind]
        row, operator = TRAITS[kind], Operator()
        assert list(row.reads(command, operator)) == [99, 98]
        assert list(row.writes(command, operator)) == [98]
        assert list(row.makes(command, operator)) == [100, 97]
        return
    variants = [{"restore": True}, {"restore": False}] if kind is c.Keep else [{}]
    for more in variants:
        command = example(kind, **more)
        row = TRAITS[kind]
        named = {*row.reads(command, None), *row.makes(command, None)}
        if kind in (c.Record, c.Wait, c.Replay):  # events, and what a graph names, are the executor's
            assert not named
        else:
            assert named == refs_of(command)
        assert set(row.writes(command, None)) <= set(row.reads(command, None))
        assert not set(row.reads(command, None)) & set(row.makes(command, None))


def test_what_has_a_request_is_answered() -> None:
    asking = {kind for kind in COMMANDS if "request" in kind.__struct_fields__}
    assert asking - {kind for kind in COMMANDS if TRAITS[kind].answers} == {c.Adopt}  # the request of the Run before it
    assert asking >= {kind for kind in COMMANDS if TRAITS[kind].answers}
    named = {kind for kind in get_args(c.Reply) if {"request", "requests"} & {*kind.__struct_fields__}}
    assert {reply for traits in TRAITS.values() for reply in traits.answers} == named - {
        c.Poisoned,
        c.Mapped,
    }  # to all; beside a Result


#: Replies of which decoding and the link check all that can be checked, and why.
UNCHECKED = {
    c.Answer: "a value is the user's, and may be any",
    c.Downloaded: "who has asked for a tensor's elements knows its shape and dtype, and compares",
    c.Warned: "the link knows which commands it has sent; texts are cut where they are shown",
    c.Poisoned: "the link knows which commands and nodes there are",
    c.Done: "says nothing",
    c.TookPart: "the link knows which requests are due",
}


def test_no_message_has_the_name_of_another() -> None:
    """Who reads ``Hello`` knows whose: a node's, another program's or a peer's."""
    found = Counter(
        name
        for module in (arguments, c, side, shared_objects, frames, handshake)
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and kind.__module__ == module.__name__ and not name.startswith("_")
    )
    assert found["Hello"] == found["EndpointHello"] == found["PeerHello"] == 1
    assert [name for name, count in found.items() if count > 1] == []


def test_every_reply_has_a_row() -> None:
    """That it has nothing to check has to be said: numbers may be below zero, or none at all, and texts play tricks."""
    assert codec.REPLIES.keys() == set(get_args(c.Reply))
    assert {kind for kind, row in codec.REPLIES.items() if row.check is codec._nothing} == UNCHECKED.keys()
    assert {kind for kind, row in codec.REPLIES.items() if row.awaited} == {
        kind for kind in get_args(c.Reply) if "request" in kind.__struct_fields__ and kind is not c.Mapped
    }


def test_the_request_of_a_command() -> None:
    assert request_of(c.Sync(7)) == request_of(c.On(2, c.Run(7, b"", b"", True, ""))) == 7
    told = c.Collective("barrier", 1, c.RankList((0,)), (), (), (), 0, 0, 0, "", 0, 0, -1, c.RankList(()), 0)
    assert (
        request_of(told)
        == request_of(c.Adopt(7, ()))
        == request_of(c.On(2, c.Wait(1)))
        == request_of(c.StopNode())
        == -1
    )


def test_what_a_graph_holds_is_routed_to_it() -> None:
    # a Switch concerns the node as a whole, and is given to the recorder by hand (session/switches.py)
    assert kinds("recordable") - {c.Switch} <= kinds("routed") <= kinds("on_stream")
    assert kinds("renumbered") == {kind for kind in kinds("recordable") if "transfer" in kind.__struct_fields__}
    assert {field.name for field in fields(Traits)} >= {"reads", "writes", "makes"}
