"""From an operation on proxies to a command in a node's queue."""
