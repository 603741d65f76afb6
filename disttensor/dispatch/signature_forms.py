"""Functions that issue calls of one form: written out of a table, for the operators that `run` meets.

`run` sorts each argument of each call anew. A form is how the arguments of one signature are sorted, a letter for each
(``LETTERS``): ``threshold_backward(grad, x, 0)`` has the form "TTN". Its function looks the letters' conditions up at
each call, and finds the plan under the key of `run`. A call of another form, or without a plan, goes to `run`,
as does a call whose plan does more than make one tensor or write the first argument.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..proxy.meta import Handle, Shared, new_ref
from ..proxy.proxy import DistributedTensor
from ..runtime.process.generated_code import function
from ..runtime.protocol import commands as c
from .call_site import here, users
from .inplace_and_multi import check_write
from .lazy_views import materialise
from .op_plan import INDEX, LIST, NUMBER, ONE, STATIC, WRITTEN, OpEntry

#: Calls of one form, given their arguments.
Form = Callable[[tuple[Any, ...]], Any]


class Letter(NamedTuple):
    """How an argument of one kind is sorted; ``a`` is the argument, ``h`` its handle, ``t`` its type."""

    applies: Callable[[Any, int], bool]  #: whether a value for an argument of this kind has the letter
    condition: str  #: the same of a call's argument, whose kind the operator has fixed; "" if it always holds
    key: str  #: what the plan's key has of it
    call: str  #: what the call has of it; "" for nothing


#: The order decides: the first that applies to an argument is its letter.
LETTERS: dict[str, Letter] = {
    "T": Letter(lambda v, kind: type(v) is DistributedTensor, "type({a}) is T", "({h} := {a}._h).meta",
                "out - ({h}.ref or materialise({h}))"),
    "O": Letter(lambda v, kind: v is None and kind != STATIC, "{a} is None", "None", ""),
    "N": Letter(lambda v, kind: kind <= NUMBER and type(v) in (float, int),
                "(({t} := type({a})) is float or {t} is int)", "{t}", "{a}"),
    "I": Letter(lambda v, kind: kind == INDEX and type(v) is int, "type({a}) is int", "(int, {a})", "{a}"),
    "L": Letter(lambda v, kind: kind == LIST and type(v) is list, "type({a}) is list", "tuple({a})", ""),
    "S": Letter(lambda v, kind: kind == STATIC, "", "{a}", ""),
}  # fmt: skip

#: Forms per operator: the first ones that are met.
MOST = 8

#: The function of a form. It is called by `dispatch`, so that the caller of its caller is torch's or the user's code.
_TEXT = """
def form(args):
    {names}, = args
    if {conditions}:
        {looked_up}
        if plan is not None and plan.kind == {kind}:
            out = new_ref()
            call = ({calls},)
            {result}
            frame = _frame(2)
            code = frame.f_code
            box = plan.place.outbox
            commands = box.commands
            commands += (
                Call(plan.template, out, call),
                (code, frame.f_lasti) if id(code) in users else here(3),
            )
            if len(commands) >= box.limit:
                plan.place.session.flush(box)
            return result
    return otherwise(args)
"""
#: The look-up of the plan; where an argument stands in the key that may have no hash, such as a number of ranks, `run`
#: has the words for it. (A ``try`` is an instruction more.)
_LOOKED_UP = "plan = get((None, {keys}))"
_TRIED = f"""try: {_LOOKED_UP}
        except TypeError: plan = None"""
_NEW = """meta = plan.shapes
            result = meta.make()
            result._h = Handle(out, meta)"""
_WRITTEN = """result = a0
            if type(h0) is Shared:
                check_write(result)"""


def letters_of(kinds: Sequence[int], args: tuple[Any, ...]) -> str | None:
    """Returns the form of a call's arguments; None if one of them has no letter."""
    found = [
        next((name for name, letter in LETTERS.items() if letter.applies(value, kind)), None)
        for value, kind in zip(args, kinds, strict=False)
    ]
    return None if None in found or found[0] != "T" else "".join(map(str, found))


def text_of(letters: str, written: bool) -> str:
    """Returns the source of the function of a form; ``written``: its calls write and return the first argument."""
    parts = [LETTERS[name] for name in letters]
    names = [{"a": f"a{i}", "h": f"h{i}", "t": f"t{i}"} for i in range(len(letters))]
    said = list(zip(parts, names, strict=True))
    looked_up = _TRIED if "L" in letters else _LOOKED_UP
    return _TEXT.format(
        names=", ".join(each["a"] for each in names),
        conditions=" and ".join(part.condition.format(**each) for part, each in said if part.condition),
        looked_up=looked_up.format(keys=", ".join(part.key.format(**each) for part, each in said)),
        calls=", ".join(part.call.format(**each) for part, each in said if part.call),
        kind=WRITTEN if written else ONE,
        result=_WRITTEN if written else _NEW,
    )


def form(entry: OpEntry, letters: str, written: bool, otherwise: Form) -> Form:
    """Returns the function that issues an operator's calls of a form, and leaves all others to ``otherwise``."""
    names = {
        "Call": c.Call, "Handle": Handle, "Shared": Shared, "T": DistributedTensor, "_frame": sys._getframe,
        "check_write": check_write, "get": entry.plans.get, "here": here, "materialise": materialise,
        "new_ref": new_ref, "otherwise": otherwise, "users": users,
    }  # fmt: skip
    made: Form = function("form", text_of(letters, written), names)
    return made


def learn(entry: OpEntry, args: tuple[Any, ...], written: bool, run: Callable[..., Any]) -> None:
    """Adds the form of a call to those of its operator, if it has one: the newest is tried first, and ``run`` last."""
    letters = letters_of(entry.kinds, args)
    if letters is None or letters in entry.known_forms or len(entry.known_forms) >= MOST:
        return
    entry.known_forms.add(letters)
    before = entry.forms.get(len(args), lambda args: run(entry, args, {}, None))
    entry.forms[len(args)] = form(entry, letters, written, before)
