"""Handles of actors that travel: calls from nodes, in order; what comes back; who keeps an actor; ends and losses."""

from __future__ import annotations

import asyncio
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from aftermath import aftermath
from handles_kit import Asks, Client, Kept, Server, closed, find, later, let_go, say
from limits import HANG
from stream_kit import held, hold, release

import disttensor as dt
from disttensor import testing

# ---- calls -----------------------------------------------------------------------------------------------------------


def test_functions_on_all_nodes_call_in_order(session: None) -> None:
    server = dt.actor(Server, node=1)
    works = [dt.submit(say, server, k, 20, node=k) for k in range(3)]
    mine = [server.say("script", k) for k in range(20)]
    numbers = [*(work.result() for work in works), [work.result() for work in mine]]
    assert all(found == sorted(found) for found in numbers)
    assert sorted(k for found in numbers for k in found) == list(range(1, 81))
    said = server.all().result()
    for who in (0, 1, 2, "script"):
        assert [k for caller, k in said if caller == who] == list(range(20))


def test_a_handle_lies_in_what_is_given(session: None) -> None:
    server = dt.actor(Server, node=0)
    assert dt.run(lambda kept: kept.server.say("dataclass", 0).result(), Kept(server), node=1) == 1
    assert dt.run(lambda *, found: found["a"][0].say("deep", 0).result(), found={"a": [server]}, node=2) == 2
    assert list(dt.map(lambda each: each[1].say("map", each[0]).wait(), [(k, server) for k in range(4)])) == [True] * 4
    assert dt.run(lambda x: x.say("each", 0).wait(), server, node=dt.mesh(dp=2, nodes=[1, 2])) == [True, True]
    with dt.tasks.Executor() as pool:
        assert pool.submit(say, server, "pool", 1).result() == [9]
    assert len(server.all().result()) == 9


def test_an_actor_keeps_a_handle_and_calls_later(session: None) -> None:
    server = dt.actor(Server, node=1)
    near, far = dt.actor(Client, {"server": server}, node=1), dt.actor(Client, node=2)
    assert near.say("near", 3).result() == [1, 2, 3]
    near.give(far).wait()  # from actor to actor, and not from the script
    assert far.say("far", 2).result() == [4, 5]


def test_what_goes_and_what_comes_back(session: None) -> None:
    def call(server: Any) -> Any:
        x = torch.arange(3.0)
        work = server.double({"x": [x, 2, "ab"]}, times=3)
        x.zero_()  # it has what it was
        found = work.result()
        assert torch.equal(found["x"][0], torch.tensor([0.0, 3.0, 6.0]))
        found["x"][0].zero_()
        assert repr(work).startswith("<Work done: Server.double() on node 1")
        assert repr(server) == "<actor Server on node 1>"
        assert (server.node, "say" in dir(server), work.is_completed(), work.exception()) == (1, True, True, None)
        return found["x"][1:]

    server, channel = dt.actor(Server, node=1), dt.tasks.Channel()
    for node in (0, 1):
        assert dt.run(call, server, node=node) == [6, "ababab"]

    async def awaited(server: Any) -> int:
        return await server.say("awaited", 0) + await server.say("awaited", 1)

    assert dt.run(lambda server: asyncio.run(awaited(server)), server, node=2) == 3
    dt.run(lambda server, out: server.put(out, 5).wait(), server, channel, node=2)
    assert channel.get(timeout=60) == 5


def test_errors_come_back_to_the_caller_with_its_line(session: None) -> None:
    def call(server: Any) -> list[str]:
        work = server.fail("k")
        try:
            work.result()
        except KeyError as error:
            return [*error.args, *error.__notes__]
        return []

    key, failed, trace = dt.run(call, dt.actor(Server, node=1), node=0)
    line = call.__code__.co_firstlineno + 1
    assert key == "k"
    assert failed.startswith("  failed: Server.fail() on node 1 (host ")
    assert failed.endswith(f":{line} in test_errors_come_back_to_the_caller_with_its_line.<locals>.call")
    assert "raise KeyError(key)" in trace or "in fail" in trace


def test_mistakes_are_told_on_the_node(session: None) -> None:
    def told(server: Any) -> list[str]:
        said = []
        for use in (
            lambda: server.sayy(1),
            lambda: server.close(),
            lambda: server(),
            lambda: server.say(threading.Lock(), 1),
            lambda: server.say("missing").result(),
            lambda: server.thing().result(),
            lambda: server.itself(server).result(),
            lambda: server.later().result(),
            lambda: server.double(torch.empty(1 << 25, dtype=torch.int8)[:1].expand(65 << 20)),
            lambda: server.itself([server] * 1025),
            lambda: pickle.dumps(server),
        ):
            try:
                said.append(f"nothing: {use()!r}")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        return said

    found = dt.run(told, dt.actor(Server, node=1), node=0)
    for text, part in zip(
        found,
        [
            "AttributeError: Server has no method 'sayy'; did you mean 'say'",
            "AttributeError: <actor Server on node 1> is closed by the script, and when the last handle of it goes",
            "TypeError: Server can't be called: it has no __call__",
            "TypeError: an argument of Server.say() has a _thread.lock",
            "TypeError: Server.say() missing 1 required positional argument: 'k'",
            "TypeError: what Server.thing() returned has a _thread.lock",
            "TypeError: a method of <actor Server on node 1> returned <actor Server on node 1>; give it as an argument",
            "TypeError: Server.later() is async",
            "ValueError: an argument of Server.double() has 68157",
            "ValueError: Server.itself(): its arguments have 1025 handles of actors, and may have 1024",
            "DisttensorError: <actor Server on node 1> can't be saved: give it as an argument to an actor",
        ],
        strict=True,
    ):
        assert text.startswith(part), text


