"""A home of templates: a queue of commands, and what the nodes behind it know by number."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from ..protocol import codec
from ..protocol import commands as c
from ..protocol.errors import DisttensorError
from .command_queue import CommandQueue
from .failures import Site

#: Templates between two clean-ups of a table.
GENERATION = 32_768


class Home:
    """A queue of commands, and the templates that were defined by it."""

    def __init__(self, outbox: CommandQueue, numbers: Iterator[int]) -> None:
        """``numbers``: those of templates, which no other home has on these nodes."""
        self.outbox = outbox
        #: held while something is made on the node that must be made once: a template, a lazy tensor
        self.lock = threading.RLock()
        self.templates: dict[object, int] = {}  #: numbers of templates, by operator and static arguments
        self.defined: dict[int, c.Define] = {}  #: templates that the node knows, by number
        self.generation = 0  #: the generation of templates; ``start_generation`` raises it
        self.permitted: set[str] = set()  #: operators that the node is known to have and to run
        self._numbers = numbers
        self._before: list[int] = []  #: the templates of the generation before

    def define(
        self,
        op: str,
        args: tuple[c.Spec, ...],
        kwargs: tuple[tuple[str, c.Spec], ...],
        outs: int,
        site: Site | None,
        foreseen: bool = False,
    ) -> int:
        """Returns the number of a template, which is defined on the node at its first use. ``foreseen``: the caller
        warns of what its calls warn of.

        The table is bounded: ``start_generation`` drops the templates of the generation before the last. Plans that
        name them were dropped one generation before, so no thread can still be about to use one.

        Raises DisttensorError for one that no message can carry, or whose calls none may be able to carry: a node that
        was not told of a template would fail at each of its calls, without a word of why.
        """
        key = (op, exact(args), exact(kwargs), outs, foreseen)
        with self.lock:
            number = self.templates.get(key)
            if number is None:
                number = next(self._numbers)
                define = c.Define(number, op, args, kwargs, outs, foreseen)
                _check_size(define)
                self.know(number, define)
                self.outbox.add(define, site)
                self.templates[key] = number
            return number

    def know(self, number: int, define: c.Define | None) -> None:
        """Notes that the node knows a template by this number, or (None) that it has forgotten it."""
        if define is None:
            self.defined.pop(number, None)
        else:
            self.defined[number] = define

    @property
    def generation_full(self) -> bool:
        """Returns whether ``start_generation`` is due."""
        return len(self.templates) >= GENERATION

    def start_generation(self) -> None:
        """Starts a generation of templates and drops those of the one before the last.

        The caller has dropped all plans.
        """
        with self.lock:
            gone, self._before = self._before, list(self.templates.values())
            self.templates.clear()
            self.generation += 1
            for number in gone:
                self.know(number, None)
            self.outbox.add(c.Forget(tuple(gone)))

    def forked(self) -> None:
        """Makes a forked child's copy unusable: nothing leaves, and nothing waits for a lock that a thread of the
        parent held."""
        self.lock = threading.RLock()
        self.outbox.forked()


#: The most bytes of a number in a Call, and of a ref, which is a distance.
_NUMBER, _REF = 9, 5
#: Bytes that are left in a message for what stands around a command.
_AROUND = 256


def _check_size(define: c.Define) -> None:
    """Raises DisttensorError for a template that does not fit into a message, or whose calls may not."""
    try:
        size = codec.size(define)
    except ValueError as e:  # a text that is none
        raise DisttensorError(f"{define.op}: an argument can't go to a node: {e}") from None
    size = max(size, _filling((*define.args, *(spec for _, spec in define.kwargs))) + _REF * define.outs)
    if size > codec.MAX_MESSAGE - _AROUND:
        raise DisttensorError(
            f"{define.op}: this call takes up to {size} bytes in a message, which may have {codec.MAX_MESSAGE}: it has "
            "too many arguments, or results. Give it some at a time; a list of numbers may be a tensor"
        )


def _filling(specs: Iterable[c.Spec]) -> int:
    """Returns the most bytes of what a Call has for the gaps in arguments."""
    size = 0
    for spec in specs:
        if isinstance(spec, c.Hole):
            size += _REF if spec.tensor else _NUMBER
        elif isinstance(spec, c.Items):
            size += _filling(spec.items)
    return size


def exact(value: object) -> object:
    """Returns a dictionary key that tells 1, 1.0 and True, 0.0 and -0.0 apart, and has NaN equal to itself."""
    if isinstance(value, tuple):
        return tuple(map(exact, value))
    if isinstance(value, c.Items):
        return ("items", *map(exact, value.items))
    if isinstance(value, float):
        return (float, value.hex())
    if isinstance(value, (complex, c.Complex)):
        return (type(value), value.real.hex(), value.imag.hex())
    return (type(value), value)
