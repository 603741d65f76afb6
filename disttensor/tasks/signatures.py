"""Names of types in the signatures of ``run``, ``submit``, ``map`` and ``actor``, from which checkers know what a call
gives.

A ParamSpec stands for all arguments of a function, and Python's types have no place for an option such as ``node=``
beside it. So each of these has several signatures: without options all arguments are checked. With options those by
position are, the first four of them; arguments by name, and whether any is missing, the node alone finds out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ParamSpec, TypeAlias, TypeVar

import torch

from ..futures.work import Work
from ..meshes.mesh import Mesh
from .calls import Each

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
T = TypeVar("T")

#: One node, and several.
Node: TypeAlias = int | str | torch.device
Nodes: TypeAlias = Iterable[int] | Mesh
#: An argument where a function wants a T: on one node, and on several.
Given: TypeAlias = T | Work[T]
GivenEach: TypeAlias = T | Work[T] | Each[T]