def test_a_handle_is_no_item_and_no_result(session: None) -> None:
    server, channel, table = dt.actor(Server, node=1), dt.tasks.Channel(), dt.tasks.SharedDict()
    for put in (lambda: channel.put([server]), lambda: table.__setitem__("s", server)):
        with pytest.raises(TypeError, match=r"<actor Server on node 1> can't be put into .*: give it as an argument"):
            put()
    with pytest.raises(TypeError, match="can't be put into"):
        dt.run(lambda server, out: out.put(server), server, channel, node=0)
    with pytest.raises(TypeError, match=r"returned a .*ActorHandle"):
        dt.run(lambda server: server, server, node=0)


def test_an_error_of_init_is_that_of_each_call(session: None) -> None:
    bad = dt.actor(Client, path=1, box=object.__new__(Bad), node=1)
    assert isinstance(bad.ready.exception(), ValueError)

    def call(bad: Any) -> str:
        try:
            return str(bad.answer().result())
        except ValueError as error:
            return str(error)

    assert dt.run(call, bad, node=0) == "it does not come out"
    assert dt.run(call, bad, node=1) == "it does not come out"


class Bad:
    """Fails where it is unpickled."""

    def __setstate__(self, _: Any) -> None:
        raise ValueError("it does not come out")

    def __getstate__(self) -> Any:
        return 1


# ---- who waits for whom ----------------------------------------------------------------------------------------------


def test_a_call_to_oneself_is_an_error_and_no_hang(session: None) -> None:
    client = dt.actor(Client, node=1)
    client.keep({"server": client}).wait()
    with pytest.raises(dt.DisttensorError, match=r"Client.ask\(\): a method of an actor waits for a call of the same"):
        client.ask().result()
    client.ask_later().wait()  # without waiting it is a call like others
    pause = threading.Event()
    while client.heard().result() != 7:
        pause.wait(0.01)
    client.close().wait()


@pytest.mark.parametrize("nodes", [(0, 1, 2), (1, 1, 1), (0, 1)])
def test_actors_that_wait_for_each_other_are_told(session: None, nodes: tuple[int, ...]) -> None:
    actors = [dt.actor(Client, node=node) for node in nodes]
    for one, other in zip(actors, [*actors[1:], actors[0]], strict=True):
        one.keep({"server": other}).wait()
    circle = " -> ".join(["Client"] * (len(nodes) + 1))
    with pytest.raises(dt.DisttensorError, match=f"actors wait for each other: {circle}"):
        actors[0].ask().result()
    assert actors[1].answer().result() == 7
    for each in actors:
        each.close().wait()


@pytest.mark.parametrize("wait", ["a method", "__init__"])
@pytest.mark.parametrize("first", ["it waits", "its handle travels"])
@pytest.mark.parametrize("nodes", [(0, 1), (2, 2)])
def test_one_that_waits_before_its_handle_travels_is_told(
    session: None, nodes: tuple[int, int], first: str, wait: str
) -> None:
    one, name = dt.actor(Client, node=nodes[0]), f"{first}-{wait}-{nodes}"
    asked = one.ask_found(name)
    dt.submit(held, name, node=nodes[0], beside=True).wait()
    begun: Any = None
    if wait == "__init__":
        begun = dt.actor(Asks, one, name + "-waits", "" if first == "it waits" else name + "-begins", node=nodes[1])
        other, begun = begun, begun.ready
    else:
        other = dt.actor(Client, {"server": one}, node=nodes[1])
        begun = other.answer_of(name + "-waits") if first == "it waits" else None
    if first == "it waits":
        dt.submit(held, name + "-waits", node=nodes[1], beside=True).wait()
        later()
    dt.submit(find, name, other, node=nodes[0], beside=True).wait()
    if begun is None:
        begun = other.answer_of(name + "-waits")
    elif first != "it waits":
        dt.submit(release, name + "-begins", node=nodes[1], beside=True).wait()
    if first != "it waits":  # else it may answer first, and wait for nobody who waits for it
        dt.submit(held, name + "-waits", node=nodes[1], beside=True).wait()
    dt.submit(release, name, node=nodes[0], beside=True).wait()
    try:
        errors = [str(work.exception(timeout=HANG / 2)) for work in (begun, asked)]
    except TimeoutError:
        for node in set(nodes):
            dt.kill(node)  # or the session's end waits for them as well
        raise
    assert any("actors wait for each other: " in error for error in errors), errors
    for each in (one, other):
        each.close().exception()


