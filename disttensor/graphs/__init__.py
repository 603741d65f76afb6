"""Graphs: the commands of a step, recorded once and replayed by one command per node."""
