"""Strategies of hypothesis that are derived from the types of messages: what either end of a wire can say."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

from disttensor.runtime.host.output_options import Output
from disttensor.runtime.protocol import commands as c

i64 = st.integers(-(2**63), 2**63 - 1)
text = st.text(max_size=20)
floats = st.floats(allow_nan=False, width=64)
plain = st.one_of(st.none(), st.booleans(), i64, floats, text)
SCALARS: dict[object, st.SearchStrategy[Any]] = {
    bool: st.booleans(), int: i64, float: floats, str: text, bytes: st.binary(max_size=40), type(None): st.none()
}  # fmt: skip

#: Texts that ``Output`` takes for streams of nodes.
_STREAMS = st.sampled_from(["", "3", "0:1,1:2"])
OUTPUTS = st.builds(Output, st.booleans(), text, _STREAMS, _STREAMS, st.booleans())


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    if kind in SCALARS:
        return SCALARS[kind]
    if kind is c.Items:  # which may hold themselves
        return st.recursive(
            plain, lambda inner: st.builds(c.Items, st.lists(inner, max_size=4).map(tuple)), max_leaves=8
        )
    if kind is Output:
        return OUTPUTS
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(args)
    if origin is Annotated:
        return of_type(args[0])
    if origin is tuple:
        if args[-1] is Ellipsis:
            return st.lists(of_type(args[0]), max_size=4).map(tuple)
        return st.tuples(*map(of_type, args))
    if origin is list:
        return st.lists(of_type(args[0]), max_size=4)
    if origin is dict:
        return st.dictionaries(*map(of_type, args), max_size=4)
    if kind is msgspec.Raw:  # of messages that are JSON
        return st.sampled_from([msgspec.Raw(b"null"), msgspec.Raw(b'{"nodes":[]}')])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.builds(kind, *(of_type(f.type) for f in msgspec.structs.fields(kind)))
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple
        return st.builds(kind, *map(of_type, get_type_hints(kind).values()))
    assert origin is types.UnionType or args, f"no values of {kind} are known here"
    return st.one_of(*map(of_type, args))
