"""Mistakes, and how they are said."""
