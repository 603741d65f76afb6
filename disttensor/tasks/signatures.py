"""Names of types in the signatures of ``run``, ``submit``, ``map`` and ``actor``, from which checkers know what a call
gives.

A ParamSpec stands for all arguments of a function, and Python's types have no place for an option such as ``node=``
beside it. So each of these has several signatures. Without options all arguments are checked, and Works are taken by
position only. With options the first three by position are checked; those by name, and whether any is missing, are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Concatenate, ParamSpec, TypeAlias, TypeVar

import torch

from ..futures.work import Work
from ..meshes.mesh import Mesh
from .calls import Each
from .sending import SharedArgument

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
T = TypeVar("T")

#: A function that gives an R, by its first arguments. Into the first form mypy can fit a lambda.
Takes1: TypeAlias = Callable[[A], R] | Callable[Concatenate[A, ...], R]
Takes2: TypeAlias = Callable[[A, B], R] | Callable[Concatenate[A, B, ...], R]
Takes3: TypeAlias = Callable[[A, B, C], R] | Callable[Concatenate[A, B, C, ...], R]
#: One node, and several.
Node: TypeAlias = int | str | torch.device
Nodes: TypeAlias = Iterable[int] | Mesh
#: An argument where a function wants a T: on one node, and on several.
Given: TypeAlias = T | Work[T] | SharedArgument[T]
GivenEach: TypeAlias = T | Work[T] | SharedArgument[T] | Each[T]
