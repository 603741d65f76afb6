"""Random programs over nodes, overlapping meshes, slices, graphs and streams: made from a seed, run on nodes, compared
with their twin (mesh_twin.py), and where they differ made shorter and printed as a script.

A program is a list of statements, each with the line of a script that it stands for. The generator has the twin do each
statement as it proposes it, and leaves out what the twin refuses; so a program that loses some of its statements is a
program again, and shrinking needs no more than that.
"""

from __future__ import annotations

import contextlib
import random
import re
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from mesh_twin import OUT_OF_RANGE, Dims, Refused, Seen, Statement, Twin, Value, Where, bits

import disttensor as dt

NODES = 6
#: Meshes that overlap, by the line that makes each, with other dims of the same place.
MESHES: dict[Where, tuple[str, list[Dims]]] = {
    Where((0, 1, 2, 3, 4, 5), (("dp", 2), ("tp", 3))): ("dt.mesh(dp=2, tp=3)", []),
    Where((0, 1, 2), (("tp", 3),)): ("dt.mesh(dp=2, tp=3).slice(dp=0)", []),
    Where((1, 4), (("dp", 2),)): ("dt.mesh(dp=2, tp=3).slice(tp=1)", []),
    Where((4, 1), (("dp", 2),)): ("dt.mesh(dp=2, nodes=[4, 1])", []),
    Where((3, 1, 4, 0), (("x", 2), ("y", 2))): ("dt.mesh(x=2, y=2, nodes=[3, 1, 4, 0])", []),
    Where((5, 2, 0, 3), (("row", 4),)): (
        'dt.mesh(row=4, nodes=[5, 2, 0, 3]); {0}.split(row=("outer", "inner"), outer=2)',
        [(("outer", 2), ("inner", 2))],
    ),
    Where((5, 4, 3, 2, 1, 0), (("all", 6),)): ("dt.mesh(all=6, nodes=[5, 4, 3, 2, 1, 0])", []),
    Where((2,), (("one", 1),)): ("dt.mesh(one=1, nodes=[2])", []),
}
NODE_PLACES = [Where((node,)) for node in range(NODES)]
#: Streams, with their nodes.
STREAMS = {"s4": 4, "s5": 5}
SHAPES = [
    *((4, 6), (6, 4), (4, 6), (2, 6), (12,), (6,), (2, 3), (6, 2)),
    *((1, 6), (6, 1), (1, 4), (), (2, 1, 6), (3, 2, 2), (1, 1), (0, 3), (1,), (30, 24)),
]
DTYPES = ["float32", "float32", "float64", "int64", "int64", "bool"]


class Differs(AssertionError):
    """A program gives on nodes another thing than its twin."""


class Told(Exception):
    """A statement has raised at its line the error of an operand: the first call of an operation asks its node."""


@dataclass(frozen=True)
class Program:
    """The statements of each thread, the meshes that are made before, and the seed of the generators."""

    seed: int
    meshes: tuple[Where, ...]
    threads: tuple[tuple[Statement, ...], ...]

    def header(self) -> list[str]:
        made = [f"m{i} = {MESHES[where][0].format(f'm{i}')}" for i, where in enumerate(self.meshes)]
        streams = [f"{name} = dt.Stream(node={node})" for name, node in STREAMS.items() if name in self.text()]
        return [*made, *streams, f"torch.manual_seed({self.seed})"]

    def text(self) -> str:
        parts = []
        for number, statements in enumerate(self.threads):
            lines = "\n".join(statement.code for statement in statements)
            parts.append(lines if len(self.threads) == 1 else f"# thread {number}\n{lines}")
        return "\n".join(parts)

    def script(self) -> str:
        lines = "\n".join([*self.header(), self.text()])
        return (
            "import torch, torch.nn.functional as F, disttensor as dt\n"
            f"with dt.init_master_worker(nodes={NODES}, threads=1):\n{textwrap.indent(lines, '    ')}"
        )


# ---- on nodes --------------------------------------------------------------------------------------------------------


