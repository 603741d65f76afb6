"""One-sided access: the script writes into a part of a tensor on any node, or reads it. docs/TRANSFERS.md.

dt.views.put(table[10:20], rows)                   # from local memory, or from a tensor on any node
rows = dt.views.get(table[10:20])                  # a local tensor
dt.views.get(table[::2], into=mine)                # or into a tensor, here or on any node
"""

from .views import get, put

__all__ = ["get", "put"]
