"""Streams and events of nodes."""
