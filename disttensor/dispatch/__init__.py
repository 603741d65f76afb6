"""Turns an operation on proxies into a command in a node's queue."""