# ---- who keeps it ----------------------------------------------------------------------------------------------------


def test_it_lives_while_a_node_has_a_handle(session: None, tmp_path: Path) -> None:
    path = tmp_path / "said"
    with aftermath(1):
        server = dt.actor(Server, str(path), node=1)
        client = dt.actor(Client, {"server": server}, node=2)
        client.say("first", 1).wait()
        del server
        later()
        assert client.say("still", 1).result() == [2]
        assert not path.exists()
        client.keep(None).wait()
        closed(path)
        client.close().wait()


@pytest.mark.parametrize("how", ["close", "drop", "other"])
def test_it_ends_with_the_actor_that_had_the_last_handle(session: None, tmp_path: Path, how: str) -> None:
    path = tmp_path / "said"
    client = dt.actor(Client, {"server": dt.actor(Server, str(path), node=1)}, node=2)
    other = dt.actor(Client, node=0)
    client.give(other).wait()
    assert other.say("other", 1).result() == [1]
    if how == "close":
        client.close().wait()
    elif how == "drop":
        del client
    else:
        other, client = client, other  # whichever goes first
        client.close().wait()
        del client
    later()
    assert not path.exists()
    other.close().wait()
    closed(path)


def test_a_temporary_handle_lives_as_long_as_its_function(session: None, tmp_path: Path) -> None:
    for node in (0, 1):
        path = tmp_path / f"said{node}"
        work = dt.submit(say, dt.actor(Server, str(path), node=1), "x", 3, node=node)
        assert work.result() == [1, 2, 3]
        closed(path)


def test_a_function_that_fails_or_never_begins_keeps_nothing(session: None, tmp_path: Path) -> None:
    def fail(server: Any) -> None:
        kept = [server]
        raise ValueError(f"with {kept}")

    path = tmp_path / "raised"
    with pytest.raises(ValueError, match=r"with .*actor Server"):
        dt.run(fail, dt.actor(Server, str(path), node=1), node=0)
    closed(path)

    path = tmp_path / "argument"
    with pytest.raises(ValueError, match="it does not come out"):
        dt.run(len, [object.__new__(Bad), dt.actor(Server, str(path), node=1)], node=0)
    closed(path)

    path, _lanes = tmp_path / "cancelled", dt.actor(Client, node=0)  # a node with streams runs functions on lanes
    blocks = dt.submit(hold, "handles-cancelled", node=0)
    work = dt.submit(say, dt.actor(Server, str(path), node=1), "x", 1, node=0)
    work.cancel()
    let_go("handles-cancelled")
    assert blocks.result()
    with pytest.raises(dt.errors.CancelledError):
        work.result()
    closed(path)


def test_the_caller_drops_what_it_gives_on(session: None, tmp_path: Path) -> None:
    """A handle among arguments of a call that has not begun keeps the actor."""
    path = tmp_path / "said"
    busy, server = dt.actor(Client, {"server": dt.actor(Server, node=0)}, node=2), dt.actor(Server, str(path), node=1)
    waiting = busy.hold("handles-given")
    dt.submit(held, "handles-given", node=0, beside=True).wait()

    def give(busy: Any, server: Any) -> None:
        busy.keep({"server": server})

    dt.run(give, busy, server, node=0)
    del server
    later()
    assert not path.exists()
    let_go("handles-given")
    assert waiting.result()
    assert busy.say("kept", 1).result() == [1]
    busy.close().wait()
    closed(path)


def test_a_closed_actor_tells_all_who_call(session: None) -> None:
    server = dt.actor(Server, node=1)
    clients = [dt.actor(Client, {"server": server}, node=node) for node in (0, 2)]
    holding = clients[0].hold("handles-closed")
    dt.submit(held, "handles-closed", node=1, beside=True).wait()
    queued = clients[1].say("queued", 1)
    closing = server.close()
    dt.submit(release, "handles-closed", node=1, beside=True).wait()
    assert holding.result() is True
    assert closing.wait()
    assert queued.exception() is None or "is closed" in str(queued.exception())
    for client in clients:
        with pytest.raises(dt.DisttensorError, match=r"the actor Server is closed|<actor Server on node 1> is closed"):
            client.say("late", 1).result()
    with pytest.raises(dt.DisttensorError, match="is closed"):
        dt.run(say, server, "late", 1, node=0)


def test_a_stopped_node_is_waited_for(session: None) -> None:
    def ask(server: Any, timeout: float) -> str:
        work = server.say("stopped", 0)
        try:
            return str(work.result(timeout))
        except TimeoutError as error:
            return str(error)

    server = dt.actor(Server, node=1)
    assert dt.run(ask, server, 60, node=0) == "1"
    testing.stop(1)
    try:
        assert dt.run(ask, server, 0.2, node=0) == "Server.say() on node 1 has not ended within 0.2 s"
    finally:
        testing.resume(1)
    assert dt.run(ask, server, 60, node=0) == "3"  # each was done once, in order
