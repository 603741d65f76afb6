"""Batches on their way to nodes."""