class There:
    """Runs the lines of one thread of a program on nodes."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = dict(names)

    def run(self, statement: Statement, expected: Any, failing: bool) -> None:
        """Runs a statement. ``failing``: one of its operands has failed."""
        if statement.kind == "check":
            self.check(expected)
            return
        if statement.kind == "ask":
            found = self.asked(statement.args[0])
            if found != expected:
                raise Differs(f"{statement.code}: expected {expected}, found {found}")
            return
        try:
            exec(compile(statement.code, "<program>", "exec"), self.names)
        except Exception as error:
            if failing and type(error).__name__ == OUT_OF_RANGE:
                raise Told from error
            raise Differs(f"{statement.code}: raises {type(error).__name__}: {error}") from error
        if statement.kind == "wait" and not self.names[statement.args[0]].is_completed():
            raise Differs(f"{statement.code}: it is under way")

    def asked(self, name: str) -> object:
        try:
            return self.names[name].tolist()
        except (dt.errors.RanksDiffer, IndexError) as error:
            return type(error).__name__
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def check(self, expected: dict[str, list[Seen]]) -> None:
        """Compares all tensors: the geometry that the script knows, and the values on their nodes."""
        works: list[tuple[str, int, Any, Any]] = []
        for name, ranks in expected.items():
            x = self.names[name].detach()
            try:
                shards = x.shards()
            except TypeError:  # on a node
                shards = [x]
            if len(shards) != len(ranks):
                raise Differs(f"{name}: {len(shards)} shards, expected {len(ranks)}")
            for rank, (shard, wanted) in enumerate(zip(shards, ranks, strict=True)):
                if wanted != OUT_OF_RANGE:
                    known = (shard.dtype, tuple(shard.shape), shard.stride(), shard.storage_offset())
                    if known != wanted[:-1]:
                        raise Differs(f"{name}, rank {rank}: the script has {known}, expected {wanted[:-1]}")
                works.append((name, rank, dt.fetch(shard), wanted))
        for name, rank, work, wanted in works:
            error = work.exception()
            if error is not None:
                if type(error).__name__ != wanted:
                    raise Differs(f"{name}, rank {rank}: raises {type(error).__name__}: {error}") from error
            elif wanted == OUT_OF_RANGE:
                raise Differs(f"{name}, rank {rank}: {work.result().tolist()}, expected {wanted}")
            elif bits(work.result()) != wanted[-1]:
                values = torch.frombuffer(bytearray(wanted[-1]), dtype=wanted[0]).view(wanted[1])
                raise Differs(f"{name}, rank {rank}: {work.result().tolist()}, expected {values.tolist()}")


#: For each thread: its statements, the values that each one shows, and whether one of its operands has failed.
Expected = list[list[tuple[Statement, Any, bool]]]


def expectations(program: Program) -> Expected:
    """Returns the expectations of each thread's twin; statements that it refuses are left out."""
    found: Expected = []
    for statements in program.threads:
        twin, done = twin_of(program), []
        for statement in statements:
            used = [twin.names[name] for name in names_in(statement.code) if name in twin.names]
            failing = statement.kind in ("index", "index_fill_") or any(any(twin.failed(value)) for value in used)
            with contextlib.suppress(Refused):
                done.append((statement, twin.do(statement), failing))
        done.append((Statement("check", "# compare"), twin.do_check(Statement("check", "")), False))
        found.append(done)
    return found


def twin_of(program: Program) -> Twin:
    return Twin({where: MESHES[where][1] for where in program.meshes}, list(STREAMS), program.seed)


def play(program: Program) -> None:
    """Runs a program on the session's nodes. Raises Differs where these have another thing than the twin."""
    expected = expectations(program)
    names: dict[str, Any] = {"torch": torch, "F": F, "dt": dt}
    errors: list[BaseException] = []

    def thread(statements: list[tuple[Statement, Any, bool]]) -> None:
        there = There(names)
        try:
            for statement, wanted, failing in statements:
                there.run(statement, wanted, failing)
        except Told:
            pass
        except BaseException as error:
            errors.append(error)
        finally:
            there.names.clear()

    try:
        for line in program.header():
            exec(line, names)
        if len(expected) == 1:
            thread(expected[0])
        else:
            threads = [threading.Thread(target=thread, args=(statements,)) for statements in expected]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
    finally:
        names.clear()
        errors += unasked(any(failing for statements in expected for _, _, failing in statements))
    if errors:
        raise errors[0]


def unasked(failing: bool) -> list[BaseException]:
    """Waits for the nodes; returns what they tell then, except what fails where the twin fails and nobody asked."""
    try:
        dt.synchronize()
    except Exception as error:
        if not failing or type(error).__name__ != OUT_OF_RANGE:
            return [Differs(f"the end: raises {type(error).__name__}: {error}")]
    return []


def fails(program: Program) -> str:
    """Plays a program, and returns the difference in words; "" where there is none."""
    try:
        play(program)
    except Differs as error:
        return str(error)
    return ""


# ---- shorter ---------------------------------------------------------------------------------------------------------


def shorter(program: Program, seconds: float = 12.0) -> tuple[Program, str]:
    """The program without the statements that are not needed for a difference, and the difference."""
    text, end = fails(program), time.monotonic() + seconds
    if not text:
        return program, "(it did not come again)"
    program = replace(program, threads=tuple(tuple(s for s, _, _ in each) for each in expectations(program)))
    size = max(map(len, program.threads)) // 2 or 1
    while time.monotonic() < end:
        found = None
        for candidate in smaller(program, size):
            if time.monotonic() > end:
                break
            if why := fails(candidate):
                found, text = candidate, why
                break
        if found is not None:
            program = replace(found, threads=tuple(tuple(s for s, _, _ in each) for each in expectations(found)))
        elif size > 1:
            size //= 2
        else:
            break
    return program, text


def smaller(program: Program, size: int) -> Iterator[Program]:
    """The program without a thread, ``size`` statements in a row, or a statement of a body."""
    if len(program.threads) > 1:
        for i in range(len(program.threads)):
            yield replace(program, threads=program.threads[:i] + program.threads[i + 1 :])
    for t, statements in enumerate(program.threads):
        for end in range(len(statements), 0, -size):
            yield with_thread(program, t, statements[: max(end - size, 0)] + statements[end:])
        if size == 1:
            for i, statement in enumerate(statements):
                for body in without_one(statement.body):
                    changed = with_body(statement, body)
                    yield with_thread(program, t, (*statements[:i], changed, *statements[i + 1 :]))


def with_thread(program: Program, t: int, statements: Sequence[Statement]) -> Program:
    return replace(program, threads=(*program.threads[:t], tuple(statements), *program.threads[t + 1 :]))


def without_one(body: tuple[Statement, ...]) -> Iterator[tuple[Statement, ...]]:
    for i in reversed(range(len(body))):
        yield body[:i] + body[i + 1 :]


# ---- statements with a body ------------------------------------------------------------------------------------------


def names_in(text: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"\bv\d+\b", text)))


