"""Graphs of a node: recorded commands as programs, and the engines that replay these."""
