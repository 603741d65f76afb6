"""The session: its nodes and their places, the current node, transfers, and the choice of data channels and kernels."""

from .current import is_initialized, node_count
from .node_context import current_node, node

__all__ = ["current_node", "is_initialized", "node", "node_count"]