def record(graph: str, body: Sequence[Statement], gone: Iterable[str]) -> Statement:
    made = [name for statement in body for name in statement.out]
    read = [name for statement in body for name in names_in(statement.code) if name not in made]
    inputs, gone = tuple(dict.fromkeys(read)), tuple(name for name in gone if name in made)
    lines = [statement.code for statement in body] + ([f"del {', '.join(gone)}"] if gone else [])
    scope = [f"global {', '.join(made)}"] if made else []
    text = textwrap.indent("\n".join([*scope, *lines]), "    ")
    code = f"def f_{graph}():\n{text}\nf_{graph}()\n{graph} = dt.Graph()\nwith dt.graph({graph}): f_{graph}()"
    return Statement("record", code, (graph, inputs, gone), (), tuple(body))


def define(function: str, parameters: Sequence[str], body: Sequence[Statement], results: Sequence[str]) -> Statement:
    text = textwrap.indent("\n".join(statement.code for statement in body), "    ")
    code = f"@dt.graphed\ndef {function}({', '.join(parameters)}):\n{text}\n    return ({', '.join(results)},)"
    return Statement("define", code, (function, tuple(parameters), tuple(results)), (), tuple(body))


def with_body(statement: Statement, body: tuple[Statement, ...]) -> Statement:
    if statement.kind == "record":
        return record(statement.args[0], body, statement.args[2])
    function, parameters, results = statement.args
    return define(function, parameters, body, results)


# ---- programs of chance ----------------------------------------------------------------------------------------------

#: Views of ``a``, which has dimension ``d`` of size ``n``; ``k`` is less than that, ``j`` a small number.
VIEWS = [
    "{a}[{k}]", "{a}[{k}:]", "{a}[..., ::2]", "{a}[:, {j}:]", "{a}.t()", "{a}.transpose(0, {d})", "{a}.unsqueeze({d})",
    "{a}.squeeze()", "{a}.view(-1)", "{a}.flatten()", "{a}.unsqueeze(0).expand(3, *{a}.shape)", "{a}.diagonal()",
    "{a}.narrow({d}, 0, {k})", "{a}.select({d}, {k})", "{a}.chunk(2, {d})[0]", "{a}.split(2, {d})[-1]", "{a}.detach()",
    "{a}.transpose(-1, -2)", "{a}.movedim(0, {d})", "{a}.unflatten({d}, (2, -1))", "{a}.view_as({a})", "{a}[None]",
    "{a}.expand(2, -1)", "{a}.reshape(2, -1)", "{a}.contiguous()", "{a}.swapaxes({d}, -1)", "{a}.unbind({d})[{k}]",
]  # fmt: skip
#: New tensors.
ALONE = [
    "-{a}", "{a}.abs()", "{a} + {j}", "{a} * {j}", "{a} * 0.5", "{a}.remainder(5)", "{a}.clamp(-3, 3)", "{a}.clone()",
    "{a}.sum({d})", "{a}.sum()", "{a}.amax({d})", "{a}.cumsum({d})", "{a}.flip({d})", "{a}.roll({j}, {d})",
    "{a}.sort(dim={d}).values", "{a}.double()", "{a}.float()", "{a}.long()", "{a}.bool()", "{a} > {j}", "{a}.eq({j})",
    "{a}.logical_not()", "torch.zeros_like({a})", "torch.ones_like({a}, dtype=torch.float32)", "F.relu({a})",
    "{a}.masked_fill({a} > {j}, {k})", "{a}.repeat(2, 1)", "{a}.argmax({d})", "{a}.any()", "F.pad({a}, (1, 0))",
    "{a}.tril()", "{a}.max({d}).values", "{a}.numel() + {a}", "{a}.topk(1, {d}).indices",
]  # fmt: skip
#: New tensors of two.
BOTH = [
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.maximum({a}, {b})", "torch.where({a} > 0, {a}, {b})", "{a} == {b}",
    "torch.cat([{a}, {b}], {d})", "torch.stack([{b}, {a}])", "{a} @ {b}.to({a}.dtype)",
    "torch.add({a}, {b}, alpha={j})", "{a}.lt({b})", "torch.outer({a}, {b})", "torch.lerp({a}, {b}, 0.5)",
]  # fmt: skip
#: Expressions through which a gradient goes.
SMOOTH = [
    "{a} * {j}", "{a} + {j}", "-{a}", "{a}[{k}:]", "{a}.t()", "{a}.flatten()", "{a}.sum({d})", "{a}.flip({d})",
    "F.relu({a})", "{a}.cumsum({d})", "{a}.unsqueeze({d})", "{a}[..., ::2]", "{a}.clone()", "{a}.reshape(2, -1)",
    "{a}.double()", "{a}.masked_fill({a} > {j}, {k})", "{a}.select({d}, {k})", "{a}.expand(2, -1)",
]  # fmt: skip
SMOOTH_BOTH = ["{a} + {b}", "{a} * {b}", "{a} - {b}", "torch.cat([{a}, {b}], {d})", "torch.maximum({a}, {b})"]
#: Writes to ``x``, which is ``a`` or a view of it.
WRITES = [
    "{x}.add_({j})", "{x}.mul_(-1)", "{x}.fill_({j})", "{x}.zero_()", "{x}.clamp_(-3, 3)", "{x}.remainder_(5)",
    "{x}.neg_()", "{x}.logical_not_()", "{x}.masked_fill_({x} > {j}, {k})", "{x}.cumsum_({d})", "{x}.abs_()",
]  # fmt: skip
WRITES_BOTH = [
    "{x}.add_({b})", "{x}.sub_({b}, alpha={j})", "{x}.copy_({b})", "{x}.mul_({b}).clamp_(-5, 5)",
    "{x}.copy_({b}.flip(0))", "{x}.masked_fill_({b} > 0, {j})",
]  # fmt: skip
PARTS = ["{a}", "{a}", "{a}[{k}]", "{a}[{k}:]", "{a}.t()", "{a}[..., ::2]", "{a}.select({d}, {k})", "{a}.view(-1)"]
DRAWS = [
    "torch.randint(-4, 8, {shape}, device={dev})", "torch.randperm(6, device={dev})",
    "(torch.rand({shape}, device={dev}) * 8).floor()", "torch.randn({shape}, device={dev}).mul(2).round()",
    "torch.bernoulli(torch.full({shape}, 0.5, device={dev}))",
]  # fmt: skip
DRAWS_ALONE = ["F.dropout({a}, 0.5)", "torch.rand_like({a}).mul(8).floor()", "{a} + torch.randint_like({a}, 0, 8)"]
DRAWS_WRITE = ["{a}.bernoulli_(0.5)", "{a}.random_(0, 8)", "{a}.normal_().round_()"]
FACTORIES = [
    "torch.full({shape}, {j}, device={dev})", "torch.zeros({shape}, dtype=torch.float64, device={dev})",
    "torch.arange({n}, device={dev})", "torch.ones({shape}, device={dev})", "torch.eye(3, device={dev})",
    "torch.empty({shape}, device={dev}).fill_({j})",
]  # fmt: skip

