"""Collectives between nodes, issued once by the script for all."""
