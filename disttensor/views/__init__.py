"""One-sided access: the script writes into a part of a tensor on any node, adds to it, or reads it. docs/TRANSFERS.md.

dt.views.put(table[10:20], rows)                   # from local memory, or from a tensor on any node
dt.views.accumulate(table[10:20], rows)            # added to what is there
rows = dt.views.get(table[10:20])                  # a local tensor
dt.views.get(table[::2], into=mine)                # or into a tensor, here or on any node
"""

from .views import accumulate, get, put

__all__ = ["accumulate", "get", "put"]