COLLECTIVES = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute_ranks", "broadcast"]

#: How often each kind of statement is proposed: of a program, in the body of a graph, and where gradients are taken.
KINDS = {
    "view": 22, "alone": 10, "both": 10, "write": 18, "local": 8, "factory": 3, "draw": 5, "seed": 1, "at": 12,
    "copy": 14, "shard": 5, "from_shards": 4, "collective": 10, "begin": 3, "wait": 4, "reduce_": 6, "begin_": 3,
    "listed": 6, "agree_": 1, "index": 6, "index_fill_": 3, "gradients": 3, "record": 7, "replay": 16, "define": 3,
    "call": 7, "beside": 8, "join": 3, "drop": 4, "ask": 3, "check": 1, "coordinate": 1,
}  # fmt: skip
IN_GRAPHS = {
    "view": 14, "alone": 6, "both": 6, "write": 14, "local": 6, "factory": 2, "draw": 5, "seed": 1, "at": 12,
    "copy": 24, "shard": 4, "from_shards": 4, "collective": 12, "reduce_": 5, "listed": 4, "agree_": 1, "coordinate": 1,
}  # fmt: skip
WITH_GRADIENTS = {"smooth": 8, "at": 3, "copy": 4, "shard": 2, "from_shards": 2, "collective": 6, "begin": 2, "wait": 2}
#: Statements of a program, at least and at most, and tensors that it has at a time.
LENGTH, LIVE = (8, 26), 10
#: How often a statement of a kind is proposed before it is one of another kind.
TRIES = 3


