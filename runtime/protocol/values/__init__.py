"""Values that cross a wire without pickle: what functions on nodes return, and what queues and dictionaries hold.

Tensors go beside, by a data channel; so do arrays of numpy and bytes that are large, and what is large as a whole. The
rest is msgpack, with extension values for what that does not have. Nothing that comes can have code run: objects are of
types of Python's, numpy's and torch's own that are listed here, or of classes that the receiver has announced.
"""

from .announced import Announced, Unannounced, blueprint, is_announcable, name_of
from .decoding import decode, weight
from .encoding import encode, encoded_list
from .form import INLINE, MAX_BROUGHT, MAX_DATA, MAX_DEPTH

__all__ = [
    "INLINE", "MAX_BROUGHT", "MAX_DATA", "MAX_DEPTH", "Announced", "Unannounced", "blueprint", "decode", "encode",
    "encoded_list", "is_announcable", "name_of", "weight",
]  # fmt: skip
