"""The form of an encoded value, and its limits.

4 bytes      how many of the tensors beside it are parts of it, which are bytes
4 bytes each which ones
msgpack      the value; nothing where the last of these tensors has it
"""

from __future__ import annotations

import torch

#: Arrays of numpy and bytes of more bytes than this travel as tensors do.
INLINE = 64 << 10
#: What is not beside has this many bytes at most in a message; more of it travels as a tensor does.
MESSAGE = 512 << 10
#: The most bytes of a value, its tensors, arrays and large bytes apart.
MAX_DATA = 64 << 20
#: The most bytes of its arrays and large bytes.
MAX_BROUGHT = 4 << 30
#: The most objects that a value is made of, and of these the most that have others: lists, tuples, dicts and the like.
MAX_OBJECTS, MAX_CONTAINERS = 8 << 20, 1 << 20
#: How deep lists, tuples, dicts and objects may lie in one another.
MAX_DEPTH = 100

#: Extension values, for good: a new kind gets another number. From 32 on they are plain_types.py's.
TENSOR = 1
TUPLE, SET, FROZENSET, DICT, ORDERED, COUNTER, DEFAULT, DEQUE, RETURN_TYPE = range(2, 11)
ARRAY, LARGE_ARRAY, LARGE_BYTES, SCALAR, SCALAR_TEXT, OBJECT, REFERENCE = range(11, 18)

#: What a defaultdict may make.
FACTORIES = (None, list, dict, set, tuple, int, float, str, bytes, bool, complex, frozenset)
#: What torch's functions of several results return.
RETURN_TYPES = {
    name: kind for name, kind in vars(torch.return_types).items() if isinstance(kind, type) and issubclass(kind, tuple)
}