class Chance:
    """Makes the program of a seed."""

    def __init__(self, seed: str, draws: bool = True) -> None:
        """``draws``: whether there are random numbers on nodes."""
        self.random = random.Random(seed)
        meshes = list(MESHES)
        self.random.shuffle(meshes)
        self.meshes = tuple(meshes[: self.random.randint(1, 4)])
        self.two = self.random.random() < 0.08  # threads, whose random numbers would come in any order
        self.draws = draws and not self.two
        self.seed = self.random.randrange(1000)
        self.number = 0
        self.twin = Twin({}, [], 0)
        self.pool: list[str] | None = None  #: the only tensors that statements may use; None for all

    def program(self) -> Program:
        threads = []
        for _ in range(2 if self.two else 1):
            self.twin = twin_of(Program(self.seed, self.meshes, ()))
            threads.append(tuple(self.statements()))
        return Program(self.seed, self.meshes, tuple(threads))

    def statements(self) -> list[Statement]:
        made: list[Statement] = []
        for _ in range(3):
            self.add(made, "local")
        for _ in range(self.random.randint(*LENGTH)):
            if len(self.twin.names) > LIVE:
                self.add(made, "drop")
            kinds = {kind: n for kind, n in KINDS.items() if self.draws or kind not in ("draw", "seed")}
            self.add(made, *self.random.choices(list(kinds), list(kinds.values()), k=6))
        for work in list(self.twin.works):
            self.propose(made, [self.waiting(work)])
        for i in range(len(self.meshes)):
            if not self.two and self.random.random() < 0.15:
                made.append(Statement("close", f"m{i}.close()"))
        return made

    def add(self, made: list[Statement], *kinds: str) -> None:
        """Adds statements of the first of these kinds that can be done."""
        for kind in kinds:
            for _ in range(TRIES):
                with contextlib.suppress(Refused, IndexError):
                    if self.propose(made, getattr(self, f"make_{kind}")()):
                        return

    def propose(self, made: list[Statement], statements: Sequence[Statement]) -> bool:
        restore = self.twin.snapshot() if len(statements) > 1 else None
        try:
            for statement in statements:
                self.twin.do(statement)
        except Refused:
            if restore is not None:
                restore()
            return False
        made += statements
        return True

    # ---- names -------------------------------------------------------------------------------------------------------

    def new(self, letter: str = "v") -> str:
        self.number += 1
        return f"{letter}{self.number}"

    def names(self) -> list[str]:
        return [name for name in self.twin.names if self.pool is None or name in self.pool]

    def name(self, good: Callable[[Value], object] = lambda value: True) -> str:
        """A tensor, rather a late one."""
        names = [name for name in self.names() if good(self.twin.names[name])]
        if not names:
            raise Refused("no such tensor")
        return self.random.choice(names[-5:] if self.random.random() < 0.5 else names)

    def on_mesh(self) -> str:
        return self.name(lambda value: value.where.dims)

    def place(self) -> tuple[Where, str]:
        """A mesh or a node, and its device in a script."""
        if self.random.random() < 0.6:
            i = self.random.randrange(len(self.meshes))
            return self.meshes[i], f"m{i}.device"
        node = self.random.randrange(NODES)
        return Where((node,)), f'"node:{node}"'

    def mesh(self) -> tuple[Where, str]:
        i = self.random.randrange(len(self.meshes))
        return self.meshes[i], f"m{i}"

    def text(self, template: str, name: str | None = None, other: str | None = None) -> str:
        shape = tuple(self.twin.names[name].shards[0].shape) if name else ()
        d = self.random.randrange(max(len(shape), 1))
        k = self.random.randrange(max(shape[d] if shape else 1, 1))
        j = self.random.randrange(-2, 4)
        return template.format(a=name, b=other, d=d, k=k, j=j, x="{x}", shape="{shape}", n=12, dev="{dev}")

    # ---- kinds -------------------------------------------------------------------------------------------------------

    def each(self, expression: str, *names: str) -> list[Statement]:
        out = self.new()
        return [Statement("each", f"{out} = {expression}", (expression, names, Where(())), (out,))]

    def make_view(self) -> list[Statement]:
        name = self.name()
        return self.each(self.text(self.random.choice(VIEWS), name), name)

    def make_alone(self) -> list[Statement]:
        name = self.name()
        return self.each(self.text(self.random.choice(ALONE), name), name)

    def pair(self) -> tuple[str, str]:
        name = self.name()
        where = self.twin.names[name].where
        return name, self.name(lambda value: value.where == where)

    def make_both(self) -> list[Statement]:
        name, other = self.pair()
        return self.each(self.text(self.random.choice(BOTH), name, other), *dict.fromkeys((name, other)))

    def make_smooth(self) -> list[Statement]:
        name = self.name(lambda value: value.shards[0].requires_grad)
        where = self.twin.names[name].where
        if self.random.random() < 0.4:
            self.pool, pool = None, self.pool
            try:
                other = self.name(lambda value: value.where == where and value.shards[0].is_floating_point())
            finally:
                self.pool = pool
            return self.each(self.text(self.random.choice(SMOOTH_BOTH), name, other), *dict.fromkeys((name, other)))
        return self.each(self.text(self.random.choice(SMOOTH), name), name)

    def make_write(self) -> list[Statement]:
        name, other = self.pair()
        if self.random.random() < 0.45:
            return [self.writing(name, self.random.choice(WRITES_BOTH), other)]
        return [self.writing(name, self.random.choice(WRITES))]

    def writing(self, name: str, template: str, other: str | None = None) -> Statement:
        """A write to a tensor, or to a view of it."""
        part = self.text(self.random.choice(PARTS), name)
        expression = self.text(template, name, other).format(x=part)
        return Statement("write", expression, (expression, name, (other,) if other not in (None, name) else ()))

    def make_index(self) -> list[Statement]:
        index = self.name(lambda value: value.shards[0].dtype == torch.int64 and 0 < value.shards[0].dim() < 3)
        where = self.twin.names[index].where
        name = self.name(lambda value: value.where == where)
        out = self.new()
        return [Statement("index", f"{out} = {name}[{index}]", (name, index), (out,))]

    def make_index_fill_(self) -> list[Statement]:
        index = self.name(lambda value: value.shards[0].dtype == torch.int64 and value.shards[0].dim() == 1)
        where = self.twin.names[index].where
        name = self.name(lambda value: value.where == where)
        return [Statement("index_fill_", f"{name}.index_fill_(0, {index}, 1)", (name, index, 1))]

    def local(self, shape: tuple[int, ...], dtype: str) -> str:
        n = torch.Size(shape).numel()
        a, b, m = self.random.randrange(1, 4), self.random.randrange(0, 7), self.random.choice([3, 5, 7, 11])
        low = self.random.randrange(0, 4)
        return f"torch.arange({n}).mul({a}).add({b}).remainder({m}).sub({low}).view({shape}).to(torch.{dtype})"

    def make_local(self) -> list[Statement]:
        shape, dtype, out = self.random.choice(SHAPES), self.random.choice(DTYPES), self.new()
        where, device = self.place()
        if where.dims and self.random.random() < 0.7:
            texts = tuple(self.local(shape, dtype) for _ in where.nodes)
            code = f"{out} = dt.meshes.from_shards({device.removesuffix('.device')}, [{', '.join(texts)}])"
            return [Statement("local", code, (where, texts), (out,))]
        text = self.local(shape, dtype)
        return [Statement("local", f"{out} = {text}.to({device})", (where, (text,)), (out,))]

    def shape(self) -> tuple[int, ...]:
        return self.random.choice(SHAPES[:-1])

    def with_place(self, template: str) -> tuple[str, str, Where]:
        """An expression without operands in a script and for the twin, and where it is."""
        where, device = self.place()
        shape = self.shape()
        text = self.text(template)
        return text.format(shape=shape, dev=device), text.format(shape=shape, dev='"cpu"'), where

    def make_factory(self) -> list[Statement]:
        code, expression, where = self.with_place(self.random.choice(FACTORIES))
        out = self.new()
        return [Statement("each", f"{out} = {code}", (expression, (), where), (out,))]

    def make_draw(self) -> list[Statement]:
        out: tuple[str, ...] = (self.new(),)
        names: tuple[str, ...] = ()
        kind = self.random.random()
        if kind < 0.5:
            code, expression, where = self.with_place(self.random.choice(DRAWS))
        else:
            name = self.name(lambda value: value.shards[0].is_floating_point())
            names, where = (name,), self.twin.names[name].where
            if kind > 0.8:
                out = ()
            code = expression = self.text(self.random.choice(DRAWS_ALONE if out else DRAWS_WRITE), name)
        dims = [name for name, _ in where.dims]
        along = tuple(self.random.sample(dims, self.random.randint(0, len(dims)))) if where.dims else ()
        line = f"{out[0]} = {code}" if out else code
        if along:
            line = f"with dt.meshes.varying({', '.join(map(repr, along))}): {line}"
        return [Statement("random", line, (expression, names, where, along), out)]

    def make_seed(self) -> list[Statement]:
        seed = self.random.randrange(1000)
        return [Statement("seed", f"torch.manual_seed({seed})", (seed,))]

    def make_at(self) -> list[Statement]:
        name, out = self.on_mesh(), self.new()
        where = self.twin.names[name].where
        if self.random.random() < 0.4:
            rank = self.random.randrange(len(where.nodes))
            return [Statement("shard_of", f"{out} = {name}.shards()[{rank}]", (name, rank), (out,))]
        dims = self.random.sample(where.dims, self.random.randint(1, len(where.dims)))
        at = {dim: self.random.randrange(size) for dim, size in dims}
        text = ", ".join(f"{dim}={i}" for dim, i in at.items())
        return [Statement("at", f"{out} = {name}.at({text})", (name, at), (out,))]

    def make_copy(self) -> list[Statement]:
        name, out = self.name(), self.new()
        where = self.twin.names[name].where
        to, device = self.place()
        if where.dims and self.random.random() < 0.6:  # to a mesh with its dims
            fit = [i for i, m in enumerate(self.meshes) if {*where.dims} <= {*m.dims} and m != where]
            if fit:
                i = self.random.choice(fit)
                to, device = self.meshes[i], f"m{i}.device"
        steps = [Statement("copy", f"{out} = {name}.to({device})", (name, to), (out,))]
        if not where.dims and to.dims and self.random.random() < 0.3:
            code = f"{out} = dt.meshes.replicate({name}, {device.removesuffix('.device')})"
            steps = [Statement("copy", code, (name, to), (out,))]
        if self.random.random() < 0.35:  # a view that is kept of a copy that is not
            seen = self.new()
            template = self.random.choice(["{a}[0]", "{a}.t()", "{a}.view(-1)", "{a}[..., ::2]"])
            expression = template.format(a=out)
            steps.append(Statement("each", f"{seen} = {expression}", (expression, (out,), to), (seen,)))
            steps.append(Statement("drop", f"del {out}", (out,)))
        return steps

    def make_shard(self) -> list[Statement]:
        name, out = self.name(lambda value: not value.where.dims and value.shards[0].dim()), self.new()
        to, mesh = self.mesh()
        dim, size = self.random.choice(to.dims)
        shape = self.twin.names[name].shards[0].shape
        fit = [d for d, n in enumerate(shape) if n % size == 0]
        if not fit:
            raise Refused("no size fits")
        d = self.random.choice(fit)
        return [Statement("shard", f"{out} = dt.shard({name}, {mesh}, {dim}={d})", (to, name, {dim: d}), (out,))]

    def make_from_shards(self) -> list[Statement]:
        first = self.twin.names[self.name(lambda value: not value.where.dims)].shards[0]
        to, mesh = self.mesh()

        def alike(value: Value) -> bool:
            x = value.shards[0]
            return not value.where.dims and x.shape == first.shape and x.dtype == first.dtype

        names, out = tuple(self.name(alike) for _ in to.nodes), self.new()
        code = f"{out} = dt.meshes.from_shards({mesh}, [{', '.join(names)}])"
        return [Statement("from_shards", code, (to, names), (out,))]

    def over(self, name: str) -> tuple[str, ...]:
        where = self.twin.names[name].where
        dims = self.random.choice([where.dims, where.dims, *self.twin.views.get(where, [])])
        return tuple(self.random.sample([n for n, _ in dims], self.random.randint(1, len(dims))))

    def call_of_a_collective(self) -> tuple[str, str, tuple[str, ...], dict[str, Any], str]:
        name = self.on_mesh()
        over = self.over(name)
        what = self.random.choice(COLLECTIVES)
        if what != "all_reduce":
            over = over[:1]
        x = self.twin.names[name].shards[0]
        op = self.random.choice(["sum", "sum", "max", "min", "avg", "product"])
        d = self.random.randrange(max(x.dim(), 1))
        options: dict[str, Any] = {}
        match what:
            case "all_reduce":
                options = {"op": op}
            case "all_gather":
                options = {"dim": d}
            case "reduce_scatter":
                options = {"op": op, "dim": d}
            case "all_to_all":
                options = {"split": d, "cat": self.random.randrange(max(x.dim(), 1))}
            case "permute_ranks":
                options = {"by": self.random.randrange(-2, 4)}
            case "broadcast":
                options = {"src": self.random.randrange(3)}
        module = "dt" if what in ("all_reduce", "all_gather", "broadcast") else "dt.collectives"
        along = repr(over[0]) if len(over) == 1 else repr(over)
        given = ", ".join([name, *(f"{key}={value!r}" for key, value in options.items()), f"over={along}"])
        return what, name, over, options, f"{module}.{what}({given}"

    def make_collective(self) -> list[Statement]:
        what, name, over, options, call = self.call_of_a_collective()
        out = self.new()
        return [Statement("collective", f"{out} = {call})", (what, name, over, options), (out,))]

    def make_begin(self) -> list[Statement]:
        what, name, over, options, call = self.call_of_a_collective()
        work = self.new("w")
        return [Statement("begin", f"{work} = {call}, async_op=True)", (what, name, over, options), (work,))]

    def waiting(self, work: str) -> Statement:
        if self.twin.works[work][1] is None:
            return Statement("wait", f"{work}.wait()", (work,))
        out = self.new()
        return Statement("wait", f"{out} = {work}.result()", (work,), (out,))

    def make_wait(self) -> list[Statement]:
        return [self.waiting(self.random.choice(list(self.twin.works)))]

    def make_reduce_(self) -> list[Statement]:
        return self.reducing(False)

    def make_begin_(self) -> list[Statement]:
        return self.reducing(True)

    def reducing(self, begin: bool) -> list[Statement]:
        name = self.on_mesh()
        over, op = self.over(name), self.random.choice(["sum", "max", "min", "avg"])
        along = repr(over[0]) if len(over) == 1 else repr(over)
        code = f"dt.collectives.all_reduce_({name}, {op!r}, over={along}"
        if not begin:
            return [Statement("reduce_", f"{code})", (name, over, op, False))]
        work = self.new("w")
        return [Statement("reduce_", f"{work} = {code}, async_op=True)", (name, over, op, True), (work,))]

    def make_listed(self) -> list[Statement]:
        first = self.name(lambda value: not value.where.dims)
        x = self.twin.names[first].shards[0]
        names, nodes = [first], {self.twin.names[first].where}
        for name, value in self.twin.names.items():
            alike = value.shards[0].shape == x.shape and value.shards[0].dtype == x.dtype
            if alike and not value.where.dims and value.where not in nodes and (self.pool is None or name in self.pool):
                names.append(name)
                nodes.add(value.where)
        if len(names) < 2:
            raise Refused("too few")
        self.random.shuffle(names)
        joined = ", ".join(names)
        if self.random.random() < 0.6:
            op = self.random.choice(["sum", "max", "avg"])
            return [Statement("listed", f"dt.all_reduce([{joined}], {op!r})", ("all_reduce", tuple(names), op))]
        at = self.random.randrange(len(names))
        node = self.twin.names[names[at]].where.nodes[0]
        return [Statement("listed", f"dt.broadcast([{joined}], {node})", ("broadcast", tuple(names), at))]

    def make_agree_(self) -> list[Statement]:
        name = self.on_mesh()
        return [Statement("agree_", f"dt.meshes.agree_({name})", (name,))]

    def make_coordinate(self) -> list[Statement]:
        to, mesh = self.mesh()
        dim, out = self.random.choice(to.dims)[0], self.new()
        return [Statement("coordinate", f"{out} = {mesh}.coordinate({dim!r})", (to, dim), (out,))]

    def make_drop(self) -> list[Statement]:
        name = self.random.choice(self.names())
        return [Statement("drop", f"del {name}", (name,))]

    def make_ask(self) -> list[Statement]:
        name = self.name()
        return [Statement("ask", f"{name}.tolist()", (name,))]

    def make_check(self) -> list[Statement]:
        return [Statement("check", "# compare")]

    # ---- several statements ------------------------------------------------------------------------------------------

    def trial(self, kinds: dict[str, int], count: int, pool: list[str] | None) -> list[Statement]:
        """Returns statements that can be done now, one after the other. Nothing is done."""
        restore, kept = self.twin.snapshot(), self.pool
        self.pool = pool
        made: list[Statement] = []
        try:
            for _ in range(count):
                before = set(self.twin.names)
                self.add(made, *self.random.choices(list(kinds), list(kinds.values()), k=5))
                if self.pool is not None:
                    self.pool += [name for name in self.twin.names if name not in before]
        finally:
            restore()
            self.pool = kept
        return made

    def make_gradients(self) -> list[Statement]:
        leaves: list[str] = []
        made: list[Statement] = []
        restore, kept = self.twin.snapshot(), self.pool
        try:
            for _ in range(self.random.randint(1, 2)):
                name, leaf = self.name(lambda value: value.shards[0].is_floating_point()), self.new()
                code = f"{leaf} = {name}.detach().clone().requires_grad_()"
                if self.propose(made, [Statement("leaf", code, (name,), (leaf,))]):
                    leaves.append(leaf)
            self.pool = list(leaves)
            works = set(self.twin.works)
            for _ in range(self.random.randint(2, 7)):
                before = set(self.twin.names)
                self.add(made, *self.random.choices(list(WITH_GRADIENTS), list(WITH_GRADIENTS.values()), k=6))
                made_now = (item for item in self.twin.names.items() if item[0] not in before)
                self.pool += [name for name, value in made_now if value.shards[0].requires_grad]
            for work in set(self.twin.works) - works:
                self.propose(made, [self.waiting(work)])
            ends = [n for n, value in self.twin.names.items() if value.shards[0].requires_grad and n not in leaves][-2:]
            outs = tuple(self.new() for _ in leaves)
            sums = ", ".join(f"{name}.square().sum()" for name in ends)
            code = f"{', '.join(outs)}, = torch.autograd.grad([{sums}], [{', '.join(leaves)}])"
            code += "; " + "; ".join(
                f"{out} = {out}.clone(memory_format=torch.contiguous_format) + 0.0" for out in outs
            )
            if not ends or not self.propose(made, [Statement("grad", code, (tuple(ends), tuple(leaves)), outs)]):
                raise Refused("no gradient")
            for name, value in list(self.twin.names.items()):
                if value.shards[0].requires_grad:
                    self.propose(made, [Statement("drop", f"del {name}", (name,))])
            return made
        finally:
            restore()
            self.pool = kept

    def bodies(self) -> dict[str, int]:
        return {kind: n for kind, n in IN_GRAPHS.items() if self.draws or kind not in ("draw", "seed")}

    def make_record(self) -> list[Statement]:
        graph = self.new("g")
        body = self.trial(self.bodies(), self.random.randint(1, 7), None)
        made = [name for statement in body for name in statement.out if statement.kind != "drop"]
        dropped = {name for statement in body if statement.kind == "drop" for name in statement.args}
        gone = [name for name in made if name not in dropped and self.random.random() < 0.25]
        if not body or any(d not in made for d in dropped):
            raise Refused("nothing")
        statement = record(graph, body, gone)
        return [statement, self.replaying(graph), *self.changes(statement), self.replaying(graph)]

    def changes(self, recorded: Statement) -> list[Statement]:
        """Returns writes to the tensors that a graph reads, for after its first replay. Nothing is done."""
        graph, inputs, _ = recorded.args
        restore, made = self.twin.snapshot(), []
        try:
            for statement in (recorded, self.replaying(graph)):
                self.twin.do(statement)
            for name in inputs:
                with contextlib.suppress(Refused):
                    written = self.changing(name)
                    self.twin.do(written)
                    made.append(written)
        finally:
            restore()
        return made

    def changing(self, name: str) -> Statement:
        return self.writing(
            name, self.random.choice(["{x}.add_({j})", "{x}.mul_(-1)", "{x}.fill_({j})", "{x}.zero_()"])
        )

    @staticmethod
    def replaying(graph: str) -> Statement:
        return Statement("replay", f"{graph}.replay()", (graph,))

    def make_replay(self) -> list[Statement]:
        """A replay, mostly behind a write to a tensor that it reads."""
        graph = self.random.choice(list(self.twin.graphs))
        inputs = [name for name in self.twin.graphs[graph].inputs if name in self.twin.names]
        if not inputs or self.random.random() < 0.25:
            return [self.replaying(graph)]
        name = self.random.choice(inputs)
        return [
            self.writing(
                name, self.random.choice(["{x}.add_({j})", "{x}.mul_(-1)", "{x}.fill_({j})", "{x}.logical_not_()"])
            ),
            self.replaying(graph),
        ]

    def make_define(self) -> list[Statement]:
        function = self.new("f")
        given = list(dict.fromkeys(self.name() for _ in range(self.random.randint(1, 3))))
        body = self.trial(self.bodies(), self.random.randint(1, 5), list(given))
        parameters = [f"v{name[1:]}00" for name in given]
        for name, parameter in zip(given, parameters, strict=True):
            body = [renamed(statement, name, parameter) for statement in body]
        made = [name for statement in body for name in statement.out]
        results = self.random.sample(made, min(len(made), self.random.randint(1, 3)))
        dropped = {name for statement in body if statement.kind == "drop" for name in statement.args}
        if not results or not dropped.isdisjoint([*parameters, *results]):
            raise Refused("nothing")
        return [define(function, parameters, body, results), self.calling(function, given, len(results))]

    def calling(self, function: str, given: Sequence[str], results: int) -> Statement:
        outs = tuple(self.new() for _ in range(results))
        return Statement("call", f"{', '.join(outs)}, = {function}({', '.join(given)})", (function, tuple(given)), outs)

    def make_call(self) -> list[Statement]:
        function = self.random.choice(list(self.twin.functions))
        parameters, results, _ = self.twin.functions[function]
        originals = [self.twin.names.get(parameter[:-2]) for parameter in parameters]
        given = []
        for parameter, original in zip(parameters, originals, strict=True):
            alike = [
                name
                for name, value in self.twin.names.items()
                if original is not None
                and (value.where, value.shards[0].shape, value.shards[0].dtype)
                == (original.where, original.shards[0].shape, original.shards[0].dtype)
            ]
            given.append(self.random.choice([parameter[:-2], *alike]))
        return [self.calling(function, given, len(results))]

    # ---- streams -----------------------------------------------------------------------------------------------------

    def make_beside(self) -> list[Statement]:
        stream = self.random.choice(list(STREAMS))
        where = Where((STREAMS[stream],))
        name, other = self.name(lambda value: value.where == where), self.name(lambda value: value.where == where)
        both = self.random.random() < 0.5
        names = tuple(dict.fromkeys((name, other))) if both else (name,)
        expression, out = self.text(self.random.choice(BOTH if both else ALONE), name, other), self.new()
        code = f"with dt.stream({stream}): {out} = {expression}"
        return [Statement("beside", code, (stream, expression, names), (out,))]

    def make_join(self) -> list[Statement]:
        stream = self.random.choice(list(STREAMS))
        default = f"dt.streams.default_stream({STREAMS[stream]})"
        code = f"{stream}.wait_stream({default}); {default}.wait_stream({stream})"
        return [Statement("join", code, (stream,))]


def renamed(statement: Statement, name: str, other: str) -> Statement:
    """The statement with another name for a tensor."""

    def changed(value: Any) -> Any:
        if isinstance(value, str):
            return re.sub(rf"\b{name}\b", other, value)
        return tuple(map(changed, value)) if isinstance(value, tuple) else value

    return replace(statement, code=changed(statement.code), args=changed(statement.args), out=changed(statement.out))
