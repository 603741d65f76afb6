"""Pipelines: the stages of a module on places of their own. docs/PIPELINE.md."""

from .pipeline import Pipeline

__all__ = ["Pipeline"]
